"""Recompute level `selective` on Transformer Engine: what a linear reads is made again in the backward, its product is not.

Its recompute runs a whole piece again, and its linears keep what they read only after their product is made: recomputing
norm + linear, or gated product + linear, would multiply again and cost a third of the layer. So the linear runs as it is, but of what it
saves for its backward, its own input is left out. When the backward asks for it, the piece runs again up to the linear.

A linear that saves a copy instead of its input keeps it: then memory is not saved, but nothing is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Piece = Callable[[], Tensor]


class _Reached(Exception):
    """Ends a piece at its linear, when only what that reads is wanted."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value


@dataclass(frozen=True)
class _Dropped:
    """Stands for a linear's input among what it has saved."""

    piece: Piece


class Remaking:
    """What the parts of one model share: the piece that runs just now, if any. Set for the time of a call, forward or backward."""

    def __init__(self) -> None:
        self._piece: Piece | None = None
        self._again = False

    @property
    def active(self) -> bool:
        """Whether a piece runs: norms then do their work, and linears run apart from them."""
        return self._piece is not None or self._again

    def run(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """function(*inputs), which ends in `linear`."""
        with self._during(lambda: function(*inputs), False):
            return function(*inputs)

    def linear(self, module: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """module(x), the linear at the end of a piece. `module` makes one product and saves x itself for its backward."""
        if self._again:
            raise _Reached(x)
        piece = self._piece
        assert piece is not None, "a linear runs apart from its norm only inside a piece"
        same = _identity(x)  # not x: the hook outlives the call

        def pack(saved: Tensor) -> Any:
            return _Dropped(piece) if _identity(saved) == same else saved

        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
            return module(x)

    def _unpack(self, kept: Any) -> Tensor:
        if not isinstance(kept, _Dropped):
            tensor: Tensor = kept
            return tensor
        with self._during(None, True), torch.no_grad():
            try:
                kept.piece()
            except _Reached as reached:
                return reached.value
        raise RuntimeError("a piece that is made again did not come to its linear")

    @contextmanager
    def _during(self, piece: Piece | None, again: bool) -> Iterator[None]:
        before = self._piece, self._again
        self._piece, self._again = piece, again
        try:
            yield
        finally:
            self._piece, self._again = before


def _identity(x: Tensor) -> tuple[object, ...]:
    return x.data_ptr(), x.numel(), x.dtype
