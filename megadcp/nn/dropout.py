"""Dropout whose mask is a pure function of (seed, step, document, position, site, feature).

So it does not depend on packing, on the layout of ranks or on whether a layer is recomputed. The hash works in wrapping int32
arithmetic, several times faster on a CPU than int64. A token's row key hashes its position before mixing it with its document's
key: adding a multiple of the position instead would let two documents share stretches of their masks.

Legend: t tokens, n documents, h features. Site: 0 the embedding, 1 + 2i and 2 + 2i the two residual branches of layer i.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megadcp.nn.backend import PackedTokens

# Multipliers of a 32-bit finaliser with low bias (shifts 16, 15, 16), as signed numbers.
_FIRST = 0x7FEB352D
_SECOND = 0x846CA68B - (1 << 32)


def _mix(x: Tensor) -> Tensor:
    """Scramble int32 values in place; every input bit moves every output bit."""
    x ^= (x >> 16) & 0xFFFF  # the mask makes the signed shift a logical one
    x *= _FIRST
    x ^= (x >> 15) & 0x1FFFF
    x *= _SECOND
    x ^= (x >> 16) & 0xFFFF
    return x


def _mix_number(x: int) -> int:
    """The same for one Python int; the result is a signed 32-bit number."""
    x &= 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * _FIRST) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * (_SECOND & 0xFFFFFFFF)) & 0xFFFFFFFF
    x ^= x >> 16
    return x - (1 << 32) if x >= 1 << 31 else x


def _fold(*numbers: int) -> int:
    """One signed 32-bit key of several non-negative ints of up to 64 bits."""
    key = 0x2545F491
    for number in numbers:
        key = _mix_number(key ^ _mix_number((number & 0xFFFFFFFF) + 0x3C6EF372))
        key = _mix_number(key ^ _mix_number(((number >> 32) & 0xFFFFFFFF) + 0x1B873593))
    return key


def row_keys(batch: PackedTokens, seed: int, step: int) -> Tensor:
    """int32 [t]: one key per token from (seed, step, document id, position)."""
    ids = batch.document_ids
    low = _mix((ids & 0x7FFFFFFF).to(torch.int32))
    high = _mix((ids >> 31).to(torch.int32) + 0x1B873593)
    documents = _mix(low ^ high ^ _fold(seed, step))
    stretches = batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]
    rows = torch.repeat_interleave(documents, stretches, output_size=batch.tokens.shape[0])
    return _mix(rows ^ _mix(batch.positions.to(torch.int32) + 0x3C6EF372))


def keep_mask(rows: Tensor, site: int, features: int, probability: float) -> Tensor:
    """Mask [t, h]: True where the value stays."""
    keys = _mix(rows ^ _fold(site))
    columns = _mix(torch.arange(1, features + 1, dtype=torch.int32, device=rows.device))
    threshold = min(round(probability * (1 << 32)) - (1 << 31), (1 << 31) - 1)
    return _mix(keys[:, None] ^ columns) >= threshold


class _Dropout(torch.autograd.Function):
    """Saves one int32 per token and makes the mask again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, site: int, probability: float) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.site, ctx.probability = site, probability
        return _apply(x, rows, site, probability)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (rows,) = ctx.saved_tensors
        return _apply(grads[0], rows, ctx.site, ctx.probability), None, None, None


def _apply(x: Tensor, rows: Tensor, site: int, probability: float) -> Tensor:
    keep = keep_mask(rows, site, x.shape[-1], probability)
    return torch.mul(x, 1.0 / (1.0 - probability)).masked_fill_(keep.logical_not_(), 0.0)


_dropout: Callable[[Tensor, Tensor, int, float], Tensor] = _Dropout.apply


def dropout(x: Tensor, rows: Tensor | None, site: int, probability: float) -> Tensor:
    """Return x [t, h] with a share `probability` of its values zeroed and the others scaled up; rows None: x itself."""
    if rows is None or probability == 0.0:
        return x
    return _dropout(x, rows, site, probability)
