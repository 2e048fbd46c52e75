"""Parameters that several tensor-parallel ranks hold: summing what each has of a gradient, and counting every element once.

A rank's tensors are spoken of in pieces: stretches of elements of what the rank holds of a parameter, flattened. After the sum over lanes
a rank has some elements of each tensor only, and the sums over tp go on with just those.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megadcp.mesh.groups import Group
from megadcp.nn.shard import Shard, is_partial, shard_of
from megadcp.parallel.collectives import all_gather, all_reduce

Range = tuple[int, int]  # first element, one behind the last


@dataclass(frozen=True)
class Piece:
    """Elements `start`, `start + 1`, .. of a named parameter's local tensor, flattened. values [n] may be of anything that belongs to it."""

    name: str
    parameter: Tensor
    start: int
    values: Tensor

    @property
    def stop(self) -> int:
        """One behind the last element."""
        return self.start + self.values.numel()


def pieces_of(named: Iterable[tuple[str, nn.Parameter]], values: Iterable[Tensor]) -> list[Piece]:
    """One piece for each parameter, with all elements. `values` are contiguous and of the parameters' shapes."""
    return [Piece(name, parameter, 0, tensor.detach().view(-1)) for (name, parameter), tensor in zip(named, values, strict=True)]


# ------------------------------------------------------------------------------------------------------------------ sums
class SumOverTp:
    """Sums, over tensor-parallel ranks, the gradients that are only parts: of partial parameters and of shared rows (nn/shard.py)."""

    def __init__(self, parameters: Sequence[Tensor], tp: Group) -> None:
        """Ask the other ranks which rows they hold; all of them construct it at the same time, for the same parameters."""
        self.tp = tp
        self._shared = _shared_ranges(parameters, tp) if tp.size > 1 else {}

    def __call__(self, pieces: Iterable[Piece]) -> None:
        """Sum in place; all ranks have pieces of the same elements of the same parameters, in one order. One sum for each dtype."""
        if self.tp.size == 1:
            return
        places: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}  # (block that is summed, where its sum goes)
        sums: dict[torch.dtype, list[Tensor]] = {}
        for piece in pieces:
            for block, row, target in self._blocks(piece):
                sums.setdefault(block.dtype, []).append(block)
                places.setdefault(block.dtype, []).append((row, target))
        for dtype, blocks in sums.items():
            flat = all_reduce(torch.cat([block.view(-1) for block in blocks]), self.tp)
            for block, part, (row, target) in zip(blocks, torch.split(flat, [block.numel() for block in blocks]), places[dtype], strict=True):
                block.view(-1).copy_(part)
                if row is not target:
                    target.copy_(row)

    def _blocks(self, piece: Piece) -> list[tuple[Tensor, Tensor, Tensor]]:
        """(block, its row of this rank's unit, elements it belongs to): of shared rows one row for each unit, all but one's own zero."""
        if is_partial(piece.parameter):
            return [(piece.values, piece.values, piece.values)]
        found = []
        for (low, high), units, mine in self._shared.get(id(piece.parameter), ()):
            first, last = max(low, piece.start), min(high, piece.stop)
            if first < last:
                target = piece.values[first - piece.start : last - piece.start]
                block = target.new_zeros(units, last - first)
                block[mine] = target
                found.append((block, block[mine], target))
        return found


def _shared_ranges(parameters: Sequence[Tensor], tp: Group) -> dict[int, list[tuple[Range, int, int]]]:
    """By id of the parameter, for each of its shared ranges: elements, how many different ranges the ranks hold there, which one is here."""
    shards = [(parameter, shard) for parameter in parameters if (shard := shard_of(parameter)) is not None and shard.shared]
    firsts = [_whole_row(shard, rows[0]) for _, shard in shards for rows in shard.shared]
    if not firsts:  # and so on all ranks
        return {}
    table = all_gather(torch.tensor([firsts], device=shards[0][0].device), tp).t().tolist()  # [ranges, T]
    columns = iter(zip(firsts, table, strict=True))
    found: dict[int, list[tuple[Range, int, int]]] = {}
    for parameter, shard in shards:
        width = _row_elements(parameter, shard)
        for low, high in shard.shared:
            mine, held = next(columns)
            units = sorted(set(held))
            found.setdefault(id(parameter), []).append(((low * width, high * width), len(units), units.index(mine)))
    return found


def _whole_row(shard: Shard, local: int) -> int:
    """Where a local row, the first of a piece of the shard, stands in the whole parameter."""
    at = 0
    for start, stop in shard.pieces:
        if at == local:
            return start
        at += stop - start
    raise ValueError(f"local row {local} begins no piece of {shard}")


def _row_elements(parameter: Tensor, shard: Shard) -> int:
    if shard.dim != 0:
        raise ValueError("only rows (dim 0) can be shared")
    return parameter.numel() // max(1, shard.local)


@torch.no_grad()
def sum_over_tp(parameters_and_gradients: Iterable[tuple[nn.Parameter, Tensor]], tp: Group) -> None:
    """Sum partial gradients and those of shared rows in place. gradients: of the local parameters' shapes. All ranks of the group call it."""
    pairs = list(parameters_and_gradients)
    plain = [(parameter, gradient, gradient.contiguous()) for parameter, gradient in pairs]
    SumOverTp([parameter for parameter, _ in pairs], tp)([Piece("", parameter, 0, whole.view(-1)) for parameter, _, whole in plain])
    for _, gradient, whole in plain:
        if whole is not gradient:
            gradient.copy_(whole)


# -------------------------------------------------------------------------------------------------------------- counting
def counted(parameter: Tensor, tp: Group) -> list[Range]:
    """Elements of the local tensor that this rank counts, so that the tp ranks together count each element of the whole parameter once."""
    shard = shard_of(parameter)
    if shard is None:
        return [(0, parameter.numel())] if tp.index == 0 else []
    if shard.dim == 0:
        width = _row_elements(parameter, shard)
        return [(low * width, high * width) for low, high in shard.owned]
    if shard.owned == ((0, shard.local),):
        return [(0, parameter.numel())]
    if not shard.owned:
        return []
    raise ValueError(f"columns of a parameter are owned in part: {shard}")


def split_counted(pieces: Iterable[Piece], tp: Group, left_out: Iterable[str] = ()) -> tuple[list[Tensor], list[Tensor]]:
    """Views of what this rank counts, and of what others count. Parameters named in `left_out` count nowhere."""
    skipped = set(left_out)
    ours: list[Tensor] = []
    others: list[Tensor] = []
    for piece in pieces:
        at = piece.start
        for low, high in counted(piece.parameter, tp) if piece.name not in skipped else ():
            first, last = max(low, at), min(high, piece.stop)
            if first < last:
                others.append(piece.values[at - piece.start : first - piece.start])
                ours.append(piece.values[first - piece.start : last - piece.start])
                at = last
        others.append(piece.values[at - piece.start :])
    return [view for view in ours if view.numel()], [view for view in others if view.numel()]
