"""Sums and gathers between tensor-parallel ranks with their gradients, by plain collectives: what the stand-in for Transformer Engine needs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Gather(torch.autograd.Function):
    """Rows of all ranks; the gradient is the sum of everybody's, of which each gets its rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, handle: Any) -> Tensor:
        ctx.handle = handle
        return _gathered(x, handle)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _scattered(grads[0], ctx.handle), None


class Scatter(torch.autograd.Function):
    """The sum of everybody's, of which each rank gets its rows; the gradient is everybody's rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, handle: Any) -> Tensor:
        ctx.handle = handle
        return _scattered(x, handle)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gathered(grads[0], ctx.handle), None


class Copy(torch.autograd.Function):
    """x itself; the gradient is the sum of everybody's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, handle: Any) -> Tensor:
        ctx.handle = handle
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _summed(grads[0], ctx.handle), None


class Sum(torch.autograd.Function):
    """The sum of everybody's; the gradient is the same everywhere already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, handle: Any) -> Tensor:
        return _summed(x, handle)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _summed(x: Tensor, handle: Any) -> Tensor:
    out = x.contiguous().clone()
    dist.all_reduce(out, group=handle)
    return out


def _gathered(x: Tensor, handle: Any) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(handle))]
    dist.all_gather(parts, x.contiguous(), group=handle)
    return torch.cat(parts)


def _scattered(x: Tensor, handle: Any) -> Tensor:
    return _summed(x, handle).chunk(dist.get_world_size(handle))[dist.get_rank(handle)].clone()
