"""The planner on the grid of docs/plan.md section 7: how near to the bound, how much faster than static layouts, how quick.

`python tools/benchmark.py planner [--quick] [--only model=8b lanes=8,32 preset=wikipedia] [--seeds N] [--time-limit SECONDS]`

Every cell (preset, lanes, tokens per lane, model, maximum length) and seed is one step: the first of a run of eight, by whose lengths
static-fixed is chosen. The plan is verified, then compared with the lower bounds and the baselines of section 5. Times are CPU time of
one core, the least of a few calls. Nothing here needs a GPU; all seconds are predicted with the h200 profile, in bf16.

Results are lines of results.jsonl; a run that was interrupted, or stopped by --time-limit, goes on where it was. Each line names the
planner's version, a hash of its code and settings, and lines of other versions count for nothing. report.md is made from the lines.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench_planner_report as report
from benchmark import machine

from megadcp.config.check import UserError
from megadcp.config.load import compose
from megadcp.config.schema import Config
from megadcp.plan import presets
from megadcp.plan.baseline_megatron import megatron_balanced, scheduler
from megadcp.plan.baselines import FIRST_STEPS, bucket, static_fixed
from megadcp.plan.bound_1f1b import lower_bound_1f1b
from megadcp.plan.planner import Planner, planner_for
from megadcp.plan.verify import verify

ROOT = Path(__file__).resolve().parents[1]
LAYOUTS = (("1b", 1, 1), ("8b", 1, 1), ("70b", 8, 4))  # model, tp, pp
LANES = (8, 32, 128, 1024)
EXTRA = ("8b", 1, 4)  # the pp = 4 targets
EXTRA_LANES = (8, 32)
TOKENS = (16384, 32768, 131072)  # per lane, times pp
MAX_LENGTHS = (131072, 524288)
SIZES = ((1024, 32), (4096, 64), (32768, 1024))  # documents and lanes whose planning time has a target
MEGATRON_LIMIT = 500_000  # documents * lanes up to which megatron-core's scheduler is asked: a few seconds a step
BOUND_1F1B_LANES = 32  # lanes up to which the 1F1B bound is computed: one to two seconds a step
# Modules of megadcp.plan that change no figure here.
BESIDE = ("__init__", "ahead", "figures", "plan_file", "render*", "report", "verify")

Line = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One combination of the grid. tokens: per lane, before pp."""

    model: str
    tp: int
    pp: int
    lanes: int
    tokens: int
    max_length: int
    preset: str

    @property
    def step_tokens(self) -> int:
        """Tokens of a whole step."""
        return self.lanes * self.tokens * self.pp


@dataclass(frozen=True)
class Size:
    """One measurement of planning time: the first `documents` documents of a preset."""

    pp: int
    documents: int
    lanes: int
    preset: str


# ----------------------------------------------------------------------------------------------------------------- what to run
def grid(quick: bool) -> list[Cell]:
    """All cells, those with few tokens first."""
    cells = []
    for max_length in MAX_LENGTHS[:1] if quick else MAX_LENGTHS:
        for tokens in (32768,) if quick else TOKENS:
            for preset in presets.PRESETS:
                wanted = [("8b", 1, 1, lanes) for lanes in EXTRA_LANES] if quick else [(*layout, lanes) for layout in LAYOUTS for lanes in LANES]
                wanted += [(*EXTRA, lanes) for lanes in EXTRA_LANES]
                cells += [Cell(model, tp, pp, lanes, tokens, max_length, preset) for model, tp, pp, lanes in wanted]
    return sorted(cells, key=lambda cell: cell.step_tokens)


def times(quick: bool) -> list[Size]:
    """All measurements of planning time."""
    names = ("wikipedia",) if quick else presets.PRESETS
    return [Size(pp, documents, lanes, preset) for documents, lanes in SIZES for pp in (1, 4) for preset in names]


def chosen(jobs: Sequence[Any], only: Sequence[str]) -> list[Any]:
    """The jobs that agree with filters NAME=VALUE[,VALUE]; a job without a field of that name does not."""
    kept = list(jobs)
    for word in only:
        name, equals, values = word.partition("=")
        known = [field.name for field in dataclasses.fields(Cell)]
        if not equals or name not in known:
            raise UserError(f"--only {word}: must be NAME=VALUE[,VALUE], NAME one of {', '.join(known)}")
        accepted = values.split(",")
        kept = [job for job in kept if str(getattr(job, name, None)) in accepted]
    return kept


# ------------------------------------------------------------------------------------------------------------------ one result
@functools.cache
def settings(model: str) -> Config:
    """A run of this model on H200, as its configuration files have it."""
    return compose([f"model=gpt_{model}", "hardware=h200", "precision=bf16", "run.name=bench_planner"])


@functools.lru_cache(maxsize=16)
def planner(model: str, tp: int, pp: int, lanes: int, max_length: int) -> Planner:
    """The planner of such a run on as many ranks as the lanes need."""
    config = settings(model)
    parallel = dataclasses.replace(config.parallel, tp=tp, pp=pp)
    data = dataclasses.replace(config.data, max_length=max_length)
    cluster = dataclasses.replace(config.cluster, nodes=1, processes=lanes * tp * pp)
    return planner_for(dataclasses.replace(config, parallel=parallel, data=data, cluster=cluster))


def least_ms(call: Callable[[], object], most: int = 3, enough: float = 2.0) -> float:
    """CPU milliseconds of the quickest of up to `most` calls; no further one after `enough` seconds."""
    taken: list[float] = []
    while len(taken) < most and sum(taken) < enough:
        begin = time.process_time()
        call()
        taken.append(time.process_time() - begin)
    return round(min(taken) * 1e3, 3)


def cell_line(cell: Cell, seed: int, peers: bool) -> Line:
    """One step of a cell: seconds of plan, bounds and baselines (None: fits nowhere, or was not asked), CPU milliseconds."""
    steps = presets.steps(cell.preset, cell.step_tokens, cell.max_length, seed, FIRST_STEPS)
    lengths = steps[0]
    line: Line = {**dataclasses.asdict(cell), "seed": seed, "documents": len(lengths)}
    try:
        plan_for = planner(cell.model, cell.tp, cell.pp, cell.lanes, cell.max_length)
        plan = plan_for(0, lengths)
    except UserError as error:
        return {**line, "why": str(error)}
    verify(plan)
    basis, predicted = plan_for.basis, plan.predicted
    makespans = {
        "seconds": predicted.seconds,
        "bound": predicted.lower_bound_seconds,
        "static-best": predicted.static_seconds or math.inf,
        "static-fixed": static_fixed(basis, steps, cell.max_length)[0],
        "bucket": bucket(basis, lengths, cell.max_length),
        "megatron-balanced": math.inf,
        "bound_1f1b": math.inf,
    }
    if peers and cell.pp == 1 and len(lengths) * cell.lanes <= MEGATRON_LIMIT and scheduler() is not None:
        makespans["megatron-balanced"] = megatron_balanced(basis, lengths)
    if cell.pp > 1 and cell.lanes <= BOUND_1F1B_LANES:
        makespans["bound_1f1b"] = lower_bound_1f1b(basis, lengths)
    line.update({name: float(f"{value:.7g}") if math.isfinite(value) else None for name, value in makespans.items()})
    return {**line, "plan_ms": least_ms(lambda: plan_for(0, lengths))}


def time_line(size: Size) -> Line:
    """CPU milliseconds of planning, and of static-best within it, for the 8b model."""
    lengths: list[int] = []
    tokens = size.documents * 1024
    while len(lengths) < size.documents:
        lengths = presets.draw(size.preset, tokens, MAX_LENGTHS[0], 1)
        tokens *= 2
    lengths = lengths[: size.documents]
    plan_for = planner("8b", 1, size.pp, size.lanes, MAX_LENGTHS[0])
    return {**dataclasses.asdict(size), "tokens_per_lane": sum(lengths) // size.lanes, "plan_ms": least_ms(lambda: plan_for(0, lengths), 5, 6.0)}


# -------------------------------------------------------------------------------------------------------------------- versions
def version() -> str:
    """A hash of what the figures depend on: the planner's code (comments and docstrings apart), models and hardware."""
    parts = [repr((settings(model).model, settings(model).hardware)) for model, _, _ in LAYOUTS]
    for path in sorted((ROOT / "megadcp" / "plan").glob("*.py")):
        if not any(path.match(f"{name}.py") for name in BESIDE):
            parts.append(path.name + _bare(path.read_text(encoding="utf-8")))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _bare(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            body.pop(0)
    return ast.dump(tree)


class Results:
    """The lines of one file. Lines of another version are left out, and go when the file is next written in full."""

    def __init__(self, path: Path, version: str) -> None:
        self.path, self.version = path, version
        self.lines: list[Line] = []
        self.stale = 0
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                found = json.loads(line)
            except json.JSONDecodeError:
                continue  # the last line of a run that was cut off
            if found.get("version") == version:
                self.lines.append(found)
            else:
                self.stale += 1

    def add(self, line: Line) -> None:
        """Keep a line, in the file at once."""
        line = {"version": self.version, **line}
        self.lines.append(line)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def write(self) -> None:
        """The whole file, in an order that does not depend on that of the runs."""
        self.lines.sort(key=lambda line: json.dumps([line["kind"], *(line.get(field.name, 0) for field in dataclasses.fields(Cell)), line]))
        text = "".join(json.dumps(line) + "\n" for line in self.lines)
        self.path.with_suffix(".tmp").write_text(text, encoding="utf-8")
        self.path.with_suffix(".tmp").replace(self.path)


# ------------------------------------------------------------------------------------------------------------------------ runs
def jobs_of(options: argparse.Namespace) -> list[tuple[Line, Callable[[], Line]]]:
    """What identifies each result, and how to get it: planning times, then one seed after the other through all cells."""
    jobs: list[tuple[Line, Callable[[], Line]]] = []
    for size in chosen(times(options.quick), options.only):
        jobs.append(({"kind": "time", **dataclasses.asdict(size)}, functools.partial(time_line, size)))
    cells = chosen(grid(options.quick), options.only)
    for seed in range(1, options.seeds + 1):
        for cell in cells:
            jobs.append(({"kind": "step", **dataclasses.asdict(cell), "seed": seed}, functools.partial(cell_line, cell, seed, options.peers)))
    return jobs


def run(jobs: Sequence[tuple[Line, Callable[[], Line]]], results: Results, limit: float) -> int:
    """Do the jobs that have no result yet; returns how many are left when `limit` seconds have passed."""
    done = {_key(line) for line in results.lines}
    todo = [(key, job) for key, job in jobs if _key(key) not in done]
    begin = time.monotonic()
    for number, (key, job) in enumerate(todo):
        if time.monotonic() - begin > limit:
            return len(todo) - number
        line = {"kind": key["kind"], **job()}
        results.add(line)
        print(f"{number + 1}/{len(todo)}  {report.one_line(line)}", flush=True)
    return 0


def _key(line: Line) -> tuple[Any, ...]:
    """What identifies a result."""
    names = [field.name for field in dataclasses.fields(Size if line["kind"] == "time" else Cell)]
    return (line["kind"], *(line[name] for name in names), line.get("seed"))


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmark.py planner", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="36 cells, one seed, in under two minutes; into quick.jsonl and quick.md")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME=VALUE[,VALUE]", help="only cells with these values")
    parser.add_argument("--seeds", type=int, default=0, help="steps per cell (3; quick: 1)")
    parser.add_argument("--time-limit", type=float, default=math.inf, metavar="SECONDS", help="begin nothing new after this time")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="leave megatron-core's scheduler out")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "planner", help="folder of results and report")
    options = parser.parse_args(argv)
    options.seeds = options.seeds or (1 if options.quick else 3)
    return options


def main(argv: list[str]) -> int:
    """Run what is missing, write the report, print its head."""
    options = _arguments(argv)
    try:
        jobs = jobs_of(options)
        if not jobs:
            raise UserError(f"--only {' '.join(options.only)} leaves no cell of the grid")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    names = ("quick.jsonl", "quick.md", "quick_cells.md") if options.quick else ("results.jsonl", "report.md", "cells.md")
    results = Results(options.out / names[0], version())
    if results.stale:
        print(f"{results.stale} results of other versions of the planner or its settings are left out")
    left = run(jobs, results, options.time_limit)
    results.write()
    state = f", {left:,} still to do" if left else ""
    text = report.text(results.lines, [f"{machine()}; planner version {results.version}; {len(results.lines):,} results{state}"])
    (options.out / names[1]).write_text(text, encoding="utf-8")
    (options.out / names[2]).write_text(report.cells(results.lines), encoding="utf-8")
    print("\n" + text.split(report.DETAILS)[0].rstrip())
    if left:
        print(f"\nstopped by --time-limit: {left} results still to do; the same command goes on from here")
    return 0
