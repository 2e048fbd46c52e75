"""Self-attention: fused qkv projection, heads, rope, core attention, output projection.

Legend: t tokens, h hidden, H query heads, G kv heads, d head dim (of one rank). Rows of the qkv weight: H d of queries, then G d of keys, then
G d of values; a tensor-parallel rank has its share of each.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megadcp.config.schema import ModelConfig
from megadcp.nn.backend import Backend, PackedTokens, Placement
from megadcp.nn.rope import rotate, split_rotate


class Attention(nn.Module):
    """Causal inside each document; the block calls `qkv` and `attend` apart, since it may recompute what feeds qkv."""

    def __init__(self, config: ModelConfig, backend: Backend, norm: nn.Module):
        """norm: the one before it, which the block calls."""
        super().__init__()
        self.heads, self.kv_heads = backend.heads(config.heads, config.kv_heads)  # of this rank
        self.head_dim = config.head_dim
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        parts = ((queries, config.head_dim), (keys, config.head_dim), (keys, config.head_dim))
        self.qkv = backend.linear(config.hidden, queries + 2 * keys, config.qkv_bias, "column", parts, norm)
        self.out = backend.linear(queries, config.hidden, config.out_bias, "row")
        self.q_norm = backend.norm("rmsnorm", config.head_dim, config.norm_eps, stream=False) if config.qk_norm else None
        self.k_norm = backend.norm("rmsnorm", config.head_dim, config.norm_eps, stream=False) if config.qk_norm else None
        self.core = backend.core_attention(self.heads, self.kv_heads, config.head_dim)

    def attend(self, qkv: Tensor, rope: tuple[Tensor, Tensor] | None, batch: PackedTokens, placement: Placement) -> Tensor:
        """Attend with qkv [t, (H + 2G) d] -> residual stream."""
        q, k, v = self._heads(qkv, rope)
        out: Tensor = self.out(self.core(q, k, v, batch, placement).flatten(1))
        return out

    def _heads(self, qkv: Tensor, rope: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        if self.q_norm is None and rope is not None:
            return split_rotate(qkv, *rope, self.heads, self.kv_heads)
        q, k, v = torch.split(qkv.view(qkv.shape[0], -1, self.head_dim), [self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        return q, k, v
