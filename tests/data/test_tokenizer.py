"""Tokenizers: what goes in comes out, and no text can write a control token."""

from __future__ import annotations

import inspect
import io
import json
import json.decoder
import pickle
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megadcp.config.check import UserError
from megadcp.data.control_tokens import CONTROL_NAME, respell
from megadcp.data.tokenizer import BytesTokenizer, SentencePieceTokenizer, Tokenizer, open_tokenizer
from megadcp.data.train_tokenizer import TrainSettings, train

TEXTS = [inspect.getsource(module) for module in (json.decoder, textwrap, inspect)]
LINES = [line for text in TEXTS for line in text.split("\n") if line][:2000]
SPELLED = "x</s>y <s><pad> <unk> <|endoftext|> [EOS] </s></s>"


def sentencepiece_model(**options: Any) -> bytes:
    """A model with the given trainer options on top of small lossless ones."""
    written = io.BytesIO()
    lossless: dict[str, Any] = {
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "byte_fallback": True,
        "user_defined_symbols": ["\n"],
        "vocab_size": 420,
        "model_type": "bpe",
        "num_threads": 1,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(LINES), model_writer=written, **{**lossless, **options})
    return written.getvalue()


@pytest.fixture(scope="module")
def lossless() -> SentencePieceTokenizer:
    return SentencePieceTokenizer(train(TEXTS, TrainSettings(vocab=600, lines=2000)).definition)


@pytest.fixture(scope="module")
def unigram() -> SentencePieceTokenizer:
    return SentencePieceTokenizer(train(TEXTS, TrainSettings(vocab=500, lines=600, model="unigram")).definition)


# Property tests can't take fixtures of narrower scope; one model for all of them.
BPE = SentencePieceTokenizer(sentencepiece_model(allow_whitespace_only_pieces=True))
FORGEABLE = SentencePieceTokenizer(sentencepiece_model(user_defined_symbols=["\n", "</s>", "<s>", "<pad>", "<|endoftext|>"], vocab_size=440))
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]))  # all of Unicode but lone surrogates, which no UTF-8 file can hold
PIECEWISE = st.lists(
    st.sampled_from(["\r\n", "\t", "  ", "\n", "\x00", "▁", "</s>", "<|endoftext|>", "<0x0A>", "def ", "e\u0301", "🧪", "\u2028", "\x85"])
).map("".join)


@given(ANY_TEXT | PIECEWISE)
@example(" leading and trailing \n")
@example("nul \x00 inside\x00")
@example("▁ real lower blocks ▁▁ and spaces")
@example("\ufeffmark, \ufb01, A\u030a, \u00c5, \uff21, \u3000, \U0010ffff, \r, \r\n, \x1b")
@example("⁇")
@settings(max_examples=300, deadline=None)
@pytest.mark.parametrize("tokenizer", [BPE, FORGEABLE, BytesTokenizer()], ids=["bpe", "user-defined", "bytes"])
def test_every_text_comes_back_exactly(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eod not in ids
    assert all(0 <= each < tokenizer.vocab_size for each in ids)


@given(st.lists(PIECEWISE, max_size=6))
@settings(max_examples=100, deadline=None)
@pytest.mark.parametrize("tokenizer", [BPE, FORGEABLE, BytesTokenizer()], ids=["bpe", "user-defined", "bytes"])
def test_the_ways_to_encode_agree(tokenizer: Any, texts: list[str]) -> None:
    one_by_one = [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_batch(texts) == one_by_one
    ids, lengths = tokenizer.encode_flat(texts)
    assert (ids.dtype, lengths.dtype) == (np.int32, np.int64)
    assert ids.tolist() == [each for text in one_by_one for each in text]
    assert lengths.tolist() == [len(text) for text in one_by_one]


def test_the_fast_way_gives_what_sentencepiece_gives(lossless: SentencePieceTokenizer, unigram: SentencePieceTokenizer) -> None:
    for tokenizer in (lossless, unigram):
        assert tokenizer.lossless
        for text in TEXTS:
            assert tokenizer.encode(text) == tokenizer._model.encode(text)
            assert tokenizer.decode(tokenizer.encode(text)) == text
    slow = SentencePieceTokenizer(lossless._model.serialized_model_proto())
    slow._fast = None  # as with sentencepiece before 0.2.3
    assert slow.encode_batch(TEXTS) == lossless.encode_batch(TEXTS)


@given(st.lists(st.sampled_from([*LINES[:60], "", "x" * 50, " " * 9, "</s>", "\r", "🧪"]), max_size=40), st.sampled_from(["\n", "\n\n", " \n "]))
@settings(max_examples=100, deadline=None)
@pytest.mark.parametrize("tokenizer", [BPE, FORGEABLE], ids=["bpe", "user-defined"])
def test_encoding_in_parts_changes_nothing(tokenizer: SentencePieceTokenizer, lines: list[str], end: str) -> None:
    assert tokenizer._by_lines
    text = end.join(lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megadcp.data.tokenizer.PART", 40)
        parts = tokenizer._plain(text)
    assert parts.tolist() == tokenizer._model.encode(text)


def test_long_documents_are_encoded_in_parts_with_the_same_ids(lossless: SentencePieceTokenizer) -> None:
    text = "\n".join(TEXTS) + "\n" + "one long line " * 1000 + "\n"
    assert lossless._by_lines
    assert len(text) > 100_000
    assert lossless.encode(text) == lossless._model.encode(text)


@pytest.mark.parametrize(
    "form",
    [
        {"model_type": "unigram"},
        {"add_dummy_prefix": True},
        {"user_defined_symbols": ["\n", "\n\n"]},
        {"normalization_rule_name": "nmt_nfkc"},
        {"byte_fallback": False, "vocab_size": 300},
    ],
    ids=str,
)
def test_other_models_encode_as_sentencepiece_does(form: dict[str, Any]) -> None:
    tokenizer = SentencePieceTokenizer(sentencepiece_model(**form))
    assert not tokenizer._by_lines
    for text in ["a\n\nb  c\n" * 2000, "plain", ""] + (["▁ a▁"] if not tokenizer.lossless else []):
        assert tokenizer.encode(text) == tokenizer._model.encode(text)


# ------------------------------------------------------------------------------------------------------- forged tokens
CONTROL_FORMS = {
    "defaults": {},
    "control symbols": {"control_symbols": ["<|endoftext|>", "[EOS]"], "pad_id": 3},
    "user-defined eos": {"user_defined_symbols": ["\n", "</s>", "<s>"]},
    "user-defined all": {"user_defined_symbols": ["\n", "</s>", "<s>", "<pad>", "<|endoftext|>", "[EOS]"], "vocab_size": 440},
    "no eos id, named by a user-defined piece": {"eos_id": -1, "user_defined_symbols": ["\n", "<|endoftext|>"]},
    "eos with another name": {"eos_piece": "<|endoftext|>"},
    "with a space put in front": {"add_dummy_prefix": True, "user_defined_symbols": ["\n", "</s>"]},
    "no byte pieces": {"byte_fallback": False, "user_defined_symbols": ["</s>", "<s>"], "vocab_size": 300},
    "unigram": {"model_type": "unigram", "user_defined_symbols": ["\n", "</s>", "<pad>"]},
}


@pytest.mark.parametrize("form", CONTROL_FORMS)
def test_text_never_gives_a_control_id(form: str) -> None:
    tokenizer = SentencePieceTokenizer(sentencepiece_model(**CONTROL_FORMS[form]))
    ids, lengths = tokenizer.encode_flat(["", SPELLED, "plain", SPELLED])
    names = tokenizer._model.id_to_piece(ids.tolist())
    assert tokenizer.eod not in ids
    assert [name for name in names if CONTROL_NAME.fullmatch(name) and name != "<unk>"] == []
    assert lengths.sum() == len(ids)
    assert lengths[0] == 0
    assert tokenizer.encode(SPELLED) == ids[int(lengths[:3].sum()) :].tolist()
    if form != "no byte pieces":
        assert tokenizer.decode(tokenizer.encode(SPELLED)).lstrip() == SPELLED


def test_the_end_of_document_count_is_the_document_count() -> None:
    texts = [SPELLED, "a", "", "</s>"]
    for form in ("control symbols", "user-defined all"):
        tokenizer = SentencePieceTokenizer(sentencepiece_model(**CONTROL_FORMS[form]))
        flat = [each for text in texts for each in [*tokenizer.encode(text), tokenizer.eod]]
        assert flat.count(tokenizer.eod) == len(texts)
        assert tokenizer.decode(flat) == "".join(texts)


def test_user_defined_pieces_that_are_text_stay_whole() -> None:
    tokenizer = SentencePieceTokenizer(sentencepiece_model(user_defined_symbols=["\n", "<table>", "    ", "</s>"]))
    assert tokenizer._model.piece_to_id("<table>") in tokenizer.encode("a <table> b")
    assert tokenizer.encode("\n") == [tokenizer._model.piece_to_id("\n")]


def test_respelling_keeps_texts_apart() -> None:
    ids, lengths = np.array([9, 1, 9, 2, 9, 9], np.int32), np.array([0, 1, 0, 3, 2, 0])
    out, grown = respell(ids, lengths, {9: np.array([5, 6, 7], np.int32)})
    assert out.tolist() == [5, 6, 7, 1, 5, 6, 7, 2, 5, 6, 7, 5, 6, 7]
    assert grown.tolist() == [0, 3, 0, 5, 6, 0]
    assert lengths.tolist() == [0, 1, 0, 3, 2, 0]


# -------------------------------------------------------------------------------------------------------- tokenizer.json
def byte_level(special: bool = True, **options: Any) -> Any:
    """A small GPT-2-like tokenizer of the tokenizers package."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra hf")
    made = tokenizers.Tokenizer(tokenizers.models.BPE(**options))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    names = ["<|endoftext|>", "<pad>"]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=names if special else [], show_progress=False)
    made.train_from_iterator(LINES, trainer)
    if not special:
        made.add_tokens(names)
    return made


def unigram_with_pieces() -> Any:
    """A unigram model whose vocabulary has </s> as an ordinary piece: it matches although it is marked as special."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra hf")
    vocab = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((letter, -3.0) for letter in "▁<>/sxyabcdefghijklmnop|[]EOSudknt")]
    made = tokenizers.Tokenizer(tokenizers.models.Unigram(vocab, unk_id=0))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = tokenizers.decoders.Metaspace()
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


def with_bos_truncation_and_padding() -> Any:
    made = byte_level()
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra hf")
    made.post_processor = tokenizers.processors.TemplateProcessing("<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    made.enable_truncation(4)
    made.enable_padding(length=64)
    return made


HUGGING_FACE = {
    "special": byte_level,
    "added but not special": lambda: byte_level(special=False),
    "unigram with </s> as a piece": unigram_with_pieces,
    "adds a token, cuts and pads": with_bos_truncation_and_padding,
    "merges are ignored for whole words": lambda: byte_level(ignore_merges=True),
}


@pytest.mark.parametrize("form", HUGGING_FACE)
def test_text_never_gives_a_control_id_of_a_tokenizer_json(tmp_path: Path, form: str) -> None:
    made = HUGGING_FACE[form]()
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_tokenizer("huggingface", str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode(SPELLED)
    names = [made.id_to_token(each) for each in ids]
    assert tokenizer.eod == made.token_to_id("</s>" if "</s>" in form else "<|endoftext|>")
    assert [name for name in names if CONTROL_NAME.fullmatch(name) and name != "<unk>"] == []
    assert len(ids) > 20  # neither cut nor padded
    lost = "<unk>" if form.startswith("unigram") else ""  # its id means "unknown character": text may give it, and it has no text
    assert tokenizer.decode([*ids, tokenizer.eod]) == SPELLED.replace(lost, "")
    assert tokenizer.encode_batch(["", SPELLED]) == [[], ids]


def test_the_same_text_without_protection_would_forge() -> None:
    """The tests above can fail: the libraries' own encoding gives control ids for the same text."""
    raw = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model(**CONTROL_FORMS["user-defined all"]))
    assert raw.piece_to_id("</s>") in raw.encode(SPELLED)
    for form in ("special", "added but not special", "unigram with </s> as a piece"):
        made = HUGGING_FACE[form]()
        assert made.token_to_id("</s>" if "</s>" in form else "<|endoftext|>") in made.encode(SPELLED, add_special_tokens=False).ids


@given(ANY_TEXT | PIECEWISE)
@settings(max_examples=100, deadline=None)
def test_byte_level_json_gives_every_text_back(text: str) -> None:
    tokenizer = json_tokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eod not in ids


_JSON: list[Tokenizer] = []


def json_tokenizer() -> Tokenizer:
    """Made once; the property test calls it per example."""
    if not _JSON:
        from megadcp.data.tokenizer import HuggingFaceTokenizer

        _JSON.append(HuggingFaceTokenizer(byte_level(special=False).to_str().encode()))
    return _JSON[0]


def test_the_end_token_of_the_config_beside_it_counts(tmp_path: Path) -> None:
    made = byte_level()
    made.add_special_tokens(["<STOP>"])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<STOP>"}}))
    tokenizer = open_tokenizer("huggingface", str(tmp_path))
    assert tokenizer.eod == made.token_to_id("<STOP>")
    assert tokenizer.vocab_size == tokenizer.eod + 1
    assert tokenizer.eod not in tokenizer.encode("a <STOP> b")
    assert open_tokenizer("huggingface", str(tmp_path), eod="<pad>").eod == made.token_to_id("<pad>")


# ------------------------------------------------------------------------------------------------- errors, fingerprints
def test_errors_name_the_file_and_a_way_out(tmp_path: Path) -> None:
    model, described, broken = tmp_path / "t.model", tmp_path / "tokenizer.json", tmp_path / "broken.json"
    model.write_bytes(sentencepiece_model(eos_id=-1, user_defined_symbols=["\n"]))
    pytest.importorskip("tokenizers", reason="needs the extra hf")
    byte_level().save(str(described))
    broken.write_text('{"model": {"type": "nothing"}, "added_tokens": [{"content": "</s>", "id": 0, "special": true}]}')
    cases = [
        (("sentencepiece", ""), "path is empty"),
        (("sentencepiece", str(tmp_path / "none.model")), "does not exist"),
        (("sentencepiece", str(tmp_path)), "is a folder"),
        (("sentencepiece", str(described)), "kind=huggingface"),
        (("sentencepiece", str(model)), "end-of-document token"),
        (("sentencepiece", str(model), "<STOP>"), "'<STOP>'"),
        (("huggingface", str(model)), "kind=sentencepiece"),
        (("huggingface", str(broken)), "can't read it"),
        (("huggingface", str(described), "<STOP>"), "'<STOP>'"),
        (("tiktoken", str(model)), "legal here: sentencepiece, huggingface, bytes"),
    ]
    for arguments, part in cases:
        with pytest.raises(UserError) as caught:
            open_tokenizer(*arguments)
        assert part in str(caught.value), arguments
        assert "\n" not in str(caught.value)
    empty = tmp_path / "empty.model"
    empty.write_bytes(b"")
    with pytest.raises(UserError, match="no sentencepiece model"):
        open_tokenizer("sentencepiece", str(empty))


def test_a_missing_package_is_named_with_its_install_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"pip install .*megadcp\[hf\]"):
        open_tokenizer("huggingface", str(tmp_path / "tokenizer.json"))


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "huggingface"])
def test_a_lone_surrogate_is_a_value_error(kind: str) -> None:
    tokenizer = {"bytes": BytesTokenizer, "sentencepiece": lambda: BPE, "huggingface": json_tokenizer}[kind]()
    with pytest.raises(ValueError, match="surrogates"):
        tokenizer.encode_flat(["fine", "a\ud800b"])


def test_the_fingerprint_follows_the_content(tmp_path: Path) -> None:
    one, other = sentencepiece_model(), sentencepiece_model(vocab_size=421)
    for name, content in (("a", one), ("b", one), ("c", other)):
        (tmp_path / f"{name}.model").write_bytes(content)
    a, b, c = (open_tokenizer("sentencepiece", str(tmp_path / f"{name}.model")).fingerprint for name in "abc")
    assert a == b != c
    assert len({a, c, open_tokenizer("bytes", "").fingerprint}) == 3
    assert len(a) == 64


def test_a_padding_id_is_not_needed_and_the_end_token_stays_a_token() -> None:
    """The end of document is an id like others: nothing here masks or drops it when it is encoded into data."""
    assert BytesTokenizer().eod == 256
    assert BytesTokenizer().decode([104, 256, 105, 256]) == "hi"
    assert BPE.decode([*BPE.encode("hi"), BPE.eod]) == "hi"


def test_tokenizers_travel_to_other_processes() -> None:
    for tokenizer in (BPE, FORGEABLE, BytesTokenizer(), json_tokenizer()):
        again = pickle.loads(pickle.dumps(tokenizer))
        assert again.encode(SPELLED) == tokenizer.encode(SPELLED)
        assert again.fingerprint == tokenizer.fingerprint
