"""Every speed claim of the project, measured: `python tools/benchmark.py NAME [options]`. Each prints ratios measured in one run."""

from __future__ import annotations

import importlib
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

NAMES = {
    "preprocess": "raw text to .bin/.idx against the tokenizer alone and against megatron-core's builder",
    "loader": "tokens per second of plan and batch building, without a model",
    "step": "a training step against transformers' model of the same shape in a plain PyTorch loop",
    "regroup": "planned steps against static ones on the same documents, on several ranks of this machine",
    "parallel": "what tp, pp, cp and lanes cost against one process, per token",
    "checkpoint": "saving and loading a training state against torch.save and plain torch.distributed.checkpoint",
    "planner": "plans against lower bounds, static layouts and megatron-core's scheduler; planning time",
}


def interleaved(contestants: dict[str, Callable[[], float | None]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each contestant, run in turn (A B C, A B C, ...) so that drift of the machine hits all alike.

    A contestant may return its own seconds (when set-up must not count); None takes the wall clock of the whole call.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, run in contestants.items():
            begin = time.perf_counter()
            own = run()
            seconds[name].append(own if own is not None else time.perf_counter() - begin)
    return seconds


def ratio_line(label: str, ours: list[float], theirs: list[float]) -> str:
    """`ours / theirs` pair by pair: median and range. Below 1 is faster."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return f"{label}: median {statistics.median(ratios):.3f} (min {ratios[0]:.3f}, max {ratios[-1]:.3f}, {len(ratios)} pairs)"


def machine() -> str:
    """One line on where the figures were taken."""
    import os

    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def commit() -> str:
    """The commit that is measured, and whether tracked files differ from it; "unknown" outside a clone."""
    import subprocess

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    name = git("rev-parse", "--short=12", "HEAD")
    return (name + (" with changes" if git("status", "--porcelain", "--untracked-files=no") else "")) if name else "unknown"


def main() -> int:
    """Dispatch to tools/bench_NAME.py."""
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        print("usage: python tools/benchmark.py NAME [options]\n" + "\n".join(f"  {name:<12} {text}" for name, text in NAMES.items()))
        return 0 if len(sys.argv) == 2 and sys.argv[1] in ("-h", "--help") else 2
    sys.path.insert(0, str(Path(__file__).parent))
    return int(importlib.import_module(f"bench_{sys.argv[1]}").main(sys.argv[2:]) or 0)


if __name__ == "__main__":
    sys.exit(main())
