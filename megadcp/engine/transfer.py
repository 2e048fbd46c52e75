"""Microbatches on their way to the device: copied from pinned memory on a stream of their own, one ahead of the one that runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from megadcp.data.batch import Pack
from megadcp.mesh.streams import HERE, Channel, Wait
from megadcp.nn.backend import PackedTokens

WIDE = ("tokens", "labels", "positions", "document_ids", "real_lengths")  # int64; behind them the borders, int32


def to_device(pack: Pack, device: torch.device, channel: Channel = HERE) -> PackedTokens:
    """The pack as tensors, at once. On a CPU they share the arrays' memory."""
    return Transfer(pack, device, channel).get()


class Transfer:
    """One pack under way. On a GPU all its arrays travel in one copy."""

    def __init__(self, pack: Pack, device: torch.device, channel: Channel) -> None:
        self.pack, self._whole = pack, None
        self._waits: list[Wait] = []
        if device.type == "cpu" and channel.stream is None:
            return
        staged = _stage(pack, pinned=device.type == "cuda")
        whole = self._whole = torch.empty(staged.shape, dtype=staged.dtype, device=device)

        def launch(later: bool) -> list[Wait]:
            whole.copy_(staged, non_blocking=True)
            return []

        self._waits = channel.start(launch, [staged, whole])

    def get(self) -> PackedTokens:
        """The tensors; the current stream waits until they are there."""
        for wait in self._waits:
            wait.wait()
        arrays = {name: torch.from_numpy(getattr(self.pack, name)) for name in (*WIDE, "cu_seqlens")} if self._whole is None else self._views()
        pack, lengths = self.pack, tuple(self.pack.real_lengths.tolist())
        return PackedTokens(max_length=pack.max_length, cu_seqlens_list=pack.cu_seqlens_list, real_lengths_list=lengths, **arrays)  # type: ignore[arg-type]

    def _views(self) -> dict[str, Tensor]:
        assert self._whole is not None
        sizes = [len(getattr(self.pack, name)) for name in WIDE]
        *wide, rest = torch.split(self._whole, [*sizes, self._whole.numel() - sum(sizes)])
        return {**dict(zip(WIDE, wide, strict=True)), "cu_seqlens": rest.view(torch.int32)[: len(self.pack.cu_seqlens)]}


def _stage(pack: Pack, pinned: bool) -> Tensor:
    """int64: all arrays one after the other, in memory that a copy engine reads while the host goes on."""
    borders = pack.cu_seqlens.astype(np.int32, copy=False)
    pair = np.zeros(len(borders) + len(borders) % 2, np.int32)
    pair[: len(borders)] = borders
    arrays = [*(getattr(pack, name) for name in WIDE), pair.view(np.int64)]
    staged = torch.empty(sum(len(array) for array in arrays), dtype=torch.int64, pin_memory=pinned)
    np.concatenate(arrays, out=staged.numpy())
    return staged


class Transfers:
    """The packs of a lane in the order in which they are needed first; while one is used, the next one travels."""

    def __init__(self, packs: Mapping[int, Pack], order: Sequence[int], device: torch.device, channel: Channel) -> None:
        """packs: by slot; order: their slots."""
        self._packs, self._left, self._device, self._channel = packs, deque(order), device, channel
        self._coming: dict[int, Transfer] = {}
        self._begin()

    def _begin(self) -> None:
        if self._left:
            slot = self._left.popleft()
            self._coming[slot] = Transfer(self._packs[slot], self._device, self._channel)

    def take(self, slot: int) -> PackedTokens:
        """The tensors of a slot, which is asked for once. KeyError out of order."""
        taken = self._coming.pop(slot).get()
        self._begin()
        return taken
