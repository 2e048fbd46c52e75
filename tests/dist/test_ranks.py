"""The harness itself: results in order, the first failure named, a hang shown, nothing left behind."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import RankFailed, run_ranks


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@pytest.fixture(autouse=True)
def no_children_left():
    before, files = children(), len(os.listdir("/proc/self/fd"))
    yield
    assert children() == before
    assert len(os.listdir("/proc/self/fd")) <= files


def test_results_come_in_rank_order_and_closures_work():
    weights = torch.arange(5.0, dtype=torch.float64, requires_grad=True)

    def work(rank, world, factor):
        x = torch.full((3,), float(rank), dtype=torch.float64)
        dist.all_reduce(x)
        weights.square().sum().mul(factor).backward()
        return rank, world, x, weights.grad, torch.get_num_threads()

    for rank, (own, world, total, gradient, threads) in enumerate(run_ranks(3, work, 2.0)):
        assert (own, world, threads) == (rank, 3, 1)
        assert total.tolist() == [3.0] * 3
        assert torch.equal(gradient, 4 * weights.detach())
    assert weights.grad is None


def test_a_large_result_arrives():
    assert [len(each) for each in run_ranks(2, lambda rank, world: bytes(5_000_000 + rank))] == [5_000_000, 5_000_001]


def test_after_the_parent_used_its_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    (torch.randn(500, 500) @ torch.randn(500, 500)).exp().sum()
    try:
        product = run_ranks(2, lambda rank, world: (torch.ones(300, 300) @ torch.ones(300, 300)).exp().log().sum().item(), timeout_s=20)
    finally:
        torch.set_num_threads(before)
    assert product[0] == product[1]


def test_the_first_failure_is_told():
    def work(rank, world):
        if rank == 2:
            time.sleep(0.2)
            raise KeyError("the cause")
        dist.barrier()

    with pytest.raises(RankFailed, match=r"(?s)rank 2 of 3 failed.*in work.*the cause") as caught:
        run_ranks(3, work)
    assert caught.value.rank == 2
    assert isinstance(caught.value.error, KeyError)


@pytest.mark.parametrize(("how", "told"), [(lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL"), (lambda: os._exit(7), "exit code 7")])
def test_a_death_is_told_before_what_it_causes(how, told):
    def work(rank, world):
        if rank == 1:
            how()
        dist.barrier()

    with pytest.raises(RankFailed, match=told) as caught:
        run_ranks(3, work)
    assert caught.value.rank == 1


def test_a_hang_shows_every_stack():
    def stays_here():
        dist.barrier()

    def work(rank, world):
        if rank < 2:
            stays_here()
        return rank

    with pytest.raises(RankFailed, match=r"(?s)rank 0 is here.*stays_here.*rank 1 is here.*stays_here.*rank 2 has returned") as caught:
        run_ranks(3, work, timeout_s=1.0)
    assert caught.value.rank == -1


def test_a_result_that_cannot_be_pickled_is_a_failure():
    with pytest.raises(RankFailed, match="lambda"):
        run_ranks(2, lambda rank, world: lambda: None)
