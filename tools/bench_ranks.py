"""Ranks of the benchmarks: gloo processes on loopback, forked from a process that has imported everything; and how figures are told.

A rank's exception ends the call with its traceback; what takes longer than its limit ends with the stacks of all ranks.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CPU = torch.device("cpu")
DUMP_SECONDS = 0.5


def on_ranks(world: int, work: Callable[..., Any], *arguments: Any, limit_s: float = 600.0) -> list[Any]:
    """work(rank, *arguments) on `world` ranks of one thread each, torch.distributed up; what each returned (pickled), in rank order.

    Raises:
        RuntimeError: `limit_s` have passed; the stacks of all ranks are in the message.
        torch.multiprocessing.ProcessRaisedException: a rank raised; its traceback is in the message.
    """
    torch.set_num_threads(1)  # a fork must not find threads that the parent has and it has not
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        start: Callable[..., Any] = torch.multiprocessing.start_processes  # type: ignore[attr-defined]
        context = start(_rank, (world, folder, work, arguments, limit_s), nprocs=world, join=False, start_method="fork")
        assert context is not None
        end = time.monotonic() + limit_s
        while not context.join(timeout=min(1.0, limit_s)):
            if time.monotonic() > end:
                raise RuntimeError(_end(context.processes, Path(folder), limit_s))
        return [pickle.loads(Path(folder, f"result-{rank}").read_bytes()) for rank in range(world)]


def _end(processes: Sequence[Any], folder: Path, limit_s: float) -> str:
    """Let all ranks write where they are, end them, and give what they wrote."""
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(DUMP_SECONDS)
    for process in processes:
        process.kill()
        process.join()
    stacks = (f"rank {rank}:\n{Path(folder, f'stacks-{rank}').read_text()}" for rank in range(len(processes)))
    return f"the ranks did not finish within {limit_s:g} s\n" + "\n".join(stacks)


def _rank(rank: int, world: int, folder: str, work: Callable[..., Any], arguments: tuple[Any, ...], limit_s: float) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with Path(folder, f"stacks-{rank}").open("w", encoding="utf-8") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks)
        store = dist.FileStore(f"{folder}/store", world)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=limit_s + 60))
        result = work(rank, *arguments)
        Path(folder, f"result-{rank}").write_bytes(pickle.dumps(result))
        dist.barrier()  # nobody leaves before all are done: a closed connection would be the others' error
        dist.destroy_process_group()
        faulthandler.unregister(signal.SIGUSR1)


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """The contestants in the order of this turn: each is first in its turn, so that what one leaves behind hits all alike."""
    first = turn % len(names)
    return [*names[first:], *names[:first]]


# --------------------------------------------------------------------------------------------------------------------- figures
def spread(values: Sequence[float], digits: int = 3) -> str:
    """Median (lower quartile to upper quartile)."""
    low, middle, high = quartiles(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile; one value is all three."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Quotients, turn by turn."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table."""
    lines = ["| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *rows]]
    return "\n".join(lines) + "\n"


def load_average() -> str:
    """Of the last minute: what else the machine does."""
    return f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
