"""What ranks of tools/prove.py bring home, put together, and how far it is from the truth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from megadcp.nn.shard import Shard, put

QUANTITIES = ("loss", "norm", "gradients", "weights")
FLOOR = 1e-3  # of the largest value of all tensors: below it an error counts as if its tensor were that large
Tensors = Mapping[str, np.ndarray]


class Held(NamedTuple):
    """What one rank holds of a tensor: elements from `start` on of its local tensor [local], flattened, in fp64."""

    name: str
    shard: Shard | None
    local: tuple[int, ...]
    start: int
    values: np.ndarray


@dataclass
class Result:
    """What one rank has after the steps: one entry a step, and the weights after the last one. loss is the mean token loss."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    gradients: list[list[Held]] = field(default_factory=list)
    weights: list[Held] = field(default_factory=list)

    @property
    def steps(self) -> tuple[list[float], list[float], list[int], list[str]]:
        """What all ranks must agree on, to the last bit."""
        return self.losses, self.norms, self.targets, self.problems


@dataclass(frozen=True)
class Whole:
    """The results of all ranks put together. different: what they should agree on and don't; empty where they do."""

    losses: list[float]
    norms: list[float]
    targets: list[int]
    problems: list[str]
    gradients: list[Tensors]
    weights: Tensors
    different: str = ""


def together(ranks: Sequence[Result]) -> Whole:
    """Whole tensors from all that the ranks hold; an element that nobody holds is NaN."""
    first, different = ranks[0], ""
    for rank, one in enumerate(ranks):
        if repr(one.steps) != repr(first.steps):  # repr: NaN is NaN
            different = different or f"rank {rank} says {one.steps} of the steps (losses, norms, targets, problems), rank 0 {first.steps}"
    gradients: list[Tensors] = []
    for step in range(len(first.gradients)):
        whole, twice = _join([one.gradients[step] for one in ranks])
        gradients.append(whole)
        different = different or (f"the gradient of {twice} in step {step}" if twice else "")
    weights, twice = _join([one.weights for one in ranks])
    return Whole(*first.steps, gradients, weights, different or twice)


def _join(of_ranks: Sequence[Sequence[Held]]) -> tuple[dict[str, np.ndarray], str]:
    """(whole tensors, which of them is not the same on ranks that hold the same elements)."""
    found: dict[str, np.ndarray] = {}
    different = ""
    for rank, held in enumerate(of_ranks):
        for one in held:
            whole = _spread(one)
            before = found.get(one.name)
            if before is None:
                found[one.name] = whole
                continue
            if not different and bool(((before != whole) & ~np.isnan(before) & ~np.isnan(whole)).any()):
                different = f"{one.name}: rank {rank} holds other values than the ranks before it"
            found[one.name] = np.where(np.isnan(before), whole, before)
    return found, different


def _spread(one: Held) -> np.ndarray:
    """The whole tensor with the rank's elements, NaN elsewhere."""
    values = one.values
    if values.size != math.prod(one.local):
        values = np.full(math.prod(one.local), math.nan)
        values[one.start : one.start + one.values.size] = one.values
    local = values.reshape(one.local)
    if one.shard is None:
        return local
    whole = torch.full(one.shard.shape, math.nan, dtype=torch.float64)
    put(whole, one.shard, torch.from_numpy(local))
    found: np.ndarray = whole.numpy()
    return found


# --------------------------------------------------------------------------------------------------------------- comparing
class Error(NamedTuple):
    """How far a quantity is off, relative, and where it is worst."""

    size: float
    where: str


def errors_of(found: Whole, truth: Whole) -> dict[str, Error]:
    """The largest error of every quantity over all steps."""
    steps = enumerate(zip(found.gradients, truth.gradients, strict=True))
    return {
        "loss": _scalars(found.losses, truth.losses),
        "norm": _scalars(found.norms, truth.norms),
        "gradients": largest([_tensors(a, b, f" in step {step}") for step, (a, b) in steps]),
        "weights": _tensors(found.weights, truth.weights, ""),
    }


def largest(errors: Sequence[Error]) -> Error:
    """The largest; NaN counts as infinite. Of equal ones the first."""
    return max(errors, key=lambda error: math.inf if math.isnan(error.size) else error.size)


def _scalars(found: Sequence[float], truth: Sequence[float]) -> Error:
    return largest([Error(_relative(abs(a - b), abs(b)), f"step {step}") for step, (a, b) in enumerate(zip(found, truth, strict=True))])


def _tensors(found: Tensors, truth: Tensors, suffix: str) -> Error:
    """max|a - b| / max(max|b|, FLOOR * largest max|b| of all tensors), of the worst tensor."""
    if {name: each.shape for name, each in found.items()} != {name: each.shape for name, each in truth.items()}:
        return Error(math.inf, f"names or shapes of tensors{suffix}")
    scale = max(float(np.abs(each).max()) for each in truth.values())
    sizes = {name: max(float(np.abs(each).max()), FLOOR * scale) for name, each in truth.items()}
    return largest([Error(_relative(float(np.abs(found[name] - each).max()), sizes[name]), f"{name}{suffix}") for name, each in truth.items()])


def _relative(difference: float, size: float) -> float:
    if difference == 0:
        return 0.0
    return difference / size if size > 0 else math.inf
