"""Sections of tools/gpu_check.py: rates of matrix products, of whole layers and of attention.

FLOPs count as in docs/plan.md section 3: a causal document of l tokens takes half of the full square. MFU is against the dense bf16 peak
whatever the format, so fp8 can exceed what bf16 ever could. Legend: t tokens, h hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from gpu_check_setup import CASES, Case, Row, Rows, Setup, documents, without_gradients
from torch import Tensor, nn

from megadcp.config.schema import ModelConfig
from megadcp.engine.placement import Placement
from megadcp.nn.flops import forward_flops
from megadcp.plan.basis import basis_from
from megadcp.plan.memory import MemoryModel

BARE = ("bf16", "fp8")
MOST_TOKENS = 128 * 1024  # tokens x layers of one measurement, so that long documents leave time for the others
ACTIVATION_SHARE = 0.45  # of the device's memory, for what the measured layers keep: buffers of the backward need about as much


def shapes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """The four matrices of a layer, (out, in) each."""
    query, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return {
        "qkv": (query + 2 * keys, model.hidden),
        "out": (model.hidden, query),
        "up": ((2 if model.gated else 1) * model.ffn, model.hidden),
        "down": (model.hidden, model.ffn),
    }


# -------------------------------------------------------------------------------------------------------------------------- gemm
def gemm(setup: Setup, end: float) -> dict[str, Any]:
    """Bare products by torch.mm and torch._scaled_mm, and the linears of each backend with all casts, forward + backward."""
    rows = Rows(setup, end)
    for tokens in setup.sizes.products:
        for name, model in setup.sizes.models.items():
            for matrix, (out, inner) in shapes(model).items():
                key = {"what": "product", "backend": "torch", "model": name, "matrix": matrix, "tokens": tokens}
                for format in BARE:
                    rows.add({**key, "format": format}, lambda f=format, s=(tokens, inner, out): _bare(setup, f, s))  # type: ignore[misc]
    for tokens in setup.sizes.tokens[1::2] or setup.sizes.tokens:
        for name, model in setup.sizes.models.items():
            for case in CASES:
                key = {"what": "linears", "backend": case.backend, "model": name, "matrix": "all four", "tokens": tokens, "format": case.format}
                rows.add(key, lambda c=case, m=model, t=tokens: _linears(setup, c, m, t))  # type: ignore[misc]
    return rows.result(unit="TFLOP/s")


def _bare(setup: Setup, format: str, sizes: tuple[int, int, int]) -> Row:
    tokens, inner, out = sizes
    x = torch.randn(tokens, inner, device=setup.device, dtype=torch.bfloat16)
    weight = torch.randn(out, inner, device=setup.device, dtype=torch.bfloat16)
    product: Callable[[], Tensor]
    if format == "bf16":
        product = lambda: x @ weight.t()  # noqa: E731
    else:
        one = torch.ones((), device=setup.device)
        x8, w8 = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn).t()
        product = lambda: torch._scaled_mm(x8, w8, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)  # noqa: E731

    def work(mark: Callable[[], None]) -> None:
        mark()
        product()
        mark()

    (seconds,) = setup.intervals(work)
    return {"forward": 2 * tokens * inner * out / seconds / 1e12}


class Linears(nn.Module):
    """The four linears of a layer, each fed with rows of its own."""

    def __init__(self, setup: Setup, case: Case, model: ModelConfig) -> None:
        super().__init__()
        backend = setup.backend(case)
        self.precision = backend.precision
        kinds = {"qkv": "column", "out": "row", "up": "column", "down": "row"}
        made = [backend.linear(inner, out, False, kinds[name]) for name, (out, inner) in shapes(model).items()]
        self.parts = nn.ModuleList(made)
        self.widths = [inner for _, inner in shapes(model).values()]
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0.0, 0.02)

    def inputs(self, tokens: int, device: torch.device) -> list[Tensor]:
        """Random rows, [t, in] each."""
        return [torch.randn(tokens, width, dtype=torch.bfloat16, device=device, requires_grad=True) for width in self.widths]

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        """All four, in one region of the backend's precision."""
        with self.precision():
            return [part(x) for part, x in zip(self.parts, inputs, strict=True)]


def linear_seconds(setup: Setup, case: Case, model: ModelConfig, tokens: int) -> tuple[float, float]:
    """Forward and backward of a layer's four linears."""
    module = Linears(setup, case, model)
    inputs = module.inputs(tokens, setup.device)
    slopes: list[Tensor] = []

    def work(mark: Callable[[], None]) -> None:
        without_gradients(module)
        for x in inputs:
            x.grad = None
        mark()
        out = module(inputs)
        mark()
        if not slopes:
            slopes.extend(torch.ones_like(each) for each in out)
        mark()
        torch.autograd.backward(out, slopes)
        mark()

    forward, _, backward = setup.intervals(work)
    return forward, backward


def _linears(setup: Setup, case: Case, model: ModelConfig, tokens: int) -> Row:
    forward, backward = linear_seconds(setup, case, model, tokens)
    once = sum(2 * tokens * out * inner for out, inner in shapes(model).values())
    return {"forward": once / forward / 1e12, "both": 3 * once / (forward + backward) / 1e12}


# ------------------------------------------------------------------------------------------------------------------------ layers
def layers(setup: Setup, end: float) -> dict[str, Any]:
    """Whole layers, forward + backward without recompute, on one document and on many. The shortest packs come first."""
    rows = Rows(setup, end)
    for tokens in setup.sizes.tokens:
        for packing in ("one document", "packed"):
            lengths = (tokens,) if packing == "one document" else documents(tokens, setup.sizes.packed)
            for name in reversed(setup.sizes.models):
                for case in CASES:
                    key = {**case.key, "model": name, "tokens": tokens, "packing": packing}
                    rows.add(key, lambda c=case, n=name, g=lengths: _layers(setup, c, setup.sizes.models[n], g))  # type: ignore[misc]
    return rows.result()


def _layers(setup: Setup, case: Case, config: ModelConfig, lengths: tuple[int, ...]) -> Row:
    tokens = sum(lengths)
    each = MemoryModel(basis_from(setup.config(config, "bf16", tokens, tokens))).token_bytes["none"] * tokens
    count = max(1, min(4, MOST_TOKENS // tokens, int(ACTIVATION_SHARE * setup.hardware.memory_bytes / each)))
    model, batch = setup.layers(case, config, count), setup.batch(lengths, case.format, config.vocab)
    x = torch.randn(int(batch.tokens.shape[0]), config.hidden, dtype=torch.bfloat16, device=setup.device, requires_grad=True)
    slope = torch.ones_like(x)

    def work(mark: Callable[[], None]) -> None:
        without_gradients(model)
        x.grad = None
        mark()
        out = model.run(0, x, batch, Placement())
        mark()
        out.backward(slope)
        mark()

    forward, backward = setup.intervals(work)
    work_done = forward_flops(replace(config, layers=count), lengths)
    rate = 3 * (work_done.linear + work_done.attention) / (forward + backward)
    peak = setup.hardware.peak_flops
    return {
        "layers": count,
        "forward_ms": 1e3 * forward / count,
        "backward_ms": 1e3 * backward / count,
        "tflops": rate / 1e12,
        "mfu": rate / peak if peak else None,
    }


# --------------------------------------------------------------------------------------------------------------------- attention
def attention(setup: Setup, end: float) -> dict[str, Any]:
    """Core attention of documents of one length, in the shape of the 8b model: TFLOP/s, causal half counted; backward is 2.5 forwards."""
    rows, config = Rows(setup, end), setup.sizes.models["gpt_8b"]
    for length in setup.sizes.lengths:
        lengths = (length,) * max(1, setup.sizes.attention_tokens // length)
        for case in (Case("torch", "bf16"), Case("te", "bf16")):
            key = {"backend": case.backend, "length": length, "documents": len(lengths)}
            rows.add(key, lambda c=case, g=lengths: _attention(setup, c, config, g))  # type: ignore[misc]
    return rows.result(unit="TFLOP/s")


def _attention(setup: Setup, case: Case, config: ModelConfig, lengths: tuple[int, ...]) -> Row:
    forward, backward = attention_seconds(setup, case, config, lengths)
    work = 2 * config.head_dim * config.heads * sum(length * length for length in lengths)
    return {"forward": work / forward / 1e12, "backward": 2.5 * work / backward / 1e12}


def attention_seconds(setup: Setup, case: Case, config: ModelConfig, lengths: tuple[int, ...]) -> tuple[float, float]:
    """Forward and backward of one layer's core attention."""
    core = setup.backend(case).core_attention(config.heads, config.kv_heads, config.head_dim)
    batch = setup.batch(lengths, case.format, config.vocab)
    rows = int(batch.tokens.shape[0])
    sizes = ((rows, heads, config.head_dim) for heads in (config.heads, config.kv_heads, config.kv_heads))
    tensors = [torch.randn(size, dtype=torch.bfloat16, device=setup.device, requires_grad=True) for size in sizes]
    slope = torch.ones_like(tensors[0])

    def work(mark: Callable[[], None]) -> None:
        for tensor in tensors:
            tensor.grad = None
        mark()
        out = core(*tensors, batch, Placement())
        mark()
        out.backward(slope)
        mark()

    forward, backward = setup.intervals(work)
    return forward, backward
