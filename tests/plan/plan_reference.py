"""A second, slow and literal reading of docs/plan.md to hold the package against, and builders of configs and random plans."""

import hashlib
import json
import random
from dataclasses import replace

from megadcp.config.schema import (
    ClusterConfig,
    Config,
    DataConfig,
    GemmFlops,
    HardwareConfig,
    ModelConfig,
    ParallelConfig,
    PlanConfig,
    PrecisionConfig,
    RunConfig,
)
from megadcp.plan.basis import Basis, basis_from
from megadcp.plan.cost import CostModel
from megadcp.plan.memory import MemoryModel
from megadcp.plan.packing import pad
from megadcp.plan.step_plan import Microbatch, Recompute, StepPlan, round_bytes, round_seconds

H200 = HardwareConfig(
    "h200", GemmFlops(50e12, 480e12, 720e12), 512, 384e12, 600, 370e9, 45e9, 10e-6, 15e-6, 200e-6, 0.5, 141e9, 0.90, 4096, 8, 300e9, 0.7, 4e12
)
GPT_1B = ModelConfig(layers=16, hidden=2048, heads=32, kv_heads=8, head_dim=64, ffn=8192, vocab=128256)
GPT_8B = ModelConfig(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256)
SMALL = ModelConfig(layers=6, hidden=256, heads=8, kv_heads=4, head_dim=32, ffn=640, vocab=1000)


def config(model=GPT_1B, precision="bf16", lanes=1, hardware=H200, **parallel):
    """A run on `lanes` lanes; further keywords go to ParallelConfig."""
    parallel = ParallelConfig(**parallel)
    world = lanes * parallel.tp * parallel.pp
    return Config(
        run=RunConfig(name="test"),
        model=model,
        data=DataConfig(),
        parallel=parallel,
        plan=PlanConfig(),
        precision=PrecisionConfig(precision),
        cluster=ClusterConfig(processes=world),
        hardware=hardware,
    )


def basis(model=GPT_1B, precision="bf16", lanes=1, hardware=H200, **parallel):
    return basis_from(config(model, precision, lanes, hardware, **parallel))


def stage_seconds(b: Basis, m: Microbatch):
    """Section 3, document by document, FLOPs and rates apart."""
    shape, hw = b.model, b.profile
    T, P, e = b.layout.tp, m.cp, 2
    h, H, G, d, f, V = shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.ffn, shape.vocab
    L = sum(m.padded)
    t = L / P
    rate = hw.gemm_flops * t / (t + hw.gemm_half_tokens)
    mlp_flops = (3 if shape.gated else 2) * h * f
    linear = 2 * t * (h * d * (2 * H + 2 * G) + mlp_flops) / T / rate
    mlp = 2 * t * mlp_flops / T / rate
    G1, H1 = max(1, G // T), H // T
    A = max(a for a in (1, 2, 4, 8, 16, 32, 64) if G1 % a == 0 and a <= min(P, b.layout.lanes_per_node))
    r = P // A
    divisor = {"none": 1, "ulysses": 1, "all_gather": 1, "ring": P, "2d": r}[m.cp_comm]
    attention = 0.0
    for length in m.padded:
        x = length / divisor
        attention += 2 * d * (H / T) * length**2 / P / (hw.attention_flops * x / (x + hw.attention_half_length))
    same_node = m.lane // b.layout.lanes_per_node == (m.lane + P - 1) // b.layout.lanes_per_node
    wire = hw.node_bytes if same_node else hw.net_bytes
    gathered = 6 * L * G1 * d * e * (P - 1) / P
    if m.cp_comm == "none":
        exposed = 0.0
    elif m.cp_comm == "ring":
        exposed = max(0.0, gathered / wire + 2 * P * hw.ring_step_seconds - 3.5 * attention)
    elif m.cp_comm == "all_gather":
        exposed = gathered / wire + 8 * hw.node_latency
    elif m.cp_comm == "ulysses":
        exposed = 4 * (L / P) * (H1 + G1) * d * e * (P - 1) / P / wire + 8 * hw.node_latency
    else:
        ring = 6 * L * (G1 / A) * d * e * (r - 1) / r / wire + 2 * r * hw.ring_step_seconds
        exposed = 4 * (L / P) * (H1 + G1) * d * e * (A - 1) / A / hw.node_bytes + 8 * hw.node_latency + max(0.0, ring - 3.5 * attention)
    extra = {"none": 0.0, "selective": 0.06 * linear, "mlp": mlp, "full": linear + attention + 0.5 * exposed}[m.recompute.level]
    tp = hw.tp_exposed * 8 * t * h * e * (T - 1) / T / hw.node_bytes
    layer = 3 * linear + 3.5 * attention + exposed + tp + hw.layer_overhead_seconds
    seconds = [n * (layer + extra * m.recompute.layers / n) for n in b.stage_layers]
    seconds[-1] += 6 * t * h * V / T / rate
    return seconds


def stage_static(b: Basis, stage: int, sizes: int):
    shape, T, R = b.model, b.layout.tp, b.layout.lanes
    h, V, last = shape.hidden, shape.vocab, b.layout.pp - 1
    params = b.stage_layers[stage] * (h * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads) + (3 if shape.gated else 2) * h * shape.ffn + 2 * h)
    if stage == 0:
        params += V * h
    if stage == last:
        params += V * h + h
    if shape.tied and last == 0:
        params -= V * h
    W = params / T
    return W * (2 + 4 + (1 if b.precision.startswith("fp8") else 0)) + 12 * W / R + 0.5e9 * sizes


def stage_bytes(b: Basis, m: Microbatch, stage: int):
    """(stored, transient + loss) of a microbatch on a stage."""
    shape, T = b.model, b.layout.tp
    h, f, t = shape.hidden, shape.ffn, sum(m.padded) / m.cp
    kv = 4 * h * shape.kv_heads / shape.heads
    per = {
        "none": 12 * h + kv + (6 if shape.gated else 4) * f,
        "selective": 8 * h + kv + (4 if shape.gated else 2) * f,
        "mlp": 10 * h + kv,
        "full": 2 * h,
    }
    per = {level: count * (2 if b.precision == "fp32" else 1) / T for level, count in per.items()}
    stored = 0.0
    for layer in range(b.stage_layers[stage]):
        stored += t * per[m.recompute.level if layer < m.recompute.layers else "none"]
    passing = t * per["none"] if m.recompute.level == "full" else 0.0
    if stage == b.layout.pp - 1:
        passing += min(t, b.profile.loss_chunk) * shape.vocab * 6 / T
    return stored, passing


def lane_list(slots, p, v, stage):
    """Section 6 as written: the dense list of a stage as (kind, slot, chunk)."""
    if v > 1:
        while slots % p:
            slots += 1
    total = slots * v
    place = [(k, 0) if v == 1 else ((k // (p * v)) * p + k % p, (k % (p * v)) // p) for k in range(total)]
    w = min(p - 1 - stage, slots) if v == 1 else min(slots * v, 2 * (p - 1 - stage) + (v - 1) * p)
    forward = [("F", slot, chunk) for slot, chunk in place]
    backward = [("B", slot, v - 1 - chunk) for slot, chunk in place]
    result = forward[:w]
    forward = forward[w:]
    while backward:
        if forward:
            result.append(forward.pop(0))
        result.append(backward.pop(0))
    return result


def event_simulation(b: Basis, microbatches):
    """(makespan, peak bytes per stage): run whatever can run until nothing is left; no order is precomputed. Fails on a deadlock."""
    p, v, lanes = b.layout.pp, b.layout.virtual_stages, b.layout.lanes
    slots = max(m.slot for m in microbatches) + 1
    at = {(m.slot, lane): i for i, m in enumerate(microbatches) for lane in range(m.lane, m.lane + m.cp)}
    todo = {(lane, s): [a for a in lane_list(slots, p, v, s) if (a[1], lane) in at] for lane in range(lanes) for s in range(p)}
    clock = dict.fromkeys(todo, 0.0)
    held, peak, done = dict.fromkeys(todo, 0.0), [0.0] * p, {}
    while any(todo.values()):
        progressed = False
        for (lane, s), actions in todo.items():
            if not actions:
                continue
            kind, slot, chunk = actions[0]
            i = at[slot, lane]
            m = microbatches[i]
            members = [(member, s) for member in range(m.lane, m.lane + m.cp)]
            if any(not todo[member] or todo[member][0] != actions[0] for member in members):
                continue
            if kind == "F":
                before = (i, "F", s - 1, chunk) if s else (i, "F", p - 1, chunk - 1) if chunk else None
            else:
                before = (i, "B", s + 1, chunk) if s < p - 1 else (i, "B", 0, chunk + 1) if chunk < v - 1 else (i, "F", s, chunk)
            if before is not None and before not in done:
                continue
            speed = min(b.lane_speed[m.lane : m.lane + m.cp]) if b.lane_speed else 1.0
            duration = stage_seconds(b, m)[s] * (1 if kind == "F" else 2.2) / 3.2 / v / speed
            begin = max([clock[member] for member in members] + ([done[before]] if before is not None else []))
            done[i, kind, s, chunk] = begin + duration
            stored, passing = stage_bytes(b, m, s)
            for member in members:
                clock[member] = begin + duration
                held[member] += stored / v if kind == "F" else 0.0
                peak[s] = max(peak[s], held[member] + passing)
                held[member] -= stored / v if kind == "B" else 0.0
                todo[member].pop(0)
            progressed = True
        assert progressed, "deadlock"
    return max(clock.values()), peak


def reference_hash(document):
    document = json.loads(json.dumps(document))
    del document["hash"], document["predicted"]
    for one in document["microbatches"]:
        del one["seconds"], one["bytes"]
    document["profile"] = {k: float(f"{v:.8e}") if isinstance(v, float) else v for k, v in document["profile"].items()}
    document["lane_speed"] = [float(f"{v:.8e}") if isinstance(v, float) else v for v in document["lane_speed"]]
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()).hexdigest()


def score(b: Basis, microbatches):
    """The microbatches with the package's own seconds and bytes."""
    cost, memory = CostModel(b), MemoryModel(b)
    return tuple(replace(m, seconds=round_seconds(cost.seconds(m)), bytes=round_bytes(memory.bytes(m))) for m in microbatches)


def plan_of(b: Basis, lengths, microbatches, step=7):
    return StepPlan(
        step, b.layout, b.schedule, b.stage_layers, b.model, b.precision, b.unit, b.profile, tuple(lengths), score(b, microbatches), b.lane_speed
    )


def random_plan(b: Basis, rng: random.Random, slots=4, longest=3000):
    """A legal plan (memory aside) with groups, holes, recompute and every legal kind of communication at random."""
    cost, microbatches, lengths = CostModel(b), [], []
    for slot in range(slots):
        lane = 0
        while lane < b.layout.lanes:
            cp = rng.choice([c for c in (1, 2, 4, 8, 16) if lane % c == 0 and lane + c <= b.layout.lanes])
            if rng.random() < 0.8 or not microbatches:
                own = [int(1 + longest ** rng.random()) for _ in range(rng.randint(1, 4))]
                level = rng.choice(["none", "selective", "mlp", "full"])
                recompute = Recompute(level, 0 if level == "none" else rng.randint(1, b.recomputable))
                ids = tuple(range(len(lengths), len(lengths) + len(own)))
                microbatches.append(Microbatch(slot, lane, cp, ids, pad(own, cp, b.align), recompute, rng.choice(cost.legal_kinds(cp))))
                lengths += own
            lane += cp
    return plan_of(b, lengths, microbatches)
