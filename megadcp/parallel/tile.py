"""A tile: some rows of queries that meet some rows of keys.

Legend: B equal documents in one tile.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Tile(NamedTuple):
    """`queries` rows from `query` on meet `keys` rows from `key` on; the same in so many `documents`, whose rows lie a stretch apart.

    causal: aligned at the end, so the last query sees all keys and the one before it all but the last.
    """

    query: int
    queries: int
    key: int
    keys: int
    causal: bool
    documents: int = 1
    query_stretch: int = 0
    key_stretch: int = 0


def join(tiles: Iterable[Tile]) -> list[Tile]:
    """Fewer tiles for the same: equal ones at equal distances become one. Tiles without queries or keys are left out."""
    found: list[Tile] = []
    for tile in tiles:
        if not tile.queries or not tile.keys:
            continue
        if found:
            last = found[-1]
            stretches = (tile.query - last.query, tile.key - last.key)
            if last.documents > 1:
                stretches = (last.query_stretch, last.key_stretch)
            following = (last.query + last.documents * stretches[0], last.key + last.documents * stretches[1])
            if (tile.query, tile.key) == following and (tile.queries, tile.keys, tile.causal) == (last.queries, last.keys, last.causal):
                found[-1] = last._replace(documents=last.documents + 1, query_stretch=stretches[0], key_stretch=stretches[1])
                continue
        found.append(tile)
    return found
