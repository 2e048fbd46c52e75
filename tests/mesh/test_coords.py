import itertools

import pytest

from megadcp.mesh.coords import Coords, Mesh, zigzag_real, zigzag_spans


@pytest.mark.parametrize(("lanes", "tp", "pp"), list(itertools.product((1, 3, 4), (1, 2), (1, 2, 3))))
def test_every_rank_stands_in_one_place(lanes, tp, pp):
    mesh = Mesh(lanes, tp, pp)
    places = [mesh.coords(rank) for rank in range(mesh.world)]
    assert sorted(places) == [Coords(*one) for one in itertools.product(range(pp), range(lanes), range(tp))]
    assert [mesh.rank(*place) for place in places] == list(range(mesh.world))


def test_tp_varies_fastest_then_lane():
    mesh = Mesh(lanes=4, tp=2, pp=2)
    assert mesh.tp_ranks(1, 3) == (14, 15)
    assert mesh.lane_ranks(0, 1) == (1, 3, 5, 7)
    assert mesh.lane_ranks(1, 0, 2, 2) == (12, 14)
    assert mesh.pipeline_ranks(1, 0) == (2, 10)
    assert mesh.group_sizes() == [2, 4]
    assert Mesh(6).group_sizes() == [2, 4]
    assert Mesh(1).group_sizes() == []


def test_outside_the_world():
    with pytest.raises(ValueError, match="rank 4 is outside the world of 4 ranks"):
        Mesh(4).coords(4)
    with pytest.raises(ValueError, match="must all be at least 1"):
        Mesh(0)


@pytest.mark.parametrize("cp", [1, 2, 4, 8])
def test_zigzag_covers_every_row_once_and_evenly(cp):
    padded = [16 * 3, 16, 16 * 7]
    rows = [[row for start, stop in zigzag_spans(padded, cp, index) for row in range(start, stop)] for index in range(cp)]
    assert sorted(itertools.chain(*rows)) == list(range(sum(padded)))
    assert {len(one) for one in rows} == {sum(padded) // cp}
    # causal pairs of every document: the same on every member
    borders = [0, 48, 64, 176]
    pairs = [sum(row - max(b for b in borders if b <= row) for row in one) for one in rows]
    if cp > 1:
        assert max(pairs) - min(pairs) == 0


def test_zigzag_by_hand():
    assert zigzag_spans([8, 4], 2, 0) == [(0, 2), (6, 8), (8, 9), (11, 12)]
    assert zigzag_spans([8, 4], 2, 1) == [(2, 4), (4, 6), (9, 10), (10, 11)]
    with pytest.raises(ValueError, match="6 padded tokens"):
        zigzag_spans([6], 2, 0)


@pytest.mark.parametrize("cp", [2, 4])
def test_real_tokens_of_each_chunk(cp):
    for length in range(1, 33):
        found = 0
        for index in range(cp):
            early, late = zigzag_real(length, 32, cp, index)
            spans = zigzag_spans([32], cp, index)
            assert [early, late] == [sum(row < length for row in range(*span)) for span in spans]
            found += early + late
        assert found == length
