"""A window of steps under torch.profiler: log.profile_steps=[first, count]. The ranges in it have the names of the plan's actions (engine/lane.py).

On a GPU the same window is also what `nsys profile --capture-range=cudaProfilerApi` captures.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from megadcp.config.schema import LogConfig

FOLDER = "profile"


class StepProfile:
    """As a context around the steps; a window that is not over then is written as far as it goes. Trouble is told, never raised."""

    def __init__(self, log: LogConfig, folder: Path, rank: int, device: torch.device, say: Callable[[str], None]) -> None:
        wanted = bool(log.profile_steps) and rank in log.profile_ranks
        self._first, self._count = log.profile_steps if wanted else (0, 0)
        self._path = folder / FOLDER / f"steps-{self._first}-{self._first + self._count - 1}-rank-{rank}.json"
        self._cuda, self._say = device.type == "cuda", say
        self._profile: profile | None = None
        self._last = 0

    def begin(self, step: int) -> None:
        """Before a step (1 is the first)."""
        warm = self._first > 1 and step == self._first - 1  # starting a profiler takes a while: not in the first step that is shown
        if self._count and self._profile is None and (warm or step == self._first):
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
            plan = schedule(wait=0, warmup=1, active=self._count, repeat=1) if warm else None
            self._profile = profile(activities=activities, schedule=plan, on_trace_ready=self._write)
            self._profile.start()
        if self._cuda and self._count and step == self._first:
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]

    def end(self, step: int) -> None:
        """After a step."""
        self._last = step
        if self._profile is not None:
            self._profile.step()
            if step >= self._first + self._count - 1:
                self._stop()

    def _stop(self) -> None:
        found, self._profile, self._count = self._profile, None, 0
        if found is not None:
            found.stop()
            if self._cuda:
                torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]

    def _write(self, found: profile) -> None:
        try:
            self._path.parent.mkdir(exist_ok=True)
            found.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:
            self._say(f"WARNING: the profile could not be written ({error})")
            return
        self._say(f"profile of steps {self._first} to {self._last}: {self._path} (for ui.perfetto.dev)")

    def __enter__(self) -> StepProfile:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()
