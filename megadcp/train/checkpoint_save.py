"""Saving while training goes on: one save at a time, complete or not at all, and a failure is everybody's at the next step.

    saver.save(step, boxes, meta)   copies what the rank holds and returns; a save that is under way is waited for first
    saver.poll()                    between steps: how far is it? all ranks agree
    saver.finish()                  wait for it
In the background every rank writes its file (checkpoint_write.py). When all have, rank 0 is told what the files hold, and in a thread of its
own it writes index, meta and manifest into the hidden draft folder, renames it, moves `latest`, and removes what is too old. Until the rename
nothing of the old checkpoints is touched, so whenever the job dies a complete one is there. Ranks talk only in save, poll and finish.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megadcp.config.schema import CheckpointConfig
from megadcp.mesh.groups import Group
from megadcp.parallel.boxes import Box
from megadcp.train.checkpoint_format import FORMAT, MANIFEST, META, TENSORS, CheckpointError, folder_name, index_to_json, merge
from megadcp.train.checkpoint_place import Say, put_in_place, reason_of, remove_leftovers, remove_old
from megadcp.train.checkpoint_write import Part, Stager, cause, start
from megadcp.train.run_folder import RunFolder, finite, sync_folder
from megadcp.train.together import ALONE, collect, gather, largest

LEAVE_SECONDS = 20.0  # for a save under way when the run ends by an error
DONE, COMPLETING, WRITING, FAILED = range(4)


class SaveFailed(CheckpointError):
    """A checkpoint was not written; the same on all ranks. Older ones are as they were."""


@dataclass
class _Pending:
    """A save under way, as one rank sees it. told: rank 0 knows everybody's part; commit: its thread."""

    step: int
    draft: Path
    meta: dict[str, Any]
    begin: float
    write: futures.Future[Part] | None = None
    told: bool = False
    commit: threading.Thread | None = None
    named: bool = False
    error: BaseException | None = None
    staged: float = 0.0
    seconds: float = 0.0

    @property
    def status(self) -> int:
        """How far this rank is."""
        if self.problem is not None:
            return FAILED
        if self.write is None or not self.write.done():
            return WRITING
        return COMPLETING if not self.told or (self.commit is not None and self.commit.is_alive()) else DONE

    @property
    def problem(self) -> tuple[str, str] | None:
        """What went wrong on this rank so far: (what, why)."""
        error = self.error
        if error is None and self.write is not None and self.write.done():
            error = self.write.exception()
        what = "is complete, but older ones could not be removed" if self.named else "could not be written"
        return None if error is None else (what, reason_of(cause(error)))


class Saver:
    """Saves one run's checkpoints. All ranks of `group` make one and call the same methods in the same order."""

    def __init__(self, run: RunFolder, settings: CheckpointConfig, say: Say, group: Group = ALONE) -> None:
        self.run, self.settings, self.say, self.group = run, settings, say, group
        self.stager = Stager(copies=settings.async_save)
        self.token = gather(secrets.token_hex(8), group)[0]  # so that nothing that an earlier job has left is taken for ours
        self.complete = -1
        """Step of the last checkpoint that this job has completed."""
        self._pending: _Pending | None = None

    # ------------------------------------------------------------------------------------------------------ the ranks' calls
    def save(self, step: int, boxes: Sequence[Box], meta: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> None:
        """Begin to save. boxes: what this rank writes; meta: JSON values, rank 0's count; own: JSON values of each rank, kept under "ranks".

        When it returns the boxes may change. SaveFailed: the one before could not be completed (or this one, without async_save).
        """
        self.finish()
        draft = self.run.checkpoints / f".{folder_name(step)}.draft-{self.token}"
        pending = self._pending = _Pending(step, draft, dict(meta), time.perf_counter())
        try:
            pending.write = start(draft, self.group.index, boxes, self.stager, own or {})
        except Exception as error:  # of whatever kind: it is told to all ranks in finish()
            pending.error = error
        pending.staged = time.perf_counter() - pending.begin
        if not self.settings.async_save:
            self.finish()

    def poll(self) -> None:
        """Look how far the save under way is on all ranks, and take it one step further. SaveFailed where it could not be completed."""
        pending = self._pending
        if pending is None:
            return
        status = largest(pending.status, self.group)
        if status in (DONE, FAILED):
            self.finish()
        elif status == COMPLETING and not pending.told:
            self._tell_parts(pending)

    def finish(self) -> None:
        """Wait until no save is under way. SaveFailed: it could not be completed; its leftovers are gone."""
        pending = self._pending
        if pending is None:
            return
        if pending.write is not None:
            futures.wait([pending.write])
        problems = gather(pending.problem, self.group)
        if not any(problems):
            if not pending.told:
                self._tell_parts(pending)
            if pending.commit is not None:
                pending.commit.join()
            problems = gather(pending.problem, self.group)
        self._pending = None
        for rank, problem in enumerate(problems):
            if problem:
                if self.group.index == 0:
                    shutil.rmtree(pending.draft, ignore_errors=True)  # a full disk needs the space
                where = f" (rank {rank})" if self.group.size > 1 else ""
                raise SaveFailed(f"the checkpoint of step {pending.step:,} {problem[0]}{where}: {problem[1]}")
        self.complete = pending.step
        behind = f"; training stood still for {pending.staged:.2f} s" if self.settings.async_save else ""
        self.say(f"saved {self.run.checkpoints / folder_name(pending.step)} ({pending.seconds:.1f} s{behind})")

    def close(self) -> None:
        """Leave: what can still be completed without other ranks gets some seconds. No rank waits for another here."""
        pending, self._pending = self._pending, None
        if pending is not None:
            end = time.monotonic() + LEAVE_SECONDS
            if pending.write is not None:
                futures.wait([pending.write], LEAVE_SECONDS)
            if self.group.size == 1 and pending.status == COMPLETING and not pending.told:
                self._tell_parts(pending)
            if pending.commit is not None:
                pending.commit.join(max(0.0, end - time.monotonic()))
        self.stager.close()

    # ---------------------------------------------------------------------------------------------------------------- inside
    def _tell_parts(self, pending: _Pending) -> None:
        """All files are written: rank 0 hears what they hold, and goes on in a thread."""
        assert pending.write is not None
        parts = collect(pending.write.result(), self.group)
        pending.told = True
        if self.group.index == 0:
            pending.commit = threading.Thread(target=self._complete, args=(pending, parts), name="checkpoint", daemon=True)
            pending.commit.start()

    def _complete(self, pending: _Pending, parts: list[Part]) -> None:
        """Runs in a thread of rank 0: from files to a checkpoint with a name."""
        try:
            write_manifest(pending.draft, pending.step, parts, pending.meta)
            put_in_place(self.run, pending.draft, self.run.checkpoints / folder_name(pending.step))
            pending.named, pending.seconds = True, time.perf_counter() - pending.begin
            remove_old(self.run, self.settings.keep_last, self.settings.keep_every)
            remove_leftovers(self.run)
        except Exception as error:  # told by finish()
            pending.error = error


def write_manifest(draft: Path, step: int, parts: Sequence[Part], meta: Mapping[str, Any]) -> None:
    """Turn the files in a draft into a whole checkpoint: everything but its name."""
    files: dict[str, dict[str, Any]] = {}
    for part in parts:
        files[part.file] = {"bytes": part.bytes, "sha256": part.sha256}
        if (draft / part.file).stat().st_size != part.bytes:
            raise CheckpointError(f"{draft / part.file} does not have the {part.bytes} bytes that were written to it")
    texts = {
        TENSORS: json.dumps(index_to_json(merge([part.index for part in parts], draft)), separators=(",", ":")) + "\n",
        META: json.dumps(finite({"format": FORMAT, **meta, "ranks": compact([part.own for part in parts])}), indent=2, allow_nan=False) + "\n",
    }
    for name, text in texts.items():
        _write(draft / name, text)
        files[name] = {"bytes": len(text.encode()), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    _write(draft / MANIFEST, json.dumps({"format": FORMAT, "step": step, "files": files}, indent=2) + "\n")
    sync_folder(draft)


def _write(path: Path, text: str) -> None:
    """A file and its content on the disk; its name is when its folder is."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def compact(values: Sequence[Any]) -> dict[str, Any]:
    """Equal values once: {"values": [..], "of_rank": [index for each rank]}."""
    different: list[Any] = []
    for value in values:
        if value not in different:
            different.append(value)
    return {"values": different, "of_rank": [different.index(value) for value in values]}
