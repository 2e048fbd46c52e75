"""Start the ranks of one machine and stay with them: `supervise(command, 8)` is what `cluster=local cluster.processes=8` does.

The processes, their sessions and their output files are those of torch's elastic launcher (torch.distributed.elastic.multiprocessing); what
is watched, shown and returned is decided here, because its agent kills ranks that are still saving and hides their exit codes.

What the user sees: rank 0's lines as they come; when ranks fail, the traceback of the one that failed first, and nothing of the others.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException, start_processes

from megadcp.config.check import UserError
from megadcp.train.health import HUNG, forget_hearts, overdue
from megadcp.train.incidents import add_incident
from megadcp.train.launch import ERROR_FILE, INTERRUPTED, STACKS, SUPERVISOR
from megadcp.train.out_of_memory import OUT_OF_MEMORY
from megadcp.train.signals import STOPPED

POLL_SECONDS = 0.05
NOTICE_SECONDS = 1.0  # a rank that died without a word did so at most this long before it was seen
SETTLE_SECONDS = 0.5  # after the first failure, until it is clear who was first
GRACE_SECONDS = 10.0  # from SIGTERM to SIGKILL after a failure
STOP_SECONDS = 300.0  # for the others, after one rank has stopped in order
DUMP_SECONDS = 0.5
HEART_SECONDS = 1.0  # between two looks at the ranks' signs of life
HOLD_SECONDS = 3.0  # a traceback of rank 0 is shown after this, if nobody fails
LEAST_BYTES = 1 << 16  # free on the disk of what ranks say; below, their words may be lost
MOST_BYTES = 1 << 16  # of one rank's stderr that are shown
PREFIX = r"(?:\[rank\d+\]: ?)?"  # torch's, before each line of a traceback
LAST_WORDS = re.compile(PREFIX + r"(?:Traceback \(most recent|error: |terminate called|Fatal Python error|rank \d+ ends after)")


def supervise(command: Sequence[str], processes: int, threads: int = 0, logs: Path | None = None) -> int:
    """Run `command` as `processes` ranks of this machine until all have ended; returns the exit code of the run.

    The command finds torchrun's environment. SIGINT, SIGTERM and SIGUSR1 reach every rank; a second one of them ends ranks that don't stop.
    When a rank fails the others get SIGTERM, and SIGKILL after GRACE_SECONDS. When one gives no sign of life (health.py), the stacks of all are
    shown, and all are killed. `threads`: OpenMP threads of a rank, 0: cores / ranks.
    `logs`: a folder for what the ranks other than rank 0 say, and for all that goes to stderr; None forgets it.

    Returns 0 when all ranks did; 75 when they stopped after a signal; HUNG when they hung; else the code of the rank that failed first (1 if
    a signal ended it), which is OUT_OF_MEMORY where that was the cause.
    """
    with _signals() as signals, _folder(logs) as folder, _quiet_elastic():
        forget_hearts(folder)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # held here: no free port to lose before rank 0 takes it
        environment = {rank: _environment(rank, processes, store.port, threads) for rank in range(processes)}
        arguments = {rank: tuple(command[1:]) for rank in range(processes)}
        context = None
        try:
            with signals.replaced_by_others():
                context = start_processes("rank", command[0], arguments, environment, _Logs(folder))
            return _Supervision(context.subprocess_handlers, folder, signals).run()  # type: ignore[attr-defined]
        except SignalException:  # in the few milliseconds of the start: ranks that run already miss their supervisor and leave
            return STOPPED
        except OSError as error:
            raise UserError(f"the ranks can't be started: {error}") from None
        finally:
            if context is not None:
                _end(context)


def _environment(rank: int, processes: int, port: int, threads: int) -> dict[str, str]:
    """What torchrun sets, and the number of threads. Loopback: ranks of one machine need no name and no network."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    one = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RUN_ID": "local",
        "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0, "OMP_NUM_THREADS": threads or max(1, cores // processes),
        SUPERVISOR: os.getpid(),
    }  # fmt: skip
    if sys.platform == "linux":
        one["GLOO_SOCKET_IFNAME"] = "lo"
    return {name: str(value) for name, value in one.items()}


class _Logs(LogsSpecs):
    """One file for each stream and rank; rank 0's stdout stays the terminal's."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = folder

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for rank, environment in envs.items():
            _error_file(self.folder, rank).unlink(missing_ok=True)
            environment[ERROR_FILE] = str(_error_file(self.folder, rank))
        return LogsDest(
            stdouts={rank: str(self.folder / f"rank-{rank}.out") if rank else "" for rank in envs},
            stderrs={rank: str(_stderr_file(self.folder, rank)) for rank in envs},
            error_files={rank: environment[ERROR_FILE] for rank, environment in envs.items()},
        )

    @property
    def root_log_dir(self) -> str:
        return str(self.folder)


def _error_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.error.json"


def _stderr_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.err"


@dataclass
class _End:
    """Of one rank; `when` in seconds since 1970, as near to the cause as is known. `ours`: a signal from here ended it."""

    rank: int
    code: int
    when: float
    ours: bool


class _Supervision:
    """Watches the ranks until none is left."""

    def __init__(self, handlers: Mapping[int, Any], folder: Path, signals: _Signals) -> None:
        self.processes = {rank: handler.proc for rank, handler in handlers.items()}
        self.count, self.folder, self.signals = len(self.processes), folder, signals
        self.ends: dict[int, _End] = {}
        self.sent: list[int] = []  # signals that went to the ranks
        self.relay = _Relay(_stderr_file(folder, 0))
        self.first: _End | None = None
        self.hung = False

    def run(self) -> int:
        bad_since, terminated_at, forwarded, looked = 0.0, 0.0, 0, time.monotonic()
        while self.processes:
            time.sleep(POLL_SECONDS)
            self._look()
            now = time.monotonic()
            self.relay.pass_on(hold_on=bool(bad_since))
            for number in self.signals.got[forwarded:]:
                terminated_at = now if number in self.sent else terminated_at  # asked twice: no more patience
                self._send(number)
                forwarded += 1
            ends = self.ends.values()
            if not bad_since and any(end.code for end in ends):
                bad_since = now
            if bad_since and not terminated_at:
                in_order = all(end.code in (0, STOPPED) for end in ends)
                if now > bad_since + (STOP_SECONDS if in_order else SETTLE_SECONDS):
                    self._show_first()
                    self._send(signal.SIGTERM)
                    terminated_at = now
            if terminated_at and now > terminated_at + GRACE_SECONDS:
                self._kill(f"did not stop within {GRACE_SECONDS:g} s and was killed; it was here:")
                break
            if not bad_since and not terminated_at and now > looked + HEART_SECONDS:
                looked = now
                if late := [one for one in overdue(self.folder, self.count) if one.rank in self.processes]:
                    self._end_hang(str(late[0]), late[0].step)
                    break
        self.relay.pass_on(hold_on=True)
        self._show_first()
        return self._code()

    def _look(self) -> None:
        for rank, process in list(self.processes.items()):
            code = process.poll()
            if code is not None:
                del self.processes[rank]
                told = _told(self.folder, rank)[0]
                ours = -code in self.sent or (code == INTERRUPTED and signal.SIGINT in self.sent)
                self.ends[rank] = _End(rank, code, told or time.time() - NOTICE_SECONDS, ours)

    def _send(self, number: int, group: bool = False) -> None:
        self.sent.append(number)
        for process in self.processes.values():
            with suppress(ProcessLookupError):
                (os.killpg if group else os.kill)(process.pid, number)

    def _end_hang(self, text: str, step: int) -> None:
        self.hung = True
        self.relay.pass_on(hold_on=False)
        sys.stdout.flush()
        print(f"{text}: the run hangs, and all ranks are killed", file=sys.stderr, flush=True)
        if (self.folder.parent / "run.yaml").is_file():
            add_incident(self.folder.parent, "hang", step, text)
        self._kill("was here:")

    def _kill(self, how: str) -> None:
        """End what is left, with all that it started, and show where it was."""
        before = {rank: len(_tail(_stderr_file(self.folder, rank), -1)) for rank in self.processes}
        self._send(signal.SIGCONT)  # one that was stopped can tell nothing
        self._send(STACKS)
        time.sleep(DUMP_SECONDS)
        self._send(signal.SIGKILL, group=True)
        end = time.monotonic() + GRACE_SECONDS / 2
        while self.processes and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
            self._look()
        self.relay.skip()
        for rank, size in before.items():
            stacks = _tail(_stderr_file(self.folder, rank), -1)[size:]
            print(f"rank {rank} {how}\n{stacks}", end="", file=sys.stderr, flush=True)

    def _failures(self) -> list[_End]:
        """Ranks that failed by themselves, the first one first; those that have said so but are still there, too."""
        failures = [end for end in self.ends.values() if end.code not in (0, STOPPED) and not end.ours]
        told = ((rank, _told(self.folder, rank)[0]) for rank in self.processes)
        failures += [_End(rank, 1, when, False) for rank, when in told if when]
        return sorted(failures, key=lambda end: (end.when, end.rank))

    def _show_first(self) -> None:
        """Show what the first failing rank said, once; the others' words are consequences."""
        failures = self._failures()
        if self.first is not None or self.hung:
            return
        if not failures or (self.signals.got and any(end.ours for end in self.ends.values())):  # stopped before it could stop in order
            if not self.processes:
                self.relay.flush()
            return
        self.first = failures[0]
        rank = self.first.rank
        if rank in self.processes:  # it is writing its traceback at this moment
            with suppress(Exception):
                self.first.code = self.processes[rank].wait(2.0)
        text = _last_words(self.relay.held() if rank == 0 else _tail(_stderr_file(self.folder, rank)))
        if "Traceback" not in text and "error: " not in text:
            text += _told(self.folder, rank)[1]
        if not text and (full := _full(self.folder)):
            text = f"error: {full}\n"
        if self.first.code != 2 or not text:
            how = f"was ended by {_signal_name(-self.first.code)}" if self.first.code < 0 else f"failed with exit code {self.first.code}"
            text += f"rank {rank} of {self.count} {how}; the other ranks end, too\n"
        sys.stdout.flush()
        print(text, end="", file=sys.stderr, flush=True)

    def _code(self) -> int:
        if self.hung:
            return HUNG
        if self.first is not None:
            code = self.first.code
            if code == OUT_OF_MEMORY and self.signals.got:
                return STOPPED  # somebody wants it to end: that it may start again can wait
            return code if code > 0 else 1
        if any(end.code for end in self.ends.values()):
            return STOPPED
        return 0


def _signal_name(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


# ----------------------------------------------------------------------------------------------------------- what ranks say
class _Relay:
    """Rank 0's stderr, passed on as it comes, except what looks like its last words: those may be a consequence of another's failure."""

    def __init__(self, path: Path) -> None:
        self.path, self.position, self.waiting, self.since = path, 0, b"", 0.0

    def pass_on(self, hold_on: bool) -> None:
        """Show the new lines. Last words are held, with all that follows; if everybody lives on they are shown after HOLD_SECONDS."""
        with suppress(FileNotFoundError), open(self.path, "rb") as file:
            file.seek(self.position)
            new = file.read()
            self.position += len(new)
            self.waiting += new
        now = time.monotonic()
        if not self.since:
            lines = self.waiting.splitlines(keepends=True)
            free = next((index for index, line in enumerate(lines) if LAST_WORDS.match(line.decode(errors="replace"))), None)
            if free is None:
                free = len(lines) - (bool(lines) and not lines[-1].endswith((b"\n", b"\r")) and len(lines[-1]) < 80)  # may become a last word
            else:
                self.since = now
            _show(b"".join(lines[:free]))
            self.waiting = b"".join(lines[free:])
        elif not hold_on and now > self.since + HOLD_SECONDS:
            self.flush()

    def held(self) -> str:
        """What was not shown yet."""
        self.pass_on(hold_on=True)
        text, self.waiting = self.waiting[-MOST_BYTES:].decode(errors="replace"), b""
        return text

    def skip(self) -> None:
        """Show nothing of what came since the last look."""
        with suppress(OSError):
            self.position = self.path.stat().st_size

    def flush(self) -> None:
        """Show everything."""
        _show(self.waiting)
        self.waiting, self.since = b"", 0.0


def _show(text: bytes) -> None:
    if text:
        sys.stderr.write(text.decode(errors="replace"))
        sys.stderr.flush()


def _full(folder: Path) -> str:
    """Why nothing is known of what a rank said, if the disk is why."""
    with suppress(OSError):
        if shutil.disk_usage(folder).free < LEAST_BYTES:
            return f"the disk of {folder} is full, so what the rank said is lost; free some space and start the same command again"
    return ""


def _tail(path: Path, most: int = MOST_BYTES) -> str:
    """The last `most` bytes of a text (-1: all), closed by a line end."""
    with suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - most) if most >= 0 else 0)
        text = file.read().decode(errors="replace")
        return text if not text or text.endswith("\n") else text + "\n"
    return ""


def _last_words(text: str) -> str:
    """From the first line on that looks like the end of a rank, without torch's prefix; all of it where none does."""
    lines = text.splitlines(keepends=True)
    begin = next((index for index, line in enumerate(lines) if LAST_WORDS.match(line)), 0)
    return "".join(re.sub(PREFIX, "", line, count=1) for line in lines[begin:])


def _told(folder: Path, rank: int) -> tuple[float, str]:
    """When the rank says that it failed, in seconds since 1970 (0: it said nothing), and its traceback."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        message = json.loads(_error_file(folder, rank).read_text(encoding="utf-8"))["message"]
        extra = message["extraInfo"]
        return extra["nanoseconds"] / 1e9, "" if message["message"].startswith("SystemExit") else extra["py_callstack"]
    return 0.0, ""


# ---------------------------------------------------------------------------------------------------------------- signals
class _Signals:
    """What this process was asked, to be passed on: SIGINT as it is, the end of a terminal as SIGTERM, so that ranks save."""

    def __init__(self) -> None:
        self.got: list[int] = []
        self.mine = threading.current_thread() is threading.main_thread()

    def hear(self, number: int, frame: FrameType | None) -> None:
        self.got.append(signal.SIGTERM if number == signal.SIGHUP else number)

    @contextmanager
    def replaced_by_others(self) -> Iterator[None]:
        """Run the block in which torch's launcher sets handlers of its own, then hear again."""
        yield
        if self.mine:
            for number in HEARD:
                signal.signal(number, self.hear)


HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@contextmanager
def _signals() -> Iterator[_Signals]:
    signals = _Signals()
    before = {number: signal.signal(number, signals.hear) for number in (*HEARD, signal.SIGQUIT)} if signals.mine else {}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _quiet_elastic() -> Iterator[None]:
    logger = logging.getLogger("torch.distributed.elastic.multiprocessing")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def _folder(logs: Path | None) -> Iterator[Path]:
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
        yield logs
        return
    with tempfile.TemporaryDirectory(prefix="megadcp-ranks-") as folder:
        yield Path(folder)


def _end(context: Any) -> None:
    """No rank outlives this call."""
    for handler in context.subprocess_handlers.values():
        with suppress(ProcessLookupError):
            if handler.proc.poll() is None:
                os.killpg(handler.proc.pid, signal.SIGKILL)
    context.close(signal.SIGKILL, timeout=5)
