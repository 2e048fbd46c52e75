import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from train_helpers import config, write_corpus

from megadcp.config.check import UserError
from megadcp.config.schema import Config, SourceConfig, TokenizerConfig
from megadcp.data.manifest import Counts, Manifest, Origin
from megadcp.data.tokenizer import open_tokenizer
from megadcp.plan.plan_file import read_plans
from megadcp.train import checkpoint, checkpoint_write, loop, session
from megadcp.train.finish import show_result
from megadcp.train.loop import FAILED, FINISHED, STOPPED, train
from megadcp.train.metrics import MetricsFile, read_metrics
from megadcp.train.run_folder import RunFolder

TIMES = {
    "tokens_per_second",
    "tflops",
    "memory_bytes",
    "data_seconds",
    "plan_seconds",
    "wait_seconds",
    "measured_seconds",
    "bubble",
    "slowest_lane",
    "slowest_seconds",
    "update_seconds",
    "seconds",
    "measured",
}
KEYS = {
    "step", "tokens", "documents", "loss", "grad_norm", "lr", "tokens_per_second", "padded_share", "tflops", "mfu", "memory_bytes", "data_seconds",
    "plan_seconds", "wait_seconds", "predicted_seconds", "measured_seconds",
}  # fmt: skip


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(prefix, tmp_path_factory):
    """A finished run of 20 steps that nothing has interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert train(config(prefix), folder) == FINISHED
    return folder


def rows_of(folder: Path) -> list[dict]:
    """What does not depend on the clock."""
    return [{key: value for key, value in row.items() if key not in TIMES} for row in read_metrics(RunFolder(folder).metrics)]


def assert_same_run(folder: Path, expected: Path) -> None:
    """Metrics, weights, moments and random states are equal bit for bit."""
    assert rows_of(folder) == rows_of(expected)
    one, two = (checkpoint.newest(RunFolder(path), pytest.fail) for path in (folder, expected))
    assert one.step == two.step
    for name in ("model", "optimizer"):
        found, wanted = one.tensors(name), two.tensors(name)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())
    same = ("step", "tokens", "documents", "skipped", "skipped_in_a_row", "updates", "order", "tokenizer", "ranks", "layout")
    assert {key: one.meta[key] for key in same} == {key: two.meta[key] for key in same}
    assert [plan.step for plan in read_plans(folder / "plans.jsonl")] == list(range(one.step))


def stop_at(monkeypatch, step: int, number: int) -> None:
    """Send this process a signal while the given step is being logged."""
    write = MetricsFile.write

    def stopping(self, row):
        write(self, row)
        if row["step"] == step and "validation_loss" not in row:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(MetricsFile, "write", stopping)


def test_a_finished_run_has_everything(whole, capsys):
    rows = read_metrics(whole / "metrics.jsonl")
    steps = [row for row in rows if "validation_loss" not in row]
    assert [row["step"] for row in steps] == list(range(1, 21))
    assert all(row.keys() >= KEYS for row in steps)
    assert all(row["mfu"] is None and row["tokens_per_second"] > 0 and row["padded_share"] == 0 for row in steps)
    assert all(later["tokens"] > row["tokens"] and later["documents"] > row["documents"] for row, later in itertools.pairwise(steps))
    assert all([slot for slot, _, _ in row["measured"]] == list(range(row["microbatches"])) for row in steps)
    assert [(row["step"], row["name"]) for row in rows if "validation_loss" in row] == [(10, "words"), (20, "words")]
    losses = [row["loss"] for row in steps]
    assert losses[0] == pytest.approx(math.log(260), abs=0.1)
    assert losses[-1] < 0.6 * losses[0]
    result = json.loads((whole / "result.json").read_text())
    assert (result["steps"], result["tokens"], result["final_loss"]) == (20, steps[-1]["tokens"], losses[-1])
    assert result["validation_loss"] == {"words": rows[-1]["validation_loss"]}
    assert 1 < result["unigram_entropy"]["words"] < math.log(260)
    assert result["checkpoint"] == "checkpoints/step-00000020"
    for name in ("loss.svg", "lengths.svg", "sample.txt", "plans.jsonl"):
        assert (whole / name).stat().st_size > 0
    assert (whole / "loss.svg").read_text().startswith("<svg")
    assert "def " in (whole / "sample.txt").read_text()
    show_result(whole, print)
    assert "Run test is finished: 20 steps" in capsys.readouterr().out


def test_it_says_what_it_decided_and_how_it_goes(prefix, tmp_path, capsys):
    assert train(config(prefix, run={"steps": 2}), tmp_path / "run") == FINISHED
    said = capsys.readouterr().out
    for start in ("model: 2 layers", "tokenizer: bytes", "data: words", "plan: policy joint", "learning rate: cosine", "device: CPU", "mfu: not"):
        assert any(line.startswith(start) for line in said.splitlines()), start
    line = next(line for line in said.splitlines() if line.startswith("step 2/2"))
    fields = [field.split()[0] if not field[0].isdigit() else field.split()[-1] for field in line.split(" | ")]
    assert fields == ["step", "loss", "gnorm", "lr", "tok/s", "GFLOP/s", "mem", "data", "plan", "wait", "pred/meas", "bubble", "pad", "rc", "eta"]


def test_a_second_call_changes_nothing(prefix, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
    assert train(config(prefix), tmp_path / "run") == FINISHED
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()} == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_and_resumed_equals_unbroken(prefix, whole, tmp_path, monkeypatch, number):
    handlers = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)]
    with monkeypatch.context() as patch:
        stop_at(patch, 10, number)
        assert train(config(prefix), tmp_path / "run") == STOPPED
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert checkpoint.newest(RunFolder(tmp_path / "run"), pytest.fail).step == 10
    assert not (tmp_path / "run" / "result.json").exists()
    assert train(config(prefix), tmp_path / "run") == FINISHED
    assert_same_run(tmp_path / "run", whole)


def drawing(monkeypatch, drawn: list) -> None:
    """Every step draws from all generators, as a layer of somebody's model might."""
    run_step = loop.run_step

    def step(*arguments, **named):
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
        return run_step(*arguments, **named)

    monkeypatch.setattr(loop, "run_step", step)


def test_random_states_come_back(prefix, tmp_path, monkeypatch):
    """Also when something draws between the restart and the restored state."""
    lives = []
    for name, stops in (("unbroken", [20]), ("broken", [10, 20])):
        drawn: list = []
        for stop in stops:
            with monkeypatch.context() as patch:
                drawing(patch, drawn)
                if stop < 20:
                    stop_at(patch, stop, signal.SIGTERM)
                train(config(prefix), tmp_path / name)
            random.random(), np.random.rand(), torch.rand(1)
        lives.append(drawn)
    assert len(lives[0]) == 20
    assert lives[0] == lives[1]
    assert_same_run(tmp_path / "broken", tmp_path / "unbroken")


def test_bf16_resumes_bit_for_bit_too(prefix, tmp_path, monkeypatch):
    setup = config(prefix, precision={"format": "bf16"}, run={"steps": 6}, checkpoint={"every": 3})
    assert train(setup, tmp_path / "whole") == FINISHED
    with monkeypatch.context() as patch:
        stop_at(patch, 4, signal.SIGTERM)
        assert train(setup, tmp_path / "run") == STOPPED
    assert train(setup, tmp_path / "run") == FINISHED
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    kept = checkpoint.newest(RunFolder(tmp_path / "run"), pytest.fail)
    assert kept.tensors("model")["embedding.weight"].dtype == torch.bfloat16
    assert kept.tensors("optimizer")["master.embedding.weight"].dtype == torch.float32


def in_a_child(setup: Config, folder: Path, kill: int) -> None:
    """Train in a child that dies by SIGKILL when it has logged step `kill`."""
    child = os.fork()
    if not child:
        write = MetricsFile.write

        def dying(self, row):
            write(self, row)
            if row["step"] == kill:
                os.kill(os.getpid(), signal.SIGKILL)

        MetricsFile.write = dying
        try:
            train(setup, folder)
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


@pytest.mark.parametrize("kill", [3, 10, 13])
def test_killed_and_resumed_equals_unbroken(prefix, whole, tmp_path, kill, capsys):
    in_a_child(config(prefix), tmp_path / "run", kill)
    assert len(rows_of(tmp_path / "run")) >= kill
    assert train(config(prefix), tmp_path / "run") == FINISHED
    assert_same_run(tmp_path / "run", whole)
    assert f"rows after step {kill // 5 * 5 - (kill == 10) * 5} removed" in capsys.readouterr().out


@pytest.mark.slow
def test_killed_at_thirty_random_times(prefix, whole, tmp_path):
    """C57 with a clock: whatever the moment, the run goes on from a complete checkpoint and ends as if nothing had happened."""
    import time

    setup, delays = config(prefix, checkpoint={"every": 1}), random.Random(0)
    assert train(setup, tmp_path / "whole") == FINISHED
    resumed = 0
    for attempt in range(30):
        folder = tmp_path / f"run{attempt}"
        child = os.fork()
        if not child:
            os.close(1)
            train(setup, folder)
            os._exit(0)
        time.sleep(delays.uniform(0.05, 1.0))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        resumed += bool(checkpoint.saved(RunFolder(folder)))
        assert train(setup, folder) == FINISHED
        assert_same_run(folder, tmp_path / "whole")
    assert resumed > 5


def test_a_damaged_checkpoint_falls_back_loudly(prefix, whole, tmp_path, capsys):
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    newest = tmp_path / "run" / "checkpoints" / "step-00000020" / "rank-00000.safetensors"
    os.truncate(newest, newest.stat().st_size // 2)
    assert train(config(prefix), tmp_path / "run") == FINISHED
    assert_same_run(tmp_path / "run", whole)
    said = capsys.readouterr().out
    assert "WARNING" in said
    assert "going on after step 15 of 20" in said


# ---------------------------------------------------------------------------------------------------------- planning ahead
@pytest.fixture
def workers(monkeypatch):
    """The planning processes of the runs of a test."""
    made = []

    class Kept(loop.PlanWorker):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(loop, "PlanWorker", Kept)
    return made


def kill_at(monkeypatch, workers: list, step: int) -> None:
    """The planning process is killed while the given step is being logged."""
    write = MetricsFile.write

    def killing(self, row):
        write(self, row)
        if row["step"] == step and "validation_loss" not in row:
            os.kill(workers[-1].pid, signal.SIGKILL)

    monkeypatch.setattr(MetricsFile, "write", killing)


@pytest.mark.usefixtures("time_limit")
@pytest.mark.parametrize("plan", [{"worker": "thread"}, {"ahead": 0}, {"ahead": 7}, {"compress": True}])
def test_who_plans_and_how_plans_are_kept_changes_nothing(prefix, whole, tmp_path, workers, capsys, plan):
    assert train(config(prefix, plan=plan), tmp_path / "run") == FINISHED
    assert rows_of(tmp_path / "run") == rows_of(whole)
    assert list(read_plans(tmp_path / "run")) == list(read_plans(whole))
    alone = plan.get("worker") == "thread" or plan.get("ahead") == 0
    assert [worker.pid is None for worker in workers] == [alone]
    said = {"worker": "2 steps ahead in a thread,", "ahead": "when it is needed,", "compress": "2 steps ahead in a process of its own,"}
    assert {**said, "ahead": "7 steps ahead in a process of its own," if plan.get("ahead") else said["ahead"]}[
        next(iter(plan))
    ] in capsys.readouterr().out


@pytest.mark.usefixtures("time_limit")
def test_a_planning_process_that_dies_ends_the_run(prefix, whole, tmp_path, workers, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        kill_at(patch, workers, 7)
        assert train(config(prefix), tmp_path / "run") == FAILED
    said = capsys.readouterr().out
    assert re.search(r"FAILED after step (7|8|9|10|11): the planning process [0-9]+ was killed by SIGKILL \(9\)", said)
    assert "plan.worker_death=replace" in said
    assert train(config(prefix), tmp_path / "run") == FINISHED
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.usefixtures("time_limit")
def test_a_planning_process_that_dies_is_replaced(prefix, whole, tmp_path, workers, monkeypatch, capsys):
    kill_at(monkeypatch, workers, 7)
    assert train(config(prefix, plan={"worker_death": "replace"}), tmp_path / "run") == FINISHED
    assert_same_run(tmp_path / "run", whole)
    assert list(read_plans(tmp_path / "run")) == list(read_plans(whole))
    assert capsys.readouterr().out.count("WARNING: the planning process") == 1


@pytest.mark.usefixtures("time_limit")
@pytest.mark.parametrize("began", [True, False])
def test_a_run_keeps_the_kind_of_plans_it_began_with(prefix, whole, tmp_path, monkeypatch, capsys, began):
    with monkeypatch.context() as patch:
        stop_at(patch, 10, signal.SIGTERM)
        assert train(config(prefix, plan={"compress": began}), tmp_path / "run") == STOPPED
    assert train(config(prefix, plan={"compress": not began}), tmp_path / "run") == FINISHED
    kind, other = ("plans.jsonl.zst", "plans.jsonl") if began else ("plans.jsonl", "plans.jsonl.zst")
    assert not (tmp_path / "run" / other).exists()
    assert list(read_plans(tmp_path / "run" / kind)) == list(read_plans(whole))
    said = capsys.readouterr().out
    assert f"this one goes on with {tmp_path / 'run' / kind}" in said
    assert f"plans     {tmp_path / 'run' / kind}" in said


def test_packed_plans_without_zstandard_are_refused_at_once(prefix, tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    monkeypatch.setitem(sys.modules, "zstandard", None)
    refuses(config(prefix, plan={"compress": True}), tmp_path / "run", "pip install zstandard")


# ------------------------------------------------------------------------------------------------------------ bad steps
def spoil(monkeypatch, steps: set[int], value: float) -> None:
    """A gradient of one parameter becomes `value` in the given steps."""
    new_state = session.new_state

    def made(*arguments):
        state = new_state(*arguments)
        weight = state.model.layers["1"].mlp.down.weight
        weight.register_hook(lambda gradient: gradient * value if state.progress.step in steps else gradient)
        return state

    monkeypatch.setattr(session, "new_state", made)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_bad_steps_are_skipped_and_logged(prefix, whole, tmp_path, monkeypatch, capsys, value):
    spoil(monkeypatch, {4, 5, 12}, value)
    assert train(config(prefix), tmp_path / "run") == FINISHED
    rows = [row for row in rows_of(tmp_path / "run") if "validation_loss" not in row]
    assert [row["step"] for row in rows if row["skipped"]] == [4, 5, 12]
    assert [row["grad_norm"] for row in rows if row["skipped"]] == [None] * 3
    assert rows[:3] == rows_of(whole)[:3]
    kept = checkpoint.newest(RunFolder(tmp_path / "run"), pytest.fail)
    assert (kept.meta["updates"], kept.meta["skipped"], kept.meta["skipped_in_a_row"]) == (17, 3, 0)
    assert capsys.readouterr().out.count("SKIPPED: the gradient is not finite") == 3
    assert json.loads((tmp_path / "run" / "result.json").read_text())["skipped"] == 3


def test_too_many_bad_steps_end_the_run(prefix, tmp_path, monkeypatch, capsys):
    spoil(monkeypatch, set(range(7, 99)), math.nan)
    assert train(config(prefix, optim={"max_skipped": 4}), tmp_path / "run") == FAILED
    rows = [row for row in rows_of(tmp_path / "run") if "validation_loss" not in row]
    assert [row["skipped"] for row in rows] == [False] * 6 + [True] * 4
    said = capsys.readouterr().out
    assert "FAILED: 4 steps in a row" in said
    assert "the last checkpoint is step 5" in said
    assert not (tmp_path / "run" / "result.json").exists()


# --------------------------------------------------------------------------------------------------------- rates, refusals
def test_rates_follow_the_config_across_a_restart(prefix, whole, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        stop_at(patch, 10, signal.SIGTERM)
        train(config(prefix), tmp_path / "run")
    assert train(config(prefix, optim={"lr": 2e-2}), tmp_path / "run") == FINISHED
    found, expected = ([row["lr"] for row in rows_of(folder) if "lr" in row] for folder in (tmp_path / "run", whole))
    assert found[:10] == expected[:10]
    assert found[10:] == pytest.approx([2 * rate for rate in expected[10:]])
    assert "setting changed since step 10: optim.lr 0.01 -> 0.02" in capsys.readouterr().out


def refuses(setup: Config, folder: Path, message: str) -> None:
    before = sorted(folder.rglob("*"))
    with pytest.raises(UserError, match=message):
        train(setup, folder)
    assert sorted(folder.rglob("*")) == before


def test_other_data_is_refused(prefix, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    refuses(config(prefix, data={"seed": 9}), tmp_path / "run", "the data order has changed")


def test_another_model_is_refused_by_name(prefix, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    refuses(config(prefix, model={"ffn": 48}), tmp_path / "run", r"layers.0.mlp.down.weight is float32 \[32, 64\], expected float32 \[32, 48\]")
    refuses(config(prefix, precision={"format": "bf16"}), tmp_path / "run", "embedding.weight is float32")


def test_a_vocabulary_that_is_too_small(prefix, tmp_path):
    (tmp_path / "run").mkdir()
    refuses(config(prefix, model={"vocab": 200}), tmp_path / "run", "model.vocab=200 is below the tokenizer's 257")
    untold = config(prefix, model={"vocab": 200}, data={"tokenizer": TokenizerConfig()})
    with pytest.raises(UserError, match=r"the data has token 2[0-9]+, but model\.vocab=200"):
        train(untold, tmp_path / "run")


def test_a_checkpoint_that_can_not_be_written_is_a_failure(prefix, tmp_path, monkeypatch, capsys):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_write, "write_tensors", full)
    assert train(config(prefix), tmp_path / "run") == FAILED
    said = capsys.readouterr().out
    # not at once: the save runs while training goes on
    assert re.search(r"FAILED after step [5-9]: the checkpoint of step 5 could not be written: \[Errno 28\] No space left on device; free some", said)
    assert said.count("FAILED") == 1
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_wrong_device_and_format(prefix, tmp_path):
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="torch sees no GPU"):
            train(config(prefix, cluster={"device": "cuda"}), tmp_path / "run")
    with pytest.raises(UserError, match=r"precision\.backend=te can't run here: .* set precision\.backend=torch"):
        train(config(prefix, precision={"format": "bf16", "backend": "te"}, cluster={"device": "cpu"}), tmp_path / "run")


def test_threads_are_put_back(prefix, tmp_path):
    before = torch.get_num_threads()
    train(config(prefix, run={"steps": 1}, cluster={"threads": before + 1}), tmp_path / "run")
    assert torch.get_num_threads() == before


def test_stream_mode_runs_to_its_end(prefix, tmp_path, capsys):
    setup = config(prefix, data={"mode": "stream", "max_length": 64}, run={"steps": 4}, plan={"pack_tokens": 0})
    assert train(setup, tmp_path / "run") == FINISHED
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["steps"] == 4
    assert 1 < result["unigram_entropy"]["words"] < math.log(260)
    assert "Run test is finished: 4 steps" in capsys.readouterr().out


def test_data_of_another_tokenizer_is_refused(prefix, tmp_path):
    """The manifest beside the data says what made it; ids of another tokenizer mean other text."""
    for name, tokenizer in (("ours", open_tokenizer("bytes", "").fingerprint), ("theirs", "f" * 64)):
        for ending in ("bin", "idx"):
            shutil.copy(f"{prefix}.{ending}", tmp_path / f"{name}.{ending}")
        origin = Origin(("text",), {"fingerprint": tokenizer}, True, (), (0, 1))
        Manifest("text", "uint16", Counts(), 0, origin).save(tmp_path / name)
    ours, theirs = (SourceConfig(str(tmp_path / name), 1.0, name) for name in ("ours", "theirs"))
    (tmp_path / "run").mkdir()
    refuses(config(prefix, data={"train": (theirs,)}), tmp_path / "run", "theirs was made by tokenizer ffffffffffff")
    refuses(config(prefix, data={"validation": (theirs,)}), tmp_path / "run", "theirs was made by tokenizer ffffffffffff")
    untold = TokenizerConfig()
    refuses(config(prefix, data={"train": (ours, theirs), "tokenizer": untold}), tmp_path / "run", "theirs was made by tokenizer ffffffffffff")
    setup = config(prefix, data={"train": (ours,)}, run={"steps": 1})
    assert train(setup, tmp_path / "run") == FINISHED
