"""What the sampler hands to planner and batch builder: the documents of one step, and the protocol of everything that has steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

IGNORE = -100  # label of a token without target (the same value as in nn.backend, which data doesn't import)

# A document id is one int64: source (10 bits) | document in its file (37 bits) | piece of that document (16 bits). It depends on
# nothing but the place of the text, so it names the same tokens in every step, epoch, run and layout (and keys dropout).
# Stream mode uses the same layout for source | sample.
SOURCE_BITS, DOCUMENT_BITS, PIECE_BITS = 10, 37, 16
SOURCES, DOCUMENTS, PIECES = 1 << SOURCE_BITS, 1 << DOCUMENT_BITS, 1 << PIECE_BITS


def pack_ids(source: int, documents: np.ndarray, pieces: np.ndarray | int) -> np.ndarray:
    """Ids, int64 [n]. Injective for source < 2^10, documents int64 [n] < 2^37, pieces < 2^16."""
    packed = np.int64(source << (DOCUMENT_BITS + PIECE_BITS)) | (documents.astype(np.int64) << PIECE_BITS)
    return np.asarray(packed | np.asarray(pieces, dtype=np.int64))


def unpack_ids(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(source, document, piece) of each id, each int64 [n]: the inverse of pack_ids."""
    ids = np.asarray(ids, dtype=np.int64)
    return ids >> (DOCUMENT_BITS + PIECE_BITS), (ids >> PIECE_BITS) & (DOCUMENTS - 1), ids & (PIECES - 1)


@dataclass(frozen=True)
class StepDocuments:
    """The documents of one optimizer step, in the sampler's order (the plan refers to them by their index here).

    ids: int64 [n], stable global ids (pack_ids); lengths: int64 [n], input tokens of each, at least 1.
    epoch: passes over the data begun before this step's first token, as a fraction (0.0 at the start, 2.5 half-way through the third).
    """

    step: int
    ids: np.ndarray
    lengths: np.ndarray
    epoch: float


class Documents(Protocol):
    """Anything whose documents can be read by id."""

    def read(self, document: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, labels) of one document id, both int64 [n]; a label is the next token, or IGNORE where there is no target."""

    def fill(self, ids: np.ndarray, starts: np.ndarray, tokens: np.ndarray, labels: np.ndarray) -> None:
        """Write document ids[i] to tokens and labels (int64 [t]) from starts[i] on; nothing else in them is touched."""


class DocumentSource(Documents, Protocol):
    """The training data as a function from step number to documents: no state, so any step can be asked for at any time."""

    fingerprint: str  # hash of everything that defines the order: equal fingerprints, equal steps; kept in checkpoints

    def step(self, index: int) -> StepDocuments:
        """The documents of optimizer step `index` (0 is the first), the same for any number of ranks."""

    def build(self) -> None:
        """Make the order of the whole run on disk where it is kept there, and check what is there already. By one process, before training."""

    def describe(self) -> list[str]:
        """Lines that tell a person what was decided: documents, tokens, skipped, cut, epochs, cache."""


class ValidationSet(Documents, Protocol):
    """One named set of held-out documents."""

    name: str

    def documents(self, max_tokens: int) -> StepDocuments:
        """A fixed choice of whole documents with at most `max_tokens` tokens together, but at least one document."""
