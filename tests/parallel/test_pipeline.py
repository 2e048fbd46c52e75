"""The executor on gloo ranks with a toy model: what crosses stages, when memory is freed, what a failure does."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from ranks import RankFailed, run_ranks
from torch import Tensor

from megadcp.mesh.coords import Mesh
from megadcp.mesh.groups import GroupPool
from megadcp.parallel.exchanges import forwards, lane_programme, programmes
from megadcp.parallel.pipeline import Stage, run_actions
from megadcp.plan.actions import Action

WIDTH = 3
ROWS = (4, 1, 9, 2, 7, 3)  # of the microbatch at each slot


@contextlib.contextmanager
def nothing(action: Action) -> Iterator[None]:
    yield


def start(slot: int) -> Tensor:
    return torch.randn(ROWS[slot], WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(slot))


class Toy:
    """Chunk c of stage s multiplies by its matrix and bends; the last one sums up. Keeps weak references to all that it gave."""

    def __init__(self, stage: int, stages: int, chunks: int, frozen: bool = False) -> None:
        self.stage, self.stages, self.chunks = stage, stages, chunks
        generator = torch.Generator().manual_seed(100 + stage)
        self.weights = [torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=generator) for _ in range(chunks)]
        for weight in self.weights:
            weight.requires_grad_(not frozen)
        self.given: list[weakref.ref[Tensor]] = []
        self.alive: list[int] = []

    def forward(self, action: Action, x: Tensor | None) -> Tensor:
        self.alive.append(sum(one() is not None for one in self.given))
        assert (x is None) == (self.stage == 0 and action.chunk == 0)
        out = torch.tanh((start(action.slot) if x is None else x) @ self.weights[action.chunk]) + 0.1
        if self.stage == self.stages - 1 and action.chunk == self.chunks - 1:
            return (out**2).sum()
        self.given.append(weakref.ref(out))
        return out

    def stage_functions(self, around: Callable[[Action], contextlib.AbstractContextManager[None]] = nothing) -> Stage:
        return Stage(self.forward, lambda slot: torch.empty(ROWS[slot], WIDTH, dtype=torch.float64), around)


def truth(stages: int, chunks: int, slots: tuple[int, ...]) -> tuple[list[float], dict[tuple[int, int], Tensor]]:
    toys = [Toy(stage, stages, chunks) for stage in range(stages)]
    losses = []
    for slot in slots:
        x: Tensor | None = None
        for chunk in range(chunks):
            for toy in toys:
                x = toy.forward(Action("F", slot, chunk), x)
        assert x is not None
        losses.append(float(x.detach()))
        x.backward()
    return losses, {(s, c): toys[s].weights[c].grad for s in range(stages) for c in range(chunks)}  # type: ignore[misc]


def run_toy(rank: int, world: int, chunks: int, slots: tuple[int, ...]) -> tuple[dict[int, float], list[Tensor], list[int]]:
    total = -(-len(ROWS) // world) * world if chunks > 1 else len(ROWS)
    with GroupPool(Mesh(1, pp=world), rank, torch.device("cpu")) as pool:
        toy = Toy(rank, world, chunks)
        own = lane_programme(programmes(tuple(range(len(ROWS))), total, world, chunks)[rank], dict.fromkeys(slots))
        gc.collect()
        gc.disable()  # what is freed has to be freed without it
        losses = run_actions(own, toy.stage_functions(), pool.pipeline)
        assert run_actions([], toy.stage_functions(), pool.pipeline) == {}
        return {slot: float(loss) for slot, loss in losses.items()}, [weight.grad for weight in toy.weights], toy.alive  # type: ignore[misc]


ALL = tuple(range(len(ROWS)))


@pytest.mark.parametrize(("stages", "chunks", "slots"), [(1, 1, ALL), (2, 1, ALL), (4, 1, (1, 4, 5)), (2, 3, ALL), (3, 2, ALL), (4, 2, (0, 2, 3))])
def test_losses_and_gradients_are_those_of_one_process(stages: int, chunks: int, slots: tuple[int, ...]) -> None:
    losses, gradients = truth(stages, chunks, slots)
    found = run_ranks(stages, run_toy, chunks, slots)
    assert [found[-1][0][slot] for slot in slots] == pytest.approx(losses, rel=1e-14)
    assert all(one[0] == {} for one in found[:-1])
    for (stage, chunk), gradient in gradients.items():
        assert torch.allclose(found[stage][1][chunk], gradient, rtol=1e-13, atol=1e-15)


def test_outputs_are_freed_once_they_are_sent() -> None:
    """Of the outputs given so far, at most the last is alive at any forward: the graph keeps what tanh made, and nothing the output."""
    found = run_ranks(3, run_toy, 1, ALL)
    assert max(found[0][2]) <= 1
    assert max(found[1][2]) <= 1


def evaluate(rank: int, world: int) -> dict[int, float]:
    with GroupPool(Mesh(1, pp=world), rank, torch.device("cpu")) as pool, torch.no_grad():
        toy = Toy(rank, world, 2)
        own = forwards(programmes(ALL, len(ROWS), world, 2)[rank])
        return {slot: float(loss) for slot, loss in run_actions(own, toy.stage_functions(), pool.pipeline).items()}


def test_forwards_alone() -> None:
    losses, _ = truth(3, 2, ALL)
    assert run_ranks(3, evaluate) == [{}, {}, pytest.approx(dict(enumerate(losses)), rel=1e-14)]


def frozen(rank: int, world: int, which: tuple[int, ...]) -> list[Tensor | None]:
    with GroupPool(Mesh(1, pp=world), rank, torch.device("cpu")) as pool:
        toy = Toy(rank, world, 1, frozen=rank in which)
        run_actions(programmes(ALL, len(ROWS), world, 1)[rank], toy.stage_functions(), pool.pipeline)
        return [weight.grad for weight in toy.weights]


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1)])
def test_frozen_stages_pass_gradients_on(which: tuple[int, ...]) -> None:
    _, gradients = truth(3, 1, ALL)
    for stage, (found,) in enumerate(run_ranks(3, frozen, which)):
        if stage in which:
            assert found is None
        else:
            assert found is not None
            assert torch.allclose(found, gradients[stage, 0], rtol=1e-13, atol=1e-15)


def uneven_pace(rank: int, world: int) -> dict[int, float]:
    """Stages that take very different times, another one slow at every slot: messages arrive early or late, never wrong."""

    @contextlib.contextmanager
    def slow(action: Action) -> Iterator[None]:
        time.sleep(0.03 * ((action.slot + rank) % world))
        yield

    with GroupPool(Mesh(1, pp=world), rank, torch.device("cpu")) as pool:
        toy = Toy(rank, world, 2)
        losses = run_actions(programmes(ALL, len(ROWS), world, 2)[rank], toy.stage_functions(slow), pool.pipeline)
        return {slot: float(loss) for slot, loss in losses.items()}


def test_stages_of_uneven_pace() -> None:
    losses, _ = truth(3, 2, ALL)
    assert run_ranks(3, uneven_pace)[2] == pytest.approx(dict(enumerate(losses)), rel=1e-14)


def of_another_width(rank: int, world: int) -> None:
    with GroupPool(Mesh(1, pp=world), rank, torch.device("cpu")) as pool:
        toy = Toy(rank, world, 1)
        run_actions(programmes(ALL if rank else ALL[1:], len(ROWS), world, 1)[rank], toy.stage_functions(), pool.pipeline)


def test_stages_that_disagree_end() -> None:
    """One stage leaves out slot 0: sizes don't match, and the run ends instead of going on with another's rows."""
    with pytest.raises(RankFailed):
        run_ranks(2, of_another_width, timeout_s=20)
