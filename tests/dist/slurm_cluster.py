"""A SLURM of four emulated nodes on this machine, for tests: real slurmctld, slurmd, munge, sbatch and srun, on loopback.

    with MiniSlurm(folder) as slurm:
        subprocess.run(["sbatch", ...], env=slurm.environment)

Needs the programs of PROGRAMS on PATH (in /usr/sbin, too); installs nothing. Daemons belong to whoever runs the tests, root or not.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "squeue", "sinfo", "scancel")
INSTALL = "apt-get install --no-install-recommends slurmctld slurmd slurm-client munge"
NODES = 4
GPUS = 8  # that each node claims to have
START_SECONDS = 20.0
PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])

CONFIG = """
ClusterName=mini
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=10
CredType=cred/munge
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/ctld
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/log/slurmd.%n.log
SlurmdSpoolDir={folder}/spool/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=5,bf_interval=5
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=5
SlurmdTimeout=10
SlurmdParameters=config_overrides
GresTypes=gpu
{nodes}
PartitionName=main Nodes=n[1-{count}] Default=YES MaxTime=2:00:00 State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=30
PartitionName=small Nodes=n[1-2] MaxTime=30 State=UP PriorityTier=1 PreemptMode=REQUEUE
PartitionName=high Nodes=n[1-{count}] MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
NODE = (
    "NodeName=n{number} NodeAddr=127.0.0.1 NodeHostname={host} Port={port} CPUs=8 Boards=1 SocketsPerBoard=1 CoresPerSocket=8 ThreadsPerCore=1 "
    "RealMemory=4096 Gres=gpu:h200:{gpus} State=UNKNOWN"
)


def missing() -> list[str]:
    """The programs that are not here."""
    return [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]


class MiniSlurm:
    """The daemons, started by entering and ended by leaving."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH}
        for name in [name for name in self.environment if name.startswith(("SLURM_", "SBATCH_", "SQUEUE_")) and name != "SLURM_CONF"]:
            del self.environment[name]

    def __enter__(self) -> MiniSlurm:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _start(self) -> None:
        folder = self.folder
        for name in ("ctld", "log", "munge", *(f"spool/n{number}" for number in range(1, NODES + 1))):
            (folder / name).mkdir(parents=True)
        (folder / "munge").chmod(0o700)
        (folder / "munge/key").write_bytes(os.urandom(1024))
        (folder / "munge/key").chmod(0o400)
        host, ports = socket.gethostname().split(".")[0], _free_ports(NODES + 1)
        nodes = "\n".join(NODE.format(number=number, host=host, port=ports[number], gpus=GPUS) for number in range(1, NODES + 1))
        text = CONFIG.format(host=host, user=getpass.getuser(), folder=folder, ports=ports, nodes=nodes, count=NODES)
        (folder / "slurm.conf").write_text(text, encoding="utf-8")
        for number in range(GPUS):
            (folder / f"gpu{number}").touch()  # stands for a device
        gpus = f"NodeName=n[1-{NODES}] Name=gpu Type=h200 Count={GPUS} File={folder}/gpu[0-{GPUS - 1}]\n"
        (folder / "gres.conf").write_text(gpus, encoding="utf-8")
        munge = folder / "munge"
        paths = {"key-file": munge / "key", "socket": folder / "munge.sock", "pid-file": folder / "munge.pid", "log-file": munge / "log"}
        self.run("munged", "--force", *(f"--{name}={path}" for name, path in paths.items()), f"--seed-file={munge / 'seed'}")
        self.run("slurmctld", "-c")
        for number in range(1, NODES + 1):
            self.start_node(f"n{number}")
        self.wait_for(lambda: self.run("sinfo", "-h", "-p", "high", "-t", "idle", "-o", "%D").strip() == str(NODES), "four idle nodes", START_SECONDS)

    def start_node(self, name: str) -> None:
        """Start the slurmd of a node."""
        self.run("slurmd", "-N", name)

    def run(self, *command: str, check: bool = True) -> str:
        """Run a SLURM program; its output."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def job(self, number: str | int) -> dict[str, str]:
        """What SLURM knows of a job: JobState, Restarts, ExitCode, Reason ..."""
        words = self.run("scontrol", "show", "job", "-o", str(number)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, done: Callable[[], bool], what: str, seconds: float) -> None:
        """Wait until done() is true.

        Raises:
            TimeoutError: it never was; with the end of the controller's log.
        """
        end = time.monotonic() + seconds
        while not done():
            if time.monotonic() > end:
                with contextlib.suppress(OSError):
                    what += "\n" + (self.folder / "log/slurmctld.log").read_text(encoding="utf-8")[-3000:]
                raise TimeoutError(f"after {seconds:.0f} s still waiting for {what}")
            time.sleep(0.2)

    def kill_node(self, name: str) -> None:
        """SIGKILL for the slurmd of a node and everything it started, as if its power had gone."""
        pid_file = self.folder / f"slurmd.{name}.pid"
        tasks = self.processes_of(name)
        victims = [int(pid_file.read_text(encoding="utf-8")), *{parent for parent in map(_parent, tasks) if "slurmstepd" in _command(parent)}, *tasks]
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        pid_file.unlink()

    def processes_of(self, node: str) -> list[int]:
        """Processes that jobs of this SLURM have on a node."""
        marks = {f"SLURMD_NODENAME={node}".encode(), f"SLURM_CONF={self.environment['SLURM_CONF']}".encode()}
        return [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if marks <= _environ(pid)]

    def stop(self) -> None:
        """End every daemon that was started here, and with them all jobs."""
        with contextlib.suppress(Exception):
            self.run("scancel", "--user", getpass.getuser())
            self.wait_for(lambda: not self.run("squeue", "-h").strip(), "the end of all jobs", 15)
        for path in [*sorted(self.folder.glob("slurmd.*.pid")), self.folder / "slurmctld.pid", self.folder / "munge.pid"]:
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(path.read_text(encoding="utf-8")), signal.SIGTERM)
                _await_end(path)


def _await_end(pid_file: Path, seconds: float = 5.0) -> None:
    """A daemon removes its pid file at the end."""
    end = time.monotonic() + seconds
    while pid_file.exists() and time.monotonic() < end:
        time.sleep(0.05)


def _environ(pid: int) -> set[bytes]:
    with contextlib.suppress(OSError):
        return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    return set()


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")
    return ""


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[1])
    return 0


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
