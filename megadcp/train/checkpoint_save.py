"""Saving while training goes on: one save at a time, complete or not at all, and a failure is everybody's at the next step.

    saver.save(step, boxes, meta)   copies what the rank holds and returns; a save that is under way is waited for first
    saver.poll()                    between steps: has it ended? all ranks agree
    saver.finish()                  wait for it
What the background does: every rank writes its file and then its part (checkpoint_write.py); rank 0 sees all parts, writes index, meta and
manifest into the hidden draft folder, renames it, moves `latest`, and removes what is too old. Until the rename nothing of the old
checkpoints is touched, so whenever the job dies a complete one is there. Ranks talk only in save, poll and finish, never in the background.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megadcp.config.schema import CheckpointConfig
from megadcp.mesh.groups import Group
from megadcp.parallel.boxes import Box
from megadcp.train.checkpoint_format import (
    FORMAT,
    MANIFEST,
    META,
    TENSORS,
    CheckpointError,
    file_name,
    folder_name,
    index_to_json,
    merge,
    part_name,
    read_json,
)
from megadcp.train.checkpoint_place import Say, put_in_place, reason_of, remove_leftovers, remove_old
from megadcp.train.checkpoint_write import Share, Stager, cause, start
from megadcp.train.run_folder import RunFolder, finite, sync_folder
from megadcp.train.together import ALONE, gather, largest

PARTS_SECONDS = 1800.0  # in which every rank has written its share after rank 0 has
LEAVE_SECONDS = 20.0  # for a save under way when the run ends by an error
LOOK_SECONDS = 0.05
RUNNING, FAILED = 1, 2


class SaveFailed(CheckpointError):
    """A checkpoint was not written; the same on all ranks. Older ones are as they were."""


@dataclass
class _Pending:
    """A save under way. rank 0: `outcome` ends when the checkpoint has its name."""

    step: int
    draft: Path
    begin: float
    staged: float = 0.0
    written: threading.Event = field(default_factory=threading.Event)
    given_up: threading.Event = field(default_factory=threading.Event)
    write: futures.Future[Any] | None = None
    commit: threading.Thread | None = None
    error: BaseException | None = None
    named: bool = False
    seconds: float = 0.0


class Saver:
    """Saves one run's checkpoints. All ranks of `group` make one and call the same methods in the same order."""

    def __init__(self, run: RunFolder, settings: CheckpointConfig, say: Say, group: Group = ALONE, parts_seconds: float = PARTS_SECONDS) -> None:
        self.run, self.settings, self.say, self.group, self.parts_seconds = run, settings, say, group, parts_seconds
        self.stager = Stager(copies=settings.async_save)
        self.token = gather(secrets.token_hex(8), group)[0]
        self.complete = -1
        """Step of the last checkpoint that this job has completed."""
        self._pending: _Pending | None = None

    # ------------------------------------------------------------------------------------------------------ the ranks' calls
    def save(self, step: int, boxes: Sequence[Box], meta: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> None:
        """Begin to save. boxes: what this rank writes; meta: JSON values, rank 0's count; own: JSON values of each rank, kept under "ranks".

        When it returns the boxes may change. SaveFailed: the one before could not be completed.
        """
        self.finish()
        draft = self.run.checkpoints / f".{folder_name(step)}.draft-{self.token}"
        pending = self._pending = _Pending(step, draft, time.perf_counter())
        share = Share(draft, step, self.group.index, self.token, own or {})
        try:
            pending.write = start(share, boxes, self.stager, pending.written.set)
            pending.write.add_done_callback(lambda _: pending.written.set())
            if self.group.index == 0:
                pending.commit = threading.Thread(target=self._complete, args=(pending, dict(meta)), name="checkpoint", daemon=True)
                pending.commit.start()
        except Exception as error:  # of whatever kind: it is told to all ranks in finish()
            pending.error = error
            pending.written.set()
        pending.staged = time.perf_counter() - pending.begin
        if not self.settings.async_save:
            self.finish()

    def poll(self) -> None:
        """Look whether the save under way has ended on all ranks, and tell of it. SaveFailed where it could not be completed."""
        if self._pending is not None and largest(self._status(self._pending), self.group) != RUNNING:
            self.finish()

    def finish(self) -> None:
        """Wait until no save is under way. SaveFailed: it could not be completed; its leftovers are gone."""
        pending = self._pending
        if pending is None:
            return
        pending.written.wait()
        problems = gather(self._own_problem(pending), self.group)
        if any(problems):
            pending.given_up.set()
        if pending.commit is not None:
            pending.commit.join()
        if pending.write is not None:
            futures.wait([pending.write])
        if not any(problems):
            problems = gather(self._own_problem(pending), self.group)
        self._pending = None
        for rank, problem in enumerate(problems):
            if problem:
                if self.group.index == 0:
                    shutil.rmtree(pending.draft, ignore_errors=True)  # a full disk needs the space
                where = f" (rank {rank})" if self.group.size > 1 else ""
                raise SaveFailed(f"the checkpoint of step {pending.step:,} {problem[0]}{where}: {problem[1]}")
        self.complete = pending.step
        self._tell(pending)

    def close(self) -> None:
        """Leave: a save under way gets some seconds, then it is given up. No rank waits for another here."""
        pending, self._pending = self._pending, None
        if pending is not None:
            end = time.monotonic() + LEAVE_SECONDS
            pending.written.wait(LEAVE_SECONDS)
            if pending.commit is not None:
                pending.commit.join(max(0.0, end - time.monotonic()))
                pending.given_up.set()
                pending.commit.join(LEAVE_SECONDS)
        self.stager.close()

    # ---------------------------------------------------------------------------------------------------------------- inside
    def _status(self, pending: _Pending) -> int:
        if not pending.written.is_set() or (pending.commit is not None and pending.commit.is_alive()):
            return FAILED if pending.error is not None else RUNNING
        return FAILED if self._own_problem(pending) else 0

    def _own_problem(self, pending: _Pending) -> tuple[str, str] | None:
        """What this rank has to tell (what, why), when its share is written or can't be."""
        error = pending.error
        if error is None and pending.write is not None and pending.write.done():
            error = pending.write.exception()
        what = "is complete, but older ones could not be removed" if pending.named else "could not be written"
        return None if error is None else (what, reason_of(cause(error)))

    def _tell(self, pending: _Pending) -> None:
        path = self.run.checkpoints / folder_name(pending.step)
        behind = f"; training stood still for {pending.staged:.2f} s" if self.settings.async_save else ""
        self.say(f"saved {path} ({pending.seconds:.1f} s{behind})")

    # ----------------------------------------------------------------------------------------------------- rank 0, in background
    def _complete(self, pending: _Pending, meta: dict[str, Any]) -> None:
        """Runs in a thread of rank 0: from the parts to a checkpoint with a name."""
        try:
            parts = self._parts(pending)
            if parts is not None:
                write_manifest(pending.draft, pending.step, parts, meta)
                put_in_place(self.run, pending.draft, self.run.checkpoints / folder_name(pending.step))
                pending.named, pending.seconds = True, time.perf_counter() - pending.begin
                remove_old(self.run, self.settings.keep_last, self.settings.keep_every)
                remove_leftovers(self.run)
        except Exception as error:  # told by finish()
            pending.error = error

    def _parts(self, pending: _Pending) -> list[dict[str, Any]] | None:
        """Everybody's part, when all are there; None: given up, or this rank's own share failed."""
        while not pending.written.wait(LOOK_SECONDS) and not pending.given_up.is_set():
            pass
        found: dict[int, dict[str, Any]] = {}
        end = time.monotonic() + self.parts_seconds
        while not pending.given_up.is_set() and not self._own_problem(pending):
            for rank in range(self.group.size):
                path = pending.draft / part_name(rank)
                if rank not in found and path.exists():
                    found[rank] = part = read_json(path)
                    if {key: part.get(key) for key in ("step", "rank", "token")} != {"step": pending.step, "rank": rank, "token": self.token}:
                        raise CheckpointError(f"{path} is of another save")
            if len(found) == self.group.size:
                return [found[rank] for rank in range(self.group.size)]
            if time.monotonic() > end:
                late = next(rank for rank in range(self.group.size) if rank not in found)
                raise CheckpointError(f"rank {late} has not written its share within {self.parts_seconds:.0f} s of rank 0")
            pending.given_up.wait(LOOK_SECONDS)
        return None


def write_manifest(draft: Path, step: int, parts: Sequence[Mapping[str, Any]], meta: Mapping[str, Any]) -> None:
    """Turn the parts in a draft into a whole checkpoint: everything but its name."""
    files: dict[str, dict[str, Any]] = {}
    for rank, part in enumerate(parts):
        files[file_name(rank)] = {"bytes": part["bytes"], "sha256": part["sha256"]}
        if (draft / file_name(rank)).stat().st_size != part["bytes"]:
            raise CheckpointError(f"{draft / file_name(rank)} does not have the {part['bytes']} bytes that rank {rank} has written")
    texts = {
        TENSORS: json.dumps(index_to_json(merge(parts, draft)), separators=(",", ":")) + "\n",
        META: json.dumps(finite({"format": FORMAT, **meta, "ranks": compact([part["extra"] for part in parts])}), indent=2, allow_nan=False) + "\n",
    }
    for name, text in texts.items():
        _write(draft / name, text)
        files[name] = {"bytes": len(text.encode()), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    for rank in range(len(parts)):
        (draft / part_name(rank)).unlink()
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
