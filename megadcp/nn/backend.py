"""The factory that a model is built from, and the two values handed down with each microbatch.

Legend: t tokens of the microbatch on this rank, n documents in it, h hidden, H query heads, G kv heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

IGNORE = -100  # label of a token without target


@dataclass(frozen=True)
class PackedTokens:
    """The tokens of one microbatch, documents back to back. Borders come from `cu_seqlens` only, never from token values.

    tokens, labels, positions: int64 [t]; labels are IGNORE where a token has no target (padding, last token of a document).
    cu_seqlens: int32 [n + 1], document borders including each document's own padding; max_length: its longest stretch.
    document_ids: int64 [n], stable over runs and layouts (keys dropout); real_lengths: int64 [n], tokens without padding.
    cu_seqlens_list, real_lengths_list: the same as Python ints, so that no kernel call waits for the device.
    memo: what kernels have derived of the borders, for the layers after; it goes with the microbatch.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    max_length: int
    document_ids: Tensor
    real_lengths: Tensor
    cu_seqlens_list: tuple[int, ...]
    real_lengths_list: tuple[int, ...]
    memo: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)


class Placement(Protocol):
    """What the model may know of where and how a microbatch runs. `engine.placement` has the real one."""

    @property
    def step(self) -> int:
        """Optimizer step (keys dropout)."""

    @property
    def recompute_level(self) -> str:
        """none, selective, mlp or full."""

    @property
    def recompute_layers(self) -> int:
        """The first so many layers of this stage are recomputed."""


class Backend(Protocol):
    """Makes the parts of a model. One object per run, passed to the model; no process-wide state.

    All sizes asked for are those of the whole model; what a tensor-parallel rank (T of them) holds of it is the backend's affair (shard.py).
    The residual stream, between layers, is [t, h], or [t / T, h] with sequence parallelism: `stream` cuts what belongs to its rows.
    """

    name: str

    def layer(self, index: int, layers: int) -> Backend:
        """Make the backend of one of the model's layers: itself, unless layers differ in precision."""

    def precision(self) -> AbstractContextManager[None]:
        """Entered around the forward of each microbatch on each chunk of the model."""

    def linear(
        self, in_features: int, out_features: int, bias: bool, kind: str, parts: tuple[tuple[int, int], ...] = (), norm: nn.Module | None = None
    ) -> nn.Module:
        """Make x [t, in] -> [t, out].

        kind column: from the residual stream, output sharded over tp; its rows come in `parts`, (rows, unit) each, cut by themselves between
        whole units. kind row: input sharded, back to the residual stream; the bias is added once.
        norm: one that this backend made, whose output goes to this linear and nowhere else. The backend may fuse the two; the norm is still
        called before, and then returns its input as it is.
        """

    def embedding(self, rows: int, features: int, kind: str = "vocabulary") -> nn.Module:
        """Make ids [t] -> residual stream, with a `weight` [rows, features] that may serve as the LM head too.

        kind vocabulary: rows sharded over tp. kind positions: whole on every rank, for ids that `stream` has cut.
        """

    def norm(self, kind: str, features: int, eps: float, stream: bool = True) -> nn.Module:
        """Make x [.., features] -> same shape; kind rmsnorm or layernorm. stream: x is the residual stream, else a rank's own heads."""

    def heads(self, heads: int, kv_heads: int) -> tuple[int, int]:
        """Query and kv heads of one rank: H / T and max(1, G / T)."""

    def stream(self, x: Tensor) -> Tensor:
        """The rows of x [t, ..] that this rank's residual stream has."""

    def core_attention(self, heads: int, kv_heads: int, head_dim: int) -> Callable[[Tensor, Tensor, Tensor, PackedTokens, Placement], Tensor]:
        """Make q [t, H, d], k and v [t, G, d] -> [t, H, d]: causal inside each document, nothing across, padding rows zero."""

    def loss(self, chunk: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Make residual stream, weight [V, h] (this rank's rows), labels [t] -> fp32 scalar: SUM of token losses.

        Never more than `chunk` rows of logits exist at a time. Equal on all tp ranks.
        """

    def logits(self, hidden: Tensor, weight: Tensor, vocab: int) -> Tensor:
        """Make residual stream, weight (this rank's rows) -> [t, V] of the whole vocabulary, on every tp rank."""

    def recompute(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Run function now and again in the backward instead of keeping what it would save."""

    def remake(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Run function, which ends in a linear of this backend, and in the backward what comes before that linear, but not its product."""

    def optimizer(self, groups: list[dict[str, object]], lr: float, betas: tuple[float, float], eps: float) -> torch.optim.Optimizer:
        """AdamW with decoupled weight decay given per group."""
