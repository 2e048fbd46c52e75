"""Which rows meet which: every pair of real query and earlier key of its document once, evenly over the members."""

from __future__ import annotations

import itertools
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from context_helpers import Documents, documents
from hypothesis import given, settings
from hypothesis import strategies as st

from megadcp.mesh.coords import zigzag_real
from megadcp.parallel.context import head_split, neighbours
from megadcp.parallel.context_tiles import gather_tiles, joined_rows, pairs, ring_tiles
from megadcp.parallel.tile import Tile
from megadcp.plan.cost import CostModel

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=6)
SIZES = st.sampled_from([1, 2, 3, 4, 8])


def wanted(docs: Documents) -> set[tuple[int, int]]:
    found, start = set(), 0
    for length, padded in zip(docs.lengths, docs.padded, strict=True):
        found |= {(start + query, start + key) for query in range(length) for key in range(query + 1)}
        start += padded
    return found


def met(tiles: tuple[Tile, ...], queries: list[int], keys: list[int]) -> list[tuple[int, int]]:
    """Rows of the pack that meet; queries and keys tell where a member's rows stand in it."""
    found = []
    for tile in tiles:
        for document in range(tile.documents):
            first, other = tile.query + document * tile.query_stretch, tile.key + document * tile.key_stretch
            for query in range(tile.queries):
                seen = tile.keys - tile.queries + query + 1 if tile.causal else tile.keys
                found += [(queries[first + query], keys[other + key]) for key in range(seen)]
    assert len(found) == pairs(tiles)
    return found


@settings(max_examples=150, deadline=None)
@given(lengths=LENGTHS, size=SIZES, extra=st.integers(0, 2))
def test_a_ring_covers_every_pair_once(lengths: list[int], size: int, extra: int) -> None:
    docs = documents(lengths, size, extra)
    rows = [docs.rows_of(size, index).tolist() for index in range(size)]
    borders = docs.member(size, 0).cu_seqlens_list
    found = [
        pair
        for index in range(size)
        for source in range(size)
        for pair in met(ring_tiles(borders, docs.lengths, size, index, source), rows[index], rows[source])
    ]
    assert max(Counter(found).values(), default=1) == 1
    assert set(found) == wanted(docs)


@settings(max_examples=150, deadline=None)
@given(lengths=LENGTHS, size=SIZES, extra=st.integers(0, 2))
def test_gathered_keys_cover_every_pair_once(lengths: list[int], size: int, extra: int) -> None:
    docs = documents(lengths, size, extra)
    pack = list(range(docs.rows))
    borders = docs.member(size, 0).cu_seqlens_list
    found = [
        pair for index in range(size) for pair in met(gather_tiles(borders, docs.lengths, size, index), docs.rows_of(size, index).tolist(), pack)
    ]
    assert max(Counter(found).values(), default=1) == 1
    assert set(found) == wanted(docs)


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, blocks=st.sampled_from([1, 2, 3, 4]), size=st.sampled_from([1, 2, 4]))
def test_neighbours_put_together_are_one_wider_member(lengths: list[int], blocks: int, size: int) -> None:
    """A neighbours of a group of R A, joined, hold the rows of one member of a group of R, in its order."""
    docs = documents(lengths, blocks * size, 1)
    for block in range(blocks):
        parts = [docs.rows_of(blocks * size, block * size + place) for place in range(size)]
        batch = docs.member(blocks * size, 0)
        where = joined_rows(batch.cu_seqlens, len(parts[0]), size)
        joined = torch.full((size * len(parts[0]),), -1)
        joined[where.flatten()] = torch.cat(parts)
        assert joined.tolist() == docs.rows_of(blocks, block).tolist()


@pytest.mark.parametrize("size", [2, 4, 8])
def test_zigzag_shares_the_work(size: int) -> None:
    """Full documents: members differ by nothing. Partly padded ones: by at most the pairs that one chunk's padding could have had."""

    def work(docs: Documents, index: int) -> int:
        borders = docs.member(size, index).cu_seqlens_list
        return sum(pairs(ring_tiles(borders, docs.lengths, size, index, source)) for source in range(size))

    full = Documents((16 * size, 64 * size, 2 * size), (16 * size, 64 * size, 2 * size))
    each = [work(full, index) for index in range(size)]
    assert len(set(each)) == 1
    assert sum(each) == sum(length * (length + 1) // 2 for length in full.lengths)

    padded = documents([64 * size - 7, 33, 400 + size, 250], size)
    each = [work(padded, index) for index in range(size)]
    spare = sum((full - real) * full for real, full in zip(padded.lengths, padded.padded, strict=True))
    assert max(each) - min(each) <= spare
    assert max(each) < 1.1 * sum(each) / size  # a cut into P stretches in a row would give the last member 1.75 to 1.9 times its share


def test_real_rows_of_a_short_document() -> None:
    """Three tokens on four members (public case C27's kind): one row each on members 0, 1 and 2, none on 3."""
    assert [zigzag_real(3, 8, 4, index) for index in range(4)] == [(1, 0), (1, 0), (1, 0), (0, 0)]
    assert ring_tiles((0, 2), (3,), 4, 3, 3) == ()
    assert ring_tiles((0, 2), (3,), 4, 2, 1) == (Tile(0, 1, 0, 1, False),)
    assert ring_tiles((0, 2), (3,), 4, 1, 2) == ()


def test_equal_documents_share_tiles() -> None:
    assert ring_tiles((0, 4, 8, 12), (16, 16, 16), 4, 1, 3) == (Tile(2, 2, 0, 4, False, 3, 4, 4),)
    assert gather_tiles((0, 4, 8), (16, 16), 4, 1) == (Tile(0, 2, 0, 4, True, 2, 4, 16), Tile(2, 2, 0, 14, True, 2, 4, 16))


def test_borders_that_are_no_zigzag_are_refused() -> None:
    with pytest.raises(ValueError, match="3 rows on each of 2 members"):
        ring_tiles((0, 4, 7), (6, 6), 2, 0, 0)
    with pytest.raises(ValueError, match="a document of 9 tokens has 8 rows"):
        gather_tiles((0, 4), (9,), 2, 0)


def test_how_heads_are_split() -> None:
    """The cost model's A: the largest power of two that divides the kv heads, at most min(P, lanes of a node)."""
    assert [head_split(kv_heads, 8, 64) for kv_heads in (1, 2, 3, 4, 6, 8, 16)] == [1, 2, 1, 4, 2, 8, 8]
    assert [head_split(8, 8, lanes) for lanes in (1, 2, 3, 4, 8)] == [1, 2, 2, 4, 8]
    assert head_split(8, 4, 8) == 4
    assert [neighbours(kind, 8, 2, 4, 8) for kind in ("ring", "2d")] == [1, 2]
    assert neighbours("ulysses", 8, 4, 4, 1) == 4
    for kv_heads, size, lanes in itertools.product((1, 2, 3, 4, 6, 8), (2, 4, 8), (1, 2, 3, 8)):
        model = SimpleNamespace(kv_heads=kv_heads, basis=SimpleNamespace(layout=SimpleNamespace(lanes_per_node=lanes)))
        assert head_split(kv_heads, size, lanes) == CostModel.head_split(model, size)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="8 and 2 kv heads; ring always works"):
        neighbours("ulysses", 8, 2, 4, 8)
    with pytest.raises(ValueError, match="cp_comm=star is unknown; legal: ring, all_gather, ulysses, 2d"):
        neighbours("star", 8, 2, 4, 8)
