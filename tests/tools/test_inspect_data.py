"""tools/inspect_data.py: what it says about a dataset is what is in it."""

from __future__ import annotations

import runpy
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megadcp.data.indexed import IndexedWriter
from megadcp.data.preprocess import Preprocess, preprocess
from megadcp.data.tokenizer import BytesTokenizer
from megadcp.data.train_tokenizer import TrainSettings, save, train

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ["first\n", "", "  the second document, with </s> in it\t\n", "x" * 700]


@pytest.fixture
def tool() -> Callable[[list[str]], int]:
    return runpy.run_path(str(ROOT / "tools/inspect_data.py"))["main"]


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """Bytes; the third document has no end token, the last one consists of two sequences."""
    tokenizer = BytesTokenizer()
    with IndexedWriter(tmp_path / "data", np.uint16) as writer:
        writer.add([*tokenizer.encode(TEXTS[0]), tokenizer.eod])
        writer.add([])
        writer.add(tokenizer.encode(TEXTS[2]))
        writer.add_document([*tokenizer.encode(TEXTS[3]), tokenizer.eod], [300, 401])
    return str(tmp_path / "data")


def test_statistics_and_pictures(prefix: str, tool: Callable[[list[str]], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool([prefix + ".idx", "--svg", str(tmp_path / "lengths.svg")]) == 0
    said = capsys.readouterr().out
    lengths = [7, 0, 40, 701]
    assert "uint16" in said
    assert "documents  4 (1 empty)" in said
    assert f"tokens     {sum(lengths)}" in said
    assert "length     p50 7  p90 701  p99 701  max 701" in said
    assert "512-1,023" in said
    ElementTree.parse(tmp_path / "lengths.svg")


@pytest.mark.parametrize(("document", "end"), [(0, "ends with the end-of-document token"), (2, "no end-of-document token"), (3, "ends with")])
def test_documents_come_back_as_text(
    prefix: str, tool: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str], document: int, end: str
) -> None:
    assert tool([prefix, "--document", str(document), "--kind", "bytes"]) == 0
    head, body = capsys.readouterr().out.split("\n", 1)
    assert end in head
    assert body == TEXTS[document] + "\n"


def test_a_document_as_ids_and_in_part(prefix: str, tool: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]) -> None:
    assert tool([prefix, "--document", "0", "--ids", "--tokens", "3"]) == 0
    assert capsys.readouterr().out == "document 0: 7 tokens, the first 3 of them below\n102 105 114\n"


def test_end_tokens_inside_a_document_are_reported(tmp_path: Path, tool: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]) -> None:
    with IndexedWriter(tmp_path / "data", np.uint16) as writer:
        writer.add([97, 256, 98, 256, 256])
    assert tool([str(tmp_path / "data"), "--document", "0", "--kind", "bytes"]) == 0
    assert "5 tokens, ends with the end-of-document token, 2 more inside" in capsys.readouterr().out


def test_the_manifest_says_which_tokenizer_it_was(tmp_path: Path, tool: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("some text " * 50)
    save(train(["some text " * 50], TrainSettings(vocab=275)).definition, tmp_path / "t.model")
    job = Preprocess((str(tmp_path / "a.txt"),), str(tmp_path / "data"), tokenizer_path=str(tmp_path / "t.model"), append_eod=True)
    preprocess(job, [].append)
    assert tool([str(tmp_path / "data")]) == 0
    assert "made by    t.model (sentencepiece, 275 ids), an end-of-document token after each" in capsys.readouterr().out
    assert tool([str(tmp_path / "data"), "--document", "0"]) == 0
    assert capsys.readouterr().out.endswith("token\n" + "some text " * 50 + "\n")
    save(train(["other words " * 50], TrainSettings(vocab=275)).definition, tmp_path / "t.model", overwrite=True)
    assert tool([str(tmp_path / "data"), "--document", "0"]) == 2
    assert "--tokenizer" in capsys.readouterr().err


def test_the_reader_may_stop_early(prefix: str) -> None:
    command = f"{sys.executable} {ROOT / 'tools/inspect_data.py'} {prefix} | true"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, check=False, timeout=60)
    assert result.stderr == ""


def test_a_request_that_can_not_be_met_is_one_line(
    prefix: str, tool: Callable[[list[str]], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(train(["some text " * 50], TrainSettings(vocab=275)).definition, tmp_path / "small.model")
    with IndexedWriter(tmp_path / "other", np.uint16) as writer:
        writer.add([5, 999])
    for arguments, part in (
        ([str(tmp_path / "none")], "none"),
        ([prefix, "--document", "4"], "legal here: 0 to 3"),
        ([prefix, "--document", "-1", "--ids"], "legal here: 0 to 3"),
        ([prefix, "--document", "0"], "--tokenizer"),
        ([prefix, "--document", "0", "--tokenizer", str(tmp_path / "none.model")], "does not exist"),
        ([str(tmp_path / "other"), "--document", "0", "--tokenizer", str(tmp_path / "small.model")], "it did not make this data"),
    ):
        assert tool(arguments) == 2, arguments
        error = capsys.readouterr().err
        assert part in error
        assert error.count("\n") == 1


def test_the_tool_as_a_person_calls_it(prefix: str) -> None:
    command = [sys.executable, str(ROOT / "tools/inspect_data.py"), prefix]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "4 documents, 748 tokens" in result.stdout
