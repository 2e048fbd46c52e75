"""The tokenizer files of a Hugging Face folder.

A tokenizer.json is copied; for a sentencepiece model and for bytes one is made that gives the same ids, and it is written only if it does on
every text tried here: PROBES, each piece by itself, and pieces one after the other. Where it does not, or the package tokenizers is not there,
sentencepiece's own file alone goes along. Two things no tokenizer.json can say: a text that spells a control token (here it stays text), and a
real U+2581 (here it is kept apart from a space).
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megadcp.config.check import UserError
from megadcp.data.tokenizer import SPACE_MARK, SentencePieceTokenizer, Tokenizer
from megadcp.interop.json_files import read_json, write_json

JSON, CONFIG, MODEL = "tokenizer.json", "tokenizer_config.json", "tokenizer.model"
BESIDE = ("special_tokens_map.json",)
PROBES = (
    "A plan is a value.", "  two  spaces and a tab\t.\n\n", "def f(x):\n    return x + 1\n", "Grüße, 東京, Ελλάδα \U0001f9ea", "1234567890 3.14e-05",
    "", " ", "\n", "a", "ABC\r\ndef \x00\x7f\u3000end ", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "e\u0301 \ufb01 \uff21 \u00ad",
)  # fmt: skip
JOINED_TEXTS, JOINED_PIECES = 20, 200
END = "<|endoftext|>"


def write_tokenizer(folder: Path, kind: str, path: str, tokenizer: Tokenizer, context: int) -> list[str]:
    """Write the files; returns lines that say which, and what is missing. context: model_max_length."""
    if kind == "huggingface":
        return _copy(folder, Path(path), tokenizer, context)
    copied = []
    if kind == "sentencepiece":
        shutil.copyfile(path, folder / MODEL)
        copied = [MODEL]
    try:
        made, why = (_from_bytes(), "") if kind == "bytes" else _from_sentencepiece(tokenizer)
    except ImportError:
        made, why = None, 'the package tokenizers is not installed: pip install "megadcp[hf]"'
    if made is not None and (different := _different(made, tokenizer)):
        made, why = None, f"it would give other ids, for example for {different!r}"
    if made is None:
        return [f"tokenizer: {' and '.join(copied) or 'none'}; no {JSON} ({why})"]
    made.save(str(folder / JSON))
    unknown = {"unk_token": "<unk>"} if made.token_to_id("<unk>") is not None else {}
    write_json(folder / CONFIG, _config(made.id_to_token(tokenizer.eod), context) | unknown)
    return [f"tokenizer: {', '.join([*copied, JSON])}, which gives the same ids"]


def _config(end: str | None, context: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "bos_token": None, "pad_token": end, "add_bos_token": False,
        "add_eos_token": False, "clean_up_tokenization_spaces": False, "model_max_length": context,
    }  # fmt: skip


def _copy(folder: Path, path: Path, tokenizer: Tokenizer, context: int) -> list[str]:
    """tokenizer.json and what lies beside it."""
    source = path / JSON if path.is_dir() else path
    shutil.copyfile(source, folder / JSON)
    copied = [JSON]
    if source.with_name(CONFIG).is_file():
        settings = read_json(source.with_name(CONFIG))
        code = settings.pop("auto_map", None)  # names code that would not lie beside it
        write_json(folder / CONFIG, settings)
        copied.append(CONFIG + (" (without auto_map)" if code is not None else ""))
    else:
        write_json(folder / CONFIG, _config(_name_of(source, tokenizer.eod), context))
    for name in BESIDE:
        if source.with_name(name).is_file():
            shutil.copyfile(source.with_name(name), folder / name)
            copied.append(name)
    return [f"tokenizer: {', '.join(copied)}, copied"]


def _name_of(file: Path, token: int) -> str | None:
    """The text of one token of a tokenizer.json."""
    described = json.loads(file.read_text(encoding="utf-8"))
    vocab = described["model"].get("vocab") or {}
    pairs = [(pair[0], index) for index, pair in enumerate(vocab)] if isinstance(vocab, list) else list(vocab.items())
    pairs += [(added["content"], added["id"]) for added in described.get("added_tokens") or []]
    return next((str(name) for name, index in pairs if index == token), None)


# ----------------------------------------------------------------------------------------------------------- made from ours
def _from_bytes() -> Any:
    """One token for each byte, under the characters that byte-level tokenizers spell bytes with, and the end of document."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    made = Tokenizer(models.BPE({character: byte for byte, character in enumerate(_byte_characters())}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return made


def _byte_characters() -> list[str]:
    """GPT-2's spelling of bytes: printable Latin-1 characters stand for themselves, the others for U+0100 onwards."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def _from_sentencepiece(tokenizer: Tokenizer) -> tuple[Any, str]:
    """A tokenizer.json's model out of a lossless sentencepiece model (no normaliser, no added space, a piece for every byte); or why not."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    assert isinstance(tokenizer, SentencePieceTokenizer)
    if not tokenizer.lossless:
        return None, "the sentencepiece model changes text before it cuts it, or lacks bytes"
    source = tokenizer._model
    pieces = source.id_to_piece(list(range(tokenizer.vocab_size)))
    scores = [float(source.get_score(index)) for index in range(tokenizer.vocab_size)]
    special = [index for index in range(tokenizer.vocab_size) if source.is_control(index) or source.is_unknown(index)]
    if len(set(pieces)) != len(pieces):
        return None, "two pieces have one name"
    if all(score.is_integer() for score in scores):  # BPE: scores are ranks
        plain = [index for index in range(tokenizer.vocab_size) if index not in set(special) and not source.is_byte(index)]
        merges = _merges({pieces[index]: scores[index] for index in plain})
        model: Any = models.BPE({piece: index for index, piece in enumerate(pieces)}, merges, unk_token=pieces[source.unk_id()], fuse_unk=True)
        model.byte_fallback = True
    else:
        model = models.Unigram(list(zip(pieces, scores, strict=True)), source.unk_id(), byte_fallback=True)
    made = Tokenizer(model)
    made.normalizer = normalizers.Replace(" ", SPACE_MARK)
    made.decoder = decoders.Sequence([decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([AddedToken(pieces[index], special=True, normalized=False) for index in special])
    return made, ""


def _merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, the best piece first: sentencepiece joins the neighbours whose piece has the highest score."""
    found = []
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in scores and right in scores:
                found.append((-score, -scores[left], -scores[right], left, right))
    return [(left, right) for _, _, _, left, right in sorted(found)]


def _different(made: Any, tokenizer: Tokenizer) -> str | None:
    """A text of which the ids are not the same; None when there is none among those tried."""
    if tokenizer.vocab_size != made.get_vocab_size(with_added_tokens=True):
        raise UserError(f"the tokenizer has {tokenizer.vocab_size} tokens, its copy {made.get_vocab_size(with_added_tokens=True)}")
    pieces = [text for text in (tokenizer.decode([index]) for index in range(tokenizer.vocab_size)) if text and "\ufffd" not in text]
    draw = random.Random(0)
    joined = ["".join(draw.choices(pieces, k=JOINED_PIECES)) for _ in range(JOINED_TEXTS)]
    encode: Callable[[str], list[int]] = lambda text: made.encode(text, add_special_tokens=False).ids  # noqa: E731
    return next((text for text in (*PROBES, *pieces, *joined) if encode(text) != tokenizer.encode(text)), None)
