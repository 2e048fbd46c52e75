"""Signals: the first one asks, the second one ends, whatever the main thread is doing; and what a run does at every moment one may come."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from train_helpers import config, write_corpus

from megadcp.train import checkpoint, loop, session
from megadcp.train.incidents import read_incidents
from megadcp.train.loop import FINISHED, STOPPED, train
from megadcp.train.metrics import read_metrics
from megadcp.train.run_folder import RunFolder
from megadcp.train.signals import SIGNALS, StopRequest


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_asks_and_the_second_acts(number):
    heard = []
    before = signal.signal(number, lambda *_: heard.append("outer"))
    try:
        with StopRequest() as stop:
            assert not stop
            os.kill(os.getpid(), number)
            assert stop.name == number.name
            assert heard == []
            os.kill(os.getpid(), number)
            assert heard == ["outer"]
        os.kill(os.getpid(), number)
        assert heard == ["outer", "outer"]
    finally:
        signal.signal(number, before)


def test_other_threads_can_train_too():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def work():
        with StopRequest() as stop:
            seen.append(bool(stop))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]
    assert signal.getsignal(signal.SIGTERM) is before


def test_at_once_leaves_and_only_there():
    with StopRequest() as stop:
        with pytest.raises(SystemExit) as left, stop.at_once():
            os.kill(os.getpid(), signal.SIGTERM)
        assert left.value.code == STOPPED
        with pytest.raises(SystemExit), stop.at_once():  # it had come before
            pass
        with stop.at_once(False):
            pass


def child(work) -> int:
    """Exit status of a forked child that runs work()."""
    process = os.fork()
    if not process:
        try:
            work()
        finally:
            os._exit(99)
    end = time.monotonic() + 30
    while time.monotonic() < end:
        pid, status = os.waitpid(process, os.WNOHANG)
        if pid:
            return status
        time.sleep(0.02)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    raise AssertionError("the child did not end")


def test_a_second_signal_ends_a_process_that_can_not_listen(tmp_path):
    """As in a collective that never ends: Python runs no handler there."""

    def work():
        with StopRequest():
            lock = threading.Lock()
            lock.acquire()
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # the main thread hears nothing; another thread's C handler does
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
            _wait_in_c(20)

    assert os.waitstatus_to_exitcode(child(work)) in (128 + signal.SIGTERM, -signal.SIGTERM)


def _wait_in_c(seconds: float) -> None:
    import ctypes

    libc = ctypes.CDLL(None)
    end = time.monotonic() + seconds
    while time.monotonic() < end:  # usleep is interrupted by signals, the interpreter is not left in between for long
        libc.usleep(int(1e6 * seconds))


def test_a_forked_child_is_not_asked():
    """C65: a data worker that got the signal of the whole process group must not be the one that saves."""
    with StopRequest() as stop:
        status = child(lambda: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(10)))
        assert os.WTERMSIG(status) == signal.SIGTERM
        time.sleep(0.1)
        assert not stop


# ------------------------------------------------------------------------------------------------ at every moment of a run
@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def losses(prefix, tmp_path_factory):
    """Of the run that nothing has interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert train(short(prefix), folder) == FINISHED
    return of(folder)


def short(prefix):
    return config(prefix, run={"steps": 8, "validate_every": 4, "sample_prompt": ""}, checkpoint={"every": 3}, plan={"worker": "thread"})


def of(folder: Path) -> list[tuple]:
    return [(row["step"], row.get("loss", row.get("validation_loss"))) for row in read_metrics(folder / "metrics.jsonl")]


def signalling(monkeypatch, where: object, name: str, number: int, times: int = 1) -> None:
    """Calling where.name sends this process a signal first."""
    real, left = getattr(where, name), [times]

    def sends(*arguments, **named):
        if left[0]:
            left[0] -= 1
            os.kill(os.getpid(), number)
        return real(*arguments, **named)

    monkeypatch.setattr(where, name, sends)


MOMENTS = {
    "in a step": (loop, "run_step", 1),
    "while saving": (checkpoint.Saver, "save", 3),
    "while validating": (loop, "evaluate", 4),
    "while planning": (session._Planning, "step", None),  # in the loader's thread; the handler runs in the main one
}


@pytest.mark.parametrize(("moment", "number"), [*((moment, signal.SIGUSR1) for moment in MOMENTS), ("in a step", signal.SIGTERM)])
def test_a_run_stops_at_the_next_border_and_goes_on_unbroken(prefix, losses, tmp_path, monkeypatch, capsys, moment, number):
    """C63."""
    where, name, expected = MOMENTS[moment]
    with monkeypatch.context() as patch:
        signalling(patch, where, name, number)
        assert train(short(prefix), tmp_path / "run") == STOPPED
    said = capsys.readouterr().out
    assert f"stopped by {number.name} " in said
    newest = checkpoint.newest(RunFolder(tmp_path / "run"), pytest.fail)
    if expected is not None:
        assert newest.step == expected
    assert train(short(prefix), tmp_path / "run") == FINISHED
    assert of(tmp_path / "run") == losses
    assert [(one["kind"], one["step"]) for one in read_incidents(tmp_path / "run")] == [("stopped", newest.step), ("resumed", newest.step)]


def test_a_signal_while_the_run_is_opened_leaves_at_once(prefix, losses, tmp_path, monkeypatch, capfd):
    with monkeypatch.context() as patch:
        signalling(patch, session, "open_training", signal.SIGUSR1)
        with pytest.raises(SystemExit) as left:
            train(short(prefix), tmp_path / "run")
    assert left.value.code == STOPPED
    assert "stopped by SIGUSR1 before the first step" in capfd.readouterr().err
    assert train(short(prefix), tmp_path / "run") == FINISHED
    assert of(tmp_path / "run") == losses


def test_a_clock_that_jumps_back_changes_nothing(prefix, losses, tmp_path, monkeypatch):
    """Wall clocks are set, in either direction; nothing but the times in incidents may look at them."""
    real, began = time.time, time.time()
    monkeypatch.setattr(time, "time", lambda: began - 86400 * (real() - began))
    assert train(short(prefix), tmp_path / "run") == FINISHED
    assert of(tmp_path / "run") == losses
    assert all(row["seconds"] >= 0 for row in read_metrics(tmp_path / "run" / "metrics.jsonl"))
