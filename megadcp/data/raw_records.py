"""The records inside raw text: lines of JSON, rows of Parquet, whole text files.

Records of a .jsonl end at LF and nowhere else: a CR before it is white space of JSON, U+2028 and the like are text. A byte order mark
at the begin of a file is dropped. A bad record is a value with the reason; what to do about it is the caller's choice.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from megadcp.data.raw_files import READ, InputError, Source, check_unchanged, decompressed, open_parquet
from megadcp.data.raw_parts import Part, Span

BOM = b"\xef\xbb\xbf"


class Record(NamedTuple):
    """One record. line: its number in its span, from 0 (0 for a whole-file document). texts: one per key, or the reason why there are none."""

    span: int
    line: int
    raw: bytes
    texts: list[str] | str


def read_part(part: Part, sources: Sequence[Source], keys: Sequence[str], lines: list[int]) -> Iterator[Record]:
    """All records of a part, blank lines left out. `lines` gets the number of lines (rows, documents) of each span, blank ones too."""
    for number, span in enumerate(part.spans):
        source = sources[span.source]
        lines.append(0)
        try:
            check_unchanged(source)
            if source.kind == "text":
                yield _text_document(number, source)
                lines[number] = 1
            elif source.kind == "parquet":
                yield from _rows(number, span, source, keys, lines)
            else:
                for line, raw in _lines_of(part, span, source):
                    lines[number] = line + 1
                    if raw and not raw.isspace():
                        yield Record(number, line, raw, parse(raw, keys))
        except OSError as error:
            raise InputError(f"{source.path} can't be read: {error.strerror or error}") from error


def _lines_of(part: Part, span: Span, source: Source) -> Iterator[tuple[int, bytes]]:
    """(number from 0, line) of the lines of a span."""
    everything = (-(1 << 62), 0)  # an archive has one span of all lines
    if part.text is not None:
        yield from _lines(io.BytesIO(part.text), everything, part.first_line == 1)
        return
    with open(source.path, "rb", buffering=1 << 17) as file:
        if source.kind != "jsonl":
            yield from _lines(io.BufferedReader(_Blocks(decompressed(file, source)), READ), everything, True)
        elif span.start == 0:
            yield from _lines(file, (0, span.stop), True)
        else:
            file.seek(span.start - 1)
            begin = span.start - 1 + len(file.readline())
            yield from _lines(file, (begin, span.stop), False)


class _Blocks(io.RawIOBase):
    """Blocks of bytes as a stream."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._rest = blocks, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._rest = block
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def _lines(stream: IO[bytes], extent: tuple[int, int], at_begin: bool) -> Iterator[tuple[int, bytes]]:
    """(number from 0, line) of the lines that begin in [position, stop); a byte order mark at the begin of a file is dropped."""
    position, stop = extent
    count = 0
    while position < stop and (line := stream.readline()):
        position += len(line)
        yield count, line.removeprefix(BOM) if at_begin and count == 0 else line
        count += 1


_decode = json.JSONDecoder().decode


def parse(line: bytes, keys: Sequence[str]) -> list[str] | str:
    """The texts of one JSON record, or the reason why it has none."""
    try:
        record = _decode(line.decode())
    except UnicodeDecodeError as error:
        return f"not UTF-8 at byte {error.start} of the line"
    except json.JSONDecodeError as error:
        return f"no JSON at column {min(error.pos, len(error.doc.rstrip())) + 1}: {error.msg}"
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of brackets
        return f"JSON that can't be read: {error}"
    if type(record) is not dict:
        return f"{_json_name(record)}, expected a JSON object"
    texts = [record.get(key, record) for key in keys]
    for key, text in zip(keys, texts, strict=True):
        if type(text) is not str:
            return f"no key {key!r}" if text is record else f"key {key!r} holds {_json_name(text)}, expected text"
    return texts


def _json_name(value: object) -> str:
    names = {type(None): "null", bool: "true or false", int: "a number", float: "a number", list: "a list", str: "a string"}
    return names.get(type(value), "an object")


def _text_document(number: int, source: Source) -> Record:
    data = Path(source.path).read_bytes()
    try:
        return Record(number, 0, data, [data.removeprefix(BOM).decode()])
    except UnicodeDecodeError as error:
        return Record(number, 0, b"", f"not UTF-8 at byte {error.start}")


def _rows(number: int, span: Span, source: Source, keys: Sequence[str], lines: list[int]) -> Iterator[Record]:
    file = open_parquet(source.path)
    try:
        for batch in file.iter_batches(batch_size=1024, row_groups=list(range(span.start, span.stop)), columns=list(keys)):
            columns = [batch.column(batch.schema.get_field_index(key)) for key in keys]
            for row in range(batch.num_rows):
                texts = [_cell(column, row) for column in columns]
                bad = next((f"column {key!r}: {text[1]}" for key, text in zip(keys, texts, strict=True) if text[1]), "")
                raw = b"" if bad else b"".join(text[0].encode() for text in texts)
                yield Record(number, lines[number], raw, bad or [text[0] for text in texts])
                lines[number] += 1
    except (OSError, ValueError) as error:  # pyarrow's own errors are kinds of these
        raise InputError(f"{source.path} is damaged: {error}") from error


def _cell(column: Any, row: int) -> tuple[str, str]:
    """(text, reason why there is none)."""
    try:
        text = column[row].as_py()
    except UnicodeDecodeError as error:
        return "", f"not UTF-8 at byte {error.start}"
    return (text, "") if isinstance(text, str) else ("", "is null")
