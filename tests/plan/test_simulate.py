import random
from dataclasses import replace

import plan_reference as ref
import pytest

from megadcp.plan.memory import MemoryModel
from megadcp.plan.simulate import overhead_seconds, simulate, step_seconds
from megadcp.plan.step_plan import Microbatch, Predicted

LAYOUTS = [
    dict(),
    dict(lanes=8),
    dict(lanes=6),
    dict(lanes=4, pp=3, stage_layers=(3, 2, 1)),
    dict(lanes=4, pp=2, virtual_stages=2),
    dict(lanes=2, pp=3, virtual_stages=2),
    dict(pp=4, tp=2),
]


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_a_naive_event_simulation(layout, slow):
    b = ref.basis(ref.SMALL, **layout)
    if slow:
        b = replace(b, lane_speed=tuple(1.0 - 0.1 * (lane % 3) for lane in range(b.layout.lanes)))
    for seed in range(6):
        plan = ref.random_plan(b, random.Random(seed), slots=random.Random(seed).choice((1, 3, 6)))
        makespan, _ = ref.event_simulation(b, plan.microbatches)
        shuffled = list(plan.microbatches)
        random.Random(seed).shuffle(shuffled)
        timeline = simulate(plan)
        assert timeline.makespan == pytest.approx(makespan, rel=1e-12)
        assert simulate(replace(plan, microbatches=tuple(shuffled))).makespan == timeline.makespan
        assert max(event.end for event in timeline.events) == timeline.makespan


def test_groups_wait_for_all_members():
    b = ref.basis(ref.SMALL, lanes=2)
    plan = ref.plan_of(
        b,
        [4000, 100, 600],
        [Microbatch(0, 0, 1, (0,), (4000,)), Microbatch(0, 1, 1, (1,), (100,)), Microbatch(1, 0, 2, (2,), (600,), cp_comm="ring")],
    )
    first, second, third = (ref.stage_seconds(b, one)[0] for one in plan.microbatches)
    assert second < first
    assert simulate(plan).makespan == pytest.approx(first + third, rel=1e-12)


def test_one_microbatch_through_a_pipeline_takes_the_sum_of_its_stages():
    b = ref.basis(ref.SMALL, pp=3, stage_layers=(3, 2, 1))
    plan = ref.plan_of(b, [500], [Microbatch(0, 0, 1, (0,), (500,))])
    assert simulate(plan).makespan == pytest.approx(sum(ref.stage_seconds(b, plan.microbatches[0])), rel=1e-12)


def test_whole_step_by_hand():
    b = ref.basis(ref.GPT_8B, lanes=32)
    weights = 8030261248
    assert overhead_seconds(b) == pytest.approx(0.3 * 6 * weights * 31 / 32 / 300e9 + 20 * weights / 32 / 4e12, rel=1e-12)
    pipeline = ref.basis(ref.GPT_8B, lanes=4, pp=4, tp=2)
    largest = max(MemoryModel(pipeline).parameters(stage) for stage in range(4)) / 2
    assert overhead_seconds(pipeline) == pytest.approx(0.3 * 6 * largest * 3 / 4 / 300e9 + 20 * largest / 4 / 4e12, rel=1e-12)
    plan = replace(ref.plan_of(b, [500], [Microbatch(0, 0, 1, (0,), (500,))]), predicted=Predicted(seconds=2.0))
    assert step_seconds(plan) == 2.0 + overhead_seconds(b)
