"""PREFIX.json beside PREFIX.bin/.idx: what made the pair. No clock and no worker count in it, so the same inputs give the same manifest."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megadcp.config.check import UserError
from megadcp.config.schema import DataConfig
from megadcp.data.raw_files import Source

VERSION = 1


@dataclass(frozen=True)
class Origin:
    """Everything that the bytes of an output depend on, and the shard it is."""

    keys: tuple[str, ...]
    tokenizer: dict[str, Any]  # kind, file, fingerprint, vocab_size, eod
    append_eod: bool
    sources: tuple[Source, ...]
    shard: tuple[int, int]

    def identity(self, with_shard: bool = True) -> str:
        """Hash that two runs share if, and only if, they make the same output (all shards of a corpus without the shard)."""
        sources = [dataclasses.astuple(source) for source in self.sources]
        fields: list[Any] = [VERSION, self.keys, self.tokenizer["fingerprint"], self.tokenizer["eod"], self.append_eod, sources]
        return hashlib.sha256(json.dumps([*fields, self.shard] if with_shard else fields).encode()).hexdigest()

    def difference(self, other: Origin) -> str:
        """What sets two origins apart, in words; empty if nothing does."""
        if self.keys != other.keys:
            return f"json keys {', '.join(self.keys)} and {', '.join(other.keys)}"
        if self.tokenizer["fingerprint"] != other.tokenizer["fingerprint"] or self.tokenizer["eod"] != other.tokenizer["eod"]:
            mine, its = (origin.tokenizer["file"] or origin.tokenizer["kind"] for origin in (self, other))
            return f"tokenizers {mine} and {its}, which differ in their content or their end of document"
        if self.append_eod != other.append_eod:
            return "with and without --append-eod"
        for one, another in zip(self.sources, other.sources, strict=False):
            if one != another:
                touched = ", modified since" if one.bytes == another.bytes else ""
                return f"input {one.path} ({one.bytes} bytes) and {another.path} ({another.bytes} bytes{touched})"
        if len(self.sources) != len(other.sources):
            return f"{len(self.sources)} and {len(other.sources)} input files"
        return f"shards {shard_name(self.shard)} and {shard_name(other.shard)}" if self.shard != other.shard else ""


@dataclass(frozen=True)
class Counts:
    """What came out for one key. text_bytes: bytes of the records read, uncompressed."""

    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    empty_documents: int = 0
    documents_with_eod_in_text: int = 0
    text_bytes: int = 0
    rejected: int = 0
    blank_lines: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


@dataclass(frozen=True)
class Manifest:
    """One output pair."""

    key: str
    dtype: str
    counts: Counts
    bin_crc32: int
    origin: Origin

    def save(self, prefix: str | os.PathLike[str]) -> None:
        """Write PREFIX.json, whole or not at all."""
        path = manifest_path(prefix)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        described = {"version": VERSION, **dataclasses.asdict(self)}
        temporary.write_text(json.dumps(described, indent=1, ensure_ascii=True) + "\n", encoding="utf-8")
        os.replace(temporary, path)


def manifest_path(prefix: str | os.PathLike[str]) -> Path:
    """PREFIX.json."""
    return Path(f"{os.fspath(prefix)}.json")


def shard_name(shard: Sequence[int]) -> str:
    """The way it is written on the command line."""
    return f"{shard[0]}/{shard[1]}"


def load_manifest(prefix: str | os.PathLike[str]) -> Manifest | None:
    """The manifest of a pair, None if there is none; UserError if there is something else in its place."""
    path = manifest_path(prefix)
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no manifest of a dataset ({error}); move it away, or choose another prefix") from error
    try:
        if described["version"] != VERSION:
            raise ValueError(f"version {described['version']}, this program reads {VERSION}")
        origin = described["origin"]
        sources = tuple(Source(**source) for source in origin["sources"])
        keys, shard = tuple(origin["keys"]), (origin["shard"][0], origin["shard"][1])
        made = Origin(keys, dict(origin["tokenizer"]), origin["append_eod"], sources, shard)
        return Manifest(described["key"], described["dtype"], Counts(**described["counts"]), described["bin_crc32"], made)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise UserError(f"{path} is no manifest of a dataset ({error!r}); move it away, or choose another prefix") from error


def refuse_other_tokenizers(data: DataConfig, fingerprint: str | None) -> None:
    """UserError if a source was made by another tokenizer than the run's (`fingerprint`), or by another than the first source's.

    Pairs without a manifest (made by other programs) can't be checked and are passed over.
    """
    expected, by = fingerprint, f"data.tokenizer ({data.tokenizer.kind} {data.tokenizer.path})".replace(" )", ")")
    for source in (*data.train, *data.validation):
        manifest = load_manifest(source.prefix)
        found = manifest.origin.tokenizer.get("fingerprint") if manifest else None
        if found is None:
            continue
        if expected is None:
            expected, by = found, f"{source.prefix}"
        if found != expected:
            raise UserError(
                f"{source.prefix} was made by tokenizer {found[:12]} (says {manifest_path(source.prefix)}), {by} has {expected[:12]}: the same id "
                "means other text; preprocess the source again with the run's tokenizer, or name the tokenizer that made it"
            )
