"""Models, documents and random legal plans of any layout, run on gloo ranks and on one process, for the proofs that both give the same."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch._dynamo  # imported at the first checkpoint: here once, instead of in every rank

from megadcp.backends.torch_sharded import torch_backend
from megadcp.config.schema import (
    ClusterConfig,
    Config,
    DataConfig,
    GemmFlops,
    HardwareConfig,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
)
from megadcp.data.batch import Pack, lane_packs
from megadcp.data.step_documents import IGNORE, StepDocuments
from megadcp.engine.step import Engine, StepResult, run_step
from megadcp.mesh.coords import Mesh
from megadcp.mesh.groups import GroupPool
from megadcp.nn.gpt import GPT
from megadcp.nn.part import parts_of
from megadcp.parallel.assemble import whole_tensors
from megadcp.parallel.gradients import GradientBuffers
from megadcp.plan.basis import Basis, basis_from
from megadcp.plan.cost import CostModel
from megadcp.plan.memory import MemoryModel
from megadcp.plan.step_plan import LEVELS, Microbatch, Predicted, Recompute, StepPlan, round_seconds
from megadcp.plan.verify import verify

MODEL = ModelConfig(layers=4, hidden=16, heads=4, kv_heads=2, head_dim=4, ffn=12, vocab=29, init_std=0.2)
HARDWARE = HardwareConfig(
    "test", GemmFlops(60e9, 120e9, 60e9), 16, 40e9, 300, 4e9, 1e9, 1e-3, 1e-3, 2e-3, 1.0, 64e9, 0.9, 64, 8, 2e9, 0.0, 20e9
)  # fmt: skip
CPU = torch.device("cpu")
SEED, CHUNK = 3, 16


@dataclass(frozen=True)
class Case:
    """One model on one layout, with the lengths of a step's documents; `hide`: share of targets that are masked."""

    tp: int = 1
    stage_layers: tuple[int, ...] = (4,)
    lanes: int = 1
    chunks: int = 1
    sequence_parallel: bool = True
    model: ModelConfig = MODEL
    lengths: tuple[int, ...] = (7, 1, 22, 12, 30, 3, 16, 2)
    hide: float = 0.2
    seed: int = 0
    clip_norm: float = 0.0

    @property
    def world(self) -> int:
        return self.tp * len(self.stage_layers) * self.lanes

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.lanes, self.tp, len(self.stage_layers))

    @property
    def basis(self) -> Basis:
        return basis_from(
            Config(
                run=RunConfig(name="test"),
                model=self.model,
                data=DataConfig(max_length=64),
                parallel=ParallelConfig(self.tp, len(self.stage_layers), self.chunks, self.stage_layers, self.sequence_parallel),
                precision=PrecisionConfig("fp32"),
                cluster=ClusterConfig(processes=self.world),
                hardware=HARDWARE,
            )
        )

    def alone(self) -> Case:
        """The same on one process."""
        return replace(self, tp=1, stage_layers=(self.model.layers,), lanes=1, chunks=1)


@dataclass
class Documents:
    """Random tokens by document id; a share of the targets is hidden."""

    lengths: Sequence[int]
    vocab: int
    hide: float = 0.0
    cache: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def read(self, document: int) -> tuple[np.ndarray, np.ndarray]:
        if document not in self.cache:
            rng = np.random.default_rng(document)
            tokens = rng.integers(0, self.vocab, self.lengths[document])
            labels = np.append(tokens[1:], IGNORE)
            labels[rng.random(len(labels)) < self.hide] = IGNORE
            self.cache[document] = tokens, labels
        return self.cache[document]

    def step(self, index: int) -> StepDocuments:
        return StepDocuments(index, np.arange(len(self.lengths)), np.array(self.lengths), 0.0)


# ----------------------------------------------------------------------------------------------------------------- plans
def assemble_plan(case: Case, microbatches: Sequence[Microbatch], step: int = 5) -> StepPlan:
    """A legal plan of these microbatches, with the figures that belong to it."""
    basis = case.basis
    cost, memory = CostModel(basis), MemoryModel(basis)
    # bytes unrounded: of a few kilobytes, half a byte is more than the tolerance of invariant 8
    scored = [replace(one, seconds=round_seconds(cost.seconds(one)), bytes=memory.bytes(one)) for one in microbatches]  # type: ignore[arg-type]
    fields = {name: getattr(basis, name) for name in ("layout", "schedule", "stage_layers", "model", "precision", "unit", "profile", "lane_speed")}
    plan = StepPlan(step=step, lengths=case.lengths, microbatches=tuple(scored), predicted=Predicted(), **fields)
    verify(plan)
    return plan


def padded_to(lengths: Sequence[int], cp: int, align: int) -> tuple[int, ...]:
    """Each document to a multiple of 2 cp, then the last one until the sum fits."""
    unit = 2 * cp if cp > 1 else 1
    padded = [-(-length // unit) * unit for length in lengths]
    while sum(padded) % (cp * align):
        padded[-1] += unit
    return tuple(padded)


def microbatch(case: Case, place: tuple[int, int, int], documents: Sequence[int], recompute: Recompute, kind: str | None = None) -> Microbatch:
    """place: (slot, lane, cp). kind None: any that is legal."""
    cp = place[2]
    legal = CostModel(case.basis).legal_kinds(cp) if cp > 1 else ("none",)
    padded = padded_to([case.lengths[one] for one in documents], cp, case.basis.align)
    return Microbatch(*place, tuple(documents), padded, recompute, kind or legal[sum(documents) % len(legal)])


def random_plan(case: Case, seed: int, step: int = 5) -> StepPlan:
    """Random packs, groups, slots with holes, recompute and communication."""
    rng = random.Random(seed)
    ids = list(range(len(case.lengths)))
    rng.shuffle(ids)
    most, sizes = rng.choice((1, 2, 3)), [cp for cp in (1, 2, 4, 8) if cp <= case.lanes]
    taken: set[tuple[int, int]] = set()
    made, slots = [], rng.randint(1, 4)
    legal = {cp: CostModel(case.basis).legal_kinds(cp) if cp > 1 else ("none",) for cp in sizes}
    while ids:
        count = rng.randint(1, most)
        documents, ids = ids[:count], ids[count:]
        cp, level = rng.choice(sizes), rng.choice(LEVELS)
        slot, lane = rng.randrange(slots), rng.randrange(case.lanes // cp) * cp
        while {(slot, lane + k) for k in range(cp)} & taken:
            slot += 1
            slots = max(slots, slot + 1)
        taken |= {(slot, lane + k) for k in range(cp)}
        recompute = Recompute(level, 0 if level == "none" else rng.randint(1, min(case.stage_layers)))
        made.append(microbatch(case, (slot, lane, cp), documents, recompute, rng.choice(legal[cp])))
    return assemble_plan(case, made, step)


def packs_of(case: Case, plan: StepPlan, lane: int) -> list[Pack]:
    """What one lane has of its microbatches, in slot order."""
    documents = Documents(case.lengths, case.model.vocab, case.hide)
    return lane_packs(documents, documents.step(plan.step), plan, lane)


# --------------------------------------------------------------------------------------------------------------- running
@dataclass
class NoUpdate:
    """An optimizer that leaves everything as it is."""

    rates: list[float] = field(default_factory=list)

    def step(self, lr: float) -> None:
        self.rates.append(lr)


def make_engine(case: Case, rank: int, pool: GroupPool | None, dtype: torch.dtype = torch.float64) -> Engine:
    """The engine of one rank, with its part of the model."""
    stage = case.mesh.coords(rank).pp
    backend = torch_backend(dtype, CPU, None if pool is None else pool.tp, case.sequence_parallel)
    gpt = GPT(case.model, backend, SEED, CHUNK, parts_of(case.stage_layers, case.chunks)[stage])
    gradients = GradientBuffers(gpt.named_parameters(), pool, case.model.tied, bucket=2000)
    return Engine(gpt, gradients, NoUpdate(), CPU, case.clip_norm, pool)


@dataclass(frozen=True)
class Outcome:
    """Of one step: what every layout must agree on. gradients: whole, on rank 0 only."""

    loss_sum: float
    targets: int
    norm: float
    gradients: dict[str, np.ndarray]
    slots: tuple[int, ...]


def outcome(case: Case, one: Engine, result: StepResult) -> Outcome:
    whole = whole_tensors(one.gradients.pieces(), one.pool, case.model.tied)
    found = {name: tensor.detach().numpy().copy() for name, tensor in whole.items()}
    return Outcome(result.loss_sum, result.targets, result.grad_norm, found, tuple(each.slot for each in result.microbatches))


def run_on_rank(rank: int, world: int, cases: Sequence[tuple[Case, Sequence[StepPlan]]]) -> list[Outcome]:
    """Steps of cases with one layout (models and plans may differ), one after the other in the same groups."""
    results = []
    with GroupPool(cases[0][0].mesh, rank, CPU, timeout_s=60) as pool:
        for case, plans in cases:
            one = make_engine(case, rank, pool)
            for plan in plans:
                results.append(outcome(case, one, run_step(one, plan, packs_of(case, plan, pool.coords.lane), 0.1)))
            one.gradients.close()
    return results


def run_alone(case: Case, step: int = 5) -> Outcome:
    """All documents in one process, by plain autograd, each alone in its microbatch: the truth that every layout is measured against."""
    case = case.alone()
    made = [microbatch(case, (slot, 0, 1), [slot], Recompute()) for slot in range(len(case.lengths))]
    plan = assemble_plan(case, made, step)
    one = make_engine(case, 0, None)
    return outcome(case, one, run_step(one, plan, packs_of(case, plan, 0), 0.1))


def check_equal(found: Outcome, truth: Outcome, bound: float = 1e-10) -> float:
    """Assert that a layout's step is the single process's; gives the largest relative error."""
    assert found.targets == truth.targets
    errors = {"loss": abs(found.loss_sum - truth.loss_sum) / abs(truth.loss_sum), "norm": abs(found.norm - truth.norm) / truth.norm}
    assert found.gradients.keys() == truth.gradients.keys()
    largest = max(float(np.abs(gradient).max()) for gradient in truth.gradients.values())
    for name, gradient in truth.gradients.items():
        assert found.gradients[name].shape == gradient.shape, name
        errors[name] = float(np.abs(found.gradients[name] - gradient).max() / max(np.abs(gradient).max(), 1e-3 * largest))
    assert all(math.isfinite(error) and error < bound for error in errors.values()), errors
    return max(errors.values())
