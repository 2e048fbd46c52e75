"""The Transformer Engine backend on gloo ranks, with the recording stand-in: one process's gradients, and the right group at every call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import te_fake
import torch
from layouts import CPU, HARDWARE, MODEL, Case, NoUpdate, Outcome, assemble_plan, check_equal, microbatch, outcome, packs_of, random_plan, run_alone
from ranks import RankFailed, run_ranks

from megadcp.backends.te_backend import TeBackend
from megadcp.config.schema import ClusterConfig, Config, DataConfig, ModelConfig, ParallelConfig, PrecisionConfig, RunConfig
from megadcp.engine.placement import Placement
from megadcp.engine.step import Engine, run_step
from megadcp.engine.transfer import to_device
from megadcp.mesh.groups import GroupPool
from megadcp.nn.gpt import GPT
from megadcp.nn.part import parts_of
from megadcp.parallel.gradients import GradientBuffers
from megadcp.plan.basis import Basis, basis_from
from megadcp.plan.cost import CostModel
from megadcp.plan.planner import planner_for
from megadcp.plan.step_plan import Microbatch, Recompute, StepPlan

KINDS = {"ring": "p2p", "all_gather": "all_gather", "ulysses": "a2a", "2d": "a2a+p2p", "none": "none"}


def splits_of(case: Case) -> dict[int, int]:
    cost = CostModel(case.basis)
    return {cp: cost.head_split(cp) for cp in (2, 4, 8) if cp <= case.lanes and cost.legal("2d", cp)}


def te_engine(case: Case, rank: int, pool: GroupPool, recorder: te_fake.Recorder, fp8: str = "") -> Engine:
    backend = TeBackend(te_fake.make(recorder), (torch.float64, CPU), pool.tp, case.sequence_parallel, fp8)
    part = parts_of(case.stage_layers, case.chunks)[case.mesh.coords(rank).pp]
    gpt = GPT(case.model, backend, 3, 16, part)
    gradients = GradientBuffers(gpt.named_parameters(), pool, case.model.tied, bucket=2000)
    return Engine(gpt, gradients, NoUpdate(), CPU, case.clip_norm, pool)


Found = tuple[list[Outcome], list[te_fake.Event], tuple[int, int, int]]


def run_on_rank(rank: int, world: int, case: Case, plans: Sequence[StepPlan], fp8: str, unit: int) -> Found:
    """Outcomes, all events and this rank's place."""
    with GroupPool(case.mesh, rank, CPU, timeout_s=60, overlap=True, splits=splits_of(case)) as pool:
        recorder = te_fake.Recorder(unit, pool)
        one = te_engine(case, rank, pool, recorder, fp8)
        done = [outcome(case, one, run_step(one, plan, packs_of(case, plan, pool.coords.lane), 0.1)) for plan in plans]
        one.gradients.close()
        assert not recorder.regions
        assert not recorder.checkpoints
        events = [te_fake.Event(each.what, {name: _plain(value) for name, value in each.facts.items()}) for each in recorder.events]
        return done, events, tuple(pool.coords)


def _plain(value: Any) -> Any:
    """Without torch's groups, which don't travel: whether there is one."""
    if isinstance(value, dict):
        handles = value.get("cp_group")
        return {
            **{name: each for name, each in value.items() if name != "cp_group"},
            "groups": len(handles) if isinstance(handles, list) else handles is not None,
        }
    return value


def check(case: Case, plans: Sequence[StepPlan], fp8: str = "", unit: int = 1) -> list[Found]:
    truth = run_alone(Case(**{name: getattr(case, name) for name in Case.__dataclass_fields__}))
    found = run_ranks(case.world, run_on_rank, case, plans, fp8, unit, timeout_s=90)
    for outcomes, events, coords in found:
        if coords == (0, 0, 0):
            for one in outcomes:
                check_equal(one, truth)
        check_attention(case, plans, events, coords)
    return found


def facts_of(case: Case, one: Microbatch, coords: tuple[int, int, int]) -> dict[str, Any]:
    """What attention must be told of a microbatch."""
    real, padded = [0], [0]
    for document, size in zip(one.documents, one.padded, strict=True):
        real.append(real[-1] + case.lengths[document])
        padded.append(padded[-1] + size)
    ranks = case.mesh.lane_ranks(coords[0], coords[2], one.lane, one.cp) if one.cp > 1 else ()
    return {
        "cp": one.cp, "kind": KINDS[one.cp_comm], "ranks": ranks, "real": real, "padded": padded, "longest": max(one.padded),
        "pad_between_seqs": real != padded, "fp8": None,
    }  # fmt: skip


def check_attention(case: Case, plans: Sequence[StepPlan], events: Sequence[te_fake.Event], coords: tuple[int, int, int]) -> None:
    """Every call has its microbatch's group set just before and none just after, and as many calls come as layers and recompute ask for."""
    layers = case.stage_layers[coords[0]]
    wanted: Counter[str] = Counter()
    for plan in plans:
        for one in plan.microbatches:
            if one.lane <= coords[1] < one.lane + one.cp:
                again = min(layers, -(-one.recompute.layers // case.chunks) * case.chunks) if one.recompute.level == "full" else 0
                facts = facts_of(case, one, coords)
                wanted[str((facts, False))] += layers
                if again:
                    wanted[str((facts, True))] += again
    seen: Counter[str] = Counter()
    for index, event in enumerate(events):
        if event.what != "attention":
            continue
        facts = {**event.facts, "fp8": None}
        module, again = facts.pop("module"), facts.pop("again")
        before, after = events[index - 1].facts, events[index + 1].facts
        assert events[index - 1].what == events[index + 1].what == "group"
        assert before["module"] == after["module"] == module
        assert (before["cp"]["cp_global_ranks"] or []) == list(facts["ranks"])
        assert before["cp"]["groups"] == {"none": False, "a2a+p2p": 2}.get(facts["kind"], True)
        assert after["cp"] == {"groups": False, "cp_global_ranks": None, "cp_stream": None, "cp_comm_type": "p2p"}
        seen[str((facts, again))] += 1
    assert seen == wanted


# ------------------------------------------------------------------------------------------------------------- by layout
def mixed_plan(case: Case, levels: Sequence[str]) -> StepPlan:
    """All kinds and sizes in one step of four lanes; a different level in each."""
    places = [
        ((0, 0, 4), [2, 0], "ring"), ((1, 0, 4), [3], "2d"), ((2, 0, 2), [1, 4], "ulysses"), ((2, 2, 2), [5], "ring"), ((3, 0, 4), [6], "all_gather"),
        ((4, 1, 1), [7], "none"),
    ]  # fmt: skip
    made = []
    for number, (place, documents, kind) in enumerate(places):
        level = levels[number % len(levels)]
        made.append(microbatch(case, place, documents, Recompute(level, 0 if level == "none" else min(case.stage_layers)), kind))
    return assemble_plan(case, made)


@pytest.mark.parametrize("levels", [("none",), ("full", "selective", "mlp"), ("mlp", "full", "selective")])
def test_kinds_mix_in_one_step(levels):
    case = Case(lanes=4)
    found = check(case, [mixed_plan(case, levels)])
    kinds = {event.facts["kind"] for _, events, _ in found for event in events if event.what == "attention"}
    assert kinds == set(KINDS.values())


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_and_context_parallel(sequence_parallel):
    """Key and value heads of each rank are one: ulysses isn't legal, and kinds go on by ring and gathering."""
    case = Case(tp=2, lanes=2, sequence_parallel=sequence_parallel)
    found = check(case, [random_plan(case, seed) for seed in (1, 2)])
    modes = Counter(event.facts["mode"] for event in found[0][1] if event.what == "linear")
    assert set(modes) == {"column", "row"}


@pytest.mark.parametrize("model", [
    replace(MODEL, kv_heads=1, qkv_bias=True, out_bias=True, mlp_bias=True, norm="layernorm", mlp="gelu"),
    replace(MODEL, tied=True, qk_norm=True, residual_dropout=0.2),
])  # fmt: skip
def test_tensor_parallel_models(model):
    """Biases, heads that both ranks hold, norms of heads, dropout."""
    case = Case(tp=2, model=model)
    check(case, [random_plan(case, 3)])


@pytest.mark.parametrize("chunks", [1, 2])
def test_pipelines(chunks):
    """Recompute of one microbatch runs between forwards of others, whose groups it must not take."""
    case = Case(stage_layers=(2, 2), lanes=2, chunks=chunks)
    plans = [random_plan(case, seed) for seed in (4, 5)]
    found = check(case, plans)
    assert any(event.what == "attention" and event.facts["again"] for _, events, _ in found for event in events)


# ------------------------------------------------------------------------------------------------------------------ fp8
class Fp8Case(Case):
    """Padded for fp8_current; only the stand-in's checks know of fp8, values stay exact."""

    @property
    def basis(self) -> Basis:
        return replace(super().basis, precision="fp8_current", unit=16)


FP8_MODEL = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=32, vocab=29, init_std=0.2)


def test_rows_fit_fp8_after_both_cuts():
    """Context parallelism and sequence parallelism both divide a microbatch's rows; what is left is a multiple of 16."""
    case = Fp8Case(tp=2, lanes=2, model=FP8_MODEL, stage_layers=(2,))
    plans = [random_plan(case, seed) for seed in (6, 7)]
    assert all(sum(one.padded) // one.cp % 32 == 0 for plan in plans for one in plan.microbatches)
    found = check(case, plans, "fp8_current", 16)
    for _, events, coords in found:
        outer = [event for event in events if event.what == "enter" and event.facts["depth"] == 1 and not event.facts["again"]]
        own = [one for plan in plans for one in plan.microbatches if one.lane <= coords[1] < one.lane + one.cp]
        assert len(outer) == len(own)  # one region for each microbatch, however many layers and recomputes
        assert all(event.facts["enabled"] for event in outer)
        assert all(event.facts["fp8"] for event in events if event.what == "linear")


def test_the_stand_in_sees_rows_that_do_not_fit():
    case = Case(tp=2, model=FP8_MODEL, stage_layers=(2,))
    with pytest.raises(RankFailed, match="fp8 can't multiply"):
        run_ranks(2, run_on_rank, case, [random_plan(case, 6)], "fp8_current", 16, timeout_s=60)


@pytest.mark.parametrize(("precision", "unit"), [("fp8_current", 16), ("fp8_block", 128)])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_planner_pads_for_both_cuts(precision, unit, sequence_parallel):
    model = replace(FP8_MODEL, hidden=256, heads=8, kv_heads=8, head_dim=32, ffn=256)
    config = Config(
        run=RunConfig(name="test"), model=model, data=DataConfig(max_length=4096), parallel=ParallelConfig(2, sequence_parallel=sequence_parallel),
        precision=PrecisionConfig(precision), cluster=ClusterConfig(processes=8), hardware=HARDWARE,
    )  # fmt: skip
    assert basis_from(config).unit == unit
    plan = planner_for(config)(1, [3000, 17, 1, 900, 250, 31, 700, 129])
    assert all(sum(one.padded) // one.cp % (unit * (2 if sequence_parallel else 1)) == 0 for one in plan.microbatches)


# ------------------------------------------------------------------------------------------------------------ refusals
def refused_on_rank(rank: int, world: int, kind: str, splits: dict[int, int], model: ModelConfig) -> str:
    case = Case(lanes=4, model=model)
    with GroupPool(case.mesh, rank, CPU, timeout_s=60, splits=splits) as pool:
        recorder = te_fake.Recorder(1, pool)
        backend = TeBackend(te_fake.make(recorder), (torch.float64, CPU))
        core = backend.core_attention(model.heads, model.kv_heads, model.head_dim)
        made = Microbatch(0, 0, 4, (0,), (8,), Recompute(), kind)

        plan = assemble_plan(replace(case, lengths=(8,)), [replace(made, cp_comm="ring")])
        batch = to_device(packs_of(replace(case, lengths=(8,)), plan, pool.coords.lane)[0], CPU)
        q, k = (torch.zeros(2, heads, model.head_dim, dtype=torch.float64) for heads in (model.heads, model.kv_heads))
        try:
            core(q, k, k, batch, Placement.of(1, made, pool))
        except ValueError as error:
            return str(error)
        return ""


@pytest.mark.parametrize(("kind", "splits", "kv_heads", "message"), [
    ("ulysses", {}, 2, "cp_comm=ulysses divides heads between 4 members, but there are 4 and 2 kv heads; ring always works"),
    ("2d", {}, 2, "cp_comm=2d of 4 lanes needs groups of 2 and 2 ranks, but there are no groups"),
    ("2d", {4: 2}, 1, "cp_comm=2d of 4 lanes needs groups of 1 and 4 ranks, but there are groups of 2 and 2"),
    ("star", {}, 2, "cp_comm=star is unknown; legal: ring, all_gather, ulysses, 2d"),
    ("2d", {4: 2}, 2, ""),
])  # fmt: skip
def test_plans_made_by_hand(kind, splits, kv_heads, message):
    assert run_ranks(4, refused_on_rank, kind, splits, replace(MODEL, kv_heads=kv_heads)) == [message] * 4
