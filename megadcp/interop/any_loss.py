"""Sum of token losses from whole logits, in the memory that the planner counts on: logits, their gradient, and a chunk of wide softmax.

Legend: t tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from megadcp.nn.backend import IGNORE
from megadcp.nn.loss import loss_dtype

ROWS = 1024  # whose softmax exists at a time


class _SummedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        wide = loss_dtype(logits.dtype)
        slope = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        total = torch.zeros((), dtype=wide, device=logits.device)
        for start in range(0, logits.shape[0], ROWS):
            piece, targets = logits[start : start + ROWS].to(wide), labels[start : start + ROWS]
            valid, targets = (targets != IGNORE).unsqueeze(1), targets.clamp(min=0).unsqueeze(1)
            logs = torch.log_softmax(piece, -1)
            total -= (logs.gather(1, targets) * valid).sum()
            if slope is not None:
                shares = logs.exp_()
                shares.scatter_add_(1, targets, shares.new_full((1, 1), -1.0).expand(len(targets), 1))
                slope[start : start + ROWS] = shares.masked_fill_(~valid, 0.0)
        ctx.save_for_backward(slope)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (slope,) = ctx.saved_tensors
        return slope * grads[0].to(slope.dtype), None


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross entropies of logits [t, V] against labels [t], fp32 (fp64 of fp64); rows with label IGNORE count exactly zero."""
    return cast(Tensor, _SummedLoss.apply(logits, labels))  # type: ignore[no-untyped-call]
