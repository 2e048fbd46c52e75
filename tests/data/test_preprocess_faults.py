"""What goes wrong while preprocessing: bad records, damaged files, dead workers, interruptions, outputs that exist."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard
from preprocess_helpers import TEXTS, Said, files_of, lines, run, texts_of, write

from megadcp.config.check import UserError
from megadcp.data.parts_folder import PartsFolder
from megadcp.data.preprocess import Preprocess, _Run, preprocess
from megadcp.data.progress import Progress
from megadcp.data.raw_files import InputError
from megadcp.data.raw_parts import Part, cut
from megadcp.data.worker_pool import PartFailed, WorkerDied, WorkerPool

TOOL = Path(__file__).parents[2] / "tools" / "preprocess_data.py"
BAD = {
    "broken JSON": (b'{"text": "a"', "no JSON at column 13: Expecting ','"),
    "extra data": (b'{"text": "a"} {"text": "b"}', "no JSON at column 15: Extra data"),
    "no object": (b'["text"]', "a list, expected a JSON object"),
    "no key": (b'{"txt": "a"}', "no key 'text'"),
    "null": (b'{"text": null}', "key 'text' holds null, expected text"),
    "number": (b'{"text": 7}', "key 'text' holds a number, expected text"),
    "list of sentences": (b'{"text": ["a"]}', "key 'text' holds a list, expected text"),
    "not UTF-8": (b'{"text": "\xff"}', "not UTF-8 at byte 10 of the line"),
    "lone surrogate": (b'{"text": "\\ud800"}', "text that can't be encoded"),
    "too deep": (b'{"text": ' + b"[" * 100_000, "can't be read"),
}


def left(folder: Path) -> list[str]:
    """What lies there beside inputs and parts."""
    return sorted(name for name in os.listdir(folder) if not name.startswith("in") and not name.endswith(".parts"))


# ------------------------------------------------------------------------------------------------------------ bad records
@pytest.mark.parametrize("kind", BAD)
def test_a_bad_record_stops_with_file_line_and_reason(tmp_path: Path, kind: str) -> None:
    record, reason = BAD[kind]
    path = write(tmp_path / "in.jsonl", lines(TEXTS[:20]) + b"\n" + record + b"\n" + lines(TEXTS[20:]))
    for part_size in (0, 64):
        with pytest.raises(InputError) as raised:
            run(path, tmp_path / "out", part_size=part_size)
        assert str(raised.value).startswith(f"{path}:22: ")
        assert reason in str(raised.value)
        assert "--bad-records skip" in str(raised.value)
    assert left(tmp_path) == []


def test_bad_records_are_left_out_listed_and_counted(tmp_path: Path) -> None:
    data, bad, line = b"", [], 0
    for number, (record, reason) in enumerate(BAD.values()):
        data += lines(TEXTS[number * 4 : number * 4 + 4]) + record + b"\n"
        line += 5
        bad.append((line, reason, record.decode("utf-8", "backslashreplace")))
    path = write(tmp_path / "in.jsonl", data)
    said = Said()
    manifest = run(path, tmp_path / "out", bad_records="skip", say=said)
    assert texts_of(tmp_path / "out") == TEXTS
    assert (manifest.counts.rejected, manifest.counts.documents) == (len(BAD), len(TEXTS))
    assert said.has(f"{len(BAD)} bad records were left out")
    rejects = [json.loads(row) for row in (tmp_path / "out.rejects.jsonl").read_text().splitlines()]
    assert [(row["file"], row["line"], row["record"]) for row in rejects] == [(path, at, record) for at, _, record in bad]
    assert all(reason in row["reason"] for row, (_, reason, _) in zip(rejects, bad, strict=True))
    run(path, tmp_path / "w", bad_records="skip", workers=2, part_size=2000)
    assert files_of(tmp_path / "w", ("bin", "idx", "json", "rejects.jsonl")) == files_of(tmp_path / "out", ("bin", "idx", "json", "rejects.jsonl"))


def test_line_numbers_hold_in_shards_and_archives(tmp_path: Path) -> None:
    data = lines(TEXTS) + b"bad\n" + lines(TEXTS)
    for ending in (".jsonl", ".jsonl.gz", ".jsonl.zst"):
        path = write(tmp_path / f"in{ending}", data)
        rejects = []
        for shard in range(4):
            prefix = tmp_path / f"s{ending}{shard}"
            run(path, prefix, bad_records="skip", shard=(shard, 4), part_size=64)
            if (reject := Path(f"{prefix}.rejects.jsonl")).exists():
                rejects += [json.loads(row)["line"] for row in reject.read_text().splitlines()]
        assert rejects == [41]
        with pytest.raises(InputError, match=rf"in{ending}:41: "):
            run(path, tmp_path / f"o{ending}", part_size=64)


def test_the_first_bad_record_is_the_one_reported(tmp_path: Path) -> None:
    """Several workers meet several bad records; which one is told does not depend on who is faster."""
    path = write(tmp_path / "in.jsonl", lines(["x" * 20_000] * 3) + b"first\n" + b"".join(lines([text]) + b"later\n" for text in TEXTS))
    with pytest.raises(InputError, match=r"in\.jsonl:4: "):
        run(path, tmp_path / "out", workers=2, part_size=2000)


def test_bad_rows_and_bad_files(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    path = tmp_path / "in.parquet"
    pyarrow.parquet.write_table(pa.table({"text": ["a", "b", "c", None, "e"]}), path, row_group_size=2)
    with pytest.raises(InputError, match=r"in\.parquet:4: column 'text': is null"):
        run(path, tmp_path / "out", part_size=1)
    assert run(path, tmp_path / "out", bad_records="skip").counts.rejected == 1
    assert texts_of(tmp_path / "out") == ["a", "b", "c", "e"]
    with pytest.raises(InputError, match=r"in\.txt: not UTF-8 at byte 2"):
        run(write(tmp_path / "in.txt", b"ab\xff"), tmp_path / "text")


# ------------------------------------------------------------------------------------------------------- C09, damaged files
@pytest.mark.parametrize("ending", [".jsonl.gz", ".jsonl.zst"])
@pytest.mark.parametrize("part_size", [0, 300])
def test_archives_are_read_whole_or_refused(tmp_path: Path, ending: str, part_size: int) -> None:
    pack = gzip.compress if ending.endswith("gz") else zstandard.ZstdCompressor(write_checksum=True).compress
    first, second = pack(lines(TEXTS[:25])), pack(lines(TEXTS[25:]))
    path = tmp_path / f"in{ending}"
    path.write_bytes(first + second)
    run(path, tmp_path / "out", part_size=part_size)
    assert texts_of(tmp_path / "out") == TEXTS
    broken = bytearray(first + second)
    broken[len(first) // 2] ^= 0x10
    damage = {
        "cut at 60 %": (first + second)[: len(first + second) * 6 // 10],
        "cut in the last member": (first + second)[:-3],
        "one bad byte": bytes(broken),
        "tail of rubbish": first + second + b"rubbish",
        "empty": b"",
    }
    for what, data in damage.items():
        path.write_bytes(data)
        with pytest.raises(InputError, match=rf"in{ending} .*(damaged|empty)"):
            run(path, tmp_path / "bad", part_size=part_size, bad_records="skip")
        assert left(tmp_path) == ["out.bin", "out.idx", "out.json"], what


def test_zstd_frames_of_all_kinds(tmp_path: Path) -> None:
    """A frame without its content size, a skippable frame between, an empty frame."""
    streaming = zstandard.ZstdCompressor().compressobj()
    unsized = streaming.compress(lines(TEXTS[:9])) + streaming.flush()
    skippable = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"skip!"
    data = unsized + skippable + zstandard.compress(b"") + zstandard.compress(lines(TEXTS[9:]))
    (tmp_path / "in.jsonl.zst").write_bytes(data)
    run(tmp_path / "in.jsonl.zst", tmp_path / "out")
    assert texts_of(tmp_path / "out") == TEXTS


def test_a_cut_parquet_file(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    path = tmp_path / "in.parquet"
    pyarrow.parquet.write_table(pa.table({"text": TEXTS}), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"in\.parquet is no whole Parquet file"):
        run(path, tmp_path / "out")


def test_a_file_that_changes_meanwhile(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "in.jsonl", lines(TEXTS)))
    work = _Run(Preprocess((str(path),), str(tmp_path / "out"), "bytes"), Said())
    path.write_bytes(lines(TEXTS[:-1]))
    with pytest.raises(InputError, match=r"in\.jsonl changed during the run"):
        work.go()


# ------------------------------------------------------------------------------------------------------ outputs that exist
def test_an_output_is_not_replaced_by_another(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", lines(TEXTS))
    run(path, tmp_path / "out")
    before = files_of(tmp_path / "out")
    said = Said()
    run(path, tmp_path / "out", say=said, workers=2)
    assert said.has("already made from the same inputs")
    other = write(tmp_path / "in2.jsonl", lines(["other"]))
    for settings, why in [({"append_eod": True}, "--append-eod"), ({"shard": (0, 2)}, "shards 0/1 and 0/2"), ({}, r"in2\.jsonl")]:
        with pytest.raises(UserError, match=rf"out\.bin.*exists already, made from something else.*{why}.*--overwrite"):
            run(path if settings else other, tmp_path / "out", **settings)
    os.utime(path, ns=(1, 1))
    with pytest.raises(UserError, match="modified since"):
        run(path, tmp_path / "out")
    assert files_of(tmp_path / "out") == before
    run(other, tmp_path / "out", overwrite=True)
    assert texts_of(tmp_path / "out") == ["other"]
    os.remove(tmp_path / "out.json")
    with pytest.raises(UserError, match="without a manifest"):
        run(other, tmp_path / "out")


def test_an_output_with_gaps_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", lines(TEXTS) + b"bad\n")
    run(path, tmp_path / "out", bad_records="skip")
    assert (tmp_path / "out.rejects.jsonl").exists()
    with pytest.raises(UserError, match="leaving out 1 bad records"):
        run(path, tmp_path / "out")
    with pytest.raises(InputError, match=r":41: "):
        run(path, tmp_path / "out", overwrite=True)
    assert texts_of(tmp_path / "out") == TEXTS, "a failed run leaves the old output alone"


def test_two_runs_of_one_output(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", lines(TEXTS))
    folder = PartsFolder(str(tmp_path / "out"), "of somebody else")
    folder.take()
    with pytest.raises(UserError, match="another process is writing"):
        run(path, tmp_path / "out")
    folder.release()
    run(path, tmp_path / "out")
    (tmp_path / "mine.parts").mkdir()
    write(tmp_path / "mine.parts" / "thesis.txt", b"precious")
    with pytest.raises(UserError, match=r"mine\.parts is in the way"):
        run(path, tmp_path / "mine")
    assert (tmp_path / "mine.parts" / "thesis.txt").exists()


# ------------------------------------------------------------------------------------------------------------ interruptions
def reused(said: Said) -> int:
    """Parts taken over, as the summary says."""
    return next((int(line.split(";")[1].split()[0]) for line in said if "from an interrupted run" in line), 0)


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", lines(TEXTS) + b"bad\n")
    run(path, tmp_path / "fresh", bad_records="skip", part_size=300)
    with pytest.raises(InputError):
        run(path, tmp_path / "out", part_size=300)
    finished = sorted(path.name for path in (tmp_path / "out.parts").glob("*.json"))
    assert len(finished) > 5
    damaged = tmp_path / "out.parts" / "00000002.0.bin"
    damaged.write_bytes(b"?" + damaged.read_bytes()[1:])
    said = Said()
    run(path, tmp_path / "out", part_size=300, bad_records="skip", workers=2, say=said)
    assert files_of(tmp_path / "out", ("bin", "idx", "json", "rejects.jsonl")) == files_of(
        tmp_path / "fresh", ("bin", "idx", "json", "rejects.jsonl")
    )
    assert reused(said) == len(finished) - 1, "all but the damaged one"
    assert not (tmp_path / "out.parts").exists()


def test_parts_of_other_inputs_are_not_used(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "in.jsonl", lines(TEXTS) + b"bad\n"))
    with pytest.raises(InputError):
        run(path, tmp_path / "out", part_size=300)
    path.write_bytes(lines([text.upper() for text in TEXTS]) + b"bad\n")  # as long as before
    said = Said()
    run(path, tmp_path / "out", part_size=300, bad_records="skip", say=said)
    assert reused(said) == 0
    assert texts_of(tmp_path / "out") == [text.upper() for text in TEXTS]


def test_parts_with_gaps_are_made_again_when_gaps_are_not_wanted(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", b"bad\n" + lines(TEXTS))
    work = _Run(Preprocess((path,), str(tmp_path / "out"), "bytes", bad_records="skip", part_size=300), Said())
    work.folder.take()
    with WorkerPool(work.recipe, 1) as pool:
        list(pool.run(cut(work.sources, (0, 1), 300)))
    work.folder.release()
    with pytest.raises(InputError, match=r"in\.jsonl:1: "):
        run(path, tmp_path / "out", part_size=300)


# -------------------------------------------------------------------------------------------------------------- dead workers
@pytest.mark.parametrize("when", ["before any work", "during the work"])
def test_a_killed_worker_is_an_error(tmp_path: Path, when: str) -> None:
    path = write(tmp_path / "in.jsonl", lines(TEXTS * 20))
    work = _Run(Preprocess((path,), str(tmp_path / "out"), "bytes", workers=2, part_size=1000), Said())
    work.folder.take()
    with WorkerPool(work.recipe, 2) as pool:
        victim = next(iter(pool.processes.values()))

        def parts() -> Iterator[Part]:
            for part in cut(work.sources, (0, 1), 1000):
                if part.index == (0 if when == "before any work" else 9):
                    os.kill(victim.pid, signal.SIGKILL)
                    victim.join()
                yield part

        with pytest.raises(WorkerDied, match=rf"worker process {victim.pid} ended by signal 9.*take fewer workers"):
            list(pool.run(parts()))
        processes = list(pool.processes.values())
    assert not any(process.is_alive() for process in processes)
    work.folder.release()
    assert left(tmp_path) == []
    run(path, tmp_path / "out", workers=2, part_size=1000)
    assert texts_of(tmp_path / "out") == TEXTS * 20


def test_an_unexpected_fault_in_a_worker_is_told_with_its_traceback(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", lines(TEXTS))
    work = _Run(Preprocess((path,), str(tmp_path / "out"), "bytes", workers=2), Said())
    write(tmp_path / "out.parts", b"a file where the folder should be")
    with WorkerPool(work.recipe, 2) as pool, pytest.raises(PartFailed) as raised:
        list(pool.run(cut(work.sources, (0, 1), 500)))
    failure = raised.value.args[0]
    assert not failure.is_input
    assert f"part 0 ({path} [0, 500)) failed" in failure.message
    assert "FileExistsError" in failure.message


def workers_of(pid: int) -> list[int]:
    """The worker processes of a tool: the grandchildren, forked from the server that it started."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(entry.parent.name)] = int(entry.read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, IndexError):
            continue
    return [process for process, parent in parents.items() if parents.get(parent) == pid]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to find the workers")
@pytest.mark.parametrize("victim", ["worker", "parent"])
def test_killing_processes_of_the_tool(tmp_path: Path, victim: str) -> None:
    """The tool itself, from outside: no hang, no short output, nobody left behind; the next call gives the right bytes."""
    path = write(tmp_path / "in.jsonl", lines(["some words in a row " * 500] * 3000))
    command = [sys.executable, str(TOOL), "--input", path, "--tokenizer-kind", "bytes", "--output-prefix", str(tmp_path / "out"), "--workers", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not any((tmp_path / "out.parts").glob("*.json")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    workers = workers_of(process.pid)
    assert len(workers) == 2
    os.kill(workers[0] if victim == "worker" else process.pid, signal.SIGKILL)
    _, error = process.communicate(timeout=60)
    assert process.returncode != 0
    if victim == "worker":
        assert process.returncode == 1
        assert "ended by signal 9" in error
        assert "the same command goes on" in error
        assert "Traceback" not in error
    while any(Path(f"/proc/{worker}").exists() for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    assert left(tmp_path) == []
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "from an interrupted run" in done.stdout
    run(path, tmp_path / "expected")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "expected")


# ---------------------------------------------------------------------------------------------------------- the command line
def test_exit_codes(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", lines(TEXTS) + b"bad\n")
    base = [sys.executable, str(TOOL), "--input", path, "--tokenizer-kind", "bytes", "--output-prefix", str(tmp_path / "out")]
    for extra, code, text in [
        ([], 1, f"error: {path}:41: no JSON"),
        (["--shard", "1of2"], 2, "error: --shard 1of2: give I/N"),
        (["--bad-records", "skip"], 0, "1 bad records were left out"),
        (["--append-eod", "--bad-records", "skip"], 2, "exists already"),
    ]:
        done = subprocess.run(base + extra, capture_output=True, text=True, timeout=60)
        assert done.returncode == code, done.stderr
        assert text in (done.stderr if code else done.stdout)
        assert "Traceback" not in done.stderr


def test_progress_lines() -> None:
    said = Said()
    with Progress(1000, said, "plain", every=0) as progress:
        progress.reuse(500)
        progress.begin -= 10  # ten seconds ago
        progress.add(20, 4_000_000, 1000, 100)
        progress.add(20, 4_000_000, 1000, 100)
    assert len(said) == 2
    assert said[0].startswith("60%, 20 documents, 1,000 tokens; 2 documents/s, 0.4 MB/s, 100 tokens/s; ETA 0:00:40")
    assert "70%" in said[1]
    assert "ETA 0:00:15" in said[1]
    quiet = Said()
    with Progress(1000, quiet, "plain") as progress:
        progress.add(1, 1, 1, 1)
    assert quiet == []


def test_rich_progress() -> None:
    said = Said()
    with Progress(10, said, "rich") as progress:
        progress.add(1, 1, 1, 10)
        (task,) = progress._live.tasks
        assert task.finished
        assert task.description.startswith("100%, 1 documents")
    assert said == []


def test_two_keys_reject_together(tmp_path: Path) -> None:
    rows = [{"a": "x", "b": "y"}, {"a": "x", "b": "\ud800"}, {"a": "z", "b": "w"}]
    path = write(tmp_path / "in.jsonl", b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    preprocess(Preprocess((path,), str(tmp_path / "out"), "bytes", keys=("a", "b"), bad_records="skip"), Said())
    assert texts_of(tmp_path / "out_a") == ["x", "z"]
    assert texts_of(tmp_path / "out_b") == ["y", "w"]
