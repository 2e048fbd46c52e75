"""Is a run well? Signs of life of every rank, and what is done about steps that can't be applied.

Signs of life. A rank says when it begins something and how long that may take (`Heart.beat`); a thread of it writes this to
ranks/rank-N.heart. Under our supervisor that process looks at the files: when one is overdue it shows the stacks of all ranks and ends them.
Under torchrun, srun or alone each rank's thread looks by itself: it writes its stacks, leaves a file for the other ranks (which then write
theirs), and ends the process with HUNG. No collective, no store: what hangs may be either. Times are monotonic, so a clock that is set
back or forth means nothing.

Bad steps. NaN and Inf, and on request loss spikes, are skipped, end the run, or send it back to an older checkpoint (`BadSteps`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from megadcp.config.check import UserError
from megadcp.config.schema import HealthConfig
from megadcp.train.incidents import add_incident
from megadcp.train.run_folder import sign_of_life

HUNG = 70  # exit code (EX_SOFTWARE): no rank got on for too long
RANKS = "ranks"
LEAST_STEP_SECONDS = 120.0
TIMES = 10.0  # the longest step so far, to be the limit of the next
SLOWEST_LOOK, FASTEST_LOOK = 5.0, 0.05  # seconds between two looks of the thread
SUSPENDED_SECONDS = 5.0  # a thread that slept so much too long was stopped together with its process: that is no hang
OTHERS_SECONDS = 3.0  # for the other ranks to write their stacks, too
LIFE_SECONDS = 20.0  # between two signs of life of the whole run
STUCK_SECONDS = 60.0  # after the limit, when even the thread can't run: then the C library's clock ends the process


class Heart:
    """The signs of life of one rank. `beat` costs nothing; a thread does the rest. A context: inside, the rank is watched."""

    def __init__(self, health: HealthConfig, folder: Path, rank: int, world_size: int, life: str, supervised: bool) -> None:
        """`folder` is the run's; `life` names this start of the run, the same on all ranks; supervised: somebody else looks at the file."""
        self.health, self.folder, self.rank, self.world_size, self.life, self.supervised = health, folder, rank, world_size, life, supervised
        self.longest = 0.0
        self._state = ("starting", 0, time.monotonic(), health.other_timeout_s)  # replaced as a whole
        self._wake, self._over = threading.Event(), False
        self._thread: threading.Thread | None = None

    def beat(self, what: str, step: int, limit: float | None = None) -> None:
        """Say that this rank begins `what` at `step` steps done; limit: seconds it may take, None: health.other_timeout_s."""
        before, limit = self._state[3], self.health.other_timeout_s if limit is None else limit
        self._state = (what, step, time.monotonic(), limit)
        if limit < before:
            self._wake.set()  # the thread has to look sooner than it thinks

    def step(self, step: int, predicted: float) -> None:
        """It waits for the next step, or runs it. predicted: seconds of its plan, 0 where not known yet."""
        if not self.longest:
            self.beat("its first step", step)
            return
        self.beat("a step", step, self.health.step_timeout_s or max(LEAST_STEP_SECONDS, TIMES * max(self.longest, predicted)))

    def took(self, seconds: float) -> None:
        """A step ended after so long."""
        self.longest = max(self.longest, seconds)

    def __enter__(self) -> Heart:
        if self.supervised:
            self._write(self._state)
        self._thread = threading.Thread(target=self._watch, name="heart", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over = True
        self._wake.set()
        assert self._thread is not None
        self._thread.join(OTHERS_SECONDS)
        if self._alone_in_c:
            faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(OSError):
            heart_file(self.folder / RANKS, self.rank).unlink()

    # --------------------------------------------------------------------------------------------------------- in the thread
    @property
    def _alone_in_c(self) -> bool:
        """Whether the C library's clock is set, too: for ranks that nobody else looks at. A single process leaves it to its user."""
        return not self.supervised and self.world_size > 1

    def _watch(self) -> None:
        written, seen, before = self._state, self._state, time.monotonic()
        told = before
        excused = 0.0  # time in which the whole process was stopped
        with self._stacks() if self._alone_in_c else contextlib.nullcontext() as stacks:
            while True:
                look = min(SLOWEST_LOOK, max(FASTEST_LOOK, seen[3] / 20))
                self._wake.wait(look)
                self._wake.clear()
                if self._over:
                    return
                state, now = self._state, time.monotonic()
                slept, before = now - before - look, now
                excused = (excused if state is seen else 0.0) + (slept if slept > SUSPENDED_SECONDS else 0.0)
                seen = state
                if self.supervised and state is not written:
                    self._write(state)
                    written = state
                if self.rank == 0 and now > told + LIFE_SECONDS:
                    sign_of_life(self.folder)
                    told = now
                if not self.supervised:
                    self._judge(state, now - excused, stacks)

    def _stacks(self) -> IO[str]:
        """The file for this rank's stacks."""
        (self.folder / RANKS).mkdir(parents=True, exist_ok=True)
        return open(self.folder / RANKS / f"stacks-{self.rank}.txt", "w", encoding="utf-8")

    def _judge(self, state: tuple[str, int, float, float], now: float, stacks: IO[str] | None) -> None:
        what, step, since, limit = state
        if stacks is not None:
            faulthandler.dump_traceback_later(max(1.0, since + limit - now) + STUCK_SECONDS, exit=True, file=stacks)
        if now > since + limit:
            self._leave(stacks, f"rank {self.rank} did not get on for {now - since:.0f} s in {what} after step {step}", step)
        elif self._hang_file.exists():
            self._leave(stacks, f"rank {self.rank} was in {what} after step {step} when another rank hung", step)

    def _write(self, state: tuple[str, int, float, float]) -> None:
        what, step, since, limit = state
        path = heart_file(self.folder / RANKS, self.rank)
        with contextlib.suppress(OSError):
            draft = path.with_name(f".{path.name}.{os.getpid()}")
            draft.write_text(json.dumps({"what": what, "step": step, "since": since, "due": since + limit}), encoding="utf-8")
            os.replace(draft, path)

    @property
    def _hang_file(self) -> Path:
        return self.folder / RANKS / f".hang-{self.life}"

    def _leave(self, stacks: IO[str] | None, text: str, step: int) -> None:
        stacks = stacks or self._stacks()
        first = not self._hang_file.exists()
        with contextlib.suppress(OSError):
            self._hang_file.touch()
        faulthandler.dump_traceback(stacks, all_threads=True)
        stacks.flush()
        told = f"{text} (health.step_timeout_s); its stacks are in {stacks.name}"
        if first:
            add_incident(self.folder, "hang", step, text, rank=self.rank)
            print(told, file=sys.stderr, flush=True)
            faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
            time.sleep(OTHERS_SECONDS)
        else:
            print(told, file=sys.stderr, flush=True)
        os._exit(HUNG)


def heart_file(folder: Path, rank: int) -> Path:
    """Where a rank's signs of life are; `folder` is that of what ranks say."""
    return folder / f"rank-{rank}.heart"


@dataclass(frozen=True)
class Overdue:
    """A rank that should have got on by now."""

    rank: int
    what: str
    step: int
    seconds: float

    def __str__(self) -> str:
        return f"rank {self.rank} did not get on for {self.seconds:.0f} s in {self.what} after step {self.step}"


def overdue(folder: Path, ranks: int, slack: float = 1.0) -> list[Overdue]:
    """The ranks of this machine that are late, the one that has stood still longest first."""
    found, now = [], time.monotonic()
    for rank in range(ranks):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            heart = json.loads(heart_file(folder, rank).read_text(encoding="utf-8"))
            if now > float(heart["due"]) + slack:
                found.append(Overdue(rank, str(heart["what"]), int(heart["step"]), now - float(heart["since"])))
    return sorted(found, key=lambda one: (-one.seconds, one.rank))


def forget_hearts(folder: Path) -> None:
    """Remove signs of life of an earlier start."""
    for path in [*folder.glob("rank-*.heart"), *folder.glob(".hang-*")]:
        path.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------------------------ bad steps
class BadSteps:
    """Judges steps by their loss; the same on all ranks, since all know the same loss. Its window is part of a checkpoint."""

    def __init__(self, health: HealthConfig) -> None:
        self.health = health
        self.losses: deque[float] = deque(maxlen=health.spike_window)

    def spike(self, loss: float) -> str:
        """Why this loss is a spike; empty when it is none, or nothing is done about spikes."""
        if self.health.spike == "none" or len(self.losses) < self.health.spike_window:
            return ""
        middle = statistics.median(self.losses)
        if loss <= self.health.spike_factor * middle:
            return ""
        return f"loss {loss:.4g} is {loss / middle:.3g} times the median {middle:.4g} of the last {len(self.losses)} steps"

    def refuse(self, loss: float, norm: float) -> str:
        """Why a finite step must not be applied; empty where it may."""
        return self.spike(loss)

    def applied(self, loss: float) -> None:
        """A step was applied: its loss counts from now on."""
        self.losses.append(loss)

    def policy(self, problem: str) -> str:
        """skip, stop or rollback, for a step that was not applied because of `problem`."""
        if problem.startswith("loss "):
            return self.health.spike
        return self.health.nan if problem.endswith("not finite") else "skip"

    def to_dict(self) -> dict[str, Any]:
        """Everything to keep, as JSON values."""
        return {"losses": list(self.losses)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on with what `to_dict` gave. UserError if it is damaged."""
        try:
            self.losses.clear()
            self.losses.extend(float(one) for one in state["losses"])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"the losses of the last steps can't be read ({error!r})") from None


@dataclass(frozen=True)
class Rollback:
    """Back to the checkpoint of `step`, because of step `failed`, after which the document order stood at `place`; `rollbacks` so far."""

    step: int
    failed: int
    place: int
    problem: str
    rollbacks: int
