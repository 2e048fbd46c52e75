"""Core attention of a pack shared by the P members of a cp group; forward and backward equal one process up to rounding.

Kinds, chosen by the plan for each microbatch (Placement.cp_comm):
- ring: keys and values travel around the group, each member computes with those it has while the next ones arrive;
- all_gather: every member gets all keys and values;
- ulysses: members exchange rows for heads, so that each has whole documents for its share of the heads;
- 2d: ulysses among A neighbouring members, ring among the R = P / A blocks of neighbours.
Ring and ulysses are 2d with A = 1 and A = P, and one autograd function serves all three.

All messages stay in the cp group of the microbatch's Placement, which forward, recompute and backward share; all members issue them in the
same order, also those without a real row. Only q, k, v, the output and its log-sum-exp are kept for the backward.

Legend: t rows of this member, H query heads, G kv heads (of this tensor-parallel rank), d head dim, n documents.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from megadcp.mesh.groups import Group
from megadcp.nn.backend import PackedTokens
from megadcp.parallel.context_gather import gathered_attention
from megadcp.parallel.context_ring import ring_attention
from megadcp.parallel.context_share import Share

KINDS = ("ring", "all_gather", "ulysses", "2d")


class Where(Protocol):
    """What attention reads of a microbatch's Placement."""

    @property
    def cp(self) -> int:
        """Members."""

    @property
    def cp_comm(self) -> str:
        """One of KINDS."""

    @property
    def group(self) -> Group | None:
        """The cp group; anything for cp=1."""

    @property
    def lanes_per_node(self) -> int:
        """Limits A of kind 2d."""


def attention(q: Tensor, k: Tensor, v: Tensor, batch: PackedTokens, placement: Where) -> Tensor:
    """Attend with q [t, H, d], k and v [t, G, d] -> [t, H, d]: causal inside each document, whichever members hold it; padding rows zero.

    `batch` holds this member's rows in zigzag order, local borders and global real lengths. k and v in q's format.

    Raises:
        ValueError: the group is not that of the placement, the kind is unknown or its heads can't be divided, borders are no zigzag.
    """
    group, kind = placement.group, placement.cp_comm
    if group is None or group.size != placement.cp:
        raise ValueError(f"the placement says cp={placement.cp}, but its group has {group.size if group else 'no'} ranks")
    share = Share(group, batch.cu_seqlens, batch.cu_seqlens_list, batch.real_lengths_list, batch.memo)
    if share.borders[-1] != q.shape[0]:
        raise ValueError(f"the borders are those of {share.borders[-1]} rows, but there are {q.shape[0]}")
    if kind == "all_gather":
        return gathered_attention(q, k, v, share)
    return ring_attention(q, k, v, share, neighbours(kind, q.shape[1], k.shape[1], group.size, placement.lanes_per_node))


def neighbours(kind: str, heads: int, kv_heads: int, size: int, lanes_per_node: int) -> int:
    """A, members that share heads: 1 for ring, all for ulysses, for 2d the cost model's choice (docs/plan.md section 3)."""
    split = {"ring": 1, "ulysses": size, "2d": head_split(kv_heads, size, lanes_per_node)}.get(kind)
    if split is None:
        raise ValueError(f"cp_comm={kind} is unknown; legal: {', '.join(KINDS)}")
    if heads % split or kv_heads % split:
        raise ValueError(f"cp_comm={kind} divides heads between {split} members, but there are {heads} and {kv_heads} kv heads; ring always works")
    return split


def head_split(kv_heads: int, size: int, lanes_per_node: int) -> int:
    """The largest power of two that divides kv_heads, at most min(size, lanes_per_node)."""
    split = 1
    while 2 * split <= min(size, lanes_per_node) and kv_heads % (2 * split) == 0 == size % (2 * split):
        split *= 2
    return split
