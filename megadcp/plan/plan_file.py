"""plans.jsonl: one plan a line, in step order. What never changes (model, profile, stage_layers) stands once, in header lines.

A header line is {"sha256": HASH, "value": VALUE}; a plan line has {"ref": HASH} in place of the value. HASH is sha256 of the value's
canonical JSON (step_plan.sha256_of). A plan's own hash is that of the plan with its values in place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from megadcp.plan.step_plan import PlanFormatError, StepPlan, from_json, sha256_of, to_json

SHARED = ("model", "profile", "stage_layers")


class PlanWriter:
    """Appends plans to a file. Opening cuts off a last line that was interrupted and everything from `first_step` on.

    So a run that resumes at step k, and plans step k again, leaves each step in the file once. `report` gets a line on what was cut.
    """

    def __init__(self, path: Path | str, first_step: int = 0, report: Callable[[str], None] = lambda line: None) -> None:
        self.path = Path(path)
        self._known: set[str] = set()
        self._last = -1
        keep, cut_steps, torn = self._scan(first_step)
        if torn:
            report(f"{self.path}: {torn}; writing goes on after the last complete line")
        if cut_steps:
            report(f"{self.path}: {cut_steps} plans from step {first_step} on will be written again")
        self._file = open(self.path, "ab")  # noqa: SIM115 - lives as long as the run; close() or the context manager ends it
        self._file.truncate(keep)

    def _scan(self, first_step: int) -> tuple[int, int, str]:
        """(bytes to keep, complete plans after them, what is wrong with the end); remembers the headers and last step that are kept."""
        keep, cut_steps, torn = 0, 0, ""
        if not self.path.exists():
            return 0, 0, ""
        for line in _lines(self.path):
            if line.problem:
                torn = line.problem
                break
            if "sha256" not in line.value:
                if cut_steps or int(line.value.get("step", -1)) >= first_step:
                    cut_steps += 1
                    continue
                self._last = int(line.value.get("step", -1))
            elif not cut_steps:
                self._known.add(line.value["sha256"])
            if not cut_steps:
                keep = line.end
        return keep, cut_steps, torn

    def append(self, plan: StepPlan) -> None:
        """Write one plan, flushed. ValueError unless its step comes after the last one in the file."""
        if plan.step <= self._last:
            raise ValueError(f"{self.path}: step {plan.step} after step {self._last}: every step is written once, in order")
        document = to_json(plan)
        lines = []
        for name in SHARED:
            digest = sha256_of(document[name])
            if digest not in self._known:
                lines.append({"sha256": digest, "value": document[name]})
                self._known.add(digest)
            document[name] = {"ref": digest}
        lines.append(document)
        self._file.write(b"".join(json.dumps(line, separators=(",", ":")).encode("ascii") + b"\n" for line in lines))
        self._file.flush()
        self._last = plan.step

    def close(self) -> None:
        """Close the file; nothing can be appended afterwards."""
        self._file.close()

    def __enter__(self) -> PlanWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def read_plans(path: Path | str, report: Callable[[str], None] = lambda line: None, check_hash: bool = True) -> Iterator[StepPlan]:
    """The plans of a file in order, each step once (a step written again replaces nothing: PlanWriter cut the earlier one).

    A last line that was interrupted ends the reading; `report` gets one line that says so. Anything wrong before the last line is
    an error: PlanFormatError with file and line number.
    """
    headers: dict[str, Any] = {}
    for line in _lines(Path(path)):
        where = f"{path}:{line.number}"
        if line.problem:
            report(f"{path}: {line.problem}; read up to the last complete line")
            return
        if "sha256" in line.value:
            if set(line.value) != {"sha256", "value"} or sha256_of(line.value["value"]) != line.value["sha256"]:
                raise PlanFormatError(f"{where}: header line does not hash to its sha256 {line.value['sha256']}")
            headers[line.value["sha256"]] = line.value["value"]
            continue
        document = dict(line.value)
        for name in SHARED:
            if isinstance(document.get(name), dict) and set(document[name]) == {"ref"}:
                digest = document[name]["ref"]
                if digest not in headers:
                    raise PlanFormatError(f"{where}: {name}: no header line {digest} above it")
                document[name] = headers[digest]
        try:
            yield from_json(document, check_hash)
        except PlanFormatError as error:
            raise PlanFormatError(f"{where}: {error}") from None


class _Line:
    """One line: its JSON object, where it ends (bytes), and what is wrong with it if it is the last and incomplete."""

    def __init__(self, number: int, end: int, value: dict[str, Any], problem: str = "") -> None:
        self.number, self.end, self.value, self.problem = number, end, value, problem


def _lines(path: Path) -> Iterator[_Line]:
    """Every line of a file that may have been interrupted while it was written: damage is forgiven in the last line only."""
    end, damaged = 0, ""
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            if damaged:
                raise PlanFormatError(f"{path}:{number - 1}: {damaged}")
            try:
                value = json.loads(raw) if raw.endswith(b"\n") else None
            except ValueError:
                value = None
            if not isinstance(value, dict):
                damaged = f"not a complete JSON object ({len(raw)} bytes, interrupted or damaged)"
                continue
            end += len(raw)
            yield _Line(number, end, value)
        if damaged:
            yield _Line(number, end, {}, f"line {number} is {damaged}")
