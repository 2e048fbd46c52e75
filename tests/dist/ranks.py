"""Tests of several ranks: `run_ranks(4, function)` runs function(rank, world) in four gloo processes and returns what each returned.

The ranks are forked from the test process (torch is imported once, closures work) and end without its exit handlers. Each uses one torch
thread. The first exception of a rank fails the call with that rank's traceback; a hang fails it with the stacks of all ranks.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import random
import selectors
import signal
import struct
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

GRACE_SECONDS = 0.3  # in which a rank that failed even earlier, but tells it later, is heard
DUMP_SECONDS = 0.5
HEAD = struct.Struct("!dbQ")  # time.monotonic() of the end, whether it is good, bytes that follow


class RankFailed(AssertionError):
    """A rank raised, died or hung. `rank` is the first one (-1: a hang); `error` is its exception, if it can be pickled."""

    def __init__(self, rank: int, text: str, error: BaseException | None = None) -> None:
        super().__init__(text)
        self.rank, self.error = rank, error


def run_ranks(world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0, connect: bool = True) -> list[Any]:
    """function(rank, world, *args) on `world` gloo ranks with torch.distributed up; what they return, in rank order (pickled).

    `connect=False`: processes that know nothing of each other, for tests of what starts torch.distributed.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks: list[_Rank] = []
        gc.freeze()  # the collector of a child would copy all pages of the parent
        try:
            for rank in range(world):
                ranks.append(_fork(rank, world, Path(folder), ranks, _Work(function, args, timeout_s, connect)))
            return _collect(ranks, timeout_s)
        finally:
            gc.unfreeze()
            for each in ranks:
                each.end()


@dataclass(frozen=True)
class _Work:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    timeout_s: float
    connect: bool


@dataclass
class _Rank:
    rank: int
    pid: int
    result: int  # pipe: read end of the result
    release: int  # pipe: closing the write end lets the process go
    stacks: Path
    data: bytes = b""
    when: float = 0.0
    good: bool | None = None
    value: Any = None

    def end(self) -> None:
        """Let it go, or end it if it has not finished."""
        for end in (self.result, self.release):
            os.close(end)
        if self.pid and not self.good:
            os.kill(self.pid, signal.SIGKILL)
        if self.pid:
            os.waitpid(self.pid, 0)

    def read(self) -> bool:
        """Take what the pipe holds; True when the rank has said all."""
        more = os.read(self.result, 1 << 20)
        self.data += more
        if len(self.data) >= HEAD.size:
            when, good, size = HEAD.unpack_from(self.data)
            if len(self.data) >= HEAD.size + size:
                self.when, self.good = when, bool(good)
                self.value = pickle.loads(self.data[HEAD.size :])
                return True
        if not more:  # it died: others can have noticed that before this process did
            _, status = os.waitpid(self.pid, 0)
            self.pid = 0
            code = os.waitstatus_to_exitcode(status)
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
            self.when, self.good, self.value = time.monotonic() - GRACE_SECONDS, False, (f"it {how}\n{self.stacks.read_text()}", None)
        return not more


def _fork(rank: int, world: int, folder: Path, earlier: list[_Rank], work: _Work) -> _Rank:
    result, told = os.pipe()
    waiting, release = os.pipe()
    stacks = folder / f"stacks-{rank}"
    stacks.touch()
    pid = os.fork()
    if pid:
        os.close(told)
        os.close(waiting)
        return _Rank(rank, pid, result, release, stacks)
    try:
        for end in (result, release, *(end for each in earlier for end in (each.result, each.release))):
            os.close(end)
        _child(rank, world, folder, work, told)
        os.read(waiting, 1)  # nobody leaves before all are done: a closed connection would be the others' error
    finally:
        os._exit(0)


def _child(rank: int, world: int, folder: Path, work: _Work, told: int) -> None:
    torch.set_num_threads(1)  # first of all: the parent's threads are not here
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    good = False
    try:
        with open(folder / f"stacks-{rank}", "a", encoding="utf-8") as stacks:
            faulthandler.enable(stacks)
            faulthandler.register(signal.SIGUSR1, stacks)
            random.seed(rank)
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            if work.connect:
                store = dist.FileStore(str(folder / "store"), world)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=work.timeout_s + 30))
            value: Any = work.function(rank, world, *work.args)
            message = pickle.dumps(value)
            good = True
            _tell(told, True, message)
            faulthandler.unregister(signal.SIGUSR1)
            faulthandler.disable()
    except BaseException as error:
        if not good:
            when = time.monotonic()
            text = traceback.format_exc()
            try:
                message = pickle.dumps((text, error))
                pickle.loads(message)
            except Exception:
                message = pickle.dumps((text, None))
            _tell(told, False, message, when)


def _tell(pipe: int, good: bool, message: bytes, when: float | None = None) -> None:
    left = memoryview(HEAD.pack(when or time.monotonic(), good, len(message)) + message)
    while left:
        left = left[os.write(pipe, left) :]


def _collect(ranks: list[_Rank], timeout_s: float) -> list[Any]:
    deadline, failed_at = time.monotonic() + timeout_s, None
    with selectors.DefaultSelector() as selector:
        for each in ranks:
            selector.register(each.result, selectors.EVENT_READ, each)
        while selector.get_map():
            end = deadline if failed_at is None else failed_at + GRACE_SECONDS
            ready = selector.select(max(0.0, end - time.monotonic()))
            if not ready:
                break
            for key, _ in ready:
                if key.data.read():
                    selector.unregister(key.fd)
                    if not key.data.good and failed_at is None:
                        failed_at = time.monotonic()
    failures = [each for each in ranks if each.good is False]
    if failures:
        first = min(failures, key=lambda each: each.when)
        text, error = first.value
        raise RankFailed(first.rank, f"rank {first.rank} of {len(ranks)} failed:\n{text}", error)
    if any(each.good is None for each in ranks):
        raise RankFailed(-1, _hang(ranks, timeout_s))
    return [each.value for each in ranks]


def _hang(ranks: list[_Rank], timeout_s: float) -> str:
    """The stacks of all ranks, for a reader."""
    for each in ranks:
        if each.good is None:
            os.kill(each.pid, signal.SIGUSR1)
    time.sleep(DUMP_SECONDS)
    stacks = ("has returned" if each.good else f"is here:\n{each.stacks.read_text()}" for each in ranks)
    return f"not all of {len(ranks)} ranks ended within {timeout_s:g} s\n" + "\n".join(f"rank {rank} {text}" for rank, text in enumerate(stacks))
