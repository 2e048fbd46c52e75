"""columns.py against the simulator and the memory walk, which go lane by lane."""

import random

import numpy as np
import pytest
from plan_reference import basis, random_plan

from megadcp.plan.actions import slot_count
from megadcp.plan.columns import Blocks, makespans, peaks
from megadcp.plan.cost import CostModel
from megadcp.plan.memory import MemoryModel
from megadcp.plan.simulate import run

LAYOUTS = [
    {"lanes": 4, "pp": 2},
    {"lanes": 4, "pp": 4},
    {"lanes": 6, "pp": 3, "stage_layers": (4, 7, 5)},
    {"lanes": 4, "pp": 2, "virtual_stages": 2},
    {"lanes": 8, "pp": 4, "virtual_stages": 2},
]


def plan_in_columns(layout, seed):
    """One plan as columns, one a lane: seconds [S, p, R], present [S, R], blocks, stored and passing [S, p, R]."""
    layout = dict(layout)
    b = basis(lanes=layout.pop("lanes"), **layout)
    plan = random_plan(b, random.Random(seed), slots=7)
    cost, memory = CostModel(b), MemoryModel(b)
    slots, stages, lanes = slot_count(b, plan.microbatches), b.layout.pp, b.layout.lanes
    seconds, stored, passing = np.zeros((slots, stages, lanes)), np.zeros((slots, stages, lanes)), np.zeros((slots, stages, lanes))
    present, size = np.zeros((slots, lanes), bool), np.ones((slots, lanes), np.int64)
    for one in plan.microbatches:
        at = slice(one.lane, one.lane + one.cp)
        present[one.slot, at], size[one.slot, at] = True, one.cp
        for stage, value in enumerate(cost.stage_seconds(one)):
            seconds[one.slot, stage, at] = value
            stored[one.slot, stage, at] = memory.stored(stage, one.tokens / one.cp, one.recompute)
            passing[one.slot, stage, at] = memory.passing(stage, one.tokens / one.cp, one.recompute.level)
    blocks = []
    for row in size:
        starts, lane = [], 0
        while lane < lanes:
            starts.append(lane)
            lane += int(row[lane])
        blocks.append(None if len(starts) == lanes else Blocks(np.array(starts), row[starts]))
    return b, plan, seconds, present, blocks, stored, passing


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_coupled_lanes_end_when_the_simulator_says(layout, seed):
    b, plan, seconds, present, blocks, _, _ = plan_in_columns(layout, seed)
    assert makespans(seconds, present, b.layout.virtual_stages, blocks).max() == pytest.approx(
        run(CostModel(b), plan.microbatches).makespan, rel=1e-12
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_peaks_equal_the_walk(layout):
    b, plan, _, _, _, stored, passing = plan_in_columns(layout, 5)
    assert peaks(stored, passing, b.layout.virtual_stages).max(axis=1) == pytest.approx(MemoryModel(b).peaks(plan.microbatches), rel=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_largest_of_each_slot_in_one_column_is_never_below_the_truth(layout):
    b, _, seconds, present, blocks, _, _ = plan_in_columns(layout, 6)
    together = makespans(seconds, present, b.layout.virtual_stages, blocks).max()
    most = makespans(seconds.max(axis=2, keepdims=True), np.ones((seconds.shape[0], 1), bool), b.layout.virtual_stages)[0]
    assert most >= together * (1 - 1e-12)


def test_columns_do_not_see_each_other():
    _, _, seconds, present, _, _, _ = plan_in_columns(LAYOUTS[1], 7)
    together = makespans(seconds, present)
    for lane in range(seconds.shape[2]):
        assert makespans(seconds[:, :, [lane]], present[:, [lane]])[0] == together[lane]
