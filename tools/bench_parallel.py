"""What each kind of parallelism costs against one process, per token: `python tools/benchmark.py parallel [--quick] [--size tiny|small]`.

One model, the same packs of the same documents and one optimizer step, in every layout of two ranks, and in one process while the other
rank waits. Layouts take turns within one run, and each is first in its turn. CPU seconds are those of all ranks together, so they show what
a layout adds: messages, copies, smaller matrix products, work done twice. Wall clock is told where there is a core for each rank; with two
ranks half the time of one process is what can be reached (pipelines: more, as the first stage begins alone).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from bench_ranks import CPU, load_average, on_ranks, ratios, rotated, spread, table
from bench_regroup import RandomDocuments
from bench_regroup_plans import arranged, dealt, plan_of
from benchmark import machine

from megadcp.config.load import compose
from megadcp.config.schema import Config, ModelConfig
from megadcp.data.batch import Pack, lane_packs
from megadcp.engine.step import Engine, run_step
from megadcp.mesh.coords import Mesh
from megadcp.mesh.groups import GroupPool
from megadcp.plan.baselines import in_arrival_order
from megadcp.plan.basis import basis_from
from megadcp.plan.step_plan import Recompute, StepPlan
from megadcp.train.state import new_state

ROOT = Path(__file__).resolve().parents[1]
ALONE, WORLD, LR = "one process", 2, 1e-4
SIZES = {
    "tiny": ModelConfig(layers=4, hidden=128, heads=4, kv_heads=4, head_dim=32, ffn=320, vocab=4096, tied=True),  # quickstart's
    "small": ModelConfig(layers=6, hidden=384, heads=6, kv_heads=2, head_dim=64, ffn=1024, vocab=8192, tied=True),
}
TOLERANCE = 1e-4  # relative, of loss and gradient norm in fp32

Line = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """One layout of two ranks (or of one)."""

    tp: int = 1
    pp: int = 1
    lanes: int = 1
    cp: int = 1
    kind: str = ""  # of cp communication

    def config(self, base: Config) -> Config:
        """The run in this layout."""
        parallel = dataclasses.replace(base.parallel, tp=self.tp, pp=self.pp)
        cluster = dataclasses.replace(base.cluster, nodes=1, processes=self.tp * self.pp * self.lanes)
        return dataclasses.replace(base, parallel=parallel, cluster=cluster)

    def plan(self, base: Config, lengths: Sequence[int], capacity: int) -> StepPlan:
        """The packs, in arrival order, dealt round robin."""
        basis = basis_from(self.config(base))
        groups = dealt(in_arrival_order(lengths, capacity), self.lanes // self.cp)
        return plan_of(basis, 0, lengths, arranged(basis, groups, lengths, self.cp, Recompute(), self.kind), "fixed")


WAYS = {
    ALONE: Way(),
    "tp 2": Way(tp=2),
    "pp 2": Way(pp=2),
    "2 lanes": Way(lanes=2),
    "cp 2, ring": Way(lanes=2, cp=2, kind="ring"),
    "cp 2, all_gather": Way(lanes=2, cp=2, kind="all_gather"),
    "cp 2, ulysses": Way(lanes=2, cp=2, kind="ulysses"),
}


@dataclass(frozen=True)
class Taken:
    """One step on one rank: seconds of wall clock and CPU, and what it gave. A rank that only waited took no CPU."""

    wall: float
    cpu: float
    loss: float
    norm: float


def rank_work(rank: int, base: Config, lengths: Sequence[int], capacity: int, turns: int) -> list[tuple[int, str, Taken]]:
    """Every layout, `turns` times after one that does not count (turn -1)."""
    ways = {name: _prepared(way, rank, base, lengths, capacity) for name, way in WAYS.items()}
    found = []
    for turn in range(-1, turns):
        for name in rotated(list(ways), turn + 1):
            dist.barrier()
            found.append((turn, name, ways[name]()))
    return found


def _prepared(way: Way, rank: int, base: Config, lengths: Sequence[int], capacity: int) -> Callable[[], Taken]:
    plan, config = way.plan(base, lengths, capacity), way.config(base)
    if config.cluster.processes == 1 and rank:
        return lambda: Taken(0.0, 0.0, math.nan, math.nan)
    alone = config.cluster.processes == 1
    pool = None if alone else GroupPool(Mesh(way.lanes, way.tp, way.pp), rank, CPU, overlap=True)
    engine = new_state(config, CPU, pool=pool).engine
    source = RandomDocuments({0: lengths}, base.model.vocab)
    packs = lane_packs(source, source.step(0), plan, engine.coords.lane)
    return lambda: _step(engine, plan, packs)


def _step(engine: Engine, plan: StepPlan, packs: list[Pack]) -> Taken:
    begin, cpu = time.perf_counter(), time.process_time()
    result = run_step(engine, plan, packs, LR)
    return Taken(time.perf_counter() - begin, time.process_time() - cpu, result.loss, result.grad_norm)


# -------------------------------------------------------------------------------------------------------------------- figures
def lines_of(ranks: Sequence[list[tuple[int, str, Taken]]], tokens: int) -> list[Line]:
    """One line for each layout and turn. SystemExit if a layout's first step gives another loss or gradient norm than one process."""
    lines, expected = [], {}
    for entries in zip(*ranks, strict=True):
        turn, name, first = entries[0]
        taken = [entry[2] for entry in entries]
        if turn < 0:
            expected[name] = first
            continue
        lines.append({"way": name, "turn": turn, "tokens": tokens, "wall": max(one.wall for one in taken), "cpu": sum(one.cpu for one in taken)})
    alone = expected[ALONE]
    for name, one in expected.items():
        for what, mine, theirs in (("loss", one.loss, alone.loss), ("gradient norm", one.norm, alone.norm)):
            if not abs(mine - theirs) <= TOLERANCE * abs(theirs):
                raise SystemExit(f"{name}: the {what} of the first step is {mine}, in one process {theirs}")
    return lines


def report(size: str, lines: Sequence[Line], notes: Sequence[str]) -> str:
    """The table, as markdown."""
    by = {name: sorted((line for line in lines if line["way"] == name), key=lambda line: int(line["turn"])) for name in WAYS}
    on_wall, rows = (os.cpu_count() or 1) >= WORLD, []
    for name, own in by.items():
        row = [name]
        for what in ("cpu", "wall"):
            if what == "wall" and not on_wall:
                row += ["-", "-"]
                continue
            values = [line[what] for line in own]
            row.append(spread([1e6 * line[what] / line["tokens"] for line in own], 1))
            row.append("-" if name == ALONE else f"**{spread(ratios(values, [line[what] for line in by[ALONE]]), 2)}**")
        rows.append(row)
    head = ["layout", "CPU us a token, all ranks: median (quartiles)", "/ one process", "wall us a token", "/ one process"]
    return f"# Parallelism against one process: {size}\n\n" + "".join(f"{note}  \n" for note in notes) + "\n" + table(head, rows)


def documents(tokens: int, longest: int, seed: int) -> list[int]:
    """Lognormal lengths around a third of the longest, up to the number of tokens."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        length = int(np.clip(rng.lognormal(math.log(longest / 3), 0.8), 2, longest))
        lengths.append(max(2, min(length, tokens - sum(lengths))))
    return lengths


def main(argv: list[str]) -> int:
    """Run all layouts, write lines and report, print the report."""
    parser = argparse.ArgumentParser(prog="benchmark.py parallel", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer turns, the tiny model only; into quick.jsonl and quick.md")
    parser.add_argument("--size", choices=tuple(SIZES), help="the model (both, one after the other)")
    parser.add_argument("--tokens", type=int, default=8192, help="of the step")
    parser.add_argument("--pack", type=int, default=1024, help="tokens of a microbatch, at most")
    parser.add_argument("--max-length", type=int, default=512, help="longest document")
    parser.add_argument("--turns", type=int, default=0, help="turns that count (5; quick: 3)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="of one model; then the stacks of all ranks are shown")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "parallel", help="folder of results and report")
    options = parser.parse_args(argv)
    turns = options.turns or (3 if options.quick else 5)
    sizes = [options.size] if options.size else ["tiny"] if options.quick else list(SIZES)
    lengths = documents(options.tokens, options.max_length, options.seed)
    names = ("quick.jsonl", "quick.md") if options.quick else ("results.jsonl", "report.md")
    every, text = [], ""
    options.out.mkdir(parents=True, exist_ok=True)
    for size in sizes:
        base = compose(["experiment=quickstart"])
        base = dataclasses.replace(base, model=SIZES[size], data=dataclasses.replace(base.data, max_length=options.max_length))
        begin = load_average()
        lines = lines_of(on_ranks(WORLD, rank_work, base, lengths, options.pack, turns, limit_s=options.limit), sum(lengths))
        every += [{"size": size, **line} for line in lines]
        model = base.model
        notes = [
            f"{machine()}, torch {torch.__version__}; {begin} before, {load_average()} after; {turns} turns",
            f"{size}: {model.layers} layers, hidden {model.hidden}, vocabulary {model.vocab:,}, fp32, one thread a rank; a step of {sum(lengths):,} "
            f"tokens in {len(lengths)} documents, microbatches of up to {options.pack:,}",
        ]
        text += report(size, lines, notes) + "\n"
        (options.out / names[0]).write_text("".join(json.dumps(line) + "\n" for line in every), encoding="utf-8")
        (options.out / names[1]).write_text(text.rstrip() + "\n", encoding="utf-8")
    print(text.rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
