"""What was measured, as kept: regrouping on local ranks (benchmarks/regroup/), loss curves, one H200 (benchmarks/gpu/). Reads, measures nothing."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Line = dict[str, Any]

# 97.5% points of Student's t by degrees of freedom; the last one also for more, for which it is a little too wide.
STUDENT = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
FEWEST = 4  # turns; fewer give a range and no interval
OTHERS = ("static-best", "static-fixed", "bucket")


@dataclass(frozen=True)
class Ratio:
    """Seconds of planned / seconds of another, over turns. interval: of the mean, Student's t; None for few turns.

    messages: ms a step of planned and of the other without sleeping, where ranks sleep.
    """

    kind: str
    preset: str
    ranks: int
    pp: int
    other: str
    turns: int
    mean: float
    interval: tuple[float, float] | None
    least: float
    most: float
    predicted: float
    error: float  # measured / predicted seconds of planned itself, its mean over the turns, less 1
    of: str  # seconds or cpu_seconds
    messages: tuple[float, float] | None = None

    @property
    def where(self) -> str:
        """The setup in words."""
        return f"{self.preset}, {self.ranks} ranks" + (f" (pp {self.pp})" if self.pp > 1 else "")


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95% interval of the mean of independent values, by Student's t; None for fewer than FEWEST values."""
    if len(values) < FEWEST:
        return None
    mean, error = float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values))
    times = STUDENT[min(len(values) - 1, len(STUDENT) - 1)]
    return mean - times * error, mean + times * error


def regroup_lines(folder: Path) -> tuple[list[Line], str]:
    """Lines that tools/benchmark.py regroup kept, and the file's name; the full run's, or else the quick one's."""
    for name in ("results.jsonl", "quick.jsonl"):
        path = folder / name
        if path.is_file():
            return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()], name
    return [], ""


def regroup_notes(folder: Path, name: str) -> list[str]:
    """What the report beside the lines says of their circumstances."""
    path = folder / {"results.jsonl": "report.md", "quick.jsonl": "quick.md"}[name]
    if not path.is_file():
        return []
    said = path.read_text(encoding="utf-8").split("\n## ")[0].splitlines()
    return [line.strip() for line in said if line.strip() and not line.startswith("#")]


def cores_of(notes: Sequence[str]) -> int:
    """Of the machine that the notes tell of; 0 where they don't."""
    found = re.search(r"(\d+) cores", " ".join(notes))
    return int(found.group(1)) if found else 0


def ratios(lines: Sequence[Line], cores: int = 0) -> list[Ratio]:
    """One for every setup and contestant, turn by turn: of seconds, unless more ranks compute than there are cores, and of CPU seconds.

    cores: of the machine, 0 where that is not known.
    """
    found = []
    names = ("kind", "preset", "lanes", "pp")
    for setup in dict.fromkeys(tuple(line[name] for name in names) for line in lines):
        own = [line for line in lines if tuple(line[name] for name in names) == setup]
        planned = {line["turn"]: line for line in own if line["policy"] == "planned"}
        for other in OTHERS:
            turns = {line["turn"]: line for line in own if line["policy"] == other}
            common = sorted(set(planned) & set(turns))
            for of in ("seconds", "cpu_seconds"):
                crowded = of == "seconds" and "cpu_seconds" in next(iter(planned.values()), {}) and 0 < cores < setup[2] * setup[3]
                if not common or of not in planned[common[0]] or crowded:
                    continue
                values = [planned[turn][of] / turns[turn][of] for turn in common]
                kind, preset, lanes, pp = setup
                first = common[0]
                error = float(np.mean([planned[turn]["seconds"] / planned[turn]["predicted"] for turn in common])) - 1
                predicted = planned[first]["predicted"] / turns[first]["predicted"]
                spread = (float(np.mean(values)), interval(values), min(values), max(values))
                messages = None
                if "without_sleep" in planned[first]:
                    both = ([1e3 * one[turn]["without_sleep"] / one[turn]["steps"] for turn in common] for one in (planned, turns))
                    messages = tuple(float(np.mean(each)) for each in both)
                found.append(Ratio(kind, preset, lanes * pp, pp, other, len(values), *spread, predicted, error, of, messages))
    return found


@dataclass(frozen=True)
class Memory:
    """The most bytes that a rank had alive in a step's own tensors, and the model's activations: of one contestant."""

    preset: str
    ranks: int
    policy: str
    measured: int
    predicted: float


def memory(lines: Sequence[Line]) -> list[Memory]:
    """One for every setup that computes and every contestant."""
    found = {}
    for line in lines:
        if "memory" in line:
            one = Memory(line["preset"], line["lanes"] * line["pp"], line["policy"], line["memory"], line["memory_predicted"])
            found[one.preset, one.ranks, one.policy] = one
    return sorted(found.values(), key=lambda one: (one.preset, one.ranks, ("planned", *OTHERS).index(one.policy)))


def losses(path: Path) -> dict[str, Any]:
    """The kept loss curves: {"steps", "torch", "machine", "runs": {name: {"losses", "held_out"}}}; {} where there are none."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def gpu_reports(folder: Path) -> dict[str, dict[str, Any]]:
    """JSON files of tools/gpu_check.py that were taken on a GPU, by name."""
    found = {}
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError:
            continue
        if isinstance(report, dict):
            found[path.name] = report
    return found
