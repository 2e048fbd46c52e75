"""What was measured, as kept: regrouping on local ranks (benchmarks/regroup/), loss curves, one H200 (benchmarks/gpu/). Reads, measures nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Line = dict[str, Any]

DRAWS = 10_000  # of the bootstrap
LEVEL = 0.95
FEWEST = 4  # turns; fewer give a range and no interval
OTHERS = ("static-best", "static-fixed", "bucket")


@dataclass(frozen=True)
class Ratio:
    """Seconds of planned / seconds of another, over turns. interval: of the mean, by bootstrap; None for few turns."""

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

    @property
    def where(self) -> str:
        """The setup in words."""
        return f"{self.preset}, {self.ranks} ranks" + (f" (pp {self.pp})" if self.pp > 1 else "")


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Percentile bootstrap interval of the mean; None for fewer than FEWEST values. Seeded: the same values give the same interval."""
    if len(values) < FEWEST:
        return None
    random = np.random.default_rng(1)
    means = np.asarray(values)[random.integers(0, len(values), (DRAWS, len(values)))].mean(axis=1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


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


def ratios(lines: Sequence[Line]) -> list[Ratio]:
    """One for every setup and contestant, turn by turn, on wall clock where ranks have it to themselves ("timed"), else on CPU seconds, too."""
    found = []
    names = ("kind", "preset", "lanes", "pp")
    for setup in dict.fromkeys(tuple(line[name] for name in names) for line in lines):
        own = [line for line in lines if tuple(line[name] for name in names) == setup]
        planned = {line["turn"]: line for line in own if line["policy"] == "planned"}
        for other in OTHERS:
            turns = {line["turn"]: line for line in own if line["policy"] == other}
            common = sorted(set(planned) & set(turns))
            for of in ("seconds", "cpu_seconds"):
                if not common or of not in planned[common[0]]:
                    continue
                values = [planned[turn][of] / turns[turn][of] for turn in common]
                kind, preset, lanes, pp = setup
                first = common[0]
                error = float(np.mean([planned[turn]["seconds"] / planned[turn]["predicted"] for turn in common])) - 1
                predicted = planned[first]["predicted"] / turns[first]["predicted"]
                spread = (float(np.mean(values)), interval(values), min(values), max(values))
                found.append(Ratio(kind, preset, lanes * pp, pp, other, len(values), *spread, predicted, error, of))
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
