"""Groups of two levels: neighbours, and those at the same place of all blocks of neighbours."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from megadcp.mesh.coords import Mesh
from megadcp.mesh.groups import GroupPool, rank_sets

CPU = torch.device("cpu")


def test_sets_across_blocks_are_added():
    without = rank_sets(Mesh(8))
    both = rank_sets(Mesh(8), 0, {8: 2, 4: 2})
    assert set(both) - set(without) == {(0, 2), (1, 3), (4, 6), (5, 7), (0, 2, 4, 6), (1, 3, 5, 7)}
    assert [each for each in both if each in set(without)] == without
    assert rank_sets(Mesh(8), 0, {}) == without
    assert set(rank_sets(Mesh(4, tp=2), 0, {4: 2})) - set(rank_sets(Mesh(4, tp=2))) == {(0, 4), (1, 5), (2, 6), (3, 7)}
    assert set(rank_sets(Mesh(4, pp=2), 0, {4: 2})) - set(rank_sets(Mesh(4, pp=2))) == {(0, 2), (1, 3), (4, 6), (5, 7)}


def halves_on_rank(rank: int, world: int, mesh: Mesh) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    found = []
    with GroupPool(mesh, rank, CPU, timeout_s=30, splits={4: 2, 8: 4}) as pool:
        lane = pool.coords.lane
        assert pool.halves(lane, 2) is None
        for size in (4, 8):
            if size > mesh.lanes:
                assert pool.halves(lane, size) is None  # the pool is smaller
                continue
            near, across = pool.halves(lane // size * size, size)
            whole = pool.cp(lane, size)
            split = near.size
            block, place = divmod(whole.index, split)
            assert near.ranks == whole.ranks[block * split : (block + 1) * split]
            assert across.ranks == whole.ranks[place::split]
            assert (near.index, across.index) == (place, block)
            for group in (near, across):
                x = torch.tensor([float(2**rank)])
                dist.all_reduce(x, group=group.handle)
                assert int(x) == sum(2**each for each in group.ranks)
            found.append((near.ranks, across.ranks))
    return found


@pytest.mark.parametrize("mesh", [Mesh(4), Mesh(8), Mesh(4, tp=2), Mesh(4, pp=2)])
def test_halves_of_every_rank(mesh):
    found = run_ranks(mesh.world, halves_on_rank, mesh)
    assert all(len(each) == (2 if mesh.lanes == 8 else 1) for each in found)


@pytest.mark.parametrize("splits", [{4: 4}, {4: 1}, {8: 3}, {4: 8}])
def test_splits_that_make_no_sense(splits):
    with pytest.raises(ValueError, match="groups can't be cut as"):
        GroupPool(Mesh(8), 0, CPU, splits=splits)
