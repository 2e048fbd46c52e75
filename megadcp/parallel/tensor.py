"""Tensor parallelism: linears, embedding and norms whose matrices are spread over T ranks.

The residual stream is x [t / T, h] with sequence parallelism (each rank has a stretch of the tokens), else [t, h] on every rank.
Column linears go from it to [t, out / T], row linears back. What each rank holds of a parameter is noted on it (nn/shard.py), so that
start values, gradients and checkpoints know whole parameters only.

Legend: t tokens of the microbatch on this lane, h hidden, T tensor-parallel ranks, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megadcp.mesh.groups import Group
from megadcp.nn.shard import by_parts, contiguous, mark
from megadcp.parallel.collectives import all_gather, all_reduce, reduce_scatter
from megadcp.parallel.product import PLAIN, Product, gathered_linear, linear, weight_for


@dataclass(frozen=True)
class Places:
    """Format and device of parameters, and how linears multiply."""

    dtype: torch.dtype
    device: torch.device
    product: Product = PLAIN


# ---------------------------------------------------------------------------------------------- between stream and ranks
def gather(x: Tensor, tp: Group, sequence_parallel: bool) -> Tensor:
    """Residual stream -> [t, ..] on every rank, outside autograd."""
    return all_gather(x.contiguous(), tp) if sequence_parallel else x


def scatter(partial: Tensor, tp: Group, sequence_parallel: bool) -> Tensor:
    """Every rank's part of a sum [t, ..] -> residual stream, outside autograd. `partial` may be overwritten."""
    partial = partial.contiguous()
    return reduce_scatter(partial, tp) if sequence_parallel else all_reduce(partial, tp)


class _ToStream(torch.autograd.Function):
    """Every rank's part of a sum [t, ..] -> residual stream."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, tp: Group, sequence_parallel: bool) -> Tensor:
        ctx.tp, ctx.sequence_parallel = tp, sequence_parallel
        return scatter(partial.clone(), tp, sequence_parallel)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return gather(grads[0], ctx.tp, ctx.sequence_parallel), None, None


_to_stream: Callable[[Tensor, Group, bool], Tensor] = _ToStream.apply


# --------------------------------------------------------------------------------------------------------------- modules
class ColumnLinear(nn.Module):
    """Residual stream -> [t, out / T]; rows come in parts (rows, unit), cut each by itself."""

    def __init__(self, sizes: tuple[int, int], parts: tuple[tuple[int, int], ...], bias: bool, tp: Group, sequence_parallel: bool, places: Places):
        super().__init__()
        features, out = sizes
        self.tp, self.sequence_parallel, self.product = tp, sequence_parallel, places.product
        shard = by_parts((out, features), parts or ((out, 1),), tp.size, tp.index)
        self.weight = mark(weight_for(self.product, shard.local_shape, places.dtype, places.device), shard)
        self.bias: nn.Parameter | None = None
        if bias:
            rows = by_parts((out,), parts or ((out, 1),), tp.size, tp.index)
            self.bias = mark(nn.Parameter(torch.empty(rows.local_shape, dtype=places.dtype, device=places.device)), rows)

    def forward(self, x: Tensor) -> Tensor:
        """Map the residual stream to [t, out / T]."""
        return gathered_linear(x, self.weight, self.bias, self.product, self.tp, self.sequence_parallel)


class RowLinear(nn.Module):
    """[t, in / T] -> residual stream. The bias is added once, to the sum."""

    def __init__(self, sizes: tuple[int, int], bias: bool, tp: Group, sequence_parallel: bool, places: Places):
        super().__init__()
        features, out = sizes
        if features % tp.size:
            raise ValueError(f"{features} input features can't be divided among {tp.size} tensor-parallel ranks")
        self.tp, self.sequence_parallel, self.product = tp, sequence_parallel, places.product
        shard = contiguous((out, features), 1, tp.size, tp.index)
        self.weight = mark(weight_for(self.product, shard.local_shape, places.dtype, places.device), shard)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = mark(nn.Parameter(torch.empty(out, dtype=places.dtype, device=places.device)), partial=sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        """Map [t, in / T] to the residual stream."""
        out = _to_stream(linear(x, self.weight, None, self.product), self.tp, self.sequence_parallel)
        return out if self.bias is None else out + self.bias


class VocabularyEmbedding(nn.Module):
    """ids [t] -> residual stream. Rows are spread; those behind the vocabulary's end are padding that nothing reads."""

    def __init__(self, rows: int, features: int, tp: Group, sequence_parallel: bool, places: Places):
        super().__init__()
        self.tp, self.sequence_parallel = tp, sequence_parallel
        shard = contiguous((rows, features), 0, tp.size, tp.index)
        self.rows, self.first, self.held = rows, tp.index * shard.local, shard.local
        self.weight = mark(nn.Parameter(torch.empty(shard.local_shape, dtype=places.dtype, device=places.device)), shard)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids [t]."""
        local = ids - self.first
        # An id outside the whole table is an error on every rank, as without tensor parallelism, not a row of zeros.
        outside = (ids < 0) | (ids >= self.rows)
        elsewhere = ((local < 0) | (local >= self.held)) & ~outside
        found = F.embedding(local.masked_fill(elsewhere, 0).masked_fill_(outside, self.held), self.weight)
        return _to_stream(found.masked_fill(elsewhere[:, None], 0.0), self.tp, self.sequence_parallel)


def stream_rows(x: Tensor, tp: Group, sequence_parallel: bool) -> Tensor:
    """Rows of x [t, ..] that this rank's residual stream has. ValueError unless T divides t."""
    if not sequence_parallel or tp.size == 1:
        return x
    if x.shape[0] % tp.size:
        raise ValueError(f"{x.shape[0]} tokens can't be cut into {tp.size} equal stretches: the plan's padding must be a multiple of tp")
    rows = x.shape[0] // tp.size
    return x[tp.index * rows : (tp.index + 1) * rows]


def local_heads(heads: int, kv_heads: int, ranks: int) -> tuple[int, int]:
    """Query and kv heads of one rank; with fewer kv heads than ranks each rank has one, which others have too. ValueError if they don't divide."""
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise ValueError(f"{heads} query and {kv_heads} kv heads can't be divided among {ranks} tensor-parallel ranks")
    return heads // ranks, max(1, kv_heads // ranks)
