import random
from dataclasses import replace

import plan_reference as ref
import pytest

from megadcp.plan.baseline_layouts import middle_peaked
from megadcp.plan.baselines import static_best
from megadcp.plan.cost import CostModel, Load
from megadcp.plan.limits import everywhere
from megadcp.plan.memory import MemoryModel
from megadcp.plan.packing import pad
from megadcp.plan.simulate import simulate
from megadcp.plan.step_plan import LEVELS, Microbatch, Recompute
from megadcp.plan.verify import verify


def literal_packs(lengths, capacity):
    """First fit, longest first."""
    packs = []
    for document in sorted(range(len(lengths)), key=lambda k: (-lengths[k], k)):
        for pack in packs:
            if sum(lengths[k] for k in pack) + lengths[document] <= capacity:
                pack.append(document)
                break
        else:
            packs.append([document])
    return packs


def literal_microbatch(b, cost, lengths, pack, cp, recompute):
    """A pack on the group at lane 0, padded as invariant 4 says, with the default kind of communication."""
    padded = pad([lengths[k] for k in pack], cp, b.align)
    load = Load(sum(padded), sum(x * x for x in padded), cp, "none", cost.in_node(0, cp))
    return Microbatch(0, 0, cp, tuple(pack), padded, recompute, cost.best_kind(load))


def literal_score(b, memory, microbatches, cp):
    """Makespan by the event simulation of plan_reference; inf above the budget."""
    makespan, peaks = ref.event_simulation(b, microbatches)
    return makespan if all(peaks[s] <= memory.budget(s, int(cp > 1)) for s in range(b.layout.pp)) else float("inf")


def literal_choices(b, max_cp=0):
    """(P, recompute) of static layouts."""
    for cp in (1, 2, 4, 8, 16):
        for level in ("none", "selective", "mlp", "full"):
            if cp <= min(b.layout.lanes, max_cp or b.layout.lanes):
                yield cp, Recompute(level, 0 if level == "none" else min(b.stage_layers))


def literal_static_best(b, lengths, capacity, max_cp=0):
    """Section 5 as written: (makespan, cp, level, {documents: (slot, lane)}) or None. Ties: cp, then capacity, then level, then order."""
    cost, memory, found = CostModel(b), MemoryModel(b), []
    for cp, recompute in literal_choices(b, max_cp):
        for room in (capacity, capacity // 2, capacity // 4):
            if room < max(lengths):
                continue
            ones = [literal_microbatch(b, cost, lengths, pack, cp, recompute) for pack in literal_packs(lengths, room)]
            ones.sort(key=lambda m: -round(max(ref.stage_seconds(b, m)) * 1e9))
            groups, loads = [[] for _ in range(b.layout.lanes // cp)], [0.0] * (b.layout.lanes // cp)
            for one in ones:
                least = loads.index(min(loads))
                groups[least].append(one)
                loads[least] += max(ref.stage_seconds(b, one))
            for middle, order in enumerate((lambda x: x, middle_peaked)):
                dealt = [replace(m, slot=k, lane=g * cp) for g, group in enumerate(groups) for k, m in enumerate(order(group))]
                makespan = literal_score(b, memory, dealt, cp)
                if makespan < float("inf"):
                    places = {m.documents: (m.slot, m.lane) for m in dealt}
                    found.append((round(makespan * 1e9), cp, room, LEVELS.index(recompute.level), middle, makespan, places))
    if not found:
        return None
    _, cp, _, level, _, makespan, places = min(found, key=lambda one: one[:5])
    return makespan, cp, LEVELS[level], places


LAYOUTS = [
    (dict(), ref.H200, ()),
    (dict(), replace(ref.H200, memory_bytes=2e9), ()),
    (dict(lanes=8), ref.H200, ()),
    (dict(lanes=8), ref.H200, (1.0, 0.7, 1.0, 1.0, 1.2, 1.0, 0.9, 1.0)),
    (dict(lanes=8), replace(ref.H200, memory_bytes=1.0e9), ()),
    (dict(lanes=6), replace(ref.H200, gpus_per_node=3), ()),
    (dict(lanes=4, pp=3, stage_layers=(3, 2, 1)), ref.H200, ()),
    (dict(lanes=4, pp=3, stage_layers=(3, 2, 1)), replace(ref.H200, memory_bytes=1.2e9, gpus_per_node=3), (1.0, 0.8, 1.1, 1.0)),
    (dict(lanes=2, pp=2, virtual_stages=2), ref.H200, ()),
    (dict(lanes=2, pp=2, virtual_stages=3), replace(ref.H200, memory_bytes=1.4e9), ()),
    (dict(lanes=2, precision="fp8_block"), ref.H200, ()),
]


def some_lengths(seed):
    """A few documents of all lengths; every third case with many alike, so that ties decide."""
    rng = random.Random(seed)
    count = rng.randint(1, 14)
    if seed % 3 == 2:
        return [rng.choice((300, 4000)) for _ in range(count)]
    return [int(20 + 8000 ** rng.random()) for _ in range(count)]


@pytest.mark.parametrize(("layout", "hardware", "speeds"), LAYOUTS)
def test_static_best_equals_a_literal_reading(layout, hardware, speeds):
    b = replace(ref.basis(ref.SMALL, hardware=hardware, **layout), lane_speed=speeds)
    found = set()
    for seed in range(30):
        lengths = some_lengths(seed)
        capacity = random.Random(seed).choice([max(lengths), 20000, 80000])
        max_cp = random.Random(seed).choice([0, 0, 1, 2, 3])
        expected, static = literal_static_best(b, lengths, capacity, max_cp), static_best(b, lengths, capacity, max_cp=max_cp)
        if expected is None:
            assert static is None
            continue
        assert static.makespan == pytest.approx(expected[0], abs=2e-9)
        assert (static.cp, static.recompute.level) == expected[1:3]
        assert {m.documents: (m.slot, m.lane) for m in static.microbatches} == expected[3]
        found.add(static.recompute.level)
        plan = replace(ref.plan_of(b, lengths, static.microbatches), microbatches=static.microbatches)
        verify(plan)
        assert ref.score(b, static.microbatches) == static.microbatches
        assert simulate(plan).makespan == pytest.approx(static.makespan, rel=1e-12)
    assert found


def test_nothing_fits():
    b = ref.basis(ref.SMALL, hardware=replace(ref.H200, memory_bytes=2e8))
    assert static_best(b, [10**6], 10**6) is None


def test_choices_limit_the_levels():
    b = ref.basis(ref.SMALL)
    assert static_best(b, [100, 200], 1000, (Recompute("full", 6),)).recompute == Recompute("full", 6)
    assert [choice.layers for choice in everywhere(ref.basis(ref.SMALL, pp=3, stage_layers=(3, 2, 1)))] == [0, 1, 1, 1]


def test_a_document_above_the_capacity_gets_its_own_pack():
    static = static_best(ref.basis(ref.SMALL), [500, 60, 40, 30], 100)
    assert sorted(one.documents for one in static.microbatches) == [(0,), (1, 2), (3,)]


def test_middle_peaked():
    assert middle_peaked([9, 8, 7, 6, 5]) == [6, 8, 9, 7, 5]
    assert middle_peaked([9]) == [9]
    assert middle_peaked([]) == []
