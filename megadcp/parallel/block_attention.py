"""Attention of some rows of queries with some rows of keys, and how such blocks add up to a whole softmax.

A block's result is its output and the log-sum-exp of its scores. Blocks of the same queries are merged by the latter; the backward of a
block needs only the merged output and log-sum-exp: P = exp(scale q k^T - lse), D = rowsum(dO O), dS = P (dO v^T - D) (FlashAttention-2,
arXiv 2307.08691, equations of its algorithm 2).

Legend: t query rows, n key rows, H query heads, G kv heads (H a multiple of G), d head dim, B equal documents in one call, m and l rows of
queries and keys in each of them. Wide: fp64 for fp64, else fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megadcp.parallel.packed_attention import CUDA_FLASH, PackedKernel, add, calls_of, pick, put
from megadcp.parallel.tile import Tile

ROWS = 512  # queries whose scores the plain kernel has in memory at a time


def wide(dtype: torch.dtype) -> torch.dtype:
    """The format in which sums of this format are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# ------------------------------------------------------------------------------------------------------------- forward
class Running:
    """What the queries have seen so far: out [t, H, d] and lse [t, H], both wide. Rows that saw no key have out 0 and lse -inf."""

    def __init__(self, q: Tensor, memo: dict[Any, Any] | None = None) -> None:
        """memo: that of the microbatch, for what its layers can share."""
        self.memo = {} if memo is None else memo
        self.out = torch.zeros(q.shape, dtype=wide(q.dtype), device=q.device)
        self.lse = torch.full(q.shape[:2], -math.inf, dtype=self.out.dtype, device=q.device)

    def add(self, q: Tensor, k: Tensor, v: Tensor, tiles: tuple[Tile, ...], first: bool = False) -> None:
        """Attend with q [t, H, d] and k, v [n, G, d]. first: the tiles' queries have seen nothing yet, which saves the merging."""
        kernel = kernel_of(q)
        if isinstance(kernel, PackedKernel):
            for call in calls_of(tiles, q, k, self.memo):
                out, lse = kernel.forward(pick(q, call.queries), pick(k, call.keys), pick(v, call.keys), call)
                self._take(call.queries, out, lse.unsqueeze(-1), first)
            return
        for tile in tiles:
            fresh = first
            for piece in _pieces(tile, kernel):
                out, lse = kernel.forward(_queries(q, piece), _keys(k, piece), _keys(v, piece), piece.causal)
                mine, sums = _queries(self.out, piece), _queries(self.lse.unsqueeze(-1), piece)
                if fresh:
                    mine.copy_(out)
                    sums.copy_(lse.unsqueeze(-1))
                    fresh = False
                else:
                    merge(mine, sums, out, lse.unsqueeze(-1))

    def _take(self, rows: Tensor | None, out: Tensor, lse: Tensor, first: bool) -> None:
        """Let in a block of these rows (None: all): out [m, H, d], lse [m, H, 1]."""
        if first:
            put(self.out, rows, out)
            put(self.lse, rows, lse.squeeze(-1))
        elif rows is None:
            merge(self.out, self.lse.unsqueeze(-1), out, lse)
        else:
            mine, sums = pick(self.out, rows), pick(self.lse, rows).unsqueeze(-1)
            merge(mine, sums, out, lse)
            put(self.out, rows, mine)
            put(self.lse, rows, sums.squeeze(-1))


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Add another block to out [.., d] and lse [.., 1] in place; -inf stands for rows that saw no key, in one or in both."""
    other_lse = other_lse.to(lse.dtype)
    share = torch.sigmoid(other_lse - lse).masked_fill_(other_lse == -math.inf, 0.0)  # -inf - -inf would be NaN
    out.lerp_(other.to(out.dtype), share)
    torch.logaddexp(lse, other_lse, out=lse)  # of two -inf: -inf


# ------------------------------------------------------------------------------------------------------------ backward
class Gradients:
    """Sums of dq [t, H, d] and dk, dv [n, G, d], wide, for one gradient `grad` of the merged result: out [t, H, d], lse [t, H]."""

    def __init__(self, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, memo: dict[Any, Any] | None = None) -> None:
        self.memo = {} if memo is None else memo
        self.grad, self.q, self.out, self.lse = grad.contiguous(), q, out, lse
        self.dq = torch.zeros(q.shape, dtype=wide(q.dtype), device=q.device)

    def add(self, k: Tensor, v: Tensor, dk: Tensor, dv: Tensor, tiles: tuple[Tile, ...]) -> None:
        """Add to dq, and to dk and dv, what the tiles contribute."""
        kernel = kernel_of(self.q)
        if isinstance(kernel, PackedKernel):
            for call in calls_of(tiles, self.q, k, self.memo):
                grad, q, out, lse = (pick(x, call.queries) for x in (self.grad, self.q, self.out, self.lse))
                parts = kernel.backward(grad, q, pick(k, call.keys), pick(v, call.keys), out, lse, call)
                for total, rows, part in zip((self.dq, dk, dv), (call.queries, call.keys, call.keys), parts, strict=True):
                    add(total, rows, part)
            return
        for tile in tiles:
            for piece in _pieces(tile, kernel):
                grad, q, out = (_queries(x, piece) for x in (self.grad, self.q, self.out))
                lse = _queries(self.lse.unsqueeze(-1), piece).squeeze(-1)
                parts = kernel.backward(grad, q, _keys(k, piece), _keys(v, piece), out, lse, piece.causal)
                _queries(self.dq, piece).add_(parts[0])
                _keys(dk, piece).add_(parts[1])
                _keys(dv, piece).add_(parts[2])


# --------------------------------------------------------------------------------------------------------------- views
def _documents(x: Tensor, first: int, stretch: int, rows: int, count: int) -> Tensor:
    """View [B, heads, rows, d] of x [t, heads, d]. The last document's stretch may reach past the end of x, its rows do not."""
    if first < 0 or first + (count - 1) * stretch + rows > x.shape[0]:
        raise IndexError(f"rows {first} to {first + (count - 1) * stretch + rows} of a tensor of {x.shape[0]} rows")
    row, head, feature = x.stride()
    return x.as_strided((count, x.shape[1], rows, x.shape[2]), (stretch * row, head, row, feature), x.storage_offset() + first * row)


def _queries(x: Tensor, tile: Tile) -> Tensor:
    return _documents(x, tile.query, tile.query_stretch, tile.queries, tile.documents)


def _keys(x: Tensor, tile: Tile) -> Tensor:
    return _documents(x, tile.key, tile.key_stretch, tile.keys, tile.documents)


def _pieces(tile: Tile, kernel: Kernel) -> list[Tile]:
    """A causal tile as its square at the end and, before that, keys that all queries see: the fused kernels align causality otherwise."""
    before = tile.keys - tile.queries
    if not tile.causal or before == 0 or kernel.any_causal:
        return [tile]
    if before < 0:
        raise ValueError(f"{tile.queries} queries against {tile.keys} keys: the first ones would see no key")
    return [tile._replace(key=tile.key + before, keys=tile.queries), tile._replace(keys=before, causal=False)]


# ------------------------------------------------------------------------------------------------------------- kernels
class Kernel(NamedTuple):
    """forward(q [B, H, m, d], k, v [B, G, l, d], causal) -> out, lse [B, H, m]; backward(grad, q, k, v, out, lse, causal) -> dq, dk, dv.

    any_causal: also where there are more keys than queries.
    """

    forward: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]]
    any_causal: bool


def kernel_of(x: Tensor) -> Kernel | PackedKernel:
    """Fused where PyTorch has a kernel that tells the log-sum-exp: all formats on a CPU, half formats on a GPU. Else the plain one.

    The GPU's takes all documents of a step of the ring in one call.
    """
    if x.device.type == "cpu":
        return CPU_FLASH
    return CUDA_FLASH if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and x.shape[-1] % 8 == 0 else PLAIN


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out, lse


def _cpu_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal)
    return dq, dk, dv


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """The formulas, ROWS queries at a time, in the wide format."""
    kept = wide(q.dtype)
    out, lse = torch.empty(q.shape, dtype=kept, device=q.device), torch.empty(q.shape[:3], dtype=kept, device=q.device)
    k, v = k.to(kept), v.to(kept)
    for start in range(0, q.shape[2], ROWS):
        piece = slice(start, start + ROWS)
        scores = _scores(q[:, :, piece].to(kept), k, _offset(q, k, causal, start))
        sums = torch.logsumexp(scores, -1, keepdim=True)
        shares = torch.exp(scores - sums.masked_fill(sums == -math.inf, 0.0))
        out[:, :, piece] = _heads_apart(torch.matmul(_heads_together(shares, k), v), q.shape[1])
        lse[:, :, piece] = sums.squeeze(-1)
    return out, lse


def _plain_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    kept, scale = wide(q.dtype), q.shape[3] ** -0.5
    dq = torch.empty(q.shape, dtype=kept, device=q.device)
    k, v = k.to(kept), v.to(kept)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for start in range(0, q.shape[2], ROWS):
        piece = slice(start, start + ROWS)
        queries, slope = q[:, :, piece].to(kept), grad[:, :, piece].to(kept)
        sums = lse[:, :, piece].to(kept).unsqueeze(-1)
        shares = torch.exp(_scores(queries, k, _offset(q, k, causal, start)) - sums.masked_fill(sums == -math.inf, math.inf))
        inner = (slope * out[:, :, piece]).sum(-1, keepdim=True)
        slopes = _heads_together(slope, k)
        d_scores = shares * (_heads_apart(torch.matmul(slopes, v.transpose(-1, -2)), q.shape[1]) - inner) * scale
        d_scores = _heads_together(d_scores, k)
        dv += torch.matmul(_heads_together(shares, k).transpose(-1, -2), slopes)
        dk += torch.matmul(d_scores.transpose(-1, -2), _heads_together(queries, k))
        dq[:, :, piece] = _heads_apart(torch.matmul(d_scores, k), q.shape[1])
    return dq, dk, dv


def _offset(q: Tensor, k: Tensor, causal: bool, start: int) -> int | None:
    """Query row i of those from `start` on sees keys up to i + offset; None: all."""
    return k.shape[2] - q.shape[2] + start if causal else None


def _scores(q: Tensor, k: Tensor, offset: int | None) -> Tensor:
    """Scaled q [B, H, m, d] k [B, G, l, d]^T -> [B, H, m, l], -inf where a query does not see a key."""
    scores = _heads_apart(torch.matmul(_heads_together(q, k), k.transpose(-1, -2)), q.shape[1]).mul_(q.shape[3] ** -0.5)
    if offset is None:
        return scores
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu_(1 + offset)
    return scores.masked_fill_(hidden, -math.inf)


def _heads_together(x: Tensor, k: Tensor) -> Tensor:
    """[B, H, m, ..] -> [B, G, H / G * m, ..]: the query heads that share a kv head as more rows, so that k and v are not repeated."""
    return x.reshape(x.shape[0], k.shape[1], x.shape[1] // k.shape[1] * x.shape[2], x.shape[3])


def _heads_apart(x: Tensor, heads: int) -> Tensor:
    """Its inverse."""
    return x.reshape(x.shape[0], heads, x.shape[1] * x.shape[2] // heads, x.shape[3])


CPU_FLASH = Kernel(_cpu_forward, _cpu_backward, False)
PLAIN = Kernel(_plain_forward, _plain_backward, True)
