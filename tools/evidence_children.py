"""Work in child processes that end themselves when an operation takes too much CPU time; a new one takes the next operation.

Each child does one operation at a time. A job is a generator that asks for operations (evidence_steps.py); as many jobs as there are children
are under way. CPU time and not the clock decides, so that a busy machine does not change what is cut off.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

from evidence_ablation import ablation
from evidence_packs import packs
from evidence_sensitivity import sensitivity
from evidence_steps import STEP_OPERATIONS, Answer, Ask, Clock

from megadcp.config.check import UserError

PARENT_SECONDS = 5.0  # how often a child looks whether its parent still lives
CLOCK_FACTOR = 30.0  # of the limit, by the clock: a child that hangs without computing is ended, too
OPERATIONS = {**STEP_OPERATIONS, "ablation": ablation, "sensitivity": sensitivity, "packs": packs}
Job = Generator[Ask, Answer, dict[str, Any]]


def answer(ask: Ask) -> Answer:
    """Do one operation. {"why": text} where the run can't be planned."""
    try:
        return OPERATIONS[ask.operation](ask.job, Clock(ask.limit))
    except UserError as error:
        return {"why": str(error)}


class Child:
    """One process, started when it is first needed and again after it was cut off."""

    def __init__(self) -> None:
        self.process: Any = None
        self.pipe: Connection | None = None
        self.latest = 0.0  # by the clock, for the operation under way
        self.job: Job | None = None

    def ask(self, ask: Ask) -> None:
        """Begin an operation."""
        if self.process is None:
            context = multiprocessing.get_context("fork")
            self.pipe, theirs = context.Pipe()
            self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
            self.process.start()
            theirs.close()
        assert self.pipe is not None
        self.latest = time.monotonic() + CLOCK_FACTOR * ask.limit
        self.pipe.send(ask)

    def answer(self) -> Answer:
        """What came of it, or {"over": True}; the pipe must be readable, or the time over. RuntimeError for an error of the operation."""
        assert self.pipe is not None
        try:
            found: Answer | None = self.pipe.recv() if self.pipe.poll() else None
        except EOFError:
            found = None
        if found is None:
            code = self._ended()
            if code not in (-signal.SIGPROF, -signal.SIGKILL):
                raise RuntimeError(f"a child process ended with code {code}")
            return {"over": True}
        if "error" in found:
            raise RuntimeError(found["error"])
        return found

    def _ended(self) -> int:
        self.process.join(1.0)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        code = int(self.process.exitcode)
        self.close()
        return code

    def close(self) -> None:
        """End the process."""
        if self.pipe is not None:
            self.pipe.close()
        if self.process is not None and self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process = self.pipe = None


def _serve(pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its children
    parent = os.getppid()
    while True:
        try:
            while not pipe.poll(PARENT_SECONDS):
                if os.getppid() != parent:
                    return
            ask = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(answer(ask))
        except Exception:  # whatever it is, the parent shows it
            pipe.send({"error": f"{ask}\n{traceback.format_exc()}"})


def work(jobs: Iterator[Job], children: int, done: Callable[[dict[str, Any]], None], until: float) -> bool:
    """Run the jobs, `children` at a time, and hand each result over; nothing new is begun after `until` (monotonic). Whether all were begun."""
    idle, busy = [Child() for _ in range(children)], list[Child]()
    every = True
    try:
        while idle or busy:
            while idle:
                late = time.monotonic() >= until
                job = None if late else next(jobs, None)
                if job is None:
                    every = every and not (late and next(jobs, None) is not None)
                    idle.pop().close()
                    continue
                child = idle.pop()
                child.job = job
                (busy if _go_on(child, None, done) else idle).append(child)
            ready = wait([child.pipe for child in busy if child.pipe], timeout=1.0)
            for child in list(busy):
                if (child.pipe in ready or time.monotonic() > child.latest) and not _go_on(child, child.answer(), done):
                    busy.remove(child)
                    idle.append(child)
    finally:
        for child in [*idle, *busy]:
            child.close()
    return every


def _go_on(child: Child, found: Answer | None, done: Callable[[dict[str, Any]], None]) -> bool:
    """Let a child's job go on with an answer; False when it is over, its result handed over."""
    assert child.job is not None
    try:
        if found is not None:
            found.pop("done", None)
        child.ask(next(child.job) if found is None else child.job.send(found))
    except StopIteration as end:
        done(end.value)
        return False
    return True
