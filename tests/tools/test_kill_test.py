"""tools/kill_test.py: twenty kills hold; it sees every moment it names, and finds what a bad restart would leave."""

import dataclasses
import importlib
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from megadcp.config.schema import CheckpointConfig
from megadcp.parallel.boxes import Box
from megadcp.train import checkpoint, checkpoint_save, session
from megadcp.train.checkpoint import Saver, newest
from megadcp.train.loop import FINISHED, train
from megadcp.train.metrics import MetricsFile
from megadcp.train.run_folder import RunFolder, write_text

TOOLS = Path(__file__).parents[2] / "tools"
NAMES = ("kill_test", "kill_test_check", "kill_test_lives", "kill_test_watch", "benchmark")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="inotify and orphans that come back are Linux's")


@pytest.fixture(scope="module")
def tools():
    """The tool's modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOOLS))
        for name in NAMES:
            patch.delitem(sys.modules, name, raising=False)
        yield {name: importlib.import_module(name) for name in NAMES}
        for name in NAMES:
            patch.delitem(sys.modules, name, raising=False)


@pytest.fixture(scope="module")
def finished(tools, tmp_path_factory):
    """A run of four steps that nobody disturbed, alone on its machine."""
    place = tmp_path_factory.mktemp("kill-test")
    source = f"data.train=[{{prefix: {tools['kill_test'].write_corpus(place)}, name: numbers}}]"
    settings = (*tools["kill_test"].SETTINGS, source, "run.steps=4", "cluster.processes=1", "checkpoint.keep_last=1", f"run.folder={place}")
    made = tools["kill_test"].compose(settings)
    assert train(made, place / made.run.name) == FINISHED
    (place / made.run.name / ".lock").touch()
    return place / made.run.name, tools["kill_test_check"].Unbroken.read(place / made.run.name, 4), made


# ------------------------------------------------------------------------------------------------------------ what it sees
def save(run, steps):
    saver = Saver(run, CheckpointConfig(keep_last=1), lambda text: None)
    for step in steps:
        saver.save(step, [Box("model.w", (4,), (0,), torch.zeros(4))], {"step": step})
        saver.finish()
    saver.close()


def test_every_moment_that_it_waits_for_happens(tools, tmp_path):
    """A save that is named otherwise tomorrow must not make the tool wait for nothing."""
    run, moments = RunFolder(tmp_path / "run"), tools["kill_test_watch"].MOMENTS
    seen, over = [], threading.Event()
    with tools["kill_test_watch"].Watch(run.path) as watch:

        def look():
            while not over.wait(0.0005):  # files of a draft are seen from the moment on at which the draft was
                seen.extend(watch.changes())

        thread = threading.Thread(target=look)
        thread.start()
        for step in range(1, 200, 2):
            save(run, [step, step + 1])
            metrics = MetricsFile(run.metrics, step)
            metrics.write({"step": step + 2})
            metrics.close()
            (run.path / "plans.jsonl").write_text("a plan")
            write_text(run.path / "run.yaml", "settings")
            (run.checkpoints / ".step-00000004.draft-ab").mkdir()
            newest(run, pytest.fail, repair=True)
            MetricsFile(run.metrics, step).close()
            if all(any(tools["kill_test_watch"].Moment(name, 1, 0.0).matches(change) for change in seen) for name in moments):
                break
        over.set()
        thread.join()
    for name in moments:
        moment = tools["kill_test_watch"].Moment(name, 1, 0.0)
        assert any(moment.matches(change) for change in seen), name
    assert not any(tools["kill_test_watch"].Moment("any time", 0, 0.1).matches(change) for change in seen)


def test_moments_are_drawn_alike_and_of_every_kind(tools):
    draw = tools["kill_test_watch"].draw_moment
    drawn = [[draw(rng, 3.0) for _ in range(600)] for rng in (tools["kill_test"].random.Random(5), tools["kill_test"].random.Random(5))]
    assert drawn[0] == drawn[1]
    assert {moment.name for moment in drawn[0]} == {*tools["kill_test_watch"].MOMENTS, "any time"}
    assert all(0 <= moment.seconds <= (3.0 if moment.name == "any time" else 0.02) for moment in drawn[0])


# ----------------------------------------------------------------------------------------------------------- what it finds
def replace_in(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def first_loss(folder):
    return f'"loss": {json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["loss"]}'


def damage_weights(folder):
    """Every weight is one; the checkpoint itself is whole."""
    run = RunFolder(folder)
    found = newest(run, pytest.fail)
    tensors = {f"model.{name}": tensor for name, tensor in found.tensors("model").items()} | found.tensors("optimizer")
    tensors["model.norm.weight"].mul_(1 + 2**-23)
    shutil.rmtree(found.path)
    saver = Saver(run, CheckpointConfig(), lambda text: None)
    ranks = found.meta["ranks"]["values"][0]
    saver.save(4, [Box(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor) for name, tensor in tensors.items()], found.meta, ranks)
    saver.finish()


WRONG_AFTER_A_KILL = {
    "a checkpoint without its manifest": (lambda folder: (folder / "checkpoints/step-00000004/manifest.json").unlink(), "is not complete"),
    "half a file": (lambda folder: os.truncate(folder / "checkpoints/step-00000004/rank-00000.safetensors", 100), "is not complete"),
    "a pointer to nothing": (
        lambda folder: (folder / "latest").write_text("checkpoints/step-00000003\n"),
        "the pointer names checkpoints",
    ),
    "no checkpoint any more": (lambda folder: shutil.rmtree(folder / "checkpoints/step-00000004"), "the newest checkpoint was step 4 and is step -1"),
    "another loss": (
        lambda folder: replace_in(folder / "metrics.jsonl", first_loss(folder), '"loss": 4.0'),
        "step 1: loss 4.0 instead",
    ),
    "a step twice": (lambda folder: replace_in(folder / "metrics.jsonl", '"step": 2', '"step": 1'), "row 2 of metrics.jsonl, step 1"),
}
WRONG_AT_THE_END = {
    "a draft": (lambda folder: (folder / "checkpoints/.step-00000003.draft-ab").mkdir(), "checkpoints/.step-00000003.draft-ab is left over"),
    "a file under another name": (lambda folder: (folder / ".latest.123").touch(), ".latest.123 is left over"),
    "an old checkpoint": (lambda folder: (folder / "checkpoints/step-00000002").mkdir(), "checkpoints/step-00000002 is left over"),
    "no sample": (lambda folder: (folder / "loss.svg").unlink(), "loss.svg is missing"),
    "an owner": (lambda folder: (folder / ".lock").write_text("{}"), "still names an owner"),
    "no last row": (
        lambda folder: (folder / "metrics.jsonl").write_text("\n".join((folder / "metrics.jsonl").read_text().splitlines()[:-1]) + "\n"),
        "metrics.jsonl has 4 rows, the unbroken run's 5",
    ),
    "a plan too few": (
        lambda folder: (folder / "plans.jsonl").write_text("\n".join((folder / "plans.jsonl").read_text().splitlines()[:-1]) + "\n"),
        "plans.jsonl has the steps [0, 1, 2]",
    ),
    "a bit of a weight": (damage_weights, "norm.weight of the last checkpoint differs"),
}


def test_a_good_run_has_no_faults(tools, finished):
    folder, unbroken, _ = finished
    check = tools["kill_test_check"]
    assert [*check.after_kill(folder, unbroken, 4), *check.at_end(folder, unbroken)] == []
    assert check.unfinished(folder) == {}
    assert check.place_of_death(folder, {}) == "nothing under way"


@pytest.mark.parametrize("what", [*WRONG_AFTER_A_KILL, *WRONG_AT_THE_END])
def test_faults_are_found(tools, finished, tmp_path, what):
    folder = Path(shutil.copytree(finished[0], tmp_path / "run"))
    break_it, message = (WRONG_AFTER_A_KILL | WRONG_AT_THE_END)[what]
    break_it(folder)
    check = tools["kill_test_check"]
    found = list(check.after_kill(folder, finished[1], 4) if what in WRONG_AFTER_A_KILL else check.at_end(folder, finished[1]))
    assert any(message in each for each in found), found


def test_what_is_left_is_named(tools, tmp_path):
    check = tools["kill_test_check"]
    for name in (".step-2.draft-a/rank-00000.safetensors", ".step-4.draft-a/manifest.json", ".step-1.removed/meta.json", ".probe-0", ".lock"):
        path = tmp_path / "checkpoints" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / ".latest.77").touch()
    assert check.unfinished(tmp_path) == {
        ".latest.77": "latest under another name",
        "checkpoints/.probe-0": "a probe of the disk",
        "checkpoints/.step-1.removed": "an old checkpoint of which 1 files were left",
        "checkpoints/.step-2.draft-a": "a draft with 1 files of ranks",
        "checkpoints/.step-4.draft-a": "a draft with its manifest",
    }


def test_memory_that_nobody_has_open_is_forgotten(tools):
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm here")
    check, before = tools["kill_test_check"], tools["kill_test_check"].shared_memory()
    path = Path(f"/dev/shm/kill-test-{os.getpid()}")
    try:
        with path.open("w"):
            assert path.name not in check.forgotten_memory(before)
        assert path.name in check.forgotten_memory(before)
    finally:
        path.unlink()


# ------------------------------------------------------------------------------------------------------------------- kills
def killing(rank, world, arguments, repair):
    """In a process of its own, which takes its orphans. repair=False: restarts clean nothing up."""
    sys.path.insert(0, str(TOOLS))
    tool = importlib.import_module("kill_test")
    if not repair:
        checkpoint.remove_leftovers = checkpoint_save.remove_leftovers = session.checkpoint.remove_leftovers = lambda run: None
    return tool.main(arguments)


@pytest.mark.slow
@pytest.mark.usefixtures("time_limit")
def test_a_restart_that_does_not_clean_up_is_found(tmp_path):
    arguments = ["--kills", "12", "--seed", "3", "--every-cold", "0", "--keep", str(tmp_path / "runs"), "--out", str(tmp_path)]
    assert run_ranks(1, killing, arguments, False, timeout_s=110, connect=False) == [1]
    found = json.loads((tmp_path / "kills.json").read_text())
    assert any("is still there after a restart" in each or "is left over" in each for each in found["failures"])
    assert (tmp_path / "runs" / "runs" / "run-1").is_dir()


@pytest.mark.slow
def test_twenty_kills(tmp_path):
    """C57: as a user calls it."""
    command = [sys.executable, str(TOOLS / "kill_test.py"), "--kills", "20", "--seed", "1", "--out", str(tmp_path)]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "kills.json").read_text())
    assert (len(found["kills_one_by_one"]), found["failures"], found["finished"]) == (20, [], found["runs"])
    assert len({kill["moment"] for kill in found["kills_one_by_one"]}) > 5
    assert "20 kills" in (tmp_path / "kills.md").read_text()
    assert list(tmp_path.glob("kill-test-*")) == []


@pytest.mark.parametrize("arguments", [["--kills", "0"], ["--steps", "3"], ["--keep", "."]])
def test_requests_without_sense(tools, arguments, capsys):
    assert tools["kill_test"].main(arguments) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_its_command_is_the_users(tools, finished):
    lives = tools["kill_test_lives"]
    request = lives.Request(("run.name=x",), dataclasses.replace(finished[2]), Path("log"), Path("tmp"))
    assert request.command[1:] == [str(TOOLS.parent / "pretrain_gpt.py"), "run.name=x"]
