"""Megatron's .bin/.idx pair: tokens back to back in one file, lengths, byte offsets and document borders in the other.

PREFIX.idx, little-endian, sections without padding between them: magic (9 bytes), version u64 = 1, dtype code u8, sequences S u64,
entries of the document index D u64, lengths i32 [S], byte offsets into PREFIX.bin i64 [S], document index i64 [D] (sequence numbers at
which documents start, first 0, last S), and, in multimodal files only, modes i8 [S].
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

import numpy as np

from megadcp.config.check import UserError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER_BYTES = 34
DTYPES: dict[int, type[np.generic]] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16}
CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
LONGEST = np.iinfo(np.int32).max  # a sequence length is an i32 on disk
CHECK_BLOCK = 1 << 20  # sequences per pass of the checks on opening


def dtype_for_vocab(vocab: int) -> np.dtype[np.generic]:
    """On-disk type of token ids below `vocab`: uint16 below 65,500 and int32 from there on, as Megatron's writer chooses."""
    return np.dtype(np.uint16) if vocab < 65500 else np.dtype(np.int32)


def paths(prefix: str | os.PathLike[str]) -> tuple[Path, Path]:
    """(PREFIX.bin, PREFIX.idx)."""
    return Path(f"{os.fspath(prefix)}.bin"), Path(f"{os.fspath(prefix)}.idx")


class IndexedReader:
    """A .bin/.idx pair, memory-mapped. Opening checks all that can be checked without reading tokens.

    lengths: int32 [S] tokens of each sequence; pointers: int64 [S] its byte offset; document_index: int64 [D].
    tokens_total: tokens in all; empty: sequences without tokens.
    """

    def __init__(self, prefix: str | os.PathLike[str], multimodal: bool = False) -> None:
        """UserError names the file, what was expected and what was found. `multimodal`: the file ends with one mode byte a sequence."""
        self.prefix = os.fspath(prefix)
        self.bin_path, self.idx_path = paths(prefix)
        for path in (self.idx_path, self.bin_path):
            if not path.is_file():
                raise UserError(f"{path}: no such file; {self.prefix} must name a .bin and an .idx file, without the ending")
        self.dtype, self.lengths, self.pointers, self.document_index = self._open_index(multimodal)
        self.tokens_total, self.empty = self._check_contents()
        size = self.bin_path.stat().st_size
        self._tokens = np.memmap(self.bin_path, mode="r", dtype=np.uint8) if size else np.empty(0, np.uint8)

    def _wrong(self, what: str, expected: object, found: object) -> UserError:
        return UserError(f"{self.idx_path}: {what}: expected {expected}, found {found}; the file is damaged or belongs to other data, make it again")

    def _open_index(self, multimodal: bool) -> tuple[np.dtype[np.generic], np.ndarray, np.ndarray, np.ndarray]:
        size = self.idx_path.stat().st_size
        with self.idx_path.open("rb") as file:
            header = file.read(HEADER_BYTES)
        if len(header) < HEADER_BYTES:
            raise self._wrong("size", f"at least {HEADER_BYTES} bytes", f"{size} bytes")
        if header[:9] != MAGIC:
            raise self._wrong("first 9 bytes", MAGIC, header[:9])
        version, code = int.from_bytes(header[9:17], "little"), header[17]
        sequences, entries = int.from_bytes(header[18:26], "little"), int.from_bytes(header[26:34], "little")
        if version != VERSION:
            raise self._wrong("version", VERSION, version)
        if code not in DTYPES:
            raise self._wrong("dtype code", f"one of {sorted(DTYPES)}", code)
        expected = HEADER_BYTES + sequences * (12 + (1 if multimodal else 0)) + 8 * entries
        if size != expected:
            hint = " (it is one byte a sequence longer: a multimodal file?)" if size == expected + sequences and not multimodal else ""
            raise self._wrong("size", f"{expected} bytes for {sequences} sequences and {entries} document entries", f"{size} bytes{hint}")
        raw = np.memmap(self.idx_path, mode="r", dtype=np.uint8)
        first, second = HEADER_BYTES + 4 * sequences, HEADER_BYTES + 12 * sequences
        return (
            np.dtype(DTYPES[code]).newbyteorder("<"),
            raw[HEADER_BYTES:first].view("<i4"),
            raw[first:second].view("<i8"),
            raw[second : second + 8 * entries].view("<i8"),
        )

    def _check_contents(self) -> tuple[int, int]:
        """(tokens, empty sequences) after checking every entry, in blocks so that memory does not grow with the corpus."""
        index = self.document_index
        if not len(index) or index[0] != 0 or index[-1] != len(self.lengths):
            found = f"{index[0]} and {index[-1]}" if len(index) else "no entries"
            raise self._wrong("document index", f"first 0 and last {len(self.lengths)} (the sequences)", found)
        for a in range(0, len(index) - 1, CHECK_BLOCK):
            if (np.diff(index[a : a + CHECK_BLOCK + 1]) < 0).any():
                raise self._wrong("document index", "entries that never fall", f"a fall between entries {a} and {a + CHECK_BLOCK}")
        tokens = empty = end = 0
        for a in range(0, len(self.lengths), CHECK_BLOCK):
            lengths, pointers = self.lengths[a : a + CHECK_BLOCK].astype(np.int64), self.pointers[a : a + CHECK_BLOCK]
            if lengths.min() < 0:
                raise self._wrong("sequence lengths", "none below 0", int(lengths.min()))
            if pointers.min() < 0 or (pointers % self.dtype.itemsize).any():
                raise self._wrong("sequence pointers", f"multiples of {self.dtype.itemsize}, none below 0", "others")
            tokens, empty = tokens + int(lengths.sum()), empty + int((lengths == 0).sum())
            end = max(end, int((pointers + lengths * self.dtype.itemsize).max()))
        size = self.bin_path.stat().st_size
        if size < end or size % self.dtype.itemsize:
            raise UserError(f"{self.bin_path}: expected at least {end} bytes of {self.dtype.name} by {self.idx_path}, found {size}; the pair does not belong together or was cut short")
        return tokens, empty

    def __len__(self) -> int:
        """Sequences."""
        return len(self.lengths)

    def read(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens [length] of one sequence from `offset` on (all that follow where length is None): a view of the file, no copy."""
        whole = int(self.lengths[sequence])
        count = whole - offset if length is None else length
        if offset < 0 or count < 0 or offset + count > whole:
            raise IndexError(f"{self.prefix}: sequence {sequence} has {whole} tokens, asked for {count} from {offset}")
        begin = int(self.pointers[sequence]) + offset * self.dtype.itemsize
        return self._tokens[begin : begin + count * self.dtype.itemsize].view(self.dtype)


def write_index(path: Path, dtype: np.dtype[np.generic], lengths: np.ndarray, document_index: np.ndarray) -> None:
    """Write an .idx for sequences that lie back to back: lengths int [S], document_index int [D]."""
    dtype = np.dtype(dtype)
    if dtype.newbyteorder("=") not in CODES:
        raise UserError(f"{path}: token type {dtype} has no code in this format; legal: {', '.join(str(item) for item in CODES)}")
    lengths = np.asarray(lengths)
    if len(lengths) and (int(lengths.max()) > LONGEST or int(lengths.min()) < 0):
        raise UserError(f"{path}: a sequence of {int(lengths.max())} tokens; the format holds 0 to {LONGEST}: cut it before writing")
    bytes_each = lengths.astype(np.int64) * dtype.itemsize
    with path.open("wb") as file:
        file.write(MAGIC + VERSION.to_bytes(8, "little") + bytes([CODES[dtype.newbyteorder("=")]]))
        file.write(len(lengths).to_bytes(8, "little") + len(document_index).to_bytes(8, "little"))
        lengths.astype("<i4").tofile(file)
        (np.cumsum(bytes_each) - bytes_each).astype("<i8").tofile(file)
        np.asarray(document_index).astype("<i8").tofile(file)
        file.flush()
        os.fsync(file.fileno())


class IndexedWriter:
    """Writes a pair under temporary names and renames both at the end; as a context manager it leaves nothing behind on failure."""

    def __init__(self, prefix: str | os.PathLike[str], dtype: np.dtype[np.generic] | type[np.generic]) -> None:
        """The folder must exist. One sequence is one document."""
        self.prefix, self.dtype = os.fspath(prefix), np.dtype(dtype)
        self._final = paths(prefix)
        self._temporary = tuple(path.with_name(f"{path.name}.{os.getpid()}.tmp") for path in self._final)
        if not self._final[0].parent.is_dir():
            raise UserError(f"{self._final[0].parent}: no such folder to write {self.prefix} to; make it first")
        self._bin = self._temporary[0].open("wb")
        self._lengths: list[np.ndarray] = []
        self._buffered: list[int] = []

    def add(self, tokens: np.ndarray | list[int]) -> None:
        """Append one document, int [n]."""
        flat = np.asarray(tokens)
        self._write(flat)
        self._buffered.append(len(flat))
        if len(self._buffered) >= 65536:
            self._flush_lengths()

    def add_many(self, flat_tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents lying back to back: flat_tokens [sum of lengths], lengths int [n]."""
        if int(np.sum(lengths)) != len(flat_tokens):
            raise ValueError(f"{len(flat_tokens)} tokens for lengths that add up to {int(np.sum(lengths))}")
        self._write(np.asarray(flat_tokens))
        self._flush_lengths()
        self._lengths.append(np.asarray(lengths, np.int64))

    def _write(self, flat: np.ndarray) -> None:
        if len(flat) and flat.dtype != self.dtype and np.issubdtype(self.dtype, np.integer):
            limits = np.iinfo(self.dtype)  # type: ignore[type-var]
            if int(flat.max()) > limits.max or int(flat.min()) < limits.min:
                raise UserError(f"{self.prefix}: token ids {int(flat.min())} to {int(flat.max())} do not fit {self.dtype}; the tokenizer is larger than the type was chosen for")
        flat.astype(self.dtype.newbyteorder("<"), copy=False).tofile(self._bin)

    def _flush_lengths(self) -> None:
        if self._buffered:
            self._lengths.append(np.array(self._buffered, np.int64))
            self._buffered = []

    def finish(self) -> None:
        """Complete both files and rename them; the .idx last, so that a pair with an .idx is complete."""
        self._flush_lengths()
        lengths = np.concatenate(self._lengths) if self._lengths else np.zeros(0, np.int64)
        self._bin.flush()
        os.fsync(self._bin.fileno())
        self._bin.close()
        write_index(self._temporary[1], self.dtype, lengths, np.arange(len(lengths) + 1, dtype=np.int64))
        for temporary, final in zip(self._temporary, self._final, strict=True):
            os.replace(temporary, final)

    def abandon(self) -> None:
        """Remove what was written so far."""
        self._bin.close()
        for temporary in self._temporary:
            temporary.unlink(missing_ok=True)

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.finish()
        else:
            self.abandon()
