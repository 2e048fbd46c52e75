"""Which part of a whole parameter one tensor-parallel rank holds. A layout matter: names, start values and checkpoints know whole ones.

A parameter without a shard is whole on every tp rank. `partial` marks one whose gradient is only this rank's part of the sum over tp.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

Piece = tuple[int, int]  # start, stop


@dataclass(frozen=True)
class Shard:
    """Rows `pieces` of dimension `dim` of a whole parameter, in local order.

    shape: of the whole. local: rows held; those behind the pieces are padding and stay zero. shared: LOCAL rows that other tp ranks hold
    too (key and value heads when there are fewer of them than ranks). owned: LOCAL rows that this rank counts in norms and saves: of
    shared rows only the first holder's.
    """

    shape: tuple[int, ...]
    dim: int
    pieces: tuple[Piece, ...]
    local: int
    shared: tuple[Piece, ...] = ()
    owned: tuple[Piece, ...] = ()

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of the tensor that is held."""
        return tuple(self.local if axis == self.dim else size for axis, size in enumerate(self.shape))


def shard_of(parameter: Tensor) -> Shard | None:
    """The shard that a parameter is; None for a whole one."""
    found: Shard | None = getattr(parameter, "shard", None)
    return found


def is_partial(parameter: Tensor) -> bool:
    """Whether the gradient of a whole parameter is only this tp rank's part."""
    return bool(getattr(parameter, "partial", False))


def mark(parameter: nn.Parameter, shard: Shard | None = None, partial: bool = False) -> nn.Parameter:
    """The parameter, with what it is noted on it."""
    if shard is not None:
        parameter.shard = shard  # type: ignore[attr-defined]
    if partial:
        parameter.partial = True  # type: ignore[attr-defined]
    return parameter


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """Shape of the whole parameter."""
    shard = shard_of(parameter)
    return tuple(parameter.shape) if shard is None else shard.shape


def take(whole: Tensor, shard: Shard | None) -> Tensor:
    """The local tensor of a whole one; padding rows are zero."""
    if shard is None:
        return whole
    parts = [whole.narrow(shard.dim, start, stop - start) for start, stop in shard.pieces]
    missing = shard.local - sum(stop - start for start, stop in shard.pieces)
    if missing:
        shape = list(whole.shape)
        shape[shard.dim] = missing
        parts.append(whole.new_zeros(shape))
    return torch.cat(parts, dim=shard.dim)


@torch.no_grad()
def put(whole: Tensor, shard: Shard | None, local: Tensor) -> None:
    """Write a local tensor's rows into a whole one, in place; padding rows go nowhere."""
    if shard is None:
        whole.copy_(local)
        return
    at = 0
    for start, stop in shard.pieces:
        whole.narrow(shard.dim, start, stop - start).copy_(local.narrow(shard.dim, at, stop - start))
        at += stop - start


def contiguous(shape: tuple[int, ...], dim: int, ranks: int, index: int) -> Shard:
    """Equal neighbouring rows for every rank, the last ones padded: ceil(rows / ranks) each."""
    rows = shape[dim]
    local = -(-rows // ranks)
    start, stop = min(index * local, rows), min((index + 1) * local, rows)
    pieces: tuple[Piece, ...] = ((start, stop),) if stop > start else ()
    return Shard(shape, dim, pieces, local, (), ((0, stop - start),) if stop > start else ())


def by_parts(shape: tuple[int, ...], parts: tuple[tuple[int, int], ...], ranks: int, index: int) -> Shard:
    """Rows in several parts, each (rows, unit) cut by itself between whole units; a part of fewer units than ranks is held several times.

    ValueError unless units and ranks divide one another.
    """
    pieces: list[Piece] = []
    shared: list[Piece] = []
    owned: list[Piece] = []
    first, at = 0, 0
    for rows, unit in parts:
        units = rows // unit
        if rows % unit or (units % ranks and ranks % units):
            raise ValueError(f"{rows} rows in units of {unit} can't be divided among {ranks} ranks")
        count = max(1, units // ranks)
        start = (index * count if units >= ranks else index * units // ranks) * unit
        size = count * unit
        pieces.append((first + start, first + start + size))
        if units < ranks:
            shared.append((at, at + size))
            if index % (ranks // units) == 0:
                owned.append((at, at + size))
        else:
            owned.append((at, at + size))
        first, at = first + rows, at + size
    if first != shape[0]:
        raise ValueError(f"the parts hold {first} rows, the parameter {shape[0]}")
    return Shard(shape, 0, tuple(pieces), at, tuple(shared), tuple(owned))
