"""The process that hands rows to a tracker: `python -m megadcp.train.tracker_process`. No torch.

It reads JSON lines from its standard input: first what the run is (`TrackedRun` in trackers.py), then a row of numbers each, at the end
{"end": true}; input that ends without it is a run that died. It answers with JSON lines: {"say": TEXT} for people, {"ready": true} once the tracker
takes rows. Whatever the tracker itself prints goes to a log file in the run folder.

Being a process of its own it may be slow, hang or crash: the trainer (trackers.py) waits for nothing of it but its end, and not for long.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

RESERVED = 1000  # numbers of rows that are set aside at one time
MOST_FAILURES = 5  # rows in a row that a tracker refuses; then it is given up
LOOK_SECONDS = 5.0  # between looks whether the trainer is still there
INIT_SECONDS = 60.0

Say = Callable[[str], None]


class Sink(Protocol):
    """What a tracker does."""

    def write(self, row: Mapping[str, float]) -> None:
        """Take the numbers of one step or validation; `step` is among them."""

    def close(self, ended: bool) -> None:
        """Finish. ended: the run came to an end that it knows of."""


class WandbSink:
    """Weights & Biases. The x axis is the run's own `step`: a step that is trained again after a crash is kept, too.

    wandb's inner counter only ever grows, over all processes of a run: `numbers` says which numbers may have been used.
    """

    def __init__(self, about: Mapping[str, Any], say: Say) -> None:
        import wandb

        self._numbers = _Numbers(Path(about["folder"]) / about["numbers"])
        self._run = self._open(wandb, about, say)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def _open(self, wandb: Any, about: Mapping[str, Any], say: Say) -> Any:
        mode = None if about["mode"] == "auto" else about["mode"]
        try:
            run = self._init(wandb, about, mode)
        except Exception as error:  # a server that isn't reached, a key that isn't known, ...
            if mode == "offline":
                raise
            why = "it has no key" if "API key" in str(error) else _one_line(error)
            say(f"wandb: no run online ({why}); it goes on offline")
            with contextlib.suppress(Exception):
                wandb.teardown()
            run = self._init(wandb, about, "offline")
        if getattr(run, "offline", False) or getattr(getattr(run, "settings", None), "_offline", False):
            again = " --append" if self._numbers.first else ""
            say(f"wandb: run {about['id']}, offline; `wandb sync{again} {_short_path(run.dir)}` sends it")
        else:
            say(f"wandb: run {about['id']}, {getattr(run, 'url', None) or 'online'}")
        return run

    def _init(self, wandb: Any, about: Mapping[str, Any], mode: str | None) -> Any:
        settings = wandb.Settings(init_timeout=INIT_SECONDS, console="off", disable_git=True)
        return wandb.init(
            id=about["id"], resume="allow", mode=mode, name=about["name"], project=about["project"], entity=about["entity"] or None,
            tags=about["tags"], config=about["config"], dir=about["folder"], settings=settings,
        )  # fmt: skip

    def write(self, row: Mapping[str, float]) -> None:
        """One row of history."""
        self._run.log(dict(row), step=self._numbers.take())

    def close(self, ended: bool) -> None:
        """Send what is left."""
        self._run.finish(exit_code=0 if ended else 1)
        self._numbers.close()


class _Numbers:
    """0, 1, 2, .. over all processes of a run: a file keeps a number above all that were given. After a crash some are left out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._next = int(path.read_text(encoding="ascii"))
        except (OSError, ValueError):
            self._next = 0
        self.first = self._kept = self._next

    def take(self) -> int:
        """The next one."""
        if self._next >= self._kept:
            self._keep(self._next + RESERVED)
        self._next += 1
        return self._next - 1

    def close(self) -> None:
        """None were lost."""
        self._keep(self._next)

    def _keep(self, number: int) -> None:
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        temporary.write_text(str(number), encoding="ascii")
        os.replace(temporary, self._path)
        self._kept = number


class TensorboardSink:
    """TensorBoard event files, by its own writer. What an earlier process wrote of later steps is struck out."""

    def __init__(self, about: Mapping[str, Any], say: Say) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = Path(about["folder"]) / "tensorboard"
        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder), flush_secs=10)
        self._writer.add_event(Event(wall_time=time.time(), step=about["last_step"] + 1, session_log=SessionLog(status=SessionLog.START)))
        say(f"tensorboard: `tensorboard --logdir {_short_path(folder)}` shows it")

    def write(self, row: Mapping[str, float]) -> None:
        """One event of all numbers."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in row.items() if name != "step"]
        self._writer.add_event(self._event(wall_time=time.time(), step=int(row["step"]), summary=self._summary(value=values)))

    def close(self, ended: bool) -> None:
        """Write what is left."""
        self._writer.close()


SINKS: dict[str, Callable[[Mapping[str, Any], Say], Sink]] = {"wandb": WandbSink, "tensorboard": TensorboardSink}


# ------------------------------------------------------------------------------------------------------------------ process
def main() -> int:
    """Exit code of the process: 1 when the tracker has failed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):  # the trainer decides when it ends
        signal.signal(number, signal.SIG_IGN)
    rows, answers = os.dup(0), os.fdopen(os.dup(1), "w", encoding="utf-8")
    lines = _lines(rows)
    about = json.loads(next(lines))
    with open(os.devnull, "rb") as nothing, open(Path(about["folder"]) / f"{about['kind']}.log", "a", encoding="utf-8") as log:
        os.dup2(nothing.fileno(), 0)  # a tracker that asks for a key finds nobody
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)

    def answer(**value: object) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(json.dumps(value), file=answers, flush=True)

    try:
        sink = SINKS[about["kind"]](about, lambda text: answer(say=text))
        answer(ready=True)
        ended = _feed(sink, lines, lambda text: answer(say=f"{about['kind']}: {text}"))
        _limit(about["timeout_s"])
        sink.close(ended)
    except BaseException as error:
        answer(say=f"{about['kind']} has failed ({_one_line(error)})")
        return 1
    return 0


def _feed(sink: Sink, lines: Iterator[str], say: Say) -> bool:
    """All rows; whether the run has said that it ended. RuntimeError when the tracker takes none any more."""
    failures = 0
    for line in lines:
        row = json.loads(line)
        if row.get("end"):
            return True
        try:
            sink.write(row)
            failures = 0
        except Exception as error:
            failures += 1
            if failures == 1:
                say(f"a row was refused ({_one_line(error)})")
            if failures == MOST_FAILURES:
                raise RuntimeError(f"it refused {failures} rows in a row; the last: {_one_line(error)}") from error
    return False


def _lines(handle: int) -> Iterator[str]:
    """Lines as they come; ends with the input, or with the trainer (whose other children may hold the pipe open)."""
    parent, rest = os.getppid(), b""
    while True:
        ready, _, _ = select.select([handle], [], [], LOOK_SECONDS)
        if not ready:
            if os.getppid() != parent:
                return
            continue
        block = os.read(handle, 1 << 16)
        if not block:
            return
        *whole, rest = (rest + block).split(b"\n")
        yield from (line.decode() for line in whole if line)


def _limit(seconds: float) -> None:
    """End this process if it isn't done by then: nobody may be left to do it."""

    def end() -> None:
        time.sleep(seconds)
        os._exit(3)

    threading.Thread(target=end, daemon=True).start()


def _short_path(path: Path | str) -> str:
    """Relative where it lies below the current folder. Of a wandb run the folder that it is synced by."""
    path = Path(path)
    path = path.parent if path.name == "files" else path
    with contextlib.suppress(ValueError):
        return str(path.resolve().relative_to(Path.cwd()))
    return str(path)


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # what a tracker has registered for the end of a process may hang
