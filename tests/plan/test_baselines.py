import random
from dataclasses import replace

import plan_reference as ref
import pytest

from megadcp.plan.baselines import everywhere, middle_peaked, static_best
from megadcp.plan.cost import CostModel, Load
from megadcp.plan.memory import MemoryModel
from megadcp.plan.packing import pad
from megadcp.plan.simulate import simulate
from megadcp.plan.step_plan import Microbatch, Recompute
from megadcp.plan.verify import verify


def literal_static_best(b, lengths, capacity):
    """Section 5 as written, with the event simulation of plan_reference: (makespan, cp, level) or None."""
    cost, memory, best = CostModel(b), MemoryModel(b), None
    for cp in (1, 2, 4, 8):
        if cp > b.layout.lanes:
            continue
        for level in ("none", "selective", "mlp", "full"):
            for room in (capacity, capacity // 2, capacity // 4):
                if room < max(lengths):
                    continue
                packs = []
                for document in sorted(range(len(lengths)), key=lambda k: (-lengths[k], k)):
                    for pack in packs:
                        if sum(lengths[k] for k in pack) + lengths[document] <= room:
                            pack.append(document)
                            break
                    else:
                        packs.append([document])
                recompute = Recompute(level, 0 if level == "none" else min(b.stage_layers))
                ones = []
                for pack in packs:
                    padded = pad([lengths[k] for k in pack], cp, b.align)
                    load = Load(sum(padded), sum(x * x for x in padded), cp, "none", cost.in_node(0, cp))
                    ones.append(Microbatch(0, 0, cp, tuple(pack), padded, recompute, cost.best_kind(load)))
                ones.sort(key=lambda m: -max(ref.stage_seconds(b, m)))
                groups = [[] for _ in range(b.layout.lanes // cp)]
                for one in ones:
                    loads = [sum(max(ref.stage_seconds(b, m)) for m in group) for group in groups]
                    groups[loads.index(min(loads))].append(one)
                for order in (lambda x: x, middle_peaked):
                    dealt = [replace(m, slot=k, lane=g * cp) for g, group in enumerate(groups) for k, m in enumerate(order(group))]
                    makespan, peaks = ref.event_simulation(b, dealt)
                    fits = all(peaks[s] <= memory.budget(s, int(cp > 1)) for s in range(b.layout.pp))
                    if fits and (best is None or makespan < best[0] - 1e-9):
                        best = makespan, cp, level
    return best


LAYOUTS = [
    (dict(), ref.H200),
    (dict(), replace(ref.H200, memory_bytes=2e9)),
    (dict(lanes=8), ref.H200),
    (dict(lanes=8), replace(ref.H200, memory_bytes=1.0e9)),
    (dict(lanes=6), replace(ref.H200, gpus_per_node=3)),
    (dict(lanes=4, pp=3, stage_layers=(3, 2, 1)), ref.H200),
    (dict(lanes=2, pp=2, virtual_stages=2), ref.H200),
    (dict(lanes=2, precision="fp8_block"), ref.H200),
]


@pytest.mark.parametrize(("layout", "hardware"), LAYOUTS)
def test_equals_a_literal_reading(layout, hardware):
    b = ref.basis(ref.SMALL, hardware=hardware, **layout)
    found = set()
    for seed in range(4):
        rng = random.Random(seed)
        lengths = [int(20 + 8000 ** rng.random()) for _ in range(rng.randint(1, 12))]
        capacity = rng.choice([max(lengths), 20000, 80000])
        expected, static = literal_static_best(b, lengths, capacity), static_best(b, lengths, capacity)
        if expected is None:
            assert static is None
            continue
        assert static.makespan == pytest.approx(expected[0], abs=2e-9)
        assert (static.cp, static.recompute.level) == expected[1:]
        found.add(static.recompute.level)
        plan = replace(ref.plan_of(b, lengths, static.microbatches), microbatches=static.microbatches)
        verify(plan)
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
