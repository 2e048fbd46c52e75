"""Sources and splits: which documents of a .bin/.idx pair take part, and how those above max_length are cut.

A document is all sequences between two entries of the document index (one, unless the file was split into sentences). Documents
without tokens are skipped and counted. Everything is derived from the index file in passes over blocks of it: nothing that grows
with the corpus is kept, except 16 bytes for each document that is empty or longer than max_length.

Time and memory for 10^8 documents stand in shuffle.py.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

import numpy as np

from megadcp.config.check import UserError
from megadcp.config.schema import DataConfig, SourceConfig
from megadcp.data.indexed import IndexedReader
from megadcp.data.step_documents import DOCUMENTS, IGNORE, PIECES, SOURCES, pack_ids, unpack_ids

BLOCK = 1 << 20  # documents handled at a time in passes over the whole index
SPLITS = ("train", "validation", "test")


def split_ranges(split: Sequence[float], count: int) -> list[tuple[int, int]]:
    """[first, stop) of train, validation and test among `count` items, contiguous and in file order; (0, 0) for a share of zero.

    Borders are the shares' running sums times count, rounded half to even: the rule of Megatron's datasets.
    """
    shares = [float(share) for share in split] + [0.0] * (len(SPLITS) - len(split))
    if len(shares) > len(SPLITS) or any(not math.isfinite(share) or share < 0 for share in shares) or sum(shares) <= 0:
        raise UserError(f"data.split={tuple(split)}: give up to three shares (train, validation, test), none negative, not all zero")
    total = float(np.sum(np.array(shares)))
    edges = [0.0]
    for share in shares:
        edges.append(edges[-1] + share / total)
    borders = [round(edge * float(count)) for edge in edges]
    return [(a, b) if low < high else (0, 0) for a, b, low, high in zip(borders, borders[1:], edges, edges[1:], strict=False)]


class DocumentFile:
    """The documents of one .bin/.idx pair, whatever number of sequences each has."""

    def __init__(self, reader: IndexedReader) -> None:
        """`reader` is open already; nothing is read here but, once, the document index."""
        self.reader = reader
        self.sequence_lengths = np.asarray(reader.lengths)
        self.document_index = np.asarray(reader.document_index)
        self.count = max(0, len(self.document_index) - 1)
        self.identity = self.count == len(self.sequence_lengths) and self._is_identity()

    def _is_identity(self) -> bool:
        blocks = range(0, self.count + 1, BLOCK)
        return all(np.array_equal(self.document_index[a : a + BLOCK], np.arange(a, min(a + BLOCK, self.count + 1))) for a in blocks)

    def lengths(self, first: int, stop: int) -> np.ndarray:
        """Tokens of documents first .. stop - 1, int64 [stop - first]."""
        if self.identity:
            return np.asarray(self.sequence_lengths[first:stop], dtype=np.int64)
        edges = self.document_index[first : stop + 1].astype(np.int64)
        sums = _running_sum(self.sequence_lengths[edges[0] : edges[-1]])
        return np.diff(sums[edges - edges[0]])

    def lengths_at(self, documents: np.ndarray) -> np.ndarray:
        """Tokens of the given documents, int64 [n]."""
        if self.identity:
            return np.asarray(self.sequence_lengths[documents], dtype=np.int64)
        first, stop = self.document_index[documents].astype(np.int64), self.document_index[documents + 1].astype(np.int64)
        edges = _running_sum(stop - first)
        sequences = np.arange(edges[-1]) + np.repeat(first - edges[:-1], stop - first)
        return np.asarray(np.diff(_running_sum(self.sequence_lengths[sequences])[edges]))

    def read(self, document: int, offset: int, length: int) -> np.ndarray:
        """Tokens [offset, offset + length) of one document, in the file's dtype; a view of the map where it is one sequence."""
        if self.identity:
            return np.asarray(self.reader.read(document, offset, length))
        parts = []
        for sequence in range(int(self.document_index[document]), int(self.document_index[document + 1])):
            size = int(self.sequence_lengths[sequence])
            take = min(size - offset, length)
            if take > 0:
                parts.append(self.reader.read(sequence, offset, take))
                length -= take
            offset = max(0, offset - size)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _running_sum(values: np.ndarray) -> np.ndarray:
    """Exclusive prefix sums with the total at the end, int64 [n + 1]."""
    sums = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, dtype=np.int64, out=sums[1:])
    return sums


class PieceTable:
    """The pieces of documents first .. stop - 1 of a file, numbered in file order.

    A document up to max_length is one piece, a longer one several consecutive pieces (long_documents=split) or none (drop), an empty one none.
    Where a run of one-piece documents is broken, the document and the number of its first piece are kept (16 bytes); between two
    such places the number of a piece and its document differ by a constant.
    """

    def __init__(self, file: DocumentFile, extent: tuple[int, int], cut: tuple[int, str], source: int, label: str) -> None:
        """Scans all lengths. extent = (first, stop); cut = (max_length, "split" or "drop"); source goes into the ids; label names it in errors."""
        self.file, self.source, self.label = file, source, label
        self.first, self.stop = extent
        self.max_length, self.long_documents = cut
        self.count = self.tokens = self.longest = self.empty = self.long = self.dropped_tokens = 0
        if self.stop > DOCUMENTS or source >= SOURCES:
            raise UserError(f"{label}: document {self.stop} of source {source} does not fit an id (at most {DOCUMENTS} documents, {SOURCES} sources)")
        digest = hashlib.blake2b(f"{extent} {file.identity}".encode(), digest_size=16)
        places: list[np.ndarray] = []
        numbers: list[np.ndarray] = []
        for begin in range(self.first, self.stop, BLOCK):
            lengths = file.lengths(begin, min(begin + BLOCK, self.stop))
            digest.update(lengths.astype("<i8", copy=False).data)
            self._scan(begin, lengths, places, numbers)
        # With a pieceless document before the first and one after the last, every piece lies between two broken places.
        self._places = np.concatenate([[self.first - 1], *places, [self.stop]]).astype(np.int64)
        self._numbers = np.concatenate([[0], *numbers, [self.count]]).astype(np.int64)
        self.digest = digest.hexdigest()  # of the lengths alone: the order depends on nothing else in the file

    def _scan(self, begin: int, lengths: np.ndarray, places: list[np.ndarray], numbers: list[np.ndarray]) -> None:
        odd = np.flatnonzero((lengths == 0) | (lengths > self.max_length))
        size = lengths[odd]
        counts = -(-size // self.max_length)
        if len(odd) and int(counts.max()) > PIECES:
            worst = int(odd[int(size.argmax())])
            legal = -(-int(size.max()) // PIECES)
            raise UserError(
                f"{self.label}: document {begin + worst} has {int(size.max())} tokens, over {PIECES} pieces of data.max_length={self.max_length}; "
                f"legal: data.max_length >= {legal}"
            )
        self.empty += int((size == 0).sum())
        self.long += int((size > 0).sum())
        if self.long_documents == "drop":
            self.dropped_tokens += int(size.sum())
            counts = np.zeros_like(counts)
        before = odd - np.arange(len(odd)) + _running_sum(counts)[:-1]  # one for each regular document, then the broken ones'
        places.append(odd + begin)
        numbers.append(before + self.count)
        self.count += len(lengths) - len(odd) + int(counts.sum())
        kept = lengths[lengths <= self.max_length] if self.long_documents == "drop" else lengths
        self.tokens += int(kept.sum())
        self.longest = max(self.longest, min(self.max_length, int(kept.max(initial=0))))

    def locate(self, pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(document in the file, piece inside it) of piece numbers 0 .. count - 1, each int64 [n]."""
        pieces = pieces.astype(np.int64)
        at = np.searchsorted(self._numbers[:-1], pieces, side="right") - 1
        place, inside = self._places[at], pieces - self._numbers[at]
        own = self._numbers[at + 1] - self._numbers[at] - (self._places[at + 1] - place - 1)  # pieces of the broken document itself
        is_own = inside < own
        return np.where(is_own, place, place + 1 + inside - own), np.where(is_own, inside, 0)

    def piece_lengths(self, documents: np.ndarray, pieces: np.ndarray) -> np.ndarray:
        """Tokens of each (document, piece), int64 [n]."""
        return np.asarray(np.minimum(self.file.lengths_at(documents) - pieces * self.max_length, self.max_length))

    def ids(self, pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(ids, lengths) of piece numbers, each int64 [n]."""
        documents, inside = self.locate(pieces)
        return pack_ids(self.source, documents, inside), self.piece_lengths(documents, inside)

    def all_ids(self) -> Iterator[tuple[int, np.ndarray]]:
        """(first piece number, ids of the next up to BLOCK pieces), over all pieces."""
        for begin in range(0, self.count, BLOCK):
            documents, inside = self.locate(np.arange(begin, min(begin + BLOCK, self.count)))
            yield begin, pack_ids(self.source, documents, inside)

    def describe(self) -> str:
        """One line: documents, tokens and what was left out or cut."""
        line = f"{self.label}: {self.stop - self.first:,} documents, {self.count:,} pieces, {self.tokens:,} tokens, longest piece {self.longest:,}"
        if self.empty:
            line += f"; {self.empty:,} empty documents skipped"
        if self.long and self.long_documents == "drop":
            line += f"; {self.long:,} documents above {self.max_length:,} tokens dropped ({self.dropped_tokens:,} tokens)"
        elif self.long:
            line += f"; {self.long:,} documents above {self.max_length:,} tokens cut into pieces"
        return line


def fill_pieces(tables: Mapping[int, PieceTable], ids: np.ndarray, starts: np.ndarray, tokens: np.ndarray, labels: np.ndarray) -> None:
    """Write each piece's tokens and its labels (the next token; IGNORE at the piece's end); tables by source. See step_documents.Documents.fill."""
    sources, documents, pieces = unpack_ids(ids)
    lengths = np.empty(len(ids), np.int64)
    for source in np.unique(sources):
        mine = sources == source
        lengths[mine] = tables[source].piece_lengths(documents[mine], pieces[mine])
    rows = zip(sources.tolist(), documents.tolist(), pieces.tolist(), lengths.tolist(), np.asarray(starts).tolist(), strict=True)
    for source, document, piece, length, start in rows:
        table = tables[source]
        text = table.file.read(document, piece * table.max_length, length)
        end = start + length
        tokens[start:end] = text
        labels[start : end - 1] = text[1:]
        labels[end - 1] = IGNORE


@dataclass(frozen=True)
class Source:
    """One opened entry of data.train or data.validation: its weight as given, its share (those of all entries add up to 1) and its file."""

    index: int
    name: str
    prefix: str
    weight: float
    share: float
    file: DocumentFile


def open_sources(entries: Sequence[SourceConfig], key: str) -> list[Source]:
    """Open every source. `key` is data.train or data.validation; errors name the entry."""
    names = [entry.name or PurePath(entry.prefix).name for entry in entries]
    for index, (entry, name) in enumerate(zip(entries, names, strict=True)):
        if not (math.isfinite(entry.weight) and entry.weight > 0):
            raise UserError(f"{key}[{index}].weight={entry.weight} of source {name}: a weight must be above 0; leave the source out instead")
        if names.index(name) != index:
            raise UserError(f"{key}[{index}] and {key}[{names.index(name)}] are both called {name}: give one of them a name of its own")
    total = math.fsum(entry.weight for entry in entries)
    readers = [IndexedReader(entry.prefix) for entry in entries]
    return [
        Source(index, name, entry.prefix, entry.weight, entry.weight / total, DocumentFile(reader))
        for index, (entry, name, reader) in enumerate(zip(entries, names, readers, strict=True))
    ]


def open_train_sources(data: DataConfig) -> list[Source]:
    """The sources of data.train, at least one."""
    if not data.train:
        raise UserError("data.train is empty: give at least one source, for example data.train=[{prefix: datasets/mine}]")
    return open_sources(data.train, "data.train")


def split_table(source: Source, data: DataConfig, split: str) -> PieceTable:
    """The pieces of one split of a source; a split that comes out empty is refused by name. split=all takes the whole file."""
    extent = (0, source.file.count) if split == "all" else split_ranges(data.split, source.file.count)[SPLITS.index(split)]
    label = source.name if split == "all" else f"{source.name} ({split})"
    table = PieceTable(source.file, extent, (data.max_length, data.long_documents), source.index, label)
    if table.count == 0:
        why = f"{extent[1] - extent[0]} of its {source.file.count} documents, {table.empty} of them empty"
        if data.long_documents == "drop" and table.long:
            why += f", {table.long} dropped because they are longer than data.max_length={data.max_length}"
        ask = "give a file with text" if split == "all" else f"data.split={tuple(data.split)} must leave it some; or leave the source out"
        raise UserError(f"{label} of {source.prefix} is empty ({why}): {ask}")
    return table
