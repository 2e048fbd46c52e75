"""What tools/kill_test.py holds a run to: after every kill, after every restart, and at its end."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megadcp.config.check import UserError
from megadcp.plan.plan_file import read_plans
from megadcp.train.checkpoint import Checkpoint, newest, open_checkpoint, saved
from megadcp.train.incidents import NAME as INCIDENTS
from megadcp.train.metrics import read_metrics
from megadcp.train.run_folder import LOCK, RunFolder

ROW = (
    "step",
    "tokens",
    "documents",
    "loss",
    "grad_norm",
    "lr",
    "targets",
    "padded_share",
    "predicted_seconds",
    "microbatches",
    "cp",
    "recompute",
    "skipped",
    "validation_loss",
    "name",
)  # fmt: skip  what of a row does not depend on the clock
META = ("step", "tokens", "documents", "skipped", "skipped_in_a_row", "updates", "order", "tokenizer", "ranks", "layout")
SHARED_MEMORY = Path("/dev/shm")
UNFINISHED = (".draft-", ".removed", ".replaced")


@dataclass(frozen=True)
class Unbroken:
    """The run that nobody disturbed."""

    rows: list[dict[str, Any]]
    files: frozenset[str]
    checkpoint: Checkpoint
    steps: int

    @classmethod
    def read(cls, folder: Path, steps: int) -> Unbroken:
        """From its folder."""
        found = newest(RunFolder(folder), _refuse)
        assert found is not None
        return cls(rows_of(folder), files_of(folder), found, steps)


def _refuse(text: str) -> None:
    raise AssertionError(text)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, without what the clock says. JSON keeps every bit of a number."""
    return [{key: row[key] for key in ROW if key in row} for row in read_metrics(RunFolder(folder).metrics)]


def files_of(folder: Path) -> frozenset[str]:
    """All files and folders, hidden ones, too; without what ranks said, and incidents: a lane may be slow by chance."""
    names = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.parent.name != "ranks" or path.name.startswith("."))
    return frozenset(name for name in names if name != INCIDENTS)


# ------------------------------------------------------------------------------------------------------------ after a kill
def after_kill(folder: Path, unbroken: Unbroken, before: int) -> Iterator[str]:
    """What is wrong with a run that has just been killed; `before`: its newest checkpoint's step one life earlier, -1 for none."""
    run = RunFolder(folder)
    for path in saved(run):
        with _told() as said:
            open_checkpoint(path)
        yield from (f"{path.name} has its name but is not complete: {each}" for each in said)
    with contextlib.suppress(FileNotFoundError):
        pointer = run.latest.read_text(encoding="utf-8").strip()
        with _told() as said:
            open_checkpoint(run.path / pointer)
        yield from (f"the pointer names {pointer}: {each}" for each in said)
    if newest_step(folder) < before:
        yield f"the newest checkpoint was step {before} and is step {newest_step(folder)} now"
    yield from _wrong_rows(rows_of(folder), unbroken.rows)


@contextlib.contextmanager
def _told() -> Iterator[list[str]]:
    said: list[str] = []
    try:
        yield said
    except (OSError, UserError) as error:
        said.append(str(error))


def newest_step(folder: Path) -> int:
    """Of the newest checkpoint, by name; -1 where there is none."""
    return max((int(path.name.removeprefix("step-")) for path in saved(RunFolder(folder))), default=-1)


def _wrong_rows(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> Iterator[str]:
    """The first row that is not the unbroken run's. A run that was killed has the first ones of it."""
    for number, row in enumerate(found):
        wanted = expected[number] if number < len(expected) else {}
        if row != wanted:
            keys = [key for key in ROW if row.get(key) != wanted.get(key)]
            told = ", ".join(f"{key} {row.get(key)} instead of {wanted.get(key)}" for key in keys)
            yield f"row {number + 1} of metrics.jsonl, step {row.get('step')}: {told}"
            return


def unfinished(folder: Path) -> dict[str, str]:
    """Hidden files and folders that a kill has left -> what they are. The next life has to remove every one."""
    found = {}
    for path in sorted(folder.rglob(".*")):
        name = str(path.relative_to(folder))
        if path.name != LOCK:
            probe = "a probe of the disk" if path.name.startswith(".probe-") else ""
            found[name] = what_it_is(path) if path.is_dir() else probe or f"{path.name.rstrip('0123456789').strip('.')} under another name"
    return found


def what_it_is(path: Path) -> str:
    """How far a save or a removal came."""
    names = {each.name for each in path.iterdir()} if path.exists() else set()
    data = sum(name.endswith(".safetensors") for name in names)
    if UNFINISHED[1] in path.name:
        return f"an old checkpoint of which {len(names)} files were left" if names else "an empty old checkpoint"
    if "manifest.json" in names:
        return "a draft with its manifest"
    if names & {"tensors.json", "meta.json"}:
        return "a draft with index or meta"
    return f"a draft with {data} files of ranks" if data else "an empty draft"


def place_of_death(folder: Path, left: dict[str, str]) -> str:
    """What the folder shows of the moment: the leftovers, or how far pointer and retention are behind the newest checkpoint."""
    what = sorted(set(left.values()))
    run, step = RunFolder(folder), newest_step(folder)
    pointer = run.latest.read_text(encoding="utf-8").strip() if run.latest.exists() else ""
    if step >= 0 and not pointer.endswith(f"{step:08d}"):
        what.append("the pointer one behind")
    return ", ".join(what) or "nothing under way"


# ------------------------------------------------------------------------------------------------------------- at the end
def at_end(folder: Path, unbroken: Unbroken) -> Iterator[str]:
    """What is wrong with a run that has come to its end after all."""
    rows = rows_of(folder)
    yield from _wrong_rows(rows, unbroken.rows)
    if len(rows) < len(unbroken.rows):
        yield f"metrics.jsonl has {len(rows)} rows, the unbroken run's {len(unbroken.rows)}"
    steps = [plan.step for plan in read_plans(folder)]
    if steps != list(range(unbroken.steps)):
        yield f"plans.jsonl has the steps {steps}"
    files = files_of(folder)
    yield from (f"{name} is left over" for name in sorted(files - unbroken.files))
    yield from (f"{name} is missing" for name in sorted(unbroken.files - files))
    if (folder / LOCK).read_bytes():
        yield f"{LOCK} still names an owner"
    warnings: list[str] = []
    found = newest(RunFolder(folder), warnings.append)
    yield from warnings
    assert found is not None
    yield from (f"the last checkpoint's {key} differ" for key in META if found.meta[key] != unbroken.checkpoint.meta[key])
    for part in ("model", "optimizer"):
        here, there = found.tensors(part), unbroken.checkpoint.tensors(part)
        different = [name for name in sorted(here.keys() | there.keys()) if not _equal(here.get(name), there.get(name))]
        yield from (f"{name} of the last checkpoint differs" for name in different[:3])


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and one.dtype == other.dtype and torch.equal(one, other)


# ------------------------------------------------------------------------------------------------------- outside the folder
def shared_memory() -> set[str]:
    """Segments of this user."""
    found = set()
    for path in SHARED_MEMORY.glob("*") if SHARED_MEMORY.is_dir() else []:
        with contextlib.suppress(OSError):
            if path.stat().st_uid == os.getuid():
                found.add(path.name)
    return found


def forgotten_memory(before: set[str]) -> list[str]:
    """Segments made since that no living process has open: others than this test may use the machine."""
    made = shared_memory() - before
    used: set[str] = set()
    for process in Path("/proc").glob("[0-9]*") if made else []:
        with contextlib.suppress(OSError):
            used |= {name for name in made if f"{SHARED_MEMORY}/{name}" in (process / "maps").read_text(encoding="utf-8", errors="replace")}
        with contextlib.suppress(OSError):
            for handle in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    used.add(os.readlink(handle).removeprefix(f"{SHARED_MEMORY}/"))
    return sorted(made - used)


def as_json(value: Any) -> str:
    """One line a kill: lists of objects stay readable."""
    kills = value.pop("kills_one_by_one")
    text = json.dumps(value, indent=1)[:-2]
    rows = ",\n".join("  " + json.dumps(each) for each in kills)
    return f'{text},\n "kills_one_by_one": [\n{rows}\n ]\n}}\n'
