"""Merging: order, completeness, and the 64-bit offsets of large pairs."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from preprocess_helpers import TEXTS, Said, files_of, lines, run, texts_of, write

from megadcp.config.check import UserError
from megadcp.data.indexed import IndexedReader, IndexedWriter
from megadcp.data.merge import merge

TOOL = Path(__file__).parents[2] / "tools" / "merge_data.py"


def pair(prefix: Path, documents: list[list[int]], dtype: str = "uint16") -> str:
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add(document)
    return str(prefix)


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    path = write(tmp_path / "in.jsonl", lines(TEXTS))
    for index in range(3):
        run(path, tmp_path / f"s{index}", shard=(index, 3))
    return [str(tmp_path / f"s{index}") for index in range(3)]


def test_pairs_without_manifest_keep_the_order_given(tmp_path: Path) -> None:
    a, b = pair(tmp_path / "a", [[1, 2], [], [3]]), pair(tmp_path / "b", [[4], []])
    none = pair(tmp_path / "none", [])
    said = Said()
    assert merge([b, none, a], str(tmp_path / "out"), False, said) is None
    pair(tmp_path / "expected", [[4], [], [1, 2], [], [3]])
    assert files_of(tmp_path / "out", ("bin", "idx")) == files_of(tmp_path / "expected", ("bin", "idx"))
    assert not (tmp_path / "out.json").exists()
    assert said.has("5 documents, 4 tokens so far")


def test_shards_must_be_complete(tmp_path: Path, shards: list[str]) -> None:
    for inputs, message in [
        (shards[:2], r"shards 2/3 are missing; 2 of 3 were given"),
        (shards[1:2], r"shards 0/3, 2/3 are missing"),
        ([*shards, shards[1]], r"s1 was given twice"),
        ([], r"nothing to merge"),
    ]:
        with pytest.raises(UserError, match=message):
            merge(inputs, str(tmp_path / "out"), False, Said())
    copy = tmp_path / "copy"
    for ending in ("bin", "idx", "json"):
        Path(f"{copy}.{ending}").write_bytes(Path(f"{shards[1]}.{ending}").read_bytes())
    with pytest.raises(UserError, match=r"shard 1/3 is there twice: .*s1 and .*copy"):
        merge([*shards, str(copy)], str(tmp_path / "out"), False, Said())
    os.remove(f"{shards[2]}.json")
    with pytest.raises(UserError, match=r"s2\.json is missing"):
        merge(shards, str(tmp_path / "out"), False, Said())
    assert not list(tmp_path.glob("out*"))


def test_only_what_belongs_together_is_merged(tmp_path: Path, shards: list[str]) -> None:
    path = str(tmp_path / "in.jsonl")
    other = write(tmp_path / "in2.jsonl", lines(["other"]))
    run(path, tmp_path / "eod", shard=(1, 3), append_eod=True)
    run(path, tmp_path / "half", shard=(1, 2))
    run(other, tmp_path / "other", shard=(1, 3))
    run(other, tmp_path / "whole")
    for odd, message in [
        ("eod", "no shard of the same run.*append-eod"),
        ("half", "counts of shards differ"),
        ("other", r"in2\.jsonl"),
        ("whole", r"in2\.jsonl"),
    ]:
        with pytest.raises(UserError, match=message):
            merge([shards[0], str(tmp_path / odd), shards[2]], str(tmp_path / "out"), False, Said())
    with pytest.raises(UserError, match=r"b\.idx holds int32, .*a\.idx uint16"):
        merge([pair(tmp_path / "a", [[1]]), pair(tmp_path / "b", [[1]], "int32")], str(tmp_path / "out"), False, Said())
    with pytest.raises(UserError, match="one of the inputs"):
        merge([str(tmp_path / "a")], str(tmp_path / "a"), True, Said())
    assert not list(tmp_path.glob("out*"))


def test_tokenizers_must_be_the_same(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", lines(TEXTS))
    run(path, tmp_path / "a")
    run(write(tmp_path / "in2.jsonl", lines(["b"])), tmp_path / "b")
    described = (tmp_path / "b.json").read_text()
    fingerprint = described.split('"fingerprint": "')[1].split('"')[0]
    (tmp_path / "b.json").write_text(described.replace(fingerprint, "0" * 64))
    with pytest.raises(UserError, match="different tokenizers"):
        merge([str(tmp_path / "a"), str(tmp_path / "b")], str(tmp_path / "out"), False, Said())


def test_whole_datasets_of_one_tokenizer(tmp_path: Path) -> None:
    for name in "ab":
        run(write(tmp_path / f"in_{name}.jsonl", lines([name])), tmp_path / name)
    manifest = merge([str(tmp_path / "b"), str(tmp_path / "a")], str(tmp_path / "out"), False, Said())
    assert texts_of(tmp_path / "out") == ["b", "a"]
    assert manifest is not None
    assert [Path(source.path).name for source in manifest.origin.sources] == ["in_b.jsonl", "in_a.jsonl"]
    run(tmp_path / "in_a.jsonl", tmp_path / "again")
    with pytest.raises(UserError, match="made from the same inputs"):
        merge([str(tmp_path / "a"), str(tmp_path / "again")], str(tmp_path / "out2"), False, Said())


def test_damage_is_found_while_merging(tmp_path: Path, shards: list[str]) -> None:
    data = bytearray(Path(f"{shards[1]}.bin").read_bytes())
    data[10] ^= 1
    Path(f"{shards[1]}.bin").write_bytes(data)
    with pytest.raises(UserError, match=r"s1\.bin: wrong checksum: expected [0-9a-f]{8}, found [0-9a-f]{8}"):
        merge(shards, str(tmp_path / "out"), False, Said())
    Path(f"{shards[1]}.bin").write_bytes(Path(f"{shards[0]}.bin").read_bytes())
    Path(f"{shards[1]}.idx").write_bytes(Path(f"{shards[0]}.idx").read_bytes())
    with pytest.raises(UserError, match=r"s1: .*s1\.json says .* do not belong together"):
        merge(shards, str(tmp_path / "out"), False, Said())
    assert not list(tmp_path.glob("*out*"))


def test_rejects_are_merged(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", b"bad\n" + lines(TEXTS) + b"worse\n")
    endings = ("bin", "idx", "json", "rejects.jsonl")
    run(path, tmp_path / "one", bad_records="skip")
    for index in range(3):
        run(path, tmp_path / f"s{index}", bad_records="skip", shard=(index, 3))
    merge([str(tmp_path / f"s{index}") for index in range(3)], str(tmp_path / "out"), False, Said())
    assert files_of(tmp_path / "out", endings) == files_of(tmp_path / "one", endings)


def test_offsets_beyond_32_bits(tmp_path: Path) -> None:
    """C03: two shards whose offsets pass 2^31 each, 2^32 together; sparse, so that nothing is on the disk."""
    lengths = [1_100_000_000, 1_050_000_000, 3]
    for name, mark in (("a", b"abc"), ("b", b"xyz")):
        header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 1, 3, 4)
        pointers = np.cumsum([0, *lengths[:-1]]).astype("<i8").tobytes()
        (tmp_path / f"{name}.idx").write_bytes(header + np.array(lengths, "<i4").tobytes() + pointers + np.arange(4, dtype="<i8").tobytes())
        with open(tmp_path / f"{name}.bin", "wb") as file:
            file.seek(sum(lengths[:-1]))
            file.write(mark)
    merge([str(tmp_path / "a"), str(tmp_path / "b")], str(tmp_path / "out"), False, Said())
    reader = IndexedReader(tmp_path / "out")
    assert reader.tokens_total == 2 * sum(lengths) > 2**32
    assert reader.read(2).tobytes() == b"abc"
    assert reader.read(5).tobytes() == b"xyz"
    assert reader.read(4, 1_049_999_999).tolist() == [0]
    assert os.stat(tmp_path / "out.bin").st_blocks * 512 < 2**28, "holes stay holes"


def test_command_line(tmp_path: Path, shards: list[str]) -> None:
    run(tmp_path / "in.jsonl", tmp_path / "one")
    files = [str(path) for path in sorted(tmp_path.glob("s?.*"))]  # as a shell glob gives them
    command = [sys.executable, str(TOOL), "--input", *files, "--output-prefix", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "40 documents" in done.stdout
    assert files_of(tmp_path / "out") == files_of(tmp_path / "one")
    again = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert again.returncode == 2
    assert again.stderr.startswith("error: ")
    assert "--overwrite" in again.stderr
    assert subprocess.run([*command, "--overwrite"], capture_output=True, timeout=60).returncode == 0
