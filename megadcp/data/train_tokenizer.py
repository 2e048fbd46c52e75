"""Training a sentencepiece model that gives every text back exactly.

sentencepiece's defaults lose text: they normalise characters, drop and add spaces, and have no way to write an unknown character. The
settings here keep all of it: no normalisation, no removed and no added spaces, byte pieces for what has no piece of its own, and the line
feed as a piece (the trainer reads lines, so it would never see one). Pieces of nothing but spaces are allowed: indented text then takes
a third fewer tokens (the quickstart corpus at 4,096 entries: 3.76 instead of 5.73 million).
"""

from __future__ import annotations

import io
import os
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megadcp.config.check import UserError
from megadcp.data.tokenizer import SentencePieceTokenizer

MODELS = ("bpe", "unigram")
NORMALISATIONS = ("identity", "nfkc", "nmt_nfkc", "nfkc_cf", "nmt_nfkc_cf")
LONGEST_LINE = 1000  # characters: at most 4,000 bytes, since the trainer passes over lines above 4,192
CHECKED_DOCUMENTS = 200
CHECKED_CHARACTERS = 1 << 20  # of each of them


@dataclass(frozen=True)
class TrainSettings:
    """What defines a trained model, beside the text. `threads` is part of it: unigram's sums depend on how the work is divided."""

    vocab: int
    model: str = "bpe"
    lines: int = 1_000_000
    seed: int = 1234
    threads: int = 1
    normalisation: str = "identity"


@dataclass(frozen=True)
class Trained:
    """A model file's bytes, and what came of the check: `exact` of `checked` documents came back character by character."""

    definition: bytes
    vocab: int
    lines_seen: int
    lines_used: int
    checked: int
    exact: int


class VocabularyError(UserError):
    """The vocabulary does not suit the text; `largest` is the most entries that the text can fill, where that is what is wrong."""

    def __init__(self, message: str, largest: int | None = None) -> None:
        super().__init__(message)
        self.largest = largest


class Reservoir:
    """A uniform sample of a stream of unknown length, a pure function of the seed; kept in stream order."""

    def __init__(self, size: int, seed: int) -> None:
        self.seen = 0
        self._size = size
        self._random = random.Random(seed)
        self._kept: list[tuple[int, str]] = []

    def add(self, text: str) -> None:
        """Offer the next text (Vitter's algorithm R)."""
        if len(self._kept) < self._size:
            self._kept.append((self.seen, text))
        else:
            place = int(self._random.random() * (self.seen + 1))
            if place < self._size:
                self._kept[place] = (self.seen, text)
        self.seen += 1

    def texts(self) -> list[str]:
        """The sample in the order in which it was offered."""
        return [text for _, text in sorted(self._kept)]


def lines_of(document: str) -> Iterator[str]:
    """Lines for the trainer: ended by line feeds only, without empty ones, long ones in parts."""
    for line in document.split("\n"):
        for begin in range(0, len(line), LONGEST_LINE):
            yield line[begin : begin + LONGEST_LINE]


def train(documents: Iterable[str], settings: TrainSettings) -> Trained:
    """Train on a sample of the documents' lines and check whole documents. VocabularyError or UserError when the text does not do."""
    if settings.model not in MODELS:
        raise UserError(f"model={settings.model!r} does not exist; legal here: {', '.join(MODELS)}")
    if settings.normalisation not in NORMALISATIONS:
        raise UserError(f"normalisation={settings.normalisation!r} does not exist; legal here: {', '.join(NORMALISATIONS)}")
    lines, whole = Reservoir(settings.lines, settings.seed), Reservoir(CHECKED_DOCUMENTS, settings.seed)
    for document in documents:
        whole.add(document[:CHECKED_CHARACTERS])
        for line in lines_of(document):
            lines.add(line)
    if not lines.seen:
        raise UserError("there is no text to train a tokenizer on: every document is empty")
    sample = lines.texts()
    try:
        "".join(sample).encode()
    except UnicodeEncodeError as fault:
        raise UserError(f"a document holds a lone surrogate ({fault.object[fault.start]!r}), which is no Unicode text; mend or drop it") from None
    definition = _train(sample, settings)
    tokenizer = SentencePieceTokenizer(definition)
    checked = whole.texts()
    exact = sum(tokenizer.decode(tokenizer.encode(document)) == document for document in checked)
    if settings.normalisation == "identity" and exact != len(checked):
        raise RuntimeError(f"the trained model gives back {exact} of {len(checked)} documents exactly; it should give back all")
    return Trained(definition, tokenizer.vocab_size, lines.seen, len(sample), len(checked), exact)


def _train(lines: list[str], settings: TrainSettings) -> bytes:
    import sentencepiece

    lossless: dict[str, Any] = {
        "normalization_rule_name": settings.normalisation,
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "byte_fallback": True,
        "user_defined_symbols": ["\n"],
        "allow_whitespace_only_pieces": True,
    }
    written = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=written,
            vocab_size=settings.vocab,
            model_type=settings.model,
            num_threads=settings.threads,
            minloglevel=2,
            **lossless,
        )
    except RuntimeError as fault:
        raise _explain(str(fault), settings) from None
    return written.getvalue()


def _explain(fault: str, settings: TrainSettings) -> UserError:
    """What sentencepiece says, in the words of our options."""
    if high := re.search(r"too high .*<= (\d+)", fault):
        largest = int(high.group(1))
        return VocabularyError(f"vocab={settings.vocab} is more than this text can fill; legal here: up to {largest}, or train on more text", largest)
    if low := re.search(r"smaller than required_chars\. \d+ vs (\d+)", fault):
        return VocabularyError(f"vocab={settings.vocab} can't hold the bytes and single characters of this text; legal here: {low.group(1)} or more")
    return UserError(f"sentencepiece can't train on this text: {fault}")


def save(definition: bytes, path: Path, overwrite: bool = False) -> None:
    """Write the model under a temporary name and rename it, so that no one ever sees half a model."""
    refuse_existing(path, overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(definition)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def refuse_existing(path: Path, overwrite: bool) -> None:
    """UserError when the file is there and may not be replaced."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; give the name of the model file to write")
    if path.exists() and not overwrite:
        raise UserError(f"{path} exists; choose another name, or --overwrite to replace it (datasets made with it then no longer match)")
