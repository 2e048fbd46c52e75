"""What a run leaves for those who watch it: one tracked run whatever the layout, numbers over all ranks, timelines, profiles."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_wandb import calls, write_fake
from train_helpers import config, write_corpus

from megadcp.config.check import UserError, check
from megadcp.config.run_file import dump_run
from megadcp.config.schema import LogConfig
from megadcp.mesh.coords import Mesh
from megadcp.plan.plan_file import read_plans
from megadcp.train import timeline as record
from megadcp.train.across import Own, across
from megadcp.train.loop import FINISHED, train
from megadcp.train.metrics import read_metrics
from megadcp.train.profiling import StepProfile

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = (
    "import sys; from pathlib import Path; from megadcp.config.run_file import load_run; from megadcp.config.load import reported; "
    "from megadcp.train import entry; sys.exit(reported(lambda: entry.start(load_run(Path(sys.argv[1])))))"
)


def start(setup, folder, path=()):
    """The trainer as a user calls it."""
    folder.mkdir()
    dump_run(setup, folder / "run.yaml")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180, check=False)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """A run of four ranks, tp 2 x pp 2, that is tracked, recorded and profiled; (folder, what it said)."""
    place = tmp_path_factory.mktemp("four")
    write_fake(place / "fake", "no key")
    log = {"wandb": True, "timeline_every": 2, "profile_steps": (2, 1), "profile_ranks": (3,), "every": 1}
    run = {"name": "run", "folder": str(place / "runs"), "steps": 4, "validate_every": 2, "validate_tokens": 200, "sample_prompt": ""}
    setup = config(write_corpus(place), run=run, log=log, cluster={"processes": 4}, parallel={"tp": 2, "pp": 2}, checkpoint={"every": 0})
    done = start(setup, place / "asked", [place / "fake"])
    assert done.returncode == 0, done.stderr
    return place / "runs" / "run", done.stdout


def test_four_ranks_are_one_tracked_run(four):
    """C67: tp 2 x pp 2; the loss, which the last stage has, is there; training and validation on one axis, no row lost."""
    folder, said = four
    assert len(calls(folder, "init")) == 1
    logged = [one["row"] for one in calls(folder, "log")]
    assert [row["step"] for row in logged if "loss" in row] == [1, 2, 3, 4]
    assert all(3 < row["loss"] < 8 for row in logged if "loss" in row)
    assert [row["step"] for row in logged if "validation/words/loss" in row] == [2, 4]
    numbers = [one["step"] for one in calls(folder, "log")]
    assert numbers == sorted(set(numbers))
    assert [(one["name"], one["step_metric"]) for one in calls(folder, "define_metric")] == [("step", None), ("*", "step")]
    assert len(calls(folder, "finish")) == 1
    assert said.count("wandb: run ") == 1


def test_rows_have_what_watchers_ask_for(four):
    folder, said = four
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]
    for row, plan in zip(rows, read_plans(folder / "plans.jsonl"), strict=True):
        assert row["bound_ratio"] == pytest.approx(plan.predicted.seconds / plan.predicted.lower_bound_seconds)
        assert row["static_gain"] == pytest.approx(plan.predicted.static_seconds / plan.predicted.seconds)
        assert 0 <= row["bubble"] < 1
        assert row["slowest_lane"] == 0
        assert 0 < row["slowest_seconds"] <= row["measured_seconds"] * 1.001
        assert sum(row["cp"].values()) == sum(row["recompute"].values()) == row["microbatches"] == len(plan.microbatches)
        assert row["memory_bytes"] > 10**7
    assert " | bubble " in said
    assert "GFLOP/s/rank" in said


def test_every_rank_is_in_the_timeline(four):
    folder, _ = four
    assert record.recorded_steps(folder) == [2, 4]
    plan = list(read_plans(folder / "plans.jsonl"))[3]
    row = record.recorded(folder, 4)
    assert len(row["actions"]) == 4
    for own in row["actions"]:
        assert {kind for _, kind, _, _, _ in own} == {"F", "B"}
        ends = [end for *_, end in own]
        assert ends == sorted(ends), "a rank does one thing after the other"
    found = record.measured_timeline(plan, row)
    assert len(found.events) == 2 * 2 * len(plan.microbatches)
    measured = next(each["measured_seconds"] for each in read_metrics(folder / "metrics.jsonl") if each["step"] == 4 and "loss" in each)
    assert found.makespan >= measured * 0.999  # from the common begin, not from the first action


def test_the_chosen_rank_has_a_profile_with_the_actions_of_the_plan(four):
    folder, _ = four
    (path,) = (folder / "profile").iterdir()
    assert path.name == "steps-2-2-rank-3.json"
    names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    assert "F0 cp1" in names
    assert "B0 cp1" in names


# ------------------------------------------------------------------------------------------------------------ by arithmetic
def test_numbers_over_all_ranks():
    """2 stages, 2 lanes, tp 2: rank = (pp, lane, tp)."""
    busy = [1.0, 1.0, 2.0, 2.0, 1.5, 1.5, 2.5, 3.0]
    table = np.array([Own(0.0, 0.0, 0.0, 3.9 + 0.1 * (rank == 5), busy[rank], 0.1 * rank, 100.0 + rank) for rank in range(8)])
    found = across(table, Mesh(2, 2, 2))
    assert found.seconds == 4.0
    assert found.bubble == pytest.approx(1 - sum(busy) / 8 / 4.0)
    assert (found.slowest_lane, found.slowest_seconds) == (1, 3.0)
    assert found.data_seconds == pytest.approx(0.7)
    assert found.memory_bytes == 107
    idle = across(np.array([Own(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)]), Mesh(1))
    assert (idle.bubble, idle.slowest_lane) == (0.0, 0)


@pytest.mark.parametrize(
    ("window", "steps", "name", "told"),
    [((3, 2), range(1, 8), "steps-3-4-rank-0.json", "steps 3 to 4"), ((1, 1), range(1, 3), "steps-1-1-rank-0.json", "steps 1 to 1"),
     ((2, 50), range(1, 5), "steps-2-51-rank-0.json", "steps 2 to 4"), ((9, 1), range(1, 5), None, None)],
)  # fmt: skip
def test_a_window_of_steps_is_profiled(tmp_path, window, steps, name, told):
    said: list[str] = []
    with StepProfile(LogConfig(profile_steps=window), tmp_path, 0, torch.device("cpu"), said.append) as profile:
        for step in steps:
            profile.begin(step)
            with torch.profiler.record_function(f"step {step}"):
                torch.zeros(2)
            profile.end(step)
    if name is None:
        assert said == []
        assert list(tmp_path.iterdir()) == []
        return
    assert len(said) == 1
    assert told in said[0]
    events = json.loads((tmp_path / "profile" / name).read_text())["traceEvents"]
    found = {event["name"] for event in events if str(event.get("name")).startswith("step ")}
    assert found == {f"step {step}" for step in steps if window[0] <= step < window[0] + window[1]}


def test_a_profile_that_can_not_be_written_is_told(tmp_path):
    (tmp_path / "profile").write_text("a file")
    said: list[str] = []
    with StepProfile(LogConfig(profile_steps=(1, 1)), tmp_path, 0, torch.device("cpu"), said.append) as profile:
        profile.begin(1)
        profile.end(1)
    assert len(said) == 1
    assert said[0].startswith("WARNING: the profile could not be written")


def test_settings_that_make_no_sense():
    for log, told in (
        ({"profile_steps": (3,)}, r"log.profile_steps=\[3\] is no window; legal here: \[FIRST,COUNT\]"),
        ({"profile_steps": (0, 2)}, "is no window"),
        ({"profile_ranks": (1,)}, "log.profile_ranks names rank 1, but there are 1; legal here: 0 to 0"),
        ({"wandb_mode": "shared"}, "legal here: auto, online, offline"),
        ({"tracker_timeout_s": 0.0}, "log.tracker_timeout_s=0.0 is too small"),
    ):
        with pytest.raises(UserError, match=told):
            check(config("x", log=log))


def test_a_hanging_tracker_does_not_keep_a_run(tmp_path, monkeypatch, capsys):
    write_fake(tmp_path / "fake", "init hangs")
    monkeypatch.syspath_prepend(str(tmp_path / "fake"))
    log = {"wandb": True, "tracker_timeout_s": 1.0}
    run = {"steps": 3, "validate_every": 0, "sample_prompt": ""}
    assert train(config(write_corpus(tmp_path), run=run, log=log), tmp_path / "run") == FINISHED
    said = capsys.readouterr().out
    assert said.count("did not finish in 1 s, and was stopped") == 1
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in row] == [1, 2, 3]
    assert "Run test is finished" in said


def test_a_missing_package_is_refused_before_anything_is_made(tmp_path):
    """The trainer as a user calls it, where wandb can't be found."""
    block = tmp_path / "block"
    block.mkdir()
    (block / "sitecustomize.py").write_text(
        "import importlib.util\nfind = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name == 'wandb' else find(name, *more)\n"
    )
    setup = config(write_corpus(tmp_path), run={"name": "run", "folder": str(tmp_path / "runs")}, log={"wandb": True})
    done = start(setup, tmp_path / "asked", [block])
    assert done.returncode == 2
    assert 'log.wandb=true needs the package wandb: pip install "megadcp[wandb]"' in done.stderr
    assert not (tmp_path / "runs").exists()
