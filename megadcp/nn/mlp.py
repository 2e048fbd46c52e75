"""The MLP: up projection (with a gate for swiglu), activation, down projection.

Legend: t tokens, h hidden, f inner width. With a gate the up projection gives [gate, up], 2f wide, from one matrix product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megadcp.config.schema import ModelConfig
from megadcp.nn.backend import Backend
from megadcp.nn.compiled import compiles, fused, wide


class _SwiGlu(torch.autograd.Function):
    """[t, 2f] -> silu(gate) * up [t, f]; saves its input only."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        if compiles(both):
            return fused(both, gated)(both)
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        if compiles(both):
            return fused(both, gated_slope)(both, grads[0])
        gate, up = both.chunk(2, dim=-1)
        out = torch.empty_like(both)
        d_gate, d_up = out.chunk(2, dim=-1)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=d_gate)
        torch.ops.aten.silu.out(gate, out=d_up)
        d_up.mul_(grads[0])
        return out


def gated(both: Tensor) -> Tensor:
    """silu(gate) * up of [t, 2f]: [t, f], computed in fp32 and rounded once."""
    gate, up = wide(both).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(both.dtype)


def gated_slope(both: Tensor, grad: Tensor) -> Tensor:
    """Gradient of `gated` [t, 2f] from that of its output [t, f]."""
    gate, up = wide(both).chunk(2, dim=-1)
    slope, share = wide(grad), torch.sigmoid(gate)
    d_gate = slope * up * share * (1 + gate * (1 - share))
    return torch.cat([d_gate, slope * gate * share], dim=-1).to(both.dtype)


class _SquaredRelu(torch.autograd.Function):
    """max(x, 0)^2; saves its input only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.relu(x).square_()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return F.relu(x).mul_(grads[0]).mul_(2)


def activation(kind: str) -> Callable[[Tensor], Tensor]:
    """The function between the two projections."""
    if kind == "swiglu":
        return _SwiGlu.apply
    if kind == "squared_relu":
        return _SquaredRelu.apply
    if kind == "gelu":
        return F.gelu
    if kind == "gelu_tanh":
        return lambda x: F.gelu(x, approximate="tanh")
    raise ValueError(f"model.mlp={kind} is unknown; legal: swiglu, gelu, gelu_tanh, squared_relu")


class Mlp(nn.Module):
    """x [t, h] -> [t, h]. `up` and `down` are called apart by the block, which may recompute the product between them."""

    def __init__(self, config: ModelConfig, backend: Backend, norm: nn.Module):
        """norm: the one before it, which the block calls."""
        super().__init__()
        parts = ((config.ffn, 1), (config.ffn, 1)) if config.gated else ((config.ffn, 1),)
        self.up = backend.linear(config.hidden, len(parts) * config.ffn, config.mlp_bias, "column", parts, norm)
        self.down = backend.linear(config.ffn, config.hidden, config.mlp_bias, "row")
        self.activation = activation(config.mlp)

    def project(self, inner: Tensor) -> Tensor:
        """Activation and down projection: [t, f or 2f] -> [t, h]."""
        out: Tensor = self.down(self.activation(inner))
        return out
