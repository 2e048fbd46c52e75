"""The parts the reference backend makes, each against plain formulas."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from nn_helpers import distance, documents, pack, place, real

from megadcp.backends.torch_attention import per_document, real_rows, spans
from megadcp.backends.torch_backend import TorchBackend


def _qkv(tokens, heads, kv_heads, head_dim, dtype, seed=0):
    """Views of one buffer, as the model makes them: rows are not adjacent."""
    generator = torch.Generator().manual_seed(seed)
    buffer = torch.randn(tokens, heads + 2 * kv_heads, head_dim, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return buffer, torch.split(buffer, [heads, kv_heads, kv_heads], dim=1)


def _dense(q, k, v, batch):
    """Document by document over real tokens, masked softmax, zero elsewhere."""
    out = torch.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    for start, length in zip(batch.cu_seqlens_list, batch.real_lengths.tolist(), strict=False):
        piece = slice(start, start + length)
        scores = torch.einsum("ihd,jhd->hij", q[piece], k[piece].repeat_interleave(group, 1)) / math.sqrt(q.shape[2])
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -math.inf)
        out[piece] = torch.einsum("hij,jhd->ihd", torch.softmax(scores, -1), v[piece].repeat_interleave(group, 1))
    return out


SHAPES = [
    ([7, 22, 299], None),
    ([5, 5, 5, 3], None),  # equal neighbours share a kernel call
    ([5, 5, 4], [8, 8, 8]),
    ([1], [4]),
    ([0, 6, 0, 0, 3], [0, 8, 0, 4, 3]),  # empty documents would kill the kernel
]


@pytest.mark.parametrize(("lengths", "padded"), SHAPES)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_attention_forward_and_backward(lengths, padded, kv_heads, dtype, tolerance):
    batch = pack(documents(lengths, 9), padded)
    buffer, (q, k, v) = _qkv(batch.tokens.shape[0], 4, kv_heads, 8, dtype)
    out = TorchBackend(dtype).core_attention(4, kv_heads, 8)(q, k, v, batch, place())
    assert out.shape == q.shape
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    (out.double() * weight).sum().backward()
    wide = buffer.detach().double().requires_grad_()
    expected = _dense(*torch.split(wide, [4, kv_heads, kv_heads], dim=1), batch)
    (expected * weight).sum().backward()
    assert distance(out.detach().double(), expected.detach()) < tolerance
    assert distance(buffer.grad.double(), wide.grad) < tolerance
    assert torch.count_nonzero(out[~real(batch)]) == 0
    assert torch.count_nonzero(buffer.grad[~real(batch)]) == 0


def test_equal_neighbours_share_a_call():
    assert spans((0, 5, 10, 15, 18, 23), [5, 5, 5, 3, 5]) == [(0, 3, 5, 5), (15, 1, 3, 3), (18, 1, 5, 5)]
    assert spans((0, 8, 16, 24, 28), [5, 5, 4, 4]) == [(0, 2, 8, 5), (16, 1, 8, 4), (24, 1, 4, 4)]
    assert spans((0, 0, 4, 8, 8, 12), [0, 4, 4, 0, 4]) == [(0, 3, 4, 4)]


@pytest.mark.parametrize("threads", [1, 2])
def test_sharing_a_call_changes_no_bit(threads):
    """A document alone, and as one of five equal ones in one kernel call."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        attend = TorchBackend().core_attention(4, 2, 8)
        buffer, parts = _qkv(5 * 70, 4, 2, 8, torch.float32)
        out = attend(*parts, pack(documents([70] * 5, 9)), place())
        out.square().sum().backward()
        for index in range(5):
            piece = buffer.detach()[index * 70 : (index + 1) * 70].clone().requires_grad_()
            alone = attend(*torch.split(piece, [4, 2, 2], dim=1), pack(documents([70], 9)), place())
            alone.square().sum().backward()
            assert torch.equal(alone, out[index * 70 : (index + 1) * 70])
            assert torch.equal(piece.grad, buffer.grad[index * 70 : (index + 1) * 70])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("lengths", "padded"), SHAPES[:3])
def test_the_gpu_fallback_gives_the_same(lengths, padded):
    """Per-document calls over padding, then zeroed: the way of fp32 on a GPU; its operators run on a CPU too."""
    batch = pack(documents(lengths, 9), padded)
    buffer, (q, k, v) = _qkv(batch.tokens.shape[0], 4, 2, 8, torch.float64)
    assert torch.equal(real_rows(batch), real(batch))
    out = per_document(q, k, v, batch).masked_fill(~real_rows(batch)[:, None, None], 0.0)
    (mine,) = torch.autograd.grad(out.square().sum(), buffer)
    other = TorchBackend().core_attention(4, 2, 8)(q, k, v, batch, place())
    (expected,) = torch.autograd.grad(other.square().sum(), buffer)
    assert distance(out, other) < 1e-13
    assert distance(mine, expected) < 1e-13


@pytest.mark.parametrize("shape", [(30, 16), (7, 3, 16)])
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_norms(kind, shape):
    norm = TorchBackend(torch.float64).norm(kind, 16, 1e-3)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(16, generator=generator))
    x = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    functions = {
        "rmsnorm": lambda x: F.rms_norm(x, (16,), norm.weight, 1e-3),
        "layernorm": lambda x: F.layer_norm(x, (16,), norm.weight, norm.bias, 1e-3),
    }
    expected = functions[kind](x)
    got = norm(x)
    assert distance(got, expected) < 1e-14
    weight = torch.randn(shape, generator=generator, dtype=torch.float64)
    inputs = [x, *norm.parameters()]
    for mine, theirs in zip(torch.autograd.grad((got * weight).sum(), inputs), torch.autograd.grad((expected * weight).sum(), inputs), strict=True):
        assert distance(mine, theirs) < 1e-13


def test_norm_statistics_are_wide():
    """bf16 values whose squares summed in bf16 would stop growing."""
    norm = TorchBackend(torch.bfloat16).norm("rmsnorm", 4096, 0.0)
    x = torch.ones(2, 4096, dtype=torch.bfloat16)
    assert torch.equal(norm(x), x)


def test_norm_of_a_strided_view_and_frozen_weight():
    norm = TorchBackend(torch.float64).norm("rmsnorm", 8, 1e-5)
    norm.requires_grad_(False)
    wide = torch.randn(10, 6, 8, dtype=torch.float64, requires_grad=True)
    x = wide[:, 1:3]
    weight = torch.randn(10, 2, 8, dtype=torch.float64)  # not the output itself, whose square hardly depends on x
    (mine,) = torch.autograd.grad((norm(x) * weight).sum(), wide)
    (expected,) = torch.autograd.grad((F.rms_norm(x, (8,), norm.weight, 1e-5) * weight).sum(), wide)
    assert distance(mine, expected) < 1e-13


def test_optimizer_is_fused_adamw():
    parameter = torch.nn.Parameter(torch.ones(3, 3))
    made = TorchBackend().optimizer([{"params": [parameter], "weight_decay": 0.5}], 0.1, (0.9, 0.99), 1e-8)
    assert isinstance(made, torch.optim.AdamW)
    assert made.param_groups[0]["fused"]
    parameter.grad = torch.zeros(3, 3)
    made.step()
    assert torch.allclose(parameter, torch.full((3, 3), 1 - 0.1 * 0.5))
