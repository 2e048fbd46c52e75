"""One transformer layer, and what of it is recomputed.

Levels: none keeps everything; selective makes the norms' outputs and the MLP's product again; mlp makes the second norm and the MLP
again; full makes the layer again from its input. What each keeps is in docs/plan.md section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from megadcp.config.schema import ModelConfig
from megadcp.nn.attention import Attention
from megadcp.nn.backend import Backend, PackedTokens, Placement
from megadcp.nn.dropout import dropout
from megadcp.nn.mlp import Mlp

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Run:
    """What every layer of one forward shares; captured by recompute, so the backward sees the forward's own values.

    rope: cos and sin, each [t, 1, d / 2], or None with learned positions. rows: dropout's row keys int32, one for each row of the residual
    stream, or None without dropout.
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
        self.recompute, self.remake = backend.recompute, backend.remake
        self.attention_norm = backend.norm(config.norm, config.hidden, config.norm_eps)
        self.attention = Attention(config, backend, self.attention_norm)
        self.mlp_norm = backend.norm(config.norm, config.hidden, config.norm_eps)
        self.mlp = Mlp(config, backend, self.mlp_norm)
        self.graphs: dict[int, tuple[Function, Function]] = {}  # by tokens: `project` and `feed_forward` as engine/graphs.py makes them

    def forward(self, x: Tensor, run: Run, level: str) -> Tensor:
        """One layer at one recompute level; all levels give the same bits."""
        if level == "full":
            return self.recompute(lambda x: self._layer(x, run, "again"), x)
        return self._layer(x, run, level)

    def _layer(self, x: Tensor, run: Run, level: str) -> Tensor:
        project: Function = self.project
        feed_forward: Function = self.feed_forward
        if self.graphs and level == "none" and self.training:
            project, feed_forward = self.graphs.get(x.shape[0], (project, feed_forward))
        qkv = self.remake(project, x) if level == "selective" else project(x)
        branch = self.attention.attend(qkv, run.rope, run.batch, run.placement)
        x = x + dropout(branch, run.rows, self.sites[0], self.probability)
        out = self._mlp_at(level, x) if level in ("selective", "mlp") else feed_forward(x)
        return x + dropout(out, run.rows, self.sites[1], self.probability)

    def _mlp_at(self, level: str, x: Tensor) -> Tensor:
        if level == "selective":
            return self.remake(self.mlp.project, self.remake(self._up, x))
        return self.recompute(self.feed_forward, x)

    def project(self, x: Tensor) -> Tensor:
        """Queries, keys and values of a residual stream."""
        out: Tensor = self.attention.qkv(self.attention_norm(x))
        return out

    def _up(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp.up(self.mlp_norm(x))
        return out

    def feed_forward(self, x: Tensor) -> Tensor:
        """The MLP's branch of a residual stream."""
        return self.mlp.project(self._up(x))
