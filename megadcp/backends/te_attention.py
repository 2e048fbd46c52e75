"""Core attention of packed documents on Transformer Engine, alone or shared by a cp group: each call says which group.

Its attention keeps a group as an attribute and reads it in every forward, also in one that recompute runs long after other microbatches have
set another. So the group of the microbatch's Placement is set before each call and taken away after; the backward uses what its forward saw.

What a member holds of a pack is the same here and there: of each document, cut into 2 P chunks, chunk r and chunk 2 P - 1 - r, documents one
after the other. Borders and real lengths are those of whole documents there, local ones here.

Legend: t rows of this member, n documents, P members, H query heads, G kv heads, d head dim (of one tensor-parallel rank).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from megadcp.backends.te_probe import Te
from megadcp.mesh.groups import Group
from megadcp.nn.backend import PackedTokens, Placement
from megadcp.parallel.context import Where, neighbours

COMMUNICATION = {"ring": "p2p", "all_gather": "all_gather", "ulysses": "a2a", "2d": "a2a+p2p"}
NO_GROUP = (None, None, None, "p2p")


class TwoLevels(Where, Protocol):
    """A Placement whose group may be cut in two for kind 2d."""

    @property
    def halves(self) -> tuple[Group, Group] | None:
        """Neighbours that exchange heads, and members at the same place of all blocks of neighbours."""


@dataclass(frozen=True)
class Borders:
    """Borders of the whole pack: int32 [n + 1] without and with padding (one tensor where there is none); longest padded document.

    padding: mask [t, 1] of this member's rows that hold no token; None where all do.
    """

    real: Tensor
    padded: Tensor
    longest: int
    padding: Tensor | None


def borders_of(batch: PackedTokens, cp: int) -> Borders:
    """Made once for a microbatch, without waiting for the device."""
    key = ("te borders", cp)
    if key not in batch.memo:
        batch.memo[key] = _borders(batch, cp)
    found: Borders = batch.memo[key]
    return found


def _borders(batch: PackedTokens, cp: int) -> Borders:
    padded = batch.cu_seqlens * cp if cp > 1 else batch.cu_seqlens
    stretches = [(stop - start) * cp for start, stop in pairwise(batch.cu_seqlens_list)]
    if stretches == list(batch.real_lengths_list):
        return Borders(padded, padded, batch.max_length * cp, None)
    real = torch.zeros_like(padded)
    torch.cumsum(batch.real_lengths, 0, dtype=torch.int32, out=real[1:])
    lengths = torch.repeat_interleave(batch.real_lengths, (batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]).long(), output_size=len(batch.tokens))
    # Positions are those in whole documents and go on counting in padding.
    return Borders(real, padded, batch.max_length * cp, (batch.positions >= lengths)[:, None])


class TeAttention:
    """q [t, H, d], k and v [t, G, d] -> [t, H, d] of one layer; no module of the model's tree, and without parameters."""

    def __init__(self, te: Te, sizes: tuple[int, int, int], stream: Any) -> None:
        """sizes: H, G, d, all of this rank, which is why Transformer Engine hears of no tp. stream: a second one, for steps of a ring."""
        heads, kv_heads, head_dim = sizes
        self._module = te.pytorch.DotProductAttention(
            heads, head_dim, num_gqa_groups=kv_heads, attention_dropout=0.0, qkv_format="thd", attn_mask_type="padding_causal"
        )
        self._stream = stream

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, batch: PackedTokens, placement: Placement) -> Tensor:
        """Causal inside each document, nothing across; padding rows are zero, and so are their gradients."""
        where = cast(TwoLevels, placement)
        borders = borders_of(batch, where.cp)
        self._module.set_context_parallel_group(*self._group(where, q.shape[1], k.shape[1]))
        try:
            out: Tensor = self._module(
                q.contiguous(), k.contiguous(), v.contiguous(),
                cu_seqlens_q=borders.real, cu_seqlens_kv=borders.real, cu_seqlens_q_padded=borders.padded, cu_seqlens_kv_padded=borders.padded,
                max_seqlen_q=borders.longest, max_seqlen_kv=borders.longest, pad_between_seqs=borders.padding is not None,
            )  # fmt: skip
        finally:
            self._module.set_context_parallel_group(*NO_GROUP)
        if borders.padding is not None:  # whatever the kernel has left there must not meet the zero gradients of the layers behind
            out = out.masked_fill(borders.padding, 0.0)
        return out.view(q.shape)

    def _group(self, where: TwoLevels, heads: int, kv_heads: int) -> tuple[Any, ...]:
        """Arguments of set_context_parallel_group. ValueError for a kind that doesn't exist or whose heads can't be divided."""
        if where.cp == 1:
            return NO_GROUP
        group, kind = where.group, where.cp_comm
        if group is None or group.size != where.cp:
            raise ValueError(f"the placement says cp={where.cp}, but its group has {group.size if group else 'no'} ranks")
        if kind not in COMMUNICATION:
            raise ValueError(f"cp_comm={kind} is unknown; legal: {', '.join(COMMUNICATION)}")
        handles: Any = group.handle
        if kind != "all_gather":
            split = neighbours(kind, heads, kv_heads, group.size, where.lanes_per_node)
            if kind == "2d":
                handles = _handles(where, split)
        # Ranks in group order: neighbours vary fastest, which is the order that a2a+p2p counts in.
        return handles, list(group.ranks), self._stream, COMMUNICATION[kind]


def _handles(where: TwoLevels, split: int) -> list[Any]:
    halves = where.halves
    if halves is None or halves[0].size != split or halves[0].size * halves[1].size != where.cp:
        sizes = "no groups" if halves is None else f"groups of {halves[0].size} and {halves[1].size}"
        raise ValueError(f"cp_comm=2d of {where.cp} lanes needs groups of {split} and {where.cp // split} ranks, but there are {sizes}")
    return [half.handle for half in halves]
