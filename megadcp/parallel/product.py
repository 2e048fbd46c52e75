"""How a linear layer multiplies: which form of its input it keeps for the backward, and where its weight gradient goes.

One linear is two nodes of autograd: the first takes the input and keeps what the backward needs, the second makes the product and keeps
nothing. Recompute stops at the last tensor that the backward needs: so it never makes the product, or gathers its rows, again.

Legend: t tokens, T ranks that share them (1 without sequence parallelism), in and out the weight's features on this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megadcp.mesh.groups import Group
from megadcp.parallel.collectives import Arriving, all_gather, start_all_gather, start_all_reduce, start_reduce_scatter
from megadcp.parallel.main_grad import added, adds_itself, total_of

Kept = tuple[Tensor, ...]
AddProduct = Callable[[Tensor, Tensor, Tensor], None]  # x [t, in], slope [t, out], fp32 sums [out, in]: adds slope^T x to the sums


class Product(Protocol):
    """x [t, in] times weight [out, in]. `tokens` are the ranks whose rows together are the t of the product: x holds t / T of them."""

    name: str
    unit: int
    """What the weight's sides on each rank must be multiples of."""

    fused: bool
    """Whether weight gradients may go to `main_grad` directly."""

    def take(self, x: Tensor, tokens: Group) -> tuple[Kept, Kept]:
        """What the product reads, and what the backward keeps, of x [t / T, in]."""

    def multiply(self, now: Kept, weight: Tensor, bias: Tensor | None, tokens: Group) -> Tensor:
        """Make [t, out] of what `take` gave."""

    def slope(self, grad: Tensor, tokens: Group) -> Kept:
        """What both gradients read of the output's gradient [t, out]."""

    def input_gradient(self, slope: Kept, weight: Tensor) -> Tensor:
        """Make this rank's part of [t, in]."""

    def gather(self, kept: Kept, tokens: Group) -> list[Arriving]:
        """Begin to put together all ranks' rows of what `take` kept, while other things are computed."""

    def weight_gradient(self, slope: Kept, whole: Kept, total: Tensor | None) -> Tensor:
        """Add to the fp32 sums `total` [out, in] and return them; None: a new tensor, fp32 or as narrow as x. whole: what `gather` began."""


def add_product(x: Tensor, slope: Tensor, total: Tensor) -> None:
    """Add slope^T x to fp32 sums: exact products, no rounding to bf16 on the way. The reference that runs everywhere."""
    total.addmm_(slope.t().to(total.dtype), x.to(total.dtype))


class PlainProduct:
    """In the parameters' own format. add: what adds a weight gradient to fp32 sums; None: gradients take autograd's way."""

    name, unit = "plain", 1

    def __init__(self, add: AddProduct | None = None) -> None:
        self.add = add
        self.fused = add is not None

    def take(self, x: Tensor, tokens: Group) -> tuple[Kept, Kept]:
        """Keep x itself."""
        return (x,), (x,)

    def multiply(self, now: Kept, weight: Tensor, bias: Tensor | None, tokens: Group) -> Tensor:
        """One product."""
        return F.linear(all_gather(now[0], tokens), weight, bias)

    def slope(self, grad: Tensor, tokens: Group) -> Kept:
        """The gradient itself."""
        return (grad,)

    def input_gradient(self, slope: Kept, weight: Tensor) -> Tensor:
        """One product."""
        return slope[0] @ weight

    def gather(self, kept: Kept, tokens: Group) -> list[Arriving]:
        """All of x."""
        return [start_all_gather(kept[0], tokens)]

    def weight_gradient(self, slope: Kept, whole: Kept, total: Tensor | None) -> Tensor:
        """One product, in x's format or added to fp32 sums."""
        (x,) = whole
        if total is None or self.add is None:
            return slope[0].t() @ x
        self.add(x, slope[0], total)
        return total


PLAIN = PlainProduct()


class _Call:
    """One call of one linear. `now` goes from the first node to the second; `finish` begins to make the input's gradient of everybody's part."""

    def __init__(self, product: Product, weight: Tensor, bias: Tensor | None, tokens: Group, finish: Callable[[Tensor], Arriving]) -> None:
        self.product, self.weight, self.bias, self.tokens, self.finish = product, weight, bias, tokens, finish
        self.now: Kept = ()


class _Take(torch.autograd.Function):
    """x, weight, bias -> a [t, out] without memory, whose gradient is that of the product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        call.now, kept = call.product.take(x, call.tokens)
        ctx.save_for_backward(*kept)
        ctx.product, ctx.weight, ctx.tokens, ctx.finish = call.product, weight, call.tokens, call.finish
        return x.new_empty(()).expand(x.shape[0] * call.tokens.size, weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        product, weight = ctx.product, ctx.weight
        for_x, for_weight, for_bias, _ = ctx.needs_input_grad
        # The rows travel while the input's gradient is computed, and that travels while the weight's is.
        coming = product.gather(ctx.saved_tensors, ctx.tokens) if for_weight else []
        slope = product.slope(grads[0], ctx.tokens) if for_x or for_weight else ()
        dx = ctx.finish(product.input_gradient(slope, weight.detach())) if for_x else None
        dw = None
        if for_weight:
            total = total_of(weight) if product.fused else None
            dw = product.weight_gradient(slope, tuple(one.get() for one in coming), total)
            dw = dw.to(weight.dtype) if total is None else added(weight)
        db = grads[0].sum(0) if for_bias else None
        return None if dx is None else dx.get(), dw, db, None


class _Multiply(torch.autograd.Function):
    """The product; `stub` [t, out] is what `_Take` gave."""

    @staticmethod
    def forward(ctx: Any, stub: Tensor, call: _Call) -> Tensor:
        now, call.now = call.now, ()
        bias = None if call.bias is None else call.bias.detach()
        return call.product.multiply(now, call.weight.detach(), bias, call.tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


_take: Callable[[Tensor, Tensor, Tensor | None, _Call], Tensor] = _Take.apply
_multiply: Callable[[Tensor, _Call], Tensor] = _Multiply.apply
ALONE = Group.single()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, product: Product) -> Tensor:
    """Map x [t, in] to [t, out], all rows on this rank."""
    if product is PLAIN:
        return F.linear(x, weight, bias)
    return _linear(x, _Call(product, weight, bias, ALONE, Arriving))


def gathered_linear(x: Tensor, weight: Tensor, bias: Tensor | None, product: Product, tp: Group, sequence_parallel: bool) -> Tensor:
    """Residual stream (x [t / T, in] with sequence parallelism, else [t, in]) -> [t, out]; its gradient is the sum of every rank's part."""
    if sequence_parallel:
        return _linear(x.contiguous(), _Call(product, weight, bias, tp, lambda part: start_reduce_scatter(part, tp)))
    return _linear(x, _Call(product, weight, bias, ALONE, lambda part: start_all_reduce(part.contiguous(), tp)))


def _linear(x: Tensor, call: _Call) -> Tensor:
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in (x, call.weight, call.bias)):
        return _multiply(_take(x, call.weight, call.bias, call), call)
    return call.product.multiply(call.product.take(x, call.tokens)[0], call.weight, call.bias, call.tokens)


def weight_for(product: Product, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An empty weight [out, in] that the product can multiply with. ValueError if its sides don't fit."""
    if any(side % product.unit for side in shape):
        raise ValueError(f"{shape[1]} -> {shape[0]} features a rank can't run in {product.name}; both must be multiples of {product.unit}")
    weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
    return adds_itself(weight) if product.fused else weight
