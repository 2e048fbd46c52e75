"""When everything of a step happens, by the cost model (docs/plan.md section 6): the makespan, and each action's begin and end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megadcp.plan.actions import BACKWARD, FORWARD, Action, slot_count, used_order, used_slots, waits_for
from megadcp.plan.basis import Basis
from megadcp.plan.cost import FORWARD_SHARE, CostModel
from megadcp.plan.memory import MemoryModel
from megadcp.plan.step_plan import Microbatch, StepPlan


class Event(NamedTuple):
    """One action of one microbatch on all its lanes of one stage. Without pipelines kind is FB: forward and backward in one."""

    microbatch: int
    stage: int
    chunk: int
    kind: str
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step: seconds until the last lane is done, and everything on the way."""

    makespan: float
    events: tuple[Event, ...]


def simulate(plan: StepPlan) -> Timeline:
    """The timeline of a plan, scored with its own profile. The plan must be legal (verify.verify)."""
    return run(CostModel(Basis.of(plan)), plan.microbatches)


def run(cost: CostModel, microbatches: Sequence[Microbatch]) -> Timeline:
    """The timeline of microbatches in any order of the sequence; their slots decide."""
    if cost.basis.layout.pp == 1:
        return _run_lanes(cost, microbatches)
    return _run_pipelines(cost, microbatches)


def _run_lanes(cost: CostModel, microbatches: Sequence[Microbatch]) -> Timeline:
    """Without pipelines: lanes run their microbatches in slot order, each starting when all its lanes are ready."""
    ready = [0.0] * cost.basis.layout.lanes
    events = []
    for index in sorted(range(len(microbatches)), key=lambda index: (microbatches[index].slot, microbatches[index].lane)):
        one = microbatches[index]
        begin = max(ready[one.lane : one.lane + one.cp])
        end = begin + cost.seconds(one) / cost.basis.speed(one.lane, one.cp)
        ready[one.lane : one.lane + one.cp] = [end] * one.cp
        events.append(Event(index, 0, 0, FORWARD + BACKWARD, begin, end))
    return Timeline(max(ready), tuple(events))


def _run_pipelines(cost: CostModel, microbatches: Sequence[Microbatch]) -> Timeline:
    """With pipelines: every action when its lanes are free on that stage and its input has arrived, in a topological order of the dense lists."""
    layout = cost.basis.layout
    stages, chunks = layout.pp, layout.virtual_stages
    by_slot: dict[int, list[tuple[int, int, int]]] = {}  # (microbatch, first lane, lane after the last)
    seconds: dict[str, list[list[float]]] = {FORWARD: [], BACKWARD: []}
    for index, one in enumerate(microbatches):
        by_slot.setdefault(one.slot, []).append((index, one.lane, one.lane + one.cp))
        both = [value / cost.basis.speed(one.lane, one.cp) / chunks for value in cost.stage_seconds(one)]
        seconds[FORWARD].append([value * FORWARD_SHARE for value in both])
        seconds[BACKWARD].append([value * (1 - FORWARD_SHARE) for value in both])
    ready = [[0.0] * layout.lanes for _ in range(stages)]
    ended: dict[tuple[int, Action], dict[int, float]] = {}  # (stage, action) -> microbatch -> end
    events = []
    for stage, action in used_order(used_slots(microbatches), slot_count(cost.basis, microbatches), stages, chunks):
        needed = waits_for(action, stage, stages, chunks)
        arrived = None if needed is None else ended[needed]
        kind, slot, chunk = action
        own, lasting, free = ended.setdefault((stage, action), {}), seconds[kind], ready[stage]
        for index, first, after in by_slot[slot]:
            begin = free[first] if after - first == 1 else max(free[first:after])
            if arrived is not None and arrived[index] > begin:
                begin = arrived[index]
            end = begin + lasting[index][stage]
            free[first:after] = [end] * (after - first)
            own[index] = end
            events.append(Event(index, stage, chunk, kind, begin, end))
    return Timeline(max(map(max, ready)), tuple(events))


def overhead_seconds(basis: Basis) -> float:
    """What every step adds to its makespan: the exposed gradient reduction and the optimizer, on the largest stage."""
    memory, layout, profile = MemoryModel(basis), basis.layout, basis.profile
    weights = max(memory.parameters(stage) for stage in range(layout.pp)) / layout.tp
    reduction = (1 - profile.reduce_overlap) * 6 * weights * (layout.lanes - 1) / layout.lanes / profile.reduce_bytes
    return reduction + 20 * weights / layout.lanes / profile.memory_bandwidth


def step_seconds(plan: StepPlan) -> float:
    """The whole step as people are told it: predicted makespan, exposed gradient reduction, optimizer."""
    return plan.predicted.seconds + overhead_seconds(Basis.of(plan))
