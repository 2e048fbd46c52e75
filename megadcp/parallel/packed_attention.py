"""Tiles of many documents as few calls of a kernel for documents of different lengths (flash attention's variable-length form).

A call takes queries and keys of its documents back to back, with borders of its own. Tiles whose queries and keys are apart go into one call:
all of a ring's step do, of gathered keys the early and the late chunks are two calls. Rows that are not neighbours are picked into a new
tensor first, and the results are put back: a copy, where one kernel for each run of equal documents would leave the device idle.

Legend: t rows of queries, n rows of keys, m and l of them in a call, H query heads, G kv heads, d head dim, D documents of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megadcp.parallel.tile import Tile


@dataclass(frozen=True)
class Call:
    """Which rows one call takes: None for all of them in order, else int64 [m] or [l], each row once.

    query_borders, key_borders: int32 [D + 1]; most_queries, most_keys: of one document. causal: aligned at each document's end.
    """

    queries: Tensor | None
    keys: Tensor | None
    query_borders: Tensor
    key_borders: Tensor
    most_queries: int
    most_keys: int
    causal: bool


class PackedKernel(NamedTuple):
    """forward(q [m, H, d], k [l, G, d], v, call) -> out [m, H, d], lse [m, H]; backward(grad, q, k, v, out, lse, call) -> dq, dk, dv."""

    forward: Callable[[Tensor, Tensor, Tensor, Call], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Call], tuple[Tensor, Tensor, Tensor]]


# --------------------------------------------------------------------------------------------------------------- calls
Spans = list[tuple[int, int]]  # first row, rows


def grouped(tiles: Iterable[Tile]) -> list[tuple[Spans, Spans, bool]]:
    """Spans of queries and of keys, document by document, and causality, of each call. No row comes twice in a call."""
    found: list[tuple[Spans, Spans, bool]] = []
    for tile in tiles:
        for number in range(tile.documents):
            queries = (tile.query + number * tile.query_stretch, tile.queries)
            keys = (tile.key + number * tile.key_stretch, tile.keys)
            if not found or found[-1][2] != tile.causal or not (_behind(queries, found[-1][0]) and _behind(keys, found[-1][1])):
                found.append(([], [], tile.causal))
            found[-1][0].append(queries)
            found[-1][1].append(keys)
    return found


def _behind(span: tuple[int, int], spans: Spans) -> bool:
    return span[0] >= sum(spans[-1])


def calls_of(tiles: tuple[Tile, ...], queries: Tensor, keys: Tensor, memo: dict[Any, Any]) -> list[Call]:
    """The calls that do these tiles of queries [t, ..] and keys [n, ..]. Kept in `memo`, which the layers of a microbatch share."""
    key = "calls", tiles, queries.shape[0], keys.shape[0], queries.device
    if key not in memo:
        memo[key] = [_call(*one, queries.shape[0], keys.shape[0], queries.device) for one in grouped(tiles)]
    found: list[Call] = memo[key]
    return found


def _call(queries: Spans, keys: Spans, causal: bool, t: int, n: int, device: torch.device) -> Call:
    for spans, rows in ((queries, t), (keys, n)):
        if spans[0][0] < 0 or sum(spans[-1]) > rows:
            raise IndexError(f"rows {spans[0][0]} to {sum(spans[-1])} of a tensor of {rows} rows")
    return Call(
        _rows(queries, t, device), _rows(keys, n, device), _borders(queries, device), _borders(keys, device),
        max(count for _, count in queries), max(count for _, count in keys), causal,
    )  # fmt: skip


def _rows(spans: Spans, total: int, device: torch.device) -> Tensor | None:
    """None where the spans are all rows: as they come in ascending order and apart, it is enough to count."""
    if sum(count for _, count in spans) == total:
        return None
    return _sent(torch.cat([torch.arange(start, start + count) for start, count in spans]), device)


def _borders(spans: Spans, device: torch.device) -> Tensor:
    borders = [0]
    for _, count in spans:
        borders.append(borders[-1] + count)
    return _sent(torch.tensor(borders, dtype=torch.int32), device)


def _sent(x: Tensor, device: torch.device) -> Tensor:
    """On the device, without waiting for it."""
    return x if device.type == "cpu" else (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)


def pick(x: Tensor, rows: Tensor | None) -> Tensor:
    """Rows of x, contiguous."""
    return x.contiguous() if rows is None else x.index_select(0, rows)


def put(x: Tensor, rows: Tensor | None, values: Tensor) -> None:
    """Overwrite rows of x."""
    if rows is None:
        x.copy_(values)
    else:
        x.index_copy_(0, rows, values.to(x.dtype))


def add(x: Tensor, rows: Tensor | None, values: Tensor) -> None:
    """Add to rows of x; in a fixed order, as no row comes twice."""
    if rows is None:
        x.add_(values)
    else:
        x.index_add_(0, rows, values.to(x.dtype))


# ------------------------------------------------------------------------------------------------------------- kernels
def _flash_forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Written from the operator's schema and torch.nn.attention.varlen: it has not run on a GPU yet."""
    out, lse = torch.ops.aten._flash_attention_forward(
        q, k, v, call.query_borders, call.key_borders, call.most_queries, call.most_keys, 0.0, call.causal, False
    )[:2]
    if lse.shape != (q.shape[1], q.shape[0]):
        raise RuntimeError(f"flash attention gave log-sum-exps of shape {tuple(lse.shape)} for {q.shape[0]} queries of {q.shape[1]} heads")
    return out, lse.t()


def _flash_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Its backward, without dropout: the random state is not read. It has not run on a GPU yet."""
    state, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    borders, sizes = (call.query_borders, call.key_borders), (call.most_queries, call.most_keys)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(grad, q, k, v, out, lse.t().contiguous(), *borders, *sizes, 0.0, call.causal, state, unused)
    return dq, dk, dv


CUDA_FLASH = PackedKernel(_flash_forward, _flash_backward)
