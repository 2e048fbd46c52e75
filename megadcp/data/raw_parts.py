"""How raw text is cut into parts of work, and which line of a file a place is.

A part is a list of spans, each the lines of a file that BEGIN in a byte range, the row groups of a Parquet file, or a whole file: any
cut gives the same records in the same order, so shards, parts and workers leave no trace in the output. The cut depends on the input
and the shard alone, so a resumed run finds its parts again. One part is about 1/256 of the input, 1 to 64 MiB.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megadcp.data.raw_files import READ, InputError, Source, decompressed, open_parquet

FED = 1 << 24  # most text bytes of a part cut out of an archive


class Span(NamedTuple):
    """start, stop: bytes (jsonl), row groups (parquet), or 0 and the file's size (the whole file)."""

    source: int
    start: int
    stop: int


@dataclass(frozen=True)
class Part:
    """A piece of work. weight: bytes of input files. An archive's part carries its text; first_line is then the number of its first line."""

    index: int
    spans: tuple[Span, ...]
    weight: int
    text: bytes | None = None
    first_line: int = 1


def part_bytes(total: int) -> int:
    """Size of a part: small enough to share out evenly, large enough to be few. Depends on nothing but the input, so a resumed run cuts alike."""
    return max(min(max(total // 256, 1 << 20), 1 << 26), total // 20_000)


def shard_range(total: int, shard: tuple[int, int]) -> tuple[int, int]:
    """[first, stop) of the input's bytes, all files one after the other, that belong to shard i of n."""
    index, count = shard
    return -(-total * index // count), (-(-total * (index + 1) // count) if index + 1 < count else total + 1)


def cut(sources: Sequence[Source], shard: tuple[int, int], size: int) -> Iterator[Part]:
    """The parts of one shard, in order, about `size` bytes each. Archives larger than that are decompressed here, as their parts are taken."""
    first, stop = shard_range(sum(source.bytes for source in sources), shard)
    index = weight = position = 0
    spans: list[Span] = []
    for number, source in enumerate(sources):
        begin, position = position, position + source.bytes
        if source.kind in ("gzip", "zstd") and source.bytes > size:
            if not first <= begin < stop:
                continue
            if spans:
                yield Part(index, tuple(spans), weight)
                index, weight, spans = index + 1, 0, []
            for part in _archive_parts(number, source, index, min(size, FED)):
                yield part
                index = part.index + 1
            continue
        for span, cost in _spans(number, source, (first - begin, stop - begin), size):
            spans.append(span)
            weight += cost
            if weight >= size:
                yield Part(index, tuple(spans), weight)
                index, weight, spans = index + 1, 0, []
    if spans:
        yield Part(index, tuple(spans), weight)


def _spans(number: int, source: Source, extent: tuple[int, int], size: int) -> Iterator[tuple[Span, int]]:
    """(span, bytes) of the share [first, stop) of a file, in bytes from its begin; what can't be cut belongs to where it begins."""
    first, stop = max(0, extent[0]), extent[1]
    if source.kind == "jsonl":
        while first < min(stop, source.bytes):
            end = min(stop, source.bytes, (first // size + 1) * size)
            yield Span(number, first, end), end - first
            first = end
    elif source.kind == "parquet":
        groups = open_parquet(source.path).metadata.num_row_groups
        for group in range(groups):
            if extent[0] <= source.bytes * group // groups < stop:
                yield Span(number, group, group + 1), source.bytes * (group + 1) // groups - source.bytes * group // groups
    elif extent[0] <= 0 < stop:
        yield Span(number, 0, source.bytes), source.bytes


def _archive_parts(number: int, source: Source, index: int, size: int) -> Iterator[Part]:
    """Whole lines, at least `size` bytes of them a part (but the last), until the archive ends."""
    span = (Span(number, 0, source.bytes),)
    kept: list[bytes] = []
    length, line, done = 0, 1, 0
    with open(source.path, "rb") as file:
        for block in decompressed(file, source):
            kept.append(block)
            length += len(block)
            border = block.rfind(b"\n") + 1
            if length >= size and border:
                kept[-1] = block[:border]
                text = b"".join(kept)
                yield Part(index, span, file.tell() - done, text, line)
                index, line, done = index + 1, line + text.count(b"\n"), file.tell()
                kept, length = [block[border:]], len(block) - border
        if length or line == 1:
            yield Part(index, span, source.bytes - done, b"".join(kept), line)


# ---------------------------------------------------------------------------------------------------------- line numbers
def lines_before(source: Source, span: Span, known: dict[int, tuple[int, int]]) -> int:
    """Lines (rows) of a file before those of a span. known: start -> (stop, lines) of spans already read; the rest is counted in the file."""
    if source.kind == "parquet":
        metadata = open_parquet(source.path).metadata
        return sum(metadata.row_group(group).num_rows for group in range(span.start))
    position = total = 0
    borders = sorted(known)
    while position < span.start:
        if position in known:
            position, count = known[position]
            total += count
            continue
        stop = next((border for border in borders if border > position), span.start)
        stop = min(stop, span.start)
        total += _lines_beginning(source.path, position, stop)
        position = stop
    return total


def _lines_beginning(path: str, start: int, stop: int) -> int:
    """Lines whose first byte lies in [start, stop): the first line of the file, and one after each LF."""
    count = 1 if start == 0 else 0
    with open(path, "rb") as file:
        position = max(start - 1, 0)
        file.seek(position)
        while position < stop - 1:
            block = file.read(min(READ, stop - 1 - position))
            if not block:
                raise InputError(f"{path} is shorter than it was when the run began")
            count += block.count(b"\n")
            position += len(block)
    return count
