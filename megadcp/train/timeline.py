"""What every rank did when, of chosen steps: timeline.jsonl, and the measured picture of a step that follows from it. No torch.

A line: step (steps done, as in metrics.jsonl), plan (hash of what was run), actions: of each rank in order, [slot, kind, chunk, begin, end] each,
in microseconds from the begin of the step on that rank. All ranks begin a step together, after they have compared their plans: their
clocks agree to what that comparison takes, and on a GPU to what the device still had to do of the step before.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megadcp.config.check import UserError
from megadcp.config.schema import Config
from megadcp.mesh.coords import Mesh
from megadcp.plan.simulate import Event, Timeline
from megadcp.plan.step_plan import StepPlan, plan_hash

NAME = "timeline.jsonl"
Action = tuple[int, str, int, float, float]  # slot, kind, chunk, begin, end


def is_due(config: Config, step: int) -> bool:
    """Whether the actions of this step (steps done, after it) are kept."""
    every = config.log.timeline_every
    return bool(every) and (step % every == 0 or step == config.run.steps)


def add_timeline(folder: Path, step: int, plan: StepPlan, actions: Sequence[Iterable[Action]]) -> None:
    """Append a line: actions of every rank, seconds."""
    ranks = [[[slot, kind, chunk, round(1e6 * begin), round(1e6 * end)] for slot, kind, chunk, begin, end in own] for own in actions]
    line = json.dumps({"step": step, "plan": plan_hash(plan), "actions": ranks}, separators=(",", ":"))
    with open(folder / NAME, "a", encoding="utf-8") as file:
        file.write(line + "\n")


def recorded_steps(folder: Path) -> list[int]:
    """The steps that have a line, rising."""
    return sorted({int(row["step"]) for row in _rows(folder)})


def recorded(folder: Path, step: int) -> dict[str, Any] | None:
    """The newest line of a step, None without one."""
    found = None
    for row in _rows(folder):
        if row["step"] == step:
            found = row
    return found


def _rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Lines that are whole."""
    try:
        with open(folder / NAME, encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    row = json.loads(line)
                except ValueError:
                    continue  # a process died while it wrote
                if isinstance(row, dict) and {"step", "plan", "actions"} <= set(row):
                    yield row
    except FileNotFoundError:
        return


def measured_timeline(plan: StepPlan, row: dict[str, Any]) -> Timeline:
    """The measured times of a plan's microbatches, from the line of its step.

    Several ranks run an action together: it is shown from when the last of them has begun to when the first has ended. So the blocks of a lane
    never overlap, and waiting for others is idle time, as it is in the plan. The makespan is the last end of any rank.

    Raises:
        UserError: the line is not of this plan.
    """
    mesh = Mesh(plan.layout.lanes, plan.layout.tp, plan.layout.pp)
    if row["plan"] != plan_hash(plan):
        raise UserError(f"the timeline of step {row['step']} is of another plan than the recorded one: the step was run again")
    if len(row["actions"]) != mesh.world:
        raise UserError(f"the timeline of step {row['step']} has {len(row['actions'])} ranks, its plan has {mesh.world}")
    index = {(lane, one.slot): at for at, one in enumerate(plan.microbatches) for lane in range(one.lane, one.lane + one.cp)}
    times: dict[tuple[int, int, int, str], list[tuple[float, float]]] = {}
    last = 0.0
    for rank, own in enumerate(row["actions"]):
        coords = mesh.coords(rank)
        for slot, kind, chunk, begin, end in own:
            at = index.get((coords.lane, slot))
            if at is None:
                raise UserError(f"the timeline of step {row['step']}: rank {rank} ran slot {slot}, which the plan doesn't give it")
            times.setdefault((at, coords.pp, chunk, kind), []).append((begin / 1e6, end / 1e6))
            last = max(last, end / 1e6)
    events = []
    for (at, stage, chunk, kind), spans in times.items():
        begin = max(each for each, _ in spans)
        events.append(Event(at, stage, chunk, kind, begin, max(begin, min(each for _, each in spans))))
    return Timeline(last, tuple(sorted(events, key=lambda one: (one.begin, one.stage, one.microbatch))))
