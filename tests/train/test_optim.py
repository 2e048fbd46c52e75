import dataclasses
import math

import pytest
import torch
from train_helpers import MODEL

from megadcp.backends.torch_backend import TorchBackend
from megadcp.config.schema import OptimConfig
from megadcp.nn.gpt import GPT
from megadcp.parallel.gradients import GradientBuffers
from megadcp.train.optim import Optimizer
from megadcp.train.state import weights

SETTINGS = OptimConfig(lr=0.01, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8)
SHAPE = dataclasses.replace(MODEL, norm="layernorm", qkv_bias=True, mlp_bias=True, position="learned", max_position=64)


def build(dtype: torch.dtype, settings: OptimConfig = SETTINGS) -> tuple[GPT, GradientBuffers, Optimizer]:
    model = GPT(SHAPE, TorchBackend(dtype), 1, 64)
    exact = weights(GPT(SHAPE, TorchBackend(torch.float32), 1, 64))
    buffers = GradientBuffers(model.named_parameters())
    return model, buffers, Optimizer(model, buffers, TorchBackend(dtype), settings, exact)


def state_of(optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """KIND.NAME -> live tensor."""
    return {f"{kind}.{piece.name}": piece.values.view(piece.parameter.shape) for kind, pieces in optimizer.state().items() for piece in pieces}


def load(optimizer: Optimizer, kept: dict[str, torch.Tensor], updates: int) -> None:
    optimizer.make_room(updates)
    for name, tensor in state_of(optimizer).items():
        tensor.copy_(kept[name])


def set_gradients(buffers: GradientBuffers, seed: int) -> list[torch.Tensor]:
    """Give every parameter a random gradient as the backward would."""
    generator = torch.Generator().manual_seed(seed)
    buffers.zero()
    made = []
    for parameter in buffers.parameters:
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        (parameter * gradient).sum().backward()
        made.append(gradient.float())
    return made


def adamw(start: torch.Tensor, gradients: list[torch.Tensor], decay: float, s: OptimConfig = SETTINGS) -> torch.Tensor:
    """AdamW by the book (Loshchilov and Hutter, algorithm 2), fp64."""
    x, m, v = start.double(), torch.zeros_like(start).double(), torch.zeros_like(start).double()
    for step, gradient in enumerate(gradients, 1):
        g = gradient.double()
        m, v = s.beta1 * m + (1 - s.beta1) * g, s.beta2 * v + (1 - s.beta2) * g * g
        x = x * (1 - s.lr * decay) - s.lr * (m / (1 - s.beta1**step)) / ((v / (1 - s.beta2**step)).sqrt() + s.eps)
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_follow_the_formula_and_decay_matrices_only(dtype):
    model, buffers, optimizer = build(dtype)
    start = weights(GPT(SHAPE, TorchBackend(torch.float32), 1, 64))
    history = []
    for seed in range(5):
        history.append(set_gradients(buffers, seed))
        optimizer.step(SETTINGS.lr)
    assert optimizer.updates == 5
    kept = state_of(optimizer)
    decayed = set()
    for index, (name, parameter) in enumerate(model.named_parameters()):
        per_step = [gradients[index] for gradients in history]
        master = kept[f"master.{name}"] if dtype == torch.bfloat16 else parameter.detach()
        for decay in (0.0, SETTINGS.weight_decay):
            if torch.allclose(master.double(), adamw(start[name], per_step, decay), rtol=2e-5, atol=2e-6):
                decayed |= {name} if decay else set()
                break
        else:
            pytest.fail(f"{name} follows neither rule")
        assert torch.equal(parameter.detach(), master.to(dtype))
    assert decayed >= {name for name, parameter in model.named_parameters() if parameter.ndim >= 2}
    assert not [name for name in decayed if name.endswith(("bias", "norm.weight"))]
    assert "embedding.weight" in decayed


def test_masters_remember_what_bf16_forgets():
    small = dataclasses.replace(SETTINGS, weight_decay=0.0)
    model, buffers, optimizer = build(torch.bfloat16, small)
    before = model.layers["0"].mlp.up.weight.detach().clone()
    master = state_of(optimizer)["master.layers.0.mlp.up.weight"]
    start = master.clone()
    for _ in range(3):
        set_gradients(buffers, 0)
        optimizer.step(1e-7)
    assert float((before == model.layers["0"].mlp.up.weight).float().mean()) > 0.98  # all but those that stood next to a rounding border
    assert float((master != start).float().mean()) > 0.98


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_comes_back_bit_for_bit(dtype):
    model, buffers, optimizer = build(dtype)
    for seed in range(3):
        set_gradients(buffers, seed)
        optimizer.step(0.01)
    other_model, other_buffers, other = build(dtype)
    kept = {name: tensor.clone() for name, tensor in state_of(optimizer).items()}
    assert set(kept) == set(state_of(other))
    with torch.no_grad():
        for name, parameter in other_model.named_parameters():
            parameter.copy_(weights(model)[name])
    load(other, kept, optimizer.updates)
    for seed in range(3, 6):
        for one, two in ((buffers, optimizer), (other_buffers, other)):
            set_gradients(one, seed)
            two.step(0.005 * seed)
    assert other.updates == optimizer.updates == 6
    for found, expected in ((weights(other_model), weights(model)), (state_of(other), state_of(optimizer))):
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_state_before_the_first_update():
    _, _, optimizer = build(torch.float32)
    assert optimizer.updates == 0
    assert all(not tensor.any() for tensor in state_of(optimizer).values())
    _, buffers, other = build(torch.float32)
    load(other, state_of(optimizer), 0)
    set_gradients(buffers, 0)
    other.step(0.1)
    assert other.updates == 1


def test_the_rate_is_the_one_given():
    model, buffers, optimizer = build(torch.float32, dataclasses.replace(SETTINGS, weight_decay=0.0, lr=123.0))
    before = model.norm.weight.detach().clone()
    set_gradients(buffers, 0)
    optimizer.step(1e-3)
    moved = (model.norm.weight.detach() - before).abs()
    assert math.isclose(float(moved.max()), 1e-3, rel_tol=1e-3)  # Adam's first step is the rate itself


def test_a_frozen_parameter_stays():
    model = GPT(SHAPE, TorchBackend(torch.float32), 1, 64)
    model.embedding.weight.requires_grad_(False)
    buffers = GradientBuffers(model.named_parameters())
    optimizer = Optimizer(model, buffers, TorchBackend(), SETTINGS, {})
    before = model.embedding.weight.clone()
    set_gradients(buffers, 0)
    optimizer.step(0.1)
    assert torch.equal(before, model.embedding.weight)
    assert "exp_avg.embedding.weight" not in state_of(optimizer)
