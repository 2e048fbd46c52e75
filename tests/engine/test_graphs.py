"""Which microbatches run as graphs, and that memory which each replay overwrites does no harm. The graphs are imitated: nothing ran on a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import engine_helpers as helpers
import pytest
import torch
from torch import Tensor, nn

from megadcp.backends.torch_backend import TorchBackend
from megadcp.config.check import UserError
from megadcp.config.schema import OptimConfig
from megadcp.engine.graphs import Graphs
from megadcp.engine.step import Engine, run_step
from megadcp.nn.gpt import GPT
from megadcp.parallel.gradients import GradientBuffers
from megadcp.plan.step_plan import Recompute
from megadcp.train.optim import Optimizer

LENGTHS = (16, 16, 16, 8, 8, 16)
GROUPS = [[0], [1], [2], [3, 4], [5]]  # all of 16 tokens
MODEL = dataclasses.replace(helpers.MODEL, residual_dropout=0.1)


class Imitation(torch.autograd.Function):
    """As a graph does it: what comes in is copied to its own memory, what it gives lies in memory that the next replay overwrites."""

    @staticmethod
    def forward(ctx: Any, graph: Graphed, x: Tensor, *parameters: Tensor) -> Tensor:
        assert not graph.under_way, "a second forward before the backward of the first"
        graph.under_way = torch.is_grad_enabled() or ctx.needs_input_grad[1]
        graph.replays += 1
        graph.input.data.copy_(x)
        with torch.enable_grad():
            graph.made = graph.module.function(graph.input)
        graph.output.copy_(graph.made.detach())
        ctx.graph = graph
        return graph.output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        graph = ctx.graph
        graph.under_way = False
        found = torch.autograd.grad(graph.made, [graph.input, *graph.parameters], grads[0])
        for buffer, gradient in zip(graph.gradients, found, strict=True):
            buffer.copy_(gradient)
        return None, *(buffer.detach() for buffer in graph.gradients)


class Graphed:
    def __init__(self, module: nn.Module, x: Tensor) -> None:
        self.module, self.input = module, x
        self.parameters = list(module.parameters())
        self.output = torch.empty_like(module.function(x).detach())
        self.gradients = [torch.empty_like(one) for one in (x, *self.parameters)]
        self.under_way, self.replays = False, 0

    def __call__(self, x: Tensor) -> Tensor:
        return Imitation.apply(self, x, *self.parameters)


class Maker:
    def __init__(self) -> None:
        self.made: list[list[Graphed]] = []

    def __call__(self, pieces: tuple[nn.Module, ...], inputs: tuple[tuple[Tensor, ...], ...]) -> tuple[Graphed, ...]:
        assert all(not piece._forward_pre_hooks for piece in pieces)
        self.made.append([Graphed(piece, x) for piece, (x,) in zip(pieces, inputs, strict=True)])
        return tuple(self.made[-1])


def engine(most: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Engine, Maker]:
    backend, maker = TorchBackend(dtype), Maker()
    gpt = GPT(MODEL, backend, seed=3, loss_chunk=16)
    gradients = GradientBuffers(gpt.named_parameters())
    optimizer = Optimizer(gpt, gradients, backend, OptimConfig(), {})
    graphs = Graphs(gpt, most, optimizer.wait, maker) if most else None
    return Engine(gpt, gradients, optimizer, helpers.CPU, 1.0, graphs=graphs), maker


def run(one: Engine, groups=GROUPS, levels=(), lengths=LENGTHS) -> tuple[float, dict[str, Tensor]]:
    documents, plan = helpers.RandomDocuments(lengths), helpers.plan_of(groups, levels, lengths)
    result = run_step(one, plan, helpers.packs_of(plan, documents), lr=0.0)
    return result.loss_sum, helpers.gradients(one)


def same(a: tuple[float, dict[str, Tensor]], b: tuple[float, dict[str, Tensor]]) -> bool:
    return a[0] == b[0] and all(torch.equal(value, b[1][name]) for name, value in a[1].items())


def test_graphs_change_no_bit():
    plain, (graphed, maker) = engine(0)[0], engine(1)
    for _ in range(2):
        assert same(run(graphed), run(plain))
    assert len(maker.made) == 1
    assert len(maker.made[0]) == 2 * MODEL.layers
    assert {graph.replays for graph in maker.made[0]} == {4 + 5}  # all but the very first microbatch


def test_what_is_recomputed_runs_without():
    levels = [Recompute(), Recompute("full", 3), Recompute("mlp", 1), Recompute("selective", 2), Recompute("full", 1)]
    plain, (graphed, maker) = engine(0)[0], engine(1)
    for _ in range(2):
        assert same(run(graphed, levels=levels), run(plain, levels=levels))
    # Layer 0 keeps everything in the first microbatch only (which ran without graphs in the first step), layer 1 in three, layer 2 in four.
    assert [graph.replays for graph in maker.made[0][::2]] == [1, 2 + 3, 3 + 4]


def test_only_so_many_sizes_and_only_those_that_come_again():
    lengths = (16, 8, 16, 8, 5, 6)
    groups = [[0], [1], [2], [3], [4], [5]]
    one, maker = engine(1)
    run(one, groups, lengths=lengths)
    assert [graphs[0].input.shape[0] for graphs in maker.made] == [16]
    one, maker = engine(8)
    run(one, groups, lengths=lengths)
    assert [graphs[0].input.shape[0] for graphs in maker.made] == [16, 8]


def test_validation_runs_without():
    one, maker = engine(1)
    run(one)
    before = [graph.replays for graph in maker.made[0]]
    one.model.eval()
    with torch.no_grad():
        run_lane_only(one)
    assert [graph.replays for graph in maker.made[0]] == before


def run_lane_only(one: Engine) -> None:
    from megadcp.engine.lane import lane_shares, run_lane
    from megadcp.engine.measure import Stopwatch

    documents, plan = helpers.RandomDocuments(LENGTHS), helpers.plan_of(GROUPS, lengths=LENGTHS)
    run_lane(one, plan, lane_shares(plan, helpers.packs_of(plan, documents)), Stopwatch(helpers.CPU), backward=False)


def test_why_fp32_is_refused():
    """Its gradients would stay in the graph's memory: the imitation shows the fault that the refusal prevents."""
    plain, (graphed, _) = engine(0, torch.float32)[0], engine(1, torch.float32)
    assert same(run(graphed), run(plain))  # its first microbatch has no graph, and the others add to what that has made
    assert not same(run(graphed), run(plain))


def test_where_there_can_be_none():
    model = engine(0)[0].model
    cuda = torch.device("cuda")
    assert Graphs.of(model, 0, helpers.CPU, "te", lambda: None) is None
    with pytest.raises(UserError, match=r"parallel.cuda_graphs=2 needs a GPU.*set parallel.cuda_graphs=0"):
        Graphs.of(model, 2, helpers.CPU, "torch", lambda: None)
    with pytest.raises(UserError, match=r"precision.backend=torch, but this run takes te"):
        Graphs.of(model, 2, cuda, "te", lambda: None)
    next(model.parameters()).adds_to_main_grad = True
    with pytest.raises(UserError, match="weight gradients"):
        Graphs.of(model, 2, cuda, "torch", lambda: None)
