"""The quickstart's data: made once, whole, the same every time, by one process or by two at the same moment."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megadcp.config.check import UserError
from megadcp.config.schema import DataConfig, PrepareConfig
from megadcp.data import prepare as module
from megadcp.data.indexed import IndexedReader
from megadcp.data.prepare import prepare
from megadcp.data.python_library import Collected, collect, library_folders, package_folders, write_corpus
from megadcp.data.tokenizer import open_tokenizer

VOCAB = 500


def small(folder: Path, **changes: Any) -> DataConfig:
    wanted = PrepareConfig(kind="python_library", folder=str(folder), corpus_bytes=300_000, tokenizer_lines=2000)
    return DataConfig(prepare=dataclasses.replace(wanted, **changes))


def texts(folder: Path) -> list[str]:
    return [json.loads(line)["text"] for part in sorted((folder / "corpus").glob("*.jsonl")) for line in part.read_text().splitlines()]


def result(folder: Path) -> dict[str, bytes]:
    names = ["tokenizer.model", "dataset.bin", "dataset.idx", *sorted(f"corpus/{part.name}" for part in (folder / "corpus").iterdir())]
    return {name: (folder / name).read_bytes() for name in names}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A finished folder, and what was said."""
    folder, said = tmp_path_factory.mktemp("data") / "python_library", []
    prepare(small(folder), said.append, VOCAB)
    return folder, said


def test_everything_is_made_and_belongs_together(made: tuple[Path, list[str]]) -> None:
    folder, said = made
    documents = texts(folder)
    tokenizer = open_tokenizer("sentencepiece", str(folder / "tokenizer.model"))
    reader = IndexedReader(folder / "dataset")
    assert tokenizer.vocab_size == VOCAB
    assert reader.documents == len(documents) > 10
    for index, text in enumerate(documents):
        tokens = reader.read(index).tolist()
        assert tokens.count(tokenizer.eod) == 1
        assert tokens[-1] == tokenizer.eod
        assert tokenizer.decode(tokens) == text
    size = sum(len(text.encode()) for text in documents)
    assert 300_000 <= size < 1_500_000
    assert json.loads((folder / "dataset.json").read_text())["origin"]["tokenizer"]["fingerprint"] == tokenizer.fingerprint
    assert all("\n" not in line for line in said)
    assert said[0].startswith(f"corpus: {len(documents)} documents, {size / 1e6:.1f} MB")
    assert said[1].startswith(f"tokenizer: sentencepiece bpe, {VOCAB} entries from 2,000 of ")
    assert any(f"{reader.tokens_total:,} tokens" in line for line in said if line.startswith("dataset: "))
    assert not [path.name for path in folder.iterdir() if path.name.endswith((".tmp", ".parts"))]


def test_a_second_call_changes_nothing(made: tuple[Path, list[str]]) -> None:
    folder, _ = made
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != ".lock"}
    said: list[str] = []
    prepare(small(folder), said.append, VOCAB)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != ".lock"} == before
    assert len(said) == 1
    assert "is there" in said[0]


@pytest.mark.parametrize(
    "missing",
    [["dataset.idx"], ["dataset.bin", "dataset.json"], ["tokenizer.model"], ["corpus", "dataset.json"], ["dataset.json", "tokenizer.model"]],
)
def test_what_is_missing_is_made_again_the_same(made: tuple[Path, list[str]], tmp_path: Path, missing: list[str]) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(made[0], folder)
    for name in missing:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    prepare(small(folder), [].append, VOCAB)
    assert result(folder) == result(made[0])


@pytest.mark.parametrize("stage", ["write_corpus", "train", "save", "preprocess"])
def test_an_interrupted_call_is_finished_by_the_next(
    made: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """Interrupted after the stage's work, before anything could be renamed."""
    folder = tmp_path / "new"
    real = getattr(module, stage)

    def interrupted(*arguments: Any, **named: Any) -> Any:
        if stage in ("write_corpus", "train"):
            real(*arguments, **named)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, stage, interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(small(folder), [].append, VOCAB)
    assert not (folder / "dataset.idx").exists()
    prepare(small(folder), [].append, VOCAB)
    assert result(folder) == result(made[0])


CHILD = """
import sys
from megadcp.config.schema import DataConfig, PrepareConfig
from megadcp.data.prepare import prepare
wanted = PrepareConfig(kind="python_library", folder=sys.argv[1], corpus_bytes=300_000, tokenizer_lines=2000)
prepare(DataConfig(prepare=wanted), print, 500)
"""


def test_racing_processes_share_one_result(made: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    children = [
        subprocess.Popen([sys.executable, "-c", CHILD, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)
    ]
    outputs = [child.communicate(timeout=120) for child in children]
    assert [child.returncode for child in children] == [0, 0, 0], outputs
    said = "".join(out for out, _ in outputs)
    assert (said.count("corpus: "), said.count("tokenizer: "), said.count("is there")) == (1, 1, 2)
    assert result(folder) == result(made[0])


def test_a_killed_process_leaves_no_lock(made: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    script = CHILD.replace(
        "import sys", "import os, sys\nimport megadcp.data.prepare as module\nmodule.train = lambda *_: os.kill(os.getpid(), 9)", 1
    )
    child = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=False, timeout=120)
    assert child.returncode == -9
    prepare(small(folder), [].append, VOCAB)
    assert result(folder) == result(made[0])


def test_without_file_locks_it_still_works(made: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def refuse(file: Any, how: int) -> None:
        if str(tmp_path) in os.readlink(f"/proc/self/fd/{file.fileno()}") and how & fcntl.LOCK_NB and file.name.endswith(".lock"):
            raise OSError(38, "Function not implemented")

    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc to know which file is locked")
    monkeypatch.setattr(fcntl, "flock", refuse)
    said: list[str] = []
    prepare(small(tmp_path / "new"), said.append, VOCAB)
    assert "no file locks" in said[0]
    assert result(tmp_path / "new") == result(made[0])


def test_errors_say_what_to_do(made: tuple[Path, list[str]], tmp_path: Path) -> None:
    folder = made[0]
    foreign, file, damaged = tmp_path / "foreign", tmp_path / "file", tmp_path / "damaged"
    (foreign / "corpus").mkdir(parents=True)
    file.write_text("")
    damaged.mkdir()
    (damaged / "prepared.json").write_text("{")
    for data, vocab, part in (
        (small(folder, corpus_bytes=5), VOCAB, "corpus_bytes=300000, asked for is 5"),
        (small(folder, tokenizer_model="unigram"), VOCAB, "tokenizer_model=bpe, asked for is unigram"),
        (small(folder), VOCAB - 1, "model.vocab=500 or more"),
        (small(foreign), VOCAB, "another origin"),
        (small(file), VOCAB, "is a file"),
        (small(damaged), VOCAB, "is damaged"),
        (small(tmp_path / "tiny"), 100, "model.vocab=100 is too small"),
        (small(tmp_path / "odd", kind="wikipedia"), VOCAB, "legal here: none, python_library"),
    ):
        with pytest.raises(UserError) as caught:
            prepare(data, [].append, vocab)
        assert part in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_larger_vocabulary_reuses_and_a_huge_one_is_filled_as_far_as_it_goes(made: tuple[Path, list[str]], tmp_path: Path) -> None:
    prepare(small(made[0]), [].append, 50_000)
    assert open_tokenizer("sentencepiece", str(made[0] / "tokenizer.model")).vocab_size == VOCAB
    said: list[str] = []
    prepare(small(tmp_path / "huge", corpus_bytes=20_000), said.append, 128_256)
    assert "can fill" in said[1]
    assert 300 < open_tokenizer("sentencepiece", str(tmp_path / "huge/tokenizer.model")).vocab_size < 128_256


def test_nothing_is_made_when_the_data_must_exist(tmp_path: Path) -> None:
    prepare(small(tmp_path / "none", kind="none"), pytest.fail, VOCAB)
    assert not (tmp_path / "none").exists()


# -------------------------------------------------------------------------------------------------------- python_library
def tree(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def test_which_files_are_taken(tmp_path: Path) -> None:
    library = tree(
        tmp_path / "lib",
        {
            "b.py": b"b = 1\r\n",
            "a/z.py": b"z = 1\n",
            "a/__init__.py": b"",
            "a/blank.py": b" \n\n",
            "a/latin.py": "# -*- coding: latin-1 -*-\ns = 'ä'\n".encode("latin-1"),
            "a/same.py": b"z = 1\n",
            "a/test/test_z.py": b"no\n",
            "tests/x.py": b"no\n",
            "idlelib/idle_test/y.py": b"no\n",
            "site-packages/p.py": b"not here\n",
            "c.txt": b"no source\n",
            "c.pyc": b"\x00",
        },
    )
    packages = tree(tmp_path / "site", {"q/q.py": b"q = '\xf0\x9f\xa7\xaa'\n", "q/more.py": b"more = 1\n"})
    (library / "link.py").symlink_to(library / "b.py")
    (library / "loop").symlink_to(library)
    found = collect(10_000, [library], [packages, library])
    assert dict(found.documents) == {
        "library/a/same.py": "z = 1\n",
        "library/b.py": "b = 1\r\n",
        "packages/q/q.py": "q = '🧪'\n",
        "packages/q/more.py": "more = 1\n",
    }
    assert (found.from_library, found.from_packages, found.not_utf8, found.empty) == (2, 2, 1, 2)
    assert found.bytes == sum(len(text.encode()) for _, text in found.documents)
    assert "1 not UTF-8" in found.skipped()


def test_collecting_stops_at_the_size_and_tops_up_in_path_order(tmp_path: Path) -> None:
    library = tree(tmp_path / "lib", {f"{name}.py": b"#" + name.encode() * 99 for name in "abcd"})
    packages = tree(tmp_path / "site", {f"p/{name}.py": b"#p" + name.encode() * 98 for name in "abcd"})
    names = lambda size: sorted(name for name, _ in collect(size, [library], [packages]).documents)  # noqa: E731
    assert names(150) == ["library/a.py", "library/b.py"]
    assert names(450) == [*(f"library/{name}.py" for name in "abcd"), "packages/p/a.py"]
    assert len(names(10**6)) == 8


def test_the_order_is_the_same_wherever_it_lies_and_no_corner_is_held_out(tmp_path: Path) -> None:
    files = {f"{folder}/{name}.py": f"{folder}{name}".encode() for folder in "abcdefgh" for name in range(40)}
    one = [name for name, _ in collect(10**9, [tree(tmp_path / "one", files)], []).documents]
    other = [name for name, _ in collect(10**9, [tree(tmp_path / "x" / "other", dict(reversed(files.items())))], []).documents]
    assert one == other != sorted(one)
    assert len({name.split("/")[1] for name in one[-20:]}) >= 4  # the last 20 of 320 come from many folders


def test_the_corpus_file_gives_every_text_back(tmp_path: Path) -> None:
    content = {"library/a.py": "x\u2028y\x85\r\n\ttab \x00 ä 🧪", "library/b.py": "second\n"}
    write_corpus(Collected(list(content.items())), tmp_path / "corpus")
    rows = [json.loads(line) for line in (tmp_path / "corpus/part-00000.jsonl").read_bytes().split(b"\n") if line]
    assert {row["source"]: row["text"] for row in rows} == content


def test_this_python_has_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    assert any((folder / "argparse.py").is_file() for folder in library_folders())
    assert all(folder.is_dir() for folder in package_folders())
    monkeypatch.setattr(sysconfig, "get_path", lambda name: f"/nowhere/{name}")  # as some distributions' sysconfig says
    assert any((folder / "argparse.py").is_file() for folder in library_folders())
    assert np.all([folder.is_dir() for folder in package_folders()])


def test_a_python_without_sources_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "collect", lambda size: Collected())
    with pytest.raises(UserError, match="without source files"):
        prepare(small(tmp_path / "new"), [].append, VOCAB)
    assert not (tmp_path / "new/corpus").exists()
