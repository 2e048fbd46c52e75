"""The reference backend on several tensor-parallel ranks: the same kernels, on each rank's share of the matrices."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megadcp.backends import apex_backend
from megadcp.backends.gpu_probe import too_old_for_fp8
from megadcp.backends.torch_backend import Embedding, TorchBackend
from megadcp.backends.torch_fp8 import product_of
from megadcp.config.check import UserError
from megadcp.mesh.groups import Group
from megadcp.nn import compiled
from megadcp.nn.shard import mark
from megadcp.parallel.product import PLAIN, PlainProduct, Product
from megadcp.parallel.tensor import ColumnLinear, Places, RowLinear, VocabularyEmbedding, local_heads, stream_rows
from megadcp.parallel.tensor_loss import parallel_cross_entropy, whole_logits


def torch_backend(
    dtype: torch.dtype, device: torch.device | str, tp: Group | None = None, sequence_parallel: bool = True, fp8: str = "", bf16_ends: int = 0
) -> TorchBackend:
    """The backend for a group of tensor-parallel ranks; None or a group of one: nothing is sharded.

    fp8: "", fp8_current or fp8_block (torch_fp8.py), with parameters in bf16, of linears in layers but the first and last `bf16_ends`.
    """
    product = _product(dtype, torch.device(device), fp8)
    if tp is None or tp.size == 1:
        return TorchBackend(dtype, device, product, bf16_ends)
    return ShardedBackend(dtype, device, tp, sequence_parallel, product, bf16_ends)


def _product(dtype: torch.dtype, device: torch.device, fp8: str) -> Product:
    if fp8:
        if dtype != torch.bfloat16:
            raise ValueError(f"{fp8} rounds bf16 parameters and activations, not {dtype}")
        reason = too_old_for_fp8(fp8, torch.cuda.get_device_capability(device)) if device.type == "cuda" else ""
        if reason:
            raise UserError(reason)
        return product_of(fp8)
    if dtype == torch.bfloat16 and device.type == "cuda" and apex_backend.probe().wgrad:
        return PlainProduct(apex_backend.add_product())
    return PLAIN


def explain(device: torch.device, fp8: str = "") -> str:
    """What the torch backend runs on, in one line: what a GPU lacks for full speed is named."""
    products = {"fp8_current": "fp8_current through torch._scaled_mm", "fp8_block": "fp8_block, rounded and multiplied in bf16"}
    parts = [f"linears in {products[fp8]}"] if fp8 else []
    if device.type == "cuda":
        lacking = compiled.missing()
        parts.append(f"norm, rope and gated product not compiled, for want of {lacking}" if lacking else "norm, rope and gated product compiled")
        parts.append(apex_backend.probe().message)
    return "; ".join(parts) or "PyTorch's own kernels"


class ShardedBackend(TorchBackend):
    """Makes model parts that hold a share of their matrices. See nn.backend.Backend for what is made."""

    name = "torch"

    def __init__(
        self, dtype: torch.dtype, device: torch.device | str, tp: Group, sequence_parallel: bool, product: Product = PLAIN, plain_ends: int = 0
    ):
        super().__init__(dtype, device, product, plain_ends)
        self.tp, self.sequence_parallel = tp, sequence_parallel

    def linear(
        self, in_features: int, out_features: int, bias: bool, kind: str, parts: tuple[tuple[int, int], ...] = (), norm: nn.Module | None = None
    ) -> nn.Module:
        """Make a column linear (residual stream -> [t, out / T]) or a row linear (back)."""
        sizes, places = (in_features, out_features), Places(self.dtype, self.device, self.product)
        if kind == "column":
            return ColumnLinear(sizes, parts, bias, self.tp, self.sequence_parallel, places)
        if kind == "row":
            return RowLinear(sizes, bias, self.tp, self.sequence_parallel, places)
        raise ValueError(f"a linear of kind {kind!r} is unknown; legal: column, row")

    def embedding(self, rows: int, features: int, kind: str = "vocabulary") -> nn.Module:
        """Make ids [t] -> residual stream, or (positions) a whole table for ids that `stream` has cut."""
        if kind == "vocabulary":
            return VocabularyEmbedding(rows, features, self.tp, self.sequence_parallel, Places(self.dtype, self.device))
        made = Embedding(rows, features, self.dtype, self.device)
        mark(made.weight, partial=self.sequence_parallel)
        return made

    def norm(self, kind: str, features: int, eps: float, stream: bool = True) -> nn.Module:
        """Make a norm; its weights are whole on every rank, their gradients only a part where each rank has other rows or heads."""
        made = super().norm(kind, features, eps)
        for parameter in made.parameters():
            mark(parameter, partial=self.sequence_parallel or not stream)
        return made

    def heads(self, heads: int, kv_heads: int) -> tuple[int, int]:
        """Query and kv heads of one rank."""
        return local_heads(heads, kv_heads, self.tp.size)

    def stream(self, x: Tensor) -> Tensor:
        """The rows of x [t, ..] that this rank's residual stream has."""
        return stream_rows(x, self.tp, self.sequence_parallel)

    def loss(self, chunk: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Make residual stream, weight (this rank's rows), labels [t] -> scalar sum of token losses, equal on all ranks."""
        return lambda hidden, weight, labels: parallel_cross_entropy(hidden, weight, labels, chunk, self.tp, self.sequence_parallel)

    def logits(self, hidden: Tensor, weight: Tensor, vocab: int) -> Tensor:
        """Make residual stream -> [t, V]; not differentiable."""
        return whole_logits(hidden, weight, vocab, self.tp, self.sequence_parallel)
