"""Cross entropy over a vocabulary that is spread over T ranks, in chunks of tokens: no rank ever holds whole logits.

As in nn/loss.py the gradients are computed in the forward, chunk by chunk. A chunk costs two small sums over the ranks: the largest logit,
then the sum of exponentials together with the target's logit.

Legend: t tokens, h hidden, V vocabulary, l rows of the LM head that this rank holds (padding rows among them).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megadcp.mesh.groups import Group
from megadcp.nn.backend import IGNORE
from megadcp.nn.loss import CPU_LOGITS, CPU_ROWS, loss_dtype
from megadcp.nn.shard import shard_of
from megadcp.parallel.collectives import all_gather, all_reduce
from megadcp.parallel.tensor import gather, scatter


def parallel_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int, tp: Group, sequence_parallel: bool) -> Tensor:
    """Sum of the token losses, equal on all ranks: residual stream, weight [l, h] (a parameter with its shard), labels [t].

    IGNORE rows count exactly zero. The gradients can be used for one backward only.
    """
    if chunk < 1:
        raise ValueError(f"loss_chunk={chunk}: at least one row of logits has to exist; 4096 is usual")
    rows = chunk
    if hidden.device.type == "cpu":
        rows = min(chunk, max(CPU_ROWS, CPU_LOGITS // weight.shape[0]))
    first, real = _range(weight, tp)
    wants = torch.is_grad_enabled()
    options = (rows, first, real, wants and hidden.requires_grad, wants and weight.requires_grad)
    return _cross_entropy(hidden, weight, labels, options, tp, sequence_parallel)


def whole_logits(hidden: Tensor, weight: Tensor, vocab: int, tp: Group, sequence_parallel: bool) -> Tensor:
    """Residual stream, weight [l, h] -> [t, V] on every rank; not differentiable."""
    with torch.no_grad():
        local = F.linear(gather(hidden, tp, sequence_parallel), weight)
        parts = all_gather(local.t().contiguous(), tp)  # [T l, t]: padding rows stand behind the vocabulary
        return parts[:vocab].t()


def _range(weight: Tensor, tp: Group) -> tuple[int, int]:
    """First vocabulary row of this rank, and how many of the rows it holds are real."""
    shard = shard_of(weight)
    if shard is None:
        raise ValueError("the LM head's weight carries no shard: it was not made by this backend")
    return tp.index * shard.local, sum(stop - start for start, stop in shard.pieces)


class _ParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, options: tuple[int, int, int, bool, bool], tp: Group, sequence_parallel: bool
    ) -> Tensor:
        rows, first, real, for_hidden, for_weight = options
        whole = gather(hidden, tp, sequence_parallel)
        work = _Work(weight.detach(), first, real, tp)
        d_hidden = torch.empty_like(whole) if for_hidden else None
        losses = torch.empty(whole.shape[0], dtype=work.wide, device=hidden.device)
        for start in range(0, whole.shape[0], rows):
            piece = slice(start, min(start + rows, whole.shape[0]))
            losses[piece] = work.run(whole[piece], labels[piece], None if d_hidden is None else d_hidden[piece], for_weight)
        ctx.save_for_backward(None if d_hidden is None else scatter(d_hidden, tp, sequence_parallel), work.weight_gradient())
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        d_hidden, d_weight = ctx.saved_tensors
        return (
            None if d_hidden is None else d_hidden.mul_(grads[0]),
            None if d_weight is None else d_weight.mul_(grads[0]),
            None, None, None, None,
        )  # fmt: skip


class _Work:
    """What happens to one chunk."""

    def __init__(self, weight: Tensor, first: int, real: int, tp: Group):
        self.weight, self.first, self.real, self.tp = weight, first, real, tp
        self.wide = loss_dtype(weight.dtype)
        self.sum: Tensor | None = None

    def run(self, hidden: Tensor, labels: Tensor, d_hidden: Tensor | None, for_weight: bool) -> Tensor:
        """Losses [rows] of one chunk; fills `d_hidden`, this rank's part of it, and adds to the weight gradient."""
        logits = torch.mm(hidden, self.weight.t()).to(self.wide)
        logits[:, self.real :] = -torch.inf
        valid = labels != IGNORE
        local = labels - self.first
        mine = valid & (local >= 0) & (local < self.real)
        targets = local.clamp(0, max(0, self.weight.shape[0] - 1)).unsqueeze(1)
        largest = logits.amax(-1) if self.real else logits.new_full((logits.shape[0],), -torch.inf)
        all_reduce(largest, self.tp, "max")
        shares = logits.sub_(largest.unsqueeze(1))
        target = shares.gather(1, targets).squeeze(1).masked_fill(~mine, 0.0)
        shares = shares.exp_()
        both = torch.stack([shares.sum(-1), target])
        all_reduce(both, self.tp)
        losses = (both[0].log() - both[1]).masked_fill_(~valid, 0.0)
        if d_hidden is None and not for_weight:
            return losses
        shares.div_(both[0].unsqueeze(1))
        shares.scatter_add_(1, targets, -mine.to(self.wide).unsqueeze(1))
        slope = shares.to(self.weight.dtype)
        if d_hidden is not None:
            torch.mm(slope, self.weight, out=d_hidden)
            d_hidden.masked_fill_(~valid.unsqueeze(1), 0.0)
        if for_weight:
            part = torch.mm(slope.t(), hidden * valid.unsqueeze(1)).to(self.wide)
            self.sum = part if self.sum is None else self.sum.add_(part)
        return losses

    def weight_gradient(self) -> Tensor | None:
        """[l, h] in the weight's format, summed over chunks in fp32 at least."""
        return None if self.sum is None else self.sum.to(self.weight.dtype)


_cross_entropy: Callable[[Tensor, Tensor, Tensor, tuple[int, int, int, bool, bool], Group, bool], Tensor] = _ParallelCrossEntropy.apply
