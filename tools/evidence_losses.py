"""Loss curves of planned and of static training on the same documents: 300 quickstart steps, in fp64 and in fp32, on one and on two ranks.

`python tools/evidence.py losses` writes benchmarks/evidence/losses.json; a run that is in it already is not made again. In fp64 the curves must
be one; in fp32 the quickstart's learning rate lets rounding grow, so static runs that differ in nothing but the order of sums part, too: that
spread is what planned runs are to be held against.
"""

from __future__ import annotations

import json
import platform
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_ranks import CPU, on_ranks

from megadcp.backends.torch_backend import TorchBackend
from megadcp.config.load import compose
from megadcp.config.schema import Config
from megadcp.data.batch import lane_packs
from megadcp.data.order import open_training, open_validation
from megadcp.data.prepare import prepare
from megadcp.engine.step import Engine, run_step
from megadcp.mesh.coords import Mesh
from megadcp.mesh.groups import GroupPool
from megadcp.parallel.buckets import BUCKET_ELEMENTS
from megadcp.parallel.gradients import GradientBuffers
from megadcp.plan.planner import planner_for
from megadcp.plan.step_plan import StepPlan
from megadcp.train.evaluate import evaluate
from megadcp.train.optim import Optimizer
from megadcp.train.schedule import learning_rate
from megadcp.train.state import build_model

STEPS = 300
HELD_OUT = 4096  # tokens, as in tests/dist/test_convergence.py
LIMIT_S = 3600.0
FORMATS = {"fp64": torch.float64, "fp32": torch.float32}


@dataclass(frozen=True)
class Training:
    """One run. shuffle: the packs of every step in another order (0: the planner's)."""

    name: str
    format: str
    ranks: int
    policy: str
    shuffle: int = 0


TRAININGS = (
    Training("fp64, planned, 1 rank", "fp64", 1, "joint"),
    Training("fp64, static, 1 rank", "fp64", 1, "static"),
    Training("fp32, planned, 1 rank", "fp32", 1, "joint"),
    Training("fp32, static, 1 rank", "fp32", 1, "static"),
    Training("fp32, static, other order, 1 rank", "fp32", 1, "static", 1),
    Training("fp32, planned, 2 ranks", "fp32", 2, "joint"),
    Training("fp32, static, 2 ranks", "fp32", 2, "static"),
    Training("fp64, planned, 2 ranks", "fp64", 2, "joint"),
)


def record(path: Path, steps: int = STEPS, trainings: tuple[Training, ...] = TRAININGS) -> None:
    """Make what is missing, writing the file after each run."""
    kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if kept.get("steps") != steps:
        kept = {"steps": steps, "torch": torch.__version__, "machine": platform.machine(), "runs": {}}
    with tempfile.TemporaryDirectory(prefix="losses-") as folder:
        for training in trainings:
            if training.name in kept["runs"]:
                continue
            config = compose(
                [f"data.prepare.folder={folder}", f"run.steps={steps}", f"optim.warmup_steps={min(40, steps)}", f"cluster.processes={training.ranks}"]
            )
            config = replace(config, plan=replace(config.plan, policy=training.policy))
            prepare(config.data, lambda line: None, config.model.vocab)
            begin = time.monotonic()
            losses, held_out = on_ranks(training.ranks, _on_rank, config, training, limit_s=LIMIT_S)[0]
            print(f"{training.name}: held-out loss {held_out:.6f} after {steps} steps, {time.monotonic() - begin:.0f} s", flush=True)
            kept["runs"][training.name] = {"losses": [float(f"{loss:.12g}") for loss in losses], "held_out": held_out}
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(kept), encoding="utf-8")


def _on_rank(rank: int, config: Config, training: Training) -> tuple[list[float], float]:
    dtype = FORMATS[training.format]
    if training.ranks == 1:
        return trained(config, dtype, None, training.shuffle)[:2]
    with GroupPool(Mesh(training.ranks, 1, 1), rank, CPU, timeout_s=int(LIMIT_S), overlap=True) as pool:
        return trained(config, dtype, pool, training.shuffle)[:2]


def trained(
    config: Config, dtype: torch.dtype, pool: GroupPool | None, shuffle: int = 0, bucket: int = BUCKET_ELEMENTS
) -> tuple[list[float], float, list[StepPlan]]:
    """All steps of a run in this process: (mean loss of every step, held-out loss at the end, the plans).

    shuffle: documents and packs of every step in another order; bucket: elements of a gradient bucket.
    """
    model = build_model(config, CPU, dtype, pool)
    gradients = GradientBuffers(model.named_parameters(), pool, config.model.tied, bucket=bucket)
    optimizer = Optimizer(model, gradients, TorchBackend(dtype, CPU), config.optim, {})
    engine = Engine(model, gradients, optimizer, CPU, config.optim.clip_norm, pool)
    source, planner = open_training(config.data, config.run.steps, say=lambda line: None), planner_for(config)
    losses, plans = [], []
    for index in range(config.run.steps):
        documents = source.step(index)
        plan = planner(index, documents.lengths.tolist())
        if shuffle:
            plan = _in_other_order(plan, shuffle)
        packs = lane_packs(source, documents, plan, engine.coords.lane)
        result = run_step(engine, plan, packs, learning_rate(config.optim, index + 1, 0, config.run.steps, 0))
        if not result.updated:
            raise RuntimeError(f"step {index} was not applied: {result.problem}")
        losses.append(result.loss)
        plans.append(plan)
    optimizer.wait()
    held_out, plan_for = open_validation(config.data, say=lambda line: None)[0], planner_for(config)
    loss = evaluate(engine, held_out, lambda found: plan_for(found.step, found.lengths.tolist()), HELD_OUT).loss
    gradients.close()
    return losses, loss, plans


def _in_other_order(plan: StepPlan, seed: int) -> StepPlan:
    """The same packs on the same number of lanes, but in another order, and the documents within each."""
    random = np.random.default_rng([seed, plan.step])
    packs = []
    for one in plan.microbatches:
        order = random.permutation(len(one.documents))
        packs.append(replace(one, documents=tuple(one.documents[i] for i in order), padded=tuple(one.padded[i] for i in order)))
    for cp in {one.cp for one in packs}:
        places = [index for index, one in enumerate(packs) if one.cp == cp]
        moved = [packs[index] for index in random.permutation(places)]
        for index, one in zip(places, moved, strict=True):
            packs[index] = replace(one, slot=plan.microbatches[index].slot, lane=plan.microbatches[index].lane)
    return replace(plan, microbatches=tuple(packs))
