"""Gradients of one step: summed over microbatches and ranks in fp32 at least, divided once by the global number of targets, clipped, judged.

Every microbatch contributes the gradient of the SUM of its token losses, so the sum over microbatches and lanes divided by the step's
targets is the gradient of the global batch, whatever the plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megadcp.mesh.groups import GroupPool
from megadcp.mesh.streams import Channel, Pending, Streams, Wait
from megadcp.parallel.buckets import BUCKET_ELEMENTS, GradientBuckets, on_gradient
from megadcp.parallel.collectives import all_reduce
from megadcp.parallel.main_grad import offer, was_added, withdraw
from megadcp.parallel.replicas import Piece, SumOverTp, pieces_of, split_counted
from megadcp.parallel.replicas import sum_over_tp as sum_over_tp

FIRST_TABLE, LAST_TABLE = "embedding.weight", "head.weight"  # tied: two copies where they are on different stages
NORM_ELEMENTS = 1 << 22  # whose squares are made fp64 at a time


@dataclass(frozen=True)
class Verdict:
    """What the step's gradients are worth: one decision for all parameters.

    loss_sum: sum of the token losses; norm: global norm of the mean gradient before clipping; finite: neither holds NaN or Inf.
    """

    loss_sum: float
    norm: float
    finite: bool


class Judgement:
    """A verdict that the device may still be working on.

    bad: fp32 scalar on the device, 1 where something is not finite, else 0: an update that looks at it there need not wait for the host.
    """

    def __init__(self, values: Tensor, channel: Channel) -> None:
        """values: fp64 [loss sum, norm]. channel: of copies to the host."""
        self.bad = values.isfinite().all().logical_not().to(torch.float32)
        self._values = values
        self._waits: list[Wait] = []
        if channel.stream is not None:
            host = self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)

            def launch(later: bool) -> list[Wait]:
                host.copy_(values, non_blocking=True)
                return []

            self._waits = channel.start(launch, [values])

    def read(self) -> Verdict:
        """The step's one wait of the host for the device: until the gradients are summed and judged, not until they are applied."""
        for wait in self._waits:
            cast(Pending, wait).synchronize()
        loss_sum, norm = self._values.tolist()
        return Verdict(loss_sum, norm, all(abs(value) < float("inf") for value in (loss_sum, norm)))


class GradientBuffers:
    """Where the gradients of a model's trainable parameters are summed.

    Parameters of 4 bytes and more sum in their own `.grad` (no copy is made). For narrower ones (bf16) each microbatch's gradient is added
    to an fp32 buffer as soon as the backward has it and is then dropped, so no second set of gradients exists at any time; weights whose
    module adds to the buffer itself (main_grad.py) never have a narrow gradient. With several
    lanes both lie in flat buckets, which are summed over lanes so that each lane keeps a slice (buckets.py).
    """

    def __init__(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], pool: GroupPool | None = None, tied: bool = False, bucket: int = BUCKET_ELEMENTS
    ) -> None:
        """Frozen parameters are left out. Registers hooks; `close` takes them off.

        All ranks of the pool construct it at the same time. named_parameters: of this stage, in order of use. tied: the first stage's
        embedding and the last one's head are copies of one table. bucket: elements in a bucket.
        """
        named = list(named_parameters)
        chosen = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self.names = [name for name, _ in chosen]
        self.parameters = [parameter for _, parameter in chosen]
        self.pool = pool if pool is not None and pool.world.size > 1 else None
        self.tied = tied
        self.device = named[0][1].device if named else torch.device("cpu")
        self.streams = Streams(self.device) if pool is None else pool.streams
        self.buckets: GradientBuckets | None = None
        self._table = ""  # name of this rank's copy of a table that lives at both ends
        self._wide: dict[int, Tensor] = {}
        self._touched: set[int] = set()
        self._offered: list[int] = []  # of those in _wide, the ones that modules add to themselves
        self._hooks: list[RemovableHandle] = []
        if self.pool is not None:
            self._table = self._find_table(self.pool, tied)
            self._over_tp = SumOverTp(self.parameters, self.pool.tp)
            if self.pool.lanes.size > 1:
                alone = [self.names.index(self._table)] if self._table else []
                self.buckets = GradientBuckets(self.parameters, self.pool.lanes, bucket, alone)
                return
        for index, parameter in enumerate(self.parameters):
            if parameter.element_size() < 4:
                self._wide[index] = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
                if offer(parameter, self._wide[index]):
                    self._offered.append(index)
                self._hooks.append(on_gradient(parameter, partial(self._widen, index)))

    def _find_table(self, pool: GroupPool, tied: bool) -> str:
        stage = pool.pipeline.index
        if not tied or pool.pipeline.size == 1 or 0 < stage < pool.pipeline.size - 1:
            return ""
        name = FIRST_TABLE if stage == 0 else LAST_TABLE
        trained = all_reduce(torch.tensor([float(name in self.names)], device=self.device), pool.ends)
        if int(trained) == 1:
            raise ValueError(f"{FIRST_TABLE} and {LAST_TABLE} are one tied table: both have to be trained, or both frozen")
        return name if int(trained) else ""

    def _widen(self, index: int, parameter: Tensor) -> None:
        assert parameter.grad is not None
        if was_added(parameter):
            parameter.grad = None
            return
        if index in self._touched:
            self._wide[index].add_(parameter.grad)
        else:  # the first microbatch overwrites what the step before has left
            self._wide[index].copy_(parameter.grad)
            self._touched.add(index)
        parameter.grad = None

    def zero(self) -> None:
        """Start a step. With one lane it costs no pass over memory, but for sums that modules add to: the first microbatch writes."""
        if self.buckets is not None:
            self.buckets.zero()
            return
        self._touched = set(self._offered)
        for index in self._offered:
            self._wide[index].zero_()
        for parameter in self.parameters:
            parameter.grad = None

    def last_microbatch(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Say that the next backward is this rank's last of the step, so that sums over lanes start while it runs; may be left out.

        It reaches `parameters` (None: all; with several chunks those of the last one to run): the others have all that they get. Only where
        `buckets.may_overlap` allows it.
        """
        if self.buckets is not None:
            self.buckets.last_microbatch(parameters)

    def sums(self) -> list[Tensor]:
        """The summed gradient of each parameter (its local tensor), in the order of `names`; zeros where no microbatch reached it.

        RuntimeError with several lanes: each has slices only, see `pieces`.
        """
        if self.buckets is not None:
            raise RuntimeError("gradients are spread over the lanes; `pieces` has what this one holds")
        found = []
        for index, parameter in enumerate(self.parameters):
            if index in self._wide:
                if index not in self._touched:
                    self._wide[index].zero_()
                    self._touched.add(index)
                found.append(self._wide[index])
            else:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                found.append(parameter.grad)
        return found

    def slices(self) -> list[Tensor]:
        """With several lanes: this one's slice of each bucket."""
        assert self.buckets is not None
        return [self.buckets.slice(flat) for flat in self.buckets.flats]

    def pieces(self) -> list[Piece]:
        """What this rank holds of the gradients after `finish`, whatever the layout; parallel/assemble.py makes whole ones of it."""
        if self.buckets is not None:
            return self.buckets.pieces(self.names, self.slices())
        return pieces_of(zip(self.names, self.parameters, strict=True), self.sums())

    def finish(self, losses: list[Tensor], targets: int, clip_norm: float) -> Verdict:
        """`judge`, and wait for what it says."""
        return self.judge(losses, targets, clip_norm).read()

    @torch.no_grad()
    def judge(self, losses: list[Tensor], targets: int, clip_norm: float) -> Judgement:
        """Sum over ranks, divide by `targets`, clip to a global norm of `clip_norm` (0: don't), and judge; without waiting for the device.

        losses: the sums of this rank's microbatches, scalars; equal on all tp ranks; [] where the last stage is elsewhere or nothing ran.
        The verdict is the same on all ranks, about all of them. With NaN or Inf anywhere, or finite gradients whose squares overflow, the
        norm is not finite.
        """
        if self.pool is not None:
            return self._judge_together(self.pool, losses, targets, clip_norm)
        sums = self.sums()
        # Norms of the sums, joined in fp64: the squares of many large tensors must not lose the small ones.
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(sums)).double()) / targets
        loss_sum = torch.stack(losses).double().sum()
        return self._scale_and_judge(sums, loss_sum, norm, targets, clip_norm)

    def _judge_together(self, pool: GroupPool, losses: list[Tensor], targets: int, clip_norm: float) -> Judgement:
        if self.buckets is not None:
            self.buckets.finish()
        pieces = self.pieces()
        self._over_tp(pieces)  # after the sum over lanes: there is less of it
        for piece in pieces:
            if piece.name == self._table:  # both ends have its bucket to itself, so both hold the same elements
                all_reduce(piece.values, pool.ends)
        ours, others = split_counted(pieces, pool.tp, [LAST_TABLE] if self._table == LAST_TABLE else [])
        loss_sum = torch.stack(losses).double().sum() if losses else torch.zeros((), dtype=torch.float64, device=self.device)
        # What others count is only looked at: times 0 it is NaN if something in it is not finite.
        counts = 1.0 if pool.tp.index == 0 else 0.0
        totals = torch.stack([loss_sum * counts, self._squares(ours) + self._squares(others) * 0.0])
        loss_sum, squares = all_reduce(totals, pool.world).unbind()
        return self._scale_and_judge(self.slices() if self.buckets else self.sums(), loss_sum, squares.sqrt() / targets, targets, clip_norm)

    def _scale_and_judge(self, sums: list[Tensor], loss_sum: Tensor, norm: Tensor, targets: int, clip_norm: float) -> Judgement:
        scale = torch.full_like(norm, 1.0 / targets)
        if clip_norm > 0:
            scale = scale * (clip_norm / norm.clamp(min=clip_norm))
        if sums:
            torch._foreach_mul_(sums, scale.to(sums[0].dtype))
        return Judgement(torch.stack([loss_sum, norm]), self.streams.channel("copy"))

    def _squares(self, views: list[Tensor]) -> Tensor:
        """fp64 sum of squares."""
        parts = [part for view in views for part in torch.split(view, NORM_ELEMENTS)]
        if not parts:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return torch.stack(torch._foreach_norm(parts, 2, torch.float64)).square().sum()

    def close(self) -> None:
        """Take the hooks and sums off the parameters."""
        if self.buckets is not None:
            self.buckets.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for index in self._offered:
            withdraw(self.parameters[index], self._wide[index])
