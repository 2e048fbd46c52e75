"""Bytes of tensors that live at one time on a CPU rank: what a device's allocator would tell, where there is no device.

A dispatch mode sees every storage that an operation makes and when it goes; of those alive the sum is kept, and its maximum.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """As a context: `peak` is the most bytes alive at once of storages made inside, in this thread; views and older storages count nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation; count what it made."""
        kwargs = kwargs or {}
        before = {_address(one) for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        result = func(*args, **kwargs)
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor):
                self._count(one.untyped_storage(), before)
        return result

    def _count(self, storage: torch.UntypedStorage, before: set[int]) -> None:
        address = storage.data_ptr()
        if not address or address in before or address in self._known:
            return
        size = storage.nbytes()
        self._known.add(address)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, address, size).atexit = False

    def _gone(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.now -= size


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
