"""Lives of a run for tools/kill_test.py: started by its command, or forked from this process, which has imported everything; and their end.

A forked life is the same supervisor with the same ranks (real processes, sessions, locks and sockets) and saves the seconds in which torch is
imported. Everything that a life leaves behind becomes a child of this process (PR_SET_CHILD_SUBREAPER), so no orphan can hide.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch._dynamo  # imported late by a rank: here once, instead of in every life
import torch.distributed.checkpoint.state_dict_saver
from kill_test_watch import AT_RANDOM, Moment, Watch
from torch.distributed.elastic.multiprocessing import LogsSpecs

from megadcp.config.load import reported
from megadcp.config.schema import Config
from megadcp.train import entry, evaluate, finish, launch, loop, rank, supervise

ROOT = Path(__file__).resolve().parents[1]
SUBREAPER = 36  # of prctl
VICTIMS = ("all", "all", "all", "supervisor", "rank 0", "rank 1")
WARM = (evaluate, finish, loop)  # imported here for the lives that are forked


@dataclass(frozen=True)
class Request:
    """What every life of a run is asked: by the command line, and composed. `temporary`: its TMPDIR."""

    arguments: tuple[str, ...]
    config: Config
    log: Path
    temporary: Path

    @property
    def command(self) -> list[str]:
        """As a user types it."""
        return [sys.executable, str(ROOT / "pretrain_gpt.py"), *self.arguments]

    @property
    def folder(self) -> Path:
        """Of the run."""
        return Path(self.config.run.folder) / self.config.run.name


def become_subreaper() -> None:
    """Orphans of this process's children become its own children."""
    if ctypes.CDLL(None, use_errno=True).prctl(SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "this system doesn't let a process take orphans")


# ------------------------------------------------------------------------------------------------------------------- start
def start(request: Request, forked: bool) -> int:
    """Start a life; its process id."""
    with open(request.log, "ab") as log:
        if not forked:
            environment = {**os.environ, "TMPDIR": str(request.temporary), "OMP_NUM_THREADS": "1"}
            made = subprocess.Popen(request.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True)
            made.returncode = 0  # it is waited for here, together with all orphans
            return made.pid
        sys.stdout.flush()
        gc.freeze()  # the collector of a child would copy all pages
        pid = os.fork()
        if pid:
            gc.unfreeze()
            return pid
        _become(log.fileno(), log.fileno(), {"TMPDIR": str(request.temporary)})
    vars(supervise)["start_processes"] = _fork_ranks
    _run(lambda: reported(lambda: entry.start(request.config)))


def _become(out: int, errors: int, environment: Mapping[str, str]) -> None:
    """Make a fork as like a process of its own as it can be: session, streams, environment, signals."""
    os.setsid()
    os.dup2(out, 1)
    os.dup2(errors, 2)
    sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))  # noqa: SIM115
    os.environ.update(environment)
    tempfile.tempdir = None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _run(action: Callable[[], int]) -> NoReturn:
    """End this process with the code of an action, as Python would."""
    code = 1
    try:
        code = action()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


@dataclass
class _Ranks:
    """What the supervisor gets from torch's launcher: processes by rank."""

    subprocess_handlers: dict[int, _Handler]

    def close(self, *_: object, **__: object) -> None:
        """Ranks that the supervisor has ended leave no zombie."""
        for handler in self.subprocess_handlers.values():
            handler.proc.wait(5.0)


@dataclass
class _Handler:
    proc: _Process


@dataclass
class _Process:
    """A forked rank, with what subprocess.Popen has of it."""

    pid: int
    code: int | None = None

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self, seconds: float) -> int:
        """The same; TimeoutError when it takes longer."""
        end = time.monotonic() + seconds
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise TimeoutError
            time.sleep(0.01)
        return code


def _fork_ranks(name: str, program: str, arguments: Mapping[int, Sequence[str]], environments: Mapping[int, Any], logs: LogsSpecs) -> _Ranks:
    """In the place of torch's launcher: the same sessions, streams and environments, without new interpreters."""
    places = logs.reify(dict(environments))
    made = {}
    for number, environment in environments.items():
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            out = os.open(places.stdouts[number], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644) if places.stdouts[number] else os.dup(1)
            errors = os.open(places.stderrs[number], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            _become(out, errors, environment)
            os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)  # above all the lock, which dies with the supervisor
            folder = Path(arguments[number][-1])
            _run(lambda: launch.exit_code(lambda: rank.main(folder)))  # noqa: B023 - it never returns
        made[number] = _Handler(_Process(pid))
    return _Ranks(made)


# --------------------------------------------------------------------------------------------------------------------- kill
@dataclass
class Death:
    """How a life ended. victim: "" where it came to its end before the moment did. first_row: seconds to its first step's row, if there was one."""

    victim: str
    change: str
    rows: int
    first_row: float
    seconds: float


def live(request: Request, forked: bool, moment: Moment | None, victim: str, most_rows: int, limit_s: float) -> tuple[int, Death]:
    """Start a life and kill its victim at the moment, after most_rows rows at the latest; None: never. TimeoutError: it hangs (and is killed)."""
    with Watch(request.folder) as watch:
        begin, seen, rows, first_row = time.monotonic(), 0, 0, 0.0
        pid = start(request, forked)
        ended, poll = os.pidfd_open(pid), select.poll()
        poll.register(watch, select.POLLIN)
        poll.register(ended, select.POLLIN)
        due = moment.seconds if moment is not None and moment.name == AT_RANDOM else None
        try:
            while True:
                left = limit_s if due is None else begin + due - time.monotonic()
                events = poll.poll(max(0.0, 1000 * left)) if left > 0.002 else _nap(left)
                if any(handle == ended for handle, _ in events):
                    return pid, Death("", "", rows, first_row, time.monotonic() - begin)
                if not events and due is None:
                    raise TimeoutError
                if not events:
                    return pid, Death(_kill(pid, victim), AT_RANDOM, rows, first_row, time.monotonic() - begin)
                for change in watch.changes():
                    rows += change == "modify metrics.jsonl"
                    first_row = first_row or (time.monotonic() - begin if rows else 0.0)
                    seen += moment is not None and moment.matches(change)
                    if moment is not None and due is None and (seen == max(1, moment.count) or rows > most_rows):
                        _spend(moment.seconds)
                        return pid, Death(_kill(pid, victim), change, rows, first_row, time.monotonic() - begin)
                if time.monotonic() > begin + limit_s:
                    raise TimeoutError
        except TimeoutError:
            _kill(pid, "all")
            raise
        finally:
            os.close(ended)


def _nap(seconds: float) -> list[tuple[int, int]]:
    _spend(seconds)
    return []


def _spend(seconds: float) -> None:
    """Wait exactly: a sleep may take a millisecond more."""
    end = time.perf_counter() + seconds
    if seconds > 0.002:
        time.sleep(seconds - 0.001)
    while time.perf_counter() < end:
        pass


def children(pid: int) -> list[int]:
    """Of a process, in the order in which they were made."""
    with contextlib.suppress(OSError):
        return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()))
    return []


def _kill(pid: int, victim: str) -> str:
    """SIGKILL one process, or the supervisor and all ranks; who it was."""
    ranks = children(pid)
    number = int(victim.split()[-1]) if victim.startswith("rank") else -1
    if number >= len(ranks):
        victim, number = "all", -1  # before there were any
    targets = [ranks[number]] if number >= 0 else [pid, *ranks] if victim == "all" else [pid]
    for target in targets:
        with contextlib.suppress(ProcessLookupError):
            os.kill(target, signal.SIGKILL)
    return victim


def bury(pid: int, limit_s: float) -> tuple[int | None, list[int]]:
    """Wait until no process of the life is left; its exit code, and those that are still there after limit_s (they are killed)."""
    code, end = None, time.monotonic() + limit_s
    while True:
        try:
            found, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code, []
        if found == pid:
            code = os.waitstatus_to_exitcode(status)
        elif not found and time.monotonic() > end:
            break
        elif not found:
            time.sleep(0.002)
    left = children(os.getpid())
    for one in left:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(one, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    return code, left


torch.set_num_threads(1)  # a fork must not find threads that its parent has and it has not
