"""Nothing in the forwards and backwards of a step's microbatches reads a tensor, and the step reads once: its verdict."""

from __future__ import annotations

import dataclasses
from collections import Counter

import engine_helpers as helpers
import pytest
import torch
from host_waits import HostWaits

from megadcp.backends import torch_attention
from megadcp.backends.torch_sharded import torch_backend
from megadcp.config.schema import OptimConfig
from megadcp.engine import lane, step
from megadcp.engine.step import Engine, run_step
from megadcp.nn.backend import PackedTokens
from megadcp.nn.gpt import GPT
from megadcp.parallel.gradients import GradientBuffers, Judgement
from megadcp.plan.step_plan import Recompute
from megadcp.train.optim import Optimizer

GROUPS = [[2], [4, 0], [5, 3], [1]]
LEVELS = [Recompute("full", 3), Recompute(), Recompute("mlp", 2), Recompute("selective", 3)]
RICH = dataclasses.replace(helpers.MODEL, qk_norm=True, qkv_bias=True, mlp_bias=True, residual_dropout=0.1, embedding_dropout=0.1, tied=False)


def make_engine(model=helpers.MODEL, dtype=torch.float32) -> Engine:
    backend = torch_backend(dtype, helpers.CPU)
    gpt = GPT(model, backend, seed=3, loss_chunk=16)
    gradients = GradientBuffers(gpt.named_parameters())
    return Engine(gpt, gradients, Optimizer(gpt, gradients, backend, OptimConfig(), {}), helpers.CPU, clip_norm=1.0)


def strict(found: Counter[str]) -> dict[str, int]:
    """Without the pack's arrays becoming tensors, as they do on a CPU only."""
    return {name: count for name, count in found.items() if not name.startswith("from_numpy at engine/transfer.py")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", [helpers.MODEL, RICH, dataclasses.replace(RICH, position="learned", max_position=64, mlp="gelu")])
def test_microbatches_read_nothing_and_a_step_reads_its_verdict(model, dtype, monkeypatch):
    documents, plan, one = helpers.RandomDocuments(), helpers.plan_of(GROUPS, LEVELS), make_engine(model, dtype)
    packs = helpers.packs_of(plan, documents)
    run_step(one, plan, packs, lr=0.1)  # AdamW's state is made in the first step
    reads, microbatches = [], []
    run, read = lane.run_lane, Judgement.read

    def watched(*arguments, **named):
        with HostWaits() as waits:
            losses = run(*arguments, **named)
        microbatches.append(waits.found)
        return losses

    monkeypatch.setattr(step, "run_lane", watched)
    monkeypatch.setattr(Judgement, "read", lambda self: reads.append(1) or read(self))
    with HostWaits() as waits:
        assert run_step(one, plan, packs, lr=0.1).updated
    assert [strict(found) for found in microbatches] == [{}]
    assert reads == [1]
    rest = strict(waits.found)
    assert sum(rest.values()) == 1, rest
    assert next(iter(rest)).startswith("tolist at parallel/gradients.py")


@pytest.mark.parametrize("spoil", ["item", "tolist", "bool", "mask", "repeat", "numpy", "tensor", "float"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_count_sees_each_kind(spoil, where):
    def read(x):
        if spoil == "item":
            x.sum().item()
        elif spoil == "tolist":
            x.sum().tolist()
        elif spoil == "bool":
            bool(x.sum() > 0)
        elif spoil == "mask":
            x[x > 0]
        elif spoil == "repeat":
            torch.repeat_interleave(x.new_ones(2), torch.tensor([1, 2]))
        elif spoil == "numpy":
            x.detach().cpu().numpy()
        elif spoil == "tensor":
            x.new_tensor(1.0)
        else:
            float(x.sum())

    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if where == "forward":
                read(x)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if where == "backward":
                read(grad)
            return grad

    x = torch.ones(3, requires_grad=True)
    with HostWaits() as waits:
        Bad.apply(x).sum().backward()
    assert waits.found


# ------------------------------------------------------------------------------------- what a GPU runs, without values
def meta_batch() -> PackedTokens:
    borders, lengths = (0, 6, 8, 16), (5, 1, 8)
    device = torch.device("meta")
    rows = torch.empty(16, dtype=torch.int64, device=device)
    few = torch.empty(3, dtype=torch.int64, device=device)
    return PackedTokens(rows, rows, rows, torch.empty(4, dtype=torch.int32, device=device), 8, few, few, borders, lengths)


@pytest.mark.parametrize("position", ["rope", "learned"])
def test_a_whole_model_runs_without_values(position, monkeypatch):
    """On tensors that have none: whatever asks for one raises. Attention by the path of a GPU."""
    monkeypatch.setattr(torch_attention, "cpu_attention", torch_attention.cuda_attention)
    monkeypatch.setattr("megadcp.backends.torch_backend.cpu_attention", torch_attention.cuda_attention)
    model = dataclasses.replace(RICH, position=position, max_position=64, head_dim=8)
    gpt = GPT(model, torch_backend(torch.bfloat16, torch.device("meta")), seed=3, loss_chunk=16)
    from megadcp.engine.placement import Placement

    for level in LEVELS:
        gpt(meta_batch(), Placement(recompute=level)).backward()
    assert all(parameter.grad is not None for parameter in gpt.parameters())
    with pytest.raises((RuntimeError, NotImplementedError)):
        meta_batch().tokens.sum().item()
