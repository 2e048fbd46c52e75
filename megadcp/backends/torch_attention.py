"""Core attention of packed documents with PyTorch's own kernels, CPU and GPU.

Legend: t tokens, n documents, H query heads, G kv heads, d head dim, l length of one document.
CPU: one autograd function loops over the documents (a node per document under autograd would be ten times slower) and calls the fused
flash kernel, which knows grouped-query attention and fp64. Only real tokens take part: padding rows come out zero, and so do their gradients.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megadcp.nn.backend import PackedTokens

Span = tuple[int, int, int, int]  # first row, documents, stretch (rows from one document to the next), real length


def spans(borders: tuple[int, ...], real_lengths: tuple[int, ...]) -> list[Span]:
    """Runs of neighbouring documents with equal stretch and length: each is one kernel call on a view. Empty documents are left out."""
    found: list[Span] = []
    for start, end, length in zip(borders[:-1], borders[1:], real_lengths, strict=True):
        if length == 0:  # the kernel dies (SIGFPE) on an empty document
            continue
        if found:
            first, count, stretch, other = found[-1]
            if other == length and stretch == end - start and first + count * stretch == start:
                found[-1] = (first, count + 1, stretch, length)
                continue
        found.append((start, 1, end - start, length))
    return found


def _documents(x: Tensor, span: Span) -> Tensor:
    """View [documents, heads, l, d] of x [t, heads, d]."""
    first, count, stretch, length = span
    return torch.unflatten(x[first : first + count * stretch], 0, (count, stretch))[:, :length].transpose(1, 2)


class CpuAttention(torch.autograd.Function):
    """q [t, H, d], k and v [t, G, d] -> [t, H, d], causal inside each span's documents."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, pieces: list[Span]) -> Tensor:  # noqa: D102
        covered = sum(count * length for _, count, _, length in pieces)
        make = torch.empty if covered == q.shape[0] else torch.zeros
        out = make(q.shape, dtype=q.dtype, device=q.device)
        sums = []  # log-sum-exp of each call
        for span in pieces:
            part, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                _documents(q, span), _documents(k, span), _documents(v, span), 0.0, True
            )
            _documents(out, span).copy_(part)
            sums.append(lse)
        ctx.save_for_backward(q, k, v, out, *sums)
        ctx.pieces = pieces
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # noqa: D102
        q, k, v, out, *sums = ctx.saved_tensors
        grad = grads[0].contiguous()
        covered = sum(count * length for _, count, _, length in ctx.pieces)
        make = torch.empty if covered == q.shape[0] else torch.zeros
        results = [make(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
        for span, lse in zip(ctx.pieces, sums, strict=True):
            inputs = [_documents(x, span) for x in (grad, q, k, v, out)]
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, lse, 0.0, True)
            for result, part in zip(results, parts, strict=True):
                _documents(result, span).copy_(part)
        return results[0], results[1], results[2], None


_cpu_attention: Callable[[Tensor, Tensor, Tensor, list[Span]], Tensor] = CpuAttention.apply


def cpu_attention(q: Tensor, k: Tensor, v: Tensor, batch: PackedTokens) -> Tensor:
    """Fused CPU kernel, document by document."""
    return _cpu_attention(q, k, v, spans(batch.cu_seqlens_list, batch.real_lengths_list))


def cuda_attention(q: Tensor, k: Tensor, v: Tensor, batch: PackedTokens) -> Tensor:
    """Variable-length flash attention for half formats, else one fused call per document.

    Documents run over their padding too: it lies behind their real tokens, so causality hides it; its rows are zeroed after, which
    also makes its gradients zero.
    """
    out = _varlen(q, k, v, batch) if q.dtype in (torch.bfloat16, torch.float16) else per_document(q, k, v, batch)
    return out.masked_fill(~real_rows(batch)[:, None, None], 0.0)


def real_rows(batch: PackedTokens) -> Tensor:
    """Mask [t]: True for tokens, False for padding; made without waiting for the device."""
    tokens = batch.tokens.shape[0]
    starts = batch.cu_seqlens[:-1]
    ends = torch.repeat_interleave(starts + batch.real_lengths, batch.cu_seqlens[1:] - starts, output_size=tokens)
    return torch.arange(tokens, device=batch.tokens.device) < ends


def per_document(q: Tensor, k: Tensor, v: Tensor, batch: PackedTokens) -> Tensor:
    """One fused call per document, padding included. Works on every device."""
    sizes = [end - start for start, end in itertools.pairwise(batch.cu_seqlens_list)]
    parts = [
        F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1])
        for query, key, value in zip(*(torch.split(x.transpose(0, 1).unsqueeze(0), sizes, dim=2) for x in (q, k, v)), strict=True)
        if query.shape[2]
    ]
    return torch.cat(parts, dim=2)[0].transpose(0, 1)


def _varlen(q: Tensor, k: Tensor, v: Tensor, batch: PackedTokens) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # CUDA only

    options: dict[str, Any] = {"window_size": (-1, 0)}  # nothing to the right: causal
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    else:  # torch 2.11
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    borders, longest = batch.cu_seqlens, batch.max_length
    out = varlen_attn(q, k, v, borders, borders, longest, longest, **options)
    assert isinstance(out, Tensor)  # a pair only where more was asked for
    return out
