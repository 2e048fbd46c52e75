"""Core attention of packed documents with PyTorch's own kernels, CPU and GPU.

Legend: t tokens, n documents, H query heads, G kv heads, d head dim, l length of one document.
CPU: one autograd function loops over the documents (a node per document under autograd would be ten times slower) and calls the fused
flash kernel, which knows grouped-query attention and fp64. Only real tokens take part: padding rows come out zero, and so do their gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megadcp.nn.backend import PackedTokens

Span = tuple[int, int, int, int]  # first row, documents, stretch (rows from one document to the next), real length


def spans(borders: tuple[int, ...], real_lengths: list[int]) -> list[Span]:
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
    return x[first : first + count * stretch].unflatten(0, (count, stretch))[:, :length].transpose(1, 2)


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


def cpu_attention(q: Tensor, k: Tensor, v: Tensor, batch: PackedTokens) -> Tensor:
    """Fused CPU kernel, document by document."""
    return CpuAttention.apply(q, k, v, spans(batch.cu_seqlens_list, batch.real_lengths.tolist()))


def cuda_attention(q: Tensor, k: Tensor, v: Tensor, batch: PackedTokens) -> Tensor:
    """Variable-length flash attention where torch has it (half formats), else one fused call per document.

    Documents run over their padding too: it lies behind their real tokens, so causality hides it; its rows are zeroed after, which
    also makes its gradients zero.
    """
    if q.dtype in (torch.bfloat16, torch.float16):
        from torch.nn.attention.varlen import varlen_attn  # CUDA only

        longest = batch.max_length
        out = varlen_attn(q, k, v, batch.cu_seqlens, batch.cu_seqlens, longest, longest, window_size=(-1, 0), enable_gqa=q.shape[1] != k.shape[1])
    else:
        sizes = [end - start for start, end in zip(batch.cu_seqlens_list[:-1], batch.cu_seqlens_list[1:], strict=True)]
        parts = [
            torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(0, 1).unsqueeze(0) for x in document), is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
            )
            for document in zip(q.split(sizes), k.split(sizes), v.split(sizes), strict=True)
            if document[0].shape[0]
        ]
        out = torch.cat(parts, dim=2)[0].transpose(0, 1)
    stretches = batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]
    real = torch.repeat_interleave(batch.real_lengths, stretches, output_size=q.shape[0])
    first = torch.repeat_interleave(batch.cu_seqlens[:-1], stretches, output_size=q.shape[0])
    inside = torch.arange(q.shape[0], device=q.device) - first < real
    return torch.where(inside[:, None, None], out, torch.zeros((), dtype=out.dtype, device=out.device))
