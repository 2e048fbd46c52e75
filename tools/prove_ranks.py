"""Gloo ranks on this machine that stay warm: every job runs on all of them at the same time, each in its own process.

They are forked from this process, so torch is imported once. A job that raises on a rank, kills one or hangs ends all of them, with what they
have to say in the exception; the next job gets new ones.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo  # imported at the first recompute: here once, instead of in every rank
import torch.distributed as dist

GRACE_SECONDS = 0.5  # after a failure: in which a rank that failed even earlier is heard
DUMP_SECONDS = 0.5
IDLE_SECONDS = 2.0  # between looks at whether the parent still lives


class RanksFailed(RuntimeError):
    """A rank raised, died or hung. `brief` is one line, the text has tracebacks."""

    def __init__(self, brief: str, text: str) -> None:
        super().__init__(text)
        self.brief = brief


class _Said(NamedTuple):
    """What a rank answers: when it was done, whether well, and the result, or the error's last line and the traceback."""

    when: float
    good: bool
    value: Any


class Ranks:
    """`world` processes with torch.distributed up. Use as a context."""

    def __init__(self, world: int, work: Callable[[int, Any], Any], limit_s: float) -> None:
        """work(rank, job) is what each does; limit_s: for one job."""
        self.world, self.work, self.limit_s = world, work, limit_s
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._sent = 0.0

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, job: Any) -> None:
        """Start a job on all ranks; `receive` waits for it."""
        if not self._processes:
            self._start()
        self._sent = time.monotonic()
        for pipe in self._pipes:
            try:
                pipe.send(job)
            except BrokenPipeError:  # it has died: `receive` will say so
                break

    def receive(self) -> list[Any]:
        """What the ranks returned, in order. RanksFailed: then they are gone."""
        said: dict[int, _Said] = {}
        end, failed = self._sent + self.limit_s, False
        while len(said) < self.world:
            left = [rank for rank in range(self.world) if rank not in said]
            ready = wait([self._pipes[rank] for rank in left], max(0.0, end - time.monotonic()))
            if not ready:
                break
            for rank in left:
                if self._pipes[rank] in ready:
                    said[rank] = self._hear(rank)
            if not failed and not all(each.good for each in said.values()):
                end, failed = min(end, time.monotonic() + GRACE_SECONDS), True
        bad = {rank: each for rank, each in said.items() if not each.good}
        if bad:
            first = min(bad, key=lambda rank: bad[rank].when)
            brief, text = bad[first].value
            self.close()
            raise RanksFailed(f"rank {first} of {self.world}: {brief}", f"rank {first} of {self.world} failed:\n{text}")
        if len(said) < self.world:
            text = self._stacks(said)
            self.close()
            raise RanksFailed(f"hang: not done within {self.limit_s:g} s", f"not all of {self.world} ranks ended within {self.limit_s:g} s\n{text}")
        return [said[rank].value for rank in range(self.world)]

    def close(self) -> None:
        """End the ranks that are left."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    # ------------------------------------------------------------------------------------------------------------- inside
    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="prove-")
        context = multiprocessing.get_context("fork")
        gc.freeze()  # a child's collector would copy all pages of this process
        for rank in range(self.world):
            mine, theirs = context.Pipe()
            arguments = (rank, self.world, theirs, Path(self._folder.name), self.work)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)
        gc.unfreeze()

    def _hear(self, rank: int) -> _Said:
        try:
            said: _Said = self._pipes[rank].recv()
            return said
        except (EOFError, ConnectionResetError):
            process = self._processes[rank]
            process.join()
            code = process.exitcode
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
            # others can have noticed before this process did: it is the cause
            return _Said(0.0, False, (f"the process {how}", f"the process {how}\n{self._stack_file(rank).read_text()}"))

    def _stack_file(self, rank: int) -> Path:
        assert self._folder is not None
        return Path(self._folder.name, f"stacks-{rank}")

    def _stacks(self, said: dict[int, _Said]) -> str:
        waiting = [rank for rank in range(self.world) if rank not in said]
        for rank in waiting:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(DUMP_SECONDS)
        return "\n".join(
            f"rank {rank} is here:\n{self._stack_file(rank).read_text()}" if rank in waiting else f"rank {rank} was done"
            for rank in range(self.world)
        )


def _serve(rank: int, world: int, pipe: Connection, folder: Path, work: Callable[[int, Any], Any]) -> None:
    """The life of one rank."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's affair
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = os.getppid()
    with open(folder / f"stacks-{rank}", "w", encoding="utf-8") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, stacks)
        try:
            if world > 1:
                os.environ["GLOO_SOCKET_IFNAME"] = "lo"
                dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(hours=1))
            while True:
                while not pipe.poll(IDLE_SECONDS):
                    if os.getppid() != parent:
                        os._exit(0)
                job = pipe.recv()
                result = work(rank, job)
                pipe.send(_Said(time.monotonic(), True, result))
        except EOFError:
            os._exit(0)
        except BaseException as error:
            when = time.monotonic()
            brief = " ".join(f"{type(error).__name__}: {error}".split())
            pipe.send(_Said(when, False, (brief[:200], traceback.format_exc())))
            time.sleep(60)  # a closed connection would be the others' error; the parent ends this process before that
            os._exit(1)
