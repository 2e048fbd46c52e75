"""Worker processes, each with a pipe of its own and no shared lock, so that one that dies can't hold up or silently shorten the rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

from megadcp.data import worker_server
from megadcp.data.preprocess_worker import Failure, PartMaker, Recipe, worker_main
from megadcp.data.raw_parts import Part


class WorkerDied(RuntimeError):
    """A worker ended by itself (killed, out of memory, crashed)."""


class PartFailed(Exception):
    """The first part of the corpus that can't be made; args[0] is the Failure."""


class WorkerPool:
    """`workers` processes; with one, the parts are made in this process. A context manager that leaves no process behind."""

    def __init__(self, recipe: Recipe, workers: int) -> None:
        """Starts the processes; they inherit nothing of this one."""
        self.maker = PartMaker(recipe) if workers == 1 else None
        self.processes: dict[Connection, Any] = {}
        context = worker_server.context()
        for _ in range(workers if workers > 1 else 0):
            ours, theirs = context.Pipe()
            process = context.Process(target=worker_main, args=(theirs, recipe), daemon=True)
            process.start()
            theirs.close()  # so that the worker's end closes when the worker dies
            self.processes[ours] = process

    def run(self, parts: Iterable[Part]) -> Iterator[tuple[Part, dict[str, Any]]]:
        """(part, summary) as parts are finished, in any order. Raises WorkerDied, or PartFailed for the first bad part in corpus order."""
        if self.maker is not None:
            for part in parts:
                yield part, _checked(self.maker.make(part))
            return
        waiting = iter(parts)
        idle = list(self.processes)
        busy: dict[Connection, Part] = {}
        failure: Failure | None = None
        while True:
            while idle and failure is None:
                following = next(waiting, None)
                if following is None:
                    break
                connection = idle.pop()
                busy[connection] = following
                self._send(connection, following)
            late = [part for part in busy.values() if failure is None or part.index < failure.part]
            if not late:
                break
            for connection in self._ready(busy):
                part = busy.pop(connection)
                idle.append(connection)
                answer = self._receive(connection, part)
                if not isinstance(answer, Failure):
                    yield part, answer
                elif failure is None or answer.part < failure.part:  # parts before it are still awaited: one of them may be the first bad one
                    failure = answer
        if failure is not None:
            raise PartFailed(failure)

    def _ready(self, busy: dict[Connection, Part]) -> list[Connection]:
        sentinels = {process.sentinel: connection for connection, process in self.processes.items()}
        ready = wait([*busy, *sentinels])
        answered = [connection for connection in busy if connection in ready]
        if not answered:  # nothing to read, so somebody died: maybe one without work
            connection = next(sentinels[item] for item in ready if not isinstance(item, Connection))
            raise self._death(connection, busy.get(connection))
        return answered

    def _send(self, connection: Connection, part: Part) -> None:
        try:
            connection.send(part)
        except OSError:
            raise self._death(connection, part) from None

    def _receive(self, connection: Connection, part: Part) -> Any:
        try:
            return connection.recv()
        except (EOFError, OSError):
            raise self._death(connection, part) from None

    def _death(self, connection: Connection, part: Part | None) -> WorkerDied:
        process = self.processes[connection]
        process.join(timeout=5)
        code = process.exitcode
        how = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
        hint = "; signal 9 is often the system's answer to too little memory: take fewer workers" if code == -9 else ""
        return WorkerDied(f"worker process {process.pid} ended {how} {f'in part {part.index}' if part else 'without work'}{hint}")

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self.processes:
            connection.close()  # an idle worker ends by itself
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.join()


def _checked(answer: dict[str, Any] | Failure) -> dict[str, Any]:
    if isinstance(answer, Failure):
        raise PartFailed(answer)
    return answer
