"""Reader and writer of Megatron's indexed dataset: PREFIX.bin and PREFIX.idx. numpy only, byte-compatible both ways.

.bin holds token ids back to back in one dtype. .idx, little-endian and without padding, with S sequences and D = documents + 1:

    9 bytes magic | u64 version 1 | u8 dtype code | u64 S | u64 D | i32 length [S] | i64 pointer [S] | i64 document index [D]

A length is in tokens, a pointer is the byte offset into .bin, and document d is sequences document_index[d] .. document_index[d + 1] - 1.
Multimodal files append one i8 mode per sequence; nothing in the header says so, so the reader must be told.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import sys
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np

from megadcp.config.check import UserError
from megadcp.data.file_bytes import flush

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
CODES = {name: code for code, name in DTYPES.items()}
LONGEST = 2**31 - 1  # tokens of one sequence: lengths are i32
LARGEST = 2**63 - 1  # bytes of .bin: pointers are i64
BLOCK = 1 << 20  # sequences handled at a time


def dtype_for_vocab(vocab: int) -> np.dtype[Any]:
    """uint16 below 65500 ids, else int32: the rule of Megatron's writer. Readers must take the dtype from the header instead."""
    if not 0 < vocab <= 2**31:
        raise UserError(f"a vocabulary of {vocab} ids can't be stored; legal: 1 to {2**31}")
    return np.dtype(np.uint16) if vocab < 65500 else np.dtype(np.int32)


def bin_path(prefix: str | os.PathLike[str]) -> Path:
    """The token file of a prefix."""
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | os.PathLike[str]) -> Path:
    """The index file of a prefix."""
    return Path(f"{os.fspath(prefix)}.idx")


def _wrong(path: Path, what: str, expected: object, found: object, hint: str = "") -> UserError:
    return UserError(f"{path}: wrong {what}: expected {expected}, found {found}{'; ' + hint if hint else ''}")


class IndexedReader:
    """A .bin/.idx pair, memory-mapped and fully checked when opened.

    lengths: int32 [S] tokens; pointers: int64 [S] byte offsets; document_index: int64 [D]; modes: int8 [S] or None. All are views of
    the map. Opening reads the index once, in blocks (about 1 s for 10^8 sequences that are in the page cache).
    """

    def __init__(self, prefix: str | os.PathLike[str], multimodal: bool = False) -> None:
        """Raises UserError that names the file, what was expected and what was found."""
        self.prefix = os.fspath(prefix)
        self.multimodal = multimodal
        idx = idx_path(prefix)
        index = _map(idx)
        self.dtype, sequences, entries = _read_header(idx, index, multimodal)
        at = HEADER.size
        self.lengths: np.ndarray = np.frombuffer(index, "<i4", sequences, at)
        self.pointers: np.ndarray = np.frombuffer(index, "<i8", sequences, at + 4 * sequences)
        self.document_index: np.ndarray = np.frombuffer(index, "<i8", entries, at + 12 * sequences)
        self.modes: np.ndarray | None = np.frombuffer(index, "i1", sequences, at + 12 * sequences + 8 * entries) if multimodal else None
        self._check_document_index(idx)
        self.tokens_total, self.empty_sequences = self._check_sequences(idx)
        self.empty = self._count_empty_documents()
        path = bin_path(prefix)
        data = _map(path)
        expected = self.tokens_total * self.dtype.itemsize
        if len(data) != expected:
            hint = "the two files do not belong together, or .bin is cut short"
            raise _wrong(
                path, "size", f"{expected} bytes ({self.tokens_total} tokens of {self.dtype.name} in {idx.name})", f"{len(data)} bytes", hint
            )
        self._tokens: np.ndarray = np.frombuffer(data, self.dtype)

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    @property
    def documents(self) -> int:
        """Number of documents, empty ones included."""
        return len(self.document_index) - 1

    def read(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens [offset, offset + length) of a sequence (length None: to its end); a read-only view of the map, nothing is copied."""
        if not 0 <= sequence < len(self.lengths):
            raise IndexError(f"{self.prefix}: there is no sequence {sequence}; legal: 0 to {len(self.lengths) - 1}")
        size = int(self.lengths[sequence])
        stop = size if length is None else offset + length
        if not 0 <= offset <= stop <= size:
            raise IndexError(f"{self.prefix}: tokens {offset} to {stop} of sequence {sequence} were asked for, it has {size}")
        first = int(self.pointers[sequence]) // self.dtype.itemsize
        return self._tokens[first + offset : first + stop]

    def __reduce__(self) -> tuple[type[IndexedReader], tuple[str, bool]]:
        """Another process opens the files again instead of receiving a copy of them."""
        return IndexedReader, (self.prefix, self.multimodal)

    def _check_document_index(self, path: Path) -> None:
        index = self.document_index
        if int(index[0]) != 0:
            raise _wrong(path, "document index", "first entry 0", int(index[0]))
        if int(index[-1]) != len(self.lengths):
            raise _wrong(path, "document index", f"last entry {len(self.lengths)} (the number of sequences)", int(index[-1]))
        for begin in range(0, len(index) - 1, BLOCK):
            block = index[begin : begin + BLOCK + 1]
            down = np.flatnonzero(block[1:] < block[:-1])
            if len(down):
                at = int(down[0])
                raise _wrong(path, f"document index entry {begin + at + 1}", f"at least {int(block[at])}", int(block[at + 1]))

    def _check_sequences(self, path: Path) -> tuple[int, int]:
        """(tokens, zero-length sequences); every pointer must be the running sum of the lengths before it, in bytes."""
        total = empty = 0
        for begin in range(0, len(self.lengths), BLOCK):
            lengths = self.lengths[begin : begin + BLOCK]
            if int(lengths.min()) < 0:
                at = int(np.argmax(lengths < 0))
                raise _wrong(path, f"length of sequence {begin + at}", "0 or more", int(lengths[at]))
            expected = _pointers(lengths, total, self.dtype.itemsize)
            found = self.pointers[begin : begin + BLOCK]
            if not np.array_equal(expected, found):
                at = int(np.argmax(expected != found))
                hint = "lengths and pointers disagree, as after 32-bit overflow"
                raise _wrong(path, f"pointer of sequence {begin + at}", int(expected[at]), int(found[at]), hint)
            total += int(lengths.sum(dtype=np.int64))
            empty += len(lengths) - int(np.count_nonzero(lengths))
        return total, empty

    def _count_empty_documents(self) -> int:
        """Documents without tokens: no sequence at all, or only zero-length ones."""
        empty = 0
        itemsize, size = self.dtype.itemsize, len(self.lengths)
        for begin in range(0, self.documents, BLOCK):
            edges = self.document_index[begin : begin + BLOCK + 1]
            if self.empty_sequences == 0:
                empty += int(np.count_nonzero(edges[1:] == edges[:-1]))
                continue
            inside = edges < size
            tokens = np.full(len(edges), self.tokens_total, np.int64)
            tokens[inside] = self.pointers[edges[inside]] // itemsize
            empty += int(np.count_nonzero(tokens[1:] == tokens[:-1]))
        return empty


def _map(path: Path) -> mmap.mmap | bytes:
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:  # can't be mapped
                return b""
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise UserError(f"{path} can't be opened: {error.strerror or error}; a dataset is a pair PREFIX.bin and PREFIX.idx") from error


def _read_header(path: Path, index: mmap.mmap | bytes, multimodal: bool) -> tuple[np.dtype[Any], int, int]:
    """(dtype, S, D), after comparing the file's size with what they imply; nothing is allocated for counts that don't fit."""
    size = len(index)
    if size < HEADER.size:
        raise _wrong(path, "size", f"at least {HEADER.size} bytes of header", f"{size} bytes", "the file is empty or cut short")
    magic, version, code, sequences, entries = HEADER.unpack_from(index)
    if magic != MAGIC:
        raise _wrong(path, "magic", MAGIC, magic, "this is not an .idx file of this format")
    if version != VERSION:
        raise _wrong(path, "version", VERSION, version)
    if code not in DTYPES:
        legal = ", ".join(f"{key} {name}" for key, name in DTYPES.items())
        raise _wrong(path, "dtype code", f"one of {legal}", code)
    if entries < 1:
        raise _wrong(path, "number of document index entries", "1 or more (documents + 1)", entries)
    expected = HEADER.size + (13 if multimodal else 12) * sequences + 8 * entries
    if size != expected:
        hint = "the file is cut short" if size < expected else "the file is longer than its header says"
        if not multimodal and size == expected + sequences:
            hint = "the file has a multimodal section: open it with multimodal=True"
        raise _wrong(path, "size", f"{expected} bytes for {sequences} sequences and {entries} document index entries", f"{size} bytes", hint)
    return np.dtype(DTYPES[code]).newbyteorder("<"), int(sequences), int(entries)


def _pointers(lengths: np.ndarray, before: int, itemsize: int) -> np.ndarray:
    """Byte offsets of sequences of these lengths, int64 [n], where `before` tokens lie ahead of the first."""
    pointers = np.cumsum(lengths, dtype=np.int64)
    pointers -= lengths
    pointers += before
    pointers *= itemsize
    return pointers


def write_index(
    file: IO[bytes], dtype: np.dtype[Any], counts: tuple[int, int], lengths: Callable[[], Iterable[np.ndarray]], document_index: Iterable[np.ndarray]
) -> None:
    """Write a whole .idx. counts = (S, D); `lengths` is called twice and yields int32 blocks, document_index yields int64 blocks."""
    file.write(HEADER.pack(MAGIC, VERSION, dtype_code(dtype), *counts))
    sequences = 0
    for block in lengths():
        file.write(np.ascontiguousarray(block, "<i4").data)
        sequences += len(block)
    total = 0
    for block in lengths():
        file.write(_pointers(block, total, dtype.itemsize).astype("<i8", copy=False).data)
        total += int(block.sum(dtype=np.int64))
    entries = 0
    for block in document_index:
        file.write(np.ascontiguousarray(block, "<i8").data)
        entries += len(block)
    if (sequences, entries) != counts:
        raise RuntimeError(f"the index promised {counts} sequences and document entries and got {(sequences, entries)}")


def dtype_code(dtype: np.dtype[Any]) -> int:
    """The header's code of a dtype."""
    if dtype.name not in CODES:
        raise UserError(f"dtype {dtype.name} has no code in this format; legal: {', '.join(CODES)}")
    return CODES[dtype.name]


def blocks(values: Any, step: int = BLOCK) -> Iterator[np.ndarray]:
    """Consecutive slices of an array-like."""
    for begin in range(0, len(values), step):
        yield np.asarray(values[begin : begin + step])


class PairDraft:
    """A pair under temporary names until finish(). As a context manager: finished on a clean exit, nothing left behind on an exception."""

    def __init__(self, prefix: str | os.PathLike[str], temporary: Sequence[Path] = ()) -> None:
        """temporary: names of .bin and .idx until finish(), on the same file system; by default hidden ones beside the final ones."""
        self.prefix = os.fspath(prefix)
        hidden = [path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in (bin_path(prefix), idx_path(prefix))]
        self._temporary = list(temporary) or hidden
        bin_path(prefix).parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] | None = open(self._temporary[0], "wb")  # noqa: SIM115 - lives as long as the draft

    def finish(self) -> None:
        """Complete both files and give them their names."""
        raise NotImplementedError

    def discard(self) -> None:
        """Remove the temporary files; nothing remains."""
        if self._file is not None:
            self._file.close()
            self._file = None
        for path in self._temporary:
            path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        """The draft itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Finish, or after an exception discard."""
        if kind is None:
            self.finish()
        else:
            self.discard()


class IndexedWriter(PairDraft):
    """Writes PREFIX.bin and PREFIX.idx under temporary names in the same folder and renames both in finish().

    As a context manager it finishes on a clean exit and leaves nothing behind on an exception. Memory: 4 bytes a sequence, and 8 a
    document from the first one on that is not exactly one sequence. An existing pair is replaced: whoever minds must look before.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: Any, sync: bool = True) -> None:
        """sync=False leaves it to the system when the bytes reach the disk (for files that can be made again)."""
        self.dtype = np.dtype(dtype).newbyteorder("<")
        dtype_code(self.dtype)
        super().__init__(prefix)
        self._sync = sync
        self._info = np.iinfo(self.dtype) if self.dtype.kind in "iu" else None
        self._lengths = array("i")
        self._entries: array[int] | None = None  # document index, kept once it is not 0, 1, 2, ...
        self._documents = 0
        self.tokens_total = self.crc32 = 0  # the checksum is that of .bin

    @property
    def sequences(self) -> int:
        """Sequences written so far."""
        return len(self._lengths)

    @property
    def documents(self) -> int:
        """Documents written so far, empty ones included."""
        return self._documents

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sequence so far, a copy, int32 [S]."""
        return np.array(self._lengths, dtype=np.int32)

    def add(self, tokens: Sequence[int] | np.ndarray) -> None:
        """One document of one sequence; an empty one becomes a document without sequences, as Megatron's own tool writes it."""
        self.add_many(tokens, [len(tokens)])

    def add_document(self, tokens: Sequence[int] | np.ndarray, lengths: Sequence[int]) -> None:
        """One document cut into sequences of these lengths (sentences); zero-length ones are kept as they are."""
        sizes = self._write(tokens, lengths)
        self._entries = self._document_entries()
        self._lengths.frombytes(sizes.tobytes())
        self._documents += 1
        self._entries.append(len(self._lengths))

    def add_many(self, tokens: Sequence[int] | np.ndarray, lengths: Sequence[int] | np.ndarray) -> None:
        """tokens: [sum(lengths)], the documents back to back; one sequence per document, an empty one becomes a document without sequences."""
        sizes = self._write(tokens, lengths)
        kept = sizes[sizes != 0]
        if len(kept) != len(sizes) and self._entries is None:
            self._entries = self._document_entries()
        if self._entries is not None:
            self._entries.frombytes((np.cumsum(sizes != 0, dtype=np.int64) + len(self._lengths)).tobytes())
        self._lengths.frombytes(kept.tobytes())
        self._documents += len(sizes)

    def _document_entries(self) -> array[int]:
        if self._entries is not None:
            return self._entries
        entries = array("q")
        entries.frombytes(np.arange(self._documents + 1, dtype=np.int64).tobytes())
        return entries

    def _write(self, tokens: Sequence[int] | np.ndarray, lengths: Sequence[int] | np.ndarray) -> np.ndarray:
        """Check, then append to .bin; returns the lengths as int32."""
        if self._file is None:
            raise RuntimeError(f"{self.prefix}: the writer is closed")
        values, sizes = np.asarray(tokens), np.asarray(lengths)
        if sizes.size == 0:
            sizes = sizes.astype(np.int64)
        if sizes.dtype.kind not in "iu" or (sizes.size and (int(sizes.min()) < 0 or int(sizes.max()) > LONGEST)):
            raise UserError(f"{self.prefix}: a sequence holds 0 to {LONGEST} tokens, found {sizes.min()} to {sizes.max()}")
        count = int(sizes.sum(dtype=np.int64))
        if values.ndim != 1 or len(values) != count:
            raise UserError(f"{self.prefix}: lengths add up to {count} tokens, the tokens have shape {values.shape}")
        if (self.tokens_total + count) * self.dtype.itemsize > LARGEST:
            raise UserError(f"{self.prefix}: more than {LARGEST} bytes can't be addressed")
        data = self._cast(values).data
        self._file.write(data)
        self.crc32 = zlib.crc32(data, self.crc32)
        self.tokens_total += count
        return sizes.astype(np.int32)

    def _cast(self, values: np.ndarray) -> np.ndarray:
        """To the file's dtype; never wraps."""
        if values.dtype == self.dtype or values.size == 0:
            return np.ascontiguousarray(values, self.dtype)
        if self._info is not None:
            if values.dtype.kind not in "iu":
                raise UserError(f"{self.prefix}: token ids must be integers, found {values.dtype.name}")
            low, high = int(values.min()), int(values.max())
            if low < self._info.min or high > self._info.max:
                raise UserError(f"{self.prefix}: token ids {low} to {high} do not fit {self.dtype.name} ({self._info.min} to {self._info.max})")
        return np.ascontiguousarray(values, self.dtype)

    def finish(self) -> None:
        """Write the index and rename both files to their final names, .idx last. A second call does nothing."""
        if self._file is None:
            return
        try:
            flush(self._file, self._sync)
            self._file.close()
            with open(self._temporary[1], "wb") as file:
                lengths = np.frombuffer(self._lengths, np.int32)
                entries = self._entry_blocks()
                write_index(file, self.dtype, (len(lengths), self._documents + 1), lambda: blocks(lengths), entries)
                flush(file, self._sync)
            place_pair(self._temporary, self.prefix)
        except BaseException:
            self.discard()
            raise
        self._file = None

    def _entry_blocks(self) -> Iterator[np.ndarray]:
        if self._entries is not None:
            yield from blocks(np.frombuffer(self._entries, np.int64))
            return
        for begin in range(0, self._documents + 1, BLOCK):
            yield np.arange(begin, min(begin + BLOCK, self._documents + 1), dtype=np.int64)


def place_pair(temporary: Sequence[Path], prefix: str | os.PathLike[str]) -> None:
    """Rename (bin, idx). An old .idx goes first: between the renames there must be no pair that looks whole and is not."""
    with contextlib.suppress(FileNotFoundError):
        idx_path(prefix).unlink()
    os.replace(temporary[0], bin_path(prefix))
    os.replace(temporary[1], idx_path(prefix))


if sys.byteorder != "little":  # arrays are handed to files as they lie in memory
    raise ImportError("megadcp.data.indexed needs a little-endian machine")
