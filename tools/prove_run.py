"""STEPS optimizer steps of one case on this rank, in a format and with an optimizer; and how far two such results are apart."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from prove_cases import Case, Plans
from torch import Tensor

from megadcp.backends.torch_backend import TorchBackend
from megadcp.data.batch import lane_packs
from megadcp.engine.step import Engine, run_step
from megadcp.mesh.coords import Mesh
from megadcp.mesh.groups import GroupPool
from megadcp.nn.shard import shard_of
from megadcp.parallel.assemble import weight_pieces, whole_tensors
from megadcp.parallel.gradients import GradientBuffers
from megadcp.plan.step_plan import StepPlan
from megadcp.train.optim import Optimizer
from megadcp.train.state import build_model, weights

CPU = torch.device("cpu")
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
LEARNING_RATES = {"AdamW": 1e-3, "SGD": 0.05}
QUANTITIES = ("loss", "norm", "gradients", "weights")
FLOOR = 1e-3  # of the largest value of all tensors: below it an error counts as if its tensor were that large


class Format(NamedTuple):
    """What is run: number format and optimizer."""

    dtype: str
    optimizer: str

    def __str__(self) -> str:
        return f"{self.dtype} {self.optimizer}"


@dataclass
class Result:
    """What one rank has after the steps. Tensors are whole, and on rank 0 only; `copies` has a hash of every weight that this rank holds."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    gradients: list[dict[str, np.ndarray]] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    copies: dict[tuple[str, Any], str] = field(default_factory=dict)

    @property
    def steps(self) -> tuple[list[float], list[float], list[int], list[str]]:
        """What all ranks must agree on, to the last bit."""
        return self.losses, self.norms, self.targets, self.problems


class SgdBackend(TorchBackend):
    """The reference backend with plain SGD in AdamW's place."""

    def optimizer(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> torch.optim.Optimizer:
        """No momentum, no decay."""
        return torch.optim.SGD([{**group, "weight_decay": 0.0} for group in groups], lr=lr)


def make_engine(case: Case, which: Format, pool: GroupPool | None) -> Engine:
    """The engine of one rank with its share of the model."""
    config, dtype = case.config, DTYPES[which.dtype]
    model = build_model(config, CPU, dtype, pool)
    masters = weights(build_model(config, CPU, torch.float32, pool)) if which.dtype == "bf16" else {}
    gradients = GradientBuffers(model.named_parameters(), pool, config.model.tied, case.bucket)
    backend = SgdBackend(dtype, CPU) if which.optimizer == "SGD" else TorchBackend(dtype, CPU)
    optimizer = Optimizer(model, gradients, backend, config.optim, masters)
    return Engine(model, gradients, optimizer, CPU, config.optim.clip_norm, pool)


def run_steps(case: Case, which: Format, plans: Sequence[StepPlan], pool: GroupPool | None) -> Result:
    """All ranks of the pool call it (None: this process alone)."""
    engine, result, documents = make_engine(case, which, pool), Result(), case.documents
    tied, optimizer = case.config.model.tied, engine.optimizer
    assert isinstance(optimizer, Optimizer)
    for plan in plans:
        packs = lane_packs(documents, documents.step(plan.step), plan, engine.coords.lane)
        one = run_step(engine, plan, packs, LEARNING_RATES[which.optimizer])
        result.losses.append(one.loss)
        result.norms.append(one.grad_norm)
        result.targets.append(one.targets)
        result.problems.append(one.problem)
        result.gradients.append(_arrays(whole_tensors(engine.gradients.pieces(), pool, tied)))
    optimizer.wait()
    pieces = weight_pieces(engine.model)
    result.weights = _arrays(whole_tensors(pieces, pool, tied))
    for piece in pieces:
        shard = shard_of(piece.parameter)
        key = (piece.name, None if shard is None else shard.pieces)
        result.copies[key] = hashlib.sha256(piece.values.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
    engine.gradients.close()
    return result


def _arrays(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.detach().double().numpy().copy() for name, tensor in tensors.items()}


# --------------------------------------------------------------------------------------------------------------- comparing
class Error(NamedTuple):
    """How far a quantity is off, relative, and where it is worst."""

    size: float
    where: str


def errors_of(found: Result, truth: Result) -> dict[str, Error]:
    """The largest error of every quantity over all steps."""
    return {
        "loss": _scalars(found.losses, truth.losses),
        "norm": _scalars(found.norms, truth.norms),
        "gradients": max(
            (_tensors(a, b, f" in step {step}") for step, (a, b) in enumerate(zip(found.gradients, truth.gradients, strict=True))), key=_size
        ),
        "weights": _tensors(found.weights, truth.weights, ""),
    }


def largest(errors: Sequence[Error]) -> Error:
    """The largest; NaN counts as infinite."""
    return max(errors, key=_size)


def _size(error: Error) -> float:
    return math.inf if math.isnan(error.size) else error.size


def _scalars(found: Sequence[float], truth: Sequence[float]) -> Error:
    return largest([Error(_relative(abs(a - b), abs(b)), f"step {step}") for step, (a, b) in enumerate(zip(found, truth, strict=True))])


def _tensors(found: Mapping[str, np.ndarray], truth: Mapping[str, np.ndarray], suffix: str) -> Error:
    """max|a - b| / max(max|b|, FLOOR * largest max|b| of all tensors), of the worst tensor."""
    if {name: each.shape for name, each in found.items()} != {name: each.shape for name, each in truth.items()}:
        return Error(math.inf, f"names or shapes of tensors{suffix}")
    scale = max(float(np.abs(each).max()) for each in truth.values())
    return largest(
        [
            Error(_relative(float(np.abs(found[name] - each).max()), max(float(np.abs(each).max()), FLOOR * scale)), f"{name}{suffix}")
            for name, each in truth.items()
        ]
    )


def _relative(difference: float, size: float) -> float:
    if difference == 0:
        return 0.0
    return difference / size if size > 0 else math.inf


def disagreement(ranks: Sequence[Result]) -> str:
    """What ranks of one run say differently although it must be the same to the last bit; empty when nothing is."""
    for rank, one in enumerate(ranks):
        if repr(one.steps) != repr(ranks[0].steps):  # repr: NaN is NaN
            return f"rank {rank} says {one.steps} of the steps, rank 0 {ranks[0].steps}"
    held: dict[tuple[str, Any], tuple[int, str]] = {}
    for rank, one in enumerate(ranks):
        for key, digest in one.copies.items():
            first, expected = held.setdefault(key, (rank, digest))
            if digest != expected:
                return f"{key[0]} is not the same on ranks {first} and {rank} after the steps"
    return ""


# ------------------------------------------------------------------------------------------------------------------ on ranks
@dataclass(frozen=True)
class Job:
    """What all ranks do with one case: (format, name of the plans), one after the other."""

    case: Case
    plans: Plans
    runs: tuple[tuple[Format, str], ...]


def run_job(rank: int, job: Job) -> list[Result]:
    """One rank's results. Needs torch.distributed in a world of as many ranks as the case has, unless that is one."""
    parallel, cluster = job.case.config.parallel, job.case.config.cluster
    mesh = Mesh(cluster.world // (parallel.tp * parallel.pp), parallel.tp, parallel.pp)
    with GroupPool(mesh, rank, CPU, parallel.max_cp, overlap=True) as pool:
        results = []
        for which, name in job.runs:
            try:
                results.append(run_steps(job.case, which, job.plans[name], pool))
            except Exception as error:
                error.add_note(f"(in case {job.case.number}, {name} plans, {which})")
                raise
        return results
