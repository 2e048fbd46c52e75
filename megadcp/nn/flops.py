"""Parameters, and FLOPs from actual document lengths. A multiply-add counts 2; norms, activations, rope and softmax count nothing.

Symbols: layers N, hidden h, heads H, kv heads G, head dim d, ffn f, vocabulary V; l real tokens of one document, t their sum.
Forward (docs/plan.md section 3): linear layers N 2 t (h d (2H + 2G) + 3 h f), without a gate 2 h f; LM head 2 t h V; attention
N 2 d H l^2 per document, the causal half of the 4 d H l^2 that two full square products would take. Backward: twice the forward for
all of them. A flash kernel's backward makes the scores again, 2.5 times its forward: that is `attention_backward=2.5`, the work of the
hardware rather than of the model. Model FLOPs (the default) are what MFU is stated in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megadcp.config.schema import ModelConfig


@dataclass(frozen=True)
class Flops:
    """FLOPs by where they happen; all layers together."""

    linear: int
    attention: int
    head: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.linear + self.attention + self.head


def parameters(config: ModelConfig) -> int:
    """Number of values the model holds; a tied table counts once."""
    h, d = config.hidden, config.head_dim
    query, key = config.heads * d, config.kv_heads * d
    norm = h * (2 if config.norm == "layernorm" else 1)
    attention = h * (query + 2 * key) + query * h
    attention += (query + 2 * key) * config.qkv_bias + h * config.out_bias + 2 * d * config.qk_norm
    inner = config.ffn * (2 if config.gated else 1)
    mlp = h * inner + config.ffn * h + (inner + h) * config.mlp_bias
    tables = config.vocab * h * (1 if config.tied else 2)
    if config.position == "learned":
        tables += config.max_position * h
    return tables + config.layers * (attention + mlp + 2 * norm) + norm


def forward_flops(config: ModelConfig, lengths: Iterable[int]) -> Flops:
    """One forward over documents of these real lengths, each attending causally to itself only."""
    sizes = [int(length) for length in lengths]
    tokens, squares = sum(sizes), sum(size * size for size in sizes)
    h, d, heads = config.hidden, config.head_dim, config.heads
    weights = h * d * (2 * heads + 2 * config.kv_heads) + (3 if config.gated else 2) * h * config.ffn
    return Flops(
        linear=config.layers * 2 * tokens * weights,
        attention=config.layers * 2 * d * heads * squares,
        head=2 * tokens * h * config.vocab,
    )


def flops(config: ModelConfig, lengths: Iterable[int], backward: bool = True, attention_backward: float = 2.0) -> int:
    """Total FLOPs of a forward, and of its backward where asked for; recompute is not counted."""
    once = forward_flops(config, lengths)
    if not backward:
        return once.total
    return 3 * (once.linear + once.head) + round((1 + attention_backward) * once.attention)
