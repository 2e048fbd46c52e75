"""The planning process."""

import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path

import ahead_planners as planners
import plan_reference as ref
import pytest

from megadcp.config.check import UserError
from megadcp.config.schema import DataConfig, PlanConfig
from megadcp.plan import ahead
from megadcp.plan.ahead import PlansClosed, PlanWorker, PlanWorkerDied
from megadcp.plan.plan_file import record_of
from megadcp.plan.planner import planner_for
from megadcp.plan.step_plan import PlanFormatError, plan_hash

pytestmark = pytest.mark.usefixtures("time_limit")


def config(**plan):
    return replace(ref.config(ref.SMALL, hardware=replace(ref.H200, memory_bytes=1.0e9)), data=DataConfig(max_length=8192), plan=PlanConfig(**plan))


def steps(count, seed=0):
    rng = random.Random(seed)
    return [[int(16 * 400 ** rng.random()) for _ in range(rng.randint(2, 40))] for _ in range(count)]


def gone(pid, orphan=False):
    """Whether no such process is left, not even as a zombie. (An orphan's zombie is init's.) Waits a little for one that is ending."""
    for _ in range(500):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if orphan and state == "Z":
            return True
        time.sleep(0.02)
    return False


@pytest.fixture(scope="module")
def worker():
    """One for the tests that do it no harm."""
    with PlanWorker(config(), make=planners.behaving) as one:
        yield one
        pid = one.pid
    assert gone(pid)


def test_plans_are_those_of_this_process(worker):
    planner, asked = planner_for(config()), steps(12)
    for step, lengths in enumerate(asked):
        worker.submit(step, lengths)
    for step, lengths in enumerate(asked):
        planned, expected = worker.take(step), planner(step, lengths)
        assert planned.plan == expected
        assert plan_hash(planned.plan) == plan_hash(expected) == planned.record.hash
        assert planned.record == record_of(expected)
        assert planned.plan_seconds > 0
        assert planned.wait_seconds >= 0


def test_steps_of_any_size_and_number(worker):
    """Requests and answers far beyond what a socket holds, before anything is taken."""
    asked = [[7] * 40_000, *([3000] * 900 for _ in range(8))]
    for step, lengths in enumerate(asked):
        worker.submit(step, lengths)
    for step, lengths in enumerate(asked):
        assert worker.take(step).plan.lengths == tuple(lengths)


def test_plans_are_taken_in_the_order_they_were_asked_for(worker):
    with pytest.raises(ValueError, match="plan of step 5 is asked for, but none is handed in"):
        worker.take(5)
    worker.submit(9, [100])
    worker.submit(4, [100])
    with pytest.raises(ValueError, match="plan of step 4 is asked for, but the next one is step 9"):
        worker.take(4)
    assert [worker.take(step).plan.step for step in (9, 4)] == [9, 4]


def test_a_step_that_can_not_be_planned(worker):
    """The same error as here, at its step, and the ones after it are planned."""
    planner, too_long = planner_for(config()), 10**6
    for step, lengths in enumerate(([100], [50, too_long], [], [3, 0], [1.5], [200])):
        worker.submit(step, lengths)
    assert worker.take(0).plan.step == 0
    for step, lengths in ((1, [50, too_long]), (2, []), (3, [3, 0]), (4, [1.5])):
        with pytest.raises(UserError) as here:
            planner(step, lengths)
        with pytest.raises(UserError) as there:
            worker.take(step)
        assert str(there.value) == str(here.value)
        assert there.value.__cause__ is None
        assert "\n" not in str(there.value)
    assert worker.take(5).plan.lengths == (200,)


def test_other_errors_come_with_their_traceback(worker):
    for step, what in enumerate((planners.MODULES, planners.UNPICKLABLE, planners.ODD)):
        worker.submit(step, [what])
    kinds = ((LookupError, "megadcp"), (RuntimeError, "Local: no plan for step 1"), (RuntimeError, "Odd: this and that"))
    for step, (kind, message) in enumerate(kinds):
        with pytest.raises(kind, match=message) as caught:
            worker.take(step)
        shown = "".join(traceback.format_exception(caught.value))
        assert "Traceback in the planning process:" in shown
        assert "ahead_planners.py" in shown


def test_the_process_imports_the_planner_and_nothing_of_the_trainer(worker):
    """Neither torch nor what this process runs as its main program; only plan and config of the package."""
    worker.submit(0, [planners.MODULES])
    with pytest.raises(LookupError) as caught:
        worker.take(0)
    names, pid = caught.value.args[0].split(";")
    modules = names.split(",")
    assert int(pid) == worker.pid != os.getpid()
    assert not {name.split(".")[0] for name in modules} & {"torch", "hydra", "omegaconf", "yaml", "scipy", "pytest", "multiprocessing"}
    own = [name for name in modules if name.startswith("megadcp")]
    assert {name.split(".")[1] for name in own if "." in name} == {"plan", "config"}
    assert "megadcp.plan.planner" in own
    assert "megadcp.config.load" not in own


def test_user_errors_keep_their_class():
    with PlanWorker(config(), make=planners.special_user_error) as worker:
        for step in (0, 1):
            worker.submit(step, [5])
        for step, kind in ((0, UserError), (1, PlanFormatError)):
            with pytest.raises(UserError, match=f"step {step}: no") as caught:
                worker.take(step)
            assert type(caught.value) is kind


def test_a_planner_that_can_not_be_made():
    with PlanWorker(config(), make=planners.refusing) as worker:
        for step in (0, 1):
            worker.submit(step, [5])
            with pytest.raises(UserError, match="this run can't be planned; legal here: another"):
                worker.take(step)
    with PlanWorker(config(), make=planners.broken) as worker:
        worker.submit(0, [5])
        with pytest.raises(ZeroDivisionError) as caught:
            worker.take(0)
        assert "in broken" in "".join(traceback.format_exception(caught.value))


# ------------------------------------------------------------------------------------------------------------------ death
def test_a_killed_process_is_an_error_with_its_signal():
    with PlanWorker(config(), make=planners.behaving) as worker:
        for step, lengths in enumerate(([100], [planners.BUSY], [100])):
            worker.submit(step, lengths)
        assert worker.take(0).plan.step == 0
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(PlanWorkerDied) as caught:
            worker.take(1)
        message = str(caught.value)
        assert f"the planning process {worker.pid} was killed by SIGKILL (9), often the system's answer to too little memory," in message
        assert "before it had the plan of step 1" in message
        assert "plan.worker_death=replace" in message
        assert "plan.worker=thread" in message
        with pytest.raises(PlanWorkerDied):
            worker.take(1)  # it stays dead
    assert gone(worker.pid)


@pytest.mark.parametrize(
    ("what", "how", "last"),
    [(planners.EXIT, "ended with exit code 3", "going home"), (planners.CRASH, "was killed by SIGSEGV (11)", "ahead_planners.py")],
)
def test_its_last_words_are_shown(what, how, last):
    with PlanWorker(config(), make=planners.behaving) as worker:
        worker.submit(7, [what])
        with pytest.raises(PlanWorkerDied) as caught:
            worker.take(7)
        assert f"{how} before it had the plan of step 7; it said last:\n" in str(caught.value)
        assert last in str(caught.value)


def test_a_death_can_be_replaced_and_nothing_is_lost():
    """Killed with some plans ready and some asked for: every plan is what it would have been."""
    said, asked, planner = [], steps(9), planner_for(config())
    setup = config(worker_death="replace")
    with PlanWorker(setup, said.append, planners.behaving) as worker:
        for step, lengths in enumerate(asked[:6]):
            worker.submit(step, lengths)
        plans = [worker.take(step) for step in range(3)]
        os.kill(worker.pid, signal.SIGSTOP)
        for step in (6, 7):
            worker.submit(step, asked[step])  # it can't answer these any more
        os.kill(worker.pid, signal.SIGKILL)
        plans += [worker.take(step) for step in range(3, 8)]
        worker.submit(8, asked[8])
        plans.append(worker.take(8))
        worker.submit(9, [10**6])
        with pytest.raises(UserError, match="step 9"):
            worker.take(9)
    assert [one.plan for one in plans] == [planner(step, lengths) for step, lengths in enumerate(asked)]
    assert all(one.record == record_of(one.plan) and 0 < one.plan_seconds <= one.wait_seconds for one in plans[-2:])
    assert len(said) == 1
    assert said[0].startswith(f"WARNING: the planning process {worker.pid} was killed by SIGKILL")
    assert "from here on this process plans itself" in said[0]
    assert "\n" not in said[0]


def test_a_process_that_can_not_be_started(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with PlanWorker(config()) as worker, pytest.raises(UserError, match=r"can't be started .*No such file.*; plan\.worker=thread"):
        worker.start()
    said = []
    with PlanWorker(config(worker_death="replace"), said.append) as worker:
        worker.submit(0, [100])
        assert worker.take(0).plan == planner_for(config())(0, [100])
        assert worker.pid is None
    assert len(said) == 1
    assert "can't be started" in said[0]


def test_what_it_prints_is_not_lost():
    said = []
    with PlanWorker(config(), said.append, planners.behaving) as worker:
        worker.submit(0, [planners.NOISE])
        assert worker.take(0).plan.lengths == (planners.NOISE,)
    assert said == ["the planning process said: a warning of a library"]


def test_a_long_wait_is_told_once(monkeypatch):
    monkeypatch.setattr(ahead, "LONG_WAIT_SECONDS", 0.1)
    monkeypatch.setattr(ahead, "POLL_SECONDS", 0.05)
    said = []
    with PlanWorker(config(), said.append, planners.behaving) as worker:
        worker.start()
        os.kill(worker.pid, signal.SIGSTOP)
        worker.submit(3, [100])
        threading.Timer(0.6, os.kill, (worker.pid, signal.SIGCONT)).start()
        assert worker.take(3).plan.step == 3
    assert len(said) == 1
    assert said[0].startswith("step 3: waiting for its plan")


# ------------------------------------------------------------------------------------------------------------------ end
def test_close_while_it_is_busy():
    worker = PlanWorker(config(), make=planners.behaving)
    worker.submit(0, [100])
    worker.submit(1, [planners.BUSY])
    worker.take(0)
    begin = time.monotonic()
    worker.close()
    worker.close()
    assert time.monotonic() - begin < 30  # not the hour that the plan takes
    assert gone(worker.pid)
    with pytest.raises(PlansClosed):
        worker.take(1)
    with pytest.raises(PlansClosed):
        worker.submit(2, [100])
    with pytest.raises(PlansClosed):
        worker.start()


def test_close_wakes_who_waits():
    worker, caught = PlanWorker(config(), make=planners.behaving), []
    worker.submit(0, [planners.BUSY])

    def wait():
        with pytest.raises(PlansClosed) as info:
            worker.take(0)
        caught.append(info)

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.2)
    worker.close()
    waiting.join(30)
    assert len(caught) == 1
    assert gone(worker.pid)


def test_a_worker_that_was_never_started_or_is_forgotten():
    PlanWorker(config()).close()
    worker = PlanWorker(config())
    worker.start()
    pid = worker.pid
    del worker
    assert gone(pid)


def test_signals_for_the_trainer_do_nothing_to_it():
    """From its first moment on: these come while its interpreter starts."""
    with PlanWorker(config()) as worker:
        worker.start()
        for number in ahead.FOR_THE_TRAINER:
            os.kill(worker.pid, number)
        worker.submit(0, [100])
        assert worker.take(0).plan.step == 0
        for number in ahead.FOR_THE_TRAINER:
            os.kill(worker.pid, number)
        worker.submit(1, [100])
        assert worker.take(1).plan.step == 1
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()  # this process has its signals


PARENT = """
import os, pickle, sys, time
sys.path[:] = pickle.loads(bytes.fromhex(sys.argv[1]))
import ahead_planners, test_ahead
from megadcp.plan.ahead import PlanWorker
worker = PlanWorker(test_ahead.config(), make=ahead_planners.behaving)
worker.submit(0, [100])
worker.take(0)
if sys.argv[2] != "idle":
    worker.submit(1, [ahead_planners.BUSY])
if sys.argv[3] == "forked" and not os.fork():  # a child that outlives the parent and holds the parent's end of the socket
    os.close(1)
    time.sleep(60)
    os._exit(0)
print(worker.pid, flush=True)
if sys.argv[4] == "ends":
    sys.exit(0)
time.sleep(3600)
"""


@pytest.mark.parametrize(("doing", "forked", "how"), [("busy", "", "ends"), ("idle", "", "killed"), ("busy", "forked", "killed")])
def test_it_ends_with_its_parent(doing, forked, how):
    command = [sys.executable, "-c", PARENT, pickle.dumps(sys.path).hex(), doing, forked, how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as parent:
        pid = int(parent.stdout.readline())
        if how == "killed":
            parent.kill()
        parent.wait(60)
        try:
            assert gone(pid, orphan=True)
        finally:
            if forked:
                os.killpg(parent.pid, signal.SIGKILL)
