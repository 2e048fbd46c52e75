"""Chunked cross entropy against torch's own on full logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from nn_helpers import distance

from megadcp.nn import loss as loss_module
from megadcp.nn.loss import chunked_cross_entropy

IGNORE = -100


def _inputs(dtype, tokens=37, hidden=12, vocab=50, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocab, hidden, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[::5] = IGNORE
    return x, weight, labels


def _expected(x, weight, labels):
    wide, table = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    total = F.cross_entropy(wide @ table.T, labels, ignore_index=IGNORE, reduction="sum")
    return total.detach(), *torch.autograd.grad(total, (wide, table))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("chunk", [1, 5, 37, 4096])
def test_equals_full_logits(dtype, tolerance, chunk):
    x, weight, labels = _inputs(dtype)
    total = chunked_cross_entropy(x, weight, labels, chunk)
    assert total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    (3 * total).backward()
    expected, dx, dw = _expected(x, weight, labels)
    assert distance(total.detach().double(), expected) < tolerance
    assert x.grad.dtype == weight.grad.dtype == dtype
    assert distance(x.grad.double() / 3, dx) < tolerance
    assert distance(weight.grad.double() / 3, dw) < tolerance


def test_ignored_rows_are_exactly_zero():
    x, weight, labels = _inputs(torch.float32)
    chunked_cross_entropy(x, weight, labels, 8).backward()
    assert torch.count_nonzero(x.grad[::5]) == 0
    assert torch.count_nonzero(x.grad[1]) > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_chunk_or_a_batch_without_targets(dtype):
    x, weight, labels = _inputs(dtype)
    labels[8:16] = IGNORE  # one whole chunk
    chunked_cross_entropy(x, weight, labels, 8).backward()
    assert x.grad.isfinite().all()
    assert weight.grad.isfinite().all()
    x.grad = weight.grad = None
    total = chunked_cross_entropy(x, weight, torch.full_like(labels, IGNORE), 8)
    total.backward()
    assert total == 0
    assert torch.count_nonzero(x.grad) == torch.count_nonzero(weight.grad) == 0


def test_extreme_logits_stay_finite_and_right():
    """A target whose share underflows to 0 in fp32 has a large but finite loss."""
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0]], requires_grad=True)
    weight = torch.tensor([[3e4, 0.0], [0.0, 200.0], [0.0, 0.0]], requires_grad=True)
    labels = torch.tensor([1, 2])
    total = chunked_cross_entropy(x, weight, labels, 2)
    total.backward()
    assert total.item() == pytest.approx(30200.0)
    assert x.grad.isfinite().all()
    assert weight.grad.isfinite().all()


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_only_what_is_asked_for_gets_a_gradient(frozen):
    x, weight, labels = _inputs(torch.float64)
    _, dx, dw = _expected(x, weight, labels)
    x.requires_grad_(frozen == "weight")
    weight.requires_grad_(frozen == "hidden")
    total = chunked_cross_entropy(x, weight, labels, 8)
    assert total.requires_grad == (frozen != "both")
    if frozen != "both":
        total.backward()
    assert (x.grad is not None) == (frozen == "weight")
    assert (weight.grad is not None) == (frozen == "hidden")
    if x.grad is not None:
        assert distance(x.grad, dx) < 1e-13
    if weight.grad is not None:
        assert distance(weight.grad, dw) < 1e-13


def test_evaluation_makes_no_gradients(monkeypatch):
    x, weight, labels = _inputs(torch.float32)
    shapes = []
    monkeypatch.setattr(loss_module._Work, "_add", lambda *args: shapes.append(args))
    with torch.no_grad():
        total = chunked_cross_entropy(x, weight, labels, 8)
    assert not total.requires_grad
    assert not shapes
    assert distance(total.double(), _expected(x, weight, labels)[0]) < 1e-6


def test_full_logits_never_exist():
    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for value in out if isinstance(out, tuple | list) else (out,):
                if isinstance(value, torch.Tensor):
                    Sizes.largest = max(Sizes.largest, value.numel())
            return out

    x, weight, labels = _inputs(torch.float32, tokens=400, hidden=4, vocab=300)
    with Sizes():
        chunked_cross_entropy(x, weight, labels, 10).backward()
    assert Sizes.largest == 10 * 300


def test_a_second_backward_is_refused():
    """The gradients are scaled in place, so using them twice would be silently wrong."""
    x, weight, labels = _inputs(torch.float32)
    total = chunked_cross_entropy(x, weight, labels, 8)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        total.backward()


def test_a_chunk_of_nothing_is_refused():
    x, weight, labels = _inputs(torch.float32)
    with pytest.raises(ValueError, match="loss_chunk=0"):
        chunked_cross_entropy(x, weight, labels, 0)
