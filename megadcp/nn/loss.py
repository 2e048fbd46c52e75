"""Cross entropy of the LM head in chunks of tokens: the full logits [t, V] never exist.

The gradients are computed in the forward, chunk by chunk, while the chunk's logits are there; the backward only scales them.
With bf16 a chunk holds 6 bytes per logit (its logits and their fp32 softmax; the gradient reuses the former).

Legend: t tokens, h hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megadcp.nn.backend import IGNORE

CPU_LOGITS = 1 << 20  # on a CPU chunks stay near this many logits, so that they are still in the cache when read again,
CPU_ROWS = 256  # but not below these rows: each chunk reads and writes the whole [V, h] gradient


def loss_dtype(dtype: torch.dtype) -> torch.dtype:
    """Losses of fp64 models are fp64, all others fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
    """Sum of the token losses of hidden [t, h] @ weight [V, h]^T against labels [t]; IGNORE rows count exactly zero.

    At most `chunk` rows of logits exist at a time. The gradients can be used for one backward only (they are scaled in place).
    """
    if chunk < 1:
        raise ValueError(f"loss_chunk={chunk}: at least one row of logits has to exist; 4096 is usual")
    wants = torch.is_grad_enabled()
    rows = chunk
    if hidden.device.type == "cpu":
        rows = min(chunk, max(CPU_ROWS, CPU_LOGITS // weight.shape[0]))
    return _cross_entropy(hidden, weight, labels, rows, wants and hidden.requires_grad, wants and weight.requires_grad)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int, for_hidden: bool, for_weight: bool) -> Tensor:
        work = _Work(hidden, weight, min(chunk, hidden.shape[0]))
        d_hidden = torch.empty_like(hidden) if for_hidden else None
        losses = torch.empty(hidden.shape[0], dtype=work.wide, device=hidden.device)
        for start in range(0, hidden.shape[0], chunk):
            piece = slice(start, min(start + chunk, hidden.shape[0]))
            work.run(hidden[piece], labels[piece], losses[piece], None if d_hidden is None else d_hidden[piece], for_weight)
        ctx.save_for_backward(d_hidden, work.weight_gradient())
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        d_hidden, d_weight = ctx.saved_tensors
        # In place: a copy of the table's gradient would be the largest tensor of the step. A second backward is refused by autograd.
        return (
            None if d_hidden is None else d_hidden.mul_(grads[0]),
            None if d_weight is None else d_weight.mul_(grads[0]),
            None, None, None, None,
        )  # fmt: skip


class _Work:
    """Buffers of one call and what happens to one chunk."""

    def __init__(self, hidden: Tensor, weight: Tensor, rows: int):
        self.weight = weight.detach()
        self.wide = loss_dtype(weight.dtype)
        self.logits = torch.empty(rows, weight.shape[0], dtype=weight.dtype, device=hidden.device)
        self.shares = torch.empty(rows, weight.shape[0], dtype=self.wide, device=hidden.device)
        self.sum: Tensor | None = None

    def run(self, hidden: Tensor, labels: Tensor, losses: Tensor, d_hidden: Tensor | None, for_weight: bool) -> None:
        """Fill `losses` and `d_hidden` of this chunk and add to the weight gradient."""
        rows = hidden.shape[0]
        logits, shares = self.logits[:rows], self.shares[:rows]
        valid = labels != IGNORE
        targets = labels.clamp(min=0).unsqueeze(1)
        torch.mm(hidden, self.weight.t(), out=logits)
        torch.softmax(logits, -1, dtype=self.wide, out=shares)
        # The largest share is 1 / sum(exp(logit - largest)): the log-sum-exp without another pass of exponentials.
        total = logits.amax(-1).to(self.wide) - shares.amax(-1).log_()
        losses.copy_((total - logits.gather(1, targets).squeeze(1)).masked_fill_(~valid, 0.0))
        if d_hidden is None and not for_weight:
            return
        shares.scatter_add_(1, targets, shares.new_full((1, 1), -1.0).expand(rows, 1))
        slope = shares if shares.dtype == logits.dtype else logits.copy_(shares)  # d loss / d logits, not yet masked
        # Rows without target are masked on the narrow side of both products.
        if d_hidden is not None:
            torch.mm(slope, self.weight, out=d_hidden)
            d_hidden.masked_fill_(~valid.unsqueeze(1), 0.0)
        if for_weight:
            self._add(slope.t(), hidden * valid.unsqueeze(1))

    def _add(self, left: Tensor, right: Tensor) -> None:
        if self.sum is None:
            self.sum = torch.mm(left, right).to(self.wide)
        elif self.sum.dtype == left.dtype:
            self.sum.addmm_(left, right)
        else:
            self.sum.add_(torch.mm(left, right))

    def weight_gradient(self) -> Tensor | None:
        """[V, h] in the weight's format, summed over chunks in fp32 at least."""
        return None if self.sum is None else self.sum.to(self.weight.dtype)


_cross_entropy: Callable[[Tensor, Tensor, Tensor, int, bool, bool], Tensor] = _ChunkedCrossEntropy.apply
