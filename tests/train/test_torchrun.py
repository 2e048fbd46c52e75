"""torchrun for one node of a job: signals reach the ranks once and leave them time, and their exit codes come out."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from train_helpers import config, write_corpus

from megadcp.config.run_file import dump_run
from megadcp.train import job
from megadcp.train.signals import STOPPED, StopRequest

pytestmark = pytest.mark.usefixtures("time_limit")
Launch = Callable[..., "subprocess.Popen[str]"]
START_SECONDS = 60


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Start ranks of one node by megadcp.train.torchrun."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, processes: int = 2, **environment: str) -> subprocess.Popen[str]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        options = [f"--nproc-per-node={processes}", "--master-addr=127.0.0.1", f"--master-port={port}"]
        clean = {name: text for name, text in os.environ.items() if not name.startswith(("SLURM", "TORCHELASTIC", "MEGADCP"))}
        clean |= {"OMP_NUM_THREADS": "1", **environment}
        command = [sys.executable, "-m", "megadcp.train.torchrun", *options, *arguments]
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(command, cwd=tmp_path, env=clean, start_new_session=True, **output))  # type: ignore[call-overload]
        return started[-1]

    yield start
    for each in started:
        if each.poll() is None:
            os.killpg(each.pid, signal.SIGKILL)
            each.wait()


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """Processes that the launcher has started."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            parent = Path(f"/proc/{name}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[1]
        except OSError:
            continue
        found += [int(name)] if int(parent) == process.pid else []
    return found


@pytest.mark.parametrize(("number", "to_all"), [(signal.SIGUSR1, False), (signal.SIGTERM, True)])
def test_ranks_save_and_stop(launch: Launch, tmp_path: Path, number: signal.Signals, to_all: bool) -> None:
    """C63. SLURM signals the first process of a node, or all of them: either way each rank stops once, saves, and the code is 75."""
    asked = config(write_corpus(tmp_path), run={"name": "test", "folder": str(tmp_path), "steps": 100000, "validate_every": 0},
                   optim={"schedule": "constant", "warmup_steps": 0}, cluster={"processes": 2, "device": "cpu", "threads": 1})  # fmt: skip
    dump_run(asked, tmp_path / "test/run.yaml")
    process = launch("-m", "megadcp.train.job", str(tmp_path / "test"))
    metrics, end = tmp_path / "test/metrics.jsonl", time.monotonic() + START_SECONDS
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < end and process.poll() is None:
        time.sleep(0.1)
    ranks = ranks_of(process)
    for pid in [process.pid, *(ranks if to_all else [])]:
        os.kill(pid, number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == STOPPED, out
    assert len(ranks) == 2
    assert out.count("stopped by ") == 1  # the signal's name, or "a signal to another rank" when that one saw it a step sooner
    assert "Traceback" not in out
    assert list((tmp_path / "test/checkpoints").glob("step-*"))
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


@pytest.mark.parametrize(
    ("body", "code", "told"),
    [
        ("sys.exit(3 if rank == 1 else time.sleep(60))", 3, "rank 1 failed with exit code 3"),
        ("os.kill(os.getpid(), 9) if rank == 0 else time.sleep(60)", 137, "rank 0 was ended by SIGKILL"),
        ("sys.exit(75)", 75, ""),
        ("pass", 0, ""),
    ],
)
def test_exit_codes(launch: Launch, tmp_path: Path, body: str, code: int, told: str) -> None:
    (tmp_path / "program.py").write_text(f"import os, sys, time\nrank = int(os.environ['RANK'])\n{body}\n", encoding="utf-8")
    process = launch("program.py")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == code, out
    assert told in out
    assert len(out.splitlines()) == (1 if told else 0), out


def test_the_node_number_is_slurms(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import os\nprint(os.environ['GROUP_RANK'], os.environ['RANK'])\n", encoding="utf-8")
    process = launch("--nnodes=1", "program.py", processes=1, SLURM_NODEID="0")
    assert process.communicate(timeout=60)[0] == "0 0\n"
    from megadcp.train.torchrun import _node_rank

    os.environ["SLURM_NODEID"] = "3"
    try:
        assert _node_rank(["--nnodes=4"]) == ["--node-rank=3"]
        assert _node_rank(["--node_rank=1"]) == _node_rank(["--node-rank", "1"]) == []
    finally:
        del os.environ["SLURM_NODEID"]


# ---------------------------------------------------------------------------------------------------- a request that is kept
@pytest.fixture
def ignoring(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process as a rank before the trainer listens."""
    monkeypatch.setattr(job, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(job, "HEARD_SECONDS", 0.1)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in job.BY_BATCH_SYSTEMS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def listening(node: Path) -> threading.Thread:
    thread = threading.Thread(target=job._listen, args=(node,), daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(("asked", "heard"), [(signal.SIGUSR1, "SIGTERM"), (signal.SIGTERM, "SIGUSR1")])
def test_a_request_before_the_trainer_listens_is_kept(ignoring: None, tmp_path: Path, asked: signal.Signals, heard: str) -> None:
    """The other kind is sent: two of a kind would end the process, and the first may still be on its way."""
    thread = listening(tmp_path)
    job.ask_to_stop(tmp_path, asked)
    os.kill(os.getpid(), asked)
    time.sleep(0.1)
    with StopRequest() as stop:
        thread.join(10)
        assert not thread.is_alive()
        assert stop.name == heard


def test_a_rank_that_has_heard_is_not_told_again(ignoring: None, tmp_path: Path) -> None:
    thread = listening(tmp_path)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        job.ask_to_stop(tmp_path, signal.SIGUSR1)
        thread.join(10)
        assert not thread.is_alive()
        assert stop.name == "SIGUSR1"


def test_only_the_first_request_counts(tmp_path: Path) -> None:
    assert not job.was_stopped(tmp_path)
    job.ask_to_stop(tmp_path, signal.SIGUSR1)
    job.ask_to_stop(tmp_path, signal.SIGTERM)
    assert (tmp_path / "stop").read_text(encoding="ascii") == "SIGUSR1"
