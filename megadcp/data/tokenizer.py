"""Text to token ids and back: sentencepiece, Hugging Face tokenizer.json, and plain bytes for tests. No torch.

Two rules hold for every kind. Text can't forge a control token: a document that spells "</s>" or "<|endoftext|>" gets ordinary pieces,
whatever the model file says, so the end-of-document id is only ever appended by the program. And nothing is added to the text: no
begin or end token, no truncation, no padding.

Legend: S texts, n their tokens together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megadcp.config.check import UserError
from megadcp.data.control_tokens import CONTROL_NAME, EOD_NAMES, respell
from megadcp.data.tokenizer_json import load_json

SPACE_MARK = "▁"  # sentencepiece writes a space as U+2581, so a real U+2581 would come back as a space
PART = 2048  # characters encoded at a time where lines can be encoded one by one (1.2x on files of 16 KB, 3x on one of 4 MB)


class Tokenizer(Protocol):
    """What the rest of the program knows about a tokenizer. Ids are below vocab_size; a lone surrogate in a text is a ValueError."""

    vocab_size: int
    eod: int
    fingerprint: str

    def encode(self, text: str) -> list[int]:
        """Ids of one text."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""
        ...

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The fast way: (ids int32 [n], lengths int64 [S])."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; control tokens give no text."""
        ...


def _at_line_feeds(text: str) -> Iterator[str]:
    """The text in parts of about PART characters, each of them whole lines (a longer line is a part of its own)."""
    begin = 0
    while len(text) - begin > PART:
        end = text.rfind("\n", begin, begin + PART) + 1 or text.find("\n", begin + PART) + 1
        if not end:
            break
        yield text[begin:end]
        begin = end
    yield text[begin:]


class _Flat:
    """encode and encode_batch on top of encode_flat."""

    _arguments: tuple[object, ...] = ()

    def __reduce__(self) -> tuple[Any, tuple[object, ...]]:
        """Another process makes it again: the libraries' own pickles forget settings (tokenizers forgets encode_special_tokens)."""
        return type(self), self._arguments

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Given by each kind."""
        raise NotImplementedError

    def encode(self, text: str) -> list[int]:
        """Ids of one text."""
        return list(map(int, self.encode_flat([text])[0]))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""
        ids, lengths = self.encode_flat(texts)
        flat, ends = ids.tolist(), np.cumsum(lengths).tolist()
        return [flat[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def _flatten(pieces: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Arrays of each text -> (ids int32 [n], lengths int64 [S])."""
    lengths = np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces))
    return (np.concatenate(pieces).astype(np.int32, copy=False) if pieces else np.zeros(0, np.int32)), lengths


def _fingerprint(kind: str, definition: bytes) -> str:
    return hashlib.sha256(kind.encode() + b"\0" + definition).hexdigest()


def _refuse_surrogates(texts: Sequence[str]) -> None:
    for text in texts:
        text.encode()  # UnicodeEncodeError, which is a ValueError, names the place


class BytesTokenizer(_Flat):
    """UTF-8 bytes 0 to 255 and the end of document 256. Lossless; for tests and for looking at things by hand."""

    def __init__(self) -> None:
        self.vocab_size = 257
        self.eod = 256
        self.fingerprint = _fingerprint("bytes", b"")

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """(ids int32 [n], lengths int64 [S])."""
        return _flatten([np.frombuffer(text.encode(), dtype=np.uint8) for text in texts])

    def decode(self, ids: Iterable[int]) -> str:
        """Text; bytes that are no UTF-8 (a cut character) show as U+FFFD."""
        return bytes(i for i in map(int, ids) if i < 256).decode("utf-8", errors="replace")


class SentencePieceTokenizer(_Flat):
    """A sentencepiece model file, BPE or unigram."""

    def __init__(self, definition: bytes, eod: str = "", where: str = "sentencepiece model") -> None:
        import sentencepiece

        self._arguments = (definition, eod, where)
        try:
            if not definition:
                raise ValueError("the file is empty")
            self._model = sentencepiece.SentencePieceProcessor(model_proto=definition)
        except (RuntimeError, ValueError, TypeError) as fault:
            raise UserError(f"{where}: no sentencepiece model ({fault}); a tokenizer.json needs data.tokenizer.kind=huggingface") from None
        self.vocab_size = int(self._model.vocab_size())
        self.fingerprint = _fingerprint("sentencepiece", definition)
        self.eod = self._find_eod(eod, where)
        self._spellings = self._find_spellings()
        # encode_as_numpy (sentencepiece 0.2.3) makes no Python integers: measured 1.1x (BPE) and 1.5x (unigram) the speed of encode alone.
        self._fast: Callable[[str], np.ndarray] | None = getattr(self._model, "encode_as_numpy", None)
        self.lossless = self._probe()
        self._space_mark = np.array([self._model.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()], dtype=np.int32)
        self._by_lines = self.lossless and self._lines_are_apart()

    def _find_eod(self, name: str, where: str) -> int:
        if not name and self._model.eos_id() >= 0:
            return int(self._model.eos_id())
        for candidate in (name,) if name else EOD_NAMES:
            index = int(self._model.piece_to_id(candidate))
            if not self._model.is_unknown(index):
                return index
        asked = f"the token {name!r}" if name else f"an end-of-document token (no eos id, none of {', '.join(EOD_NAMES)})"
        raise UserError(f"{where}: the model does not have {asked}; train it with an eos id, or name one of its pieces")

    def _find_spellings(self) -> dict[int, np.ndarray]:
        """User-defined pieces that mean something to a program match in text: id -> the ids that spell the same characters."""
        spellings = {}
        pieces = self._model.id_to_piece(list(range(self.vocab_size)))
        for index, piece in enumerate(pieces):
            reserved = index == self.eod or CONTROL_NAME.fullmatch(piece)
            if reserved and len(piece) > 1 and not (self._model.is_control(index) or self._model.is_unknown(index)):
                spellings[index] = np.array([i for character in piece for i in self._character(character)], dtype=np.int32)
        return spellings

    def _character(self, character: str) -> list[int]:
        index = self._model.piece_to_id(character)
        if not self._model.is_unknown(index):
            return [index]
        raw = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in character.encode()]
        return [index] if any(map(self._model.is_unknown, raw)) else raw

    def _probe(self) -> bool:
        """Whether text comes back as it was and its parts can be encoded one by one.

        The probe has what models with a normaliser or without byte pieces change; a space put in front shows in the first piece.
        """
        text = "  Two  spaces,\ttab\r\n\n\ufb01 \u00c5 A\u030a \uff21 \x00\x7f\U0001f9ea\u3000 end \n "
        missing = any(self._model.is_unknown(self._model.piece_to_id(f"<0x{byte:02X}>")) for byte in range(256))
        if missing or self._model.decode(self._model.encode(text)) != text:
            return False
        return not str(self._model.id_to_piece(self._model.encode("a")[0])).startswith(SPACE_MARK)

    def _lines_are_apart(self) -> bool:
        """Whether lines encoded one by one give the ids of the whole: no piece but the line feed holds one, and merges are local (BPE).

        BPE scores are ranks, so whole numbers. Unigram adds up log-probabilities in float32, and long sums round differently.
        """
        pieces = self._model.id_to_piece(list(range(self.vocab_size)))
        if any("\n" in piece and piece != "\n" for piece in pieces):
            return False
        return all(float(self._model.get_score(index)).is_integer() for index in range(self.vocab_size))

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """(ids int32 [n], lengths int64 [S])."""
        try:
            pieces = [self._one(text) for text in texts]
        except RuntimeError:  # sentencepiece's way to say that a str is no Unicode text
            _refuse_surrogates(texts)
            raise
        return respell(*_flatten(pieces), self._spellings)

    def _one(self, text: str) -> np.ndarray:
        """Ids of one text; in a lossless model a U+2581 becomes its bytes."""
        if not self.lossless or SPACE_MARK not in text:
            return self._plain(text)
        first, *rest = text.split(SPACE_MARK)
        return np.concatenate([self._plain(first), *(ids for part in rest for ids in (self._space_mark, self._plain(part)))])

    def _plain(self, text: str) -> np.ndarray:
        """Ids as sentencepiece gives them. BPE works off a heap as large as the text: smaller parts stay in the processor's cache."""
        if not self._by_lines or len(text) <= 2 * PART:
            return self._fast(text) if self._fast else np.array(self._model.encode(text), dtype=np.int32)
        encode = self._fast or self._model.encode
        return np.concatenate([np.asarray(encode(part), dtype=np.int32) for part in _at_line_feeds(text)])

    def decode(self, ids: Iterable[int]) -> str:
        """Text; control tokens, the end of document among them, give none."""
        return str(self._model.decode([i for i in map(int, ids) if i != self.eod]))


class HuggingFaceTokenizer(_Flat):
    """A tokenizer.json, read by the `tokenizers` package (extra hf)."""

    def __init__(self, definition: bytes, eod: str = "", where: str = "tokenizer.json") -> None:
        self._arguments = (definition, eod, where)
        loaded = load_json(definition, eod, where)
        self._model: Any = loaded.model
        self._spellings = loaded.spellings
        self.vocab_size, self.eod = loaded.vocab_size, loaded.eod
        self.fingerprint = _fingerprint("huggingface", definition)

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """(ids int32 [n], lengths int64 [S]). One thread: preprocessing takes processes, whose threads would only crowd each other."""
        try:
            # Without offsets: 1.2 to 1.5 times as fast as encode(). Text by text, or its own threads would join in.
            found = (self._model.encode_batch_fast([text], add_special_tokens=False)[0] for text in texts)
            pieces = [np.array(each.ids, dtype=np.int32) for each in found]
        except TypeError:
            _refuse_surrogates(texts)
            raise
        return respell(*_flatten(pieces), self._spellings)

    def decode(self, ids: Iterable[int]) -> str:
        """Text; special tokens, the end of document among them, give none."""
        return str(self._model.decode([i for i in map(int, ids) if i != self.eod], skip_special_tokens=True))


def open_tokenizer(kind: str, path: str = "", eod: str = "") -> Tokenizer:
    """The tokenizer of this kind (sentencepiece, huggingface, bytes) from its model file.

    `eod` names the end-of-document token where the file does not make it clear. UserError when the file is missing or of another kind.
    """
    if kind == "bytes":
        return BytesTokenizer()
    kinds: dict[str, Callable[[bytes, str, str], Tokenizer]] = {"sentencepiece": SentencePieceTokenizer, "huggingface": HuggingFaceTokenizer}
    if kind not in kinds:
        raise UserError(f"data.tokenizer.kind={kind!r} does not exist; legal here: sentencepiece, huggingface, bytes")
    if not path:
        raise UserError(f"data.tokenizer.path is empty; kind={kind} needs the path of its model file")
    file = Path(path)
    if file.is_dir() and kind == "huggingface":
        file = file / "tokenizer.json"
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "does not exist"
        raise UserError(f"data.tokenizer.path={path}: {file} {what}; give a {'.model' if kind == 'sentencepiece' else 'tokenizer.json'} file")
    if kind == "huggingface" and not eod:
        eod = _configured_eod(file)
    return kinds[kind](file.read_bytes(), eod, str(file))


def _configured_eod(file: Path) -> str:
    """The eos_token of the tokenizer_config.json beside a tokenizer.json, or ''."""
    import json

    beside = file.with_name("tokenizer_config.json")
    if not beside.is_file():
        return ""
    try:
        token = json.loads(beside.read_text(encoding="utf-8")).get("eos_token") or ""
    except (ValueError, AttributeError) as fault:
        raise UserError(f"{beside}: no JSON object ({fault}); it should name eos_token, or be removed") from None
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)
