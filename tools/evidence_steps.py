"""The figures of one step of the grid: the plan, the bounds, and what it must beat, each asked for by itself so that each can be cut off.

An operation runs in a child process (evidence_children.py). `step_line` says which are asked for, and makes the result of the answers.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import Any, NamedTuple

from evidence_cells import Cell, Job, Line

from megadcp.plan.baseline_megatron import balanced_groups, caps, megatron_balanced, scheduler
from megadcp.plan.baselines import FIRST_STEPS, bucket, static_any, static_best, static_fixed
from megadcp.plan.bound_1f1b import lower_bound_1f1b
from megadcp.plan.limits import most_cp
from megadcp.plan.memory import group_sizes

PLAN_LIMIT = 10.0  # CPU seconds of a scheduler for one step, this project's and megatron-core's alike
TUNING_LIMIT = 30.0  # of all caps of megatron-core's scheduler together: tuning it is our doing
HOPELESS = 1.25 * TUNING_LIMIT  # what one cap took times the number of caps: above this, tuning is not begun
OTHER_LIMIT = 60.0  # of the other baselines, and of a whole study
BOUND_1F1B_LANES, BOUND_1F1B_SEEDS = 32, 3  # one to two seconds a step
Answer = dict[str, Any]


class Ask(NamedTuple):
    """One operation of a job, and after how many CPU seconds it is cut off."""

    operation: str
    job: Job
    limit: float


@lru_cache(maxsize=4)
def steps_of(job: Job, count: int) -> list[list[int]]:
    """Lengths, drawn once for all operations of a job."""
    return job.steps(count)


class Clock:
    """CPU time of this process: measured, and limited. Beyond the limit the process ends (SIGPROF)."""

    def __init__(self, limit: float) -> None:
        self.limit = limit

    def milliseconds(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """What a call gives, and the CPU milliseconds that it took."""
        signal.setitimer(signal.ITIMER_PROF, self.limit)
        begin = time.process_time()
        try:
            value = call()
            return value, round((time.process_time() - begin) * 1e3, 2)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)


# ------------------------------------------------------------------------------------------------------------- operations
def plan(job: Job, clock: Clock) -> Answer:
    """The plan of this step: seconds, bound, peak bytes of the fullest stage, CPU milliseconds."""
    lengths, plan_for = steps_of(job, FIRST_STEPS)[0], job.planner()
    found, taken = clock.milliseconds(lambda: plan_for(0, lengths))
    predicted = found.predicted
    return {
        "seconds": predicted.seconds,
        "bound": digits(predicted.lower_bound_seconds),
        "peak": max(predicted.peak_bytes),
        "microbatches": len(found.microbatches),
        "plan_ms": taken,
    }


def static(job: Job, clock: Clock) -> Answer:
    """static-best: seconds, and its peak bytes of the fullest stage."""
    lengths, plan_for = steps_of(job, FIRST_STEPS)[0], job.planner()
    found, _ = clock.milliseconds(lambda: static_best(plan_for.basis, lengths, job.max_length))
    if found is None:
        return {"static-best": None}
    memory, sizes = plan_for.memory, group_sizes(found.microbatches)
    peak = max(memory.static(stage, sizes) + own for stage, own in enumerate(memory.peaks(found.microbatches)))
    return {"static-best": digits(found.makespan), "static_peak": round(peak)}


def any_packs(job: Job, clock: Clock) -> Answer:
    """static-any, the best for this step."""
    lengths, basis = steps_of(job, FIRST_STEPS)[0], job.planner().basis
    found, _ = clock.milliseconds(lambda: static_any(basis, lengths, job.max_length))
    return {"static-any": None if found is None else digits(found.makespan)}


def fixed(job: Job, clock: Clock) -> Answer:
    """static-fixed, chosen by the run's first eight steps, of which this is the first."""
    steps, basis = steps_of(job, FIRST_STEPS), job.planner().basis
    return {"static-fixed": digits(clock.milliseconds(lambda: static_fixed(basis, steps, job.max_length)[0])[0])}


def buckets(job: Job, clock: Clock) -> Answer:
    """The method's own baseline."""
    lengths, basis = steps_of(job, FIRST_STEPS)[0], job.planner().basis
    return {"bucket": digits(clock.milliseconds(lambda: bucket(basis, lengths, job.max_length))[0])}


def megatron_once(job: Job, clock: Clock) -> Answer:
    """CPU milliseconds of megatron-core's scheduler with one cap, the middle one of those that are tried; {} where it isn't installed."""
    make = scheduler()
    if make is None:
        return {}
    lengths, lanes = steps_of(job, FIRST_STEPS)[0], job.lanes
    every = list(caps(max(lengths), most_cp(job.planner().basis)))
    _, taken = clock.milliseconds(lambda: balanced_groups(make, lengths, every[len(every) // 2], lanes))
    return {"megatron_ms": taken, "megatron_caps": len(every)}


def megatron(job: Job, clock: Clock) -> Answer:
    """megatron-core's scheduler, its cap tuned for this step."""
    scheduler()  # importing it does not count
    lengths, basis = steps_of(job, FIRST_STEPS)[0], job.planner().basis
    return {"megatron": digits(clock.milliseconds(lambda: megatron_balanced(basis, lengths))[0])}


def bound_1f1b(job: Job, clock: Clock) -> Answer:
    """The tighter bound for 1F1B."""
    lengths, basis = steps_of(job, FIRST_STEPS)[0], job.planner().basis
    return {"bound_1f1b": digits(clock.milliseconds(lambda: lower_bound_1f1b(basis, lengths))[0])}


def digits(value: float) -> float | None:
    """Seven digits; None for what fits nowhere."""
    return float(f"{value:.7g}") if math.isfinite(value) else None


STEP_OPERATIONS: dict[str, Callable[[Job, Clock], Answer]] = {
    "plan": plan,
    "static-best": static,
    "static-any": any_packs,
    "static-fixed": fixed,
    "bucket": buckets,
    "megatron_once": megatron_once,
    "megatron": megatron,
    "bound_1f1b": bound_1f1b,
}


# ----------------------------------------------------------------------------------------------------------- what is asked
class Slow:
    """Which operations were cut off in which cells: they are not asked again for further seeds."""

    def __init__(self) -> None:
        self.known: set[tuple[Cell, str]] = set()

    def learn(self, line: Line) -> None:
        """Take in a result."""
        cell = Cell(*(line[name] for name in Cell._fields))
        self.known |= {(cell, operation) for operation in line.get("over", {})}


def step_line(job: Job, line: Line, slow: Slow) -> Generator[Ask, Answer, Line]:
    """Ask for everything about a step; the result. `over`: what was cut off, and after how many CPU seconds."""
    if job.lanes < 1:
        return {**line, "why": f"one copy of the model takes tp {job.tp} x pp {job.pp} = {job.tp * job.pp} GPUs"}
    wanted = [("plan", PLAN_LIMIT), *((name, OTHER_LIMIT) for name in ("static-best", "static-any", "static-fixed", "bucket"))]
    if job.pp == 1:
        wanted += [("megatron_once", PLAN_LIMIT), ("megatron", TUNING_LIMIT)]
    elif job.lanes <= BOUND_1F1B_LANES and job.seed <= BOUND_1F1B_SEEDS:
        wanted.append(("bound_1f1b", PLAN_LIMIT))
    over: dict[str, float] = {}
    cell = Cell(*(getattr(job, name) for name in Cell._fields))
    for operation, limit in wanted:
        if operation in over or (operation == "megatron" and "megatron_once" in over) or (cell, operation) in slow.known:
            over.setdefault(operation, limit)
            continue
        found = yield Ask(operation, job, limit)
        if "why" in found:
            return {**line, **found}
        if "over" in found:
            over[operation] = limit
        if found.get("megatron_ms", 0.0) * found.get("megatron_caps", 0) > 1e3 * HOPELESS:
            over["megatron"] = TUNING_LIMIT
        line.update(found)
    return {**line, "over": over} if over else line


def study_line(job: Job, line: Line, slow: Slow) -> Generator[Ask, Answer, Line]:
    """Ask for a whole study of one step."""
    if job.lanes < 1:
        return {**line, "why": f"one copy of the model takes {job.tp * job.pp} GPUs"}
    found = yield Ask(job.kind, job, OTHER_LIMIT)
    return {**line, **({"over": {job.kind: OTHER_LIMIT}} if "over" in found else found)}
