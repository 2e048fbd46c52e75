"""Runs a StepPlan: one optimizer step, in the order in which it happens, on one of the ranks that run it together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from megadcp.data.batch import Pack
from megadcp.engine.agree import agree
from megadcp.engine.graphs import Graphs
from megadcp.engine.lane import Share, check_layout, count_targets, lane_shares, run_lane
from megadcp.engine.measure import Measured, Stopwatch, Timed
from megadcp.engine.transfer import to_device
from megadcp.mesh.coords import Coords, Mesh
from megadcp.mesh.groups import Group, GroupPool
from megadcp.mesh.streams import Streams
from megadcp.nn.part import Part
from megadcp.parallel.gradients import GradientBuffers
from megadcp.plan.basis import Basis
from megadcp.plan.cost import CostModel
from megadcp.plan.step_plan import StepPlan
from megadcp.plan.verify import verify

__all__ = ["Engine", "StepResult", "count_targets", "run_step", "to_device"]


class Updater(Protocol):
    """What turns gradients into new weights. `train.optim` has the real one."""

    def step(self, lr: float) -> None:
        """One update of every parameter at this learning rate."""


@runtime_checkable
class EarlyUpdater(Protocol):
    """One that can be launched before the host knows whether the gradients are finite."""

    def step_unless(self, lr: float, bad: Tensor) -> bool:
        """Launch an update that changes nothing where `bad`, a scalar on the device, is 1. False: it can't, and has done nothing."""

    def settle(self, updated: bool) -> None:
        """Say what has become of the update that was launched last."""


@dataclass
class Engine:
    """What a step needs on one rank: the model or its part, where its gradients are summed, and what updates it.

    clip_norm 0 does not clip. pool: the groups of all ranks; None: this process runs alone. graphs: None: kernels are launched one by one.
    """

    model: nn.Module
    gradients: GradientBuffers
    optimizer: Updater
    device: torch.device
    clip_norm: float = 0.0
    pool: GroupPool | None = None
    graphs: Graphs | None = None

    @property
    def mesh(self) -> Mesh:
        """Of all ranks."""
        return Mesh(1) if self.pool is None else self.pool.mesh

    @property
    def coords(self) -> Coords:
        """Of this rank."""
        return Coords(0, 0, 0) if self.pool is None else self.pool.coords

    @property
    def pipeline(self) -> Group:
        """The ranks that pass microbatches on to each other."""
        return Group.single() if self.pool is None else self.pool.pipeline

    @property
    def streams(self) -> Streams:
        """Where messages and copies of this run travel."""
        return self.gradients.streams

    @property
    def part(self) -> Part | None:
        """Which layers are here; None for a model that knows no parts."""
        found: Part | None = getattr(self.model, "part", None)
        return found


@dataclass(frozen=True)
class StepResult:
    """What one step gave.

    loss_sum: sum of token losses over the global batch; targets: its tokens with a target; grad_norm: before clipping.
    updated: False when the step was skipped, for the reason in `problem`; weights and optimizer are then as before.
    microbatches: those of this rank's lane, on its stage. seconds: the whole step; measured_seconds: what `plan.predicted.seconds` predicts,
    from the first microbatch's begin to the last one's end on this rank; update_seconds: what comes after, as far as
    the host waits for it (on a GPU an update may go on beside the next step's preparation). memory_bytes: GPU peak, or the
    resident set on a CPU. actions: what this rank ran when.
    """

    loss_sum: float
    targets: int
    grad_norm: float
    updated: bool
    problem: str
    microbatches: tuple[Measured, ...]
    seconds: float
    measured_seconds: float
    update_seconds: float
    memory_bytes: int
    actions: tuple[Timed, ...] = ()

    @property
    def loss(self) -> float:
        """Mean token loss of the global batch; NaN without targets."""
        return self.loss_sum / self.targets if self.targets else float("nan")


def run_step(
    engine: Engine, plan: StepPlan, packs: Sequence[Pack], lr: float, refuse: Callable[[float, float], str] | None = None
) -> StepResult:  # fmt: skip
    """One optimizer step. `packs` are this lane's, in slot order.

    refuse: asked with mean loss and gradient norm, both finite and the same on all ranks, why they must not be applied; "" where they may.

    Raises:
        PlanError, ValueError: the plan is not legal, or not for these ranks or packs.
        PlanMismatch: another rank has another plan, or refuses its own. Nothing has run then, on any rank.
    """
    begin = time.perf_counter()
    shares, targets = prepare(engine, plan, packs)

    engine.gradients.zero()
    started, watch = time.perf_counter(), Stopwatch(engine.device)
    losses = run_lane(engine, plan, shares, watch)

    judged = engine.gradients.judge(losses, max(1, targets), engine.clip_norm)
    early = _early(engine, refuse is None and targets > 0)
    launched = early is not None and early.step_unless(lr, judged.bad)
    verdict = judged.read()
    problem = "" if verdict.finite and targets else describe_problem(verdict.loss_sum, targets)
    if refuse is not None and not problem:
        problem = refuse(verdict.loss_sum / targets, verdict.norm)
    if launched and early is not None:
        early.settle(not problem)
    elif not problem:
        engine.optimizer.step(lr)

    done = time.perf_counter()
    return StepResult(
        verdict.loss_sum, targets, verdict.norm, not problem, problem, beside_predictions(engine, plan, shares, watch),
        done - begin, watch.span(), max(0.0, done - started - watch.span()), watch.memory_bytes, watch.actions(),
    )  # fmt: skip


def _early(engine: Engine, allowed: bool) -> EarlyUpdater | None:
    """The optimizer, if the device alone decides whether this step is applied and it can be told so."""
    return engine.optimizer if allowed and isinstance(engine.optimizer, EarlyUpdater) else None


def prepare(engine: Engine, plan: StepPlan, packs: Sequence[Pack]) -> tuple[dict[int, Share], int]:
    """Verify the plan, compare it across ranks, and count the targets of the global batch: known before any backward."""
    shares: dict[int, Share] = {}
    problem: Exception | None = None
    try:
        verify(plan)
        check_layout(engine, plan)
        shares = lane_shares(plan, packs, engine.coords.lane, engine.pool)
    except Exception as error:  # raised by agree, so that the other ranks hear of it instead of waiting
        problem = error
    targets = agree(plan, sum(count_targets(pack) for pack in packs), problem, engine.pool)
    return shares, targets


def beside_predictions(engine: Engine, plan: StepPlan, shares: dict[int, Share], watch: Stopwatch) -> tuple[Measured, ...]:
    """The lane's microbatches in slot order; with pipelines, the predicted seconds are those of this rank's stage."""
    found, cost = [], CostModel(Basis.of(plan)) if plan.layout.pp > 1 else None
    for slot, (seconds, count) in watch.read().items():
        one = shares[slot].microbatch
        predicted = one.seconds if cost is None else cost.stage_seconds(one)[engine.coords.pp]
        found.append(Measured(slot, predicted, seconds, one.bytes, count))
    return tuple(found)


def describe_problem(loss_sum: float, targets: int) -> str:
    """Why a step can't be applied."""
    if not targets:
        return "no document has a target"
    return f"the {'gradient' if abs(loss_sum) < float('inf') else 'loss'} is not finite"
