"""The update is launched before the host knows whether the gradients are finite; where they are not, nothing changes."""

from __future__ import annotations

import copy
import dataclasses
import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "engine"))
import engine_helpers as helpers

from megadcp.backends.torch_backend import TorchBackend
from megadcp.config.schema import OptimConfig
from megadcp.engine.step import EarlyUpdater, Engine, run_step
from megadcp.nn.gpt import GPT
from megadcp.parallel.gradients import GradientBuffers, Judgement
from megadcp.train.optim import Optimizer

GROUPS = [[2], [4, 0], [5, 3, 1]]


class Late(Optimizer):
    """The same, but waits for the verdict."""

    def step_unless(self, lr: float, bad: torch.Tensor) -> bool:
        return False


def engine(kind: type[Optimizer], dtype: torch.dtype) -> Engine:
    backend = TorchBackend(dtype)
    model = GPT(helpers.MODEL, backend, seed=3, loss_chunk=16)
    gradients = GradientBuffers(model.named_parameters())
    return Engine(model, gradients, kind(model, gradients, backend, OptimConfig(lr=0.1), {}), helpers.CPU, clip_norm=1.0)


def everything(one: Engine) -> dict[str, torch.Tensor]:
    found = {name: parameter.detach().clone() for name, parameter in one.model.named_parameters()}
    for index, (master, state) in enumerate(one.optimizer.inner.state.items()):
        found |= {f"master {index}": master.detach().clone()} | {f"{name} {index}": value.clone() for name, value in state.items()}
    return found


def run(one: Engine, spoil: float | None = None) -> bool:
    documents, plan = helpers.RandomDocuments(), helpers.plan_of(GROUPS)
    hooks = []
    if spoil is not None:
        hooks.append(one.model.layers["1"].mlp.down.weight.register_hook(lambda gradient: torch.full_like(gradient, spoil)))
    result = run_step(one, plan, helpers.packs_of(plan, documents), lr=0.05)
    for hook in hooks:
        hook.remove()
    return result.updated


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_early_and_late_updates_are_bit_equal(dtype):
    ends = []
    for kind in (Optimizer, Late):
        one = engine(kind, dtype)
        assert isinstance(one.optimizer, EarlyUpdater)
        assert [run(one), run(one, math.nan), run(one), run(one, math.inf), run(one)] == [True, False, True, False, True]
        assert one.optimizer.updates == 3
        assert all(float(state["step"]) == 3 for state in one.optimizer.inner.state.values())
        ends.append(everything(one))
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bad_step_changes_nothing(dtype, value):
    one = engine(Optimizer, dtype)
    weights = {name: parameter.detach().clone() for name, parameter in one.model.named_parameters()}
    assert not run(one, value)  # the first one: no moments yet
    assert one.optimizer.updates == 0
    assert all(torch.equal(weights[name], parameter) for name, parameter in one.model.named_parameters())
    assert run(one)
    before = copy.deepcopy(everything(one))
    assert not run(one, value)
    assert all(torch.equal(before[name], now) for name, now in everything(one).items())
    assert not hasattr(one.optimizer.inner, "found_inf")


def test_the_update_is_launched_before_the_verdict_is_read(monkeypatch):
    one, order = engine(Optimizer, torch.float32), []
    read, inner = Judgement.read, one.optimizer.inner.step
    monkeypatch.setattr(Judgement, "read", lambda self: order.append("read") or read(self))
    monkeypatch.setattr(one.optimizer.inner, "step", lambda: order.append("update") or inner())
    run(one)
    assert order == ["update", "read"]


def test_whoever_may_refuse_a_step_is_asked_before_the_update():
    one, documents, plan = engine(Optimizer, torch.float32), helpers.RandomDocuments(), helpers.plan_of(GROUPS)
    before = everything(one)
    result = run_step(one, plan, helpers.packs_of(plan, documents), 0.05, refuse=lambda loss, norm: "not today")
    assert (result.updated, result.problem, one.optimizer.updates) == (False, "not today", 0)
    assert all(torch.equal(before[name], now) for name, now in everything(one).items())


def test_another_adamw_waits_for_the_verdict():
    """One that does not look at found_inf must not be launched early."""
    one = engine(Optimizer, torch.float32)
    groups = one.optimizer.inner.param_groups
    one.optimizer.inner = torch.optim.AdamW([{"params": group["params"]} for group in groups], lr=0.1, fused=False)
    before = {name: parameter.detach().clone() for name, parameter in one.model.named_parameters()}
    assert not run(one, math.nan)
    assert one.optimizer.updates == 0
    assert all(torch.equal(before[name], parameter) for name, parameter in one.model.named_parameters())
    assert run(one)
    assert one.optimizer.updates == 1


def test_the_verdict_on_the_device_is_that_of_the_host():
    channel = engine(Optimizer, torch.float32).gradients.streams.channel("copy")
    for loss, norm, bad in ((1.0, 2.0, 0.0), (math.nan, 1.0, 1.0), (1.0, math.inf, 1.0), (-math.inf, 1.0, 1.0), (1e300, 1e300, 0.0)):
        judged = Judgement(torch.tensor([loss, norm], dtype=torch.float64), channel)
        assert judged.bad.item() == bad
        assert dataclasses.astuple(judged.read())[2] == (bad == 0.0)
