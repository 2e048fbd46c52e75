"""Rows for people who watch elsewhere: Weights & Biases and TensorBoard, beside metrics.jsonl, which always has everything. No torch.

A tracker can never stop or delay training: each lives in a process of its own (tracker_process.py) behind a bounded queue. When it is slow, rows
are left out of it, with one warning; when it fails, one warning says so; when it does not finish, it is stopped after log.tracker_timeout_s.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from megadcp.config.check import UserError
from megadcp.config.run_file import to_dict
from megadcp.config.schema import Config
from megadcp.plan.step_plan import LEVELS
from megadcp.train.metrics import Metrics
from megadcp.train.run_folder import write_json

MOST_ROWS = 10_000  # that wait for a slow tracker
CRASH_SECONDS = 10.0  # that a tracker has to finish when the run has crashed
STOP_SECONDS = 5.0  # in which a killed process ends
ID_FILE, NUMBERS_FILE = "wandb.json", ".wandb-numbers"
SKIPPED_KEYS = {"measured", "lane_ratios"}  # lists

Say = Callable[[str], None]


class Tracker(Protocol):
    """Where else rows go."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Hand over a row of metrics.jsonl. Returns at once, and never raises."""

    def close(self) -> None:
        """Let it finish, within a limit. Never raises."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told first. id: of the run at wandb; last_step: of the checkpoint that the run goes on from; numbers: file name."""

    kind: str
    folder: str
    name: str
    config: dict[str, Any]
    last_step: int
    timeout_s: float
    id: str = ""
    mode: str = "auto"
    project: str = ""
    entity: str = ""
    tags: tuple[str, ...] = ()
    numbers: str = NUMBERS_FILE


# ------------------------------------------------------------------------------------------------------------------ opening
def check_trackers(config: Config) -> None:
    """UserError when a tracker is asked for whose package is not installed."""
    for kind in asked_for(config):
        found = importlib.util.find_spec(kind)
        if found is None or found.origin is None:  # no origin: a folder that happens to have the name
            raise UserError(f'log.{kind}=true needs the package {kind}: pip install "megadcp[{kind}]" (or pip install {kind}), or log.{kind}=false')


def asked_for(config: Config) -> list[str]:
    """The trackers of a run."""
    return [kind for kind in ("wandb", "tensorboard") if getattr(config.log, kind)]


def open_trackers(config: Config, folder: Path, last_step: int, say: Say) -> list[Tracker]:
    """Start those that the run asks for; by the rank that writes. What can't be started is told and left out."""
    trackers: list[Tracker] = []
    for kind in asked_for(config):
        log = config.log
        about = TrackedRun(kind, str(folder.resolve()), config.run.name, to_dict(config), last_step, log.tracker_timeout_s)
        try:
            if kind == "wandb":
                where = {"project": log.wandb_project, "entity": log.wandb_entity}
                about = TrackedRun(**{**asdict(about), **where, "id": wandb_id(folder, **where), "mode": log.wandb_mode, "tags": log.wandb_tags})
            trackers.append(ProcessTracker(about, say))
        except OSError as error:
            say(f"WARNING: {kind} could not be started ({error}); training goes on without it")
    return trackers


def wandb_id(folder: Path, project: str, entity: str) -> str:
    """The id of the run there, kept in its folder: a run that goes on is the same one. Another project or entity has another run."""
    path, where = folder / ID_FILE, {"project": project, "entity": entity}
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(known["id"], str) and {key: known[key] for key in where} == where:
            return str(known["id"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    made = secrets.token_hex(4)
    write_json(path, {"id": made, **where})
    (folder / NUMBERS_FILE).unlink(missing_ok=True)
    return made


# --------------------------------------------------------------------------------------------------------------------- rows
class Numbers:
    """What of a row can be drawn: name -> number. Once a cp size was seen, steps without it have 0 of it."""

    def __init__(self) -> None:
        self._seen: dict[str, set[str]] = {"recompute": set(LEVELS)}

    def __call__(self, row: Mapping[str, Any]) -> dict[str, float]:
        """Of a step or a validation (which is named validation/SET/..)."""
        prefix = f"validation/{row['name']}/" if "validation_loss" in row else ""
        found: dict[str, float] = {}
        for key, value in row.items():
            if key in SKIPPED_KEYS:
                continue
            if isinstance(value, Mapping):
                seen = self._seen.setdefault(key, set())
                seen |= set(value)
                found |= {f"{key}/{part}": value.get(part, 0) for part in sorted(seen)}
            elif isinstance(value, (int, float)) and abs(value) < float("inf"):
                found[key if key == "step" else prefix + key.removeprefix("validation_" if prefix else "")] = value
        return {name: float(value) if isinstance(value, bool) else value for name, value in found.items()}


class TrackedMetrics:
    """metrics.jsonl, and the same rows for trackers."""

    def __init__(self, inner: Metrics, trackers: Sequence[Tracker]) -> None:
        self._inner, self._trackers = inner, tuple(trackers)
        self.validated = inner.validated

    def write(self, row: dict[str, Any]) -> None:
        """The file first."""
        self._inner.write(row)
        for one in self._trackers:
            one.write(row)

    def sync(self) -> None:
        """Of the file."""
        self._inner.sync()

    def close(self) -> None:
        """The file first; then let the trackers finish."""
        self._inner.close()
        for one in self._trackers:
            one.close()


# ------------------------------------------------------------------------------------------------------------------ process
class ProcessTracker:
    """A tracker in its own process. All that is said is said by the thread that calls: nothing gets between other lines."""

    def __init__(self, about: TrackedRun, say: Say, most_rows: int = MOST_ROWS) -> None:
        self.about, self._say, self._numbers = about, say, Numbers()
        self._rows: queue.Queue[bytes | None] = queue.Queue(most_rows)
        self._told: deque[str] = deque()
        self._left_out, self._failed = 0, False
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "megadcp.train.tracker_process"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True,
        )  # fmt: skip
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._hand_over, self._listen)]
        self._rows.put_nowait(_line(asdict(about)))
        for thread in self._threads:
            thread.start()

    def write(self, row: Mapping[str, Any]) -> None:
        """Put a row into the queue; where it is full, the row is left out."""
        self._tell()
        if self._failed:
            return
        if self._process.poll() is not None:
            self._give_up(f"ended with exit code {self._process.returncode}")
            return
        try:
            self._rows.put_nowait(_line(self._numbers(row)))
        except queue.Full:
            if not self._left_out:
                self._say(f"WARNING: {self.about.kind} is slow: rows are left out there from step {row.get('step')} on; metrics.jsonl has all")
            self._left_out += 1

    def close(self) -> None:
        """Wait for its end, at most timeout_s (less while an exception is on its way up); then stop it and whatever it has started."""
        crashed = sys.exception() is not None
        limit = min(CRASH_SECONDS, self.about.timeout_s) if crashed else self.about.timeout_s
        end = time.monotonic() + limit
        if not self._failed:
            try:
                if not crashed:
                    self._rows.put(_line({"end": True}), timeout=limit)
                self._rows.put(None, timeout=max(0.0, end - time.monotonic()))
                code = self._process.wait(max(0.0, end - time.monotonic()))
                if code:
                    self._give_up(f"ended with exit code {code}")
            except (queue.Full, subprocess.TimeoutExpired):
                waiting = f", {self._rows.qsize()} rows still waiting" if self._rows.qsize() > 2 else ""
                self._give_up(f"did not finish in {limit:g} s{waiting}, and was stopped")
        self._stop()
        for thread in self._threads:
            thread.join(1.0)
        self._tell()
        if self._left_out:
            self._say(f"{self.about.kind}: {self._left_out:,} rows were left out; metrics.jsonl has all")

    def _give_up(self, why: str) -> None:
        self._threads[1].join(1.0 if self._process.poll() is not None else 0.0)  # its last words
        self._tell()
        self._failed = True
        log = Path(self.about.folder) / f"{self.about.kind}.log"
        self._say(f"WARNING: {self.about.kind} {why}; nothing else is affected, metrics.jsonl has all; what it printed is in {log}")

    def _stop(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # of the session that was started with it
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)  # one that waits for a dead file system can't even be killed
        with contextlib.suppress(queue.Full):  # full: the thread finds the pipe closed
            self._rows.put_nowait(None)

    def _tell(self) -> None:
        while self._told:
            self._say(self._told.popleft())

    # -------------------------------------------------------------------------------------------------------------- threads
    def _hand_over(self) -> None:
        """Rows from the queue to the process, as fast as it takes them."""
        assert self._process.stdin is not None
        try:
            with self._process.stdin as pipe:
                while (line := self._rows.get()) is not None:
                    pipe.write(line)
                    pipe.flush()
        except (OSError, ValueError):
            pass  # it has gone: `write` finds out

    def _listen(self) -> None:
        """What the process has to tell."""
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            for line in pipe:
                try:
                    text = json.loads(line).get("say")
                except (ValueError, AttributeError):
                    continue
                if text:
                    self._told.append(str(text))


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"
