"""The files of tools/plan.py: lengths in, recorded plans in, plans and pictures out. Nothing is written before everything is known."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megadcp.config.check import UserError
from megadcp.plan import plan_file
from megadcp.plan.step_plan import PlanFormatError, StepPlan, from_json, to_json

LINES = (".jsonl", ".jsonl.zst")  # ends of files with a plan a line
HEAD = 4096  # bytes that tell what a picture is


# --------------------------------------------------------------------------------------------------------------- lengths
def read_lengths(name: str) -> list[list[int]]:
    """The steps of lengths=FILE: whole numbers of at least 1, none of the steps empty."""
    path = Path(name)
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"lengths={name} does not exist; give a JSON file with a list of document lengths") from None
    except IsADirectoryError:
        raise UserError(f"lengths={name} is a folder; give a JSON file with a list of document lengths") from None
    except OSError as error:
        raise UserError(f"lengths={name} can't be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"lengths={name} is not JSON ({' '.join(str(error).split())}); give a list of document lengths, for example [4096, 512]"
        ) from None
    if not isinstance(value, list):
        raise UserError(f"lengths={name} holds {_found(value)}; give a list of document lengths (one step), or a list of such lists (several)")
    if not value:
        raise UserError(f"lengths={name} is an empty list: a step needs at least one document")
    several = [isinstance(one, list) for one in value]
    if any(several) and not all(several):
        odd = several.index(False)
        raise UserError(
            f"lengths={name}: item {odd} is {_found(value[odd])} among lists; give numbers (one step) or lists of numbers (several steps)"
        )
    steps = value if any(several) else [value]
    for number, step in enumerate(steps):
        _check_step(f"lengths={name}" + (f", step {number}" if any(several) else ""), step)
    return steps


def _check_step(where: str, step: Sequence[Any]) -> None:
    if not step:
        raise UserError(f"{where} is an empty list: a step needs at least one document")
    for document, length in enumerate(step):
        if type(length) is not int:
            raise UserError(f"{where}: document {document} is {_found(length)}; lengths are whole numbers")
        if length < 1:
            raise UserError(f"{where}: document {document} has length {length}; every document needs at least 1 token")


def _found(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", float: "a fraction", int: "a number"}
    text = json.dumps(value)
    return f"{kinds.get(type(value), 'null')} ({text if len(text) <= 40 else text[:37] + '...'})"


# --------------------------------------------------------------------------------------------------------- recorded plans
def find_plans(name: str) -> Path:
    """The file with the plans of a run folder, or the file itself."""
    if not Path(name).exists():
        raise UserError(f"{name} does not exist; give a run folder (runs/NAME), a plans.jsonl, or the JSON file of a plan")
    return plan_file.find_plans(name)


def recorded(path: Path, first: int, count: int | None, say: Callable[[str], None], check_hash: bool = True) -> Iterator[StepPlan]:
    """The plans of steps first .. first + count - 1 (count None: to the end), whatever invariants they break.

    PlanFormatError for a file that holds no plans, for damage before its end, and for a plan that was changed (check_hash).
    """
    for plan in _all_plans(path, say, check_hash):
        if count is not None and plan.step >= first + count:
            return
        if plan.step >= first:
            yield plan


def _all_plans(path: Path, say: Callable[[str], None], check_hash: bool = True) -> Iterator[StepPlan]:
    if path.suffix != ".json":
        yield from plan_file.read_plans(path, say, check_hash)
        return
    try:
        yield from_json(path.read_bytes(), check_hash)
    except PlanFormatError as error:
        raise PlanFormatError(f"{path}: {error}") from None
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from None


# ----------------------------------------------------------------------------------------------------------------- output
def check_outputs(files: dict[str, str], steps: int, overwrite: bool) -> None:
    """Refuse, before any work, files that can't be written or that would replace something else than what this tool makes.

    `files`: key (out, svg, trace, histogram) -> name.
    """
    for key, name in files.items():
        path = Path(name)
        if path.is_dir():
            raise UserError(f"{key}={name} is a folder; give the name of a file in it")
        if not path.parent.is_dir():
            raise UserError(f"{key}={name}: the folder {path.parent} does not exist; make it first")
        if not os.access(path.parent, os.W_OK):
            raise UserError(f"{key}={name}: the folder {path.parent} can't be written to")
        if path.exists() and not overwrite and not RECOGNISED[key](path):
            raise UserError(f"{key}={name} exists and is not what this tool writes there; choose another name, or overwrite=true to replace it")
    places = [Path(name).resolve() for name in files.values()]
    for place, key in zip(places, files, strict=True):
        if places.count(place) > 1:
            raise UserError(f"{key}={files[key]} is the file of another output, too; give each its own")
    out = files.get("out", "")
    if out and steps > 1 and not out.endswith(LINES):
        raise UserError(f"out={out} holds one plan, but there are {steps} steps; write out=NAME.jsonl or out=NAME.jsonl.zst")
    if out.endswith(LINES) and (Path(out).parent / "run.yaml").is_file():
        raise UserError(f"out={out} would stand among the records of a run; choose another folder")


def _is_plans(path: Path) -> bool:
    try:
        next(_all_plans(path, lambda line: None))
    except (UserError, OSError, StopIteration):
        return False
    return True


def _begins(*starts: bytes) -> Callable[[Path], bool]:
    def recognised(path: Path) -> bool:
        try:
            with open(path, "rb") as file:
                head = file.read(HEAD)
        except OSError:
            return False
        return any(start in head for start in starts)

    return recognised


RECOGNISED: dict[str, Callable[[Path], bool]] = {
    "out": _is_plans,
    "svg": _begins(b"<svg"),
    "histogram": _begins(b"<svg"),
    "trace": _begins(b"traceEvents"),
}


def write_file(name: str, content: str) -> None:
    """Write a whole file under another name first, so that nobody ever sees half of it."""
    _replace(Path(name), lambda temporary: temporary.write_text(content, encoding="utf-8"))


def write_plans(name: str, plans: Sequence[StepPlan]) -> None:
    """One plan as JSON, or a plan a line where the name asks for it."""
    if not name.endswith(LINES):
        write_file(name, json.dumps(to_json(plans[0])) + "\n")
        return

    def write(temporary: Path) -> None:
        with plan_file.PlanWriter(temporary) as writer:
            for plan in plans:
                writer.append(plan)

    _replace(Path(name), write)


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        write(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
