"""metrics.jsonl: one JSON object a line. A row of a step has the step's measures, a row of a validation has `validation_loss`.

Keys of a step's row, with units (docs and outside tools rely on them):
  step              steps done, so 1 for the first; its plan in plans.jsonl has the number before (plans count from 0)
  tokens, documents real tokens and documents of the whole run so far
  loss              mean token loss of the step's global batch, nats; grad_norm: global norm before clipping; lr: the rate it was applied with
  tokens_per_second real tokens of the step / `seconds`; padded_share: padding / all tokens run
  tflops, mfu       model FLOPs of one rank (real lengths, no recompute) / `seconds`, in 1e12; their share of the peak, null when none is known
  memory_bytes      the largest of all ranks'. GPU: largest allocation during the step; CPU: resident set of the process after a forward
  data_seconds      waited for data, plan included, the longest of all ranks'; wait_seconds: of the first rank, while the plan was not ready
  plan_seconds      planning, in the background
  predicted_seconds, measured_seconds   forward and backward of all microbatches, measured from the first action's begin to the last one's end
                    on the rank where that took longest; update_seconds: clip and optimizer
  bubble            share of all ranks' time in measured_seconds in which they ran no action; waiting for messages inside one counts as running
  bound_ratio       predicted / lower bound that no plan can beat; static_gain: seconds of the best static layout / predicted. null: not known
  slowest_lane, slowest_seconds   the lane one of whose ranks was busy longest with its actions, and how long
  seconds           from the end of the step before to the end of this one, without saving and validating
  targets           tokens whose loss counts; skipped: true when the step was not applied, then `problem` says why
  microbatches, cp, recompute   their number, and how many of them in groups of each size, at each recompute level
  lane_ratios       with several lanes: measured / predicted seconds of each lane's own microbatches, null where it had none
  measured          [slot, seconds, bytes] of the first rank's microbatches; what was predicted stands in plans.jsonl
A validation's row: step, validation_loss, name, targets, seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from megadcp.train.run_folder import finite, write_text


class Metrics(Protocol):
    """Where rows go. validated: (step, set) of the validations that have a row."""

    validated: set[tuple[int, str]]

    def write(self, row: dict[str, Any]) -> None:
        """Keep a row."""

    def sync(self) -> None:
        """Put what was written on the disk."""

    def close(self) -> None:
        """Close it."""


class NoMetrics:
    """Of several ranks only the first one writes; the others know which validations have a row, so that all validate together."""

    def __init__(self, validated: set[tuple[int, str]]) -> None:
        self.validated = validated

    def write(self, row: dict[str, Any]) -> None:
        """Remember a validation."""
        if "validation_loss" in row:
            self.validated.add((int(row["step"]), str(row.get("name", ""))))

    def sync(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


class MetricsFile:
    """Appends rows. Opening it at `last_step` removes the rows of later steps, so a resumed run has each step once."""

    def __init__(self, path: Path, last_step: int, say: Callable[[str], None] = lambda line: None) -> None:
        self.path = path
        self.validated: set[tuple[int, str]] = set()
        kept, removed = [], 0
        for text, row in _rows(path):
            if row is None or int(row["step"]) > last_step:
                removed += 1
                continue
            kept.append(text)
            if "validation_loss" in row:
                self.validated.add((int(row["step"]), str(row.get("name", ""))))
        if removed:
            say(f"{path.name}: {removed} rows after step {last_step} removed; those steps run again")
            write_text(path, "".join(f"{text}\n" for text in kept))
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open as long as the run; close() ends it

    def write(self, row: dict[str, Any]) -> None:
        """Append one row; a reader sees it at once. NaN and Inf become null. An OSError names the file."""
        try:
            self._file.write(json.dumps(finite(row), allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        if "validation_loss" in row:
            self.validated.add((row["step"], row["name"]))

    def sync(self) -> None:
        """Put the rows on the disk: before a checkpoint counts on them."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Nothing can be written afterwards. What a row that failed has left behind is no new error."""
        with contextlib.suppress(OSError):
            self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All rows, in order; an interrupted last line is left out."""
    return [row for _, row in _rows(path) if row is not None]


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """(line, row); the row is None where the line is no row (a process died while it wrote)."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        if not line:
            continue
        try:
            row = json.loads(line)
            valid = isinstance(row, dict) and isinstance(row.get("step"), int)
        except ValueError:
            valid = False
        yield line, (row if valid else None)
