"""Opening a Hugging Face tokenizer.json so that text can't forge its control tokens. Needs the `tokenizers` package (extra hf)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from megadcp.config.check import UserError
from megadcp.data.control_tokens import CONTROL_NAME, EOD_NAMES


@dataclass(frozen=True)
class LoadedJson:
    """A tokenizers.Tokenizer and what tokenizer.py needs beside it."""

    model: Any
    vocab_size: int
    eod: int
    spellings: dict[int, np.ndarray]  # control id -> ids that spell its characters


def load_json(definition: bytes, eod: str, where: str) -> LoadedJson:
    """Read the JSON; UserError when the package is missing, the file is of another kind, or no end-of-document token is found."""
    try:
        import tokenizers
    except ImportError:
        raise UserError('data.tokenizer.kind=huggingface needs the package tokenizers: pip install "megadcp[hf]"') from None
    described, content = _read(definition, where)
    model = described["model"]
    if model.get("dropout"):
        model["dropout"] = None  # a regulariser for training; it would make the data random
    ids = _ids(described)
    names = (eod,) if eod else EOD_NAMES
    end = next((name for name in names if name in ids), None)
    if end is None:
        asked = f"the token {eod!r}" if eod else f"an end-of-document token (none of {', '.join(EOD_NAMES)})"
        raise UserError(f"{where}: the tokenizer does not have {asked}; name it as eos_token in a tokenizer_config.json beside the file")
    for token in described.get("added_tokens") or []:
        if token["content"] == end or CONTROL_NAME.fullmatch(token["content"]):
            token["special"] = True  # an added token that is not special matches in text
    described["truncation"] = described["padding"] = None
    try:
        loaded = tokenizers.Tokenizer.from_str(json.dumps(described, ensure_ascii=False))
    except Exception as fault:  # tokenizers raises bare Exception
        raise UserError(f"{where}: tokenizers can't read it ({fault}); {content}") from None
    loaded.encode_special_tokens = True  # special tokens that stand in the text are text
    special = {token["content"] for token in described.get("added_tokens") or [] if token["special"]}
    unknown = _unknown(model)
    reserved = {name for name in ids if (name in special or name == end or CONTROL_NAME.fullmatch(name)) and name != unknown and len(name) > 1}
    spellings = {ids[name]: np.array([i for letter in name for i in _letter(loaded, letter)], dtype=np.int32) for name in sorted(reserved)}
    return LoadedJson(loaded, max(ids.values()) + 1, ids[end], spellings)


def _read(definition: bytes, where: str) -> tuple[dict[str, Any], str]:
    hint = "a sentencepiece .model file needs data.tokenizer.kind=sentencepiece"
    try:
        described = json.loads(definition)
    except ValueError:
        raise UserError(f"{where}: no JSON text; {hint}") from None
    if not isinstance(described, dict) or not isinstance(described.get("model"), dict):
        raise UserError(f'{where}: JSON without a "model", so no tokenizer.json; give the file that the tokenizers package saves')
    return described, hint


def _ids(described: dict[str, Any]) -> dict[str, int]:
    """Every token's id, as the file says it (unigram files hold a list of pairs)."""
    vocab = described["model"].get("vocab") or {}
    ids = {pair[0]: index for index, pair in enumerate(vocab)} if isinstance(vocab, list) else dict(vocab)
    ids.update({token["content"]: token["id"] for token in described.get("added_tokens") or []})
    return ids


def _unknown(model: dict[str, Any]) -> str | None:
    """The token of unknown characters, which text may give."""
    index, vocab = model.get("unk_id"), model.get("vocab")
    return vocab[index][0] if isinstance(vocab, list) and index is not None else model.get("unk_token")


def _letter(loaded: Any, letter: str) -> list[int]:
    """Ids of one character: by the model alone, and where that knows nothing, with the pre-tokenizer's view of it (byte-level models)."""
    views = [letter]
    if loaded.pre_tokenizer is not None:
        views.append("".join(part for part, _ in loaded.pre_tokenizer.pre_tokenize_str(letter)))
    for view in views:
        try:
            found = [token.id for token in loaded.model.tokenize(view)]
        except Exception:  # a model without an unknown token raises for a character it does not know
            continue
        if found:
            return found
    return []
