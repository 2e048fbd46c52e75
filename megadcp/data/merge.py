"""Several .bin/.idx pairs, one after the other, as one: parts of a run, shards of a corpus, or any pairs of one tokenizer.

Bytes are copied, lengths and document indexes are taken over block by block: memory does not grow with the corpus.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from megadcp.config.check import UserError
from megadcp.data.file_bytes import COPY, chunks, flush
from megadcp.data.indexed import IndexedReader, PairDraft, bin_path, blocks, idx_path, place_pair, write_index
from megadcp.data.manifest import Counts, Manifest, Origin, load_manifest, manifest_path, shard_name

Say = Callable[[str], None]


class PairAppender(PairDraft):
    """Writes PREFIX.bin/.idx out of whole pairs, under temporary names until finish(). Leaves nothing behind on failure."""

    def __init__(self, prefix: str | os.PathLike[str], dtype: Any, temporary: Sequence[Path] = (), checksum: bool = True) -> None:
        """checksum=False leaves crc32 at 0 and saves its time; temporary as in PairDraft."""
        super().__init__(prefix, temporary)
        self.dtype = np.dtype(dtype)
        self.crc32, self._checksum = 0, checksum
        self.tokens = self.sequences = self.documents = self.empty = 0
        self._prefixes: list[str] = []

    def append(self, prefix: str | os.PathLike[str], crc32: int | None = None) -> None:
        """Add a pair; with crc32, its .bin must have that checksum."""
        if self._file is None:
            raise RuntimeError(f"{self.prefix}: already finished")
        reader = IndexedReader(prefix)
        if reader.dtype != self.dtype:
            raise UserError(f"{idx_path(prefix)} holds {reader.dtype.name}, the others {self.dtype.name}: pairs of one dtype can be merged")
        found = 0
        for block in chunks(bin_path(prefix)):
            found = zlib.crc32(block, found) if crc32 is not None else 0
            self.crc32 = zlib.crc32(block, self.crc32) if self._checksum else 0
            if len(block) == COPY and not np.frombuffer(block, np.uint64).any():
                self._file.seek(COPY, os.SEEK_CUR)  # a hole stays a hole
            else:
                self._file.write(block)
        self._file.truncate(self._file.tell())
        if crc32 is not None and found != crc32:
            raise UserError(f"{bin_path(prefix)}: wrong checksum: expected {crc32:08x}, found {found:08x}; the file is damaged, make it again")
        self._prefixes.append(os.fspath(prefix))
        self.tokens += reader.tokens_total
        self.sequences += len(reader)
        self.documents += reader.documents
        self.empty += reader.empty

    def finish(self) -> None:
        """Write the index and rename both files to their final names."""
        if self._file is None:
            return
        try:
            flush(self._file, True)
            self._file.close()
            with open(self._temporary[1], "wb") as file:
                write_index(file, self.dtype, (self.sequences, self.documents + 1), self._lengths, self._document_index())
                flush(file, True)
            place_pair(self._temporary, self.prefix)
        except BaseException:
            self.discard()
            raise
        self._file = None

    def _lengths(self) -> Iterator[np.ndarray]:
        for prefix in self._prefixes:
            yield from blocks(IndexedReader(prefix).lengths)

    def _document_index(self) -> Iterator[np.ndarray]:
        yield np.zeros(1, np.int64)
        sequences = 0
        for prefix in self._prefixes:
            reader = IndexedReader(prefix)
            for block in blocks(reader.document_index[1:]):
                yield block + sequences
            sequences += len(reader)


def rejects_path(prefix: str | os.PathLike[str]) -> Path:
    """Where rejected records go, one JSON object a line."""
    return Path(f"{os.fspath(prefix)}.rejects.jsonl")


def refuse_existing(prefix: str, overwrite: bool, why: str = "") -> None:
    """Nothing that exists is replaced without being told."""
    there = [str(path) for path in (bin_path(prefix), idx_path(prefix), manifest_path(prefix)) if path.exists()]
    if there and not overwrite:
        raise UserError(f"{', '.join(there)} exists already{why}; choose another --output-prefix, or replace it with --overwrite")


def merge(inputs: Sequence[str], output_prefix: str, overwrite: bool, say: Say) -> Manifest | None:
    """Merge pairs into output_prefix and return the manifest of the result (None if the inputs have none).

    Shards of one corpus are put in their order, and all must be there; other pairs keep the order in which they are given.
    """
    prefixes = _prefixes_of(inputs)
    if not prefixes:
        raise UserError("nothing to merge: give the prefixes of the pairs")
    for at, prefix in enumerate(prefixes):
        if os.path.realpath(prefix) in {os.path.realpath(other) for other in prefixes[:at]}:
            raise UserError(f"{prefix} was given twice: its documents would be counted twice; name it once")
        if os.path.realpath(prefix) == os.path.realpath(output_prefix):
            raise UserError(f"--output-prefix {output_prefix} is one of the inputs; choose another")
    refuse_existing(output_prefix, overwrite)
    prefixes, manifests, is_sharded = _in_order(prefixes)
    dtype = IndexedReader(prefixes[0]).dtype
    for prefix in prefixes[1:]:  # before a byte is copied
        other = IndexedReader(prefix).dtype
        if other != dtype:
            raise UserError(f"{idx_path(prefix)} holds {other.name}, {idx_path(prefixes[0])} {dtype.name}: only pairs of one dtype can be merged")
    _check_counts(prefixes, manifests)
    with PairAppender(output_prefix, dtype, checksum=bool(manifests)) as out:
        for prefix, manifest in zip_longest(prefixes, manifests):
            out.append(prefix, manifest.bin_crc32 if manifest else None)
            say(f"{prefix}: {out.documents:,} documents, {out.tokens:,} tokens so far")
        manifest_path(output_prefix).unlink(missing_ok=True)
    merged = _merged_manifest(manifests, out, is_sharded) if manifests else None
    _merge_rejects(prefixes if manifests else [], output_prefix)
    if merged:
        merged.save(output_prefix)
    return merged


def _prefixes_of(inputs: Sequence[str]) -> list[str]:
    """Prefixes out of prefixes and file names, so that shell globs can be given; the files of one pair name it once."""
    prefixes: list[str] = []
    for name in inputs:
        ending = next((ending for ending in (".bin", ".idx", ".json") if name.endswith(ending)), "")
        prefix = name.removesuffix(ending)
        if not ending or prefix not in prefixes:
            prefixes.append(prefix)
    return prefixes


def _in_order(prefixes: list[str]) -> tuple[list[str], list[Manifest], bool]:
    """(prefixes in their order, their manifests or [], whether they are shards of one corpus)."""
    found = [load_manifest(prefix) for prefix in prefixes]
    manifests = [manifest for manifest in found if manifest is not None]
    if not manifests:
        return prefixes, [], False
    if len(manifests) != len(found):
        lacking = [prefix for prefix, manifest in zip(prefixes, found, strict=True) if manifest is None]
        raise UserError(f"{manifest_path(lacking[0])} is missing while other inputs have one: it can't be told whether they belong together")
    first = manifests[0]
    for prefix, manifest in zip(prefixes, manifests, strict=True):
        if manifest.origin.tokenizer["fingerprint"] != first.origin.tokenizer["fingerprint"]:
            raise UserError(f"{prefix} and {prefixes[0]} were made by different tokenizers: their ids mean different things")
    if all(manifest.origin.shard[1] == 1 for manifest in manifests):
        seen: dict[str, str] = {}
        for prefix, manifest in zip(prefixes, manifests, strict=True):
            made_of = manifest.key + manifest.origin.identity()
            if made_of in seen:
                raise UserError(f"{prefix} and {seen[made_of]} were made from the same inputs: their documents would be counted twice")
            seen[made_of] = prefix
        return prefixes, manifests, False
    for prefix, manifest in zip(prefixes, manifests, strict=True):
        if manifest.key != first.key or manifest.origin.identity(False) != first.origin.identity(False):
            difference = first.origin.difference(manifest.origin) if manifest.key == first.key else f"keys {first.key} and {manifest.key}"
            raise UserError(f"{prefix} is no shard of the same run as {prefixes[0]}: {difference}")
        if manifest.origin.shard[1] != first.origin.shard[1]:
            raise UserError(
                f"{prefix} is shard {shard_name(manifest.origin.shard)}, {prefixes[0]} {shard_name(first.origin.shard)}: counts of shards differ"
            )
    return *_sorted_shards(prefixes, manifests), True


def _sorted_shards(prefixes: list[str], manifests: list[Manifest]) -> tuple[list[str], list[Manifest]]:
    count = manifests[0].origin.shard[1]
    by_shard: dict[int, tuple[str, Manifest]] = {}
    for prefix, manifest in zip(prefixes, manifests, strict=True):
        index = manifest.origin.shard[0]
        if index in by_shard:
            raise UserError(f"shard {index}/{count} is there twice: {by_shard[index][0]} and {prefix}")
        by_shard[index] = (prefix, manifest)
    missing = [f"{index}/{count}" for index in range(count) if index not in by_shard]
    if missing:
        raise UserError(f"shards {', '.join(missing)} are missing; {len(by_shard)} of {count} were given")
    ordered = [by_shard[index] for index in range(count)]
    return [prefix for prefix, _ in ordered], [manifest for _, manifest in ordered]


def _check_counts(prefixes: list[str], manifests: list[Manifest]) -> None:
    for prefix, manifest in zip(prefixes, manifests, strict=False):
        reader = IndexedReader(prefix)
        found, expected = (reader.documents, reader.tokens_total), (manifest.counts.documents, manifest.counts.tokens)
        if found != expected:
            path = manifest_path(prefix)
            raise UserError(f"{prefix}: {path} says {expected} (documents, tokens), the pair has {found}; they do not belong together")


def _merged_manifest(manifests: list[Manifest], out: PairAppender, is_sharded: bool) -> Manifest:
    first = manifests[0].origin
    sources = first.sources if is_sharded else tuple(source for manifest in manifests for source in manifest.origin.sources)
    counts = sum((manifest.counts for manifest in manifests), Counts())
    origin = Origin(first.keys, first.tokenizer, first.append_eod, sources, (0, 1))
    return Manifest(manifests[0].key, out.dtype.name, counts, out.crc32, origin)


def _merge_rejects(prefixes: Sequence[str], output_prefix: str) -> None:
    """One reject file out of those that exist."""
    target = rejects_path(output_prefix)
    target.unlink(missing_ok=True)
    found = [rejects_path(prefix) for prefix in prefixes if rejects_path(prefix).exists()]
    if found:
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        with open(temporary, "wb") as file:
            for path in found:
                file.write(path.read_bytes())
        os.replace(temporary, target)
