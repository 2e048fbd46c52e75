"""Ranks of one machine that end well, badly, by a signal, or not at all: what is shown, what is returned, and that nobody stays.

Most ranks here are small scripts without torch, and the supervisor is forked from the test process: a case takes tenths of a second.
"""

import os
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest

from megadcp.train import supervise as supervise_module
from megadcp.train.health import HUNG
from megadcp.train.supervise import supervise

BEGIN = """
import os, signal, sys, time
from pathlib import Path
rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
def say(text):
    print(text, flush=True)
def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.01)
"""


class Supervised:
    """A forked supervisor of `processes` ranks that run `script`."""

    def __init__(self, folder: Path, script: str, processes: int = 3, logs: str = "logs", **constants: float) -> None:
        self.folder = folder
        (folder / "rank.py").write_text(BEGIN + textwrap.dedent(script), encoding="utf-8")
        self.pid = os.fork()
        if self.pid:
            return
        code = 99
        try:
            for name, number in (("stdout", 1), ("stderr", 2)):
                os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            for name, value in constants.items():
                setattr(supervise_module, name, value)
            code = supervise([sys.executable, str(folder / "rank.py"), str(folder)], processes, logs=folder / logs)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def seen(self, name: str = "stderr") -> str:
        path = self.folder / name
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def wait_for(self, *names: str) -> None:
        end = time.monotonic() + 60
        while not all((self.folder / name).exists() for name in names):
            assert time.monotonic() < end, f"{names} did not come; stderr: {self.seen()}"
            time.sleep(0.01)

    def end(self, limit_s: float = 60) -> int:
        """Its exit code; a hang is a failure."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                assert self.ranks() == [], "ranks are left"
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        raise AssertionError(f"the supervisor did not end; stderr: {self.seen()}")

    def ranks(self) -> list[int]:
        """Processes that run this script and are no zombies."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    if str(self.folder / "rank.py") in (entry / "cmdline").read_text() and " Z " not in (entry / "stat").read_text():
                        found.append(int(entry.name))
                except OSError:
                    pass
        return found


def test_all_well(tmp_path):
    run = Supervised(
        tmp_path,
        """
        say(f"line of rank {rank}")
        print(f"words of rank {rank}", file=sys.stderr)
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
        (folder / f"rank-{rank}").write_text(" ".join(os.environ[name] for name in names))
        """,
    )
    assert run.end() == 0
    assert run.seen("stdout") == "line of rank 0\n"
    assert run.seen() == "words of rank 0\n"
    threads = max(1, len(os.sched_getaffinity(0)) // 3)
    assert [run.seen(f"rank-{rank}") for rank in range(3)] == [f"{rank} {rank} 3 3 127.0.0.1 {threads}" for rank in range(3)]
    assert run.seen("logs/rank-2.out") == "line of rank 2\n"
    assert run.seen("logs/rank-1.err") == "words of rank 1\n"


def test_the_first_traceback_is_all_that_is_shown(tmp_path):
    """Rank 0 and 1 fail as a consequence, a moment later."""
    run = Supervised(
        tmp_path,
        """
        if rank == 2:
            print("a warning", file=sys.stderr)
            (folder / "failed").touch()
            raise KeyError("the cause")
        wait_for("failed")
        time.sleep(0.2)
        raise RuntimeError("Connection closed by peer")
        """,
    )
    assert run.end() == 1
    assert run.seen().startswith("Traceback (most recent call last):\n")
    assert "KeyError: 'the cause'" in run.seen()
    assert "Connection closed" not in run.seen()
    assert run.seen().splitlines()[-1] == "rank 2 of 3 failed with exit code 1; the other ranks end, too"
    assert run.seen().count("Traceback") == 1


def test_who_failed_first_is_told_by_the_error_not_by_the_exit(tmp_path):
    """Rank 1 needs a second to leave after its error; rank 0, which fails because of it, is gone before."""
    run = Supervised(
        tmp_path,
        """
        from megadcp.train import launch
        try:
            if rank == 1:
                raise KeyError("the cause")
            wait_for("failed")
            raise RuntimeError("Connection closed by peer")
        except Exception as error:
            launch._record(error)
            if rank == 1:
                (folder / "failed").touch()
                time.sleep(0.3)
            raise
        """,
        processes=2,
    )
    assert run.end() == 1
    assert "the cause" in run.seen()
    assert "Connection closed" not in run.seen()


def test_a_request_that_all_ranks_refuse_is_refused_once(tmp_path):
    run = Supervised(
        tmp_path,
        """
        from megadcp.config.check import UserError
        from megadcp.train import launch
        def work():
            raise UserError("parallel.tp=3 is wrong")
        sys.exit(launch.exit_code(work))
        """,
    )
    assert run.end() == 2
    assert run.seen() == "error: parallel.tp=3 is wrong\n"


@pytest.mark.parametrize(
    ("script", "code", "told"),
    [
        ("sys.exit(3)", 3, "rank 1 of 3 failed with exit code 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 1, "rank 1 of 3 was ended by SIGKILL"),
        ("os._exit(1)", 1, "rank 1 of 3 failed with exit code 1"),
    ],
)
def test_a_silent_death_ends_all(tmp_path, script, code, told):
    run = Supervised(tmp_path, f"if rank == 1:\n    {script}\ntime.sleep(600)")
    assert run.end() == code
    assert run.seen() == f"{told}; the other ranks end, too\n"


def test_words_that_a_full_disk_has_lost(tmp_path):
    run = Supervised(tmp_path, "if rank == 1:\n    os._exit(1)\ntime.sleep(600)", LEAST_BYTES=1 << 80)
    assert run.end() == 1
    told = f"error: the disk of {tmp_path / 'logs'} is full, so what the rank said is lost; free some space and start the same command again"
    assert run.seen().splitlines() == [told, "rank 1 of 3 failed with exit code 1; the other ranks end, too"]


def test_ranks_that_ignore_sigterm_are_killed_and_show_where_they_were(tmp_path):
    run = Supervised(
        tmp_path,
        """
        import faulthandler
        from megadcp.train import launch
        launch._guard()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        def sleeps_here():
            (folder / f"ready-{rank}").touch()
            time.sleep(600)
        if rank < 2:
            sleeps_here()
        wait_for("ready-0"), wait_for("ready-1")
        raise KeyError("the cause")
        """,
        GRACE_SECONDS=0.5,
    )
    assert run.end() == 1
    assert "the cause" in run.seen()
    for rank in range(2):
        assert f"rank {rank} did not stop within 0.5 s and was killed; it was here:\n" in run.seen()
    assert run.seen().count("in sleeps_here") == 2
    assert run.seen().startswith("Traceback")


def test_a_rank_without_a_sign_of_life_ends_all_with_their_stacks(tmp_path):
    """Rank 1 stands still; rank 0 waits for it and is on time by its own account."""
    run = Supervised(
        tmp_path,
        """
        from megadcp.config.schema import HealthConfig
        from megadcp.train import launch
        from megadcp.train.health import Heart
        launch._guard()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        def stands_still():
            time.sleep(600)
        with Heart(HealthConfig(step_timeout_s=0.2 if rank else 500.0), folder / "run", rank, 2, "life", True) as heart:
            heart.took(0.1)
            heart.step(7, 0.0)
            stands_still()
        """,
        processes=2,
        logs="run/ranks",
    )
    assert run.end() == HUNG
    assert "rank 1 did not get on for" in run.seen()
    assert "in a step after step 7: the run hangs, and all ranks are killed" in run.seen()
    assert run.seen().count("in stands_still") == 2
    assert "rank 0 was here:\n" in run.seen()


STOPPING = """
from megadcp.train.signals import StopRequest
with StopRequest() as stop:
    (folder / f"ready-{rank}").touch()
    while not stop:
        time.sleep(0.01)
    time.sleep(0.2 * rank)
    (folder / f"saved-{rank}").write_text(stop.name)
sys.exit(75)
"""


ARRIVES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "SIGINT", signal.SIGHUP: "SIGTERM", signal.SIGUSR1: "SIGUSR1"}


@pytest.mark.parametrize(("number", "arrives"), ARRIVES.items())
def test_a_signal_reaches_all_ranks_and_they_save(tmp_path, number, arrives):
    """C63: it goes to the launcher only."""
    run = Supervised(tmp_path, STOPPING)
    run.wait_for("ready-0", "ready-1", "ready-2")
    os.kill(run.pid, number)
    assert run.end() == 75
    assert [run.seen(f"saved-{rank}") for rank in range(3)] == [arrives] * 3
    assert run.seen() == ""


def test_two_different_signals_are_one_wish(tmp_path):
    """A closed terminal or a batch system may send several kinds at once: nobody is killed while saving."""
    run = Supervised(tmp_path, STOPPING.replace("0.2 * rank", "0.6 + 0.5 * rank"), processes=2, GRACE_SECONDS=0.2)
    run.wait_for("ready-0", "ready-1")
    os.kill(run.pid, signal.SIGTERM)
    os.kill(run.pid, signal.SIGINT)
    assert run.end() == 75
    assert run.seen("saved-1") != ""


def test_a_signal_before_the_ranks_can_stop_in_order(tmp_path):
    """C63: while packages are imported, or an index is built."""
    run = Supervised(tmp_path, "(folder / f'ready-{rank}').touch()\ntime.sleep(600)")
    run.wait_for("ready-0", "ready-1", "ready-2")
    os.kill(run.pid, signal.SIGINT)
    assert run.end() == 75
    assert "Traceback" not in run.seen("stdout")


def test_the_same_signal_twice_ends_ranks_that_do_not_stop(tmp_path):
    """C63."""
    run = Supervised(
        tmp_path,
        """
        signal.signal(signal.SIGTERM, lambda *_: (folder / f"heard-{rank}").touch())
        (folder / f"ready-{rank}").touch()
        while True:
            time.sleep(1)
        """,
        GRACE_SECONDS=0.3,
    )
    run.wait_for("ready-0", "ready-1", "ready-2")
    os.kill(run.pid, signal.SIGTERM)
    run.wait_for("heard-0", "heard-1", "heard-2")
    time.sleep(0.2)
    os.kill(run.pid, signal.SIGTERM)
    assert run.end(30) in (1, 75)


def test_one_rank_that_stops_alone_takes_the_others_with_it(tmp_path):
    run = Supervised(tmp_path, "if rank == 1:\n    sys.exit(75)\n" + STOPPING, STOP_SECONDS=0.3)
    assert run.end() == 75
    assert run.seen("saved-0") == "SIGTERM"


def test_a_killed_supervisor_leaves_no_ranks(tmp_path):
    run = Supervised(
        tmp_path,
        """
        from megadcp.train import launch
        launch._guard()
        (folder / f"ready-{rank}").touch()
        time.sleep(600)
        """,
    )
    run.wait_for("ready-0", "ready-1", "ready-2")
    assert len(run.ranks()) == 3
    os.kill(run.pid, signal.SIGKILL)
    os.waitpid(run.pid, 0)
    end = time.monotonic() + 10
    while run.ranks():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_rank_that_comes_too_late_leaves(tmp_path):
    """Its supervisor was killed before the rank could ask to end with it."""
    run = Supervised(
        tmp_path,
        """
        (folder / f"ready-{rank}").touch()
        wait_for("go")
        from megadcp.train import launch
        launch._guard()
        (folder / f"stayed-{rank}").touch()
        """,
        processes=1,
    )
    run.wait_for("ready-0")
    os.kill(run.pid, signal.SIGKILL)
    os.waitpid(run.pid, 0)
    (tmp_path / "go").touch()
    end = time.monotonic() + 20
    while run.ranks():
        assert time.monotonic() < end
        time.sleep(0.02)
    assert not (tmp_path / "stayed-0").exists()


def test_a_traceback_of_rank_0_that_is_no_end_is_shown_and_the_run_goes_on(tmp_path):
    run = Supervised(
        tmp_path,
        """
        import traceback
        if rank == 0:
            try:
                raise KeyError("handled")
            except KeyError:
                traceback.print_exc()
            print("later words", file=sys.stderr)
            while "later words" not in (folder / "stderr").read_text():
                time.sleep(0.01)
            print("last words", file=sys.stderr)
        """,
        processes=2,
        HOLD_SECONDS=0.2,
    )
    assert run.end() == 0
    assert run.seen().startswith("Traceback")
    assert run.seen().endswith("KeyError: 'handled'\nlater words\nlast words\n")


def test_a_command_that_does_not_exist(tmp_path):
    from megadcp.config.check import UserError

    with pytest.raises(UserError, match="can't be started"):
        supervise([str(tmp_path / "nothing")], 2)


def test_handlers_are_as_before():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    assert supervise([sys.executable, "-c", "pass"], 2) == 0
    assert [signal.getsignal(number) for number in numbers] == before


def test_torch_ranks_with_a_sum_that_never_ends(tmp_path):
    """The whole way: join, a collective, an error while another one is under way on this rank."""
    run = Supervised(
        tmp_path,
        """
        from dataclasses import replace
        import torch, torch.distributed as dist
        from megadcp.config.schema import ClusterConfig, Config
        from megadcp.train import launch
        def work():
            with launch.join(Config(cluster=ClusterConfig(processes=2, device="cpu"))) as world:
                x = torch.ones(1)
                dist.all_reduce(x)
                say(f"sum {x.item():g}")
                if world.rank == 1:
                    dist.all_reduce(torch.ones(1), async_op=True)
                    raise KeyError("the cause")
                dist.recv(torch.ones(1), 1)
        sys.exit(launch.exit_code(work))
        """,
        processes=2,
    )
    assert run.end() == 1
    assert run.seen("stdout") == "sum 2\n"
    assert run.seen().startswith("Traceback")  # and not with what rank 0 says of its lost connection
    assert "rank 0" not in run.seen()
    assert "KeyError: 'the cause'" in run.seen()
    assert run.seen().count("Traceback") == 1
