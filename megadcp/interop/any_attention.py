"""Attention of a microbatch for models that are not ours: as transformers calls it, and as a plain PyTorch model does.

Nothing here remembers a microbatch: it comes with every call, as a keyword argument of the model that transformers hands down to its
attention function, or bound to the callable that a plain model gets. Recompute calls with what the forward was called with.

Legend: t rows of this rank, H query heads, G kv heads, d head dim.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megadcp.backends.torch_sharded import torch_backend
from megadcp.config.check import UserError
from megadcp.engine.placement import Placement
from megadcp.nn.backend import PackedTokens

if TYPE_CHECKING:
    from megadcp.interop.any_model import Microbatch

NAME = "megadcp"  # in transformers' table of attention functions
CALLS = "attention calls"  # in a microbatch's memo
UNSUPPORTED = {
    "softcap": "a soft cap on attention logits",
    "s_aux": "attention sinks",
    "position_bias": "a bias on attention logits",
    "head_mask": "a mask of heads",
}


class Attention:
    """Core attention of one microbatch, for a plain PyTorch model: q [t, H, d], k and v [t, G, d] -> [t, H, d], scaled by d ** -0.5.

    Causal inside each document, nothing across; padding rows come out zero. recompute_layers: so many first layers of the model are run again
    in the backward (any_model does that for the layers it is told of). Under autocast it works in autocast's format. No dataclass: FSDP2's
    mixed precision copies those on their way into a module, and who counts calls must be one.
    """

    def __init__(self, packed: PackedTokens, placement: Placement, microbatch: Microbatch | None = None) -> None:
        self.packed, self.placement, self.microbatch = packed, placement, microbatch

    @property
    def recompute_layers(self) -> int:
        """Layers recomputed, counted from the first."""
        return recomputed(self.placement)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Raises UserError for shapes that no kernel here takes."""
        if q.dim() != 3 or k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1]:
            raise UserError(
                f"attention was asked for with q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; "
                "it takes q [rows, heads, dim] and k, v [rows, kv heads, dim], with one dim for all"
            )
        rows = self.packed.tokens.shape[0]
        if q.shape[0] != rows:
            raise UserError(f"attention was asked for with {q.shape[0]} rows, but the microbatch has {rows} here; the model must keep every row")
        device = q.device.type
        if torch.is_autocast_enabled(device):
            q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
        if not q.dtype == k.dtype == v.dtype:
            raise UserError(f"attention was asked for with q in {q.dtype}, k in {k.dtype}, v in {v.dtype}; it takes one format for all")
        self.packed.memo[CALLS] = self.packed.memo.get(CALLS, 0) + 1
        core = torch_backend(q.dtype, q.device).core_attention(q.shape[1], k.shape[1], q.shape[2])
        with torch.autocast(device, enabled=False):  # inside, fp32 is meant where it is asked for
            return core(q.contiguous(), k.contiguous(), v.contiguous(), self.packed, self.placement)


def recomputed(placement: Placement) -> int:
    """Layers that are recomputed; whatever the level, a layer of a model that is not ours is recomputed whole."""
    return 0 if placement.recompute_level == "none" else placement.recompute_layers


def transformers_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, microbatch: Microbatch | None = None, **more: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What transformers calls: query [1, H, t, d], key [1, G, t, d] and value [1, G, t, e] -> [1, t, H, e].

    Kernels here have one dim for all, so the smaller of d and e is filled up with zeros, which changes no product. Without a microbatch
    (evaluation, generate) it is transformers' own sdpa. UserError: the layer asks for what can't be sharded.
    """
    if microbatch is None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        function = ALL_ATTENTION_FUNCTIONS["sdpa"]
        plain: tuple[Tensor, None] = function(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more)
        return plain
    _refuse(module, query, microbatch, attention_mask, dropout, more)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    own, dim = value.shape[-1], max(query.shape[-1], value.shape[-1])
    query, key, value = (F.pad(x, (0, dim - x.shape[-1])) if x.shape[-1] < dim else x for x in (query, key, value))
    if not math.isclose(scaling, dim**-0.5, rel_tol=1e-9):
        query = query * (scaling / dim**-0.5)
    out = microbatch.attention(query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    return out[..., :own].unsqueeze(0), None


def _refuse(module: nn.Module, query: Tensor, microbatch: Microbatch, mask: Tensor | None, dropout: float, more: dict[str, Any]) -> None:
    where = type(module).__name__
    if mask is not None and mask.numel() > 1:  # what a microbatch comes with has one element
        raise UserError(f"{where} makes an attention mask of its own {tuple(mask.shape)}, which no kind of context parallelism here has")
    for name, what in UNSUPPORTED.items():
        if more.get(name) is not None:
            raise UserError(f"{where} asks for {what} ({name}), which no kind of context parallelism here has; use a model without it")
    if dropout:
        raise UserError(f"{where} asks for attention dropout {dropout:g}: its random numbers would depend on the plan; set it to 0 in the config")
    causal = more.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise UserError(f"{where} is not causal: encoders and cross attention can't be trained with plans here; use a causal decoder")
    window, longest = more.get("sliding_window"), max(microbatch.packed.real_lengths_list)
    if window is not None and longest > window:
        raise UserError(
            f"{where} sees {window} tokens back (sliding_window) and a document has {longest}: no kind of context parallelism here has windows; "
            f"cut documents to {window} tokens, or set sliding_window to None"
        )
    if query.shape[0] != 1:
        raise UserError(f"{where} got a batch of {query.shape[0]} rows; a microbatch is one packed row, so call the model with model(**microbatch)")


def register() -> None:
    """Put the function, which has no state, into transformers' tables. Its masks are sdpa's: only calls without a microbatch need any."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, transformers_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def no_mask(device: torch.device) -> Tensor:
    """A mask of four dims, which transformers takes as it is: it makes none of its own, [t, t] of a whole pack, which nobody would read."""
    return torch.zeros(1, 1, 1, 1, device=device)
