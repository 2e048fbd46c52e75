"""Where the elements that a rank holds lie in whole parameters, as boxes: what checkpoints of any layout are written and read by.

Names and shapes are those of the model in one piece: padding rows are nowhere, and of a tied table that lives on two stages there is one.
A piece is a stretch of a flattened local tensor (replicas.py); a stretch of a matrix is a part of a row, whole rows and a part of a row:
three boxes at most. A shard of several parts (rows of queries, keys and values) has boxes for each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from megadcp.mesh.groups import Group
from megadcp.nn.shard import shard_of, whole_shape
from megadcp.parallel.gradients import FIRST_TABLE, LAST_TABLE
from megadcp.parallel.replicas import Piece, counted, pieces_of

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """Elements [offsets, offsets + values.shape) of the tensor `name`, which has the shape `whole`; values is a view of what a rank holds."""

    name: str
    whole: Shape
    offsets: Shape
    values: Tensor

    @property
    def sizes(self) -> Shape:
        """Elements along each dimension."""
        return tuple(self.values.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self.values.numel() * self.values.element_size()


def stretch(shape: Sequence[int], start: int, stop: int) -> list[tuple[Shape, Shape]]:
    """(offsets, sizes) of the boxes that make up elements start, .., stop - 1 of a flattened tensor, in order; each is contiguous in it."""
    if start >= stop:
        return []
    if len(shape) <= 1:
        return [((start,), (stop - start,))] if shape else [((), ())]
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # whole rows
    if first > last:  # inside one row
        return [((last, *offsets), (1, *sizes)) for offsets, sizes in stretch(shape[1:], start - last * inner, stop - last * inner)]
    found = [((first - 1, *offsets), (1, *sizes)) for offsets, sizes in stretch(shape[1:], start - (first - 1) * inner, inner) if start % inner]
    if first < last:
        found.append(((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])))
    return found + [((last, *offsets), (1, *sizes)) for offsets, sizes in stretch(shape[1:], 0, stop - last * inner)]


def boxes_of(pieces: Iterable[Piece], tied: bool, prefix: str = "") -> list[Box]:
    """All that pieces hold, named prefix + name. tied: the last stage's copy of the table goes by the first one's name."""
    found = []
    for piece in pieces:
        shard, name = shard_of(piece.parameter), prefix + (FIRST_TABLE if tied and piece.name == LAST_TABLE else piece.name)
        whole, at = whole_shape(piece.parameter), 0
        for offsets, sizes in stretch(tuple(piece.parameter.shape), piece.start, piece.stop):
            values = piece.values[at : at + math.prod(sizes)].view(sizes)
            at += values.numel()
            if shard is None:
                found.append(Box(name, whole, offsets, values))
                continue
            local, dim = 0, shard.dim
            for first, end in shard.pieces:
                low, high = max(local, offsets[dim]), min(local + end - first, offsets[dim] + sizes[dim])
                if low < high:
                    moved = (*offsets[:dim], low - local + first, *offsets[dim + 1 :])
                    found.append(Box(name, whole, moved, values.narrow(dim, low - offsets[dim], high - low)))
                local += end - first
    return found


def boxes_once(pieces: Iterable[Piece], tied: bool, tp: Group, prefix: str = "") -> list[Box]:
    """Those of `boxes_of` that this rank writes: all ranks of a stage together, each element once, if pieces are once among its lanes."""
    mine = [
        Piece(piece.name, piece.parameter, first, piece.values[first - piece.start : last - piece.start])
        for piece in pieces
        if not (tied and piece.name == LAST_TABLE)
        for low, high in counted(piece.parameter, tp)
        if (first := max(low, piece.start)) < (last := min(high, piece.stop))
    ]
    return boxes_of(mine, tied, prefix)


def weight_pieces(model: nn.Module) -> list[Piece]:
    """The parameters themselves, frozen ones too."""
    named = list(model.named_parameters())
    return pieces_of(named, [parameter.detach() for _, parameter in named])
