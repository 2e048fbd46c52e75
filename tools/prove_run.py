"""STEPS optimizer steps of one case on this rank, in a format and with an optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from prove_cases import Case, Plans
from prove_compare import Held, Result

from megadcp.backends.torch_backend import TorchBackend
from megadcp.data.batch import lane_packs
from megadcp.engine.step import Engine, run_step
from megadcp.mesh.coords import Mesh
from megadcp.mesh.groups import GroupPool
from megadcp.nn.shard import shard_of
from megadcp.parallel.assemble import weight_pieces
from megadcp.parallel.gradients import FIRST_TABLE, LAST_TABLE, GradientBuffers
from megadcp.parallel.replicas import Piece
from megadcp.plan.step_plan import StepPlan
from megadcp.train.optim import Optimizer
from megadcp.train.state import build_model, weights

CPU = torch.device("cpu")
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
LEARNING_RATES = {"AdamW": 1e-3, "SGD": 0.05}


class Format(NamedTuple):
    """What is run: number format and optimizer."""

    dtype: str
    optimizer: str

    def __str__(self) -> str:
        return f"{self.dtype} {self.optimizer}"


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
        result.gradients.append(_held(engine.gradients.pieces(), tied))
    optimizer.wait()
    result.weights = _held(weight_pieces(engine.model), tied)
    engine.gradients.close()
    return result


def _held(pieces: Sequence[Piece], tied: bool) -> list[Held]:
    """Copies of what this rank holds. The second copy of a tied table goes by the first one's name."""
    return [
        Held(
            FIRST_TABLE if tied and piece.name == LAST_TABLE else piece.name,
            shard_of(piece.parameter),
            tuple(piece.parameter.shape),
            piece.start,
            piece.values.detach().double().numpy().copy(),
        )
        for piece in pieces
    ]


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
