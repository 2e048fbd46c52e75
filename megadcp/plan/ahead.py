"""Planning ahead: a process of its own makes the plans of the next steps while the trainer trains.

The trainer knows the lengths of any step from the index, so it hands them over some steps early and takes each plan when it needs it.
The process is a fresh interpreter on a socket, not a multiprocessing child: it imports the planner and nothing of the trainer's main
program (no torch, no CUDA context), and shares no lock with anybody. Messages are pickles between two processes of one program.

The process ends with the trainer, however that ends; signals that are meant for the trainer (Ctrl-C reaches a whole process group, SLURM
signals every process of a job) do nothing to it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, NoReturn

from megadcp.config.check import UserError
from megadcp.config.schema import Config
from megadcp.plan.plan_file import Record, record_of
from megadcp.plan.planner import planner_for
from megadcp.plan.step_plan import StepPlan

Planner = Callable[..., StepPlan]  # (step, lengths, and what `more` of PlanWorker gives for the step)

FOR_THE_TRAINER = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
START = """
import pickle, socket, sys
line = socket.socket(fileno=int(sys.argv[1]))
requests = line.makefile("rb")
sys.path[:] = pickle.load(requests)
from megadcp.plan.ahead import serve
serve(line, requests, int(sys.argv[2]))
"""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")  # the planner does no matrix products
POLL_SECONDS = 1.0  # between two looks whether the process lives, should the end of its socket not show it
PARENT_SECONDS = 2.0  # likewise for the trainer, in the process
LONG_WAIT_SECONDS = 60.0  # after this the trainer is told what it waits for
CLOSE_SECONDS = 0.3  # an idle process ends by itself in this time; a busy one is killed
DEATH_SECONDS = 5.0
STDERR_BYTES = 8192  # of the process's last words, at most


@dataclass(frozen=True)
class Planned:
    """A plan, its lines for plans.jsonl, the seconds its planning took and the seconds that take() waited for it."""

    plan: StepPlan
    record: Record
    plan_seconds: float
    wait_seconds: float


class PlanWorkerDied(RuntimeError):
    """The planning process ended by itself: the message has its exit code or signal and its last words."""


class PlansClosed(RuntimeError):
    """take() or submit() after close(), or while it happened."""


class WorkerTraceback(Exception):
    """The cause of an exception that was raised in the planning process; its text is the traceback there."""

    def __str__(self) -> str:
        return f"\n\nTraceback in the planning process:\n{self.args[0]}"


class PlanWorker:
    """Plans of steps in the order in which their lengths were handed in, made by a process of its own.

    submit() and take() belong to one thread; close() may come from any. A UserError of the planner is raised by take() of its step, as it
    would be in this process; any other exception comes with the traceback of the process as its cause. When the process dies, take() of
    the first plan that is missing raises PlanWorkerDied (plan.worker_death=stop), or reports one line and goes on planning in this
    process, with the same plans (replace).
    """

    def __init__(self, config: Config, report: Callable[[str], None] = lambda line: None, make: Callable[[Config], Planner] = planner_for) -> None:
        """Starts nothing yet. `make` is looked up by name in the process: a function of a module that can be imported."""
        self.config, self.report, self.make = config, report, make
        self.more: Callable[[int], tuple[Any, ...]] = lambda step: ()  # what else the planner is given, asked for as lengths are handed in
        self._process: _Process | None = None
        self._pending: deque[tuple[Any, ...]] = deque()
        self._here: Planner | None = None  # plans in the place of a process that died
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Of the process, or None where there is none."""
        return None if self._process is None else self._process.popen.pid

    def start(self) -> None:
        """Start the process now: it needs a few tenths of a second, in which this one can do something else. submit() does it too.

        UserError if the system doesn't let it (and plan.worker_death=stop).
        """
        if self._closed:
            raise PlansClosed("planning ahead is closed")
        if self._process is None and self._here is None:
            try:
                self._process = _Process(self.config, self.make)
            except OSError as error:
                problem = f"the planning process can't be started ({error})"
                if self.config.plan.worker_death != "replace":
                    raise UserError(f"{problem}; plan.worker=thread needs none, plan.worker_death=replace does without it") from None
                self._replace(problem)

    def submit(self, step: int, lengths: Sequence[int]) -> None:
        """Hand in the lengths of a step, in the order in which the plans will be taken."""
        self.start()
        request = (step, list(lengths), *self.more(step))
        self._pending.append(request)
        if self._process is not None and self._here is None:
            self._process.ask(request)

    def take(self, step: int) -> Planned:
        """The plan of the step that was handed in first of those not yet taken. Waits for it."""
        if not self._pending or self._pending[0][0] != step:
            found = f"the next one is step {self._pending[0][0]}" if self._pending else "none is handed in"
            raise ValueError(f"the plan of step {step} is asked for, but {found}: plans are taken in the order in which lengths were handed in")
        begin = time.perf_counter()
        answer = self._wait(step)
        request = self._pending.popleft()
        if answer is None:
            assert self._here is not None
            started = time.perf_counter()
            plan = self._here(*request)
            seconds = time.perf_counter() - started
            return Planned(plan, record_of(plan), seconds, time.perf_counter() - begin)
        found_step, plan_or_failure, record, seconds = pickle.loads(answer)
        if found_step != step:
            raise RuntimeError(f"the planning process answered step {found_step} where step {step} was due")
        if isinstance(plan_or_failure, _Failure):
            plan_or_failure.raise_here()
        return Planned(plan_or_failure, record, seconds, time.perf_counter() - begin)

    def _wait(self, step: int) -> bytes | None:
        """The process's next answer; None when this process has to plan. Says so once when it takes long."""
        if self._closed:
            raise PlansClosed("planning ahead is closed")
        process = self._process
        if process is None or self._here is not None:
            return None
        since, told = time.perf_counter(), False
        while True:
            answer = process.answer()
            if answer is not None:
                return answer
            if self._closed:
                raise PlansClosed("planning ahead was closed")
            if process.ended:
                self._replace(process.death(step))
                return None
            if not told and time.perf_counter() - since > LONG_WAIT_SECONDS:
                told = True
                self.report(f"step {step}: waiting for its plan for {LONG_WAIT_SECONDS:.0f} s, the planning process {self.pid} is still at it")

    def _replace(self, problem: str) -> None:
        if self.config.plan.worker_death != "replace":
            raise PlanWorkerDied(f"{problem}\nplan.worker_death=replace plans on in the trainer; plan.worker=thread needs no process")
        self.report(f"WARNING: {' '.join(problem.split())}; from here on this process plans itself (plan.worker_death=replace)")
        self._here = self.make(self.config)

    def close(self) -> None:
        """End the process, within about CLOSE_SECONDS even when it is busy; a take() that waits raises PlansClosed."""
        self._closed = True
        if self._process is not None:
            for line in self._process.close():
                self.report(f"the planning process said: {line}")

    def __enter__(self) -> PlanWorker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _Process:
    """The process, the socket to it, and a thread that reads its answers, so that neither side ever waits for the other to read."""

    def __init__(self, config: Config, make: Callable[[Config], Planner]) -> None:
        self.stderr = tempfile.TemporaryFile()  # noqa: SIM115 - read after the process has ended
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable or "", "-P", "-c", START, str(theirs.fileno()), str(os.getpid())]
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_TRAINER)  # inherited: no moment in which a signal could end it
            try:
                self.popen = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=self.stderr, stderr=self.stderr, pass_fds=[theirs.fileno()], env=os.environ | ONE_THREAD
                )
            except OSError:
                ours.close()
                self.stderr.close()
                raise
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        self.line = ours
        self.answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.ended = False
        self.end = weakref.finalize(self, _end, self.popen, ours, os.getpid())  # also when it was forgotten, and when Python ends
        threading.Thread(target=_read, args=(ours.makefile("rb"), self.answers), name="plan-reader", daemon=True).start()
        self.ask([entry or os.getcwd() for entry in sys.path])
        self.ask((config, make))

    def ask(self, message: Any) -> None:
        """Send; a process that has died is noticed by who waits for the answer."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with contextlib.suppress(OSError):
            self.line.sendall(data)

    def answer(self) -> bytes | None:
        """The next answer, waited for POLL_SECONDS. None: none yet, or `ended` is set and there will be no more."""
        dead = self.popen.poll() is not None  # asked before: then whatever it wrote is on its way to the queue
        try:
            answer = self.answers.get(timeout=POLL_SECONDS)
        except queue.Empty:
            self.ended = dead
            return None
        self.ended = answer is None
        return answer

    def death(self, step: int) -> str:
        """How it ended, with its last words."""
        try:
            code = self.popen.wait(DEATH_SECONDS)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            code = self.popen.wait()
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else "a signal"
            how = f"was killed by {name} ({-code})" + (", often the system's answer to too little memory," if code == -signal.SIGKILL else "")
        else:
            how = f"ended with exit code {code}"
        said = self.said()
        return f"the planning process {self.popen.pid} {how} before it had the plan of step {step}" + (f"; it said last:\n{said}" if said else "")

    def said(self) -> str:
        """The end of what it wrote to stdout and stderr. Once: it is removed."""
        if self.stderr.closed:
            return ""
        with self.stderr:
            size = self.stderr.seek(0, os.SEEK_END)
            self.stderr.seek(max(0, size - STDERR_BYTES))
            return self.stderr.read().decode("utf-8", "replace").strip()

    def close(self) -> list[str]:
        """End the process if it hasn't, leave no zombie; what it wrote that nobody has seen."""
        self.end()
        self.answers.put(None)
        return self.said().splitlines()


def _end(popen: subprocess.Popen[bytes], line: socket.socket, owner: int) -> None:
    """Hang up; the process ends by itself, or is killed when it is too busy to notice."""
    if os.getpid() != owner:  # a fork of the trainer: the process isn't its own
        return
    with contextlib.suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)
    try:
        popen.wait(CLOSE_SECONDS)
    except subprocess.TimeoutExpired:
        popen.kill()
        popen.wait()
    line.close()


def _read(answers: IO[bytes], found: queue.SimpleQueue[bytes | None]) -> None:
    """Pass complete answers on (8 bytes of length, then a pickle), and None at the end."""
    with contextlib.suppress(OSError, ValueError), answers:
        while len(head := answers.read(8)) == 8:
            size = int.from_bytes(head, "little")
            answer = answers.read(size)
            if len(answer) < size:
                break
            found.put(answer)
    found.put(None)


# ------------------------------------------------------------------------------------------------------- in the process
def serve(line: socket.socket, requests: IO[bytes], parent: int) -> NoReturn:
    """What the process does: plans for (step, lengths) until the trainer hangs up."""
    for number in FOR_THE_TRAINER:
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()  # a crash leaves a stack among its last words
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the trainer has closed, or is gone
        _serve(line, requests)
    sys.stderr.flush()
    os._exit(0)


def _serve(line: socket.socket, requests: IO[bytes]) -> None:
    config, make = pickle.load(requests)
    planner, failure = None, None
    try:
        planner = make(config)
    except Exception as error:
        failure = _Failure.of(error)
    while True:
        request = pickle.load(requests)
        answer = (request[0], failure, None, 0.0) if planner is None else _plan(planner, request)
        data = pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)
        line.sendall(len(data).to_bytes(8, "little"))
        line.sendall(data)


def _plan(planner: Planner, request: tuple[Any, ...]) -> tuple[int, StepPlan | _Failure, Record | None, float]:
    begin, step = time.perf_counter(), request[0]
    try:
        plan = planner(*request)
        seconds = time.perf_counter() - begin
        return step, plan, record_of(plan), seconds
    except Exception as error:
        return step, _Failure.of(error), None, time.perf_counter() - begin


def _watch(parent: int) -> None:
    """End with the trainer also when somebody else (a fork of it) still holds its end of the socket, and while a plan is being made."""
    while os.getppid() == parent:
        time.sleep(PARENT_SECONDS)
    os._exit(0)


@dataclass(frozen=True)
class _Failure:
    """An exception on its way from the process to the trainer: itself pickled where that works, its message, and its traceback."""

    pickled: bytes
    message: str
    wrong_request: bool
    trace: str

    @classmethod
    def of(cls, error: Exception) -> _Failure:
        pickled = b""
        try:
            pickled = pickle.dumps(error)
            if type(pickle.loads(pickled)) is not type(error) or str(pickle.loads(pickled)) != str(error):
                pickled = b""
        except Exception:
            pickled = b""  # some exceptions can't be pickled, some not be built again
        return cls(pickled, str(error), isinstance(error, UserError), traceback.format_exc())

    def raise_here(self) -> NoReturn:
        if self.wrong_request:
            raise pickle.loads(self.pickled) if self.pickled else UserError(self.message)
        error = pickle.loads(self.pickled) if self.pickled else RuntimeError(self.trace.rstrip().rpartition("\n")[2])
        raise error from WorkerTraceback(self.trace)
