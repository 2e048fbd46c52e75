"""tools/preprocess_array.py without SLURM: the same dataset in pieces, and requests that are refused. tests/dist/test_slurm.py has the jobs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
GIVEN = ["--input", "text.jsonl", "--tokenizer-kind", "bytes", "--append-eod"]
Call = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    rows = [{"text": f"{number} " + "word " * (number % 17), "title": f"title {number}"} for number in range(60)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def run(tool: str, *arguments: str, path: str = "/usr/bin:/bin") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(TOOLS / tool), *arguments]
        return subprocess.run(command, cwd=tmp_path, env={"PATH": path}, capture_output=True, text=True, check=False)

    return run


@pytest.mark.parametrize("keys", [["text"], ["text", "title"]])
def test_pieces_give_what_one_run_gives(call: Call, tmp_path: Path, keys: list[str]) -> None:
    assert call("preprocess_data.py", *GIVEN, "--json-keys", *keys, "--output-prefix", "alone").returncode == 0
    command = [*GIVEN, "--json-keys", *keys, "--output-prefix", "pieces", "--shards", "3", "--local"]
    done = call("preprocess_array.py", *command)
    assert done.returncode == 0, done.stdout + done.stderr
    for key in [""] if len(keys) == 1 else [f"_{key}" for key in keys]:
        for ending in (".bin", ".idx", ".json"):
            assert (tmp_path / f"pieces{key}{ending}").read_bytes() == (tmp_path / f"alone{key}{ending}").read_bytes()
    assert not [each for each in (tmp_path / "pieces.shards").rglob("*") if each.suffix in (".bin", ".idx", ".json")]
    again = call("preprocess_array.py", *command)
    assert again.returncode == 0
    assert "already made" in again.stdout


def test_pieces_can_be_kept(call: Call, tmp_path: Path) -> None:
    assert call("preprocess_array.py", *GIVEN, "--output-prefix", "pieces", "--shards", "2", "--local", "--keep-shards").returncode == 0
    assert sorted(each.name for each in (tmp_path / "pieces.shards").glob("*.idx")) == ["00000-of-00002.idx", "00001-of-00002.idx"]


def test_a_bad_record_stops_it_and_says_where(call: Call, tmp_path: Path) -> None:
    with open(tmp_path / "text.jsonl", "a", encoding="utf-8") as file:
        file.write("{bad\n")
    done = call("preprocess_array.py", *GIVEN, "--output-prefix", "pieces", "--shards", "2", "--local")
    assert done.returncode == 1
    assert "text.jsonl:61" in done.stderr
    assert not (tmp_path / "pieces.bin").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([*GIVEN, "--shards", "0"], "--shards 0 --at-once 256: at least 1 each"),
        ([*GIVEN, "--shards", "2", "--shard", "0/2"], "--shard 0/2 is for preprocess_data.py"),
        ([*GIVEN, "--shards", "2", "--time", "0:01:00"], "--time 0:01:00: at least 0:02:00"),
        ([*GIVEN, "--shards", "2", "--time", "soon"], "--time soon is no time limit"),
        (["--input", "nothing.jsonl", "--tokenizer-kind", "bytes", "--shards", "2"], "nothing.jsonl"),
        (["--input", "text.jsonl", "--tokenizer-kind", "sentencepiece", "--shards", "2"], "tokenizer"),
    ],
)
def test_bad_requests(call: Call, tmp_path: Path, arguments: list[str], told: str) -> None:
    done = call("preprocess_array.py", *arguments, "--output-prefix", "pieces")
    assert done.returncode in (1, 2)
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert told in done.stderr
    assert not (tmp_path / "pieces.shards").exists()


def test_without_sbatch(call: Call, tmp_path: Path) -> None:
    done = call("preprocess_array.py", *GIVEN, "--output-prefix", "pieces", "--shards", "2", path=str(tmp_path))
    assert done.returncode == 2
    assert "sbatch is not on PATH" in done.stderr
    assert not (tmp_path / "pieces.shards").exists()
