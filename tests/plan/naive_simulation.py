"""docs/plan.md sections 2, 3, 4 and 6 read once more, from the page alone, on the plan's JSON object: nothing of the package is imported.

Nothing is precomputed or cached and nothing is fast: ranks run whatever they can run until nothing is left; bytes in flight are counted
anew at every action. Symbols as on the page: T = tp, p = pp, v = virtual stages, R = lanes, P = cp, h, H, G, d, f, V; e = 2 bytes.
"""

import hashlib
import json
import math

LEVELS = ("none", "selective", "mlp", "full")
UNITS = {"fp32": 1, "bf16": 1, "fp8_current": 16, "fp8_block": 128}
KINDS = ("ring", "all_gather", "ulysses", "2d")


# ------------------------------------------------------------------------------------------------- section 3: seconds
def heads_of(doc):
    """(G', H'): kv heads and heads of one rank."""
    T = doc["layout"]["tp"]
    return max(1, doc["model"]["kv_heads"] // T), doc["model"]["heads"] // T


def split_of(doc, P):
    """A of kind 2d."""
    G1, _ = heads_of(doc)
    most = min(P, doc["layout"]["lanes_per_node"])
    return max(A for A in (2**k for k in range(G1.bit_length())) if G1 % A == 0 and most >= A)


def kind_is_legal(doc, kind, P):
    G1, H1 = heads_of(doc)
    if P == 1:
        return kind == "none"
    return {
        "none": False,
        "ring": True,
        "all_gather": True,
        "ulysses": G1 % P == 0 and H1 % P == 0,
        "2d": 1 < split_of(doc, P) < P,
    }[kind]


def layer_parts(doc, m):
    """Seconds of one layer on one rank: linear forward, the MLP's share of it, attention forward, exposed cp communication, tp."""
    shape, hw, T, P, e = doc["model"], doc["profile"], doc["layout"]["tp"], m["cp"], 2
    h, H, G, d, f = shape["hidden"], shape["heads"], shape["kv_heads"], shape["head_dim"], shape["ffn"]
    L = sum(m["padded"])
    t = L / P
    g = hw["gemm_flops"] * t / (t + hw["gemm_half_tokens"])
    mlp = 2 * t * (3 if shape["gated"] else 2) * h * f / T / g
    linear = 2 * t * h * d * (2 * H + 2 * G) / T / g + mlp
    G1, H1 = heads_of(doc)
    kind = m["cp_comm"]
    A = split_of(doc, P) if kind == "2d" else 1
    r = P // A
    attention = 0.0
    for length in m["padded"]:
        x = length / P if kind == "ring" else length / r if kind == "2d" else length
        attention += 2 * d * (H / T) * length * length / P / (hw["attention_flops"] * x / (x + hw["attention_half_length"]))
    nodes = doc["layout"]["lanes_per_node"]
    wire = hw["node_bytes"] if m["lane"] // nodes == (m["lane"] + P - 1) // nodes else hw["net_bytes"]
    overlapped = exposed = 0.0
    if kind == "ring":
        overlapped = 6 * L * G1 * d * e * (P - 1) / P / wire + 2 * P * hw["ring_step_seconds"]
    elif kind == "all_gather":
        exposed = 6 * L * G1 * d * e * (P - 1) / P / wire + 8 * hw["node_latency"]
    elif kind == "ulysses":
        exposed = 4 * (L / P) * (H1 + G1) * d * e * (P - 1) / P / wire + 8 * hw["node_latency"]
    elif kind == "2d":
        exposed = 4 * (L / P) * (H1 + G1) * d * e * (A - 1) / A / hw["node_bytes"] + 8 * hw["node_latency"]
        overlapped = 6 * L * (G1 / A) * d * e * (r - 1) / r / wire + 2 * r * hw["ring_step_seconds"]
    exposed += max(0.0, overlapped - 3.5 * attention)
    tp = hw["tp_exposed"] * 8 * t * h * e * (T - 1) / T / hw["node_bytes"] if T > 1 else 0.0
    return {"linear": linear, "mlp": mlp, "attention": attention, "exposed": exposed, "tp": tp, "g": g}


def stage_seconds(doc, m):
    """Forward + backward of every stage, at lane speed 1."""
    part, hw, shape = layer_parts(doc, m), doc["profile"], doc["model"]
    level, again = m["recompute"]["level"], m["recompute"]["layers"]
    extra = {
        "none": 0.0,
        "selective": 0.02 * 3 * part["linear"],
        "mlp": part["mlp"],
        "full": part["linear"] + part["attention"] + 0.5 * part["exposed"],
    }[level]
    stages = []
    for layers in doc["stage_layers"]:
        one = 3 * part["linear"] + 3.5 * part["attention"] + part["exposed"] + part["tp"] + hw["layer_overhead_seconds"]
        stages.append(layers * (one + extra * again / layers))
    stages[-1] += 6 * (sum(m["padded"]) / m["cp"]) * shape["hidden"] * shape["vocab"] / doc["layout"]["tp"] / part["g"]
    return stages


def speed_of(doc, m):
    return min([doc["lane_speed"][lane] for lane in range(m["lane"], m["lane"] + m["cp"])]) if doc["lane_speed"] else 1.0


# --------------------------------------------------------------------------------------------------- section 3: bytes
def static_bytes(doc, stage, sizes):
    shape, T, R = doc["model"], doc["layout"]["tp"], doc["layout"]["lanes"]
    h, d, V, last = shape["hidden"], shape["head_dim"], shape["vocab"], len(doc["stage_layers"]) - 1
    one = h * d * (2 * shape["heads"] + 2 * shape["kv_heads"]) + (3 if shape["gated"] else 2) * h * shape["ffn"] + 2 * h
    parameters = doc["stage_layers"][stage] * one
    parameters += V * h if stage == 0 else 0
    parameters += (h if stage == last else 0) + (V * h if stage == last and not (shape["tied"] and last == 0) else 0)
    W = parameters / T
    return W * (2 + 4 + (1 if doc["precision"].startswith("fp8") else 0)) + 12 * W / R + 0.5e9 * sizes


def group_sizes(doc):
    return len({m["cp"] for m in doc["microbatches"]} - {1})


def token_bytes(doc, level):
    """Stored bytes of one local token on one layer."""
    shape = doc["model"]
    h, f, kv = shape["hidden"], shape["ffn"], 4 * shape["hidden"] * shape["kv_heads"] / shape["heads"]
    gate = 0 if shape["gated"] else 2 * f
    count = {"none": 12 * h + kv + 6 * f - gate, "selective": 8 * h + kv + 4 * f - gate, "mlp": 10 * h + kv, "full": 2 * h}[level]
    return count * (2 if doc["precision"] == "fp32" else 1) / doc["layout"]["tp"]


def stored_bytes(doc, m, stage):
    t, layers = sum(m["padded"]) / m["cp"], doc["stage_layers"][stage]
    level = m["recompute"]["level"]
    return sum(t * token_bytes(doc, level if layer < m["recompute"]["layers"] else "none") for layer in range(layers))


def passing_bytes(doc, m, stage):
    """Transient and loss: there only while the microbatch runs."""
    t = sum(m["padded"]) / m["cp"]
    transient = t * token_bytes(doc, "none") if m["recompute"]["level"] == "full" else 0.0
    last = stage == len(doc["stage_layers"]) - 1
    return transient + (min(t, doc["profile"]["loss_chunk"]) * doc["model"]["vocab"] * 6 / doc["layout"]["tp"] if last else 0.0)


def microbatch_bytes(doc, m):
    return max(stored_bytes(doc, m, stage) + passing_bytes(doc, m, stage) for stage in range(len(doc["stage_layers"])))


def budget(doc, stage, sizes):
    return doc["profile"]["usable_fraction"] * doc["profile"]["memory_bytes"] - static_bytes(doc, stage, sizes)


# -------------------------------------------------------------------------------------------- section 6: action lists
def dense_list(doc, stage):
    """Section 6 as it stands: (kind, slot, chunk) of one stage for the slots 0..S-1."""
    p, v = doc["layout"]["pp"], doc["layout"]["virtual_stages"]
    S = max(m["slot"] for m in doc["microbatches"]) + 1
    if v > 1:
        while S % p:
            S += 1
        w = min(S * v, 2 * (p - 1 - stage) + (v - 1) * p)
    else:
        w = min(p - 1 - stage, S)

    def place(k):
        return ((k // (p * v)) * p + k % p, (k % (p * v)) // p) if v > 1 else (k, 0)

    actions = [("F", *place(k)) for k in range(w)]
    for k in range(S * v):
        if w + k < S * v:
            actions.append(("F", *place(w + k)))
        slot, chunk = place(k)
        actions.append(("B", slot, v - 1 - chunk))
    return actions


def own_lists(doc):
    """{(lane, stage): what this rank does}: the dense list without the slots that the lane takes no part in."""
    here = {(m["slot"], lane): number for number, m in enumerate(doc["microbatches"]) for lane in range(m["lane"], m["lane"] + m["cp"])}
    lists = {}
    for stage in range(doc["layout"]["pp"]):
        dense = dense_list(doc, stage)
        for lane in range(doc["layout"]["lanes"]):
            lists[lane, stage] = [(kind, here[slot, lane], chunk) for kind, slot, chunk in dense if (slot, lane) in here]
    return lists


def source(doc, kind, number, stage, chunk):
    """(kind, microbatch, stage, chunk) whose output an action needs, or None."""
    p, v = doc["layout"]["pp"], doc["layout"]["virtual_stages"]
    depth = chunk * p + stage  # model chunks in the order of a token's way through the model
    if kind == "F":
        return None if depth == 0 else ("F", number, (depth - 1) % p, (depth - 1) // p)
    return ("F", number, stage, chunk) if depth == p * v - 1 else ("B", number, (depth + 1) % p, (depth + 1) // p)


def simulate(doc, rng):
    """(makespan, {(kind, microbatch, stage, chunk): (begin, end)}). In every round the ranks are asked in another random order.

    Without pipelines each (F, B) pair of a microbatch is one piece of work. AssertionError when ranks wait for ever.
    """
    micro, v = doc["microbatches"], doc["layout"]["virtual_stages"]
    todo = own_lists(doc)
    free = dict.fromkeys(todo, 0.0)
    times = {}
    seconds = [[one / speed_of(doc, m) / v for one in stage_seconds(doc, m)] for m in micro]
    ranks = list(todo)
    while any(todo.values()):
        before = len(times)
        rng.shuffle(ranks)
        for lane, stage in ranks:
            if not todo[lane, stage]:
                continue
            head = todo[lane, stage][0]
            kind, number, chunk = head
            members = [(other, stage) for other in range(micro[number]["lane"], micro[number]["lane"] + micro[number]["cp"])]
            if any(not todo[rank] or todo[rank][0] != head for rank in members):
                continue
            needs = source(doc, kind, number, stage, chunk)
            if needs is not None and needs not in times:
                continue
            begin = max([free[rank] for rank in members] + ([times[needs][1]] if needs is not None else []))
            end = begin + seconds[number][stage] * (1 if kind == "F" else 2.2) / 3.2
            times[kind, number, stage, chunk] = (begin, end)
            for rank in members:
                free[rank] = end
                todo[rank].pop(0)
        assert len(times) > before, "ranks wait for each other for ever"
    return max(free.values()), times


def peaks(doc):
    """Most activation bytes at one time on each stage: at every action of every rank, all that is then in flight summed anew."""
    micro, p, v = doc["microbatches"], doc["layout"]["pp"], doc["layout"]["virtual_stages"]
    stored = [[stored_bytes(doc, m, stage) for stage in range(p)] for m in micro]
    passing = [[passing_bytes(doc, m, stage) for stage in range(p)] for m in micro]
    worst = [0.0] * p
    for stage, actions in {(stage, tuple(actions)) for (_, stage), actions in own_lists(doc).items()}:  # lanes that do the same, once
        in_flight = dict.fromkeys((number for _, number, _ in actions), 0)  # chunks whose forward has run and whose backward hasn't ended
        for kind, running, _ in actions:
            in_flight[running] += kind == "F"
            held = math.fsum(chunks * stored[number][stage] / v for number, chunks in in_flight.items() if chunks)
            worst[stage] = max(worst[stage], held + passing[running][stage])
            in_flight[running] -= kind == "B"
        assert not any(in_flight.values())
    return worst


# ------------------------------------------------------------------------------------------------ section 4: the bound
def lower_bound(doc):
    R, v = doc["layout"]["lanes"], doc["layout"]["virtual_stages"]
    hw = doc["profile"]
    ideal = {**doc, "profile": {**hw, "gemm_half_tokens": 0.0, "layer_overhead_seconds": 0.0}}
    speeds = doc["lane_speed"] or [1.0] * R
    shape, T = doc["model"], doc["layout"]["tp"]
    h, d, f = shape["hidden"], shape["head_dim"], shape["ffn"]
    token = 2 * (h * d * (2 * shape["heads"] + 2 * shape["kv_heads"]) + (3 if shape["gated"] else 2) * h * f) / T  # FLOPs of one layer
    ramp = hw["gemm_half_tokens"] / hw["gemm_flops"]
    fixed = [layers * (hw["layer_overhead_seconds"] + 3 * token * ramp) for layers in doc["stage_layers"]]
    fixed[-1] += 6 * h * shape["vocab"] / T * ramp
    stages = range(len(fixed))
    work = [[] for _ in stages]
    tau = [[] for _ in stages]
    for length in doc["lengths"]:
        least_work, least_tau = [math.inf] * len(fixed), [math.inf] * len(fixed)
        for m in alone_choices(doc, length):
            heard = stage_seconds(ideal, m)
            exposed = layer_parts(ideal, m)["exposed"]
            again = 0.5 * m["recompute"]["layers"] if m["recompute"]["level"] == "full" else 0.0
            for stage in stages:
                silent = heard[stage] - exposed * (doc["stage_layers"][stage] + again)
                least_work[stage] = min(least_work[stage], m["cp"] * silent)
                least_tau[stage] = min(least_tau[stage], heard[stage])
        for stage in stages:
            work[stage].append(least_work[stage])
            tau[stage].append((fixed[stage] + least_tau[stage]) / max(speeds))
    bound = fill = 0.0
    for stage in stages:
        bound = max(bound, max(fixed[stage] / max(speeds) + math.fsum(work[stage]) / math.fsum(speeds), max(tau[stage])) + fill)
        fill += min(tau[stage]) / v
    return bound


def alone_choices(doc, length, sizes_of=lambda P: int(P > 1)):
    """Microbatches of one document alone, unpadded, at lane 0: every P, kind and level with the least layer count that fits."""
    for P in (2**k for k in range(doc["layout"]["lanes"].bit_length())):
        for level in LEVELS:
            for layers in (0,) if level == "none" else range(1, min(doc["stage_layers"]) + 1):
                m = {"slot": 0, "lane": 0, "cp": P, "padded": [length], "recompute": {"level": level, "layers": layers}, "cp_comm": "none"}
                needs = [stored_bytes(doc, m, s) + passing_bytes(doc, m, s) for s in range(len(doc["stage_layers"]))]
                if all(need <= budget(doc, s, sizes_of(P)) * (1 + 1e-12) for s, need in enumerate(needs)):
                    yield from ({**m, "cp_comm": kind} for kind in ("none", *KINDS) if kind_is_legal(doc, kind, P))
                    break


# ----------------------------------------------------------------------------------------------- section 2: invariants
def first_broken(doc):
    """The number of the first invariant that a plan's JSON object breaks (0: it makes no sense as a whole), or None."""
    checks = (sensible, documents_once, groups_aligned, lanes_once, padding, memory_fits, None, recompute_legal, predictions, communication)
    for number, check in enumerate(checks):
        if check is not None and not check(doc):
            return number
    return None


def sensible(doc):
    layout, model, hw = doc["layout"], doc["model"], doc["profile"]
    T, p, v = layout["tp"], layout["pp"], layout["virtual_stages"]
    if doc["version"] != 1 or doc["step"] < 0 or not doc["lengths"] or any(length < 1 for length in doc["lengths"]):
        return False
    if min(layout["lanes"], layout["lanes_per_node"], T, p, v) < 1 or min(value for value in model.values() if type(value) is int) < 1:
        return False
    if doc["schedule"] != ("none" if p == 1 else "1f1b" if v == 1 else "interleaved") or (p == 1 and v > 1):
        return False
    if len(doc["stage_layers"]) != p or sum(doc["stage_layers"]) != model["layers"] or min(doc["stage_layers"]) < v:
        return False
    if doc["lane_speed"] and (len(doc["lane_speed"]) != layout["lanes"] or min(doc["lane_speed"]) <= 0):
        return False
    if model["heads"] % model["kv_heads"] or model["heads"] % T or (model["kv_heads"] % T and T % model["kv_heads"]):
        return False
    free = ("gemm_half_tokens", "attention_half_length", "node_latency", "ring_step_seconds", "layer_overhead_seconds", "tp_exposed")
    if any(value < 0 or (value == 0 and name not in (*free, "reduce_overlap")) for name, value in hw.items()):
        return False
    return hw["usable_fraction"] <= 1 and hw["reduce_overlap"] <= 1


def documents_once(doc):
    seen = sorted(number for m in doc["microbatches"] for number in m["documents"])
    return seen == list(range(len(doc["lengths"]))) and all(m["documents"] for m in doc["microbatches"])


def groups_aligned(doc):
    sizes = {2**k for k in range(40)}
    return all(
        m["cp"] in sizes and m["lane"] >= 0 and m["lane"] % m["cp"] == 0 and m["lane"] + m["cp"] <= doc["layout"]["lanes"]
        for m in doc["microbatches"]
    )


def lanes_once(doc):
    cells = [(m["slot"], m["lane"] + k) for m in doc["microbatches"] for k in range(m["cp"])]
    return len(cells) == len(set(cells)) and all(slot >= 0 for slot, _ in cells)


def padding(doc):
    if doc["unit"] != UNITS[doc["precision"]]:
        return False
    multiple = doc["unit"] * (doc["layout"]["tp"] if doc["layout"]["sequence_parallel"] else 1)
    for m in doc["microbatches"]:
        if len(m["padded"]) != len(m["documents"]) or sum(m["padded"]) % m["cp"] or sum(m["padded"]) // m["cp"] % multiple:
            return False
        for number, padded in zip(m["documents"], m["padded"], strict=True):
            if padded < doc["lengths"][number] or (m["cp"] > 1 and padded % (2 * m["cp"])):
                return False
    return True


def recompute_fits(doc, m):
    level, layers = m["recompute"]["level"], m["recompute"]["layers"]
    return layers == 0 if level == "none" else 1 <= layers <= min(doc["stage_layers"])


def memory_fits(doc):
    defined = {**doc, "microbatches": [m for m in doc["microbatches"] if recompute_fits(doc, m)]}
    most = peaks(defined) if defined["microbatches"] else [0.0] * len(doc["stage_layers"])
    # A plan may need its budget to the last byte, and sums in another order differ in their last bits.
    return all(peak <= budget(doc, stage, group_sizes(doc)) * (1 + 1e-9) for stage, peak in enumerate(most))


def recompute_legal(doc):
    return all(recompute_fits(doc, m) for m in doc["microbatches"])


def predictions(doc):
    for m in doc["microbatches"]:
        if kind_is_legal(doc, m["cp_comm"], m["cp"]):
            seconds, count = max(stage_seconds(doc, m)), microbatch_bytes(doc, m)
            if abs(m["seconds"] - seconds) > 1e-4 * seconds or abs(m["bytes"] - count) > 1e-4 * count + 1:
                return False
    return True


def communication(doc):
    return all(kind_is_legal(doc, m["cp_comm"], m["cp"]) for m in doc["microbatches"])


# ------------------------------------------------------------------------------------------------------ section 1: hash
def plan_hash(doc):
    kept = json.loads(json.dumps({key: value for key, value in doc.items() if key not in ("hash", "predicted")}))
    for m in kept["microbatches"]:
        del m["seconds"], m["bytes"]
    nine = lambda value: float(f"{value:.9g}") if isinstance(value, float) else value  # noqa: E731
    kept["profile"] = {key: nine(value) for key, value in kept["profile"].items()}
    kept["lane_speed"] = [nine(value) for value in kept["lane_speed"]]
    return hashlib.sha256(json.dumps(kept, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()).hexdigest()
