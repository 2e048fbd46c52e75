"""Context parallelism by a ring of A x R members: heads are exchanged for rows among A neighbours, keys and values travel around R blocks.

Block g of R holds members g A .. g A + A - 1. Together they own chunks g and 2 R - 1 - g of each document cut into 2 R, so after the
exchange each of them is member g of a zigzag ring of R for its share of the heads. Both parts use point-to-point messages inside the cp
group; no further groups are needed.

Gradients of keys and values travel in the wide format, twice the bytes of bf16: each hop adds to the sum, and rounding it P times would make
results depend on how many members share a document, which only the last rounding may.

Legend: t rows of this member, H query heads, G kv heads, d head dim; after the exchange there are A t rows, H / A and G / A heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megadcp.parallel import collectives
from megadcp.parallel.block_attention import Gradients, Running
from megadcp.parallel.context_share import Share
from megadcp.parallel.context_tiles import ring_tiles
from megadcp.parallel.tile import Tile


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, share: Share, neighbours: int) -> Tensor:
        ring = _Ring(share, neighbours)
        ctx.sizes = (q.shape[1], k.shape[1])
        q, k, v = ring.to_rows(q, k, v)
        out, lse = _forward(ring, q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring = ring
        return ring.to_heads([out])[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        ring: _Ring = ctx.ring
        (grad,) = ring.to_rows(grads[0])
        parts = _backward(ring, Gradients(grad, q, out, lse, ring.share.memo), k, v)
        dq, dk, dv = ring.to_heads([part.to(q.dtype) for part in parts])
        return dq, dk, dv, None, None


def _forward(ring: _Ring, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The merged output in q's format and its log-sum-exp. In step i the keys of block g - i are here; the next ones travel meanwhile."""
    running = Running(q, ring.share.memo)
    held = torch.stack((k, v))
    for step in range(ring.blocks):
        following = ring.pass_on(held) if step < ring.blocks - 1 else None
        running.add(q, held[0], held[1], ring.tiles(step), first=step == 0)
        if following is not None:
            held = following.arrived()
    return running.out.to(q.dtype), running.lse


def _backward(ring: _Ring, sums: Gradients, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv. Keys and values travel as before, one step behind them the sum of their gradients, in the wide format; it goes home last."""
    held = torch.stack((k, v))
    travelling: _Message | None = None
    for step in range(ring.blocks):
        following = ring.pass_on(held) if step < ring.blocks - 1 else None
        mine = torch.zeros((2, *k.shape), dtype=sums.dq.dtype, device=k.device)
        sums.add(held[0], held[1], mine[0], mine[1], ring.tiles(step))
        if travelling is not None:
            mine += travelling.arrived()
        travelling = ring.pass_on(mine)
        if following is not None:
            held = following.arrived()
    assert travelling is not None, "a ring has at least one block"
    home = travelling.arrived()
    return sums.dq, home[0], home[1]


class _Message:
    """Something on its way to the next block, while the like of it comes from the one before."""

    def __init__(self, sent: Tensor, buffer: Tensor, waits: list[Any]) -> None:
        self._sent, self._buffer, self._waits = sent, buffer, waits

    def arrived(self) -> Tensor:
        """What came. Also waits until what was sent is gone."""
        for wait in self._waits:
            wait.wait()
        return self._buffer


class _Ring:
    """Where this member stands: neighbour `place` of `neighbours` (A), in block `block` of `blocks` (R)."""

    def __init__(self, share: Share, neighbours: int) -> None:
        self.share, self.group, self.neighbours, self.blocks = share, share.group, neighbours, share.group.size // neighbours
        self.block, self.place = divmod(share.group.index, neighbours)
        self.borders, self.lengths = tuple(neighbours * border for border in share.borders), share.lengths

    def tiles(self, step: int) -> tuple[Tile, ...]:
        """What this block's queries see of the keys that are here in this step."""
        return ring_tiles(self.borders, self.lengths, self.blocks, self.block, (self.block - step) % self.blocks)

    def pass_on(self, held: Tensor) -> _Message:
        """Start sending to the next block and receiving from the one before."""
        buffer = torch.empty_like(held)
        after, before = ((self.block + way) % self.blocks * self.neighbours + self.place for way in (1, -1))
        return _Message(held, buffer, collectives.exchange([(held, after)], [(buffer, before)], self.group))

    # ------------------------------------------------------------------------------------------------- heads for rows
    def to_rows(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Tensors [t, heads, d] -> [A t, heads / A, d]: all neighbours' rows, in the block's order, for this member's heads."""
        if self.neighbours == 1:
            return tensors
        shares = zip(*(x.chunk(self.neighbours, 1) for x in tensors), strict=True)
        by_member = self._swap([torch.cat(share, 1) for share in shares])
        rows = torch.empty_like(by_member).flatten(0, 1)
        rows[self.share.order(self.neighbours)] = by_member.flatten(0, 1)
        return torch.split(rows, [x.shape[1] // self.neighbours for x in tensors], 1)

    def to_heads(self, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        """The way back: tensors [A t, heads / A, d] -> [t, heads, d]."""
        if self.neighbours == 1:
            return tuple(tensors)
        rows = torch.cat(tensors, 1)
        by_member = self._swap(list(rows[self.share.order(self.neighbours)].chunk(self.neighbours))).transpose(0, 1)  # [t, A, heads / A, d]
        return tuple(x.flatten(1, 2).contiguous() for x in torch.split(by_member, [x.shape[1] for x in tensors], 2))

    def _swap(self, parts: list[Tensor]) -> Tensor:
        """Parts of equal shape, the i-th for neighbour i -> what the neighbours have for this member, [A, ..]."""
        first = self.block * self.neighbours
        received = parts[0].new_empty((self.neighbours, *parts[0].shape))
        sends = [(part, first + place) for place, part in enumerate(parts)]
        receives = [(received[place], first + place) for place in range(self.neighbours)]
        _Message(received, received, collectives.exchange(sends, receives, self.group)).arrived()
        return received


ring_attention: Callable[[Tensor, Tensor, Tensor, Share, int], Tensor] = _RingAttention.apply
