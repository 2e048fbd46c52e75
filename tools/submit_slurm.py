"""What tools/submit.py asks SLURM: whether a request can be met, the queueing itself, and how a job is doing.

Only SLURM's own programs are called (sinfo, squeue, sbatch, scontrol), found on PATH.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megadcp.config.check import UserError, nearest

ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"}
POLL_SECONDS, PATIENT_POLL_SECONDS = 1.0, 5.0  # between two looks at a job: in its first minute, and later
FIRST_SECONDS = 60.0
LONGEST_LEAD = 65535  # seconds, of sbatch --signal
EARLY = 60  # seconds by which SLURM may send a signal too early


def limit_seconds(text: str, key: str = "cluster.slurm.time=") -> float:
    """Seconds of a time limit, as SLURM writes it; infinity for UNLIMITED. `key` names it in an error.

    Raises:
        UserError: not a time limit, or a plain number: minutes to SLURM, and seconds to YAML, which reads 24:00:00 as one.
    """
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return float("inf")
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None or text.isdecimal():
        raise UserError(
            f"{key}{text} is no time limit; legal: hours:minutes:seconds or days-hours:minutes:seconds, as 12:00:00 or 2-00:00:00 "
            "(in a YAML file in quotes)"
        )
    days, first, second, third = match.groups()
    if days is not None:
        return int(days) * 86400 + int(first) * 3600 + int(second or 0) * 60 + int(third or 0)
    if third is not None:
        return int(first) * 3600 + int(second) * 60 + int(third)
    return int(first) * 60 + int(second or 0)


@dataclass(frozen=True)
class Wanted:
    """What a job asks for; `flags` when it was not asked by settings, but by --partition and --time."""

    partition: str
    nodes: int
    gres: str
    time: str
    flags: bool = False

    def key(self, name: str) -> str:
        """How an error names what was asked."""
        return f"--{name} " if self.flags else "cluster.nodes=" if name == "nodes" else f"cluster.slurm.{name}="


def check_partition(wanted: Wanted) -> None:
    """Refuse what no state of the partition could ever meet. Says nothing where sinfo is not there or does not answer.

    Raises:
        UserError: no such partition, it is closed, too small, without these devices, or its jobs must be shorter.
    """
    text = _ask("sinfo", "--noheader", "--format=%P|%a|%l|%D|%G")
    if text is None:
        return
    rows = [tuple(part.strip() for part in line.split("|")) for line in text.splitlines() if line.count("|") == 4]
    name = wanted.partition or next((row[0].rstrip("*") for row in rows if row[0].endswith("*")), "")
    here = [row for row in rows if row[0].rstrip("*") == name]
    if not here:
        names = dict.fromkeys(row[0].rstrip("*") for row in rows)
        if rows and name:
            raise UserError(f"{wanted.key('partition')}{name} does not exist; {nearest(name, names)}")
        if rows:
            raise UserError(f"this SLURM has no default partition; give {wanted.key('partition')}NAME, legal here: {', '.join(names)}")
        return
    if here[0][1] != "up":
        raise UserError(f"partition {name} takes no jobs now (it is {here[0][1]})")
    nodes = sum(int(row[3]) for row in here)
    if nodes < wanted.nodes:
        raise UserError(f"{wanted.key('nodes')}{wanted.nodes} is more than the {nodes} nodes of partition {name}; legal here: 1 to {nodes}")
    if wanted.gres:
        fitting = sum(int(row[3]) for row in here if _has(row[4], wanted.gres))
        if fitting < wanted.nodes:
            devices = ", ".join(dict.fromkeys(re.sub(r"\(S:[^)]*\)", "", row[4]) for row in here))
            raise UserError(
                f"cluster.slurm.gres={wanted.gres} on {wanted.nodes} nodes: partition {name} has {fitting} such nodes (its nodes have {devices}); "
                "set cluster.processes, cluster.nodes or cluster.slurm.gres to what is there"
            )
    if limit_seconds(wanted.time) > _seconds(here[0][2]):
        raise UserError(f"{wanted.key('time')}{wanted.time} is longer than partition {name} allows; legal here: up to {here[0][2]}")


def _seconds(limit: str) -> float:
    try:
        return limit_seconds(limit)
    except UserError:
        return float("inf")


def _has(devices: str, wanted: str) -> bool:
    """Whether "gpu:h200:8(S:0-1),nic:2" holds "gpu:8" or "gpu:h200:8"; yes for what this function can't read."""
    asked = re.fullmatch(r"(\w+)(?::([A-Za-z]\w*))?(?::(\d+))?", wanted)
    if asked is None:
        return True
    name, kind, count = asked[1], asked[2], int(asked[3] or 1)
    found = 0
    for each in re.sub(r"\([^)]*\)", "", devices).split(","):
        match = re.fullmatch(r"(\w+)(?::([A-Za-z][\w.-]*))?(?::(\d+))?", each)
        if match and match[1] == name and (kind is None or match[2] == kind):
            found += int(match[3] or 1)
    return found >= count


def refuse_without_sbatch() -> None:
    """Say it before anything is written.

    Raises:
        UserError: no sbatch here.
    """
    if shutil.which("sbatch") is None:
        raise UserError("sbatch is not on PATH, so nothing can be queued here; call this on a login node of the cluster, or look at it with --print")


def jobs_called(name: str) -> list[tuple[str, str]]:
    """(number, state) of your own jobs of this name that are queued or running."""
    text = _ask("squeue", "--noheader", "--me", f"--name={name}", "--format=%i %T") or ""
    return [(parts[0], parts[1]) for parts in map(str.split, text.splitlines()) if len(parts) == 2]


def queue(script: Path) -> str:
    """Queue the script; the job's number.

    Raises:
        UserError: SLURM refuses it.
    """
    done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False)
    number = done.stdout.strip().split(";")[0]
    if done.returncode or not number:
        reason = " ".join(line.removeprefix("sbatch: error: ") for line in done.stderr.splitlines()) or f"exit code {done.returncode}"
        raise UserError(f"SLURM does not take the job: {reason} (the script is {script})")
    return number


@dataclass(frozen=True)
class JobState:
    """state is empty when SLURM does not know the job (any more)."""

    state: str
    reason: str = ""
    code: int = 0
    restarts: int = 0


def state_of(job: str) -> JobState | None:
    """How the job is doing; None when SLURM does not answer."""
    done = subprocess.run(["scontrol", "--oneliner", "show", "job", job], capture_output=True, text=True, check=False)
    if done.returncode:
        return JobState("") if "Invalid job id" in done.stderr + done.stdout else None
    found = dict(re.findall(r"(JobState|Reason|ExitCode|Restarts)=(\S*)", done.stdout))
    code, _, by_signal = found.get("ExitCode", "0:0").partition(":")
    exit_code = int(code) or (128 + int(by_signal) if by_signal not in ("", "0") else 0)
    reason = found.get("Reason", "None")
    return JobState(found.get("JobState", ""), "" if reason == "None" else reason, exit_code, int(found.get("Restarts", 0)))


def follow(job: str, log: Path, say: Callable[[str], None]) -> int:
    """Show the log as it grows, until the job has ended for good; its exit code. A job that is queued again is followed further."""
    shown, last, begin = 0, "", time.monotonic()
    while True:
        now = state_of(job)
        shown = _show(log, shown)
        if now is not None:
            told = now.state + (f" ({now.reason})" if now.reason and now.state == "PENDING" else "") + (" again" if now.restarts else "")
            if told != last and now.state:
                say(f"job {job} is {told}")
                last = told
            if now.state in ENDED:
                break
            if not now.state:
                say(f"SLURM knows nothing of job {job} any more; its log is {log}")
                return 1
        time.sleep(POLL_SECONDS if time.monotonic() - begin < FIRST_SECONDS else PATIENT_POLL_SECONDS)
    time.sleep(POLL_SECONDS)  # the log's last lines
    _show(log, shown)
    return 0 if now.state == "COMPLETED" else now.code or 1


def _show(log: Path, shown: int) -> int:
    """Write what the log holds beyond `shown` bytes; its new length."""
    try:
        with open(log, "rb") as file:
            file.seek(shown)
            text = file.read()
    except OSError:
        return shown
    sys.stdout.write(text.decode(errors="replace"))
    sys.stdout.flush()
    return shown + len(text)


def _ask(*command: str) -> str | None:
    """The output of a program; None where it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout
