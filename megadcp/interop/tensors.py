"""Named tensors of which each is read when it is asked for: a model need not fit into memory twice, or once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor


class LazyTensors(Mapping[str, Tensor]):
    """Name -> tensor on the CPU, made at every access. `metas`: the same without values, for shapes and formats."""

    def __init__(self, metas: Mapping[str, Tensor], read: Callable[[str], Tensor]) -> None:
        self.metas = dict(metas)
        self._read = read

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.metas:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.metas)

    def __len__(self) -> int:
        return len(self.metas)

    def cast(self, dtype: torch.dtype) -> LazyTensors:
        """The same in another format."""
        return LazyTensors({name: meta.to(dtype) for name, meta in self.metas.items()}, lambda name: self[name].to(dtype))


def lazy(tensors: Mapping[str, Tensor]) -> LazyTensors:
    """Tensors that are there already."""
    if isinstance(tensors, LazyTensors):
        return tensors
    return LazyTensors({name: tensor.to("meta") for name, tensor in tensors.items()}, lambda name: tensors[name])


def mismatches(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, Tensor], most: int = 5) -> str:
    """What of `found` is missing, too much or of another shape than `expected`, by name; empty when nothing is."""
    problems = []
    missing, extra = [name for name in expected if name not in found], [name for name in found if name not in expected]
    wrong = [
        f"{name} is {list(found[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name].shape) != shape
    ]
    for what, names in (("missing", missing), ("not of this model", extra), ("of another shape", wrong)):
        if names:
            more = f" and {len(names) - most} more" if len(names) > most else ""
            problems.append(f"{what}: {', '.join(names[:most])}{more}")
    return "; ".join(problems)
