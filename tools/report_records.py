"""What tools/report.py knows of a run: everything its folder says, read once. No torch."""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from megadcp.config.check import UserError
from megadcp.config.run_file import load_run
from megadcp.config.schema import Config
from megadcp.plan.plan_file import find_plans, read_plans
from megadcp.plan.step_plan import PlanFormatError, StepPlan
from megadcp.train.incidents import read_incidents
from megadcp.train.metrics import read_metrics

LAST = 50  # steps that "now" is the median of
LAST_PLANS = 200  # whose documents are drawn
ALIVE_SECONDS = 300.0  # since the newest row of a run that may still train

Row = dict[str, Any]


@dataclass(frozen=True)
class Saved:
    """A checkpoint's folder. when: seconds since 1970."""

    name: str
    step: int
    size: int
    when: float
    current: bool


@dataclass(frozen=True)
class Records:
    """A run. steps: rows of steps in order; validations: of validations; plans: the last ones; notes: what could not be read."""

    folder: Path
    config: Config
    steps: list[Row]
    validations: list[Row]
    plans: list[StepPlan]
    checkpoints: list[Saved]
    incidents: list[Row]
    result: Row | None
    when: float
    notes: list[str]

    @property
    def last(self) -> int:
        """Steps done."""
        return int(self.steps[-1]["step"])

    @property
    def state(self) -> str:
        """finished, training, or stopped: by what lies in the folder."""
        if self.result is not None and self.last >= self.config.run.steps:
            return "finished"
        return "training" if time.time() - self.when < ALIVE_SECONDS else "stopped"

    def column(self, key: str) -> list[tuple[float, float]]:
        """(step, value) where a row has a finite number."""
        return [(float(row["step"]), float(row[key])) for row in self.steps if is_number(row.get(key))]

    def ratio(self, above: str, below: str) -> list[tuple[float, float]]:
        """(step, quotient of two columns)."""
        pairs = [(row["step"], row.get(above), row.get(below)) for row in self.steps]
        return [(float(step), one / other) for step, one, other in pairs if is_number(one) and is_number(other) and other]

    def now(self, points: list[tuple[float, float]]) -> float | None:
        """The median of the last steps."""
        return median(value for _, value in points[-LAST:]) if points else None


def is_number(value: Any) -> bool:
    """Finite; true and false are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def read(folder: Path) -> Records:
    """Everything. UserError when the folder is no run, or nothing was trained in it yet."""
    if not folder.is_dir():
        raise UserError(f"{folder} is no run folder; give one, for example runs/quickstart")
    config = load_run(folder)
    rows = read_metrics(folder / "metrics.jsonl")
    steps = [row for row in rows if "validation_loss" not in row]
    if not steps:
        raise UserError(f"{folder} has no step in metrics.jsonl yet; call it again when the first one is done")
    notes: list[str] = []
    return Records(
        folder, config, steps, [row for row in rows if "validation_loss" in row], _plans(folder, notes.append), _checkpoints(folder),
        read_incidents(folder), _result(folder), (folder / "metrics.jsonl").stat().st_mtime, notes,
    )  # fmt: skip


def _plans(folder: Path, say: Callable[[str], None]) -> list[StepPlan]:
    try:
        return list(deque(_readable(read_plans(find_plans(folder), check_hash=False), say), LAST_PLANS))
    except (UserError, OSError) as error:
        say(f"plans are left out: {error}")
        return []


def _readable(plans: Iterable[StepPlan], say: Callable[[str], None]) -> Iterable[StepPlan]:
    """Up to the first that is broken."""
    try:
        yield from plans
    except PlanFormatError as error:
        say(f"plans are shown up to a broken one: {error}")


def _checkpoints(folder: Path) -> list[Saved]:
    found = []
    latest = (folder / "latest").read_text(encoding="utf-8", errors="replace").strip() if (folder / "latest").is_file() else ""
    for path in sorted((folder / "checkpoints").glob("*step-*")):
        meta = path / "meta.json"
        if meta.is_file():
            size = sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
            found.append(Saved(path.name, int(path.name.rsplit("-", 1)[1]), size, meta.stat().st_mtime, latest.endswith(path.name)))
    return sorted(found, key=lambda one: (one.step, one.name))


def _result(folder: Path) -> Row | None:
    try:
        value = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def settings_text(folder: Path) -> str:
    """run.yaml as it stands."""
    return (folder / "run.yaml").read_text(encoding="utf-8", errors="replace").replace(os.linesep, "\n")
