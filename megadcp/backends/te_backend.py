"""The backend that runs on Transformer Engine: Hopper and newer. Its parts hold the same parameters as the torch backend's.

Linears and the norms before them, core attention, and recompute are Transformer Engine's; embedding, LM head with its chunked loss, dropout,
rope, the MLP's activation, norms of heads and the optimizer are the torch backend's. What each recompute level means here is in
docs/backends.md.

FP8 is for linears alone. Its scales come from the tensors as they are (Float8CurrentScaling, or Float8BlockScaling): delayed scaling keeps
a history that is exchanged at the end of each microbatch's region, so that it hangs where ranks run different numbers of microbatches, and
gives results that depend on what is recomputed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from megadcp.backends.te_attention import TeAttention
from megadcp.backends.te_modules import TeLinear, TeNorm, Tools, wants_gradient
from megadcp.backends.te_probe import Te
from megadcp.backends.te_remake import Remaking
from megadcp.backends.torch_sharded import torch_backend
from megadcp.mesh.groups import Group
from megadcp.nn.backend import PackedTokens, Placement
from megadcp.plan.basis import unit_of

RECIPES = {"fp8_current": "Float8CurrentScaling", "fp8_block": "Float8BlockScaling"}
Core = Callable[[Tensor, Tensor, Tensor, PackedTokens, Placement], Tensor]


class TeBackend:
    """Makes model parts with parameters of `dtype` on `device`, shared by the ranks of `tp`. See nn.backend.Backend for what is made."""

    name = "te"

    def __init__(
        self, te: Te, places: tuple[torch.dtype, torch.device | str], tp: Group | None = None, sequence_parallel: bool = True,
        fp8: str = "", unquantised_ends: int = 0,
    ) -> None:  # fmt: skip
        """places: dtype and device. fp8: one of RECIPES, or nothing for bf16; unquantised_ends: layers at either end that stay in bf16.

        Raises:
            ValueError: an fp8 format that doesn't exist here.
        """
        if fp8 and fp8 not in RECIPES:
            raise ValueError(f"precision.format={fp8} is no recipe of Transformer Engine here; legal: {', '.join(RECIPES)}")
        dtype, device = places[0], torch.device(places[1])
        tp = None if tp is None or tp.size == 1 else tp
        self.dtype, self.device = dtype, device
        self._te, self._fp8, self._ends, self._quantised = te, fp8, unquantised_ends, bool(fp8)
        self._torch = torch_backend(dtype, device, tp, sequence_parallel)
        self._recipe = getattr(te.recipe, RECIPES[fp8])() if fp8 else None
        self._remaking = Remaking()
        self._tools = Tools(te, tp, sequence_parallel, self._remaking, unit_of(fp8) if fp8 else 1, self._unquantised)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    # ------------------------------------------------------------------------------------------------------- precision
    def layer(self, index: int, layers: int) -> TeBackend:
        """Itself, or for a layer at either end one whose linears are not quantised."""
        if not self._fp8 or self._ends <= index < layers - self._ends:
            return self
        other = copy.copy(self)  # shares everything else, the piece that runs among it
        other._quantised = False
        return other

    def precision(self) -> AbstractContextManager[Any]:
        """One region of Transformer Engine's own for each microbatch on each chunk; a new one each time."""
        region: AbstractContextManager[Any] = self._te.pytorch.autocast(enabled=bool(self._fp8), recipe=self._recipe)
        return region

    def _unquantised(self) -> AbstractContextManager[Any]:
        region: AbstractContextManager[Any] = self._te.pytorch.autocast(enabled=False)
        return region

    # ----------------------------------------------------------------------------------------------------------- parts
    def linear(
        self, in_features: int, out_features: int, bias: bool, kind: str, parts: tuple[tuple[int, int], ...] = (), norm: nn.Module | None = None
    ) -> nn.Module:
        """Make a linear, together with `norm` where that is one of this backend's."""
        plain = self._torch.linear(in_features, out_features, bias, kind, parts)
        quantised = self._quantised or not self._fp8  # without fp8 there is nothing to leave
        return TeLinear(kind, plain, self._tools, norm if isinstance(norm, TeNorm) else None, quantised)

    def norm(self, kind: str, features: int, eps: float, stream: bool = True) -> nn.Module:
        """Make a norm of the residual stream; those of heads are the torch backend's."""
        plain = self._torch.norm(kind, features, eps, stream)
        return TeNorm(kind, plain, eps, self._tools) if stream else plain

    def core_attention(self, heads: int, kv_heads: int, head_dim: int) -> Core:
        """Make the attention of one layer."""
        return TeAttention(self._te, (heads, kv_heads, head_dim), self._stream)

    def embedding(self, rows: int, features: int, kind: str = "vocabulary") -> nn.Module:
        """The torch backend's."""
        return self._torch.embedding(rows, features, kind)

    def heads(self, heads: int, kv_heads: int) -> tuple[int, int]:
        """Query and kv heads of one rank."""
        return self._torch.heads(heads, kv_heads)

    def stream(self, x: Tensor) -> Tensor:
        """The rows of x [t, ..] that this rank's residual stream has."""
        return self._torch.stream(x)

    def loss(self, chunk: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """The torch backend's: gradients are made with the loss, chunk by chunk, and whole logits never exist."""
        return self._torch.loss(chunk)

    def logits(self, hidden: Tensor, weight: Tensor, vocab: int) -> Tensor:
        """The torch backend's."""
        return self._torch.logits(hidden, weight, vocab)

    # ------------------------------------------------------------------------------------------------------- recompute
    def recompute(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Run function now and again in the backward, then under the region that it ran under. Never inside another recompute.

        An input without gradient needs the kind that hooks into saved tensors; the other one would give no gradients then.
        """
        out: Tensor = self._te.pytorch.checkpoint(lambda *again: function(*again), *inputs, use_reentrant=wants_gradient(inputs))
        return out

    def remake(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Run function, which ends in a linear, and make again in the backward what that linear reads, but not its product."""
        return self._remaking.run(function, *inputs) if torch.is_grad_enabled() else function(*inputs)

    def optimizer(self, groups: list[dict[str, object]], lr: float, betas: tuple[float, float], eps: float) -> torch.optim.Optimizer:
        """The torch backend's."""
        return self._torch.optimizer(groups, lr, betas, eps)
