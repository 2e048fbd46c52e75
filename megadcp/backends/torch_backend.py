"""The reference backend: plain PyTorch kernels on CPU and GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from megadcp.backends import apex_backend
from megadcp.backends.torch_attention import cpu_attention, cuda_attention
from megadcp.nn.backend import PackedTokens, Placement
from megadcp.nn.loss import chunked_cross_entropy
from megadcp.nn.norm import LayerNorm, RmsNorm
from megadcp.parallel.context import Where, attention
from megadcp.parallel.product import PLAIN, Product, linear, weight_for


class Linear(nn.Module):
    """x [t, in] -> [t, out]. Its values are set by nn/init.py, so none are drawn here."""

    def __init__(self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype, device: torch.device, product: Product = PLAIN):
        super().__init__()
        self.product = product
        self.weight = weight_for(product, (out_features, in_features), dtype, device)
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map x [t, in] to [t, out]."""
        return linear(x, self.weight, self.bias, self.product)


class Embedding(nn.Module):
    """Look up ids [t]: [t, features]."""

    def __init__(self, rows: int, features: int, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, features, dtype=dtype, device=device))

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids [t]: [t, features]."""
        return F.embedding(ids, self.weight)


class TorchBackend:
    """Makes model parts with parameters of `dtype` on `device`. fp32, fp64 and bf16.

    product: how the layers' linears multiply; those of the first and last `plain_ends` layers do it in `dtype` whatever it is.
    """

    name = "torch"

    def __init__(self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", product: Product = PLAIN, plain_ends: int = 0):
        self.dtype, self.device, self.product, self.plain_ends = dtype, torch.device(device), product, plain_ends

    def layer(self, index: int, layers: int) -> TorchBackend:
        """All layers are alike, but perhaps the first and last ones."""
        if self.plain_ends <= index < layers - self.plain_ends:
            return self
        made = copy.copy(self)
        made.product, made.plain_ends = PLAIN, 0
        return made

    def precision(self) -> AbstractContextManager[None]:
        """Nothing to switch."""
        return nullcontext()

    def linear(
        self, in_features: int, out_features: int, bias: bool, kind: str, parts: tuple[tuple[int, int], ...] = (), norm: nn.Module | None = None
    ) -> nn.Module:
        """Make x [t, in] -> [t, out]; kind and parts matter to sharded backends only, norm to those that fuse it."""
        return Linear(in_features, out_features, bias, self.dtype, self.device, self.product)

    def embedding(self, rows: int, features: int, kind: str = "vocabulary") -> nn.Module:
        """Make ids [t] -> [t, features]."""
        return Embedding(rows, features, self.dtype, self.device)

    def norm(self, kind: str, features: int, eps: float, stream: bool = True) -> nn.Module:
        """Make x [.., features] -> same shape."""
        if kind not in ("rmsnorm", "layernorm"):
            raise ValueError(f"model.norm={kind} is unknown; legal: rmsnorm, layernorm")
        return (RmsNorm if kind == "rmsnorm" else LayerNorm)(features, eps, self.dtype, self.device)

    def heads(self, heads: int, kv_heads: int) -> tuple[int, int]:
        """All heads: nothing is sharded."""
        return heads, kv_heads

    def stream(self, x: Tensor) -> Tensor:
        """All of x: the residual stream has all rows."""
        return x

    def logits(self, hidden: Tensor, weight: Tensor, vocab: int) -> Tensor:
        """Make hidden [t, h] -> [t, V]."""
        return F.linear(hidden, weight)

    def core_attention(self, heads: int, kv_heads: int, head_dim: int) -> Callable[[Tensor, Tensor, Tensor, PackedTokens, Placement], Tensor]:
        """Make q [t, H, d], k and v [t, G, d] -> [t, H, d]; the sizes are those of the tensors."""

        def core(q: Tensor, k: Tensor, v: Tensor, batch: PackedTokens, placement: Placement) -> Tensor:
            where = cast(Where, placement)  # the model need not know of groups
            if where.cp > 1:
                return attention(q, k, v, batch, where)
            return cuda_attention(q, k, v, batch) if q.is_cuda else cpu_attention(q, k, v, batch)

        return core

    def loss(self, chunk: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Make hidden [t, h], weight [V, h], labels [t] -> scalar sum of token losses."""
        return lambda hidden, weight, labels: chunked_cross_entropy(hidden, weight, labels, chunk)

    def recompute(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Run function now and again in the backward. Stops there at the last tensor needed; works without inputs that need gradients."""
        if not torch.is_grad_enabled():
            return function(*inputs)
        out: Tensor = torch.utils.checkpoint.checkpoint(
            function, *inputs, use_reentrant=False, preserve_rng_state=False, determinism_check="none", early_stop=True
        )
        return out

    def remake(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """The same: recompute stops before the product of the linear at the end, because no tensor after that is needed."""
        return self.recompute(function, *inputs)

    def optimizer(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> torch.optim.Optimizer:
        """Make a fused AdamW, apex's where it is and can, else torch's; each group carries its weight_decay."""
        if apex_backend.takes(groups) and apex_backend.probe().adam:
            return apex_backend.fused_adamw(groups, lr, betas, eps)
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
