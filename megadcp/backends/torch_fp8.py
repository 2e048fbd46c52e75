"""Linear layers in fp8, by PyTorch alone: what is rounded to 8 bits, with which scales, and how the products are made.

Activations between the layers, norms, attention, embedding and LM head stay bf16; the parameters are bf16 with fp32 masters as without fp8.
x is the value that was rounded, q its 8 bits, s = largest representable / largest |x| of the elements that share a scale, so x ~ q / s.
A product is made of 8-bit operands, summed in fp32 and rounded once: to bf16, or not at all for weight gradients.

What can go wrong. An outlier sets the scale and is kept; what it dwarfs becomes zero: nothing turns into Inf, for values are cut off at the
largest representable number. NaN is not hidden: the largest |x| of a tensor with NaN is NaN, that of one with Inf is Inf, and either makes
every element that shares the scale NaN, so that the step's loss or gradient norm is not finite and the step is skipped.

Legend: t tokens, T tensor-parallel ranks, in and out features of a weight [out, in] on this rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megadcp.mesh.groups import Group
from megadcp.nn.compiled import fused
from megadcp.parallel.collectives import Arriving, all_gather, all_reduce, start_all_gather
from megadcp.parallel.product import Kept, Product

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
LEAST = 2.0**-100  # stands in for the largest |x| of zeros: a scale stays finite, and so does its inverse
BLOCK = 128
ROWS = 16  # what a product sums over must be a multiple of it on a GPU


def product_of(fp8: str) -> Product:
    """How linears multiply: fp8_current or fp8_block. ValueError for anything else."""
    makers: dict[str, type[CurrentScaling] | type[BlockScaling]] = {"fp8_current": CurrentScaling, "fp8_block": BlockScaling}
    if fp8 not in makers:
        raise ValueError(f"fp8={fp8!r} is unknown; legal: {', '.join(makers)}")
    return makers[fp8]()


# --------------------------------------------------------------------------------------------------------------- rounding
def largest_of(x: Tensor) -> Tensor:
    """fp32 scalar: the largest |x|, NaN if there is any NaN; 0 of nothing."""
    return fused(x, _largest)(x) if x.numel() else torch.zeros((), device=x.device)


def _largest(x: Tensor) -> Tensor:
    return x.abs().amax().float()


def scale_for(largest: Tensor, form: torch.dtype, power_of_two: bool) -> Tensor:
    """Factors that bring |x| up to `largest` into the range of `form`; 0 for Inf, NaN for NaN. power_of_two: the next lower one."""
    scale = LARGEST[form] / largest.clamp(min=LEAST)
    if not power_of_two:
        return scale
    mantissa, exponent = torch.frexp(scale)
    return torch.where((scale > 0) & (scale < torch.inf), torch.ldexp(torch.full_like(mantissa, 0.5), exponent), scale)


def rounded(x: Tensor, scale: Tensor, form: torch.dtype) -> Tensor:
    """X * scale in 8 bits, to the nearest, cut off at the largest representable number; NaN stays NaN, Inf times the scale 0 becomes it."""
    return fused(x, _rounded)(x, scale, form, LARGEST[form])


def _rounded(x: Tensor, scale: Tensor, form: torch.dtype, limit: float) -> Tensor:
    return (x.float() * scale).clamp(-limit, limit).to(form)


# --------------------------------------------------------------------------------------------------- one scale per tensor
class CurrentScaling:
    """One scale for a tensor, from its present content (Transformer Engine's Float8CurrentScaling): E4M3 forward, E5M2 for gradients.

    Scales are powers of two, unlike Transformer Engine's: a number is then rounded alike whatever else is in its tensor, unless it falls
    below the range, and so neither packing nor T changes much (tests/backends/test_torch_fp8.py has figures for both kinds). It costs at most
    one of the 18 binades of E4M3, and no precision.
    With sequence parallelism the scale is that of the rows of all T ranks, found by one small maximum over them, and 8-bit rows travel. A
    rank's scales are otherwise those of what it holds of the weight, output gradient and row linear's input: results depend on T by fp8
    rounding. The weight is rounded anew in each forward and backward: nothing can be stale, and no copy outlives a call.
    """

    name, unit, fused = "fp8_current", ROWS, True

    def __init__(self, power_of_two: bool = True) -> None:
        self.power_of_two = power_of_two

    def quantise(self, x: Tensor, form: torch.dtype, tokens: Group | None = None) -> Kept:
        """Q and 1 / s of x [rows, features]; tokens: ranks whose rows share the scale."""
        largest = largest_of(x)
        if tokens is not None and tokens.size > 1:  # a maximum over ranks could lose a NaN, but not an Inf
            largest = all_reduce(torch.where(largest.isnan(), torch.inf, largest).view(1), tokens, "max").view(())
        scale = scale_for(largest, form, self.power_of_two)
        return rounded(x, scale, form), scale.reciprocal()

    def take(self, x: Tensor, tokens: Group) -> tuple[Kept, Kept]:
        """Round x; the same 8 bits serve the backward."""
        taken = self.quantise(x, E4M3, tokens)
        return taken, taken

    def multiply(self, now: Kept, weight: Tensor, bias: Tensor | None, tokens: Group) -> Tensor:
        """Make [t, out] in the weight's format."""
        (x, x_inverse), (w, w_inverse) = now, self.quantise(weight, E4M3)
        # Fast accumulation in the forward only, as Transformer Engine has it: gradients need the longer sums.
        return torch._scaled_mm(
            all_gather(x, tokens), w.t(), scale_a=x_inverse, scale_b=w_inverse, bias=bias, out_dtype=weight.dtype, use_fast_accum=True
        )

    def slope(self, grad: Tensor, tokens: Group) -> Kept:
        """Round the output's gradient."""
        return self.quantise(grad, E5M2)

    def input_gradient(self, slope: Kept, weight: Tensor) -> Tensor:
        """Make [t, in] in the weight's format."""
        (dy, dy_inverse), (w, w_inverse) = slope, self.quantise(weight, E4M3)
        return torch._scaled_mm(dy, _column_major(w), scale_a=dy_inverse, scale_b=w_inverse, out_dtype=weight.dtype)

    def gather(self, kept: Kept, tokens: Group) -> list[Arriving]:
        """All rows; they have one scale."""
        return [start_all_gather(kept[0], tokens), Arriving(kept[1])]

    def weight_gradient(self, slope: Kept, whole: Kept, total: Tensor | None) -> Tensor:
        """Make [out, in] in fp32, or add it to the sums."""
        (dy, dy_inverse), (x, x_inverse) = slope, whole
        dy, x = _whole_rows(dy), _whole_rows(x)
        found = torch._scaled_mm(_row_major(dy.t()), _column_major(x), scale_a=dy_inverse, scale_b=x_inverse, out_dtype=torch.float32)
        return found if total is None else total.add_(found)


def _row_major(x: Tensor) -> Tensor:
    """The layout that a GPU's product wants on its left; a CPU's takes any."""
    return x.contiguous() if x.is_cuda else x


def _column_major(x: Tensor) -> Tensor:
    """The layout that a GPU's product wants on its right."""
    return x.t().contiguous().t() if x.is_cuda else x


def _whole_rows(x: Tensor, unit: int = ROWS) -> Tensor:
    """X [rows, features] with zero rows behind it up to a multiple of `unit`, which change no sum over rows."""
    rest = -x.shape[0] % unit
    if not rest:
        return x
    bits = x.view(torch.uint8) if x.element_size() == 1 else x  # not every operation knows fp8
    return torch.cat([bits, bits.new_zeros(rest, x.shape[1])]).view(x.dtype)


# ---------------------------------------------------------------------------------------------------- one scale per block
class BlockScaling:
    """Scales for blocks (Float8BlockScaling): 1 x 128 of activations and gradients, 128 x 128 of weights, powers of two, E4M3 throughout.

    The numbers are those of block-scaled fp8, the speed is bf16's: PyTorch has no such product on a CPU, and on a GPU one with changing
    demands on the scales' layout. So operands are widened to bf16, which holds 8 bits times a power of two exactly, and multiplied there.
    Each operand is rounded along what is summed over: features forward and for the input's gradient, tokens for the weight's. The blocks
    of tokens are those of one rank's rows. Results depend on tensor parallelism by fp8 rounding, because the ranks' tensors end elsewhere.
    """

    name, unit, fused = "fp8_block", BLOCK, True

    def take(self, x: Tensor, tokens: Group) -> tuple[Kept, Kept]:
        """Round x along the features for the product, along the tokens for the backward."""
        return quantise_rows(x), quantise_columns(x)

    def multiply(self, now: Kept, weight: Tensor, bias: Tensor | None, tokens: Group) -> Tensor:
        """Make [t, out] in the weight's format."""
        x = widened_rows(all_gather(now[0], tokens), all_gather(now[1], tokens), weight.dtype)
        return torch.nn.functional.linear(x, _through_weight(weight), bias)

    def slope(self, grad: Tensor, tokens: Group) -> Kept:
        """Round the output's gradient both ways."""
        if tokens.size > 1:  # blocks of tokens as the ranks' inputs have them
            by_rank = [_whole_rows(rows, BLOCK) for rows in grad.chunk(tokens.size)]
            return *quantise_rows(grad), *quantise_columns(torch.cat(by_rank))
        return *quantise_rows(grad), *quantise_columns(grad)

    def input_gradient(self, slope: Kept, weight: Tensor) -> Tensor:
        """Make [t, in] in the weight's format."""
        return widened_rows(slope[0], slope[1], weight.dtype) @ _through_weight(weight)

    def gather(self, kept: Kept, tokens: Group) -> list[Arriving]:
        """All rows and their scales."""
        return [start_all_gather(one, tokens) for one in kept]

    def weight_gradient(self, slope: Kept, whole: Kept, total: Tensor | None) -> Tensor:
        """Make [out, in] in fp32, or add it to the sums."""
        dy = widened_columns(slope[2], slope[3], torch.bfloat16)
        x = widened_columns(whole[0], whole[1], torch.bfloat16)
        found = torch.mm(dy.t(), x, out_dtype=torch.float32) if x.is_cuda else dy.t().float() @ x.float()
        return found if total is None else total.add_(found)


def quantise_rows(x: Tensor) -> Kept:
    """X [t, features] -> q of the same shape, and 1 / s [t, features / 128]."""
    q, inverse = fused(x, _quantise_blocks)(x.reshape(x.shape[0], -1, BLOCK), 2)
    return q.view(x.shape), inverse.squeeze(2)


def quantise_columns(x: Tensor) -> Kept:
    """X [t, features] -> q [t up to a multiple of 128, features], and 1 / s [t / 128, features]."""
    x = _whole_rows(x, BLOCK)
    q, inverse = fused(x, _quantise_blocks)(x.reshape(-1, BLOCK, x.shape[1]), 1)
    return q.view(x.shape), inverse.squeeze(1)


def quantise_weight(weight: Tensor) -> Kept:
    """Weight [out, in] -> q of the same shape, and 1 / s [out / 128, 1, in / 128, 1]."""
    out, features = weight.shape
    q, inverse = fused(weight, _quantise_blocks)(weight.view(out // BLOCK, BLOCK, features // BLOCK, BLOCK), (1, 3))
    return q.view(out, features), inverse


def _through_weight(weight: Tensor) -> Tensor:
    q, inverse = quantise_weight(weight)
    return widened_weight(q, inverse, weight.dtype)


def _quantise_blocks(x: Tensor, dims: int | tuple[int, ...]) -> tuple[Tensor, Tensor]:
    largest = x.abs().amax(dims, keepdim=True).float()
    scale = scale_for(largest, E4M3, power_of_two=True)
    return _rounded(x, scale, E4M3, LARGEST[E4M3]), scale.reciprocal()


def widened_rows(q: Tensor, inverse: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo of `quantise_rows`, exact in bf16."""
    return (q.to(dtype).view(q.shape[0], -1, BLOCK) * inverse.to(dtype).unsqueeze(2)).view(q.shape)


def widened_columns(q: Tensor, inverse: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo of `quantise_columns`, exact in bf16; padding rows are zero."""
    return (q.to(dtype).view(-1, BLOCK, q.shape[1]) * inverse.to(dtype).unsqueeze(1)).view(q.shape)


def widened_weight(q: Tensor, inverse: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo of `quantise_weight`, exact in bf16."""
    out, features = q.shape
    return (q.to(dtype).view(out // BLOCK, BLOCK, features // BLOCK, BLOCK) * inverse.to(dtype)).view(q.shape)
