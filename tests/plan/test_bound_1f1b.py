import itertools
import random
import sys
from dataclasses import replace

import numpy as np
import plan_reference as ref
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megadcp.config.check import UserError
from megadcp.plan import bound_1f1b
from megadcp.plan.actions import dense_actions, lane_actions, waits_for
from megadcp.plan.baselines import static_best
from megadcp.plan.bound_1f1b import lower_bound_1f1b
from megadcp.plan.columns import makespans
from megadcp.plan.lower_bound import lower_bound
from megadcp.plan.packing import pad
from megadcp.plan.simulate import simulate
from megadcp.plan.step_plan import Microbatch

linprog = pytest.importorskip("scipy.optimize").linprog

LANES = {
    "even": bound_1f1b._Lane((8, 8, 8, 8), (0.01, 0.01, 0.01, 0.015), 0.5, 0.1, 0.03),
    "two": bound_1f1b._Lane((4, 4), (0.02, 0.03), 0.5, 0.2, 0.1),
    "last smaller": bound_1f1b._Lane((9, 9, 8, 6), (0.01, 0.01, 0.01, 0.015), 0.5, 0.1, 0.03),
    "inner largest": bound_1f1b._Lane((6, 10, 10, 6), (0.01, 0.01, 0.01, 0.015), 0.5, 0.1, 0.03),
    "three": bound_1f1b._Lane((2, 5, 3), (0.01, 0.02, 0.01), 2.0, 0.2, 0.1),
}


def dense_program(lane, slots):
    """The same linear program over the dense lists without their absent slots, and its work and head per microbatch."""
    stages, count = len(lane.layers), len(slots)
    at = {slot: one for one, slot in enumerate(slots)}
    end = 2 * count + 2 * count * stages
    left, right = [], []

    def at_least(terms, least):
        row = np.zeros(end + 1)
        for column, value in terms:
            row[column] += value
        left.append(-row)
        right.append(-least)

    def node(kind, slot, stage):
        return 2 * count + ((kind == "B") * count + at[slot]) * stages + stage

    for stage, actions in enumerate(dense_actions(slots[-1] + 1, stages, 1)):
        before = None
        for action in lane_actions(actions, at):
            share, one, me = (1 if action.kind == "F" else 2.2) / 3.2, at[action.slot], node(action.kind, action.slot, stage)
            duration = [(one, -share * lane.layers[stage]), (count + one, -share * (stage == stages - 1))]
            needed = waits_for(action, stage, stages, 1)
            for other in [None if needed is None else node(needed[1].kind, needed[1].slot, needed[0]), before]:
                at_least([(me, 1), *duration] + ([] if other is None else [(other, -1)]), share * lane.fixed[stage])
            before = me
        at_least([(end, 1), (before, -1)], 0)
    for one in range(count):
        at_least([(one, lane.kappa), (count + one, -1)], 0)
    at_least([(one, 1) for one in range(count)], lane.work)
    at_least([(count + one, 1) for one in range(count)], lane.head)
    costs = np.zeros(end + 1)
    costs[end] = 1
    result = linprog(costs, np.array(left), np.array(right), method="highs")
    return result.fun, result.x[:count], result.x[count : 2 * count]


@pytest.mark.parametrize("name", LANES)
def test_the_program_is_that_of_the_dense_list_or_less(name):
    lane = LANES[name]
    for count in (1, 2, 3, 6, 9):
        dense, value = dense_program(lane, range(count))[0], bound_1f1b._solve(lane, count)[0]
        assert (0.995 if name in ("even", "two") else 0.95) * dense <= value <= dense * (1 + 1e-7)


@pytest.mark.parametrize("name", LANES)
def test_gaps_between_slots_do_not_help(name):
    """Whatever slots a lane has, its own program and any of its splits stay at or above the bound's program."""
    lane = LANES[name]
    stages, count = len(lane.layers), 4
    value = bound_1f1b._solve(lane, count)[0]
    rng = np.random.default_rng(1)
    for gaps in itertools.product((1, 2, stages), repeat=count - 1):
        slots = list(itertools.accumulate((0, *gaps)))
        least, work, head = dense_program(lane, slots)
        assert least >= value * (1 - 1e-7)
        # 50 splits near the best one, simulated at once
        work = np.maximum(work[:, None] * rng.uniform(0.5, 1.5, (count, 50)), 1e-9)
        head = np.minimum(head[:, None] * rng.uniform(0.5, 1.5, (count, 50)) + 1e-9, lane.kappa * work)
        work *= np.maximum(lane.work / work.sum(axis=0), lane.head / head.sum(axis=0))
        head *= lane.head / head.sum(axis=0)
        seconds, present = np.zeros((slots[-1] + 1, stages, 50)), np.zeros((slots[-1] + 1, 50), dtype=bool)
        for one, slot in enumerate(slots):
            seconds[slot] = np.array(lane.layers)[:, None] * work[one] + np.array(lane.fixed)[:, None]
            seconds[slot, -1] += head[one]
            present[slot] = True
        assert makespans(seconds, present).min() >= value * (1 - 1e-7)


@pytest.mark.parametrize("name", ["even", "three"])
def test_ranges_and_weights(name):
    """A range's program bounds every number in it; under the weights of the best number nothing is lost there."""
    lane = LANES[name]
    count, value, weights = bound_1f1b._good_count(lane, 20)
    assert bound_1f1b._solve(lane, count, 0, weights)[0] == pytest.approx(value, rel=1e-7)
    values = {one: bound_1f1b._solve(lane, one, 0, weights)[0] for one in range(1, 13)}
    for one, low in values.items():
        assert low <= bound_1f1b._solve(lane, one)[0] * (1 + 1e-7)
        for base, fixed in zip(lane.stage_work(weights), lane.fixed, strict=True):
            assert low >= (base + one * fixed) * (1 - 1e-7)
    for low, high in ((1, 3), (2, 6), (5, 8), (6, 12)):
        assert bound_1f1b._solve(lane, high, high - low, weights)[0] <= min(values[one] for one in range(low, high + 1)) * (1 + 1e-7)
    assert 0.99 * value <= bound_1f1b._least_over_counts(lane, 20) <= value * (1 + 1e-7)
    least = min(bound_1f1b._solve(lane, one, 0, weights)[0] for one in range(1, 21))
    assert bound_1f1b._least_over_counts(lane, 20) <= least * (1 + 1e-7)


LAYOUTS = [
    dict(pp=2),
    dict(pp=4, lanes=2, hardware=replace(ref.H200, gemm_half_tokens=64, layer_overhead_seconds=2e-6)),
    dict(pp=3, lanes=4, stage_layers=(1, 4, 1)),
    dict(pp=3, lanes=4, stage_layers=(3, 2, 1), tp=2),
    dict(pp=2, lanes=8, precision="fp8_current"),
]


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_plan_is_below(layout, slow):
    b = ref.basis(ref.SMALL, **layout)
    if slow:
        b = replace(b, lane_speed=tuple(1.3 - 0.2 * (lane % 3) for lane in range(b.layout.lanes)))
    for seed in range(4):
        rng = random.Random(seed)
        plan = ref.random_plan(b, rng, slots=rng.choice((1, 2, 5, 9)), longest=rng.choice((100, 3000, 30000)))
        bound = lower_bound_1f1b(b, plan.lengths)
        assert lower_bound(b, plan.lengths) <= bound <= simulate(plan).makespan * (1 + 1e-12)


def tent(b, lengths, capacities):
    """Documents, longest first, each into the slot with the most room; on one lane."""
    packs = [[] for _ in capacities]
    room = list(capacities)
    for document in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        slot = max(range(len(room)), key=lambda one: room[one])
        room[slot] -= lengths[document]
        packs[slot].append(document)
    packs = [pack for pack in packs if pack]
    return [Microbatch(slot, 0, 1, tuple(pack), pad([lengths[one] for one in pack], 1, b.align)) for slot, pack in enumerate(packs)]


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(1, 4000), min_size=1, max_size=24),
    st.lists(st.integers(1, 8), min_size=1, max_size=8),
    st.sampled_from(((2, (3, 3)), (3, (2, 2, 2)), (4, (1, 2, 2, 1)))),
)
def test_arbitrary_lengths_and_shapes(lengths, shape, stages):
    hardware = replace(ref.H200, gemm_half_tokens=64, layer_overhead_seconds=2e-6)
    b = ref.basis(ref.SMALL, hardware=hardware, pp=stages[0], stage_layers=stages[1])
    plan = ref.plan_of(b, lengths, tent(b, lengths, [one * sum(lengths) / sum(shape) for one in shape]))
    assert lower_bound(b, lengths) <= lower_bound_1f1b(b, lengths) <= simulate(plan).makespan * (1 + 1e-12)


def test_little_memory():
    """Recompute that memory asks for counts on both sides."""
    hardware = replace(ref.H200, memory_bytes=5e8)
    b = ref.basis(ref.SMALL, hardware=hardware, lanes=2, pp=2)
    free = ref.basis(ref.SMALL, lanes=2, pp=2)
    lengths = [30000, 30000, 30000, 30000, 9000, 800]
    static, bound = static_best(b, lengths, 30000), lower_bound_1f1b(b, lengths)
    assert static.recompute.level != "none"
    assert lower_bound_1f1b(free, lengths) < bound <= static.makespan


def test_a_tent_comes_near():
    """With many short documents a lane can be split as the program wants it: the bound is tight."""
    b = ref.basis(ref.GPT_8B, pp=4)
    lengths = [256] * 512
    tokens = [0.0] * 20
    lane = bound_1f1b._Lane(b.stage_layers, tuple(bound_1f1b.fixed_seconds(b)), 1e9, 1.0, 0.0)
    lane = lane._replace(kappa=bound_1f1b._lane(b, [256], [1.0] * 4, 1.0).kappa, work=0.4, head=0.12)
    _, work, _ = dense_program(lane, range(20))
    tokens = [one / sum(work) * sum(lengths) for one in work]
    makespan = simulate(ref.plan_of(b, lengths, tent(b, lengths, tokens))).makespan
    bound, simple = lower_bound_1f1b(b, lengths), lower_bound(b, lengths)
    assert bound <= makespan <= 1.02 * bound
    assert bound >= 1.06 * simple


def test_the_longest_trip():
    """One document alone goes through all stages and back: nothing else bounds it, and the bound is met."""
    b = ref.basis(ref.SMALL, pp=3)
    plan = ref.plan_of(b, [5000], [Microbatch(0, 0, 1, (0,), (5000,))])
    assert simulate(plan).makespan == pytest.approx(lower_bound_1f1b(b, [5000]), rel=1e-9)


def test_speeds():
    b = ref.basis(ref.SMALL, lanes=4, pp=2)
    lengths = [700, 300, 5000, 60, 60, 2000, 900, 30]
    bound = lower_bound_1f1b(b, lengths)
    assert lower_bound_1f1b(replace(b, lane_speed=(2.0,) * 4), lengths) == pytest.approx(bound / 2, rel=1e-6)
    assert lower_bound_1f1b(replace(b, lane_speed=(1.0, 1.0, 1.0, 0.5)), lengths) >= bound * (1 - 1e-5)


def test_no_fixed_costs():
    """The bound is there, with no end to the number of microbatches worth having."""
    b = ref.basis(ref.SMALL, pp=2, hardware=replace(ref.H200, gemm_half_tokens=0, layer_overhead_seconds=0))
    lengths = [40] * 300
    assert lower_bound_1f1b(b, lengths) >= lower_bound(b, lengths)


def test_where_it_is_the_universal_bound():
    one = ref.basis(ref.SMALL, lanes=4)
    assert lower_bound_1f1b(one, [100, 3000]) == lower_bound(one, [100, 3000])
    tight = ref.basis(ref.SMALL, pp=2, hardware=replace(ref.H200, memory_bytes=1.5e8))
    assert lower_bound_1f1b(tight, [10**6]) == lower_bound(tight, [10**6]) == float("inf")


def test_refusals(monkeypatch):
    with pytest.raises(UserError, match=r"virtual_stages=3.*universal bound"):
        lower_bound_1f1b(ref.basis(ref.SMALL, pp=2, virtual_stages=3), [100])
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(UserError, match="pip install scipy"):
        lower_bound_1f1b(ref.basis(ref.SMALL, pp=2), [100])


def test_same_value_again():
    b, lengths = ref.basis(ref.GPT_1B, pp=4, lanes=2), [5000, 300, 300, 70, 9000, 1200] * 4
    assert lower_bound_1f1b(b, lengths) == lower_bound_1f1b(b, list(reversed(lengths)))
