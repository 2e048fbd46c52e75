"""Changed plans: refused by the hash; with the hash made anew, by the number and name of the first invariant that is broken, or accepted.

Which invariant that is says naive_simulation.first_broken, which shares no code with the package.
"""

import copy
import functools
import json
import math
import random
from collections import Counter

import naive_simulation as naive
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_plans import Run, legal_document, lengths, runs, scored

from megadcp.plan.basis import Basis
from megadcp.plan.memory import MemoryModel
from megadcp.plan.simulate import simulate
from megadcp.plan.step_plan import PlanFormatError, from_json
from megadcp.plan.verify import INVARIANTS, PlanError, verify

RUNS = (
    Run(lanes=8, precision="fp8_current"),
    Run(lanes=6, tp=2, precision="bf16", lane_speed=(1.0, 0.5, 1.0, 1.0, 2.0, 1.0)),
    Run(lanes=8, stage_layers=(3, 2)),
    Run(lanes=4, stage_layers=(4, 3, 2), virtual_stages=2, precision="fp8_block"),
    Run(model=1, lanes=16, stage_layers=(8,), precision="fp32", gpus_per_node=4),
)


@functools.cache
def legal(index: int) -> str:
    """The JSON text of a legal plan with little memory to spare."""
    rng = random.Random(index)
    own = [int(1 + 9000 ** rng.random()) for _ in range(14)]
    doc = legal_document(RUNS[index], own, rng, 1.02)
    assert naive.first_broken(doc) is None
    return json.dumps({**doc, "hash": naive.plan_hash(doc)})


# -------------------------------------------------------------------------------------------------------------- mutations
MUTATIONS = {}


def mutation(name):
    def keep(change):
        MUTATIONS[name] = change
        return change

    return keep


def one_of(doc, rng, wanted=lambda m: True):
    """A microbatch at random; the first one when none is as wanted."""
    fitting = [m for m in doc["microbatches"] if wanted(m)]
    return rng.choice(fitting or doc["microbatches"][:1])


def change_field(name, change, wanted=lambda m: True):
    """A mutation of one field of one microbatch: change(old value, doc, rng, microbatch) -> new value."""

    def mutate(doc, rng):
        m = one_of(doc, rng, wanted)
        m[name] = change(m[name], doc, rng, m)

    return mutate


for label, field, change in [
    ("slot up", "slot", lambda v, d, r, m: v + 1),
    ("slot far up", "slot", lambda v, d, r, m: v + r.randint(2, 40)),
    ("slot down", "slot", lambda v, d, r, m: v - 1),
    ("slot negative", "slot", lambda v, d, r, m: -1),
    ("slot of another", "slot", lambda v, d, r, m: r.choice(d["microbatches"])["slot"]),
    ("lane up", "lane", lambda v, d, r, m: v + 1),
    ("lane down", "lane", lambda v, d, r, m: v - 1),
    ("lane a group up", "lane", lambda v, d, r, m: v + m["cp"]),
    ("lane a group down", "lane", lambda v, d, r, m: v - m["cp"]),
    ("lane past the end", "lane", lambda v, d, r, m: d["layout"]["lanes"]),
    ("cp twice", "cp", lambda v, d, r, m: 2 * v),
    ("cp half", "cp", lambda v, d, r, m: v // 2),
    ("cp of 3", "cp", lambda v, d, r, m: 3),
    ("cp negative", "cp", lambda v, d, r, m: -v),
    ("document of another", "documents", lambda v, d, r, m: [*v[1:], r.choice(r.choice(d["microbatches"])["documents"])]),
    ("document past the end", "documents", lambda v, d, r, m: [len(d["lengths"]), *v[1:]]),
    ("document negative", "documents", lambda v, d, r, m: [-1, *v[1:]]),
    ("documents dropped", "documents", lambda v, d, r, m: v[:-1]),
    ("documents in another order", "documents", lambda v, d, r, m: v[::-1]),
    ("padded one up", "padded", lambda v, d, r, m: [*v[:-1], v[-1] + 1]),
    ("padded one down", "padded", lambda v, d, r, m: [*v[:-1], v[-1] - 1]),
    ("padded a multiple up", "padded", lambda v, d, r, m: [v[0] + 1024 * m["cp"], *v[1:]]),
    ("padded a multiple down", "padded", lambda v, d, r, m: [v[0] - 1024 * m["cp"], *v[1:]]),
    ("padded a step up", "padded", lambda v, d, r, m: [v[0] + 2 * m["cp"], *v[1:]]),
    ("padded shifted inside", "padded", lambda v, d, r, m: [v[0] + 2 * m["cp"], *v[1:-1], v[-1] - 2 * m["cp"]] if len(v) > 1 else v),
    ("padded half a step up", "padded", lambda v, d, r, m: [v[0] + m["cp"], *v[1:]]),
    ("padded half steps", "padded", lambda v, d, r, m: [v[0] + m["cp"], *v[1:-1], v[-1] + 1023 * m["cp"]] if len(v) > 1 else v),
    ("padded negative", "padded", lambda v, d, r, m: [-v[0], *v[1:]]),
    ("padded one too few", "padded", lambda v, d, r, m: v[:-1]),
    ("padded one too many", "padded", lambda v, d, r, m: [*v, 1024 * m["cp"]]),
    ("padded turned round", "padded", lambda v, d, r, m: v[::-1]),
    ("padded huge", "padded", lambda v, d, r, m: [2**50, *v[1:]]),
    ("recompute other level", "recompute", lambda v, d, r, m: {**v, "level": r.choice(naive.LEVELS)}),
    ("recompute unknown level", "recompute", lambda v, d, r, m: {**v, "level": "some"}),
    ("recompute layer more", "recompute", lambda v, d, r, m: {**v, "layers": v["layers"] + 1}),
    ("recompute layer less", "recompute", lambda v, d, r, m: {**v, "layers": v["layers"] - 1}),
    ("recompute all", "recompute", lambda v, d, r, m: {"level": "full", "layers": min(d["stage_layers"])}),
    ("recompute past the stage", "recompute", lambda v, d, r, m: {"level": "mlp", "layers": min(d["stage_layers"]) + 1}),
    ("recompute nothing", "recompute", lambda v, d, r, m: {"level": "none", "layers": 0}),
    ("cp_comm other", "cp_comm", lambda v, d, r, m: r.choice([kind for kind in ("none", *naive.KINDS) if kind != v])),
    ("cp_comm unknown", "cp_comm", lambda v, d, r, m: "pigeon"),
    ("seconds within tolerance", "seconds", lambda v, d, r, m: v * (1 + r.choice((-5e-5, 5e-5)))),
    ("seconds beyond tolerance", "seconds", lambda v, d, r, m: v * (1 + r.choice((-2e-4, 2e-4)))),
    ("seconds zero", "seconds", lambda v, d, r, m: 0.0),
    ("seconds negative", "seconds", lambda v, d, r, m: -v),
    ("bytes within tolerance", "bytes", lambda v, d, r, m: int(v * (1 + r.choice((-5e-5, 5e-5))))),
    ("bytes beyond tolerance", "bytes", lambda v, d, r, m: int(v * (1 + r.choice((-2e-4, 2e-4))))),
    ("bytes zero", "bytes", lambda v, d, r, m: 0),
]:
    MUTATIONS[label] = change_field(field, change)
    MUTATIONS[label + ", in a group"] = change_field(field, change, lambda m: m["cp"] > 1)
    MUTATIONS[label + ", of many documents"] = change_field(field, change, lambda m: len(m["documents"]) > 1)


@mutation("swap the slots of two")
def swap_slots(doc, rng):
    a, b = one_of(doc, rng), one_of(doc, rng)
    a["slot"], b["slot"] = b["slot"], a["slot"]


@mutation("swap the lanes of two")
def swap_lanes(doc, rng):
    a, b = one_of(doc, rng), one_of(doc, rng)
    a["lane"], b["lane"] = b["lane"], a["lane"]


@mutation("swap the documents of two")
def swap_documents(doc, rng):
    a, b = one_of(doc, rng), one_of(doc, rng)
    a["documents"], b["documents"] = b["documents"], a["documents"]


@mutation("another order of the microbatches")
def shuffle(doc, rng):
    rng.shuffle(doc["microbatches"])


@mutation("another order inside a microbatch")
def turn_round(doc, rng):
    m = one_of(doc, rng, lambda m: len(m["documents"]) > 1)
    m["documents"], m["padded"] = m["documents"][::-1], m["padded"][::-1]


@mutation("a document moves to another microbatch")
def move(doc, rng):
    a, b = one_of(doc, rng, lambda m: len(m["documents"]) > 1), one_of(doc, rng)
    if a is not b:
        b["documents"].append(a["documents"].pop())
        b["padded"].append(a["padded"].pop())


@mutation("a microbatch twice")
def duplicate(doc, rng):
    m = copy.deepcopy(one_of(doc, rng))
    doc["microbatches"].append({**m, "slot": m["slot"] + 50})


@mutation("a microbatch less")
def drop(doc, rng):
    doc["microbatches"].pop(rng.randrange(len(doc["microbatches"])))


@mutation("an empty microbatch more")
def add_empty(doc, rng):
    doc["microbatches"].append({**one_of(doc, rng), "slot": 60, "documents": [], "padded": []})


@mutation("no microbatches")
def none_left(doc, rng):
    doc["microbatches"] = []


@mutation("nothing at all")
def nothing(doc, rng):
    doc["microbatches"], doc["lengths"] = [], []


@mutation("all slots later")
def later(doc, rng):
    for m in doc["microbatches"]:
        m["slot"] += 7


for step in (1, -1, 5000):

    @mutation(f"length {step:+}")
    def longer(doc, rng, step=step):
        doc["lengths"][rng.randrange(len(doc["lengths"]))] += step


@mutation("length of 0")
def no_length(doc, rng):
    doc["lengths"][rng.randrange(len(doc["lengths"]))] = 0


@mutation("a length more")
def one_more(doc, rng):
    doc["lengths"].append(5)


@mutation("a length less")
def one_less(doc, rng):
    doc["lengths"].pop()


def scale(path, name, factor):
    def mutate(doc, rng):
        value = doc[path][name] * factor
        doc[path][name] = int(value) if type(doc[path][name]) is int else value

    return mutate


PROFILE = sorted(json.loads(legal(0))["profile"])
for name in PROFILE:
    for factor in (0, -1, 0.5, 2, 1.001, 1 + 1e-6, 0.9999, 1 + 1e-13):
        MUTATIONS[f"profile.{name} x {factor}"] = scale("profile", name, factor)
for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab"):
    for factor in (0, -1, 0.5, 2):
        MUTATIONS[f"model.{name} x {factor}"] = scale("model", name, factor)
for name in ("lanes", "lanes_per_node", "tp", "pp", "virtual_stages"):
    for factor in (0, -1, 0.5, 2):
        MUTATIONS[f"layout.{name} x {factor}"] = scale("layout", name, factor)


def assign(*path, values):
    def mutate(doc, rng):
        node = doc
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = rng.choice([value for value in values if value != node[path[-1]]])

    return mutate


for name in ("gated", "tied"):
    MUTATIONS[f"model.{name}"] = assign("model", name, values=(True, False))
MUTATIONS["layout.sequence_parallel"] = assign("layout", "sequence_parallel", values=(True, False))
MUTATIONS["schedule"] = assign("schedule", values=("none", "1f1b", "interleaved"))
MUTATIONS["schedule unknown"] = assign("schedule", values=("zero",))
MUTATIONS["precision"] = assign("precision", values=tuple(naive.UNITS))
MUTATIONS["precision unknown"] = assign("precision", values=("int8",))
MUTATIONS["unit"] = assign("unit", values=(1, 16, 128, 0, -1, 2))
MUTATIONS["step"] = assign("step", values=(0, 4, 10**9))
MUTATIONS["step negative"] = assign("step", values=(-1,))
MUTATIONS["lane_speed"] = lambda doc, rng: doc.update(lane_speed=[rng.choice((1.0, 0.7)) for _ in range(doc["layout"]["lanes"])])
MUTATIONS["lane_speed of 0"] = lambda doc, rng: doc.update(lane_speed=[0.0] + [1.0] * (doc["layout"]["lanes"] - 1))
MUTATIONS["lane_speed one too many"] = lambda doc, rng: doc.update(lane_speed=[1.0] * (doc["layout"]["lanes"] + 1))
for name in ("seconds", "lower_bound_seconds", "static_seconds"):
    MUTATIONS[f"predicted.{name}"] = assign("predicted", name, values=(1.0,))
MUTATIONS["predicted.peak_bytes"] = assign("predicted", "peak_bytes", values=([7],))
MUTATIONS["predicted.policy"] = assign("predicted", "policy", values=("luck",))


@mutation("a layer to another stage")
def shift_layer(doc, rng):
    a, b = rng.randrange(len(doc["stage_layers"])), rng.randrange(len(doc["stage_layers"]))
    doc["stage_layers"][a] -= 1
    doc["stage_layers"][b] += 1


@mutation("a layer more")
def layer_more(doc, rng):
    doc["stage_layers"][0] += 1


@mutation("a layer more in the model too")
def deeper(doc, rng):
    doc["stage_layers"][0] += 1
    doc["model"]["layers"] += 1


@mutation("a stage of the layers less")
def stage_less(doc, rng):
    doc["stage_layers"].pop()


@mutation("less memory than needed")
def less_memory(doc, rng):
    doc["profile"]["memory_bytes"] *= 0.97


@mutation("unit and precision")
def coarser(doc, rng):
    doc["precision"], doc["unit"] = rng.choice([pair for pair in naive.UNITS.items() if pair[0] != doc["precision"]])


# ------------------------------------------------------------------------------------------------------------- the check
def check(doc, before):
    """What the package makes of a changed plan must be what the naive reading makes of it. Returns the invariant named, or None."""
    changed = naive.plan_hash(doc)
    if changed == before["hash"]:
        from_json(doc)  # predictions are not in the hash, nor digits beyond the ninth
    else:
        with pytest.raises(PlanFormatError) as caught:
            from_json(doc)
        assert "\n" not in str(caught.value)
    doc = {**doc, "hash": changed}
    if doc["version"] != 1:
        with pytest.raises(PlanFormatError, match="version: this program reads plans of version 1, found "):
            from_json(doc)
        return "unknown"
    unknown = unknown_choice(doc)
    if unknown:
        with pytest.raises(PlanFormatError, match=f"{unknown}: .*is not known; legal here: "):
            from_json(doc)
        return "unknown"
    expected = naive.first_broken(doc)
    plan = from_json(json.dumps(doc))
    if expected is None:
        verify(plan)
        return None
    with pytest.raises(PlanError) as caught:
        verify(plan)
    assert (caught.value.invariant, caught.value.name) == (expected, INVARIANTS[expected]), str(caught.value)
    assert f"breaks invariant {expected} ({INVARIANTS[expected]}): " in str(caught.value)
    assert "\n" not in str(caught.value)
    return expected


def unknown_choice(doc):
    """The name of a field whose value is none of its choices, or ""."""
    if doc["schedule"] not in ("none", "1f1b", "interleaved"):
        return "schedule"
    if doc["precision"] not in naive.UNITS:
        return "precision"
    for m in doc["microbatches"]:
        if m["recompute"]["level"] not in naive.LEVELS:
            return "level"
        if m["cp_comm"] not in ("none", *naive.KINDS):
            return "cp_comm"
    return ""


def check_both(doc, before):
    """The changed plan as it is and, where only seconds and bytes are wrong then, with those of its own."""
    found = check(doc, before)
    if found == 8:
        again = check(scored(copy.deepcopy(doc)), before)
        assert again in (None, 9)
        return [found, again]
    return [found]


@pytest.mark.parametrize("name", MUTATIONS)
def test_changed_plans(name):
    for index in range(len(RUNS)):
        before = json.loads(legal(index))
        for seed in range(2):
            doc = copy.deepcopy(before)
            MUTATIONS[name](doc, random.Random(seed))
            check_both(doc, before)


def test_the_mutations_break_every_invariant():
    """All but 6: section 6's lists have no cycle, so no plan can break it (test_verify.py gives the check lists that have one)."""
    found = Counter()
    before = json.loads(legal(2))
    for number, change in enumerate(MUTATIONS.values()):
        doc = copy.deepcopy(before)
        change(doc, random.Random(number))
        found[unknown_choice(doc) or naive.first_broken(doc)] += 1
    assert set(found) >= {None, 0, 1, 2, 3, 4, 5, 7, 8, 9, "level"}


# ------------------------------------------------------------------------------------------------- any number of any plan
def leaves(node, path=()):
    """(path, value) of every value in a JSON object that is no object; lists count as values and so do their elements."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from leaves(value, (*path, key))
        return
    yield path, node
    if isinstance(node, list):
        for index, value in enumerate(node):
            yield from leaves(value, (*path, index))


def put(doc, path, value):
    node = doc
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value


def other(value, rng):
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((value + 1, value - 1, 2 * value, value // 2, -value, 0, 1, value + rng.randint(-9, 9)))
    if isinstance(value, float):
        return rng.choice((value * 2, value / 2, -value, 0.0, value * (1 + 1e-6), value * rng.uniform(0.9, 1.1)))
    if isinstance(value, list):
        return rng.choice((value[:-1], value[1:], value[::-1], value + value[:1], []))
    return rng.choice((*naive.LEVELS, *naive.KINDS, *naive.UNITS, "1f1b", "interleaved"))


def change_anything(run, own, seed, room):
    rng = random.Random(seed)
    before = legal_document(run, own, rng, room)
    before["hash"] = naive.plan_hash(before)
    doc = copy.deepcopy(before)
    paths = [path for path, _ in leaves(doc) if path != ("hash",)]
    groups = {}
    for path in paths:
        groups.setdefault(path[0] if path[0] != "microbatches" or len(path) < 3 else path[2], []).append(path)
    path = rng.choice(groups[rng.choice(sorted(groups))])  # any field as often as any other, long lists or not
    value = doc
    for key in path:
        value = value[key]
    put(doc, path, other(value, rng))
    return check_both(doc, before)


FEW = dict(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@settings(max_examples=250, derandomize=True, **FEW)
@given(runs(most_lanes=16), lengths(most=16), st.integers(0, 10**6), st.sampled_from((1.001, 2.0)))
def test_any_value_changed(run, own, seed, room):
    change_anything(run, own, seed, room)


@pytest.mark.slow
@settings(max_examples=4000, **FEW)
@given(runs(), lengths(most=30), st.integers(0, 10**6), st.sampled_from((1.0, 1.001, 2.0)))
def test_any_value_changed_many_times(run, own, seed, room):
    change_anything(run, own, seed, room)


# ----------------------------------------------------------------------------------------------------------------- form
def name_of(path):
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text


def test_every_value_of_another_type_is_refused_by_name():
    before = json.loads(legal(3))
    for path, value in list(leaves({key: value for key, value in before.items() if key not in ("hash", "version")})):
        wrong = [None, {}, [] if not isinstance(value, list) else "text", 2**63, 10**400, math.nan, math.inf]
        wrong += ["7", 1.5, True] if isinstance(value, int) and not isinstance(value, bool) else [1] if isinstance(value, (str, bool)) else []
        wrong += [str(value), True] if isinstance(value, float) else []
        if isinstance(value, float):
            wrong.remove(2**63)  # a float field takes an integer
        for bad in wrong:
            doc = copy.deepcopy(before)
            put(doc, path, bad)
            with pytest.raises(PlanFormatError) as caught:
                from_json(doc)
            assert str(caught.value).startswith(name_of(path) + ": expected "), (path, bad, str(caught.value))
            assert len(str(caught.value)) < 300


def test_every_missing_and_unknown_field_is_refused_by_name():
    before = json.loads(legal(3))
    objects = [(), ("layout",), ("model",), ("profile",), ("predicted",), ("microbatches", 1), ("microbatches", 0, "recompute")]
    for path in objects:
        node = functools.reduce(lambda node, key: node[key], path, before)
        for key in node:
            doc = copy.deepcopy(before)
            del functools.reduce(lambda node, key: node[key], path, doc)[key]
            with pytest.raises(PlanFormatError) as caught:
                from_json(doc)
            start = "version: this program reads" if (path, key) == ((), "version") else name_of((*path, key)) + ": missing"
            assert str(caught.value).startswith(start)
        doc = copy.deepcopy(before)
        functools.reduce(lambda node, key: node[key], path, doc)["surprise"] = 1
        with pytest.raises(PlanFormatError, match="surprise: unknown field") as caught:
            from_json(doc)
        assert str(caught.value).startswith(name_of((*path, "surprise")))


@pytest.mark.parametrize("text", ["", "[", "[" * 100_000, "nul", '{"version": 1', "\x00", b"\xff\xfe\xff", "[]", "7", '"plan"', "null", "{}"])
def test_texts_that_are_no_plan(text):
    with pytest.raises(PlanFormatError) as caught:
        from_json(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


# ------------------------------------------------------------------------------------------------- numbers beyond reason
@pytest.mark.parametrize("index", [2, 3])
def test_a_slot_far_away_costs_nothing_and_changes_nothing(index):
    """Empty slots may stand anywhere: with 10^12 of them before the last microbatch, the step is the one with a hundred."""

    def moved(far):
        doc = json.loads(legal(index))
        last = max(doc["microbatches"], key=lambda m: m["slot"])
        last["slot"] += far * doc["layout"]["pp"] * doc["layout"]["virtual_stages"]
        doc["profile"]["memory_bytes"] *= 2
        return from_json({**doc, "hash": naive.plan_hash(doc)}), doc

    near, doc = moved(20)
    far, _ = moved(10**12)
    for plan in (near, far):
        verify(plan)
    assert simulate(far).makespan == simulate(near).makespan == pytest.approx(naive.simulate(doc, random.Random(1))[0], rel=1e-9)
    peaks = MemoryModel(Basis.of(near)).peaks(near.microbatches)
    assert MemoryModel(Basis.of(far)).peaks(far.microbatches) == peaks == pytest.approx(naive.peaks(doc), rel=1e-9)


@pytest.mark.parametrize("value", [1e308, 1.7e308, 5e-324, 1e-300])
@pytest.mark.parametrize("name", PROFILE)
def test_rates_at_the_ends_of_the_numbers(name, value):
    """Refused or accepted, but never a crash, and never accepted because infinity compares with nothing."""
    for index in (0, 3):
        before = json.loads(legal(index))
        doc = copy.deepcopy(before)
        if isinstance(doc["profile"][name], int):
            value = 2**63 - 1
        doc["profile"][name] = value
        doc["hash"] = naive.plan_hash(doc)
        harmless = ("node_latency", "ring_step_seconds", "layer_overhead_seconds", "tp_exposed", "gemm_half_tokens", "attention_half_length")
        try:
            verify(from_json(doc))
            refused = None
        except PlanError as error:
            refused = error.invariant
        if name in ("usable_fraction", "reduce_overlap"):
            assert refused == (0 if value > 1 else 5 if name == "usable_fraction" else None)
        elif name == "memory_bytes":
            assert refused == (None if value > 1 else 5)
        elif name == "gemm_flops" or (name in ("gemm_half_tokens", "layer_overhead_seconds") and value > 1):
            assert refused == 8
        elif name in ("reduce_bytes", "memory_bandwidth", "gpus_per_node"):
            assert refused is None
        elif value > 1 and name not in harmless:
            assert refused in (None, 5, 8)
        else:
            assert refused in (None, 8)


@pytest.mark.parametrize(("path", "invariant"), [(("layout", "lanes"), 0), (("layout", "lanes_per_node"), None), (("model", "layers"), 0)])
def test_sizes_beyond_reason_are_answered_at_once(path, invariant):
    doc = json.loads(legal(2))
    put(doc, path, 2**62)
    if path == ("model", "layers"):
        doc["stage_layers"] = [2**61, 2**61]
    doc["hash"] = naive.plan_hash(doc)
    plan = from_json(doc)
    try:
        verify(plan)
        refused = None
    except PlanError as error:
        refused = error.invariant
    assert refused in (invariant, *((8,) if invariant is None else ()))
