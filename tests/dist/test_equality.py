"""Whatever the plan and the layout: loss, gradient norm and every gradient are those of one process that runs each document alone (fp64).

The truth takes the same model code without ranks, groups, packing, padding or recompute; tests/engine and tests/nn compare that with others.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from layouts import MODEL, Case, Outcome, assemble_plan, check_equal, make_engine, microbatch, packs_of, random_plan, run_alone, run_on_rank
from ranks import run_ranks

from megadcp.engine.step import run_step
from megadcp.mesh.groups import GroupPool
from megadcp.plan.cost import CostModel
from megadcp.plan.step_plan import Recompute, StepPlan

TIED = replace(MODEL, tied=True, vocab=31)
DROPS = replace(MODEL, residual_dropout=0.2, embedding_dropout=0.1)
OTHER = replace(
    MODEL, mlp="gelu", norm="layernorm", position="learned", max_position=64, qkv_bias=True, out_bias=True, mlp_bias=True, tied=True, vocab=33
)
FEW = replace(MODEL, kv_heads=1, qk_norm=True, residual_dropout=0.1)
LEVELS = (Recompute(), Recompute("selective", 1), Recompute("mlp", 1), Recompute("full", 1))


@lru_cache
def truth(case: Case) -> Outcome:
    return run_alone(case)


def prove(*cases: Case, plans: int = 2) -> None:
    """Run random plans of cases with one layout in one set of processes."""
    work = [(case, [random_plan(case, 10 * case.seed + number) for number in range(plans)]) for case in cases]
    found = run_ranks(cases[0].world, run_on_rank, work, timeout_s=100)[0]
    for number, one in enumerate(found):
        check_equal(one, truth(cases[number // plans].alone()))


QUICK = {
    "tp 4 over 2 kv heads, no sequence parallelism": Case(tp=4, sequence_parallel=False, model=TIED),
    "pp 4, uneven stages": Case(stage_layers=(2, 1, 1, 2), model=replace(DROPS, layers=6)),
    "pp 2 in 2 chunks": Case(stage_layers=(3, 2), chunks=2, model=replace(TIED, layers=5), seed=1),
    "8 lanes": Case(lanes=8, model=FEW, seed=2),
    "3 lanes of pp 2, in chunks": Case(lanes=3, stage_layers=(2, 2), chunks=2, model=OTHER, seed=3),
    "2 lanes of tp 2, pp 2": Case(lanes=2, tp=2, stage_layers=(3, 1), model=replace(TIED, residual_dropout=0.2), seed=4),
    "4 lanes of tp 2": Case(lanes=4, tp=2, model=FEW, sequence_parallel=False, seed=5),
}


@pytest.mark.parametrize("name", QUICK)
def test_a_random_plan_on_a_layout(name: str) -> None:
    prove(QUICK[name])


MESHES = [
    (tp, pp, lanes) for tp in (1, 2, 4) for pp in (1, 2, 3, 4) for lanes in (1, 2, 3, 4, 8) if 1 < tp * pp * lanes <= 8
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_layout_of_at_most_8_ranks(tp: int) -> None:
    """Each with virtual stages or not, sequence parallelism or not, tied or not, for models of several kinds."""
    for number, (_, pp, lanes) in enumerate(one for one in MESHES if one[0] == tp):
        cases = []
        for chunks in (1, 2) if pp > 1 else (1,):
            for sequence_parallel in (True, False) if tp > 1 else (True,):
                for tied in (True, False):
                    model = replace((DROPS, FEW, OTHER)[(number + len(cases)) % 3], layers=2 * pp + 1, tied=tied)
                    stages = (3, *[2] * (pp - 1))
                    cases.append(Case(tp, stages, lanes, chunks, sequence_parallel, model, seed=100 * number + len(cases)))
        prove(*cases, plans=1)


# ------------------------------------------------------------------------------------------------------ plans of one kind
def composite(case: Case) -> StepPlan:
    """Eight microbatches on four lanes: cp 4, 2, 1, 4, 4, 2 on lane 0, and on most slots a full recompute right before another group's turn."""
    none, selective, mlp, full = LEVELS
    chosen = [
        ((0, 0, 4), full), ((1, 0, 2), full), ((1, 2, 2), mlp), ((2, 0, 1), full),
        ((2, 2, 2), full), ((3, 0, 4), selective), ((4, 0, 4), full), ((5, 0, 2), none),
    ]  # fmt: skip
    return assemble_plan(case, [microbatch(case, place, [index], level) for index, (place, level) in enumerate(chosen)])


def lopsided(case: Case) -> StepPlan:
    """Five microbatches on lane 0, one on lane 1, nothing at all on lanes 2 and 3; slots 1 and 4 are empty everywhere."""
    places = [(0, 0, 1), (2, 0, 1), (3, 0, 1), (5, 0, 1), (6, 0, 1), (3, 1, 1)]
    documents = [[0, 1], [2], [3], [4], [5, 6], [7]]
    made = [microbatch(case, place, own, LEVELS[index % 4]) for index, (place, own) in enumerate(zip(places, documents, strict=True))]
    return assemble_plan(case, made)


def last_lane_only(case: Case) -> StepPlan:
    """Everything on lane 3."""
    return assemble_plan(case, [microbatch(case, (slot, 3, 1), [slot], LEVELS[slot % 4]) for slot in range(8)])


@pytest.mark.parametrize("case", [Case(lanes=4, model=DROPS), Case(lanes=4, stage_layers=(2, 2), model=TIED)], ids=["pp 1", "pp 2"])
def test_plans_of_one_kind(case: Case) -> None:
    """Groups and levels that change from one microbatch to the next while several are in flight; lanes with little or nothing to do."""
    found = run_ranks(case.world, run_on_rank, [(case, [composite(case), lopsided(case), last_lane_only(case)])])
    for one in found[0]:
        check_equal(one, truth(case.alone()))
    ran = [[one.slots for one in rank] for rank in found]
    assert ran[0] == [(0, 1, 2, 3, 4, 5), (0, 2, 3, 5, 6), ()]
    assert ran[1] == [(0, 1, 3, 4, 5), (3,), ()]
    assert ran[3] == [(0, 1, 2, 3, 4), (), tuple(range(8))]
    if case.world == 8:
        assert ran[4:] == ran[:4]  # the second stages of the same lanes


SHARES = {
    "one-token documents": Case(lengths=(1, 1, 1, 9, 1, 1, 1, 1, 2)),
    "few targets": Case(hide=0.96, lengths=(7, 1, 22, 12, 30, 3, 16, 60)),
    "shorter than the group": Case(lengths=(3, 2, 5, 3, 4, 2, 1, 7)),
}


@pytest.mark.parametrize("name", SHARES)
def test_documents_of_one_kind(name: str) -> None:
    case = replace(SHARES[name], lanes=4, model=TIED)
    assert truth(case.alone()).targets > 0
    prove(case, plans=1)


def test_one_target_in_all_the_step() -> None:
    """Documents of one token have none: a single document of two tokens is the whole loss, wherever it lies."""
    case = Case(lanes=2, stage_layers=(2, 2), lengths=(1, 1, 2, 1, 1), hide=0.0)
    assert truth(case.alone()).targets == 1
    prove(case, plans=3)


def no_target(rank: int, world: int, case: Case) -> tuple[bool, str, bool]:
    with GroupPool(case.mesh, rank, torch.device("cpu")) as pool:
        one, plan = make_engine(case, rank, pool), random_plan(case, 0)
        result = run_step(one, plan, packs_of(case, plan, pool.coords.lane), 0.1)
        return result.updated, result.problem, math.isnan(result.loss)


def test_a_step_without_targets_is_skipped_by_all() -> None:
    assert run_ranks(4, no_target, Case(lanes=2, stage_layers=(2, 2), hide=1.0)) == [(False, "no document has a target", True)] * 4


# ------------------------------------------------------------------------------------------------------------- decisions
def spoiled(rank: int, world: int, case: Case, culprit: int, value: float) -> list[tuple[bool, str, int]]:
    """A gradient of one rank's first microbatch is spoiled in the first of two steps."""
    with GroupPool(case.mesh, rank, torch.device("cpu")) as pool:
        one, plan, found = make_engine(case, rank, pool), random_plan(case, 1), []
        parameter = next(iter(one.model.layers.values())).mlp.down.weight  # type: ignore[union-attr, operator]
        for step in range(2):
            if rank == culprit and step == 0:
                hook = parameter.register_hook(lambda gradient: torch.full_like(gradient, value))
            result = run_step(one, plan, packs_of(case, plan, pool.coords.lane), 0.1)
            found.append((result.updated, result.problem, len(one.optimizer.rates)))  # type: ignore[attr-defined]
            if rank == culprit and step == 0:
                hook.remove()
        return found


@pytest.mark.parametrize(("culprit", "value"), [(1, math.nan), (6, math.inf)])
def test_all_ranks_skip_a_step_that_is_bad_on_one(culprit: int, value: float) -> None:
    case = Case(lanes=2, tp=2, stage_layers=(2, 2), lengths=(7, 5, 22, 12, 30, 9, 16, 8), seed=1)
    assert run_ranks(8, spoiled, case, culprit, value) == [[(False, "the gradient is not finite", 0), (True, "", 1)]] * 8


def clipped(rank: int, world: int, case: Case) -> list[Outcome]:
    return run_on_rank(rank, world, [(case, [random_plan(case, 2)])])


def test_clipping_follows_the_norm_of_the_whole() -> None:
    case = Case(lanes=2, tp=2, stage_layers=(2, 2), model=TIED, clip_norm=1e-3)
    one = run_ranks(8, clipped, case)[0][0]
    check_equal(one, truth(case.alone()))
    assert one.norm > 1e-2
    assert math.sqrt(sum(float((gradient**2).sum()) for gradient in one.gradients.values())) == pytest.approx(1e-3, rel=1e-12)


# -------------------------------------------------------------------------------------------------------------- measures
def measured(rank: int, world: int, case: Case) -> tuple[list[tuple[int, float, int, float]], float, float]:
    with GroupPool(case.mesh, rank, torch.device("cpu")) as pool:
        one, plan = make_engine(case, rank, pool), random_plan(case, 3)
        result = run_step(one, plan, packs_of(case, plan, 0), 0.1)
        rows = [(each.slot, each.predicted_seconds, each.predicted_bytes, each.seconds) for each in result.microbatches]
        return rows, result.measured_seconds, result.seconds


def test_each_stage_measures_its_own_part_of_every_microbatch() -> None:
    case = Case(stage_layers=(3, 1), chunks=1)
    plan = random_plan(case, 3)
    cost, order = CostModel(case.basis), sorted(plan.microbatches, key=lambda one: one.slot)
    for stage, (rows, span, whole) in enumerate(run_ranks(2, measured, case)):
        assert [row[0] for row in rows] == [one.slot for one in order]
        assert [row[1] for row in rows] == [cost.stage_seconds(one)[stage] for one in order]
        assert [row[2] for row in rows] == [one.bytes for one in order]
        assert all(row[3] > 0 for row in rows)
        assert 0 < sum(row[3] for row in rows) <= span < whole
