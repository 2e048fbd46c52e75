import math

import pytest
import torch
from torch import nn

from megadcp.parallel.gradients import GradientBuffers


def parameters(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {"a": nn.Parameter(torch.randn(5, 3).to(dtype)), "b": nn.Parameter(torch.randn(4).to(dtype)), "frozen": nn.Parameter(torch.ones(2), False)}


def accumulate(named: dict[str, nn.Parameter], factors: list[float]) -> list[torch.Tensor]:
    losses = []
    for factor in factors:
        loss = (named["a"] * factor).sum() + (named["b"] ** 2).sum() * factor
        loss.backward()
        losses.append(loss.detach().float())
    return losses


def test_bf16_gradients_add_up_in_fp32():
    named = parameters(torch.bfloat16)
    buffers = GradientBuffers(named.items())
    factors = [1.0] + [0.001] * 100  # added in bf16, the small ones would vanish
    accumulate(named, factors)
    assert buffers.names == ["a", "b"]
    narrow = float(torch.tensor(0.001, dtype=torch.bfloat16))
    expected = torch.full((5, 3), 1 + 100 * narrow)
    torch.testing.assert_close(buffers.sums()[0], expected, rtol=1e-6, atol=0)
    assert named["a"].grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_parameters_use_their_own_gradient(dtype):
    named = parameters(dtype)
    buffers = GradientBuffers(named.items())
    accumulate(named, [1.0, 2.0])
    assert buffers.sums()[0] is named["a"].grad
    assert buffers.sums()[0].dtype == dtype
    torch.testing.assert_close(buffers.sums()[0], torch.full((5, 3), 3.0, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_forgets_the_last_step(dtype):
    named = parameters(dtype)
    buffers = GradientBuffers(named.items())
    accumulate(named, [4.0, 4.0])
    buffers.zero()
    accumulate(named, [1.0])
    torch.testing.assert_close(buffers.sums()[0], torch.ones(5, 3))
    buffers.zero()
    assert [float(gradient.abs().sum()) for gradient in buffers.sums()] == [0.0, 0.0]


@pytest.mark.parametrize("clip", [0.0, 0.5, 1e6])
def test_norm_and_clip_equal_plain_arithmetic(clip):
    named = parameters(torch.float64)
    buffers = GradientBuffers(named.items())
    losses = accumulate(named, [1.0, 3.0, -7.0])
    mean = [gradient.clone() / 8 for gradient in buffers.sums()]
    norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in mean))
    verdict = buffers.finish(losses, 8, clip)
    assert verdict.finite
    assert verdict.norm == pytest.approx(norm, rel=1e-14)
    assert verdict.loss_sum == pytest.approx(sum(map(float, losses)), rel=1e-6)
    factor = min(1.0, clip / norm) if clip else 1.0
    for found, expected in zip(buffers.sums(), mean, strict=True):
        torch.testing.assert_close(found, expected * factor, rtol=1e-14, atol=0)


def test_a_norm_of_very_different_tensors():
    """One huge tensor and many tiny ones: summed in fp32 the tiny ones would be lost."""
    named = {f"p{index}": nn.Parameter(torch.zeros(1)) for index in range(20_001)}
    buffers = GradientBuffers(named.items())
    for index, parameter in enumerate(named.values()):
        parameter.grad = torch.tensor([1.0 if index else 1e4])
    verdict = buffers.finish([torch.zeros(())], 1, 0.0)
    assert verdict.norm == pytest.approx(math.sqrt(1e8 + 20_000), rel=1e-9)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["gradient", "loss"])
def test_one_bad_number_is_enough(value, where):
    named = parameters(torch.float32)
    buffers = GradientBuffers(named.items())
    losses = accumulate(named, [1.0, 1.0])
    if where == "gradient":
        named["b"].grad[2] = value
    else:
        losses[1] = torch.tensor(value)
    assert not buffers.finish(losses, 10, 1.0).finite


def test_close_takes_the_hooks_off():
    named = parameters(torch.bfloat16)
    buffers = GradientBuffers(named.items())
    buffers.close()
    accumulate(named, [1.0])
    assert named["a"].grad is not None
