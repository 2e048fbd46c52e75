"""The evidence in one command: what plans gain, over what, where, why, how sure that is, and where they do not help.

    python tools/evidence.py                     predicted part for at most 90 minutes on two cores, then the report; the same command goes on
    python tools/evidence.py --minutes 6         for at most 6 minutes; what is not done yet is said in the report
    python tools/evidence.py --quick             a small grid, in 5 minutes; into benchmarks/evidence/quick/
    python tools/evidence.py --report            only the report, from what is kept
    python tools/evidence.py losses              the loss curves (300 quickstart steps each; evidence_losses.py), then the report
    python tools/evidence.py chart               only the chart of the README, docs/pictures/gain.svg

Report: benchmarks/EVIDENCE.md, and benchmarks/evidence/evidence.html with pictures. Every result is a line of benchmarks/evidence/cells.jsonl with
the hash of the code that made it and the number of the run it was made in; results of other code are left out and made again. Measured figures
are read from benchmarks/regroup/, benchmarks/evidence/losses.json and benchmarks/gpu/.
"""

from __future__ import annotations

import argparse
import ast
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
TOOLS = Path(__file__).resolve().parent
sys.path[:0] = [path for path in (str(TOOLS), str(TOOLS.parent)) if path not in sys.path]

import bench_planner  # noqa: E402
import evidence_report as report  # noqa: E402
from evidence_cells import Job, Line, jobs, key_of  # noqa: E402
from evidence_children import work  # noqa: E402
from evidence_packs import packs_jobs  # noqa: E402
from evidence_steps import Slow, step_line, study_line  # noqa: E402

ROOT = TOOLS.parent
CODE = {
    "step": ("evidence_cells", "evidence_steps"),
    "ablation": ("evidence_cells", "evidence_steps", "evidence_ablation"),
    "sensitivity": ("evidence_cells", "evidence_steps", "evidence_sensitivity"),
    "packs": ("evidence_cells", "evidence_steps", "evidence_packs"),
}
PACKAGES = ("numpy", "torch", "megatron-core", "transformers")


def versions() -> dict[str, str]:
    """For each kind of result: a hash of the planner's code, its models and hardware, and of the tool's code that computes it."""
    planner = bench_planner.version()
    found = {}
    for kind, modules in CODE.items():
        parts = [planner, *(ast.dump(ast.parse((TOOLS / f"{name}.py").read_text(encoding="utf-8"))) for name in modules)]
        found[kind] = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
    return found


def circumstances(options: argparse.Namespace) -> Line:
    """Where and with what results are made."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = bool(git("status", "--porcelain", "--", "megadcp/plan", "tools/evidence*.py", "tools/bench_planner.py", "configs"))
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return {
        "kind": "run",
        "planner": bench_planner.version(),
        "commit": (git("rev-parse", "--short=12", "HEAD") or "unknown") + (" with changes" if changed else ""),
        "python": platform.python_version(),
        "packages": found,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "begun": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "load": round(os.getloadavg()[0], 1),
        "workers": options.workers,
        "scope": options.scope,
    }


def wanted(scope: str) -> list[Job]:
    """All results of a scope, in the order in which they are made."""
    return [*jobs(scope), *packs_jobs(scope)]


class Kept:
    """cells.jsonl: runs (their circumstances) and results. Results of other code count for nothing and go when the file is written anew."""

    def __init__(self, path: Path) -> None:
        self.path, self.versions = path, versions()
        self.runs: list[Line] = []
        self.lines: list[Line] = []
        self.stale = 0
        for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                continue  # the last line of a run that was cut off
            if line["kind"] == "run":
                self.runs.append(line)
            elif line.get("version") == self.versions[line["kind"]]:
                self.lines.append(line)
            else:
                self.stale += 1

    def begin(self, run: Line) -> None:
        """All further results are of this run. The file is written anew: a line that was cut off must not spoil the next one."""
        self.runs.append({**run, "run": len(self.runs) + 1})
        self.write()

    def add(self, line: Line) -> None:
        """Keep a result, in the file at once."""
        line = {**line, "version": self.versions[line["kind"]], "run": self.runs[-1]["run"]}
        self.lines.append(line)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def write(self) -> None:
        """The whole file, results in an order that does not depend on how they were made."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.lines.sort(key=lambda line: json.dumps(key_of(line)))
        text = "".join(json.dumps(line) + "\n" for line in [*self.runs, *self.lines])
        self.path.with_suffix(".tmp").write_text(text, encoding="utf-8")
        self.path.with_suffix(".tmp").replace(self.path)


# ------------------------------------------------------------------------------------------------------------------ computing
@contextmanager
def alone(folder: Path) -> Iterator[bool]:
    """Whether no other run computes in this folder; none begins as long as this one does."""
    folder.mkdir(parents=True, exist_ok=True)
    place = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(place)


def compute(options: argparse.Namespace, kept: Kept) -> None:
    """Make results that are missing, until the time is over."""
    done, slow = {key_of(line) for line in kept.lines}, Slow()
    for line in kept.lines:
        slow.learn(line)
    todo = [job for job in wanted(options.scope) if key_of(asdict(job)) not in done]
    if not todo:
        return
    kept.begin(circumstances(options))
    begin = time.monotonic()
    count = 0

    def take(line: Line) -> None:
        nonlocal count
        count += 1
        slow.learn(line)
        kept.add(line)
        if count % options.every == 0 or count == len(todo):
            print(f"{count:,} of {len(todo):,} results, {(time.monotonic() - begin) / 60:.1f} min", flush=True)

    def generators() -> Iterator[Any]:
        for job in todo:
            yield (step_line if job.kind == "step" else study_line)(job, _named(job), slow)

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        work(generators(), options.workers, take, begin + 60 * options.minutes)
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    kept.runs[-1]["minutes"] = round((time.monotonic() - begin) / 60, 1)
    kept.runs[-1]["results"] = count
    kept.write()


def _named(job: Job) -> Line:
    return {**asdict(job), "lanes": job.lanes}


# ------------------------------------------------------------------------------------------------------------------------ main
def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Take the command line apart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=("predicted", "losses", "chart"), default="predicted", help="predicted (default), losses or chart")
    parser.add_argument("--minutes", type=float, help="begin nothing new after this time (90; quick: 5)")
    parser.add_argument("--workers", type=int, default=2, help="processes that compute (2)")
    parser.add_argument("--quick", dest="scope", action="store_const", const="quick", default="full", help="a small grid, in 5 minutes")
    parser.add_argument("--smoke", dest="scope", action="store_const", const="smoke", help="a handful of tiny cells, in seconds: tries the tool")
    parser.add_argument("--report", action="store_true", help="compute nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks", help="folder of the report (benchmarks)")
    parser.add_argument(
        "--chart", type=Path, default=ROOT / "docs" / "pictures" / "gain.svg", help="the README's chart, drawn from the full grid only"
    )
    parser.add_argument("--every", type=int, default=50, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.minutes = (90.0 if options.scope == "full" else 5.0) if options.minutes is None else options.minutes
    if options.minutes < 0 or options.workers < 1:
        parser.error(f"--minutes {options.minutes:g} --workers {options.workers}: minutes must be at least 0, workers at least 1")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Compute what is missing, write the report, say where it is."""
    options = parse(argv)
    folder = options.out / "evidence"
    small = folder / options.scope
    kept = Kept((folder if options.scope == "full" else small) / "cells.jsonl")
    if options.part == "losses":
        import evidence_losses  # torch, and minutes of training

        evidence_losses.record(folder / "losses.json")
    elif options.part == "predicted" and not options.report:
        if kept.stale:
            print(f"{kept.stale:,} results of other code are left out")
        with alone(kept.path.parent) as free:
            if not free:
                print(f"error: another run computes in {kept.path.parent}; wait for it, or choose another --out", file=sys.stderr)
                return 2
            kept = Kept(kept.path)  # another run may have ended just now
            compute(options, kept)
    if options.scope == "full":
        drawn = report.write_chart(kept.lines, options.chart)
        print(f"wrote {options.chart}" if drawn else "no chart: there is no result of 8b on 32 GPUs yet")
        if options.part == "chart":
            return 0 if drawn else 1
    places = (options.out / "EVIDENCE.md", folder / "evidence.html") if options.scope == "full" else (small / "EVIDENCE.md", small / "evidence.html")
    report.write(report.Evidence(kept.runs, kept.lines, wanted(options.scope), options.out), *places)
    for place in places:
        print(f"wrote {place}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
