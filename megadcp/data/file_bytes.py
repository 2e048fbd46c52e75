"""Large files, byte by byte: read in chunks with their holes, flushed to the disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from megadcp.config.check import UserError

COPY = 1 << 23  # bytes at a time


def chunks(path: Path) -> Iterator[memoryview]:
    """A file in pieces of at most COPY bytes, each valid until the next is asked for. Holes of sparse files are not read."""
    with open(path, "rb", buffering=0) as file:
        size, position = os.fstat(file.fileno()).st_size, 0
        buffer = bytearray(min(COPY, size))  # one for all: a fresh one each time costs far more than reading
        while position < size:
            if _next_data(file.fileno(), position, size) >= position + COPY:
                yield memoryview(bytes(COPY))
                position += COPY
                continue
            file.seek(position)
            count = file.readinto(buffer)
            if not count:
                raise UserError(f"{path}: wrong size: expected {size} bytes, found {position}; somebody else is writing it")
            yield memoryview(buffer)[:count]
            position += count


def _next_data(descriptor: int, position: int, size: int) -> int:
    """Where the next byte that is not in a hole lies; `position` where the system can't tell."""
    try:
        return os.lseek(descriptor, position, os.SEEK_DATA)
    except AttributeError:
        return position
    except OSError as error:
        return size if error.errno == errno.ENXIO else position


def flush(file: IO[bytes], sync: bool) -> None:
    """Hand everything to the system and, with sync, wait until it is on the disk."""
    file.flush()
    if sync:
        os.fsync(file.fileno())
