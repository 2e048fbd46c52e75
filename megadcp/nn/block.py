"""One transformer layer, and what of it is recomputed.

Levels: none keeps everything; selective makes the norms' outputs and the MLP's product again; mlp makes the second norm and the MLP
again; full makes the layer again from its input. What each keeps is in docs/plan.md section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from megadcp.config.schema import ModelConfig
from megadcp.nn.attention import Attention
from megadcp.nn.backend import Backend, PackedTokens, Placement
from megadcp.nn.dropout import dropout
from megadcp.nn.mlp import Mlp


@dataclass(frozen=True)
class Run:
    """What every layer of one forward shares; captured by recompute, so the backward sees the forward's own values.

    rope: cos and sin, each [t, 1, d / 2], or None with learned positions. rows: dropout's row keys int32 [t], or None without dropout.
    """

    batch: PackedTokens
    placement: Placement
    rope: tuple[Tensor, Tensor] | None
    rows: Tensor | None


class Block(nn.Module):
    """x [t, h] -> [t, h]: pre-norm attention and MLP on a residual stream."""

    def __init__(self, config: ModelConfig, backend: Backend, index: int):
        super().__init__()
        self.sites = (1 + 2 * index, 2 + 2 * index)
        self.probability = config.residual_dropout
        self.recompute = backend.recompute
        self.attention_norm = backend.norm(config.norm, config.hidden, config.norm_eps)
        self.attention = Attention(config, backend)
        self.mlp_norm = backend.norm(config.norm, config.hidden, config.norm_eps)
        self.mlp = Mlp(config, backend)

    def forward(self, x: Tensor, run: Run, level: str) -> Tensor:
        """One layer at one recompute level; all levels give the same bits."""
        if level == "full":
            return self.recompute(lambda x: self._plain(x, run), x)
        if level == "selective":
            return self._selective(x, run)
        x = self._attention(x, run)
        if level == "mlp":
            return x + dropout(self.recompute(self._mlp, x), run.rows, self.sites[1], self.probability)
        return x + dropout(self._mlp(x), run.rows, self.sites[1], self.probability)

    def _plain(self, x: Tensor, run: Run) -> Tensor:
        x = self._attention(x, run)
        return x + dropout(self._mlp(x), run.rows, self.sites[1], self.probability)

    def _attention(self, x: Tensor, run: Run) -> Tensor:
        branch = self.attention.attend(self._qkv(x), run.rope, run.batch, run.placement)
        return x + dropout(branch, run.rows, self.sites[0], self.probability)

    def _qkv(self, x: Tensor) -> Tensor:
        return self.attention.qkv(self.attention_norm(x))

    def _up(self, x: Tensor) -> Tensor:
        return self.mlp.up(self.mlp_norm(x))

    def _mlp(self, x: Tensor) -> Tensor:
        return self.mlp.project(self._up(x))

    def _selective(self, x: Tensor, run: Run) -> Tensor:
        """A recomputed piece ends in a linear layer whose own product is not made again: recompute stops at the last tensor needed."""
        branch = self.attention.attend(self.recompute(self._qkv, x), run.rope, run.batch, run.placement)
        x = x + dropout(branch, run.rows, self.sites[0], self.probability)
        branch = self.recompute(self.mlp.project, self.recompute(self._up, x))
        return x + dropout(branch, run.rows, self.sites[1], self.probability)
