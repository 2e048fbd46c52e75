"""Checkpoints of any layout: written completely or not at all, checked before they are used, loaded into any other layout.

This is what the rest of the program uses. checkpoint_format.py: the files; checkpoint_save.py (Saver) and checkpoint_write.py: saving;
checkpoint_read.py: loading; checkpoint_place.py: the folder around them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megadcp.interop.json_files import read_json
from megadcp.mesh.groups import Group
from megadcp.parallel.boxes import Box
from megadcp.train.checkpoint_format import (
    FORMAT,
    META,
    PREFIX,
    TENSORS,
    CheckpointError,
    Index,
    check_file,
    files_of,
    folder_name,
    index_from_json,
    index_of_format_1,
)
from megadcp.train.checkpoint_place import Say, began, point_to, reason_of, remove_leftovers, remove_old, require_room, saved, set_aside, step_of
from megadcp.train.checkpoint_read import read_boxes, require_match, whole_boxes
from megadcp.train.checkpoint_save import SaveFailed, Saver
from megadcp.train.incidents import add_incident
from megadcp.train.run_folder import RunFolder
from megadcp.train.together import ALONE, gather

__all__ = [
    "PREFIX", "Checkpoint", "CheckpointError", "SaveFailed", "Saver", "began", "folder_name", "newest", "open_checkpoint", "read_weights",
    "remove_leftovers", "remove_old", "require_match", "require_room", "saved", "set_aside",
]  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint whose checksums were right when it was opened. index: KIND.PARAMETER -> dtype, shape and where its boxes are."""

    path: Path
    meta: dict[str, Any]
    index: Index

    @property
    def step(self) -> int:
        """Steps done when it was saved."""
        return int(self.meta["step"])

    def shapes(self, part: str) -> dict[str, Tensor]:
        """Meta tensors of the names that `tensors` has; nothing is read."""
        return {shown: self.index[name].empty for name, shown in self._names(part).items()}

    def tensors(self, part: str, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Whole tensors on the CPU, whatever layout saved them.

        part "model": weights by parameter name; "optimizer": master.NAME, exp_avg.NAME, exp_avg_sq.NAME. names: those only (one at a time
        needs the memory of one).
        """
        shown = self._names(part)
        if names is not None:
            wanted = set(names)
            if missing := sorted(wanted - set(shown.values())):
                raise CheckpointError(f"{self.path} has no tensor {missing[0]}")
            shown = {name: each for name, each in shown.items() if each in wanted}
        boxes = whole_boxes(self.index, shown)
        self.read(boxes)
        return {shown[box.name]: box.values for box in boxes}

    def read(self, boxes: Sequence[Box]) -> None:
        """Fill boxes of tensors KIND.PARAMETER. CheckpointError names one that doesn't fit."""
        read_boxes(self.path, self.index, boxes)

    def _names(self, part: str) -> dict[str, str]:
        if part == "model":
            return {name: name.removeprefix("model.") for name in self.index if name.startswith("model.")}
        return {name: name for name in self.index if not name.startswith("model.")}


def read_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Parameter name -> whole tensor on the CPU, in the format it was trained in, whatever layout saved it. A tied head is not in it."""
    return checkpoint.tensors("model")


def open_checkpoint(path: Path, group: Group = ALONE, verify: bool = True) -> Checkpoint:
    """Check manifest, sizes and checksums. All ranks of the group call it and share the work; verify=False checks small files only.

    Raises:
        CheckpointError: says which file is wrong, and how; the same on all ranks.
    """
    problem, checkpoint = "", None
    try:
        checkpoint = _open(path, group, verify)
    except CheckpointError as error:
        problem = str(error)
    for each in gather(problem, group):
        if each:
            raise CheckpointError(each)
    assert checkpoint is not None
    return checkpoint


def _open(path: Path, group: Group, verify: bool) -> Checkpoint:
    form, files, step = files_of(path)
    for number, (name, (size, sha256)) in enumerate(sorted(files.items())):
        if name in (META, TENSORS) or (verify and number % group.size == group.index):
            check_file(path / name, size, sha256)
    meta = read_json(path / META, CheckpointError)
    if meta.get("step") != step:
        raise CheckpointError(f"{path / META} says step {meta.get('step')}, its manifest says step {step}")
    index = index_from_json(read_json(path / TENSORS, CheckpointError), path / TENSORS) if form == FORMAT else index_of_format_1(path)
    unlisted = sorted({box.file for entry in index.values() for box in entry.boxes} - set(files))
    if unlisted:
        raise CheckpointError(f"{path / TENSORS} names {unlisted[0]}, which the manifest does not list")
    return Checkpoint(path, meta, index)


def newest(run: RunFolder, say: Say, repair: bool = False, group: Group = ALONE) -> Checkpoint | None:
    """The newest undamaged checkpoint, or None where none was ever saved. A damaged one is told of, and the one before it is taken.

    All ranks of the group call it and get the same one. repair: also remove leftovers, set damaged ones aside (renamed to damaged-step-*: they
    don't count as saved any more) and move the pointer.

    Raises:
        CheckpointError: none is usable, or all that were saved are gone: nobody may take that for a run that has not begun.
    """
    if repair:
        _by_first(group, lambda: remove_leftovers(run))
    paths, lost = gather((saved(run), began(run)) if group.index == 0 else ([], False), group)[0]
    damaged = []
    for path in reversed(paths):
        try:
            checkpoint = open_checkpoint(path, group)
        except CheckpointError as error:
            say(f"WARNING: {error}; falling back to the checkpoint before it")
            damaged.append(path)
            continue
        if repair:
            _by_first(group, lambda: _repair(run, damaged, path))  # noqa: B023 - called here and now
        return checkpoint
    if lost and not paths:
        raise CheckpointError(
            f"{run.latest} says that checkpoints were saved, but {run.checkpoints} holds none; put them back (is the disk there?), or remove "
            f"{run.latest} to begin anew at step 0"
        )
    if damaged:
        names = ", ".join(path.name for path in damaged)
        raise CheckpointError(f"{run.checkpoints}: no checkpoint is usable ({names}: damaged); restore one, or start anew with another run.name")
    return None


def _repair(run: RunFolder, damaged: Sequence[Path], good: Path) -> None:
    for one in damaged:
        set_aside(one)
        text = f"{one.name} was damaged and is set aside as damaged-{one.name}; the run goes on from {good.name}"
        add_incident(run.path, "damaged_checkpoint", step_of(good), text)
    point_to(run, good)


def _by_first(group: Group, action: Callable[[], None]) -> None:
    """The group's first rank does it. What the system refuses it there is everybody's CheckpointError: nobody waits for a rank that is gone."""
    problem = ""
    if group.index == 0:
        try:
            action()
        except OSError as error:
            problem = reason_of(error)
    problem = gather(problem, group)[0]
    if problem:
        raise CheckpointError(f"the folder of checkpoints can't be put in order: {problem}")
