"""Counts what makes the host wait for a GPU, on a CPU where nothing waits: calls that read a tensor's values, and copies from pageable memory."""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

READS = (
    "item", "tolist", "cpu", "numpy", "nonzero", "is_nonzero", "equal", "allclose", "masked_select", "unique", "argwhere",
    "__bool__", "__int__", "__float__", "__index__", "__contains__", "__array__",
)  # fmt: skip
MAKES = ("tensor", "as_tensor", "from_numpy")  # of torch, and new_tensor: they copy values to the device from memory that is not pinned
OPERATORS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "argwhere")


class HostWaits(TorchDispatchMode):
    """Used as a context: `found` counts by place in the code. It patches the tensor class, and sees the operators that C++ calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self._undo = contextlib.ExitStack()

    def note(self, what: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if "/megadcp/" in frame.filename and "site-packages" not in frame.filename]
        place = f"{frames[-1].filename.rsplit('/megadcp/', 1)[1]}:{frames[-1].lineno}" if frames else "elsewhere"
        self.found[f"{what} at {place}"] += 1

    def __enter__(self) -> HostWaits:
        for owner, names in ((Tensor, (*READS, "new_tensor")), (torch, MAKES)):
            for name in names:
                if hasattr(owner, name):
                    self._undo.enter_context(_patched(owner, name, self.note))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._undo.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name in OPERATORS or (name in ("index", "index_put_", "_index_put_impl_") and _masks(args[1])):
            self.note(name)
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            self.note("repeat_interleave without a size")
        return func(*args, **kwargs)


@contextlib.contextmanager
def _patched(owner: Any, name: str, note: Callable[[str], None]) -> Iterator[None]:
    before, own = getattr(owner, name), name in vars(owner)

    def noted(*args: Any, **kwargs: Any) -> Any:
        note(name.strip("_"))
        return before(*args, **kwargs)

    setattr(owner, name, noted)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def _masks(index: Any) -> bool:
    if isinstance(index, Tensor):
        return index.dtype in (torch.bool, torch.uint8)
    return isinstance(index, (list, tuple)) and any(_masks(one) for one in index)
