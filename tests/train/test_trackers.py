"""Trackers may be slow, fail or hang; training may not. The stand-ins for wandb are real packages that real processes import."""

import json
import os
import signal
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from fake_wandb import calls, write_fake
from train_helpers import config

from megadcp.config.check import UserError
from megadcp.train import trackers
from megadcp.train.metrics import MetricsFile, read_metrics
from megadcp.train.trackers import Numbers, ProcessTracker, TrackedMetrics, TrackedRun, check_trackers, open_trackers, wandb_id


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """fake("init raises") makes `import wandb` find a package that behaves so."""

    monkeypatch.syspath_prepend(str(tmp_path / "fake"))
    return lambda behaviour: write_fake(tmp_path / "fake", behaviour)


def run_of(folder: Path, timeout_s: float = 20.0) -> TrackedRun:
    return TrackedRun("wandb", str(folder), "test", {"optim": {"lr": 0.1}}, 0, timeout_s, "abc", "auto", "project", "", ("a", "b"))


def test_rows_reach_the_tracker_in_order(tmp_path, fake):
    fake("")
    said: list[str] = []
    tracker = ProcessTracker(run_of(tmp_path), said.append)
    for step in range(1, 6):
        tracker.write({"step": step, "loss": 5.0 - step, "cp": {"1": 3} if step < 3 else {"2": 1}, "skipped": False, "measured": [[0, 1.0, 5]]})
    tracker.write({"step": 5, "validation_loss": 2.5, "name": "held out", "targets": 10, "seconds": 0.1})
    tracker.close()
    (init,) = calls(tmp_path, "init")
    assert (init["id"], init["resume"], init["name"], init["project"], init["entity"]) == ("abc", "allow", "test", "project", None)
    assert init["config"] == {"optim": {"lr": 0.1}}
    assert init["stdin"] == "", "the rows are not for what the tracker asks a person"
    assert [(one["name"], one["step_metric"]) for one in calls(tmp_path, "define_metric")] == [("step", None), ("*", "step")]
    logged = calls(tmp_path, "log")
    assert [one["step"] for one in logged] == [0, 1, 2, 3, 4, 5]
    assert [one["row"]["step"] for one in logged] == [1, 2, 3, 4, 5, 5]
    assert [one["row"].get("cp/1") for one in logged[:5]] == [3, 3, 0, 0, 0]
    assert logged[5]["row"] == {"step": 5, "validation/held out/loss": 2.5, "validation/held out/targets": 10, "validation/held out/seconds": 0.1}
    assert calls(tmp_path, "finish")[0]["exit_code"] == 0
    assert said == ["wandb: run abc, https://wandb.example/run"]
    assert "talks to people" in (tmp_path / "wandb.log").read_text()


def test_a_resumed_run_keeps_every_step(tmp_path, fake):
    """C69: saved at step 5, crashed at step 8, resumed from 5 into the same run."""
    fake("no key")
    first, said = wandb_id(tmp_path, "p", ""), []
    tracker = ProcessTracker(run_of(tmp_path), said.append)
    for step in range(1, 9):
        tracker.write({"step": step, "life": 1})
    end = time.monotonic() + 20
    while len(calls(tmp_path, "log")) < 8 and time.monotonic() < end:
        time.sleep(0.02)
    os.killpg(tracker._process.pid, signal.SIGKILL)  # with the trainer
    tracker._process.wait()
    assert wandb_id(tmp_path, "p", "") == first
    tracker = ProcessTracker(run_of(tmp_path), said.append)
    for step in range(6, 10):
        tracker.write({"step": step, "life": 2})
    tracker.close()
    logged = calls(tmp_path, "log")
    assert [(one["row"]["step"], one["row"]["life"]) for one in logged] == [(step, 1) for step in range(1, 9)] + [(step, 2) for step in range(6, 10)]
    numbers = [one["step"] for one in logged]
    assert numbers == sorted(set(numbers)), "wandb drops rows whose number does not grow"
    assert {one["id"] for one in calls(tmp_path, "init")} == {"abc"}
    assert ["wandb sync --append" in line for line in said] == [True]


def test_another_project_is_another_run(tmp_path):
    one = wandb_id(tmp_path, "p", "")
    assert wandb_id(tmp_path, "p", "") == one
    assert wandb_id(tmp_path, "q", "") != one


def test_a_slow_start_loses_nothing(tmp_path, fake):
    fake("slow init")
    said: list[str] = []
    tracker = ProcessTracker(run_of(tmp_path), said.append)
    begin = time.monotonic()
    for step in range(200):
        tracker.write({"step": step})
    assert time.monotonic() - begin < 1.9, "writing must not wait"
    tracker.close()
    assert len(calls(tmp_path, "log")) == 200
    assert len(said) == 1


@pytest.mark.parametrize(
    ("behaviour", "told"), [("init raises", "no way to the server"), ("log raises", "the service is gone"), ("log dies", "exit code 7")]
)
def test_a_failing_tracker_is_told_of_once(tmp_path, fake, behaviour, told):
    fake(behaviour)
    said: list[str] = []
    tracker = ProcessTracker(run_of(tmp_path), said.append)
    for step in range(1, 8):
        tracker.write({"step": step})
    end = time.monotonic() + 20
    while not any("WARNING" in line for line in said) and time.monotonic() < end:
        tracker.write({"step": 9})
        time.sleep(0.02)
    tracker.write({"step": 10})
    tracker.close()
    assert sum("WARNING" in line for line in said) == 1, said
    assert any(told in line for line in said), said
    assert all("\n" not in line for line in said)


def test_no_network_goes_on_offline(tmp_path, fake):
    fake("no network")
    said: list[str] = []
    tracker = ProcessTracker(run_of(tmp_path), said.append)
    tracker.write({"step": 1})
    tracker.close()
    assert [one["mode"] for one in calls(tmp_path, "init")] == [None, "offline"]
    assert len(calls(tmp_path, "log")) == 1
    assert "no way to the server" in said[0]
    assert "wandb sync" in said[1]


@pytest.mark.parametrize("behaviour", ["init hangs", "log hangs", "finish hangs"])
def test_a_hanging_tracker_is_left_behind(tmp_path, fake, behaviour):
    fake(behaviour)
    said: list[str] = []
    tracker = ProcessTracker(run_of(tmp_path, timeout_s=1.5), said.append, most_rows=20)
    end = time.monotonic() + 20
    while not calls(tmp_path, "init") and time.monotonic() < end:
        time.sleep(0.02)
    begin = time.monotonic()
    for step in range(40 if behaviour == "finish hangs" else 800):
        tracker.write({"step": step, **{f"key {number}": 1.0 for number in range(20)}})
        time.sleep(0.01 if behaviour == "finish hangs" else 0)
    wrote = time.monotonic()
    tracker.close()
    closed = time.monotonic()
    assert wrote - begin < 10
    assert closed - wrote < 10
    assert sum("did not finish in 1.5 s" in line for line in said) == 1, said
    left_out = [line for line in said if "left out" in line]
    assert len(left_out) == (0 if behaviour == "finish hangs" else 2), said  # one warning, and the number at the end
    for one in calls(tmp_path, "child"):
        with pytest.raises(ProcessLookupError):
            _wait_for_end(one["pid"])


def test_a_tracker_that_can_not_be_killed_is_left_behind(tmp_path, fake, monkeypatch):
    """As a process that waits for a file system which is gone."""
    fake("finish hangs")
    tracker = ProcessTracker(run_of(tmp_path, timeout_s=0.5), lambda line: None)
    kill = os.killpg
    monkeypatch.setattr("megadcp.train.trackers.os.killpg", lambda pid, number: None)
    monkeypatch.setattr("megadcp.train.trackers.STOP_SECONDS", 0.2)
    closing = threading.Thread(target=tracker.close, daemon=True)
    closing.start()
    closing.join(20)
    try:
        assert not closing.is_alive()
    finally:
        kill(tracker._process.pid, signal.SIGKILL)
        tracker._process.wait()


def _wait_for_end(pid: int) -> None:
    for _ in range(200):
        os.kill(pid, 0)
        if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
            raise ProcessLookupError
        time.sleep(0.02)


def test_a_crash_is_no_end(tmp_path, fake):
    fake("")
    tracker = ProcessTracker(run_of(tmp_path), lambda line: None)
    tracker.write({"step": 1})

    def crash() -> None:
        with ExitStack() as held:
            held.callback(tracker.close)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        crash()
    assert calls(tmp_path, "finish")[0]["exit_code"] == 1
    assert len(calls(tmp_path, "log")) == 1


def test_a_missing_package_is_one_clear_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(__import__("sys").modules, "wandb", raising=False)
    (tmp_path / "wandb").mkdir()  # left by other runs; no package
    check_trackers(config("x"))  # nothing is asked for
    with pytest.raises(UserError, match=r'log.wandb=true needs the package wandb: pip install "megadcp\[wandb\]"'):
        check_trackers(config("x", log={"wandb": True}))


def test_metrics_have_every_row_whatever_trackers_do(tmp_path, fake):
    fake("init hangs")
    said: list[str] = []
    setup = config("x", log={"wandb": True, "tracker_timeout_s": 0.5})
    metrics = TrackedMetrics(MetricsFile(tmp_path / "metrics.jsonl", 0), open_trackers(setup, tmp_path, 0, said.append))
    for step in range(1, 6):
        metrics.write({"step": step, "loss": 1.0})
    metrics.write({"step": 5, "validation_loss": 1.0, "name": "a"})
    metrics.sync()
    metrics.close()
    assert metrics.validated == {(5, "a")}
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 6
    assert len(said) == 1


def test_numbers():
    numbers = Numbers()
    row = numbers(
        {"step": 1, "loss": float("nan"), "mfu": None, "skipped": True, "cp": {"4": 1}, "recompute": {"full": 2}, "problem": "x", "measured": []}
    )
    assert row == {
        "step": 1, "skipped": 1.0, "cp/4": 1, "recompute/none": 0, "recompute/selective": 0, "recompute/mlp": 0, "recompute/full": 2,
    }  # fmt: skip


def test_tensorboard_files_have_the_last_life_of_each_step(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for last, steps, life in ((0, range(1, 9), 1.0), (5, range(6, 10), 2.0)):
        setup = config("x", log={"tensorboard": True})
        (tracker,) = open_trackers(setup, tmp_path, last, lambda line: None)
        for step in steps:
            tracker.write({"step": step, "life": life})
        tracker.close()
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(one.step, one.value) for one in found.Scalars("life")] == [(s, 1.0) for s in range(1, 6)] + [(s, 2.0) for s in range(6, 10)]


@pytest.mark.slow
def test_the_real_wandb_keeps_every_row(tmp_path, monkeypatch):
    """C69 and C67 with the package itself, without a key: rows of two lives, and a validation, on the axis of steps."""
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    setup = config("x", log={"wandb": True})
    said: list[str] = []
    for last, steps, life in ((0, range(1, 9), 1), (5, range(6, 10), 2)):
        (tracker,) = open_trackers(setup, tmp_path, last, said.append)
        for step in steps:
            tracker.write({"step": step, "life": life})
        tracker.write({"step": steps[-1], "validation_loss": 2.0, "name": "held out"})
        tracker.close()
    assert not any("WARNING" in line for line in said), said
    assert any("it has no key" in line for line in said)
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    assert len({path.name for path in files}) == 1, "one run"
    rows = [row for path in files for row in _history(path)]
    assert [(row["step"], row["life"]) for row in rows if "life" in row] == [(s, 1) for s in range(1, 9)] + [(s, 2) for s in range(6, 10)]
    assert [row["step"] for row in rows if row.get("validation/held out/loss") == 2.0] == [8, 9]
    numbers = [row["_step"] for row in rows]
    assert numbers == sorted(set(numbers)), "wandb drops rows whose number does not grow"


def _history(path: Path) -> Iterator[dict]:
    """Rows of an offline run: records of protobuf in blocks of 32 KiB, each with checksum, length and kind of piece, after a head of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, piece = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        piece += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            record = wandb_internal_pb2.Record.FromString(piece)
            piece = b""
            if record.WhichOneof("record_type") == "history":
                yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}


def test_the_package_of_a_tracker_is_not_imported_by_the_trainer():
    assert not {"wandb", "tensorboard"} & set(vars(trackers))
