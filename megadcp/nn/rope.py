"""Rotary position embedding in the half-split layout: feature i of a head turns with feature i + d/2.

Legend: t tokens, H query heads, G kv heads, d head dim. Frequencies follow the published families as transformers 5 computes them:
linear divides all by `factor`; llama3 divides the slow ones and blends in between; yarn interpolates the slow ones over a ramp of
dimensions (arXiv 2309.00071) and scales cos and sin.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megadcp.config.schema import RopeConfig
from megadcp.nn.compiled import compiles, fused


def inverse_frequencies(rope: RopeConfig, head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Radians per position of each feature pair: [d / 2], computed in `dtype` (fp32 or fp64)."""
    exponent = torch.arange(0, head_dim, 2, device=device).to(dtype) / head_dim
    plain = 1.0 / rope.theta**exponent
    if rope.scaling == "linear":
        return plain / rope.factor
    if rope.scaling == "llama3":
        return _llama3(plain, rope)
    if rope.scaling == "yarn":
        return _yarn(plain, rope, head_dim)
    return plain


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Keep short wavelengths, divide long ones by factor, blend linearly in original/wavelength between."""
    turns = rope.original_max_position * plain / (2 * math.pi)  # rotations over the original context
    share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    share = share.clamp(0, 1)
    return (1 - share) * plain / rope.factor + share * plain


def _yarn(plain: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Between the dimensions that turn beta_fast and beta_slow times over the original context, ramp from kept to divided."""

    def dimension(rotations: float) -> float:
        return head_dim * math.log(rope.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension(rope.beta_fast)), 0)
    high: float = min(math.ceil(dimension(rope.beta_slow)), head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, device=plain.device).to(plain.dtype) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def amplitude(rope: RopeConfig) -> float:
    """Factor on cos and sin: yarn's attention factor, 1 otherwise."""
    if rope.scaling != "yarn":
        return 1.0
    if rope.attention_factor:
        return rope.attention_factor
    return 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0


def tables(rope: RopeConfig, head_dim: int, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Make cos and sin of every token, each [t, 1, d / 2], in fp64 for fp64 models and fp32 otherwise; shared by all layers."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    frequencies = inverse_frequencies(rope, head_dim, wide, positions.device)
    angles = positions.to(wide)[:, None, None] * frequencies
    scale = amplitude(rope)
    cos, sin = angles.cos(), angles.sin_()
    return (cos, sin) if scale == 1.0 else (cos.mul_(scale), sin.mul_(scale))


def _turn(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """Fill out with x turned by the angle; x and out [t, heads, d], both may be strided. -sin turns back."""
    half = x.shape[-1] // 2
    if x.dtype != cos.dtype:  # half formats turn in fp32 and are rounded once
        wide = torch.empty(x.shape, dtype=cos.dtype, device=x.device)
        _turn(x.to(cos.dtype), cos, sin, wide)
        out.copy_(wide)
        return
    first, second = x[..., :half], x[..., half:]
    torch.mul(first, cos, out=out[..., :half])
    out[..., :half].addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:])
    out[..., half:].addcmul_(first, sin)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [t, heads, d] by the angle, in the tables' format and rounded once."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def split_turned(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> Tensor:
    """Heads [t, H + 2G, d] of qkv, all but the values turned."""
    x = qkv.view(qkv.shape[0], heads + 2 * kv_heads, -1)
    return torch.cat([turned(x[:, : heads + kv_heads], cos, sin), x[:, heads + kv_heads :]], dim=1)


def joined_back(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Gradient of qkv from those of the parts that `split_turned` gives."""
    return torch.cat([turned(dq, cos, -sin), turned(dk, cos, -sin), dv], dim=1).flatten(1)


class _Rotate(torch.autograd.Function):
    """x [t, heads, d] -> turned copy; saves only the shared tables."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        if compiles(x):
            return fused(x, turned)(x, cos, sin)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _turn(x, cos, sin, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        if compiles(grads[0]):
            return fused(grads[0], turned)(grads[0], cos, -sin), None, None
        out = torch.empty(grads[0].shape, dtype=grads[0].dtype, device=grads[0].device)
        _turn(grads[0], cos, -sin, out)
        return out, None, None


class _SplitRotate(torch.autograd.Function):
    """qkv [t, (H + 2G) d] -> q [t, H, d] and k [t, G, d] turned, v [t, G, d]: views of one new buffer, so that qkv itself can go."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.sizes = (heads, kv_heads)
        values = heads + kv_heads  # the first head of the values
        if compiles(qkv):
            out = fused(qkv, split_turned)(qkv, cos, sin, heads, kv_heads)
        else:
            x = qkv.view(qkv.shape[0], heads + 2 * kv_heads, -1)
            out = torch.empty_like(x)
            _turn(x[:, :values], cos, sin, out[:, :values])
            out[:, values:].copy_(x[:, values:])
        return out[:, :heads], out[:, heads:values], out[:, values:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        heads, kv_heads = ctx.sizes
        dq, dk, dv = grads
        if compiles(dq):
            return fused(dq, joined_back)(dq, dk, dv, cos, sin), None, None, None, None
        tokens, _, head_dim = dq.shape
        out = torch.empty(tokens, heads + 2 * kv_heads, head_dim, dtype=dq.dtype, device=dq.device)
        back = -sin
        _turn(dq, cos, back, out[:, :heads])
        _turn(dk, cos, back, out[:, heads : heads + kv_heads])
        out[:, heads + kv_heads :].copy_(dv)
        return out.view(tokens, -1), None, None, None, None


_rotate: Callable[[Tensor, Tensor, Tensor], Tensor] = _Rotate.apply
_split_rotate: Callable[[Tensor, Tensor, Tensor, int, int], tuple[Tensor, Tensor, Tensor]] = _SplitRotate.apply


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each head of x [t, heads, d] by its token's angle."""
    return _rotate(x, cos, sin)


def split_rotate(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cut qkv [t, (H + 2G) d] into heads and turn queries and keys: q [t, H, d], k and v [t, G, d]."""
    return _split_rotate(qkv, cos, sin, heads, kv_heads)
