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
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from plan_mutations import MUTATIONS, PROFILE, RUNS, legal
from random_plans import Run, legal_document, lengths, runs, scored

from megadcp.plan.basis import Basis
from megadcp.plan.memory import MemoryModel
from megadcp.plan.simulate import simulate
from megadcp.plan.step_plan import PlanFormatError, from_json
from megadcp.plan.verify import INVARIANTS, PlanError, verify


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


# cp 4 becomes 2: the microbatch then needs its budget to the last byte, 48371200.0 of 48371199.96.
TO_THE_LAST_BYTE = Run(
    model=3, stage_layers=(3,), virtual_stages=1, lanes=25, tp=1, sequence_parallel=False, gpus_per_node=8, precision="fp8_current",
    lane_speed=(0.5, 0.5, 1.0, 0.9, 1.25, 0.5, 0.5, 0.9, 0.5, 0.9, 1.25, 1.0, 1.25, 1.0, 0.9, 1.0, 1.0, 1.25, 0.9, 1.25, 1 / 3, 1.25, 1.0, 0.9, 1.0),
    max_cp=0, overhead=0.0002, even=True, memory=141e9,
)  # fmt: skip


@settings(max_examples=250, derandomize=True, **FEW)
@example(TO_THE_LAST_BYTE, [385] * 4, 634, 2.0)
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
