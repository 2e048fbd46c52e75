"""What each microbatch took, in seconds and bytes, measured without waiting for the device in between."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Measured:
    """One microbatch beside its prediction. bytes: see `device_bytes`."""

    slot: int
    predicted_seconds: float
    seconds: float
    predicted_bytes: int
    bytes: int


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
    """Measures the microbatches of one step. On a GPU by events and the allocator's counters, so the host never waits.

    Bytes on a GPU: the largest allocation during the microbatch less what was allocated before it, which is what a plan predicts. On a CPU:
    the resident set of the whole process at the end of the forward, because no allocator counts there.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory_bytes = 0
        self._marks: list[tuple[object, object]] = []
        self._bytes: list[int] = []

    @contextmanager
    def microbatch(self) -> Iterator[None]:
        """Around one microbatch's forward and backward."""
        cuda = self.device.type == "cuda"
        before = 0
        if cuda:
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        begin = self._mark()
        self._bytes.append(0)
        yield
        self._marks.append((begin, self._mark()))
        if cuda:
            peak = torch.cuda.max_memory_allocated(self.device)
            self._bytes[-1] = peak - before
            self.memory_bytes = max(self.memory_bytes, peak)

    def forward_done(self) -> None:
        """Between forward and backward, when all stored activations are alive."""
        if self.device.type != "cuda":
            self._bytes[-1] = resident_bytes()
            self.memory_bytes = max(self.memory_bytes, self._bytes[-1])

    def _mark(self) -> object:
        if self.device.type != "cuda":
            return time.perf_counter()
        make: Callable[..., torch.cuda.Event] = torch.cuda.Event  # untyped in torch
        event = make(enable_timing=True)
        event.record()
        return event

    def read(self) -> list[tuple[float, int]]:
        """(seconds, bytes) of each microbatch; on a GPU call it once the step has been waited for."""
        seconds = []
        for begin, end in self._marks:
            if isinstance(begin, float) and isinstance(end, float):
                seconds.append(end - begin)
            else:
                seconds.append(begin.elapsed_time(end) / 1000)  # type: ignore[attr-defined]
        return list(zip(seconds, self._bytes, strict=True))
