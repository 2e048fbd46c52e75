"""The refit during a run: what it finds, that all ranks find the same, when it is in force, and that it survives a checkpoint."""

from __future__ import annotations

import dataclasses
import json
import random

import numpy as np
import pytest
import torch
from engine_helpers import HARDWARE, MODEL
from ranks import run_ranks

from megadcp.config.check import UserError
from megadcp.config.schema import ClusterConfig, Config, DataConfig, ParallelConfig, PlanConfig, PrecisionConfig, RunConfig
from megadcp.data.batch import StepLoader
from megadcp.data.step_documents import IGNORE, StepDocuments
from megadcp.engine.measure import Measured
from megadcp.engine.refit import Refit, RefitRules, exchange_seconds
from megadcp.mesh.coords import Mesh
from megadcp.mesh.groups import Group, GroupPool
from megadcp.plan.ahead import PlanWorker
from megadcp.plan.basis import Basis, basis_from
from megadcp.plan.cost import CostModel
from megadcp.plan.fit import Factors, parts_of
from megadcp.plan.fitted_planner import FittedPlanner
from megadcp.plan.planner import planner_for
from megadcp.plan.verify import verify

CPU = torch.device("cpu")
MACHINE = dataclasses.replace(HARDWARE, layer_overhead_seconds=1e-4)  # no part of a tiny model's time dwarfs the others
EAGER = RefitRules(skip=0, change=0.0, anchor=0.0)


def config(lanes=1, tp=1, pp=1, pack_tokens=300, **plan) -> Config:
    return Config(
        run=RunConfig(name="test"), model=dataclasses.replace(MODEL, layers=4), data=DataConfig(max_length=256, tokens_per_step=2048),
        parallel=ParallelConfig(tp=tp, pp=pp), plan=PlanConfig(pack_tokens=pack_tokens, **plan), precision=PrecisionConfig("fp32"),
        cluster=ClusterConfig(processes=lanes * tp * pp), hardware=MACHINE,
    )  # fmt: skip


def lengths(step, total=2000):
    rng = random.Random(step)
    found = []
    while sum(found) < total:
        found.append(min(256, 1 + int(rng.expovariate(1 / 60))))
    return found


def table_of(plan, truth, waiting=0.0, noise=None) -> np.ndarray:
    """What ranks would measure on a machine whose profile is off by the factors `truth`: [ranks, slots]."""
    layout, cost = plan.layout, CostModel(Basis.of(plan))
    mesh = Mesh(layout.lanes, layout.tp, layout.pp)
    table = np.zeros((mesh.world, 1 + max(one.slot for one in plan.microbatches)))
    for one in plan.microbatches:
        for stage in range(layout.pp):
            parts = parts_of(cost, one, stage)
            seconds = sum(part * factor for part, factor in zip(parts, (*truth, 1.0), strict=True)) * (noise() if noise else 1.0)
            for lane in range(one.lane, one.lane + one.cp):
                for tp in range(layout.tp):
                    late = waiting * seconds if lane > one.lane else 0.0  # the first lane comes last: it has waited for nobody
                    table[mesh.rank(stage, lane, tp), one.slot] = seconds + late
    return table


def refitted(setup, truth, steps=4, rules=EAGER, **measured) -> Refit:
    refit, planner = Refit(basis_from(setup), setup.plan.ahead, rules=rules), planner_for(setup)
    for step in range(steps):
        plan = planner(step, lengths(step))
        refit.observe(plan, table_of(plan, truth, **measured))
    return refit


def off(refit, truth) -> float:
    """Largest relative error of the fit's predictions, on another step."""
    plan = planner_for(config())(99, lengths(99))
    cost, errors = CostModel(Basis.of(plan)), []
    for one in plan.microbatches:
        fitted, real = (sum(part * factor for part, factor in zip(parts_of(cost, one), (*by, 1.0), strict=True)) for by in (refit.newest, truth))
        errors.append(abs(fitted / real - 1))
    return max(errors)


# ------------------------------------------------------------------------------------------------------------------- what it finds
@pytest.mark.parametrize("layout", [{}, {"lanes": 4}, {"lanes": 2, "tp": 2}, {"pp": 2}])
def test_the_factors_of_the_machine_are_found(layout):
    truth = Factors(1.4, 0.7, 1.2)
    assert refitted(config(**layout), truth).newest == pytest.approx(truth, rel=2e-3)


@pytest.mark.parametrize(("truth", "bound"), [(Factors(5.0, 5.0, 5.0), 2.0), (Factors(0.1, 0.1, 0.1), 0.5)])
def test_the_factors_stay_within_their_bounds(truth, bound):
    assert refitted(config(), truth).newest == Factors(bound, bound, bound)


def test_who_waited_for_others_does_not_count():
    setup, truth, found = config(lanes=4, pack_tokens=0), Factors(1.2, 1.2, 1.2), []
    plan = planner_for(setup)(0, [250, 250, 2000])
    assert any(one.cp > 1 for one in plan.microbatches)
    for waiting in (0.0, 3.0):
        refit = Refit(basis_from(setup), 0, rules=EAGER)
        found.append(refit.observe(plan, table_of(plan, truth, waiting)))
    assert found[0] == found[1] != Factors()


def test_slow_lanes_are_not_blamed_on_the_profile():
    setup = config(lanes=2, lane_speed=(1.0, 0.5))
    refit, planner = Refit(basis_from(setup), 0, rules=EAGER), planner_for(setup)
    plan = planner(0, lengths(0))
    table = table_of(plan, (1.0, 1.0, 1.0))
    for one in plan.microbatches:
        if one.lane + one.cp == 2:
            table[one.lane :, one.slot] *= 2
    assert refit.observe(plan, table) == Factors()


def test_one_interruption_moves_little():
    setup = config()
    refit, planner = Refit(basis_from(setup), 0, rules=dataclasses.replace(EAGER, anchor=1e-3)), planner_for(setup)
    plan = planner(0, lengths(0))
    table = table_of(plan, (1.0, 1.0, 1.0))
    table[0, 0] *= 100
    assert table.shape[1] >= 6
    assert refit.observe(plan, table) == pytest.approx(Factors(), abs=0.25)


def test_noise_does_not_change_plans_all_the_time():
    rng = random.Random(4)
    refit = refitted(config(), (1.0, 1.0, 1.0), steps=12, rules=RefitRules(), noise=lambda: 1 + rng.uniform(-0.02, 0.02))
    assert refit.newest == Factors()
    truth = Factors(1.5, 1.3, 1.0)
    assert off(refit, truth) > 0.2
    assert off(refitted(config(), truth, steps=12, rules=RefitRules(), noise=lambda: 1 + rng.uniform(-0.02, 0.02)), truth) < 0.03


def test_old_steps_fade():
    setup, planner = config(), planner_for(config())
    refit = Refit(basis_from(setup), 0, rules=EAGER)
    for step in range(30):
        plan = planner(step, lengths(step))
        refit.observe(plan, table_of(plan, Factors(0.8, 0.8, 0.8) if step < 10 else Factors(1.3, 1.3, 1.3)))
    assert off(refit, Factors(1.3, 1.3, 1.3)) < 0.03


def test_first_steps_and_missing_measurements_do_not_count():
    assert refitted(config(), Factors(1.5, 1.5, 1.5), steps=2, rules=RefitRules(skip=2)).newest == Factors()
    setup = config()
    refit, plan = Refit(basis_from(setup), 0, rules=EAGER), planner_for(setup)(0, lengths(0))
    assert refit.observe(plan, np.zeros((1, 9999))) == Factors()


def test_a_foreign_plan_or_a_left_out_step_is_refused():
    setup = config()
    refit, planner = Refit(basis_from(setup), 0), planner_for(setup)
    with pytest.raises(ValueError, match="another layout"):
        refit.observe(planner_for(config(lanes=2))(0, lengths(0)), np.zeros((2, 99)))
    with pytest.raises(ValueError, match="observed after step -1"):
        refit.observe(planner(1, lengths(1)), np.zeros((1, 99)))
    with pytest.raises(ValueError, match="of 3 ranks for a world of 1"):
        refit.observe(planner(0, lengths(0)), np.zeros((3, 99)))


# ------------------------------------------------------------------------------------------------------------------ all ranks alike
def test_all_ranks_hold_the_same_fit():
    setup = config(lanes=2)

    def work(rank, world):
        with GroupPool(Mesh(world), rank, CPU) as pool:
            refit, planner = Refit(basis_from(setup), 1, rules=EAGER), FittedPlanner(setup)
            for step in range(4):
                plan = planner(step, lengths(step), refit.factors(step))
                own = [
                    Measured(one.slot, 0.0, 1e-3 * (1 + rank + one.slot), 0, 0) for one in plan.microbatches if one.lane <= rank < one.lane + one.cp
                ]
                seconds = {one.slot: one.seconds for one in own}
                slots = 1 + max(one.slot for one in plan.microbatches)
                table = exchange_seconds(seconds, slots, pool.world, CPU)
                assert table[rank].tolist() == [seconds.get(slot, 0.0) for slot in range(slots)]
                refit.measured(plan, own, pool.world, CPU)
            return json.dumps(refit.to_dict())

    first, second = run_ranks(2, work)
    assert first == second
    assert json.loads(first)["history"][-1][1:] != [1.0, 1.0, 1.0]


def test_one_rank_needs_no_group():
    assert exchange_seconds({1: 0.5}, 3, Group.single(), CPU).tolist() == [[0.0, 0.5, 0.0]]


# ---------------------------------------------------------------------------------------------------------------- when it is in force
class Corpus:
    fingerprint = "test"

    def step(self, index):
        sizes = np.array(lengths(index, 600))
        return StepDocuments(index, np.arange(len(sizes)), sizes, 0.0)

    def build(self):
        pass

    def read(self, document):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)

    def fill(self, ids, starts, tokens, labels):
        labels[:] = IGNORE


class Asking(PlanWorker):
    """Asks for a step's factors when its lengths are handed in, as a worker that carries them must."""

    def __init__(self, setup, refit):
        super().__init__(setup)
        self.refit, self.asked = refit, {}

    def submit(self, step, lengths):
        self.asked[step] = self.refit.factors(step)
        super().submit(step, lengths)


@pytest.mark.usefixtures("time_limit")
@pytest.mark.parametrize(("ahead", "process"), [(0, False), (1, False), (3, False), (1, True), (2, True)])
def test_the_loader_never_asks_too_early_and_all_runs_switch_at_the_same_step(ahead, process):
    setup, first, count = config(ahead=ahead), 5, 16
    refit = Refit(basis_from(setup), ahead, first, EAGER)
    planner, asked = FittedPlanner(setup), {}

    def plan_for(documents):
        asked[documents.step] = refit.factors(documents.step)
        return planner(documents.step, documents.lengths.tolist(), asked[documents.step])

    with Asking(setup, refit) as worker:
        plans = worker if process else plan_for
        after = {}
        with StepLoader(Corpus(), plans, first, first + count, ahead) as loader:
            for loaded in loader:
                step = loaded.plan.step
                verify(loaded.plan)
                after[step] = refit.observe(loaded.plan, table_of(loaded.plan, Factors(1.0 + step / 100, 1.0, 1.0)))
    asked = worker.asked if process else asked
    assert sorted(asked) == list(range(first, first + count))
    assert {step: after.get(step - 2 * ahead - 1, Factors()) for step in asked} == asked
    assert len(set(asked.values())) > 4


def test_asking_too_early_is_refused():
    refit = Refit(basis_from(config()), 2, first=10)
    assert [refit.factors(step) for step in (10, 14)] == [Factors()] * 2  # made before anything could be measured
    with pytest.raises(ValueError, match="step 15 come from step 10, but the last fitted step is 9"):
        refit.factors(15)


# ------------------------------------------------------------------------------------------------------------------------ checkpoint
def test_a_run_that_goes_on_plans_as_if_it_had_not_stopped():
    setup, planner = config(), planner_for(config())

    def observe(refit, steps):
        for step in steps:
            plan = planner(step, lengths(step))
            refit.observe(plan, table_of(plan, Factors(1 + step / 50, 1.1, 0.9)))

    whole = Refit(basis_from(setup), 2, rules=EAGER)
    observe(whole, range(12))
    half = Refit(basis_from(setup), 2, rules=EAGER)
    observe(half, range(7))
    again = Refit(basis_from(setup), 2, first=7, rules=EAGER)
    assert again.load(json.loads(json.dumps(half.to_dict()))) == ""
    assert [again.factors(step) for step in range(7, 12)] == [half.factors(step) for step in range(7, 12)]
    assert len({half.factors(step) for step in range(7, 12)}) > 1
    observe(again, range(7, 12))
    assert again.to_dict() == whole.to_dict()


def test_another_profile_starts_anew():
    state = refitted(config(), Factors(1.5, 1.5, 1.5)).to_dict()
    other = dataclasses.replace(config(), hardware=dataclasses.replace(MACHINE, attention_flops=1e9))
    refit = Refit(basis_from(other), 2, first=4)
    assert "starts anew" in refit.load(state)
    assert refit.newest == Factors()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"last": 2}, "is of step 2, but the run goes on with step 4"),
        ({"matrix": [[1.0]]}, "not the moments"),
        ({"weight": float("nan")}, "not the moments"),
        ({"history": [[0, 1.0]]}, "can't be read"),
        ({"vector": None}, "not the moments|can't be read"),
    ],
)
def test_a_damaged_state_is_refused(change, message):
    refit = Refit(basis_from(config()), 2, first=4)
    with pytest.raises(UserError, match=message):
        refit.load({**refitted(config(), Factors(1.5, 1.5, 1.5)).to_dict(), **change})
