"""Collectives of a group against the same thing computed from all inputs, on several ranks."""

import pytest
import torch
from ranks import run_ranks

from megadcp.mesh.coords import Mesh
from megadcp.mesh.groups import Group, GroupPool
from megadcp.parallel import collectives

CPU = torch.device("cpu")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64]


def value(rank: int, *shape: int, dtype: torch.dtype = torch.float64, key: int = 0) -> torch.Tensor:
    """What `rank` puts in; small integers, so that all sums are exact."""
    generator = torch.Generator().manual_seed(1000 * key + rank)
    return torch.randint(-20, 20, shape, generator=generator).to(dtype)


@pytest.fixture(scope="module")
def in_group():
    """check(group) on the two groups {0, 2} and {1, 3} (lanes) and on {0, 1, 2, 3}: members are not always 0 .. n - 1."""

    def run(check):
        def work(rank, world):
            with GroupPool(Mesh(2, 2), rank, CPU) as pool:
                check(pool.lanes)
                check(pool.world)
            return True

        assert run_ranks(4, work) == [True] * 4

    return run


def test_a_group_of_one_is_local():
    alone, x = Group.single(3), value(0, 4, 2)
    assert collectives.all_reduce(x, alone) is x
    assert collectives.all_gather(x, alone) is x
    assert collectives.reduce_scatter(x, alone) is x
    assert collectives.all_to_all([x], alone)[0] is x
    assert collectives.broadcast(x, alone) is x
    buffer = torch.empty_like(x)
    assert collectives.exchange([(x, 0)], [(buffer, 0)], alone) == []
    assert torch.equal(buffer, x)


def test_all_reduce(in_group):
    def check(group):
        for dtype in DTYPES:
            inputs = torch.stack([value(rank, 3, 5, dtype=dtype) for rank in group.ranks])
            x = inputs[group.index].clone()
            assert collectives.all_reduce(x, group) is x
            assert torch.equal(x, inputs.sum(0))
            largest = collectives.all_reduce(inputs[group.index].clone(), group, "max")
            assert torch.equal(largest, inputs.amax(0))
            column = torch.stack([inputs[group.index]] * 2, -1)[..., 0]
            assert not column.is_contiguous()
            assert torch.equal(collectives.all_reduce(column, group, "sum"), inputs.sum(0))
        scalar = torch.tensor(float(group.index))
        assert collectives.all_reduce(scalar, group).item() == sum(range(group.size))

    in_group(check)


def test_all_gather_and_reduce_scatter(in_group):
    def check(group):
        for dtype in DTYPES:
            whole = torch.cat([value(rank, 3, 2, dtype=dtype) for rank in group.ranks])
            assert torch.equal(collectives.all_gather(value(group.ranks[group.index], 3, 2, dtype=dtype), group), whole)
            turned = value(group.ranks[group.index], 3, 2, dtype=dtype).T.contiguous().T
            assert torch.equal(collectives.all_gather(turned, group), whole)
            inputs = torch.stack([value(rank, 2 * group.size, 3, dtype=dtype) for rank in group.ranks])
            mine = inputs[group.index]
            before = mine.clone()
            rows = slice(2 * group.index, 2 * group.index + 2)
            assert torch.equal(collectives.reduce_scatter(mine, group), inputs.sum(0)[rows])
            assert torch.equal(mine, before)
        assert collectives.all_gather(torch.empty(0, 4), group).shape == (0, 4)
        assert collectives.reduce_scatter(torch.empty(0, 4), group).shape == (0, 4)
        with pytest.raises(ValueError, match="can't be scattered"):
            collectives.reduce_scatter(torch.ones(group.size + 1), group)

    in_group(check)


def test_all_to_all_of_equal_and_of_any_shapes(in_group):
    def check(group):
        mine = group.ranks[group.index]
        for dtype in DTYPES:
            arrived = collectives.all_to_all([value(mine, 2, 3, dtype=dtype, key=other) for other in group.ranks], group)
            for rank, part in zip(group.ranks, arrived, strict=True):
                assert torch.equal(part, value(rank, 2, 3, dtype=dtype, key=mine))

        def rows(sender, receiver):
            return (sender + 2 * receiver) % 4  # some are empty

        arrived = collectives.all_to_all(
            [value(mine, rows(mine, other), 2, key=other) for other in group.ranks], group, [(rows(other, mine), 2) for other in group.ranks]
        )
        for rank, part in zip(group.ranks, arrived, strict=True):
            assert torch.equal(part, value(rank, rows(rank, mine), 2, key=mine))
        with pytest.raises(ValueError, match="parts for a group"):
            collectives.all_to_all([torch.ones(1)], group)

    in_group(check)


def test_exchange_around_a_ring_and_with_oneself(in_group):
    def check(group):
        mine, size = group.ranks[group.index], group.size
        after, before = (group.index + 1) % size, (group.index - 1) % size
        for dtype in DTYPES:
            key, values = torch.empty(4, 2, dtype=dtype), torch.empty(3, dtype=dtype)
            own, none = torch.empty(2, dtype=dtype), torch.empty(0, dtype=dtype)
            sends = [(value(mine, 2, 4, dtype=dtype, key=1).T, after), (value(mine, 3, dtype=dtype, key=2), after)]
            works = collectives.exchange(
                [*sends, (value(mine, 2, dtype=dtype, key=3), group.index), (none, after)],
                [(key, before), (values, before), (own, group.index), (none.clone(), before)],
                group,
            )
            del sends
            for work in works:
                work.wait()
            sender = group.ranks[before]
            assert torch.equal(key, value(sender, 2, 4, dtype=dtype, key=1).T)
            assert torch.equal(values, value(sender, 3, dtype=dtype, key=2))
            assert torch.equal(own, value(mine, 2, dtype=dtype, key=3))
        with pytest.raises(ValueError, match="contiguous"):
            collectives.exchange([], [(torch.empty(4, 2).T, after)], group)

    in_group(check)


def test_two_neighbours_exchange_at_the_same_time_more_than_sockets_hold(in_group):
    def check(group):
        if group.size != 2:
            return
        buffer = torch.empty(1 << 20, dtype=torch.float64)
        other = 1 - group.index
        for work in collectives.exchange([(torch.full_like(buffer, group.index), other)], [(buffer, other)], group):
            work.wait()
        assert (buffer == other).all()

    in_group(check)


def test_broadcast_and_fp8(in_group):
    def check(group):
        for source in range(group.size):
            for dtype in DTYPES:
                x = value(group.ranks[group.index], 4, 3, dtype=dtype).T
                assert collectives.broadcast(x, group, source) is x
                assert torch.equal(x, value(group.ranks[source], 4, 3, dtype=dtype).T)
        narrow = [value(rank, 4).to(torch.float8_e4m3fn) for rank in group.ranks]
        assert torch.equal(collectives.all_gather(narrow[group.index], group).float(), torch.cat(narrow).float())
        arrived = collectives.all_to_all([narrow[group.index]] * group.size, group)
        assert torch.equal(torch.cat(arrived).float(), torch.cat(narrow).float())

    in_group(check)
