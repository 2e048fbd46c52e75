"""Training lives of one small model in any layout, from checkpoint to checkpoint, for tests on forked gloo ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from train_helpers import config as base_config

from megadcp.config.schema import Config
from megadcp.data.batch import lane_packs
from megadcp.data.order import open_training
from megadcp.engine.step import run_step
from megadcp.mesh.coords import Mesh
from megadcp.mesh.groups import GroupPool
from megadcp.plan.planner import planner_for
from megadcp.train.checkpoint import Saver, newest
from megadcp.train.run_folder import RunFolder
from megadcp.train.state import TrainState, new_state

CPU = torch.device("cpu")
RATE = 3e-3


@dataclass(frozen=True)
class Layout:
    """tp x pp x lanes, with chunks on each stage."""

    tp: int = 1
    pp: int = 1
    lanes: int = 1
    chunks: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.lanes

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.lanes, self.tp, self.pp)

    def __str__(self) -> str:
        return f"{self.tp}x{self.pp}x{self.lanes}" + (f"v{self.chunks}" if self.chunks > 1 else "")


ONE = Layout()
LAYOUTS = (ONE, Layout(2), Layout(1, 2), Layout(1, 1, 4), Layout(2, 2), Layout(2, 1, 2), Layout(1, 2, 1, 2))
# An odd vocabulary: padded rows with tp=2. One kv head: with tp=2 both ranks hold its rows. 6 rows over 4 lanes: somebody has none.
MODELS: dict[str, dict[str, Any]] = {
    "tied": {"layers": 4, "vocab": 261, "tied": True, "kv_heads": 2, "qk_norm": True},
    "untied": {"layers": 4, "vocab": 259, "tied": False, "kv_heads": 1, "mlp": "gelu", "norm": "layernorm", "qkv_bias": True, "mlp_bias": True},
}


def settings(prefix: str, layout: Layout, model: str = "tied", precision: str = "fp32") -> Config:
    made = base_config(
        prefix, model=MODELS[model], parallel={"tp": layout.tp, "pp": layout.pp, "virtual_stages": layout.chunks},
        cluster={"processes": layout.world}, precision={"format": precision}, run={"steps": 60}, plan={"pack_tokens": 64},
        data={"tokens_per_step": 96, "max_length": 64},
    )  # fmt: skip
    return dataclasses.replace(made, model=dataclasses.replace(made.model, residual_dropout=0.1))


@dataclass
class Life:
    """What one life leaves on one rank. states: copies of boxes after loading and at the end, by (name, offsets)."""

    losses: list[float] = field(default_factory=list)
    loaded: dict[tuple[str, tuple[int, ...]], torch.Tensor] = field(default_factory=dict)
    end: dict[tuple[str, tuple[int, ...]], torch.Tensor] = field(default_factory=dict)


def copies(state: TrainState) -> dict[tuple[str, tuple[int, ...]], torch.Tensor]:
    return {(box.name, box.offsets): box.values.clone() for box in state.boxes()}


def live(setup: Config, pool: GroupPool | None, folder: Path, steps: int, save_at: Sequence[int] = (), load: bool = False) -> Life:
    """Train until `steps` are done; from the newest checkpoint of the folder, or from the start."""
    life, run = Life(), RunFolder(folder)
    state = new_state(setup, CPU, "order", "tokenizer", pool)
    if load:
        found = newest(run, pytest.fail, group=state.world)
        assert found is not None
        state.load(found)
        life.loaded = copies(state)
    saver = Saver(run, setup.checkpoint, lambda text: None, state.world)
    source, planner = open_training(setup.data, setup.run.steps), planner_for(setup)
    for index in range(state.progress.step, steps):
        documents = source.step(index)
        plan = planner(index, documents.lengths.tolist())
        result = run_step(state.engine, plan, lane_packs(source, documents, plan, state.engine.coords.lane), RATE)
        state.progress.step += 1
        life.losses.append(result.loss_sum / result.targets)
        saver.poll()
        if state.progress.step in save_at:
            saver.save(state.progress.step, state.boxes(), state.meta(), state.own_meta())
    saver.finish()
    saver.close()
    life.end = copies(state)
    state.optimizer.wait()
    state.gradients.close()
    return life


def pool_of(layout: Layout, rank: int) -> Any:
    return GroupPool(layout.mesh, rank, CPU, timeout_s=60) if layout.world > 1 else nullcontext()


def assembled(ranks: Sequence[dict[tuple[str, tuple[int, ...]], torch.Tensor]], shapes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole tensors of everybody's boxes."""
    whole = {name: torch.full(tensor.shape, float("nan"), dtype=tensor.dtype) for name, tensor in shapes.items()}
    for each in ranks:
        for (name, offsets), values in each.items():
            whole[name][tuple(slice(low, low + size) for low, size in zip(offsets, values.shape, strict=True))] = values
    return whole
