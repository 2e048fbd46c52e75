"""What each microbatch took, in seconds and bytes, measured without waiting for the device in between."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.profiler import record_function

from megadcp.plan.actions import BACKWARD, FORWARD


@dataclass(frozen=True)
class Measured:
    """One microbatch beside its prediction, on one rank. seconds: of its actions on this stage, without waiting for messages of the pipeline.

    bytes: see `Stopwatch`.
    """

    slot: int
    predicted_seconds: float
    seconds: float
    predicted_bytes: int
    bytes: int


class Timed(NamedTuple):
    """An action that a rank has run: seconds from the begin of its step, which all ranks reach together (agree.py)."""

    slot: int
    kind: str
    chunk: int
    begin: float
    end: float


def resident_bytes() -> int:
    """Resident set of this process now, in bytes (0 where the system doesn't tell)."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return _peak_resident_bytes()


def _peak_resident_bytes() -> int:
    """Systems without /proc only tell the largest resident set so far."""
    try:
        import resource
        import sys
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Stopwatch:
    """Measures the microbatches of one step, each over its actions. On a GPU by events and the allocator's counters: the host never waits.

    Bytes on a GPU: the largest over its actions of what the microbatch keeps from its earlier actions plus what the action allocates at its
    peak, which is what a plan predicts. On a CPU: the resident set of the whole process at the end of a forward, as no allocator counts there.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory_bytes = 0
        self._marks: list[tuple[int, object, object]] = []
        self._names: list[tuple[str, int]] = []  # kind and chunk of each mark
        self._zero = self._mark()
        self._kept: defaultdict[int, int] = defaultdict(int)
        self._bytes: defaultdict[int, int] = defaultdict(int)

    @contextmanager
    def action(self, slot: int, forward: bool, chunk: int = 0, name: str = "") -> Iterator[None]:
        """Around one forward or backward of (a chunk of) a microbatch. `name`: what profilers show."""
        cuda = self.device.type == "cuda"
        before = 0
        if cuda:
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        begin = self._mark()
        with _named(name, cuda):
            yield
        self._marks.append((slot, begin, self._mark()))
        self._names.append((FORWARD if forward else BACKWARD, chunk))
        if cuda:
            peak = torch.cuda.max_memory_allocated(self.device)
            self._note(slot, self._kept[slot] + peak - before, peak)
            self._kept[slot] += torch.cuda.memory_allocated(self.device) - before
        elif forward:
            resident = resident_bytes()
            self._note(slot, resident, resident)

    def _note(self, slot: int, count: int, whole: int) -> None:
        self._bytes[slot] = max(self._bytes[slot], count)
        self.memory_bytes = max(self.memory_bytes, whole)

    def _mark(self) -> object:
        if self.device.type != "cuda":
            return time.perf_counter()
        make: Callable[..., torch.cuda.Event] = torch.cuda.Event  # untyped in torch
        event = make(enable_timing=True)
        event.record()
        return event

    def read(self) -> dict[int, tuple[float, int]]:
        """(seconds, bytes) of each microbatch, by slot; on a GPU call it once the step has been waited for."""
        seconds: defaultdict[int, float] = defaultdict(float)
        for slot, begin, end in self._marks:
            seconds[slot] += _between(begin, end)
        return {slot: (seconds[slot], self._bytes[slot]) for slot in sorted(seconds)}

    def actions(self) -> tuple[Timed, ...]:
        """Everything that was run, in order; on a GPU call it once the step has been waited for."""
        return tuple(
            Timed(slot, kind, chunk, _between(self._zero, begin), _between(self._zero, end))
            for (slot, begin, end), (kind, chunk) in zip(self._marks, self._names, strict=True)
        )

    def span(self) -> float:
        """Seconds from the begin of the first action to the end of the last, waiting included; 0 without any."""
        return _between(self._marks[0][1], self._marks[-1][2]) if self._marks else 0.0


@contextmanager
def _named(name: str, cuda: bool) -> Iterator[None]:
    """A range of this name for torch.profiler, and on a GPU for NVTX, which nsys shows. Without a profiler both cost microseconds."""
    with record_function(name or "action"):
        if cuda:
            torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            if cuda:
                torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


def _between(begin: object, end: object) -> float:
    if isinstance(begin, float) and isinstance(end, float):
        return end - begin
    return float(begin.elapsed_time(end)) / 1000  # type: ignore[attr-defined]
