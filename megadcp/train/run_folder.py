"""The folder of one run: what lies where in it, whose it is, and how files are written so that nobody ever sees half of one."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megadcp.config.check import UserError

LOCK = ".lock"
UNFINISHED = re.compile(r"\.(?!lock\.).+\.[0-9]+")  # what `write_text` and the ranks call a file before it is whole
DEAD_SECONDS = 120.0  # after the last sign of life, where nothing else tells


class RunFolder:
    """Paths below `runs/NAME/`."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.latest = self.path / "latest"
        self.loss_curve = self.path / "loss.svg"
        self.lengths = self.path / "lengths.svg"
        self.sample = self.path / "sample.txt"
        self.result = self.path / "result.json"

    @property
    def plans(self) -> Path:
        """plans.jsonl, or plans.jsonl.zst where only that is there."""
        plain, packed = self.path / "plans.jsonl", self.path / "plans.jsonl.zst"
        return packed if packed.exists() and not plain.exists() else plain


@contextmanager
def keep_folder(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold a run folder: a second trainer would mix two runs. The system lets go when this process ends, however it ends.

    On a file system without locks the file says who trains, and that it still does (`sign_of_life`).

    Raises:
        UserError: another process is training there.
    """
    import fcntl

    path = folder / LOCK
    with open(path, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise UserError(f"another process is training in {folder}; wait for it, stop it, or choose another run.name") from None
            _refuse_living(path)
            say(f"WARNING: the file system of {folder} has no locks ({error.strerror}): don't start the run twice")
        file.seek(0)
        file.truncate()
        json.dump({"host": socket.gethostname(), "pid": os.getpid()}, file)
        file.flush()
        _remove_unfinished(folder)
        try:
            yield
        finally:
            file.seek(0)
            file.truncate()


def is_unfinished(name: str) -> bool:
    """Whether a file in a run folder is one that was not whole when its writer was killed."""
    return UNFINISHED.fullmatch(name) is not None


def _remove_unfinished(folder: Path) -> None:
    """Remove what killed processes have left under temporary names. Nobody else writes here while the folder is held."""
    for path in [*folder.glob(".*"), *folder.glob("ranks/.*")]:
        if is_unfinished(path.name):
            path.unlink(missing_ok=True)


def sign_of_life(folder: Path) -> None:
    """By whoever trains in the folder, from time to time: what `keep_folder` looks at where there are no locks."""
    with suppress(OSError):
        os.utime(folder / LOCK)


def _refuse_living(path: Path) -> None:
    """UserError if the process that the file names lives (on this machine), or gave a sign of life lately (on another one)."""
    try:
        owner = json.loads(path.read_text(encoding="utf-8"))
        host, pid = str(owner["host"]), int(owner["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    probe = path.with_name(f"{LOCK}.{os.getpid()}")
    probe.touch()  # by the clock of the file system
    age = probe.stat().st_mtime - path.stat().st_mtime
    probe.unlink()
    lives = _lives(pid) if host == socket.gethostname() else age < DEAD_SECONDS
    if lives:
        raise UserError(
            f"process {pid} of {host} is training in {path.parent} (last sign of life {max(0.0, age):.0f} s ago); wait for it, stop it, or choose "
            f"another run.name; if it is gone, it is forgotten after {DEAD_SECONDS:.0f} s"
        )


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid != os.getpid()


def write_text(path: Path, text: str) -> None:
    """Write a whole file under another name, on the disk, and then give it its own."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """`write_text` of indented JSON; NaN and Inf become null."""
    write_text(path, json.dumps(finite(value), indent=2, allow_nan=False) + "\n")


def sync_folder(path: Path) -> None:
    """Put a folder's list of names on the disk (a rename is not safe before that)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def finite(value: Any) -> Any:
    """The value with every NaN and Inf replaced by None, which JSON can hold."""
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    return value
