"""Runs a StepPlan: one optimizer step, in the order in which it happens.

Legend: t tokens of a microbatch, n documents in it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from megadcp.data.batch import Pack
from megadcp.engine.measure import Measured, Stopwatch
from megadcp.engine.placement import Placement
from megadcp.nn.backend import IGNORE, PackedTokens
from megadcp.parallel.gradients import GradientBuffers
from megadcp.plan.step_plan import Microbatch, StepPlan
from megadcp.plan.verify import verify


class Updater(Protocol):
    """What turns gradients into new weights. `train.optim` has the real one."""

    def step(self, lr: float) -> None:
        """One update of every parameter at this learning rate."""


@dataclass
class Engine:
    """What a step needs: the model, where its gradients are summed, and what updates it. clip_norm 0 does not clip."""

    model: nn.Module
    gradients: GradientBuffers
    optimizer: Updater
    device: torch.device
    clip_norm: float = 0.0


@dataclass(frozen=True)
class StepResult:
    """What one step gave.

    loss_sum: sum of token losses over the global batch; targets: its tokens with a target; grad_norm: before clipping.
    updated: False when the step was skipped, for the reason in `problem`; weights and optimizer are then as before.
    seconds: the whole step; update_seconds: the part after the last microbatch; memory_bytes: GPU peak, or the resident set on a CPU.
    """

    loss_sum: float
    targets: int
    grad_norm: float
    updated: bool
    problem: str
    microbatches: tuple[Measured, ...]
    seconds: float
    update_seconds: float
    memory_bytes: int

    @property
    def loss(self) -> float:
        """Mean token loss of the global batch; NaN without targets."""
        return self.loss_sum / self.targets if self.targets else float("nan")

    @property
    def measured_seconds(self) -> float:
        """What `plan.predicted.seconds` predicts: forward and backward of all microbatches."""
        return sum(one.seconds for one in self.microbatches)


def run_step(engine: Engine, plan: StepPlan, packs: Sequence[Pack], lr: float) -> StepResult:
    """One optimizer step. `packs` belong to the plan's microbatches in slot order. PlanError if the plan is not legal."""
    begin = time.perf_counter()
    verify(plan)
    order = in_slot_order(plan, packs)
    targets = sum(count_targets(pack) for pack in packs)  # of the global batch, known before any backward

    engine.gradients.zero()
    losses, watch = [], Stopwatch(engine.device)
    for microbatch, pack in zip(order, packs, strict=True):
        with watch.microbatch():
            batch = to_device(pack, engine.device)
            loss = engine.model(batch, Placement.of(plan.step, microbatch))
            watch.forward_done()
            loss.backward()
        losses.append(loss.detach())

    ran = time.perf_counter()
    verdict = engine.gradients.finish(losses, max(1, targets), engine.clip_norm)
    problem = "" if verdict.finite and targets else describe_problem(verdict.loss_sum, targets)
    if not problem:
        engine.optimizer.step(lr)

    done = time.perf_counter()
    pairs = zip(order, watch.read(), strict=True)
    measured = tuple(Measured(one.slot, one.seconds, seconds, one.bytes, count) for one, (seconds, count) in pairs)
    return StepResult(verdict.loss_sum, targets, verdict.norm, not problem, problem, measured, done - begin, done - ran, watch.memory_bytes)


def in_slot_order(plan: StepPlan, packs: Sequence[Pack]) -> list[Microbatch]:
    """The lane's microbatches in slot order. ValueError unless `packs` are theirs."""
    if plan.layout.lanes != 1:
        raise ValueError(f"the plan of step {plan.step} is for {plan.layout.lanes} lanes, but this engine runs one; make it with one process")
    order = sorted(plan.microbatches, key=lambda one: one.slot)
    sizes, expected = [len(pack.tokens) for pack in packs], [one.tokens for one in order]
    if sizes != expected:
        raise ValueError(f"step {plan.step}: packs of {sizes} tokens were handed over for microbatches of {expected}")
    return order


def count_targets(pack: Pack) -> int:
    """Tokens of a pack whose loss counts."""
    return int((pack.labels != IGNORE).sum())


def describe_problem(loss_sum: float, targets: int) -> str:
    """Why a step can't be applied."""
    if not targets:
        return "no document has a target"
    return f"the {'gradient' if abs(loss_sum) < float('inf') else 'loss'} is not finite"


def to_device(pack: Pack, device: torch.device) -> PackedTokens:
    """The pack as tensors. On a CPU they share the arrays' memory; to a GPU they go through pinned memory, without waiting."""

    def move(name: str) -> torch.Tensor:
        tensor = torch.from_numpy(getattr(pack, name))
        return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)

    names = ("tokens", "labels", "positions", "cu_seqlens", "document_ids", "real_lengths")
    return PackedTokens(**{name: move(name) for name in names}, max_length=pack.max_length, cu_seqlens_list=pack.cu_seqlens_list)
