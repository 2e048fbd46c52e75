"""Checkpoints of one process: written completely or not at all, checked before they are used, and never unpickled.

checkpoints/step-00000800/
    model.safetensors       weights, by parameter name
    optimizer.safetensors   fp32 masters of narrow weights and both moments: master.NAME, exp_avg.NAME, exp_avg_sq.NAME
    meta.json               counters, order, config, random states
    manifest.json           size and sha256 of the files above; written last
A save writes to a hidden folder, puts it on the disk, renames it and only then moves the pointer file `latest`. So whatever moment the process
dies at, every folder named step-* is complete; hidden ones are leftovers, ignored when loading and removed by the next save.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from megadcp.config.check import UserError
from megadcp.train.run_folder import RunFolder, sync_folder, write_json, write_text

FORMAT = 1
PREFIX = "step-"
MANIFEST, META = "manifest.json", "meta.json"
REPLACED = ".replaced"
TENSOR_FILES = ("model", "optimizer")
NAMED_IN_ERRORS = 5  # tensors; the rest are counted
Say = Callable[[str], None]


class CheckpointError(UserError):
    """A checkpoint that can't be used; the message names the file or tensor."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint whose checksums were right when it was opened."""

    path: Path
    meta: dict[str, Any]

    @property
    def step(self) -> int:
        """Steps done when it was saved."""
        return int(self.meta["step"])

    def tensors(self, name: str) -> dict[str, Tensor]:
        """All tensors of NAME.safetensors (model or optimizer), on the CPU."""
        try:
            return load_file(self.path / f"{name}.safetensors")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.path / name}.safetensors can't be read: {error}") from None


# ----------------------------------------------------------------------------------------------------------------- save
def save(run: RunFolder, step: int, tensors: Mapping[str, Mapping[str, Tensor]], meta: Mapping[str, Any], keep_last: int) -> Path:
    """Write one checkpoint and return its folder. `tensors` has the entries of TENSOR_FILES; keep_last 0 keeps all older ones.

    Returns when everything is on the disk. OSError (disk full, not writable) leaves the older checkpoints and the pointer as they were.
    """
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    remove_leftovers(run)
    final = run.checkpoints / folder_name(step)
    draft = run.checkpoints / f".{final.name}.draft"
    draft.mkdir()
    try:
        _write(draft, step, tensors, meta)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)  # a full disk needs the space
        raise
    if final.exists():  # the same step once more
        os.rename(final, final.with_name(f".{final.name}{REPLACED}"))
    os.rename(draft, final)
    sync_folder(run.checkpoints)
    write_text(run.latest, f"{run.checkpoints.name}/{final.name}\n")
    if keep_last > 0:
        for path in saved(run)[:-keep_last]:
            _remove(path)
    remove_leftovers(run)
    return final


def _write(draft: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], meta: Mapping[str, Any]) -> None:
    for name in TENSOR_FILES:
        try:
            save_file({key: tensor.detach().contiguous() for key, tensor in tensors[name].items()}, draft / f"{name}.safetensors")
        except SafetensorError as error:  # a full disk among others: safetensors has no error of its own for it
            raise CheckpointError(f"{draft / name}.safetensors can't be written: {error}") from error
        with open(draft / f"{name}.safetensors", "rb+") as file:
            os.fsync(file.fileno())
    write_json(draft / META, {"format": FORMAT, **meta})
    files = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(draft.iterdir())}
    write_json(draft / MANIFEST, {"format": FORMAT, "step": step, "files": files})


def remove_leftovers(run: RunFolder) -> None:
    """Remove what interrupted saves and removals have left: everything hidden in the checkpoints' folder.

    Except a checkpoint that was to be replaced by one of the same step that never came: it gets its name back.
    """
    for path in run.checkpoints.glob(f".{PREFIX}*{REPLACED}"):
        final = path.with_name(path.name[1 : -len(REPLACED)])
        if not final.exists():
            os.rename(path, final)
    for path in run.checkpoints.glob(".*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _remove(path: Path) -> None:
    """Under a hidden name first, so that half a checkpoint never stands under a good name."""
    hidden = path.with_name(f".{path.name}.removed")
    os.rename(path, hidden)
    shutil.rmtree(hidden)


# ----------------------------------------------------------------------------------------------------------------- find
def saved(run: RunFolder) -> list[Path]:
    """Checkpoint folders, oldest first."""
    found = [path for path in run.checkpoints.glob(f"{PREFIX}*") if path.is_dir() and path.name[len(PREFIX) :].isdigit()]
    return sorted(found, key=lambda path: int(path.name[len(PREFIX) :]))


def newest(run: RunFolder, say: Say, repair: bool = False) -> Checkpoint | None:
    """The newest undamaged checkpoint, or None where none was ever saved. A damaged one is told of, and the one before it is taken.

    repair: also remove leftovers, set damaged ones aside (renamed to damaged-step-*: they don't count as saved any more) and move the pointer.
    """
    if repair:
        remove_leftovers(run)
    damaged = []
    for path in reversed(saved(run)):
        try:
            checkpoint = open_checkpoint(path)
        except CheckpointError as error:
            say(f"WARNING: {error}; falling back to the checkpoint before it")
            damaged.append(path)
            continue
        if repair:
            for one in damaged:
                _set_aside(one)
            write_text(run.latest, f"{run.checkpoints.name}/{path.name}\n")
        return checkpoint
    if damaged:
        names = ", ".join(path.name for path in damaged)
        raise CheckpointError(f"{run.checkpoints}: no checkpoint is usable ({names}: damaged); restore one, or start anew with another run.name")
    return None


def open_checkpoint(path: Path) -> Checkpoint:
    """Check manifest, sizes and checksums. CheckpointError says which file is wrong, and how."""
    manifest = _read_json(path / MANIFEST)
    files = manifest.get("files")
    if manifest.get("format") != FORMAT or not isinstance(files, dict):
        raise CheckpointError(f"{path / MANIFEST}: format {manifest.get('format')}; this version reads format {FORMAT}")
    wanted = [META, *(f"{name}.safetensors" for name in TENSOR_FILES)]
    for name in wanted:
        entry = files.get(name)
        if not isinstance(entry, dict):
            raise CheckpointError(f"{path / MANIFEST} does not list {name}")
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        if file.stat().st_size != entry.get("bytes"):
            raise CheckpointError(f"{file} has {file.stat().st_size} bytes, its manifest says {entry.get('bytes')}")
        if _sha256(file) != entry.get("sha256"):
            raise CheckpointError(f"{file} does not match the sha256 in its manifest")
    meta = _read_json(path / META)
    if not isinstance(meta.get("step"), int) or meta["step"] != manifest.get("step"):
        raise CheckpointError(f"{path / META} says step {meta.get('step')}, its manifest says step {manifest.get('step')}")
    return Checkpoint(path, meta)


def read_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Parameter name -> whole tensor on the CPU, in the format it was trained in, whatever layout saved it. A tied head is not in it."""
    return checkpoint.tensors("model")


def require_match(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], where: Path) -> None:
    """CheckpointError that names every missing, extra and misshapen tensor (the first few of each, and their number)."""
    problems = []
    missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing:
        problems.append(f"missing: {_some(missing)}")
    if extra:
        problems.append(f"not in this model: {_some(extra)}")
    wrong = []
    for name in sorted(set(expected) & set(found)):
        here, there = expected[name], found[name]
        if here.shape != there.shape or here.dtype != there.dtype:
            wrong.append(f"{name} is {_kind(there)}, expected {_kind(here)}")
    if wrong:
        problems.append(f"of another shape or format: {_some(wrong)}")
    if problems:
        raise CheckpointError(f"{where} does not fit this run's model. " + "; ".join(problems))


# -------------------------------------------------------------------------------------------------------------- helpers
def folder_name(step: int) -> str:
    """step-00000800."""
    return f"{PREFIX}{step:08d}"


def _set_aside(path: Path) -> None:
    target = path.with_name(f"damaged-{path.name}")
    if target.exists():
        shutil.rmtree(target)
    os.rename(path, target)


def _some(names: list[str]) -> str:
    more = len(names) - NAMED_IN_ERRORS
    return ", ".join(names[:NAMED_IN_ERRORS]) + (f" and {more} more" if more > 0 else "")


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return value


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
