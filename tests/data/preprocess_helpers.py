"""Small corpora and short ways to preprocess them with the bytes tokenizer, whose ids show the text."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import zstandard

from megadcp.data.indexed import IndexedReader
from megadcp.data.manifest import Manifest
from megadcp.data.preprocess import Preprocess, preprocess
from megadcp.data.tokenizer import BytesTokenizer

EOD = 256
TEXTS = [f"Document {number}: " + "word " * (number * 7 % 23) + "\n\u00e4\u20ac end" for number in range(40)]


def lines(texts: Iterable[str], key: str = "text") -> bytes:
    """JSON lines as they are usually written."""
    return b"".join(json.dumps({key: text}).encode() + b"\n" for text in texts)


def write(path: Path, data: bytes) -> str:
    """Write, packed as the name says."""
    packed = gzip.compress(data) if path.suffix == ".gz" else zstandard.ZstdCompressor().compress(data) if path.suffix == ".zst" else data
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(packed)
    return str(path)


class Said(list[str]):
    """What a run said."""

    def __call__(self, line: str) -> None:
        """One line more."""
        self.append(line)

    def has(self, text: str) -> bool:
        """Whether any line holds the text."""
        return any(text in line for line in self)


def run(inputs: str | Path | Sequence[str], prefix: Path, **settings: object) -> Manifest:
    """Preprocess with the bytes tokenizer; one key."""
    names = (str(inputs),) if isinstance(inputs, (str, Path)) else tuple(inputs)
    say = settings.pop("say", Said())
    job = Preprocess(names, str(prefix), "bytes", **settings)  # type: ignore[arg-type]
    return preprocess(job, say)[0]  # type: ignore[arg-type]


def texts_of(prefix: Path) -> list[str]:
    """The documents of a pair, decoded, without their end-of-document id."""
    reader = IndexedReader(prefix)
    decode = BytesTokenizer().decode
    index = reader.document_index.tolist()
    return ["".join(decode(reader.read(s)) for s in range(index[d], index[d + 1])) for d in range(reader.documents)]


def files_of(prefix: Path, endings: Sequence[str] = ("bin", "idx", "json")) -> list[bytes]:
    """The bytes of an output."""
    return [Path(f"{prefix}.{ending}").read_bytes() for ending in endings]
