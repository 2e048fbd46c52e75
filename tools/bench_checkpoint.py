"""Saving and loading a training state against torch.save and plain torch.distributed.checkpoint, in one run.

`python tools/benchmark.py checkpoint [--ranks N] [--layers N] [--hidden N] [--precision fp32|bf16] [--repeats N] [--folder PATH]`

The same state (weights, fp32 masters in bf16, both moments of AdamW) of the same model, spread over N lanes; every rank writes what it holds.
In turn, each until everything is on the disk:
- this: checkpoint.async_save=false: also reads the files back, checks them, and gives the checkpoint its name;
- this, async: seconds in which training stands still, and seconds until the checkpoint has its name;
- torch.save: one file of each rank, then fsync; dcp: dcp.save of the same tensors with its own writer and planner (which fsyncs too).
Then loading into a live state: this (with and without checking all checksums), torch.load(weights_only=True) and copies, dcp.load. Files come
from the page cache. At the end training steps with a save in the background against steps without one: what it costs them.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_ranks import CPU, load_average, on_ranks, quartiles, ratios, rotated, spread, table
from bench_step import Batch, make_batch
from benchmark import machine
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from megadcp.config.load import compose
from megadcp.config.schema import Config, ModelConfig
from megadcp.engine.step import run_step
from megadcp.mesh.coords import Mesh
from megadcp.mesh.groups import GroupPool
from megadcp.nn.flops import parameters
from megadcp.train.checkpoint import Saver, open_checkpoint, saved
from megadcp.train.checkpoint_format import key_of
from megadcp.train.checkpoint_write import quiet
from megadcp.train.run_folder import RunFolder
from megadcp.train.state import TrainState, boxes_to_load, new_state

SAVES = ("this", "this, async", "torch.save", "dcp")
LOADS = ("this", "this, unchecked", "torch.load", "dcp")
LR = 1e-3
Figures = dict[str, list[float]]


def settings(options: argparse.Namespace) -> Config:
    """A Llama-like model of the asked size."""
    base = compose(["experiment=quickstart"])
    hidden = options.hidden
    model = ModelConfig(
        layers=options.layers, hidden=hidden, heads=hidden // 64, kv_heads=hidden // 64, head_dim=64, ffn=hidden * 11 // 4, vocab=options.vocab,
        tied=True,
    )  # fmt: skip
    return dataclasses.replace(
        base,
        model=model,
        data=dataclasses.replace(base.data, tokens_per_step=options.tokens, max_length=min(512, options.tokens)),
        precision=dataclasses.replace(base.precision, format=options.precision),
        cluster=dataclasses.replace(base.cluster, processes=options.ranks),
    )


class Bench:
    """One rank's state and the folders that it is saved to."""

    def __init__(self, config: Config, pool: GroupPool | None, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.state: TrainState = new_state(config, CPU, pool=pool)
        self.state.optimizer.make_room(1)
        self.group, self.step = self.state.world, 0
        self.savers = {each: self._saver(each) for each in (True, False)}
        quiet()

    def _saver(self, async_save: bool) -> Saver:
        folder = RunFolder(self.folder / ("async" if async_save else "sync"))
        return Saver(folder, dataclasses.replace(self.config.checkpoint, async_save=async_save, keep_last=1), lambda text: None, self.group)

    def wait_for_all(self) -> None:
        """No rank's clock starts before all are here."""
        if self.group.handle is not None:
            dist.barrier(group=self.group.handle)

    def tensors(self, alone: bool = False) -> dict[str, Tensor]:
        """What this rank writes, for the others. alone: none is a part of a larger tensor, of which torch.save would write all."""
        found = {key_of(box.name, box.offsets): box.values for box in self.state.boxes()}
        return {key: values.clone() if alone and values.untyped_storage().nbytes() > values.nbytes else values for key, values in found.items()}

    # ----------------------------------------------------------------------------------------------------------------- save
    def save(self, name: str) -> tuple[float, float]:
        """(seconds until training may go on, seconds until all is there)."""
        self.step += 1
        plain, path, folder = self.tensors(alone=True), self.folder / f"torch-{self.group.index}.pt", self.folder / "dcp"
        self.wait_for_all()
        if name == "torch.save":
            path.unlink(missing_ok=True)
        elif name == "dcp" and self.group.index == 0:
            shutil.rmtree(folder, ignore_errors=True)
        self.wait_for_all()
        begin = time.perf_counter()
        if name.startswith("this"):
            saver = self.savers[name == "this, async"]
            self.state.progress.step = self.step
            saver.save(self.step, self.state.boxes(), self.state.meta(), self.state.own_meta())
            free = time.perf_counter() - begin
            saver.finish()
        elif name == "torch.save":
            with open(path, "wb") as file:
                torch.save(plain, file)
                file.flush()
                os.fsync(file.fileno())
        else:
            dcp_save(plain, checkpoint_id=folder, no_dist=self.group.size == 1)
        self.wait_for_all()
        end = time.perf_counter() - begin
        return (free if name == "this, async" else end), end

    # ----------------------------------------------------------------------------------------------------------------- load
    def load(self, name: str) -> float:
        """Seconds to fill the live state."""
        wanted = boxes_to_load(self.state.model, self.state.optimizer, self.config.model.tied)
        own = self.tensors()
        self.wait_for_all()
        begin = time.perf_counter()
        if name.startswith("this"):
            path = saved(self.savers[False].run)[-1]
            open_checkpoint(path, self.group, verify=name == "this").read(wanted)
        elif name == "torch.load":
            found = torch.load(self.folder / f"torch-{self.group.index}.pt", weights_only=True)
            for key, values in own.items():
                values.copy_(found[key])
        else:
            dcp_load(own, checkpoint_id=self.folder / "dcp", no_dist=self.group.size == 1)
        self.wait_for_all()
        return time.perf_counter() - begin

    # ---------------------------------------------------------------------------------------------------------------- steps
    def steps(self, batches: list[Batch], with_save: bool) -> float:
        """Seconds of some training steps, the first of which follows a save that has just begun."""
        saver = self.savers[True]
        self.wait_for_all()
        begin = time.perf_counter()
        if with_save:
            self.step += 1
            self.state.progress.step = self.step
            saver.save(self.step, self.state.boxes(), self.state.meta(), self.state.own_meta())
        for batch in batches:
            run_step(self.state.engine, batch.plan, batch.packs, LR)
            saver.poll()
        seconds = time.perf_counter() - begin
        saver.finish()
        return seconds


def measure(rank: int, config: Config, folder: str, repeats: int, steps: int) -> dict[str, Any]:
    """All figures of one rank; steps are timed on one rank only, where nobody waits for others."""
    world = config.cluster.world
    with GroupPool(Mesh(world), rank, CPU) if world > 1 else nullcontext() as pool:
        bench = Bench(config, pool, Path(folder))
        still: Figures = {name: [] for name in SAVES}
        done: Figures = {name: [] for name in SAVES}
        loads: Figures = {name: [] for name in LOADS}
        for turn in range(repeats + 1):  # the first warms up
            for name in rotated(SAVES, turn):
                free, end = bench.save(name)
                if turn:
                    still[name].append(free)
                    done[name].append(end)
            for name in rotated(LOADS, turn):
                seconds = bench.load(name)
                if turn:
                    loads[name].append(seconds)
        beside: Figures = {"without": [], "with": []}
        if world == 1 and steps:
            batches = [make_batch(config, step) for step in range(steps)]
            for turn in range(repeats + 1):
                for name in rotated(tuple(beside), turn):
                    seconds = bench.steps(batches, name == "with")
                    if turn:
                        beside[name].append(seconds / steps)
        return {"still": still, "done": done, "loads": loads, "beside": beside, "bytes": sum(box.nbytes for box in bench.state.boxes())}


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder, or of a file."""
    return folder.stat().st_size if folder.is_file() else sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def report(found: list[dict[str, Any]], folder: Path) -> str:
    """The tables."""
    first = found[0]
    state = sum(each["bytes"] for each in found)
    sizes = {
        "this": size_of(saved(RunFolder(folder / "sync"))[-1]),
        "torch.save": sum(size_of(path) for path in folder.glob("torch-*.pt")),
        "dcp": size_of(folder / "dcp"),
    }
    sizes["this, async"] = sizes["this"]
    rows = []
    for name in SAVES:
        against = [f"{statistics.median(ratios(first['done'][name], first['done'][other])):.2f}" for other in ("torch.save", "dcp")]
        rows.append([name, spread(first["still"][name]), spread(first["done"][name]), *against, f"{sizes[name] / state:.4f}"])
    text = table(["save", "s training stands still", "s until it is there", "/ torch.save", "/ dcp", "bytes / state"], rows)
    rows = []
    for name in LOADS:
        against = [f"{statistics.median(ratios(first['loads'][name], first['loads'][other])):.2f}" for other in ("torch.load", "dcp")]
        rows.append([name, spread(first["loads"][name]), *against])
    text += "\n" + table(["load", "s", "/ torch.load", "/ dcp"], rows)
    beside = first["beside"]
    if beside["without"]:
        extra = [(a - b) / b for a, b in zip(beside["with"], beside["without"], strict=True)]
        low, middle, high = quartiles(extra)
        text += f"\nA step takes {spread(beside['without'])} s without a save, {spread(beside['with'])} s where one begins with the first of "
        text += f"the same steps: {100 * middle:+.1f}% ({100 * low:+.1f}% to {100 * high:+.1f}%)\n"
    return text


def main(argv: list[str]) -> int:
    """Exit code of one call."""
    parser = argparse.ArgumentParser(prog="benchmark.py checkpoint", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512, help="a multiple of 64")
    parser.add_argument("--vocab", type=int, default=16384)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a training step")
    parser.add_argument("--steps", type=int, default=4, help="training steps beside one save; 0 times none")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", default=None, help="where to write (default: a temporary folder)")
    options = parser.parse_args(argv)
    if options.ranks < 1 or options.hidden % 64 or options.repeats < 1:
        print("error: --ranks and --repeats are at least 1, --hidden is a multiple of 64", file=sys.stderr)
        return 2
    config = settings(options)
    folder = Path(tempfile.mkdtemp(prefix="megadcp-bench-", dir=options.folder))
    torch.set_num_threads(1)
    arguments = config, str(folder), options.repeats, options.steps
    try:
        found = on_ranks(options.ranks, measure, *arguments, limit_s=3600) if options.ranks > 1 else [measure(0, *arguments)]
        state = sum(each["bytes"] for each in found)
        print(f"{machine()}, torch {torch.__version__}, {load_average()}")
        print(f"{parameters(config.model):,} parameters, {options.precision}, {state / 1e6:,.0f} MB of state on {options.ranks} ranks of one thread;")
        print(f"{options.repeats} turns; seconds: median (quartiles)\n")
        print(report(found, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0
