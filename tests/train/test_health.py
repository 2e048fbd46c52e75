"""Signs of life, bad steps and going back: what is noticed, what is done about it, and that a run goes on as if nothing else had happened."""

import faulthandler
import json
import math
import os
import signal
import time
import types
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from train_helpers import config, write_corpus

from megadcp.config.check import UserError, check
from megadcp.config.schema import HealthConfig
from megadcp.data.order import open_training
from megadcp.train import between_steps, checkpoint, health, loop, run_folder, session
from megadcp.train.health import HUNG, BadSteps, Heart, heart_file, overdue
from megadcp.train.incidents import add_incident, read_incidents
from megadcp.train.loop import FAILED, FINISHED, train
from megadcp.train.metrics import read_metrics
from megadcp.train.run_folder import LOCK, RunFolder, keep_folder


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("data"))


# --------------------------------------------------------------------------------------------------------- signs of life
@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(health, "OTHERS_SECONDS", 0.5)  # the forked processes have it, too


def ended(work, limit_s: float = 40.0) -> int:
    """Exit code of a forked child that runs work(); 0 when it returned."""
    process = os.fork()
    if not process:
        code = 99
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        pid, status = os.waitpid(process, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    raise AssertionError("the child did not end")


def stands_still() -> None:
    time.sleep(60)


def hangs(folder: Path, rank: int, world_size: int, limit: float) -> None:
    os.dup2(os.open(folder / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT), 2)
    with Heart(HealthConfig(step_timeout_s=limit), folder, rank, world_size, "life", supervised=False) as heart:
        heart.took(0.01)
        heart.step(12, 0.0)
        stands_still()


@pytest.mark.usefixtures("quick")
def test_a_process_that_hangs_writes_its_stacks_and_ends(tmp_path):
    assert ended(lambda: hangs(tmp_path, 0, 1, 0.3)) == HUNG
    for name in ("ranks/stacks-0.txt", "stderr-0"):
        assert "in stands_still" in (tmp_path / name).read_text()
    (line,) = read_incidents(tmp_path)
    assert (line["kind"], line["step"], line["rank"]) == ("hang", 12, 0)


@pytest.mark.usefixtures("quick")
def test_ranks_that_nobody_watches_all_write_their_stacks(tmp_path):
    """Rank 1 has much more patience, but hears of rank 0."""
    process = os.fork()
    if not process:
        hangs(tmp_path, 1, 2, 50.0)
        os._exit(99)
    assert ended(lambda: hangs(tmp_path, 0, 2, 0.5)) == HUNG
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == HUNG
    assert all("in stands_still" in (tmp_path / "ranks" / f"stacks-{rank}.txt").read_text() for rank in range(2))
    assert len(read_incidents(tmp_path)) == 1


def test_a_rank_that_never_lets_go_of_the_interpreter_ends_too(tmp_path, monkeypatch):
    """Then no thread of it runs: the C library's clock is what is left."""
    monkeypatch.setattr(health, "STUCK_SECONDS", 0.5)

    def work():
        with Heart(HealthConfig(step_timeout_s=0.3), tmp_path, 0, 2, "life", supervised=False) as heart:
            heart.took(0.01)
            heart.step(1, 0.0)
            time.sleep(0.2)
            import ctypes

            ctypes.PyDLL(None).sleep(30)  # with the interpreter's lock

    assert ended(work, 25) == 1
    assert "in work" in (tmp_path / "ranks" / "stacks-0.txt").read_text()


def test_a_rank_that_gets_on_is_left_alone(tmp_path):
    def work():
        with Heart(HealthConfig(step_timeout_s=0.4), tmp_path, 0, 2, "life", supervised=False) as heart:
            heart.took(0.01)
            for step in range(15):
                heart.step(step, 0.0)
                time.sleep(0.1)

    assert ended(work) == 0
    assert read_incidents(tmp_path) == []


def test_a_process_that_was_suspended_is_no_hang(tmp_path, monkeypatch):
    monkeypatch.setattr(health, "SUSPENDED_SECONDS", 0.5)
    told, back = os.pipe()

    def work():
        with Heart(HealthConfig(step_timeout_s=1.0), tmp_path, 0, 1, "life", supervised=False) as heart:
            heart.took(0.01)
            heart.step(1, 0.0)
            time.sleep(0.3)
            os.write(back, b"x")
            time.sleep(0.3)

    process = os.fork()
    if not process:
        work()
        os._exit(0)
    os.read(told, 1)
    os.kill(process, signal.SIGSTOP)
    time.sleep(2.0)
    os.kill(process, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


def test_limits_follow_what_steps_take(tmp_path):
    heart = Heart(HealthConfig(), tmp_path, 0, 1, "life", True)
    heart.step(0, 5.0)
    assert heart._state[0] == "its first step"
    assert heart._state[3] == 3600.0
    heart.took(2.0)
    heart.step(1, 0.0)
    assert heart._state[3] == health.LEAST_STEP_SECONDS
    heart.took(40.0)
    heart.took(3.0)
    heart.step(2, 0.0)
    assert heart._state[3] == 400.0
    heart.step(2, 90.0)  # a plan that is predicted to take longer
    assert heart._state[3] == 900.0


def test_the_supervisors_view(tmp_path):
    (tmp_path / "ranks").mkdir()
    with Heart(HealthConfig(), tmp_path, 0, 2, "life", supervised=True):
        assert overdue(tmp_path / "ranks", 2) == []
        now = time.monotonic()
        late = {"what": "a step", "step": 3, "since": now - 50, "due": now - 20}
        heart_file(tmp_path / "ranks", 1).write_text(json.dumps(late))
        (found,) = overdue(tmp_path / "ranks", 2)
        assert str(found) == "rank 1 did not get on for 50 s in a step after step 3"
        heart_file(tmp_path / "ranks", 1).write_text("{")
        assert overdue(tmp_path / "ranks", 2) == []
    assert not heart_file(tmp_path / "ranks", 0).exists()
    health.forget_hearts(tmp_path / "ranks")
    assert list((tmp_path / "ranks").glob("*.heart")) == []


def test_pytest_keeps_its_own_clock():
    """A run of one process in this one must leave faulthandler's timer to whoever set it (tests/conftest.py)."""
    assert not Heart(HealthConfig(), Path(), 0, 1, "life", False)._alone_in_c
    assert faulthandler.is_enabled()


# -------------------------------------------------------------------------------------------------------------- bad steps
def test_spikes_are_judged_by_the_median_of_applied_steps():
    judge = BadSteps(HealthConfig(spike="skip", spike_factor=1.5, spike_window=5))
    for loss in (4.0, 4.0, 9.0, 4.0):
        assert judge.spike(100.0) == ""  # too few to tell
        judge.applied(loss)
    judge.applied(4.0)
    assert judge.spike(6.0) == ""
    assert judge.spike(6.1) == "loss 6.1 is 1.52 times the median 4 of the last 5 steps"
    again = BadSteps(judge.health)
    again.load(json.loads(json.dumps(judge.to_dict())))
    assert again.losses == judge.losses
    with pytest.raises(UserError):
        again.load({"losses": ["x"]})
    assert BadSteps(HealthConfig(spike_window=1)).spike(1e9) == ""  # nothing is done about spikes


def test_which_policy_a_problem_gets():
    judge = BadSteps(HealthConfig(nan="rollback", spike="stop"))
    assert judge.policy("the gradient is not finite") == "rollback"
    assert judge.policy("loss 6.1 is 1.5 times the median") == "stop"
    assert judge.policy("no document has a target") == "skip"


@pytest.mark.parametrize(
    ("health", "data", "message"),
    [
        ({"spike": "stop", "spike_factor": 0.9}, {}, r"health\.spike_factor=0\.9"),
        ({"straggler_factor": 0.5}, {}, r"health\.straggler_factor=0\.5"),
        ({"nan": "rollback"}, {"mode": "stream"}, r"health\.rollback_documents=repeat"),
        ({"nan": "explode"}, {}, r"health\.nan=explode"),
        ({"oom_factor": 1.0}, {}, r"health\.oom_factor=1\.0 is too large"),
    ],
)
def test_settings_that_contradict_themselves(prefix, health, data, message):
    with pytest.raises(UserError, match=message):
        check(config(prefix, health=health, data=data))


@pytest.mark.parametrize(
    ("steps", "checkpoint", "message"),
    [
        (1, {"every": 0}, r"health\.nan=rollback needs checkpoints to go back to, but checkpoint\.every=0"),
        (4, {"every": 3, "keep_last": 2}, ""),
        (5, {"every": 3, "keep_last": 2}, r"health\.rollback_steps=5 may be more .* legal here: 1 to 4, or a larger keep_last"),
        (5, {"every": 3, "keep_last": 2, "keep_every": 6}, ""),
    ],
)
def test_going_back_needs_a_checkpoint_to_go_back_to(prefix, steps, checkpoint, message):
    with pytest.raises(UserError, match=message) if message else nullcontext():
        check(config(prefix, health={"nan": "rollback", "rollback_steps": steps}, checkpoint=checkpoint))


def spoil(monkeypatch, places: set[int], value: float) -> None:
    """The gradient of one parameter becomes `value` while documents of these steps of the order are trained on."""
    new_state = session.new_state

    def made(*arguments):
        state = new_state(*arguments)
        weight = state.model.layers["1"].mlp.down.weight
        weight.register_hook(lambda gradient: gradient * value if state.progress.place - 1 in places else gradient)
        return state

    monkeypatch.setattr(session, "new_state", made)


def setup(prefix, steps=12, **named):
    named.setdefault("checkpoint", {"every": 3, "keep_last": 9})
    return config(prefix, run={"steps": steps, "validate_every": 0, "sample_prompt": ""}, plan={"worker": "thread"}, **named)


def losses(folder: Path) -> list[tuple]:
    return [(row["step"], row["loss"], row["skipped"]) for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]


def test_nan_may_end_the_run(prefix, tmp_path, monkeypatch, capsys):
    spoil(monkeypatch, {4}, math.nan)
    assert train(setup(prefix, health={"nan": "stop"}), tmp_path / "run") == FAILED
    assert "FAILED: step 5 was not applied: the gradient is not finite" in capsys.readouterr().out
    assert checkpoint.newest(RunFolder(tmp_path / "run"), pytest.fail).step == 3
    assert [one["kind"] for one in read_incidents(tmp_path / "run")] == ["bad_step", "failed"]


def trained_on(monkeypatch) -> list:
    seen, real = [], loop._one_step
    monkeypatch.setattr(loop, "_one_step", lambda run, loaded, *rest: (seen.append(loaded.documents.ids.tolist()), real(run, loaded, *rest))[1])
    return seen


def test_rolled_back_and_left_out(prefix, tmp_path, monkeypatch, capsys):
    """NaN in step 8: back to the checkpoint of step 6, and on with the documents of the 9th step of the order."""
    made = setup(prefix, health={"nan": "rollback"})
    spoil(monkeypatch, {7}, math.nan)
    seen = trained_on(monkeypatch)
    assert train(made, tmp_path / "run") == FINISHED
    source = open_training(made.data, 99)
    assert seen == [source.step(number).ids.tolist() for number in (*range(8), *range(8, 14))]
    rows = losses(tmp_path / "run")
    assert [row[0] for row in rows] == list(range(1, 13))
    assert not any(row[2] for row in rows)  # the skipped one was taken back, too
    said = capsys.readouterr().out
    assert "rolled back from step 8 to step 6 (the gradient is not finite); their documents are left out" in said
    kept = checkpoint.newest(RunFolder(tmp_path / "run"), pytest.fail)
    assert (kept.meta["step"], kept.meta["place"], kept.meta["rollbacks"], kept.meta["skipped"]) == (12, 14, 1, 0)
    assert [one["kind"] for one in read_incidents(tmp_path / "run")] == ["bad_step", "rollback"]


@pytest.mark.slow
def test_what_follows_a_rollback_is_what_a_run_without_those_documents_does(prefix, tmp_path, monkeypatch):
    """The steps after going back equal those of a run that never saw the documents: weights, moments and rates are the checkpoint's."""
    made = setup(prefix, health={"nan": "rollback"})
    with monkeypatch.context() as patch:
        spoil(patch, {7}, math.nan)
        assert train(made, tmp_path / "run") == FINISHED
    ids = open_training(made.data, 99)

    class LeftOut:
        fingerprint, build, describe, read, fill = ids.fingerprint, ids.build, ids.describe, ids.read, ids.fill

        def step(self, index):
            return ids.step(index) if index < 6 else replace(ids.step(index + 2), step=index)

    monkeypatch.setattr(session, "open_training", lambda *_: LeftOut())
    assert train(setup(prefix), tmp_path / "other") == FINISHED
    assert losses(tmp_path / "run") == losses(tmp_path / "other")
    one, two = (checkpoint.newest(RunFolder(tmp_path / name), pytest.fail) for name in ("run", "other"))
    for part in ("model", "optimizer"):
        found = one.tensors(part)
        assert all(torch.equal(found[name], tensor) for name, tensor in two.tensors(part).items())


def test_documents_may_come_again(prefix, tmp_path, monkeypatch):
    """A fault of the machine, not of the data: the same steps again, and nothing else changes."""
    clean = setup(prefix)
    assert train(clean, tmp_path / "clean") == FINISHED
    broken = [True]
    new_state = session.new_state

    def made(*arguments):
        state = new_state(*arguments)
        weight = state.model.layers["1"].mlp.down.weight

        def once(gradient):
            if state.progress.step == 8 and broken and broken.pop():
                return gradient * math.inf
            return gradient

        weight.register_hook(once)
        return state

    monkeypatch.setattr(session, "new_state", made)
    assert train(setup(prefix, health={"nan": "rollback", "rollback_documents": "repeat"}), tmp_path / "run") == FINISHED
    assert losses(tmp_path / "run") == losses(tmp_path / "clean")


def test_rollbacks_are_bounded_and_a_restart_does_not_forget_them(prefix, tmp_path, monkeypatch, capsys):
    made = setup(prefix, health={"nan": "rollback", "max_rollbacks": 2})
    spoil(monkeypatch, set(range(5, 99)), math.nan)
    assert train(made, tmp_path / "run") == FAILED
    assert "after 2 rollbacks (health.max_rollbacks=2)" in capsys.readouterr().out
    assert train(made, tmp_path / "run") == FAILED  # not two more
    assert "rolled back from" not in capsys.readouterr().out


def test_without_an_older_checkpoint_there_is_no_going_back(prefix, tmp_path, monkeypatch, capsys):
    spoil(monkeypatch, {2}, math.nan)
    assert train(setup(prefix, health={"nan": "rollback"}), tmp_path / "run") == FAILED
    assert "no checkpoint of step 2 or before is there" in capsys.readouterr().out


@pytest.mark.slow
def test_n_steps_back_and_later_checkpoints_are_set_aside(prefix, tmp_path, monkeypatch):
    spoil(monkeypatch, {10}, math.nan)
    assert train(setup(prefix, health={"nan": "rollback", "rollback_steps": 6}), tmp_path / "run") == FINISHED
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert {"rolled-back-step-00000006", "rolled-back-step-00000009", "step-00000003", "step-00000012"} <= set(names)
    (back,) = [one for one in read_incidents(tmp_path / "run") if one["kind"] == "rollback"]
    assert (back["step"], back["failed_step"], back["place"]) == (3, 11, 11)


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_spikes(prefix, tmp_path, monkeypatch, policy):
    """One step's loss is trebled: it is not applied, or the run goes back and leaves its documents out."""
    real = loop.run_step

    def spiking(engine, plan, packs, lr, refuse=None):
        assert refuse is not None
        tripled = (lambda loss, norm: refuse(3 * loss, norm)) if packs and packs[0].document_ids[0] == first else refuse
        return real(engine, plan, packs, lr, tripled)

    made = setup(prefix, health={"spike": policy, "spike_factor": 1.5, "spike_window": 4})
    plan = session._Planning(made).step
    documents = open_training(made.data, 99).step(8)
    first = documents.ids[min(plan(documents).microbatches, key=lambda one: one.slot).documents[0]]
    monkeypatch.setattr(loop, "run_step", spiking)
    assert train(made, tmp_path / "run") == FINISHED
    skipped = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row.get("skipped")]
    kept = checkpoint.newest(RunFolder(tmp_path / "run"), pytest.fail)
    if policy == "skip":
        (row,) = skipped
        assert (row["step"], kept.meta["updates"], kept.meta["skipped"]) == (9, 11, 1)
        assert "times the median" in row["problem"]
    else:
        assert (skipped, kept.meta["updates"], kept.meta["rollbacks"], kept.meta["place"]) == ([], 12, 1, 15)


# ------------------------------------------------------------------------------------------------------------- slow lanes
def test_a_lane_that_stays_slow_is_told_of_once(prefix):
    said, incidents, lanes = [], [], types.SimpleNamespace()
    run = types.SimpleNamespace(
        config=config(prefix, health={"straggler_factor": 1.2}), slow={}, console=types.SimpleNamespace(say=said.append),
        incident=lambda kind, text, **more: incidents.append((kind, more["lane"])),
    )  # fmt: skip

    def steps(count, *slowness):
        lanes.slowness = lambda: list(slowness)
        for _ in range(count):
            between_steps._tell_stragglers(run, lanes)

    steps(between_steps.SLOW_STEPS - 1, 1.0, 1.5)
    steps(1, 1.0, 1.0)
    assert said == []  # a busy moment
    steps(2 * between_steps.SLOW_STEPS, 1.0, 1.5)
    steps(5, 1.0, 1.15)
    (line,) = said
    assert line.startswith("lane 1 is slow: the same work takes 1.50 times as long there as on lane 0")
    steps(1, 1.0, 1.05)
    assert said[1:] == ["lane 1 is no longer slow"]
    assert incidents == [("straggler", 1)]


# ----------------------------------------------------------------------------------------------------- a folder without locks
@pytest.fixture
def no_locks(monkeypatch):
    import fcntl

    def refuses(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuses)


@pytest.mark.usefixtures("no_locks")
def test_without_locks_a_second_trainer_is_still_found(tmp_path, monkeypatch):
    said = []
    with keep_folder(tmp_path, said.append):
        assert "has no locks" in said[0]
        owner = json.loads((tmp_path / LOCK).read_text())
        assert owner["pid"] == os.getpid()
        for host, pid in ((owner["host"], os.getppid()), ("elsewhere", 1)):
            (tmp_path / LOCK).write_text(json.dumps({"host": host, "pid": pid}))
            with pytest.raises(UserError, match=f"process {pid} of {host} is training"), keep_folder(tmp_path, said.append):
                pass
        monkeypatch.setattr(run_folder, "DEAD_SECONDS", -1.0)  # its last sign of life is too long ago
        with keep_folder(tmp_path, said.append):
            pass
    with keep_folder(tmp_path, said.append):  # who left in order left nothing
        pass


@pytest.mark.usefixtures("no_locks")
def test_a_process_that_died_without_locks_does_not_hold_the_folder(tmp_path):
    process = os.fork()
    if not process:
        os._exit(0)
    os.waitpid(process, 0)
    with keep_folder(tmp_path, lambda line: None):
        owner = json.loads((tmp_path / LOCK).read_text())
    (tmp_path / LOCK).write_text(json.dumps({**owner, "pid": process}))
    with keep_folder(tmp_path, lambda line: None):
        pass


def test_incidents_are_lines_and_never_in_the_way(tmp_path):
    add_incident(tmp_path, "hang", 3, "a text", rank=1)
    with open(tmp_path / "incidents.jsonl", "a") as file:
        file.write("{cut\n")
    add_incident(tmp_path, "bad_step", None, "another")
    assert [(one["kind"], one["step"], one["text"]) for one in read_incidents(tmp_path)] == [("hang", 3, "a text"), ("bad_step", None, "another")]
    add_incident(tmp_path / "missing", "hang", 3, "a text")
    assert read_incidents(tmp_path / "missing") == []
