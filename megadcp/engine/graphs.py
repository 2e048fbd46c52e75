"""CUDA graphs for the parts of layers that depend on the number of a microbatch's tokens alone: norm and qkv, norm and MLP.

Launching kernels one by one is what short microbatches wait for. Attention stays outside, because it depends on documents and cp groups; so
do dropout and the residual sums. A graph has memory of its own for what it takes, gives and keeps, so each can be under way once at a time:
one backward for one forward, as without pipelines. That memory is not in the plan's account and stays for good: hence at most so many token
counts, each from its second microbatch on. Layers that are recomputed run as without graphs.

Weight gradients come in the graph's memory too. bf16 parameters' are added to the fp32 sums as they come; fp32 parameters' would stay there
as `grad` and be overwritten by the next microbatch: so graphs are for bf16.

None of this has run on a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megadcp.config.check import UserError
from megadcp.nn.block import Block
from megadcp.nn.gpt import GPT

Make = Callable[[tuple[nn.Module, ...], tuple[tuple[Tensor, ...], ...]], tuple[Any, ...]]


class Piece(nn.Module):
    """One function of a layer, with the modules that it calls, whose parameters belong to its graph."""

    def __init__(self, function: Callable[[Tensor], Tensor], modules: tuple[nn.Module, ...]) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        """The function."""
        return self.function(x)


class Graphs:
    """The graphs of one model. `before` is called before each training forward."""

    def __init__(self, model: GPT, most: int, wait: Callable[[], None], make: Make | None = None) -> None:
        """most: token counts that get graphs. make: `torch.cuda.make_graphed_callables`, or what does the same.

        wait: for parameters that are being gathered. A graph runs no hooks of modules, which would wait for each layer's in turn.
        """
        self.model, self.most, self.wait = model, most, wait
        self.make: Make = make or torch.cuda.make_graphed_callables
        self._seen: Counter[int] = Counter()
        self._blocks: list[Block] = [layer for layer in model.layers.values() if isinstance(layer, Block)]

    @staticmethod
    def of(model: GPT, most: int, device: torch.device, backend: str, wait: Callable[[], None]) -> Graphs | None:
        """None for most=0. UserError where graphs can't be: they are for the torch backend in bf16 on a GPU, its weight gradients plain."""
        if not most:
            return None
        asked = f"parallel.cuda_graphs={most}"
        if device.type != "cuda":
            raise UserError(f"{asked} needs a GPU, but this run is on {device.type}; set parallel.cuda_graphs=0")
        if backend != "torch":
            raise UserError(f"{asked} is for precision.backend=torch, but this run takes {backend}; set one of them")
        if any(hasattr(parameter, "adds_to_main_grad") for parameter in model.parameters()):
            raise UserError(f"{asked} can't be had while kernels add up weight gradients themselves (apex is installed); set parallel.cuda_graphs=0")
        return Graphs(model, most, wait)

    def before(self, tokens: int) -> None:
        """A microbatch of so many tokens is about to run forward: make its graphs if they are due."""
        if not torch.is_grad_enabled() or not self.model.training or not self._blocks:
            return
        self.wait()
        self._seen[tokens] += 1
        made = self._blocks[0].graphs
        if tokens not in made and self._seen[tokens] > 1 and len(made) < self.most:
            self._make(tokens)

    def _make(self, tokens: int) -> None:
        pieces = [
            piece
            for block in self._blocks
            for piece in (
                Piece(block.project, (block.attention_norm, block.attention.qkv)),
                Piece(block.feed_forward, (block.mlp_norm, block.mlp)),
            )
        ]
        like = next(self.model.parameters())
        hidden = self.model.config.hidden
        inputs = [(torch.zeros(tokens, hidden, dtype=like.dtype, device=like.device, requires_grad=True),) for _ in pieces]
        made = self.make(tuple(pieces), tuple(inputs))
        for number, block in enumerate(self._blocks):
            block.graphs[tokens] = (made[2 * number], made[2 * number + 1])
