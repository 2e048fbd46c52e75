"""Input files of preprocessing: which ones, and the bytes inside archives. Standard library; zstandard and pyarrow when needed.

Archives may have several members, all are read; a damaged or cut one is an error, never a shorter corpus.
"""

from __future__ import annotations

import glob
import gzip
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from megadcp.config.check import UserError

KINDS = {".jsonl": "jsonl", ".jsonl.gz": "gzip", ".jsonl.zst": "zstd", ".parquet": "parquet", ".txt": "text"}
LEGAL = ", ".join(KINDS)
READ = 1 << 20  # bytes of an archive at a time


class InputError(UserError):
    """The input is at fault: a damaged file, a bad record. Names the place."""


@dataclass(frozen=True)
class Source:
    """One input file as it was when the run began."""

    path: str
    bytes: int
    modified_ns: int

    @property
    def kind(self) -> str:
        """jsonl, gzip, zstd, parquet or text."""
        return kind_of(self.path)


def kind_of(path: str) -> str:
    """The kind that a file's name says; empty for others."""
    return next((kind for ending, kind in KINDS.items() if path.endswith(ending)), "")


def find_sources(inputs: Sequence[str]) -> tuple[list[Source], int]:
    """(files in order, files in folders that were passed over because of their kind).

    Inputs keep their order; a folder (searched to any depth) and a glob give their files in the order of their names.
    """
    paths: list[str] = []
    ignored = 0
    for name in inputs:
        if os.path.exists(name) and not os.path.isdir(name):
            found = inside = [name]
        else:
            inside = _inside(name) if os.path.isdir(name) else sorted(path for path in glob.glob(name, recursive=True) if os.path.isfile(path))
            found = [path for path in inside if kind_of(path)]
        ignored += len(inside) - len(found)
        if not found:
            raise UserError(f"input {name}: no such file, or a folder or glob without files of these kinds: {LEGAL}")
        paths += found
    seen: dict[str, str] = {}
    sources = []
    for path in paths:
        if not kind_of(path):
            raise UserError(f"input {path}: unknown kind of file; legal endings: {LEGAL}")
        real = os.path.realpath(path)
        if real in seen:
            raise UserError(f"input {path} was given twice (also as {seen[real]}): its documents would be counted twice; name it once")
        seen[real] = path
        try:
            status = os.stat(path)
            with open(path, "rb"):
                pass
        except OSError as error:
            raise UserError(f"input {path} can't be read: {error.strerror or error}") from error
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"input {path} is no regular file; its size must be known")
        sources.append(Source(os.path.abspath(path), status.st_size, status.st_mtime_ns))
    return sources, ignored


def check_unchanged(source: Source) -> None:
    """A file that grows or shrinks while it is read would give a short corpus without a word."""
    status = os.stat(source.path)
    if (status.st_size, status.st_mtime_ns) != (source.bytes, source.modified_ns):
        raise InputError(f"{source.path} changed during the run ({source.bytes} bytes then, {status.st_size} now): start when it is complete")


def _inside(folder: str) -> list[str]:
    """Files at any depth, without hidden ones."""
    found = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [os.path.join(place, name) for name in files if not name.startswith(".")]
    return sorted(found)


# -------------------------------------------------------------------------------------------------- bytes out of files
def decompressed(file: IO[bytes], source: Source) -> Iterator[bytes]:
    """The text of an archive in blocks, all members."""
    if source.bytes == 0:
        raise InputError(f"{source.path} is empty, which is no archive: get the file again")
    try:
        yield from _gzip_blocks(file) if source.kind == "gzip" else _zstd_blocks(file, source.path)
    except InputError:
        raise
    except Exception as error:  # zlib, gzip and zstandard each have their own kinds
        raise InputError(f"{source.path} is damaged or cut short ({error}): nothing of it is used; get the file again") from error


def _gzip_blocks(file: IO[bytes]) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=file, mode="rb") as archive:
        while block := archive.read(READ):
            yield block


def _zstd_blocks(file: IO[bytes], path: str) -> Iterator[bytes]:
    """Frame by frame: zstandard's own stream reader takes a cut file for a complete one."""
    zstandard = _needs("zstandard", path)
    frame = None
    data = b""
    while data := (data or file.read(READ)):
        if frame is None:
            frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        block = frame.decompress(data)
        data = b""
        if frame.eof:
            data, frame = frame.unused_data, None
        if block:
            yield block
    if frame is not None:
        raise ValueError("the last frame does not end")


def _needs(module: str, path: str) -> Any:
    try:
        return __import__(module)
    except ImportError as error:
        raise UserError(f"{path} needs the package {module}: pip install 'megadcp[data]'") from error


def open_parquet(path: str) -> Any:
    """A pyarrow.parquet.ParquetFile."""
    _needs("pyarrow", path)
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except Exception as error:
        raise InputError(f"{path} is no whole Parquet file: {error}") from error


def check_columns(source: Source, keys: Sequence[str]) -> None:
    """Refuse a Parquet file that lacks a text column of one of these names."""
    import pyarrow as pa

    schema = open_parquet(source.path).schema_arrow
    for key in keys:
        if schema.names.count(key) != 1:
            raise UserError(f"{source.path} has no column {key!r}; its columns: {', '.join(schema.names)}")
        kind = schema.field(key).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or str(kind) == "string_view"):
            raise UserError(f"{source.path}: column {key!r} holds {kind}, expected text")
