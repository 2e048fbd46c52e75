"""PREFIX.parts/: the finished parts of a run that is under way, or that was interrupted and can go on.

It belongs to one run, named by `identity` (a hash of sources, sizes, tokenizer and settings), and is held by one process at a time: a
lock that the system releases when its holder dies. Where locks don't work, nobody is kept out.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from megadcp.config.check import UserError
from megadcp.data.file_bytes import chunks
from megadcp.data.indexed import IndexedReader, bin_path
from megadcp.data.preprocess_worker import part_path
from megadcp.data.raw_parts import Part


class PartsFolder:
    """The folder of one output prefix."""

    def __init__(self, output_prefix: str, identity: str) -> None:
        """Touches nothing."""
        self.output_prefix, self.identity = output_prefix, identity
        self.path = Path(f"{output_prefix}.parts")
        self._lock: IO[str] | None = None

    def is_ours(self) -> bool:
        """Whether an earlier run of the same job left it."""
        try:
            return (self.path / "identity").read_text(encoding="utf-8") == self.identity
        except OSError:
            return False

    def take(self) -> None:
        """Make or take over the folder and lock it; parts of another run are dropped."""
        if self.path.exists() and not (self.path / "identity").exists() and any(path.name != "lock" for path in self.path.iterdir()):
            raise UserError(f"{self.path} is in the way and was not made by this program: move it")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / "lock", "a", encoding="utf-8")  # noqa: SIM115 - held until release()
        except OSError as error:
            raise UserError(f"{self.path} can't be written: {error.strerror or error}") from error
        if not _locked(self._lock):
            raise UserError(f"another process is writing {self.output_prefix} (it holds {self.path}/lock): wait for it, or choose another prefix")
        if not self.is_ours():
            for path in self.path.iterdir():
                if path.name != "lock":
                    path.unlink()
            (self.path / "identity").write_text(self.identity, encoding="utf-8")

    def release(self) -> None:
        """Give the lock back; the parts stay."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def remove(self) -> None:
        """Everything is in its place: the parts are not needed any more."""
        shutil.rmtree(self.path)

    def part(self, index: int, ending: str) -> Path:
        """A file of a part."""
        return part_path(str(self.path), index, ending)

    def finished(self, part: Part, accept_rejects: bool) -> dict[str, Any] | None:
        """The summary of a part that an earlier run finished, if it is of this run, whole and of use."""
        try:
            summary: dict[str, Any] = json.loads(self.part(part.index, ".json").read_text(encoding="utf-8"))
            if summary["identity"] != self.identity or [span[:3] for span in summary["spans"]] != [list(span) for span in part.spans]:
                return None
            if summary["rejected"] and not (accept_rejects and self.part(part.index, ".rejects").exists()):
                return None
            for number, key in enumerate(summary["keys"]):
                prefix = self.part(part.index, f".{number}")
                reader = IndexedReader(prefix)
                if (reader.documents, reader.tokens_total) != (key["documents"], key["tokens"]) or _crc32(bin_path(prefix)) != key["crc32"]:
                    return None
            return summary
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def rejects(self, parts: int) -> Iterator[tuple[list[int], int, str, str]]:
        """([source, start, stop], line from 0 after the span's begin, reason, record) of all rejected records, in order."""
        for index in range(parts):
            path = self.part(index, ".rejects")
            if path.exists():
                spans = json.loads(self.part(index, ".json").read_text(encoding="utf-8"))["spans"]
                with open(path, encoding="utf-8") as file:
                    for row in file:
                        span, line, reason, record = json.loads(row)
                        yield spans[span][:3], line, reason, record


def _locked(file: IO[str]) -> bool:
    """False if another process holds it."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # no locks here
        return True
    return True


def _crc32(path: Path) -> int:
    value = 0
    for block in chunks(path):
        value = zlib.crc32(block, value)
    return value
