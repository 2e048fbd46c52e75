"""The records of a run that never ran: planned by the planner, measured by arithmetic, so that pictures and figures are known."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megadcp.config.run_file import dump_run
from megadcp.config.schema import (
    ClusterConfig,
    Config,
    DataConfig,
    GemmFlops,
    HardwareConfig,
    ModelConfig,
    ParallelConfig,
    PlanConfig,
    PrecisionConfig,
    RunConfig,
    SourceConfig,
)
from megadcp.plan.plan_file import PlanWriter
from megadcp.plan.planner import planner_for
from megadcp.plan.presets import draw
from megadcp.plan.simulate import simulate
from megadcp.plan.step_plan import StepPlan
from megadcp.train import timeline as record
from megadcp.train.incidents import add_incident

ROOT = Path(__file__).resolve().parents[2]
H200 = HardwareConfig(
    "h200", GemmFlops(50e12, 480e12, 720e12), 512, 384e12, 600, 370e9, 45e9, 10e-6, 15e-6, 200e-6, 0.5, 141e9, 0.90, 4096, 8, 300e9, 0.7, 4e12, 989e12
)  # fmt: skip
MODEL = ModelConfig(layers=8, hidden=2048, heads=16, kv_heads=8, head_dim=128, ffn=5632, vocab=32000)
SLOWER = 1.25  # measured / planned


def config_of(lanes: int = 4, pp: int = 1, steps: int = 12, name: str = "records") -> Config:
    return Config(
        run=RunConfig(name=name, steps=steps),
        model=MODEL,
        data=DataConfig(train=(SourceConfig("corpus"),), max_length=32768, tokens_per_step=32768 * lanes),
        parallel=ParallelConfig(pp=pp),
        plan=PlanConfig(),
        precision=PrecisionConfig("bf16"),
        cluster=ClusterConfig(name="made up", processes=lanes * pp),
        hardware=H200,
    )


def actions_of(plan: StepPlan, slower: float = SLOWER, late: float = 0.0) -> list[list[tuple[int, str, int, float, float]]]:
    """What ranks would measure that run the plan `slower` times as long as simulated; the last rank begins all actions later."""
    layout = plan.layout
    ranks: list[list[tuple[int, str, int, float, float]]] = [[] for _ in range(layout.pp * layout.lanes)]
    for event in simulate(plan).events:
        one = plan.microbatches[event.microbatch]
        middle = event.begin + (event.end - event.begin) / 3
        parts = [("F", event.begin, middle), ("B", middle, event.end)] if event.kind == "FB" else [(event.kind, event.begin, event.end)]
        for lane in range(one.lane, one.lane + one.cp):
            rank = event.stage * layout.lanes + lane
            shift = late if rank == len(ranks) - 1 else 0.0
            ranks[rank] += [(one.slot, kind, event.chunk, slower * begin + shift, slower * end) for kind, begin, end in parts]
    return ranks


def row_of(plan: StepPlan, step: int, setup: Config) -> dict[str, Any]:
    """A row of metrics.jsonl."""
    tokens, predicted = sum(plan.lengths), plan.predicted
    measured = SLOWER * predicted.seconds
    cp: dict[str, int] = {}
    levels: dict[str, int] = {}
    for one in plan.microbatches:
        cp[str(one.cp)] = cp.get(str(one.cp), 0) + 1
        levels[one.recompute.level] = levels.get(one.recompute.level, 0) + 1
    return {
        "step": step, "tokens": tokens * step, "documents": len(plan.lengths) * step, "loss": 2 + 8 * math.exp(-step / 5), "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens_per_second": tokens / measured, "padded_share": 0.01, "tflops": 400.0, "mfu": 0.4, "memory_bytes": 100_000_000_000 + step * 10**8,
        "data_seconds": 0.002, "plan_seconds": 0.003, "wait_seconds": 0.0, "predicted_seconds": predicted.seconds, "measured_seconds": measured,
        "bubble": 0.05, "bound_ratio": predicted.seconds / predicted.lower_bound_seconds, "static_gain": predicted.static_seconds / predicted.seconds,
        "slowest_lane": 1, "slowest_seconds": measured, "update_seconds": 0.01, "seconds": measured + 0.02, "targets": tokens, "cp": cp,
        "microbatches": len(plan.microbatches), "recompute": levels, "measured": [], "skipped": False, "lane_ratios": [1.25, 1.3, 1.2, 1.25],
    }  # fmt: skip


def make_run(folder: Path, lanes: int = 4, pp: int = 1, steps: int = 12, preset: str = "web") -> Config:
    """A run folder of `steps` steps; every third is recorded in timeline.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    setup = config_of(lanes, pp, steps, folder.name)
    dump_run(setup, folder / "run.yaml")
    planner = planner_for(setup)
    with PlanWriter(folder / "plans.jsonl") as writer, open(folder / "metrics.jsonl", "w", encoding="utf-8") as metrics:
        for step in range(1, steps + 1):
            plan = planner(step - 1, draw(preset, setup.data.tokens_per_step, setup.data.max_length, 1, step))
            writer.append(plan)
            metrics.write(json.dumps(row_of(plan, step, setup)) + "\n")
            if step % 3 == 0:
                record.add_timeline(folder, step, plan, actions_of(plan))
            if step % 4 == 0:
                metrics.write(
                    json.dumps({"step": step, "validation_loss": 3 + 7 * math.exp(-step / 5), "name": "books", "targets": 9, "seconds": 1.0}) + "\n"
                )
    for step in (4, 8, 12):
        place = folder / "checkpoints" / f"step-{step:08}"
        place.mkdir(parents=True)
        (place / "meta.json").write_text(json.dumps({"step": step, "tokens": step * 1000}))
        (place / "weights.bin").write_bytes(bytes(5000))
    (folder / "latest").write_text("checkpoints/step-00000012")
    add_incident(folder, "straggler", 7, "lane 1 is slow: <b>the same work</b> takes 1.30 times as long there", lane=1, factor=1.3)
    add_incident(folder, "restart", 9, "rank 3 ran out of memory")
    return setup


def tool(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A program of tools/, as it is when it is called from there."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def changed(plan: StepPlan, **values: Any) -> StepPlan:
    return dataclasses.replace(plan, **values)
