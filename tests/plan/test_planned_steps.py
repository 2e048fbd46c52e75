"""The planner, whatever the run and the lengths: legal, what it predicts is true, never slower than static-best, refused only if impossible."""

import json
import math
import random
from collections import Counter
from dataclasses import replace

import naive_simulation as naive
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from random_plans import Run, Step, can_be_planned, steps

from megadcp.config.check import UserError
from megadcp.plan.baselines import static_best
from megadcp.plan.basis import Basis
from megadcp.plan.lower_bound import lower_bound
from megadcp.plan.planner import planner_for
from megadcp.plan.simulate import simulate
from megadcp.plan.step_plan import from_json, plan_hash, to_json
from megadcp.plan.verify import verify

SIX_DIGITS = 6e-6  # what rounding to 6 significant digits may change
MANY = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def refusal(call):
    """(result, "") or (None, the message): one line, by UserError and nothing else."""
    message = ""
    try:
        return call(), message
    except UserError as error:
        message = str(error)
    assert "\n" not in message
    assert 20 < len(message) < 700
    return None, message


def static_of(step):
    return static_best(step.run.basis(), step.lengths, step.capacity, step.choices, step.run.max_cp)


def check(step: Step):
    """Plan a step and check all that can be said of the outcome. Returns the plan, or None when the step is refused."""
    plan, message = refusal(lambda: planner_for(step.config())(3, step.lengths))
    possible = can_be_planned(step)
    assert (plan is not None) == possible, message or "planned, but the naive reading finds no way to fit the memory"
    if plan is None:
        assert static_of(step) is None
        return None
    check_plan(step, plan)
    check_repeats(step, plan)
    return plan


def check_plan(step: Step, plan):
    verify(plan)
    doc = to_json(plan)
    assert naive.first_broken(doc) is None
    assert from_json(json.dumps(doc)) == plan
    assert doc["hash"] == plan_hash(plan) == naive.plan_hash(doc)
    assert plan.lengths == step.lengths
    assert Basis.of(plan) == step.run.basis()
    check_predictions(step, plan, doc)
    for one in plan.microbatches:
        assert one.cp <= step.largest
        assert step.choices in ((), (one.recompute,))


def check_predictions(step: Step, plan, doc):
    predicted = plan.predicted
    makespan, _ = naive.simulate(doc, random.Random(1))
    assert simulate(plan).makespan == pytest.approx(makespan, rel=1e-9)
    assert predicted.seconds == pytest.approx(makespan, rel=SIX_DIGITS)
    sizes = naive.group_sizes(doc)
    peaks = [naive.static_bytes(doc, stage, sizes) + peak for stage, peak in enumerate(naive.peaks(doc))]
    assert predicted.peak_bytes == pytest.approx(peaks, rel=SIX_DIGITS)
    bound = lower_bound(Basis.of(plan), plan.lengths)
    assert bound <= makespan * (1 + 1e-9)
    assert bound * (1 - 2e-5) <= predicted.lower_bound_seconds <= min(bound, predicted.seconds)
    static = static_of(step)
    if static is None:
        assert predicted.static_seconds == 0
    else:
        assert predicted.static_seconds == pytest.approx(static.makespan, rel=SIX_DIGITS)
        assert predicted.seconds <= predicted.static_seconds


def check_repeats(step: Step, plan):
    """The same from a fresh planner, after other steps, and but for names when the documents come in another order."""
    planner = planner_for(step.config())
    order = list(range(len(step.lengths)))
    random.Random(7).shuffle(order)
    shuffled = planner(3, [step.lengths[document] for document in order])
    assert shuffled.predicted == plan.predicted
    assert planner(3, step.lengths) == plan


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=MANY)
@given(steps(pipelines=False))
def test_any_step_without_pipelines(step):
    check(step)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=MANY)
@given(steps(most_lanes=16, most=40))
def test_any_step_with_pipelines(step):
    check(step)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=MANY)
@given(steps(pipelines=False, most=60))
def test_policy_static_is_static_best(step):
    plan, _ = refusal(lambda: planner_for(step.config("static"))(3, step.lengths))
    static = static_of(step)
    assert (plan is None) == (static is None)
    if plan is not None:
        check_plan(step, plan)
        assert plan.predicted.seconds == plan.predicted.static_seconds
        assert len({(one.cp, one.recompute) for one in plan.microbatches}) == 1


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=MANY)
@given(steps(pipelines=False, most=60, longest=5000), st.integers(1, 12000))
@example(Step(Run(), (1001,) * 17), 5000)
@example(Step(Run(lanes=8, stage_layers=(5,), tp=4, overhead=0.0), (1905,) * 50), 2762)
def test_pack_tokens_are_kept(step, cap):
    """Real tokens: alignment may add some."""
    step = replace(step, pack_tokens=cap, run=replace(step.run, memory=141e9))
    plan = planner_for(step.config())(3, step.lengths)
    for one in plan.microbatches:
        assert len(one.documents) == 1 or sum(plan.lengths[document] for document in one.documents) <= cap


PIPELINE = Run(stage_layers=(3, 3, 2), lanes=4)


@pytest.mark.parametrize(
    ("run", "own"),
    [
        (Run(), (1,)),
        (Run(lanes=64), (1,)),
        (Run(lanes=64, precision="fp8_block", tp=4), (1, 1, 1)),
        (Run(lanes=3), (50_000, 50_000)),  # no group of three
        (Run(lanes=7, gpus_per_node=3), (200_000, *[300] * 50)),
        (Run(lanes=2, lane_speed=(1.0, 0.01)), (1000,) * 20),
        (PIPELINE, (1,)),
        (PIPELINE, (70_000, *[100] * 30)),
        (replace(PIPELINE, virtual_stages=2, lanes=3, precision="fp8_block"), (5000, 3, 800)),
        (replace(PIPELINE, lane_speed=(1.0, 2.0, 0.5, 1.0)), (3000,) * 12),
    ],
)
def test_steps_at_the_edges(run, own):
    assert check(Step(run, own)) is not None


def test_memory_from_too_little_to_plenty():
    """One step under more and more memory: refused, then planned, and never again refused."""
    for run, longest in ((Run(lanes=4), 60_000), (Run(lanes=2, stage_layers=(2, 3)), 20_000)):
        outcomes = Counter()
        own = (longest, *[int(longest / k) for k in range(2, 12)])
        for exponent in range(14):
            plan = check(Step(replace(run, memory=5e7 * 1.5**exponent), own))
            assert not (plan is None and outcomes["planned"])
            outcomes["refused" if plan is None else "planned"] += 1
        assert outcomes["refused"] >= 1
        assert outcomes["planned"] >= 5


@pytest.mark.parametrize("own", [(), (0,), (5, -1), (5, 2.5), ("5",), (None,), (math.nan,), (5, True, "x")])
def test_steps_that_are_none(own):
    for run in (Run(lanes=4), PIPELINE):
        plan, message = refusal(lambda run=run: planner_for(run.config())(11, own))
        assert plan is None
        assert message.startswith("step 11")


@pytest.mark.slow
@settings(max_examples=500, deadline=None, suppress_health_check=MANY)
@given(steps(pipelines=False))
def test_many_steps_without_pipelines(step):
    check(step)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=MANY)
@given(steps())
def test_many_steps_with_pipelines(step):
    check(step)
