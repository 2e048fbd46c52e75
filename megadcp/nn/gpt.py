"""The GPT: embedding, layers, final norm, LM head with its loss; whole, or the part of one pipeline stage.

Legend: t tokens of the microbatch, h hidden, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megadcp.config.check import UserError
from megadcp.config.schema import ModelConfig
from megadcp.nn.backend import Backend, PackedTokens, Placement
from megadcp.nn.block import Block, Run
from megadcp.nn.dropout import dropout, row_keys
from megadcp.nn.init import initialise
from megadcp.nn.part import Part, recomputed, whole
from megadcp.nn.rope import tables

LEVELS = ("none", "selective", "mlp", "full")


class GPT(nn.Module):
    """A decoder over packed documents, or one pipeline stage's part of it.

    Parameter names, the same in every layout: embedding.weight, positions.weight (learned positions), layers.I.attention_norm,
    layers.I.attention.{qkv,out,q_norm,k_norm}, layers.I.mlp_norm, layers.I.mlp.{up,down}, norm, head.weight (untied; tied: a copy of
    embedding.weight on the last of several stages), each with weight and, where asked for, bias.
    """

    def __init__(self, config: ModelConfig, backend: Backend, seed: int | None, loss_chunk: int, part: Part | None = None):
        """seed: of initial weights and dropout; None leaves the weights unset, for whoever fills them."""
        super().__init__()
        refuse(config)
        self.config, self.seed, self.part = config, seed or 0, part or whole(config.layers)
        first, last = self.part.first, self.part.last
        self.embedding = backend.embedding(config.vocab, config.hidden) if first else None
        self.positions = backend.embedding(config.max_position, config.hidden, "positions") if first and config.position == "learned" else None
        self.layers = nn.ModuleDict({str(index): Block(config, backend.layer(index, config.layers), index) for index in sorted(self.part.layers)})
        self.norm = backend.norm(config.norm, config.hidden, config.norm_eps) if last else None
        self.head = backend.embedding(config.vocab, config.hidden) if last and not (config.tied and first) else None
        self.loss = backend.loss(loss_chunk)
        self._stream, self._logits, self._precision = backend.stream, backend.logits, backend.precision
        if seed is not None:  # it is done on the CPU, whatever the device
            initialise(self, config, seed)

    @property
    def head_weight(self) -> Tensor:
        """[V, h] (this rank's rows): the LM head's matrix, which is the embedding's when tied."""
        table = self.embedding if self.head is None else self.head
        assert table is not None, "only the last stage has an LM head"
        weight: Tensor = table.weight  # type: ignore[assignment]
        return weight

    def forward(self, batch: PackedTokens, placement: Placement) -> Tensor:
        """Scalar: the SUM of the microbatch's token losses, fp32 (fp64 for fp64 models). For a model in one part."""
        return self.loss(self.hidden(batch, placement), self.head_weight, batch.labels)

    def logits(self, batch: PackedTokens, placement: Placement) -> Tensor:
        """[t, V] in the model's format: for generation and comparisons, not for training."""
        return self._logits(self.hidden(batch, placement), self.head_weight, self.config.vocab)

    def hidden(self, batch: PackedTokens, placement: Placement) -> Tensor:
        """Residual stream: the final norm's output, which the LM head reads."""
        x: Tensor | None = None
        for chunk in range(self.part.chunks):
            x = self._layers(chunk, x, batch, placement)
        assert self.norm is not None, "only a model in one part can run from end to end"
        out: Tensor = self.norm(x)
        return out

    def run(self, chunk: int, x: Tensor | None, batch: PackedTokens, placement: Placement) -> Tensor:
        """One chunk of this part: residual stream in (None: embed the tokens), residual stream out, or after the last chunk the loss sum."""
        x = self._layers(chunk, x, batch, placement)
        if self.norm is None or chunk < self.part.chunks - 1:
            return x
        return self.loss(self.norm(x), self.head_weight, batch.labels)

    def _layers(self, chunk: int, x: Tensor | None, batch: PackedTokens, placement: Placement) -> Tensor:
        if placement.recompute_level not in LEVELS:
            raise ValueError(f"recompute level {placement.recompute_level!r} is unknown; legal: {', '.join(LEVELS)}")
        dtype = next(self.parameters()).dtype
        run = self._run(batch, placement, dtype)
        if x is None:
            x = dropout(self._embed(batch), run.rows, 0, self.config.embedding_dropout)
        again = recomputed(placement.recompute_layers, self.part.chunks)
        with self._precision():
            for place, index in enumerate(self.part.chunk_layers[chunk]):
                x = self.layers[str(index)](x, run, placement.recompute_level if place < again else "none")
        return x

    def _run(self, batch: PackedTokens, placement: Placement, dtype: torch.dtype) -> Run:
        config = self.config
        rope = tables(config.rope, config.head_dim, batch.positions, dtype) if config.position == "rope" else None
        drops = self.training and (config.embedding_dropout > 0 or config.residual_dropout > 0)
        return Run(batch, placement, rope, self._stream(row_keys(batch, self.seed, placement.step)) if drops else None)

    def _embed(self, batch: PackedTokens) -> Tensor:
        assert self.embedding is not None, "only the first stage embeds tokens"
        x: Tensor = self.embedding(batch.tokens)
        if self.positions is None:
            return x
        stretches = batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]
        real = torch.repeat_interleave(batch.real_lengths, stretches, output_size=batch.tokens.shape[0])
        # Padding may count past the table's end: it takes row 0 (nothing reads it); a real token there is an index error.
        offset: Tensor = self.positions(self._stream(batch.positions * (batch.positions < real)))
        return x + offset


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Optimizer groups: weight decay on matrices (embeddings among them), none on norms and biases. Frozen parameters are left out."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]


def refuse(config: ModelConfig) -> None:
    """Raise UserError for what no model can be built from; one clear line."""
    if config.attention_dropout > 0:
        raise UserError(
            f"model.attention_dropout={config.attention_dropout} is not supported: fused kernels on packed documents can't key the mask by"
            " (document, position), so results would depend on the packing; use model.residual_dropout and keep attention_dropout=0"
        )
    for name in ("embedding_dropout", "residual_dropout"):
        if not 0 <= getattr(config, name) < 1:
            raise UserError(f"model.{name}={getattr(config, name)} is no probability to drop with; legal: 0 up to but not including 1")
    if config.heads % config.kv_heads:
        legal = ", ".join(str(n) for n in range(1, config.heads + 1) if config.heads % n == 0)
        raise UserError(f"model.kv_heads={config.kv_heads} does not divide model.heads={config.heads}; legal here: {legal}")
    if config.position == "rope" and config.head_dim % 2:
        raise UserError(f"model.head_dim={config.head_dim} is odd, but rope turns features in pairs; take an even number")
    if config.position == "learned" and config.max_position < 1:
        raise UserError(f"model.position=learned needs model.max_position >= 1, got {config.max_position}")
