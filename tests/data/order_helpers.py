"""Small corpora written byte by byte, so that these tests don't rest on the project's own writer."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megadcp.config.schema import DataConfig, SourceConfig
from megadcp.data.order import DocumentSource, StepDocuments
from megadcp.data.step_documents import unpack_ids


def write_pair(prefix: Path, documents: Sequence[Sequence[Sequence[int]]]) -> str:
    """documents[d] is a list of sequences (sentences); an empty list is a document without any sequence."""
    sequences = [np.asarray(sequence, dtype=np.int32) for document in documents for sequence in document]
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int32)
    pointers = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64) * 4])[: len(lengths)]
    index = np.cumsum([0] + [len(document) for document in documents], dtype=np.int64)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{prefix}.bin").write_bytes(b"".join(sequence.tobytes() for sequence in sequences))
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, len(lengths), len(index))
    Path(f"{prefix}.idx").write_bytes(header + lengths.tobytes() + pointers.astype("<i8").tobytes() + index.tobytes())
    return str(prefix)


def write_lengths(prefix: Path, lengths: Sequence[int], first_token: int = 0) -> str:
    """One sequence per document; token values count up through the whole file, so each names its place. Length 0 is an empty document."""
    ends = first_token + np.cumsum([0, *lengths])
    documents = [[list(range(a, b))] if b > a else [] for a, b in itertools.pairwise(ends.tolist())]
    return write_pair(prefix, documents)


def data_config(*prefixes: str, weights: Sequence[float] | None = None, **settings: object) -> DataConfig:
    """A DataConfig with the whole of every file as training data unless `split` says otherwise."""
    weights = weights or [1.0] * len(prefixes)
    train = tuple(SourceConfig(prefix, weight, f"s{index}") for index, (prefix, weight) in enumerate(zip(prefixes, weights, strict=True)))
    defaults: dict[str, object] = {"split": (1.0, 0.0, 0.0), "max_length": 1024, "tokens_per_step": 1024}
    return DataConfig(train=train, **{**defaults, **settings})  # type: ignore[arg-type]


def ids_of(source: DocumentSource, steps: int, first: int = 0) -> np.ndarray:
    """All ids of steps first .. steps - 1, one after the other."""
    return np.concatenate([source.step(index).ids for index in range(first, steps)])


def places(step: StepDocuments) -> list[tuple[int, int, int]]:
    """(source, document, piece) of every document of a step."""
    return list(zip(*(part.tolist() for part in unpack_ids(step.ids)), strict=True))
