"""The group pool: which ranks, in which order, how many, and that nothing is left."""

import itertools
import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import RankFailed, run_ranks

from megadcp.mesh.coords import Mesh
from megadcp.mesh.groups import Group, GroupPool, cp_sizes, rank_sets

CPU = torch.device("cpu")
MESHES = [Mesh(lanes, tp, pp) for lanes, tp, pp in itertools.product(range(1, 9), range(1, 9), range(1, 9)) if lanes * tp * pp <= 8]


def total(group: Group) -> float:
    x = torch.tensor([float(2 ** dist.get_rank())])
    if group.handle is not None:
        dist.all_reduce(x, group=group.handle)
    return x.item()


def expected(ranks) -> float:
    return float(sum(2**rank for rank in ranks))


def by_definition(mesh: Mesh, rank: int, free: str) -> tuple[int, ...]:
    """Ranks whose coordinates differ from this one's only in the axes named by `free`."""
    mine = mesh.coords(rank)._asdict()
    return tuple(
        each
        for each in range(mesh.world)
        if all(mesh.coords(each)._asdict()[axis] == mine[axis] for axis in ("pp", "lane", "tp") if axis not in free)
    )


def test_a_world_of_one_needs_no_torch_distributed():
    with GroupPool(Mesh(1), 0, CPU) as pool:
        assert not dist.is_initialized()
        for group in (pool.world, pool.tp, pool.lanes, pool.pipeline, pool.ends, pool.model, pool.cp(0, 1)):
            assert group == Group.single(0)
            assert group.size == 1
        assert pool.count == 0


def test_sets_are_distinct_and_of_two_or_more():
    for mesh in MESHES:
        sets = rank_sets(mesh)
        assert len(sets) == len(set(sets))
        assert all(len(each) > 1 and each == tuple(sorted(each)) for each in sets)
    assert rank_sets(Mesh(1)) == []
    assert rank_sets(Mesh(2)) == [(0, 1)]  # world, lanes and the cp group are one
    assert rank_sets(Mesh(1, 2, 1)) == [(0, 1)]
    assert rank_sets(Mesh(1, 1, 3)) == [(0, 1, 2), (0, 2)]
    assert rank_sets(Mesh(4)) == [(0, 1, 2, 3), (0, 1), (2, 3)]
    assert rank_sets(Mesh(4), max_cp=1) == [(0, 1, 2, 3)]
    assert rank_sets(Mesh(6)) == [(0, 1, 2, 3, 4, 5), (0, 1), (2, 3), (4, 5), (0, 1, 2, 3)]
    assert cp_sizes(Mesh(8), 4) == [2, 4]
    assert cp_sizes(Mesh(8)) == [2, 4, 8]
    assert cp_sizes(Mesh(3)) == [2]


@pytest.mark.parametrize("world", [2, 3, 4, 6, 8])
def test_every_mesh_has_the_right_groups(world):
    """One start of `world` ranks tries all meshes in turn; sums of 2^rank show who took part."""
    meshes = [mesh for mesh in MESHES if mesh.world == world]

    def work(rank, world):
        counts = []
        for mesh in meshes:
            with GroupPool(mesh, rank, CPU) as pool:
                mine = mesh.coords(rank)
                for group, free in (
                    (pool.tp, "tp"),
                    (pool.lanes, "lane"),
                    (pool.pipeline, "pp"),
                    (pool.model, ("pp", "tp")),
                    (pool.world, ("pp", "lane", "tp")),
                ):
                    ranks = by_definition(mesh, rank, free)
                    assert group.ranks == ranks
                    assert ranks[group.index] == rank
                    assert (group.handle is None) == (len(ranks) == 1)
                    assert total(group) == expected(ranks)
                line = pool.pipeline.ranks
                assert set(pool.ends.ranks) == ({line[0], line[-1]} if rank in (line[0], line[-1]) else {rank})
                assert total(pool.ends) == expected(pool.ends.ranks)
                for size in (1, 2, 4, 8):
                    first = mine.lane // size * size
                    if first + size <= mesh.lanes:
                        group = pool.cp(mine.lane, size)
                        assert group.ranks == tuple(mesh.rank(mine.pp, lane, mine.tp) for lane in range(first, first + size))
                        assert group is pool.cp(first, size) or size == 1
                        assert total(group) == expected(group.ranks)
                    else:
                        with pytest.raises(ValueError, match="no cp group"):
                            pool.cp(mine.lane, size)
                counts.append(pool.count)
        return counts

    counts = run_ranks(world, work)
    assert all(each == counts[0] for each in counts)
    assert counts[0] == [len(rank_sets(mesh)) for mesh in meshes]


def test_equal_sets_are_one_group():
    def work(rank, world):
        with GroupPool(Mesh(2, 2, 2), rank, CPU) as pool:
            assert pool.lanes is pool.cp(0, 2)
            assert pool.pipeline is pool.ends
        with GroupPool(Mesh(1, 2, 4), rank, CPU) as pool:
            assert pool.model is pool.world
            assert pool.lanes == Group.single(rank)
        return True

    assert run_ranks(8, work) == [True] * 8


def test_with_overlap_the_lanes_may_work_while_a_cp_group_of_all_lanes_does():
    """Lane 1 starts its gradient sum one microbatch before lane 0: with one torch group for both, sums would meet the wrong partner."""

    def work(rank, world):
        with GroupPool(Mesh(2, 2), rank, CPU, overlap=True) as pool:
            assert pool.count == len(rank_sets(Mesh(2, 2))) + 2
            cp = pool.cp(0, 2)
            assert pool.lanes.ranks == cp.ranks
            assert pool.lanes.handle is not cp.handle
            gradient = torch.tensor([100.0])
            if pool.lanes.index == 1:
                sent = dist.all_reduce(gradient, group=pool.lanes.handle, async_op=True)
            sums = total(cp)
            if pool.lanes.index == 0:
                sent = dist.all_reduce(gradient, group=pool.lanes.handle, async_op=True)
            sent.wait()
            assert gradient.item() == 200
            assert sums == expected(cp.ranks)
        with GroupPool(Mesh(2, 2), rank, CPU, max_cp=1, overlap=True) as pool:  # nobody to be apart from
            assert pool.count == len(rank_sets(Mesh(2, 2), 1))
        return True

    assert run_ranks(4, work) == [True] * 4


def test_nested_groups_in_plan_order():
    """cp sizes change from one microbatch to the next, and lanes take part in different ones."""
    slots = [[(0, 4), (4, 2), (6, 1), (7, 1)], [(0, 1), (2, 2), (4, 4)], [(0, 8)], [(0, 2), (4, 2)], [(1, 1), (6, 2)], [(0, 4), (4, 4)], [(0, 8)]]

    def work(rank, world):
        seen = []
        with GroupPool(Mesh(8), rank, CPU) as pool:
            for slot in slots * 3:
                for lane, size in slot:
                    if lane <= rank < lane + size:
                        seen.append((lane, size, total(pool.cp(lane, size))))
            total(pool.lanes)
        return seen

    for rank, seen in enumerate(run_ranks(8, work)):
        assert seen == [(lane, size, expected(range(lane, lane + size))) for slot in slots * 3 for lane, size in slot if lane <= rank < lane + size]
        assert len(seen) >= 9


def test_a_second_pool_leaks_nothing():
    def work(rank, world):
        def resources():
            return len(dist.distributed_c10d._world.pg_map), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

        GroupPool(Mesh(4), rank, CPU).close()
        dist.barrier()
        before = resources()
        for _ in range(3):
            with GroupPool(Mesh(4), rank, CPU) as pool:
                total(pool.lanes)
            pool.close()  # twice does nothing
        dist.barrier()
        return before, resources()

    for before, after in run_ranks(4, work):
        assert after[0] == before[0] == 1
        assert after[1] <= before[1] + 2
        assert after[2] <= before[2] + 1


def test_an_error_closes_the_pool_without_waiting():
    """Rank 0 has a sum under way that its partner, alive and elsewhere, will never join: close() must not wait for it."""

    def work(rank, world):
        with GroupPool(Mesh(2, 1, 2), rank, CPU) as pool:
            if rank == 0:
                dist.all_reduce(torch.ones(1), group=pool.lanes.handle, async_op=True)
                raise KeyError("after this")
            time.sleep(600)

    with pytest.raises(RankFailed, match="after this") as caught:
        run_ranks(4, work, timeout_s=10)
    assert caught.value.rank == 0


def test_a_wrong_world_is_refused():
    with pytest.raises(ValueError, match=r"launch\.join"):
        GroupPool(Mesh(2), 0, CPU)

    def work(rank, world):
        with pytest.raises(ValueError, match="mesh of 3 ranks"):
            GroupPool(Mesh(3), rank, CPU)
        with GroupPool(Mesh(2), rank, CPU) as pool, pytest.raises(ValueError, match="takes no part"):
            pool.cp(1 - rank, 1)
        with GroupPool(Mesh(2), rank, CPU, max_cp=1) as pool, pytest.raises(ValueError, match=r"sizes with a group here: 1$"):
            pool.cp(0, 2)
        return True

    assert run_ranks(2, work) == [True, True]


def failing(rank, world):
    try:
        with GroupPool(Mesh(lanes=2, tp=2), rank, torch.device("cpu")):
            raise KeyError("the first error")
    except KeyError as error:
        return str(error)


def test_the_first_error_is_not_lost_in_closing():
    """Every rank holds handles of groups that it is not in."""
    assert run_ranks(4, failing) == ["'the first error'"] * 4
