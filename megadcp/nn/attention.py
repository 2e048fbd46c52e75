"""Self-attention: fused qkv projection, heads, rope, core attention, output projection.

Legend: t tokens, h hidden, H query heads, G kv heads, d head dim. Rows of the qkv weight: H d of queries, then G d of keys, then G d of values.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megadcp.config.schema import ModelConfig
from megadcp.nn.backend import Backend, PackedTokens, Placement
from megadcp.nn.rope import rotate, split_rotate


class Attention(nn.Module):
    """Causal inside each document; the block calls `qkv` and `attend` apart, since it may recompute what feeds qkv."""

    def __init__(self, config: ModelConfig, backend: Backend):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        width = (config.heads + 2 * config.kv_heads) * config.head_dim
        self.qkv = backend.linear(config.hidden, width, config.qkv_bias, "column")
        self.out = backend.linear(config.heads * config.head_dim, config.hidden, config.out_bias, "row")
        self.q_norm = backend.norm("rmsnorm", config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = backend.norm("rmsnorm", config.head_dim, config.norm_eps) if config.qk_norm else None
        self.core = backend.core_attention(config.heads, config.kv_heads, config.head_dim)

    def attend(self, qkv: Tensor, rope: tuple[Tensor, Tensor] | None, batch: PackedTokens, placement: Placement) -> Tensor:
        """Attend with qkv [t, (H + 2G) d] -> [t, h]."""
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
