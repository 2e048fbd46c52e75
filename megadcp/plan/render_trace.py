"""Chrome trace events of a step: https://ui.perfetto.dev opens the JSON. A lane is a process, a stage of it is a thread.

Format: "Trace Event Format" of the Chromium project; times in microseconds.
"""

from __future__ import annotations

from typing import Any

from megadcp.plan.actions import BACKWARD, FORWARD
from megadcp.plan.basis import Basis
from megadcp.plan.memory import MemoryModel
from megadcp.plan.render_common import KINDS, Scene, recompute_of, scene
from megadcp.plan.simulate import Event, Timeline
from megadcp.plan.step_plan import StepPlan

MOST_DOCUMENTS = 64  # ids and lengths of a microbatch's documents that are written out


def perfetto(plan: StepPlan, timeline: Timeline | None = None) -> dict[str, Any]:
    """The JSON object of a trace: simulated times of a plan, or measured ones.

    A microbatch appears on every lane of its group; beside the stages runs a counter of their activation bytes by the memory model.
    Begins and ends are whole nanoseconds, so that events of a thread that touch in the plan touch in the trace.

    Raises:
        UserError: the timeline does not belong to the plan.
    """
    view = scene(plan, timeline)
    events = _names(plan)
    for event in view.events:
        events += _complete(view, event)
    events += _counters(view)
    for mark in view.marks:
        events.append({"ph": "i", "s": "g", "name": mark.name, "pid": 1, "tid": 1, "ts": _nanoseconds(mark.seconds) / 1000})
    return {
        "displayTimeUnit": "ms",
        "otherData": {"step": plan.step, "times": "measured" if view.measured else "planned", **{mark.name: mark.seconds for mark in view.marks}},
        "traceEvents": events,
    }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _process(lane: int) -> int:
    """Counted from 1: process 0 is the idle one to trace viewers."""
    return lane + 1


def _thread(plan: StepPlan, lane: int, stage: int) -> int:
    """A thread's number is used once in the whole trace."""
    return lane * plan.layout.pp + stage + 1


def _names(plan: StepPlan) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for lane in range(plan.layout.lanes):
        process = {"ph": "M", "pid": _process(lane)}
        events.append({**process, "name": "process_name", "args": {"name": f"lane {lane} (node {lane // plan.layout.lanes_per_node})"}})
        events.append({**process, "name": "process_sort_index", "args": {"sort_index": lane}})
        for stage in range(plan.layout.pp):
            thread = {**process, "tid": _thread(plan, lane, stage)}
            events.append({**thread, "name": "thread_name", "args": {"name": f"stage {stage}"}})
            events.append({**thread, "name": "thread_sort_index", "args": {"sort_index": stage}})
    return events


def _complete(view: Scene, event: Event) -> list[dict[str, Any]]:
    """An "X" event on each lane of the group."""
    plan, one = view.plan, view.plan.microbatches[event.microbatch]
    begin, end = _nanoseconds(event.begin), _nanoseconds(event.end)
    args: dict[str, Any] = {
        "microbatch": event.microbatch,
        "slot": one.slot,
        "cp": one.cp,
        "lanes": [one.lane, one.lane + one.cp - 1],
        "cp_comm": one.cp_comm,
        "documents": len(one.documents),
        "document_ids": list(one.documents[:MOST_DOCUMENTS]),
        "document_lengths": [plan.lengths[document] for document in one.documents[:MOST_DOCUMENTS]],
        "tokens": one.tokens,
        "recompute": recompute_of(plan, one),
        "seconds": one.seconds,
        "bytes": one.bytes,
    }
    if plan.layout.virtual_stages > 1:
        args["chunk"] = event.chunk
    chunk = f".{event.chunk}" if plan.layout.virtual_stages > 1 else ""
    common = {
        "ph": "X",
        "name": f"{event.kind}{one.slot}{chunk} cp{one.cp}",
        "cat": KINDS[event.kind],
        "ts": begin / 1000,
        "dur": (end - begin) / 1000,
        "args": args,
    }
    return [{**common, "pid": _process(lane), "tid": _thread(plan, lane, event.stage)} for lane in range(one.lane, one.lane + one.cp)]


def _counters(view: Scene) -> list[dict[str, Any]]:
    """Activation bytes of each lane's stages: what is kept from forward to backward, and what passes while an event runs."""
    plan, memory = view.plan, MemoryModel(Basis.of(view.plan))
    held: dict[tuple[int, int], float] = {}
    points: dict[tuple[int, int, int], float] = {}  # (lane, stage, nanoseconds) -> bytes; at one time the last one counts
    for event in sorted(view.events, key=lambda event: (_nanoseconds(event.begin), _nanoseconds(event.end))):
        one = plan.microbatches[event.microbatch]
        local = one.tokens / one.cp
        stored = memory.stored(event.stage, local, one.recompute) / plan.layout.virtual_stages
        passing = memory.passing(event.stage, local, one.recompute.level)
        for lane in range(one.lane, one.lane + one.cp):
            where = lane, event.stage
            now = held.get(where, 0.0) + (stored if FORWARD in event.kind else 0.0)
            points[*where, _nanoseconds(event.begin)] = now + passing
            held[where] = now - (stored if BACKWARD in event.kind else 0.0)
            points[*where, _nanoseconds(event.end)] = held[where]
    return [
        {
            "ph": "C",
            "name": f"activation bytes, stage {stage}",
            "pid": _process(lane),
            "ts": time / 1000,
            "args": {"bytes": max(0, round(points[lane, stage, time]))},
        }
        for lane, stage, time in sorted(points)
    ]
