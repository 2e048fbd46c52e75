"""Ranks of tools/calibrate.py: several processes on this machine, and what their communication takes.

Bytes are counted as the cost model counts them: activations travel in 16 bits there. In fp32 they take twice as long as that, so the
bandwidth that predicts them is half of the wire's.
"""

from __future__ import annotations

import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from calibrate_measure import Compute, Effort, Span, geometric, measure_compute, measure_steps
from torch.multiprocessing.spawn import ProcessException

from megadcp.config.schema import Config
from megadcp.mesh.coords import Mesh
from megadcp.mesh.groups import Group, GroupPool
from megadcp.parallel.collectives import all_gather, all_to_all, exchange, reduce_scatter
from megadcp.plan.cost import ELEMENT_BYTES
from megadcp.plan.fit import FitError, fit

LIMIT_SECONDS = 1800.0
LARGEST_BYTES = 1 << 23
REDUCED = 1 << 22  # parameters of the gradient reduction that is timed, at most


class Message(NamedTuple):
    """One timed operation: bytes as the model counts them, how many collectives and ring steps it was, seconds."""

    bytes: float
    collectives: int
    ring_steps: int
    seconds: float


@dataclass
class Communication:
    """What was timed, and how fast the gradient reduction was (bytes/s as the model counts them)."""

    messages: list[Message] = field(default_factory=list)
    reduce_bytes: float = 0.0


@dataclass(frozen=True)
class Links:
    """Coefficients of communication, and the error that is left."""

    node_bytes: float
    node_latency: float
    ring_step_seconds: float
    error: FitError


def fit_links(messages: list[Message]) -> Links:
    """Seconds = bytes / node_bytes + collectives * node_latency + ring steps * ring_step_seconds."""
    table = np.array(messages, dtype=np.float64)
    seconds = table[:, 3]
    fastest = float(np.min(seconds / table[:, 0]))
    x = fit(table[:, :3], seconds, 0.0, [1e-6 * fastest, 0.0, 0.0])
    return Links(1 / float(x[0]), float(x[1]), float(x[2]), FitError.of(table[:, :3] @ x, seconds))


# ------------------------------------------------------------------------------------------------------------------------ ranks
def on_ranks(processes: int, device: str, threads: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """work(device, pool, *arguments) on every rank at the same time; what each returned, in rank order.

    Raises:
        RuntimeError: a rank failed (its traceback is in the message), or LIMIT_SECONDS have passed.
    """
    kind = "fork" if device == "cpu" else "spawn"  # a CUDA context can't be forked
    with tempfile.TemporaryDirectory(prefix="calibrate-") as folder:
        context = multiprocessing.start_processes(
            _rank, (processes, device, threads, folder, work, arguments), nprocs=processes, join=False, start_method=kind
        )
        assert context is not None
        end = time.monotonic() + LIMIT_SECONDS
        try:
            while not context.join(timeout=1.0):
                if time.monotonic() > end:
                    raise RuntimeError(f"the ranks did not finish within {LIMIT_SECONDS:.0f} s")
        except ProcessException as error:
            raise RuntimeError(str(error).strip()) from None
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                    process.join()
        return [pickle.loads(Path(folder, f"result-{rank}").read_bytes()) for rank in range(processes)]


def _rank(rank: int, processes: int, kind: str, threads: int, folder: str, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    if threads:
        torch.set_num_threads(threads)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{folder}/store", processes)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo", store=store, rank=rank, world_size=processes, timeout=timedelta(seconds=LIMIT_SECONDS)
    )
    with GroupPool(Mesh(processes), rank, device) as pool:
        result = work(device, pool, *arguments)
        Path(folder, f"result-{rank}").write_bytes(pickle.dumps(result))
        dist.barrier()
    dist.destroy_process_group()


def measure_rank(device: torch.device, pool: GroupPool, config: Config, tokens: int, effort: Effort, seed: int) -> tuple[Compute, Communication]:
    """All that one of several ranks measures: compute while the others compute, then communication."""
    compute = measure_compute(config, device, tokens, effort, seed)
    all_gather(torch.zeros(1, device=device), pool.lanes)  # all have come this far: nobody computes any more
    return compute, measure_communication(device, pool.lanes, config, effort)


def steps_rank(device: torch.device, pool: GroupPool, config: Config, tokens: int, effort: Effort, seed: int) -> list[tuple[float, Span]]:
    """Whole steps, each rank a lane."""
    return measure_steps(config, device, tokens, effort, seed, pool)


def slowest(ranks: list[list[tuple[float, Span]]]) -> list[tuple[float, Span]]:
    """Of each step the longest time of a rank: what the step takes."""
    return [(same[0][0], Span(*(max(values) for values in zip(*(span for _, span in same), strict=True)))) for same in zip(*ranks, strict=True)]


# ---------------------------------------------------------------------------------------------------------------- communication
def measure_communication(device: torch.device, group: Group, config: Config, effort: Effort) -> Communication:
    """Ring steps, all-gathers and all-to-alls of several sizes, and the reduction of gradients."""
    dtype = torch.bfloat16 if config.precision.format == "bf16" else torch.float32
    size, found = group.size, Communication()
    rounds = 3 * effort.rounds
    for elements in geometric(256 * size, LARGEST_BYTES // dtype.itemsize, effort.sizes + 2):
        elements -= elements % size
        own = torch.zeros(elements, dtype=dtype, device=device)
        other = torch.empty_like(own)
        parts = list(own.view(size, -1).unbind())

        def ring(own: torch.Tensor = own, other: torch.Tensor = other) -> None:
            for work in exchange([(own, (group.index + 1) % size)], [(other, (group.index - 1) % size)], group):
                work.wait()

        counted = elements * ELEMENT_BYTES  # one way
        found.messages += [
            Message(counted, 0, 1, _timed(ring, rounds, device)),
            Message(counted * (size - 1), 1, 0, _timed(lambda own=own: all_gather(own, group), rounds, device)),  # type: ignore[misc]
            Message(counted * (size - 1) / size, 1, 0, _timed(lambda parts=parts: all_to_all(parts, group), rounds, device)),  # type: ignore[misc]
        ]
    gradient = torch.zeros(REDUCED, dtype=torch.float32, device=device)
    weights = torch.zeros(REDUCED // size, dtype=dtype, device=device)

    def reduce() -> None:
        reduce_scatter(gradient, group)
        all_gather(weights, group)

    usable = REDUCED - REDUCED % size
    gradient, weights = gradient[:usable], weights[: usable // size]
    found.reduce_bytes = 6 * usable * (size - 1) / size / _timed(reduce, rounds, device)
    return found


def _timed(work: Callable[[], object], rounds: int, device: torch.device) -> float:
    """Wall clock of one call: the lower quartile, since what else the machine does can only add. All ranks make the same calls."""
    seconds = []
    for each in range(rounds + 2):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if each >= 2:
            seconds.append(time.perf_counter() - begin)
    return statistics.quantiles(seconds, n=4)[0]


def mean_communication(ranks: list[Communication]) -> Communication:
    """The mean over ranks, message by message."""
    messages = [
        Message(*(sum(values) / len(ranks) for values in zip(*same, strict=True))) for same in zip(*(one.messages for one in ranks), strict=True)
    ]
    return Communication(messages, sum(one.reduce_bytes for one in ranks) / len(ranks))


def mean_compute(ranks: list[Compute]) -> Compute:
    """The mean over ranks, sample by sample: all have measured the same ones."""
    count, first = len(ranks), ranks[0]
    mean = Compute(optimizer_seconds=sum(one.optimizer_seconds for one in ranks) / count)
    for name in ("linear", "attention"):
        tables = [getattr(one, name) for one in ranks]
        setattr(mean, name, {key: tuple(sum(table[key][way] for table in tables) / count for way in (0, 1)) for key in getattr(first, name)})
    for name in ("fitted", "held_out", "recomputed"):
        rows = zip(*(getattr(one, name) for one in ranks), strict=True)
        setattr(mean, name, [_mean_sample(list(same)) for same in rows])
    return mean


def _mean_sample(same: list[Any]) -> Any:
    seconds, wall = (sum(getattr(one, name) for one in same) / len(same) for name in ("seconds", "wall"))
    return type(same[0])(same[0].lengths, same[0].recompute, seconds, wall)
