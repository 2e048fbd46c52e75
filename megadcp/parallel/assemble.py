"""Whole tensors out of what the ranks of any layout hold, on rank 0: for proofs that layouts agree. Checkpoints gather nothing (boxes.py).

Names are those of the model in one piece: padding rows are left out, and of a tied table that lives on two stages there is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megadcp.mesh.groups import Group, GroupPool
from megadcp.nn.shard import Shard, put, shard_of, whole_shape
from megadcp.parallel.boxes import weight_pieces as weight_pieces
from megadcp.parallel.collectives import exchange
from megadcp.parallel.gradients import LAST_TABLE
from megadcp.parallel.replicas import Piece


@dataclass(frozen=True)
class _Told:
    """What one rank tells the others of a piece."""

    rank: int
    name: str
    dtype: torch.dtype
    whole: tuple[int, ...]
    local: tuple[int, ...]
    shard: Shard | None
    start: int
    stop: int

    @property
    def same(self) -> object:
        """Equal for pieces that hold the same elements."""
        return None if self.shard is None else self.shard.pieces, self.start, self.stop


def whole_tensors(pieces: Sequence[Piece], pool: GroupPool | None, tied: bool = False, prefix: str = "") -> dict[str, Tensor]:
    """Prefix + name -> whole tensor, on the CPU of rank 0; nothing on the other ranks. Without a pool the live tensors of this rank.

    All ranks call it. One parameter is gathered at a time, straight to rank 0; what several ranks hold is sent once.
    """
    if pool is None or pool.world.size == 1:
        return {prefix + piece.name: piece.values.view(piece.parameter.shape) for piece in pieces}
    own = {(piece.name, piece.start): piece.values for piece in pieces}
    found = {}
    for name, told in _agree(pieces, pool.world, tied).items():
        parts = _collect(told, own, pool.world)
        if pool.world.index == 0:
            whole = torch.empty(told[0].whole, dtype=told[0].dtype)
            for shard, local in parts:
                put(whole, shard, local)
            found[prefix + name] = whole
    return found


def _agree(pieces: Sequence[Piece], world: Group, tied: bool) -> dict[str, list[_Told]]:
    """By name, in one order on all ranks: pieces that together make the whole, each from the first rank that has it.

    The second copy of a tied table is never asked for.
    """
    mine = [
        _Told(
            world.index,
            piece.name,
            piece.values.dtype,
            whole_shape(piece.parameter),
            tuple(piece.parameter.shape),
            shard_of(piece.parameter),
            piece.start,
            piece.stop,
        )
        for piece in pieces
        if not (tied and piece.name == LAST_TABLE)
    ]
    everybody: list[list[_Told]] = [mine]
    if world.handle is not None:
        everybody = [[] for _ in world.ranks]
        dist.all_gather_object(everybody, mine, group=world.handle)
    found: dict[str, dict[object, _Told]] = {}
    for told in everybody:
        for one in told:
            found.setdefault(one.name, {}).setdefault(one.same, one)
    return {name: list(chosen.values()) for name, chosen in found.items()}


def _collect(told: Sequence[_Told], own: Mapping[tuple[str, int], Tensor], world: Group) -> list[tuple[Shard | None, Tensor]]:
    """Rank 0 receives the pieces of one parameter: (shard, local tensor) for each tp rank that has other rows; others send theirs."""
    if world.index != 0:
        sends = [(own[one.name, one.start], 0) for one in told if one.rank == world.index]
        for work in exchange(sends, [], world):
            work.wait()
        return []
    device = next(iter(own.values())).device if own else torch.device("cpu")
    buffers = [own[one.name, one.start] if one.rank == 0 else torch.empty(one.stop - one.start, dtype=one.dtype, device=device) for one in told]
    receives = [(buffer, one.rank) for one, buffer in zip(told, buffers, strict=True) if one.rank != 0]
    for work in exchange([], receives, world):
        work.wait()
    parts: dict[object, tuple[Shard | None, Tensor]] = {}
    for one, buffer in zip(told, buffers, strict=True):
        rows = None if one.shard is None else one.shard.pieces
        if rows not in parts:
            parts[rows] = one.shard, torch.empty(one.local, dtype=one.dtype)
        parts[rows][1].view(-1)[one.start : one.stop].copy_(buffer)
    return list(parts.values())
