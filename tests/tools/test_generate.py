import dataclasses
import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "train"))
from train_helpers import config, write_corpus  # noqa: E402

from megadcp.config.run_file import dump_run  # noqa: E402
from megadcp.config.schema import TokenizerConfig  # noqa: E402
from megadcp.train.loop import train  # noqa: E402

spec = importlib.util.spec_from_file_location("tool_generate", ROOT / "tools" / "generate.py")
generate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generate)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    setup = config(write_corpus(folder), run={"steps": 30}, checkpoint={"every": 15}, model={"residual_dropout": 0.2})
    (folder / "run").mkdir()
    dump_run(setup, folder / "run" / "run.yaml")
    assert train(setup, folder / "run") == 0
    return folder / "run"


def call(capsys, *argv: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = generate.main(list(argv))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_greedy_text_is_what_the_run_itself_printed(run, capsys):
    code, out, err = call(capsys, str(run), "--prompt", "def ", "--tokens", "8", "--greedy")
    assert code == 0
    assert (run / "sample.txt").read_text().startswith(f"--- greedy ---\n{out}")
    assert "step-00000030: 8 tokens in" in err
    assert "tokens/s" in err


def test_seeds_and_steps(run, capsys):
    def text(*more):
        return call(capsys, str(run), "--prompt", "the", "--tokens", "40", *more)[1]

    assert text("--seed", "1") == text("--seed", "1")
    assert text("--seed", "1") != text("--seed", "2")
    assert text("--temperature", "0") == text("--greedy") == text("--top-k", "1")
    assert text("--step", "15") != text()
    assert text().startswith("the")


def test_it_stops_where_the_document_ends(run, capsys, monkeypatch):
    monkeypatch.setattr(generate, "generate", lambda *arguments: iter([*b"plan", 256]))
    code, out, err = call(capsys, str(run), "--prompt", "a ")
    assert (code, out) == (0, "a plan\n")
    assert "5 tokens" in err
    assert "the document ends here" in err


def test_characters_are_printed_whole(run, capsys, monkeypatch):
    written = []
    monkeypatch.setattr("builtins.print", lambda *values, **named: written.append((values, named.get("file"))))
    monkeypatch.setattr(generate, "generate", lambda *arguments: iter([*"é€😀".encode(), 0xC3]))
    assert generate.main([str(run), "--prompt", "x"]) == 0
    assert [values[0] for values, file in written if file is None] == ["x", "", "é", "", "", "€", "", "", "", "😀", "", "\ufffd"]


@pytest.mark.parametrize("argv", [["--tokens", "0"], ["--temperature", "-1"], ["--top-p", "2"], ["--top-k", "-3"], ["--step", "7"]])
def test_wrong_requests(run, capsys, argv):
    code, out, err = call(capsys, str(run), "--prompt", "x", *argv)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_no_such_checkpoint_names_the_others(run, capsys):
    assert "there are: 15, 30" in call(capsys, str(run), "--prompt", "x", "--step", "7")[2]


def test_no_run_and_no_checkpoint(run, capsys, tmp_path):
    assert "is not a folder" in call(capsys, str(tmp_path / "none"), "--prompt", "x")[2]
    assert "does not exist" in call(capsys, str(tmp_path), "--prompt", "x")[2]
    shutil.copy(run / "run.yaml", tmp_path)
    assert "has no checkpoint yet" in call(capsys, str(tmp_path), "--prompt", "x")[2]
    assert call(capsys, str(tmp_path), "--prompt", "x")[0] == 2


def test_empty_prompt(run, capsys):
    assert "the prompt is empty" in call(capsys, str(run), "--prompt", "")[2]


def test_a_prompt_longer_than_the_learned_positions(tmp_path, capsys):
    setup = config(write_corpus(tmp_path), run={"steps": 1}, model={"position": "learned", "max_position": 128})
    dump_run(setup, tmp_path / "run" / "run.yaml")
    assert train(setup, tmp_path / "run") == 0
    code, _, err = call(capsys, str(tmp_path / "run"), "--prompt", "x" * 200)
    assert code == 2
    assert "shorten the prompt to at most 128 tokens" in err


def test_a_damaged_checkpoint_is_told_and_the_one_before_used(run, capsys, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    largest = max((tmp_path / "run" / "checkpoints" / "step-00000030").iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(largest, 100)
    code, _, err = call(capsys, str(tmp_path / "run"), "--prompt", "x", "--tokens", "2")
    assert code == 0
    assert "WARNING" in err
    assert "step-00000015: 2 tokens" in err


def test_another_tokenizer_and_another_model(run, capsys, tmp_path):
    from megadcp.config.run_file import load_run

    shutil.copytree(run, tmp_path / "run")
    setup = load_run(run)
    dump_run(dataclasses.replace(setup, model=dataclasses.replace(setup.model, ffn=48)), tmp_path / "run" / "run.yaml")
    assert "layers.0.mlp.down.weight" in call(capsys, str(tmp_path / "run"), "--prompt", "x")[2]
    no_tokenizer = dataclasses.replace(setup.data, tokenizer=TokenizerConfig("sentencepiece", ""))
    dump_run(dataclasses.replace(setup, data=no_tokenizer), tmp_path / "run" / "run.yaml")
    assert "names no tokenizer" in call(capsys, str(tmp_path / "run"), "--prompt", "x")[2]
