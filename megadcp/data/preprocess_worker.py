"""What one preprocessing worker does: a part of raw text in, finished files of that part out. Imports no more than that needs.

Files of part 12 in the parts folder: 00000012.0.bin/.idx for the first key, .1. for the second, 00000012.rejects where records were
rejected, and, renamed into place last, 00000012.json. A part without its .json does not exist.
"""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megadcp.data.indexed import IndexedWriter
from megadcp.data.raw_files import InputError, Source
from megadcp.data.raw_parts import Part, Span
from megadcp.data.raw_records import Record, read_part
from megadcp.data.tokenizer import open_tokenizer

BATCH_CHARACTERS = 1 << 20  # text handed to the tokenizer at a time
BATCH_TEXTS = 4096


@dataclass(frozen=True)
class Recipe:
    """What a worker has to know. tokenizer: kind, path, end-of-document token. identity: hash kept with each part."""

    identity: str
    folder: str
    sources: tuple[Source, ...]
    keys: tuple[str, ...]
    tokenizer: tuple[str, str, str]
    fingerprint: str
    dtype: str
    append_eod: bool
    stop_at_bad: bool


@dataclass(frozen=True)
class Failure:
    """Why a part could not be finished. A bad record has its span and its line (from 0, after the span's begin); other causes have none."""

    part: int
    message: str
    span: Span | None = None
    line: int = 0
    is_input: bool = True


class BadRecord(Exception):
    """The first bad record, where they are to stop the run."""


def part_path(folder: str, index: int, ending: str) -> Path:
    """A file of a part."""
    return Path(folder) / f"{index:08d}{ending}"


class PartMaker:
    """Reads, encodes and writes parts, one after the other."""

    def __init__(self, recipe: Recipe) -> None:
        """Opens the tokenizer."""
        self.recipe = recipe
        self.tokenizer = open_tokenizer(*recipe.tokenizer)
        self.dtype = np.dtype(recipe.dtype)
        if self.tokenizer.fingerprint != recipe.fingerprint:
            raise InputError(f"tokenizer {recipe.tokenizer[1]} changed since the run began")

    def make(self, part: Part) -> dict[str, Any] | Failure:
        """The part's summary, as kept in its .json, or why there is none. Leaves no files behind on failure."""
        writers: list[IndexedWriter] = []
        try:
            for number in range(len(self.recipe.keys)):
                writers.append(IndexedWriter(self._path(part, f".{number}"), self.dtype, sync=False))
            return self._make(part, writers)
        except BadRecord as bad:
            span, line, reason = bad.args
            return Failure(part.index, reason, part.spans[span], line + part.first_line - 1)
        except InputError as error:
            return Failure(part.index, str(error))
        except Exception:
            places = ", ".join(f"{self.recipe.sources[span.source].path} [{span.start}, {span.stop})" for span in part.spans[:3])
            return Failure(part.index, f"part {part.index} ({places}) failed:\n{traceback.format_exc()}", is_input=False)
        finally:
            for writer in writers:
                writer.discard()

    def _path(self, part: Part, ending: str) -> Path:
        return part_path(self.recipe.folder, part.index, ending)

    def _make(self, part: Part, writers: list[IndexedWriter]) -> dict[str, Any]:
        lines: list[int] = []
        records = _Records(self, writers)
        for record in read_part(part, self.recipe.sources, self.recipe.keys, lines):
            records.add(record)
        records.flush()
        for writer in writers:
            writer.finish()
        rejects = self._path(part, ".rejects")
        if records.rejects:
            rows = [(span, line + part.first_line - 1, reason, record) for span, line, reason, record in sorted(records.rejects)]
            rejects.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        else:
            rejects.unlink(missing_ok=True)
        blank = sum(lines) - records.seen
        summary = {
            "identity": self.recipe.identity,
            "spans": [[*span, count] for span, count in zip(part.spans, lines, strict=True)],
            "weight": part.weight,
            "text_bytes": records.bytes,
            "rejected": len(records.rejects),
            "blank_lines": blank,
            "keys": [
                {"documents": w.documents, "sequences": w.sequences, "tokens": w.tokens_total, "with_eod": eod, "crc32": w.crc32}
                for w, eod in zip(writers, records.with_eod, strict=True)
            ],
        }
        done = self._path(part, ".json")
        temporary = done.with_suffix(".tmp")
        temporary.write_text(json.dumps(summary), encoding="utf-8")
        os.replace(temporary, done)
        return summary


class _Records:
    """Good records on their way to the writers in batches; bad ones in a list."""

    def __init__(self, maker: PartMaker, writers: list[IndexedWriter]) -> None:
        self.maker, self.writers = maker, writers
        self.pending: list[Record] = []
        self.characters = self.bytes = self.seen = 0
        self.rejects: list[tuple[int, int, str, str]] = []  # span, line, reason, record
        self.with_eod = [0] * len(writers)

    def add(self, record: Record) -> None:
        self.seen += 1
        self.bytes += len(record.raw)
        if isinstance(record.texts, str):
            self._reject(record, record.texts)
            return
        self.pending.append(record)
        self.characters += sum(map(len, record.texts))
        if self.characters >= BATCH_CHARACTERS or len(self.pending) >= BATCH_TEXTS:
            self.flush()

    def _reject(self, record: Record, reason: str) -> None:
        if self.maker.recipe.stop_at_bad:
            self.flush()  # a text before this one may be bad too, and then that one is the first
            raise BadRecord(record.span, record.line, reason)
        self.rejects.append((record.span, record.line, reason, record.raw.rstrip(b"\r\n").decode("utf-8", "backslashreplace")))

    def flush(self) -> None:
        if not self.pending:
            return
        encode = self.maker.tokenizer.encode_flat
        try:
            encoded = [encode(texts) for texts in self._texts()]
        except ValueError:
            self._drop_bad()
            encoded = [encode(texts) for texts in self._texts()]
        self.pending, self.characters = [], 0
        for number, (ids, lengths) in enumerate(encoded):
            self._write(number, ids, lengths)

    def _texts(self) -> Iterator[list[str]]:
        for number in range(len(self.writers)):
            yield [record.texts[number] for record in self.pending]

    def _drop_bad(self) -> None:
        """One of the pending texts can't be encoded: find which, one by one."""
        records, self.pending = self.pending, []
        good = []
        for record in records:
            try:
                for text in record.texts:
                    self.maker.tokenizer.encode_flat([text])
            except ValueError as error:
                self._reject(record, f"text that can't be encoded: {error}")
            else:
                good.append(record)
        self.pending = good

    def _write(self, number: int, ids: np.ndarray, lengths: np.ndarray) -> None:
        tokenizer, dtype = self.maker.tokenizer, self.maker.dtype
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < tokenizer.vocab_size:
            raise RuntimeError(f"the tokenizer gave ids {ids.min()} to {ids.max()}, its vocabulary has {tokenizer.vocab_size}")
        forged = ids == tokenizer.eod
        if forged.any():
            ends = np.cumsum(lengths)
            self.with_eod[number] += len(np.unique(np.searchsorted(ends, np.flatnonzero(forged), side="right")))
        if self.maker.recipe.append_eod:
            ids, lengths = with_eod(ids, lengths, tokenizer.eod, dtype)
        self.writers[number].add_many(ids.astype(dtype, copy=False), lengths)


def with_eod(ids: np.ndarray, lengths: np.ndarray, eod: int, dtype: np.dtype[Any]) -> tuple[np.ndarray, np.ndarray]:
    """`eod` after each document that has tokens; an empty one stays empty, as Megatron's tool does it. ids: [sum(lengths)]."""
    longer = lengths + (lengths > 0)
    ends = np.cumsum(longer)
    out = np.full(int(ends[-1]) if len(ends) else 0, eod, dtype)
    is_text = np.ones(len(out), np.bool_)
    is_text[ends[lengths > 0] - 1] = False
    out[is_text] = ids
    return out, longer


def worker_main(connection: Any, recipe: Recipe) -> None:
    """Takes parts from the connection and sends summaries or failures back, until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle
    try:
        maker: PartMaker | Failure = PartMaker(recipe)
    except Exception as error:
        maker = Failure(-1, str(error) if isinstance(error, ValueError) else traceback.format_exc())
    while True:
        try:
            part = connection.recv()
            connection.send(maker if isinstance(maker, Failure) else maker.make(part))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return
