"""Which rows meet which under context parallelism: index arithmetic only.

P members share a pack. Of each document, cut into 2 P chunks of c rows, member r holds chunk r (early) and chunk 2 P - 1 - r (late), early
first. Real tokens come before padding in a document, so a late chunk has some only where the early one is full, and chunks before one with
real rows are full: every tile below is made of neighbouring real rows. Padding takes part in none.

Borders are those of the member's own rows: a document's own padding included, its global stretch divided by P.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from megadcp.mesh.coords import zigzag_real
from megadcp.parallel.tile import Tile, join

Borders = tuple[int, ...]
RECENT = 64  # layers of a microbatch ask for the same tiles again


def _documents(borders: Borders, lengths: tuple[int, ...], size: int, index: int) -> Iterator[tuple[int, int, int, int]]:
    """First row, rows of a chunk, real rows of the early and of the late chunk."""
    for start, end, length in zip(borders[:-1], borders[1:], lengths, strict=True):
        if (end - start) % 2 and size > 1:
            raise ValueError(f"a document has {end - start} rows on each of {size} members: not an early and a late chunk of equal size")
        if not 0 <= length <= (end - start) * size:
            raise ValueError(f"a document of {length} tokens has {(end - start) * size} rows")
        if size == 1:
            yield start, end - start, length, 0
            continue
        yield start, (end - start) // 2, *zigzag_real(length, (end - start) * size, size, index)


@lru_cache(RECENT)
def ring_tiles(borders: Borders, lengths: tuple[int, ...], size: int, index: int, source: int) -> tuple[Tile, ...]:
    """Member `index`'s queries against member `source`'s keys, which have the same borders. Size 1: whole documents.

    source == index: both chunks, causal in their own order. An earlier source: its early chunk is seen by all queries, its late one by none.
    A later source: all its rows are seen by the late queries, none by the early ones.
    """
    tiles = []
    for start, chunk, early, late in _documents(borders, lengths, size, index):
        if source == index:
            tiles.append(Tile(start, early + late, start, early + late, True))
        elif source < index:
            tiles.append(Tile(start, early + late, start, chunk, False))
        else:
            tiles.append(Tile(start + chunk, late, start, 2 * chunk, False))
    return tuple(join(tiles))


@lru_cache(RECENT)
def gather_tiles(borders: Borders, lengths: tuple[int, ...], size: int, index: int) -> tuple[Tile, ...]:
    """Member `index`'s queries against the keys of the whole pack in its own order: each chunk sees what stands before its end."""
    both: tuple[list[Tile], list[Tile]] = ([], [])
    for start, chunk, *real in _documents(borders, lengths, size, index):
        for half, (tiles, rows, place) in enumerate(zip(both, real, (index, 2 * size - 1 - index), strict=True)):
            tiles.append(Tile(start + half * chunk, rows, start * size, place * chunk + rows, True))
    return tuple(join(both[0]) + join(both[1]))


def pairs(tiles: tuple[Tile, ...]) -> int:
    """Pairs of query and key that see each other."""
    return sum(tile.documents * (tile.queries * tile.keys - (tile.queries * (tile.queries - 1) // 2 if tile.causal else 0)) for tile in tiles)


def joined_rows(cu_seqlens: Tensor, rows: int, size: int) -> Tensor:
    """int64 [size, rows]: where the rows of `size` neighbouring members of a larger or equal group stand when put together.

    cu_seqlens [n + 1]: local borders, of `rows` rows in all. Together the neighbours hold one wider early and late chunk of each document;
    as the whole group they hold the document itself, in order. On the tensor's device, without waiting for it.
    """
    starts, stretches = cu_seqlens[:-1].long(), (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    start, chunk = (torch.repeat_interleave(x, stretches, output_size=rows) for x in (starts, stretches // 2))
    row = torch.arange(rows, device=cu_seqlens.device)
    late = row - start >= chunk
    first = row + start * (size - 1)  # of member 0's early chunk
    member = torch.arange(size, device=cu_seqlens.device).unsqueeze(1)
    return first + chunk * torch.where(late, 2 * size - 2 - member, member)
