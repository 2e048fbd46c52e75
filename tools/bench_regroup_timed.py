"""A lane that runs its plan with real groups, messages and schedule, and sleeps where a model would compute: "timed, not computed".

Each action sleeps its predicted seconds (docs/plan.md section 3) times `dilation` and a noise of its own. Its messages are those of ONE
layer of the chunk, with 1 / SHRINK of their rows: what the other layers exchange is in the predicted seconds already. Messages between
stages are one residual stream, with 1 / SHRINK of its rows. The executor is the trainer's (parallel/pipeline.py).

Legend: t rows of this rank, h hidden, G kv heads and d head dim of the plan's model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megadcp.engine.placement import Placement
from megadcp.mesh.groups import Group, GroupPool
from megadcp.parallel.collectives import all_gather, all_reduce, exchange, reduce_scatter
from megadcp.parallel.exchanges import lane_programme, programmes
from megadcp.parallel.pipeline import Stage, run_actions
from megadcp.plan.actions import FORWARD, Action, slot_count, used_slots
from megadcp.plan.basis import Basis
from megadcp.plan.cost import FORWARD_SHARE, CostModel
from megadcp.plan.step_plan import Microbatch, StepPlan

SHRINK = 512  # of rows of messages: a CPU's memory and sockets stand for NVLink
FORMAT = torch.bfloat16  # activations travel in 16 bits


@dataclass(frozen=True)
class Tempo:
    """Seconds slept for a predicted one; standard deviation of the logarithm of each action's noise; seed of the noise."""

    dilation: float
    noise: float
    seed: int


class TimedLane:
    """What one rank does of one plan."""

    def __init__(self, plan: StepPlan, pool: GroupPool, tempo: Tempo) -> None:
        basis = Basis.of(plan)
        self.plan, self.pool, self.tempo, self.cost = plan, pool, tempo, CostModel(basis)
        self.random = np.random.default_rng([tempo.seed, plan.step, pool.rank])
        lane, layout = pool.coords.lane, plan.layout
        self.own = {one.slot: one for one in plan.microbatches if one.lane <= lane < one.lane + one.cp}
        self.placements = {slot: Placement.of(plan.step, one, pool) for slot, one in self.own.items()}
        self.seconds = {slot: self.cost.stage_seconds(one)[pool.coords.pp] / layout.virtual_stages for slot, one in self.own.items()}
        count = slot_count(basis, plan.microbatches)
        dense = programmes(used_slots(plan.microbatches), count, layout.pp, layout.virtual_stages)[pool.coords.pp]
        self.programme = lane_programme(dense, self.own)

    def run(self) -> float:
        """Seconds from the first action to the last, on this rank."""
        begin = time.perf_counter()
        run_actions(self.programme, Stage(self.forward, self.buffer, _nothing), self.pool.pipeline)
        return time.perf_counter() - begin

    def forward(self, action: Action, x: Tensor | None) -> Tensor:
        """The residual stream as it came, later; where the loss is, a scalar."""
        if x is None:
            x = self.buffer(action.slot).zero_().requires_grad_()
        y: Tensor = _Timed.apply(x, self, action.slot)  # type: ignore[no-untyped-call]
        layout = self.plan.layout
        ends = self.pool.coords.pp == layout.pp - 1 and action.chunk == layout.virtual_stages - 1
        return y[0].float().sum() if ends else y

    def buffer(self, slot: int) -> Tensor:
        """A residual stream [t / SHRINK, h]."""
        return torch.empty(self.rows(self.own[slot]), self.plan.model.hidden, dtype=FORMAT)

    def rows(self, one: Microbatch) -> int:
        """Rows of this rank's messages."""
        return max(1, one.tokens // one.cp // SHRINK)

    def act(self, slot: int, kind: str) -> None:
        """Exchange and sleep as a forward or backward of this microbatch does."""
        share = FORWARD_SHARE if kind == FORWARD else 1 - FORWARD_SHARE
        seconds = self.seconds[slot] * share * self.tempo.dilation * float(np.exp(self.tempo.noise * self.random.standard_normal()))
        one, group = self.own[slot], self.placements[slot].group
        if group is None:
            time.sleep(seconds)
            return
        wide = self.plan.model.kv_heads * self.plan.model.head_dim
        _with_messages(_Exchange(one, group, self.rows(one), wide, self._neighbours(one)), seconds, kind == FORWARD)

    def _neighbours(self, one: Microbatch) -> int:
        """Members among which heads are divided: A of docs/plan.md section 3."""
        return {"ring": 1, "all_gather": 0, "ulysses": one.cp, "2d": self.cost.head_split(one.cp)}[one.cp_comm]


@contextmanager
def _nothing(action: Action) -> Iterator[None]:
    yield


class _Timed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, lane: TimedLane, slot: int) -> Tensor:
        ctx.lane, ctx.slot = lane, slot
        lane.act(slot, FORWARD)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.lane.act(ctx.slot, "B")
        return grads[0], None, None


@dataclass(frozen=True)
class _Exchange:
    """Messages of one layer. wide: G d; neighbours: A, 0 where everybody gathers everything."""

    microbatch: Microbatch
    group: Group
    rows: int
    wide: int
    neighbours: int

    def swap(self) -> None:
        """Heads for rows among A neighbours: queries, keys and values, or the output."""
        if self.neighbours == 1:
            return
        block = self.group.index // self.neighbours * self.neighbours
        part = torch.zeros(max(1, self.rows // self.neighbours), 2 * self.wide, dtype=FORMAT)
        members = range(block, block + self.neighbours)
        for wait in exchange([(part, member) for member in members], [(torch.empty_like(part), member) for member in members], self.group):
            wait.wait()

    def pass_on(self, held: Tensor) -> tuple[Tensor, list[Any]]:
        """Keys and values to the next block, those of the one before from it."""
        size, ways = self.group.size, (self.neighbours, -self.neighbours)
        after, before = ((self.group.index + way) % size for way in ways)
        buffer = torch.empty_like(held)
        return buffer, exchange([(held, after)], [(buffer, before)], self.group)


def _with_messages(one: _Exchange, seconds: float, forward: bool) -> None:
    """What an action does that takes `seconds` once all members are there; in the backward gradients in 32 bits travel, too.

    Predicted seconds hold the communication that nothing hides, so messages make an action longer only where they last longer than it.
    """
    all_reduce(torch.zeros(1), one.group)
    begin = time.perf_counter()
    whole = torch.zeros(one.rows, (2 if forward else 6) * one.wide, dtype=FORMAT)
    if not one.neighbours:
        all_gather(whole[:, : 2 * one.wide].contiguous(), one.group)
        if not forward:
            reduce_scatter(torch.zeros(one.rows * one.group.size, 2 * one.wide), one.group)
        _sleep_until(begin + seconds)
        return
    one.swap()
    blocks = one.group.size // one.neighbours
    for step in range(blocks):
        following, waits = one.pass_on(whole) if step < blocks - 1 else (whole, [])
        if step == blocks - 1:
            one.swap()
        _sleep_until(begin + seconds * (step + 1) / blocks)
        for wait in waits:
            wait.wait()
        whole = following


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.perf_counter()))
