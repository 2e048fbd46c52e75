"""RMSNorm and LayerNorm. Statistics are at least fp32, whatever the format of the activations.

Legend: h features of the last dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _RmsNorm(torch.autograd.Function):
    """y = x / sqrt(mean(x^2) + eps) * w, saving x and one number per row.

    dx = r g w - x r^3 (g x . w) / h and dw = sum over rows of r g x, with r the inverse root: two matrix-vector products
    instead of the long chain that autograd would record (on a CPU four times faster than differentiating F.rms_norm).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide, scale = _wide(x), _wide(weight)
        inverse = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        out = torch.mul(wide, inverse).mul_(scale)
        ctx.save_for_backward(x, weight, inverse)
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        wide, scale, grad = _wide(x), _wide(weight), _wide(grads[0])
        features = x.shape[-1]
        product = torch.mul(grad, wide)  # [.., h]
        dx = dw = None
        if ctx.needs_input_grad[0]:
            pull = torch.matmul(product, scale).unsqueeze(-1).mul_(inverse.pow(3)).div_(features)
            dx = torch.mul(grad, scale).mul_(inverse).addcmul_(wide, pull, value=-1).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dw = torch.mv(product.reshape(-1, features).t(), inverse.reshape(-1)).to(weight.dtype)
        return dx, dw, None


def _wide(x: Tensor) -> Tensor:
    """Half formats as fp32; fp32 and fp64 as they are."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


_rms_norm: Callable[[Tensor, Tensor, float], Tensor] = _RmsNorm.apply


class RmsNorm(nn.Module):
    """Scale by the inverse root mean square, then by a learned weight."""

    def __init__(self, features: int, eps: float, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(features, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [.., h]; same shape."""
        if x.is_cuda:  # one fused kernel each way
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        return _rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """Subtract the mean, scale by the inverse standard deviation, then a learned weight and bias."""

    def __init__(self, features: int, eps: float, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(features, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(features, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [.., h]; same shape."""
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)
