"""The order cache: built once per folder, atomically; damaged, read-only and shared folders (public case C15)."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest
from order_helpers import data_config, ids_of, write_lengths

from megadcp.data import order, order_cache
from megadcp.data.order import build_cache, open_training, open_validation
from megadcp.data.order_cache import OrderCache


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def told() -> tuple[list[str], order_cache.Say]:
    lines: list[str] = []
    return lines, lines.append


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return write_lengths(tmp_path / "corpus", list(range(1, 40)))


def test_small_sources_need_no_files(corpus: str, tmp_path: Path) -> None:
    before = names(tmp_path)
    lines, say = told()
    data = data_config(corpus)
    build_cache(data, 5, say)
    ids_of(open_training(data, 5, say), 5)
    assert names(tmp_path) == before
    assert lines[-1].endswith("kept in memory")


def test_large_sources_are_kept_beside_the_data(corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ids_of(open_training(data_config(corpus), 5), 5)
    monkeypatch.setattr(order, "SMALL_SOURCE", 10)
    lines, say = told()
    build_cache(data_config(corpus), 5, say)
    folder = tmp_path / "corpus.order"
    assert len(names(folder)) == 3  # one block: two arrays and their description
    assert lines[-1].endswith(f"kept in {folder}")
    stamps = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert np.array_equal(ids_of(open_training(data_config(corpus), 5, say), 5), expected)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == stamps
    assert len(lines) == 2  # what build_cache described, and no word since


@pytest.mark.parametrize("mode", ["documents", "stream"])
def test_build_cache_makes_everything_a_run_reads(mode: str, corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blends too: afterwards nothing is built or written by any step."""
    other = write_lengths(tmp_path / "other", [9, 2, 7])
    data = data_config(corpus, other, weights=[1, 2], max_length=32, tokens_per_step=64, mode=mode, cache=str(tmp_path / "cache"))
    monkeypatch.setattr("megadcp.data.shuffle.SMALL_BLOCK", 8)
    build_cache(data, 40, told()[1])
    expected = ids_of(open_training(data_config(corpus, other, weights=[1, 2], max_length=32, tokens_per_step=64, mode=mode), 40), 40)

    def refuse(*_: object) -> None:
        raise AssertionError("built although it was on disk")

    monkeypatch.setattr(OrderCache, "_store", refuse)
    assert np.array_equal(ids_of(open_training(data, 40), 40), expected)


def test_two_runs_with_one_cache_folder_do_not_mix(corpus: str, tmp_path: Path) -> None:
    for seed in (1, 2):
        for max_length in (8, 64):
            plain = data_config(corpus, seed=seed, max_length=max_length)
            cached = data_config(corpus, seed=seed, max_length=max_length, cache=str(tmp_path / "cache"))
            for _ in range(2):
                assert np.array_equal(ids_of(open_training(cached, 3), 3), ids_of(open_training(plain, 3), 3))


@pytest.mark.parametrize("mode", ["documents", "stream"])
@pytest.mark.parametrize("damage", ["cut", "empty", "garbage", "other_shape", "pickle", "json", "gone"])
def test_damage_is_named_and_built_again(damage: str, mode: str, corpus: str, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    data = data_config(corpus, cache=str(folder), mode=mode, max_length=64, tokens_per_step=128)
    expected = ids_of(open_training(data, 5), 5)
    victim = next(path for path in sorted(folder.glob("*.npy")) if "order" in path.name or "documents" in path.name)
    good = victim.read_bytes()
    if damage == "cut":
        victim.write_bytes(good[: len(good) * 2 // 3])
    elif damage == "empty":
        victim.write_bytes(b"")
    elif damage == "garbage":
        victim.write_bytes(b"\x00" * len(good))
    elif damage == "other_shape":
        np.save(victim, np.zeros(3, np.uint32))
    elif damage == "pickle":
        np.save(victim, np.array([_Payload(tmp_path / "marker")], object), allow_pickle=True)  # C77
    elif damage == "json":
        victim = next(folder.glob("*.json"))
        victim.write_text("{")
    else:
        victim.unlink()
    lines, say = told()
    assert np.array_equal(ids_of(open_training(data, 5, say), 5), expected)
    assert len(lines) == 1
    assert str(victim) in lines[0]
    assert "damaged" in lines[0]
    assert np.array_equal(ids_of(open_training(data, 5, say), 5), expected)
    assert len(lines) == 1
    assert not (tmp_path / "marker").exists()


class _Payload:
    """What a pickle of it does: make a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.marker),)


def test_build_cache_finds_flipped_bits(corpus: str, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    data = data_config(corpus, cache=str(folder))
    build_cache(data, 5, told()[1])
    victim = next(folder.glob("*.order.npy"))
    good = victim.read_bytes()
    victim.write_bytes(good[:-5] + bytes([good[-5] ^ 1]) + good[-4:])
    lines, say = told()
    build_cache(data, 5, say)
    assert "checksum" in lines[0]
    assert victim.read_bytes() == good


@pytest.mark.parametrize("mode", ["documents", "stream"])
def test_a_folder_that_can_not_be_made_costs_one_line(mode: str, corpus: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    plain = data_config(corpus, mode=mode, max_length=64, tokens_per_step=64)
    lines, say = told()
    data = data_config(corpus, mode=mode, max_length=64, tokens_per_step=64, cache=str(tmp_path / "file" / "cache"))
    assert np.array_equal(ids_of(open_training(data, 30, say), 30), ids_of(open_training(plain, 30), 30))
    assert len(lines) == 1
    assert "can't be written" in lines[0]


def test_a_read_only_folder_is_read_and_not_written(corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as root, whom file modes don't stop, so opening for writing is refused by hand."""
    folder = tmp_path / "cache"
    data = data_config(corpus, cache=str(folder))
    expected = ids_of(open_training(data, 5), 5)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(order_cache.tempfile, "mkstemp", refuse)
    monkeypatch.setattr(order_cache, "_lock", refuse)
    lines, say = told()
    assert np.array_equal(ids_of(open_training(data, 5, say), 5), expected)
    assert lines == []
    other = data_config(corpus, cache=str(folder), seed=77)
    assert np.array_equal(ids_of(open_training(other, 5, say), 5), ids_of(open_training(data_config(corpus, seed=77), 5), 5))
    assert len(lines) == 1
    assert "Permission denied" in lines[0]


def test_a_failed_write_leaves_nothing_behind(corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(order_cache.os, "fsync", full)
    lines, say = told()
    folder = tmp_path / "cache"
    ids_of(open_training(data_config(corpus, cache=str(folder)), 5, say), 5)
    assert names(folder) == []
    assert "No space left" in lines[0]


def test_a_write_cut_off_half_way_is_not_an_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever dies between two renames while replacing a damaged entry must not leave old and new files under one description."""

    def build() -> order_cache.Arrays:
        return {"first": np.arange(5), "second": np.arange(5)}

    OrderCache(tmp_path, told()[1]).get("entry", build)
    (tmp_path / "entry.first.npy").write_bytes(b"")
    original, calls = order_cache._write, []

    def die(path: Path, write: object) -> None:
        calls.append(path)
        if len(calls) == 2:
            raise KeyboardInterrupt
        original(path, write)  # type: ignore[arg-type]

    monkeypatch.setattr(order_cache, "_write", die)
    with pytest.raises(KeyboardInterrupt):
        OrderCache(tmp_path, told()[1]).get("entry", build)
    assert names(tmp_path) == ["entry.first.npy", "entry.second.npy"]
    monkeypatch.setattr(order_cache, "_write", original)
    lines, say = told()
    assert OrderCache(tmp_path, say).get("entry", build)["second"].tolist() == list(range(5))
    assert lines == []


def test_an_error_of_the_builder_is_not_blamed_on_the_cache(tmp_path: Path) -> None:
    def broken() -> order_cache.Arrays:
        raise OSError(5, "the data can't be read")

    lines, say = told()
    with pytest.raises(OSError, match="the data can't be read"):
        OrderCache(tmp_path / "cache", say).get("entry", broken)
    assert lines == []


def _node(data_args: tuple[str, str], barrier: object, out: Path) -> None:
    """One rank on one node: counts what it builds itself."""
    built = []
    original = OrderCache._store

    def store(self: OrderCache, folder: Path, name: str, arrays: order_cache.Arrays) -> None:
        built.append(name)
        original(self, folder, name, arrays)

    OrderCache._store = store  # type: ignore[method-assign]
    prefix, cache = data_args
    barrier.wait()  # type: ignore[attr-defined]
    source = open_training(data_config(prefix, cache=cache, tokens_per_step=2000), 3)
    out.write_text(json.dumps({"ids": ids_of(source, 3).tolist(), "built": built}))


@pytest.mark.parametrize("shared", [False, True])
def test_two_processes(shared: bool, tmp_path: Path) -> None:
    """Two nodes with folders of their own each build; with a shared folder exactly one does, and neither reads half a file."""
    prefix = write_lengths(tmp_path / "c", [1 + index % 7 for index in range(20_000)])
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(2)
    folders = [tmp_path / "cache"] * 2 if shared else [tmp_path / "node0", tmp_path / "node1"]
    outs = [tmp_path / f"out{rank}.json" for rank in range(2)]
    workers = [context.Process(target=_node, args=((prefix, str(folder)), barrier, out)) for folder, out in zip(folders, outs, strict=True)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    results = [json.loads(out.read_text()) for out in outs]
    assert results[0]["ids"] == results[1]["ids"] == ids_of(open_training(data_config(prefix, tokens_per_step=2000), 3), 3).tolist()
    built = results[0]["built"] + results[1]["built"]
    assert len(built) == (1 if shared else 2)
    for folder in folders:
        assert [name for name in names(folder) if name.endswith(".tmp")] == []


def test_the_cache_is_mapped_not_read(corpus: str, tmp_path: Path) -> None:
    made = OrderCache(tmp_path, told()[1]).get("entry", lambda: {"values": np.arange(10)})
    assert not made["values"].flags.writeable
    assert made["values"].tolist() == list(range(10))
    assert os.access(tmp_path / "entry.values.npy", os.R_OK)
    assert (tmp_path / "entry.values.npy").stat().st_mode & 0o444 == 0o444


def test_validation_uses_the_cache_too(corpus: str, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    (held_out,) = open_validation(data_config(corpus, split=(0.5, 0.5), cache=str(folder)))
    held_out.documents(100)
    assert len(names(folder)) == 3
