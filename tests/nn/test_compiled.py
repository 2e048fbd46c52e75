"""Formulas that are compiled on a GPU: the numbers of their hand-written twins, traced whole, once for all token counts."""

from __future__ import annotations

import shutil

import pytest
import torch
from nn_helpers import distance

from megadcp.nn import compiled, mlp, norm, rope

TOKENS = (24, 40, 7, 24)
HEADS, KV, DIM, WIDTH = 4, 2, 8, 48


def _values(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float32).to(dtype)


def _angles(tokens):
    angles = _values(tokens, 1, DIM // 2, dtype=torch.float32)
    return angles.cos(), angles.sin()


def _arguments(tokens, dtype):
    """Formula -> arguments, for each formula."""
    parts = [_values(tokens, heads, DIM, dtype=dtype, seed=heads) for heads in (HEADS, KV, KV)]
    inverse = _values(tokens, 1, dtype=torch.float32).abs() + 0.5
    x, weight = _values(tokens, WIDTH, dtype=dtype), _values(WIDTH, dtype=dtype)
    return {
        mlp.gated: (_values(tokens, 2 * WIDTH, dtype=dtype),),
        mlp.gated_slope: (_values(tokens, 2 * WIDTH, dtype=dtype), _values(tokens, WIDTH, dtype=dtype, seed=1)),
        norm.normed: (x, weight, 1e-5),
        norm.normed_slopes: (x, weight, inverse, _values(tokens, WIDTH, dtype=dtype, seed=1)),
        rope.turned: (parts[0], *_angles(tokens)),
        rope.split_turned: (_values(tokens, (HEADS + 2 * KV) * DIM, dtype=dtype), *_angles(tokens), HEADS, KV),
        rope.joined_back: (*parts, *_angles(tokens)),
    }


def _call_all(tokens, dtype):
    """What the model's own functions give, forward and backward: by the hand-written code, or compiled."""
    found = []
    arguments = _arguments(tokens, dtype)

    def both_ways(function, *inputs):
        leaves = [one.clone().requires_grad_() for one in inputs]
        outs = function(*leaves)
        outs = outs if isinstance(outs, tuple) else (outs,)
        total = sum((out.float() * _values(*out.shape, dtype=torch.float32)).sum() for out in outs)
        found.extend([*outs, *torch.autograd.grad(total, leaves)])

    both_ways(mlp.activation("swiglu"), *arguments[mlp.gated])
    both_ways(lambda x, w: norm._rms_norm(x, w, 1e-5), *arguments[norm.normed][:2])
    cos, sin = _angles(tokens)
    both_ways(lambda x: rope.rotate(x, cos, sin), arguments[rope.turned][0])
    both_ways(lambda x: rope.split_rotate(x, cos, sin, HEADS, KV), arguments[rope.split_turned][0])
    return found


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1.6e-2)])
def test_the_model_gives_the_same_numbers_with_formulas(monkeypatch, dtype, tolerance):
    expected = _call_all(40, dtype)
    used = set()

    def as_on_a_gpu(x, formula):
        used.add(formula.__name__)
        return formula

    for module in (mlp, norm, rope):
        monkeypatch.setattr(module, "compiles", lambda x: True)
        monkeypatch.setattr(module, "fused", as_on_a_gpu)
    found = _call_all(40, dtype)
    assert used == {formula.__name__ for formula in _arguments(1, dtype)}
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert distance(one.float(), other.float()) < tolerance


@pytest.mark.parametrize("formula", _arguments(1, torch.bfloat16), ids=lambda formula: formula.__name__)
def test_one_trace_serves_every_token_count(formula):
    """Another one for some counts could be another kernel, and a recompute could then differ from its forward."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    traced = compiled.open_rows(torch.compile(formula, backend=backend, fullgraph=True))
    for tokens in TOKENS:
        arguments = _arguments(tokens, torch.bfloat16)[formula]
        found, expected = traced(*arguments), formula(*arguments)
        for one, other in zip(*((each if isinstance(each, tuple) else (each,)) for each in (found, expected)), strict=True):
            assert torch.equal(one, other)
    assert len(graphs) == 1


def test_nothing_is_compiled_for_a_cpu():
    x = torch.zeros(2, 2)
    assert not compiled.compiles(x)
    assert compiled.fused(x, mlp.gated) is mlp.gated


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_compiled_code_gives_the_numbers():
    """With PyTorch's own compiler, which writes C++ here and Triton on a GPU: the same formulas, for every token count."""
    torch._dynamo.reset()
    for formula in _arguments(1, torch.bfloat16):
        run = compiled.open_rows(torch.compile(formula, fullgraph=True))
        for tokens in TOKENS:
            arguments = _arguments(tokens, torch.bfloat16)[formula]
            found, expected = run(*arguments), formula(*arguments)
            for one, other in zip(*((each if isinstance(each, tuple) else (each,)) for each in (found, expected)), strict=True):
                assert distance(one.float(), other.float()) < 1e-2
