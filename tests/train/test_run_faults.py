"""Faults around a whole run that come from outside: a full disk, the same command twice at once, a clock that is set back."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from train_helpers import config, write_corpus

from megadcp.config.check import UserError
from megadcp.config.load import reported
from megadcp.train import checkpoint_write, entry
from megadcp.train.checkpoint import newest, saved
from megadcp.train.loop import FAILED, FINISHED, train
from megadcp.train.metrics import read_metrics
from megadcp.train.run_folder import RunFolder

CLOCK = ("seconds", "per_second", "measured", "tflops", "memory", "wait", "bubble", "ratio", "gain", "slowest", "busy", "lane", "plan", "data")


def rows_of(folder: Path) -> list[dict]:
    """What does not depend on the clock."""
    return [{key: value for key, value in row.items() if not any(word in key for word in CLOCK)} for row in read_metrics(folder / "metrics.jsonl")]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("data"))


def short(prefix, folder, **changes):
    run = {"name": "run", "folder": str(folder), "steps": 8, "validate_every": 0, "sample_prompt": "", **changes.pop("run", {})}
    return config(prefix, run=run, checkpoint={"every": 2}, plan={"worker": "thread"}, **changes)


@pytest.fixture(scope="module")
def undisturbed(prefix, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    assert train(short(prefix, folder), folder / "run") == FINISHED
    return rows_of(folder / "run")


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of its own, of four megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    if not shutil.which("mount") or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", place], capture_output=True).returncode:
        pytest.skip("only root may mount a file system")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def fill(place: Path) -> None:
    """Leave not a byte on the disk."""
    with open(place / "filler", "wb", buffering=0) as file:
        for size in (4096, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                pass


def full_at(monkeypatch, place: Path, step: int) -> None:
    """The disk is full from this step on."""
    from megadcp.train import loop

    real = loop.run_step

    def filling(engine, plan, *arguments):
        if plan.step == step:
            fill(place)
        return real(engine, plan, *arguments)

    monkeypatch.setattr(loop, "run_step", filling)


@pytest.mark.parametrize("step", [3, 5, 6])
def test_a_disk_that_fills_up_in_mid_run(prefix, undisturbed, tiny_disk, monkeypatch, capsys, step):
    """Rows, plans, checkpoint: whatever hits the end first, the run fails in one line; with space it goes on as if nothing had been."""
    setup = short(prefix, tiny_disk)
    with monkeypatch.context() as patch:
        full_at(patch, tiny_disk, step)
        assert train(setup, tiny_disk / "run") == FAILED
    said = capsys.readouterr().out
    assert len([line for line in said.splitlines() if "FAILED" in line and "No space left on device" in line]) == 1
    kept = newest(RunFolder(tiny_disk / "run"), pytest.fail)
    assert step - 4 < (kept.step if kept else 0) <= step  # the save before may still have been under way
    (tiny_disk / "filler").unlink()
    assert train(setup, tiny_disk / "run") == FINISHED
    assert rows_of(tiny_disk / "run") == undisturbed
    assert [path.name for path in (tiny_disk / "run/checkpoints").iterdir() if path.name.startswith(".")] == []


def test_a_full_disk_before_the_start(prefix, undisturbed, tiny_disk, capsys):
    """A new run leaves nothing that hinders it later; one that goes on touches none of its checkpoints."""
    setup = short(prefix, tiny_disk)
    fill(tiny_disk)
    with pytest.raises(UserError, match=r"run folder .*run can't be written \(No space left on device.*free some space"):
        entry.start(setup)
    (tiny_disk / "filler").unlink()
    assert entry.start(setup) == FINISHED
    assert rows_of(tiny_disk / "run") == undisturbed
    (tiny_disk / "run/result.json").unlink()
    shutil.rmtree(tiny_disk / "run/checkpoints/step-00000008")
    fill(tiny_disk)
    with pytest.raises(UserError, match="free some"):
        entry.start(setup)
    assert newest(RunFolder(tiny_disk / "run"), pytest.fail).step == 6
    (tiny_disk / "filler").unlink()
    assert entry.start(setup) == FINISHED
    assert rows_of(tiny_disk / "run") == undisturbed


def test_files_that_may_not_grow(prefix, undisturbed, tmp_path, monkeypatch, capsys):
    """RLIMIT_FSIZE, in mid-run: as a quota on a file."""
    setup, real = short(prefix, tmp_path), checkpoint_write.write_tensors
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def small(path, *arguments):
        if "step-00000006" in str(path):
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        return real(path, *arguments)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_write, "write_tensors", small)
            assert train(setup, tmp_path / "run") == FAILED
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert capsys.readouterr().out.count("File too large") == 1
    assert [path.name for path in saved(RunFolder(tmp_path / "run"))][-1] == "step-00000004"
    assert train(setup, tmp_path / "run") == FINISHED
    assert rows_of(tmp_path / "run") == undisturbed


def test_a_start_that_was_killed_while_it_wrote_its_settings(prefix, undisturbed, tmp_path):
    """There is no run.yaml yet, only half of one: that is no folder of somebody else."""
    setup, folder = short(prefix, tmp_path), tmp_path / "run"
    folder.mkdir()
    for name in (".lock", ".run.yaml.4711"):
        (folder / name).write_text("run:")
    assert entry.start(setup) == FINISHED
    assert rows_of(folder) == undisturbed
    assert not (folder / ".run.yaml.4711").exists()


# -------------------------------------------------------------------------------------------------------- two at the same time
def started(setup, log: Path) -> int:
    """entry.start in a child."""
    log.touch()
    child = os.fork()
    if child:
        return child
    code = 99
    try:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        torch.set_num_threads(1)
        code = reported(lambda: entry.start(setup))
    except SystemExit as leaving:
        code = leaving.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def code_of(child: int, limit_s: float = 90) -> int:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    raise AssertionError("it hangs")


def test_the_same_command_twice_at_once(prefix, undisturbed, tmp_path):
    """One trains, however close they are; the others say so and touch nothing. A killed one holds nothing."""
    setup = short(prefix, tmp_path)
    children = [started(setup, tmp_path / f"log-{number}") for number in range(3)]
    codes = [code_of(child) for child in children]
    said = [(tmp_path / f"log-{number}").read_text() for number in range(3)]
    assert sorted(codes) in ([0, 0, 0], [0, 0, 2], [0, 2, 2]), said  # one that comes after the end of another shows its result
    assert sum("step 1/8" in text for text in said) == 1
    for code, text in zip(codes, said, strict=True):
        assert code == 0 or text == f"error: another process is training in {tmp_path / 'run'}; wait for it, stop it, or choose another run.name\n"
    assert rows_of(tmp_path / "run") == undisturbed


def test_a_second_one_in_mid_run_is_refused_and_the_first_goes_on(prefix, undisturbed, tmp_path):
    setup = short(prefix, tmp_path, run={"steps": 4000}, optim={"schedule": "constant"})
    first = started(setup, tmp_path / "first")
    end = time.monotonic() + 60
    while len(rows_of(tmp_path / "run")) < 3:
        assert time.monotonic() < end, (tmp_path / "first").read_text()
        time.sleep(0.01)
    with pytest.raises(UserError, match="another process is training"):
        entry.start(setup)
    with pytest.raises(UserError, match="another process is training"):
        entry.start(short(prefix, tmp_path, run={"steps": 5000}, optim={"schedule": "constant"}))
    os.kill(first, signal.SIGTERM)
    assert code_of(first) == 75
    assert "run.steps" not in (tmp_path / "first").read_text()
    third = started(setup, tmp_path / "third")
    time.sleep(0.3)
    os.kill(third, signal.SIGKILL)
    os.waitpid(third, 0)
    steps = [row["step"] for row in rows_of(tmp_path / "run")]
    assert steps == list(range(1, len(steps) + 1))
    fourth = started(setup, tmp_path / "fourth")  # the system has let go of the folder
    end = time.monotonic() + 60
    while "going on after step" not in (tmp_path / "fourth").read_text():
        assert time.monotonic() < end, (tmp_path / "fourth").read_text()
        time.sleep(0.02)
    os.kill(fourth, signal.SIGTERM)
    assert code_of(fourth) == 75


# --------------------------------------------------------------------------------------------------------------------- clock
def test_a_clock_set_back_by_an_hour_in_mid_run(prefix, undisturbed, tmp_path, monkeypatch):
    from megadcp.train import loop

    real_step, real_time, real_ns, back = loop.run_step, time.time, time.time_ns, [0]

    def jumping(engine, plan, *arguments):
        back[0] = 3600 * (plan.step >= 3)
        return real_step(engine, plan, *arguments)

    monkeypatch.setattr(loop, "run_step", jumping)
    monkeypatch.setattr(time, "time", lambda: real_time() - back[0])
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() - back[0] * 10**9)
    assert train(short(prefix, tmp_path), tmp_path / "run") == FINISHED
    assert back == [3600]
    assert rows_of(tmp_path / "run") == undisturbed
    assert all(0 <= row["seconds"] < 60 for row in read_metrics(tmp_path / "run/metrics.jsonl"))
