"""Training a tokenizer: lossless, the same every time, never over an existing file."""

from __future__ import annotations

import dataclasses
import gzip
import json
import random
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megadcp.config.check import UserError
from megadcp.data.tokenizer import SentencePieceTokenizer, open_tokenizer
from megadcp.data.train_tokenizer import LONGEST_LINE, Reservoir, TrainSettings, VocabularyError, lines_of, refuse_existing, save, train

ROOT = Path(__file__).resolve().parents[2]
WORDS = ["import", "return", "    ", "token", "documents", "=", "(x)", "\t", "längere", "self.", "\r"]


def corpus(documents: int = 60, seed: int = 0) -> list[str]:
    """Documents of very different lengths, with what usual tokenizer settings lose."""
    draw = random.Random(seed)
    lengths = [int(2 ** draw.uniform(0, 9)) for _ in range(documents)]
    return ["".join(draw.choice(WORDS) + draw.choice([" ", "\n", "  \n", ""]) for _ in range(length)) for length in lengths]


SMALL = TrainSettings(vocab=330, lines=1500)


@pytest.mark.parametrize("model", ["bpe", "unigram"])
def test_a_trained_model_gives_every_document_back_and_is_the_same_again(model: str) -> None:
    asked = dataclasses.replace(SMALL, model=model, vocab=300)
    trained = train(corpus(), asked)
    assert trained.checked == trained.exact == 60
    assert trained.vocab == 300
    assert trained.lines_used == min(1500, trained.lines_seen)
    assert train(iter(corpus()), asked).definition == trained.definition
    tokenizer = SentencePieceTokenizer(trained.definition)
    assert tokenizer.lossless
    for text in [*corpus(5, seed=9), "unseen: \x00 ✓ ▁ \U0010ffff \u2028", " " * 1000, "\n\n"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_indentation_is_one_token() -> None:
    text = "def f():\n        return 1\n" * 200
    tokenizer = SentencePieceTokenizer(train([text], TrainSettings(vocab=290)).definition)
    assert len(tokenizer.encode("        ")) == 1


def test_another_seed_takes_other_lines() -> None:
    asked = dataclasses.replace(SMALL, lines=200)
    assert train(corpus(), asked).definition != train(corpus(), dataclasses.replace(asked, seed=5)).definition


def test_normalisation_is_said_to_lose_text() -> None:
    documents = ["\ufb01ne A\u030a \uff21 " * 20, "plain text " * 40] * 10
    trained = train(documents, TrainSettings(vocab=290, normalisation="nfkc"))
    assert 0 < trained.exact < trained.checked == 20


@given(st.text(max_size=50) | st.just("x" * 2500) | st.lists(st.sampled_from(["\n", "\r", "\u2028", "a"])).map("".join))
@example("\n")
@settings(deadline=None)
def test_lines_are_all_of_the_text_but_its_line_feeds(text: str) -> None:
    lines = list(lines_of(text))
    assert "".join(lines) == text.replace("\n", "")
    assert all(0 < len(line) <= LONGEST_LINE and "\n" not in line for line in lines)


def test_the_reservoir_is_uniform_and_keeps_the_order() -> None:
    hits: Counter[str] = Counter()
    for seed in range(2000):
        sample = Reservoir(5, seed)
        for number in range(20):
            sample.add(f"{number:02d}")
        kept = sample.texts()
        assert kept == sorted(kept)
        assert len(set(kept)) == 5
        hits.update(kept)
    assert len(hits) == 20
    assert all(abs(count - 500) < 100 for count in hits.values())  # 5 standard deviations


def test_a_vocabulary_that_does_not_suit_the_text_is_explained() -> None:
    with pytest.raises(VocabularyError, match=r"vocab=90000 is more than this text can fill; legal here: up to (\d+)") as caught:
        train(corpus(), TrainSettings(vocab=90_000))
    assert caught.value.largest is not None
    assert train(corpus(), TrainSettings(vocab=caught.value.largest)).vocab == caught.value.largest
    with pytest.raises(VocabularyError, match="vocab=100 can't hold"):
        train(corpus(), TrainSettings(vocab=100))


@pytest.mark.parametrize(
    ("documents", "change", "part"),
    [
        ([], {}, "no text"),
        (["", "\n\n"], {}, "no text"),
        (["a"], {"model": "wordpiece"}, "legal here: bpe, unigram"),
        (["a"], {"normalisation": "nfd"}, "legal here: identity"),
        (["a\ud800b" * 100], {}, "lone surrogate"),
    ],
)
def test_what_can_not_be_trained_is_one_clear_error(documents: list[str], change: dict[str, str], part: str) -> None:
    with pytest.raises(UserError, match=part) as caught:
        train(documents, dataclasses.replace(SMALL, **change))
    assert "\n" not in str(caught.value)


def test_saving_is_whole_and_does_not_replace(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "t.model"
    save(b"one", path)
    with pytest.raises(UserError, match="--overwrite"):
        save(b"two", path)
    assert path.read_bytes() == b"one"
    save(b"two", path, overwrite=True)
    assert path.read_bytes() == b"two"
    assert [each.name for each in path.parent.iterdir()] == ["t.model"]
    with pytest.raises(UserError, match="is a folder"):
        refuse_existing(tmp_path, True)


# -------------------------------------------------------------------------------------------------------------- the tool
@pytest.fixture
def tool() -> Callable[[list[str]], int]:
    return runpy.run_path(str(ROOT / "tools/train_tokenizer.py"))["main"]


def test_the_tool_reads_all_kinds_of_text(tmp_path: Path, tool: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps({"text": text, "body": "other"}) for text in corpus()]
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:20]))
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write("\n".join(lines[20:]))
    (tmp_path / "c.txt").write_text("a plain text\nof two lines\n" * 30)
    output = tmp_path / "t.model"
    arguments = [str(tmp_path), "--output", str(output), "--vocab", "300", "--lines", "1000"]
    assert tool(arguments) == 0
    said = capsys.readouterr().out
    assert "input: 3 files" in said
    assert "round trip: 61 of 61 sampled documents come back exactly" in said
    first = output.read_bytes()
    assert open_tokenizer("sentencepiece", str(output)).vocab_size == 300
    assert tool(arguments) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert tool([*arguments, "--overwrite"]) == 0
    assert output.read_bytes() == first


def test_the_tool_names_the_bad_line_and_writes_nothing(tmp_path: Path, tool: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n\n{"txt": "no"}\n')
    for arguments, part in (
        ([str(tmp_path / "a.jsonl")], "a.jsonl:3: no key 'text'"),
        ([str(tmp_path / "none.jsonl")], "none.jsonl"),
        ([str(tmp_path / "a.jsonl"), "--vocab", "0"], "--vocab 0"),
    ):
        assert tool([*arguments, "--output", str(tmp_path / "t.model")]) == 2
        error = capsys.readouterr().err
        assert part in error
        assert error.count("\n") == 1
    assert not (tmp_path / "t.model").exists()


def test_the_tool_as_a_person_calls_it(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools/train_tokenizer.py"), str(tmp_path / "none"), "--output", str(tmp_path / "t.model")]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 2
    assert result.stderr.startswith("train_tokenizer: input")
    assert result.stderr.count("\n") == 1
