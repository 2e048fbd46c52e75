"""The Gantt of a step in characters, for a terminal: a row per lane, with pipelines a row per stage of the lane.

A cell shows what fills most of its time: the cp of a microbatch as one character, or a dot where the lane is idle for more than half.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from megadcp.config.check import UserError
from megadcp.plan.actions import BACKWARD, FORWARD
from megadcp.plan.render_common import Scene, cp_symbol, headline, percent, scene, seconds_of, ticks, unit_of
from megadcp.plan.simulate import Timeline
from megadcp.plan.step_plan import StepPlan

MOST_ROWS = 40
LEAST_WIDTH = 40
IDLE = "."
AGAIN = {"selective": "-", "mlp": "~", "full": "="}  # the tail of a block: its length is the share of layers computed again
BEGIN = {FORWARD: ">", BACKWARD: "<", FORWARD + BACKWARD: "|"}


class Row(NamedTuple):
    """The cells of one lane on one stage, and its idle share of the whole time."""

    cells: str
    idle: float


def text(plan: StepPlan, timeline: Timeline | None = None, width: int = 100) -> str:
    """The Gantt of a plan (its simulated times, or measured ones) in lines of at most `width` characters, at least 40.

    Neighbouring lanes that look alike share their rows. At most 40 rows are shown, evenly chosen; the last line says what is left out.

    Raises:
        UserError: width is too small, or the timeline does not belong to the plan.
    """
    if width < LEAST_WIDTH:
        raise UserError(f"width={width} is too narrow for a Gantt; legal here: {LEAST_WIDTH} or more")
    view = scene(plan, timeline)
    layout = plan.layout
    stages = [f" s{stage}" if layout.pp > 1 else "" for stage in range(layout.pp)]
    last = layout.lanes - 1
    label = max(len(f"{last}-{last}{stages[-1]}"), len("lane"))
    cells = width - label - len("  100.0%") - 1
    folds = _fold(_rows(view, cells))
    shown = _chosen(view, folds, max(1, MOST_ROWS // layout.pp))
    lines = [line for heading in headline(view) for line in _joined(heading.split(" · "), " · ", width)]
    lines += [*_marks(view, cells, label + 1), f"{'lane':>{label}} {'':{cells}}{'idle':>8}"]
    for place in shown:
        first, count, rows = folds[place]
        lanes = str(first) if count == 1 else f"{first}-{first + count - 1}"
        for stage, row in enumerate(rows):
            name = lanes + stages[stage]
            lines.append(f"{name:>{label}} {row.cells}{percent(row.idle):>8}")
    lines += _axis(view, cells, label + 1)
    lines += _legend(view, width)
    if len(shown) < len(folds):
        lines.append(_left_out(folds, shown, layout.lanes))
    return "\n".join(line.rstrip() for line in lines)


# --------------------------------------------------------------------------------------------------------------------- rows
def _rows(view: Scene, cells: int) -> list[list[Row]]:
    """[lane][stage]."""
    layout, idle = view.plan.layout, view.idle()
    events: list[list[list[int]]] = [[[] for _ in range(layout.pp)] for _ in range(layout.lanes)]
    for index in sorted(range(len(view.events)), key=lambda index: (view.events[index].begin, index)):
        event = view.events[index]
        one = view.plan.microbatches[event.microbatch]
        for lane in range(one.lane, one.lane + one.cp):
            events[lane][event.stage].append(index)
    drawn: dict[tuple[int, ...], str] = {}  # the lanes of a cp group often have all their events in common
    rows = []
    for lane, by_stage in enumerate(events):
        stages = []
        for stage, indices in enumerate(by_stage):
            key = tuple(indices)
            if key not in drawn:
                drawn[key] = _cells(view, indices, cells)
            stages.append(Row(drawn[key], idle[lane][stage]))
        rows.append(stages)
    return rows


def _cells(view: Scene, indices: Sequence[int], cells: int) -> str:
    """The characters of one row."""
    owner, most, busy = [-1] * cells, [0.0] * cells, [0.0] * cells  # in cells, not seconds
    scale = cells / view.span if view.span > 0 else 0.0
    for index in indices:
        begin, end = view.events[index].begin * scale, view.events[index].end * scale
        for cell in range(min(cells - 1, int(begin)), min(cells - 1, int(end)) + 1):
            part = round(min(end, cell + 1) - max(begin, cell), 9)
            busy[cell] += part
            if part > most[cell]:
                owner[cell], most[cell] = index, part
    owner = [index if share >= 0.5 else -1 for index, share in zip(owner, busy, strict=True)]
    result, cell = "", 0
    while cell < cells:
        count = 1
        while cell + count < cells and owner[cell + count] == owner[cell]:
            count += 1
        result += IDLE * count if owner[cell] < 0 else _block(view, owner[cell], count)
        cell += count
    return result


def _block(view: Scene, index: int, count: int) -> str:
    """One event in `count` characters: where it begins, its cp, and what of it is recomputed; what has no room is left out."""
    event = view.events[index]
    one = view.plan.microbatches[event.microbatch]
    if count == 1:
        return cp_symbol(one.cp)
    share = view.again(event)
    tail = min(count - 2, max(1, round(share * (count - 1)))) if share > 0 else 0
    return BEGIN[event.kind] + cp_symbol(one.cp) * (count - 1 - tail) + AGAIN.get(one.recompute.level, "") * tail


def _fold(rows: Sequence[list[Row]]) -> list[tuple[int, int, list[Row]]]:
    """(first lane, number of lanes, rows of their stages): neighbours whose cells and printed idle shares are the same."""
    folds: list[tuple[int, int, list[Row]]] = []
    printed: list[tuple[str, str]] = []
    for lane, own in enumerate(rows):
        look = [(row.cells, percent(row.idle)) for row in own]
        if folds and look == printed:
            folds[-1] = (folds[-1][0], folds[-1][1] + 1, folds[-1][2])
        else:
            folds.append((lane, 1, own))
        printed = look
    return folds


def _chosen(view: Scene, folds: Sequence[tuple[int, int, list[Row]]], most: int) -> list[int]:
    """At most `most` of the folds: the one whose lane is done last, and others evenly from the first to the last."""
    count = len(folds)
    if count <= most:
        return list(range(count))
    latest = max(view.events, key=lambda event: (event.end, -event.microbatch))
    lane = view.plan.microbatches[latest.microbatch].lane
    chosen = {max(place for place, (first, _, _) in enumerate(folds) if first <= lane)}
    for place in range(most - 1):
        chosen.add(place * (count - 1) // max(1, most - 2))
    return sorted(chosen)


def _left_out(folds: Sequence[tuple[int, int, list[Row]]], shown: Sequence[int], lanes: int) -> str:
    kept = sum(folds[place][1] for place in shown)
    shares = [row.idle for place, (_, _, rows) in enumerate(folds) if place not in set(shown) for row in rows]
    return f"{lanes - kept:,} of {lanes:,} lanes are not shown (idle {percent(min(shares))} to {percent(max(shares))})"


# --------------------------------------------------------------------------------------------------------------------- time
def _cell(view: Scene, cells: int, seconds: float) -> int:
    return min(cells - 1, math.floor(seconds / view.span * cells + 1e-9)) if view.span > 0 else 0


def _marks(view: Scene, cells: int, indent: int) -> list[str]:
    """One line per mark, the latest first: its name, and a `v` over its cell."""
    lines = []
    for mark in reversed(view.marks):
        words, place = f"{mark.name} {seconds_of(mark.seconds)}", _cell(view, cells, mark.seconds)
        line = " " * (indent + place - len(words) - 1) + f"{words} v" if indent + place > len(words) else " " * (indent + place) + f"v {words}"
        lines.append(line)
    return lines


def _axis(view: Scene, cells: int, indent: int) -> list[str]:
    """A ruler with ticks, and their numbers."""
    factor, unit = unit_of(view.span)
    ruler, numbers = ["-"] * cells, ""
    for tick in ticks(view.span * factor, max(2, cells // 14)) if view.span > 0 else [0.0]:
        place = _cell(view, cells, tick / factor)
        words = f"{tick:,g}"
        if len(numbers) <= place:
            ruler[place] = "+"
            numbers += " " * (place - len(numbers)) + words + " "
    return [" " * indent + "".join(ruler), " " * indent + numbers.rstrip() + f" {unit}"]


def _legend(view: Scene, width: int) -> list[str]:
    """The characters that occur."""
    plan = view.plan
    parts = [f"{cp_symbol(cp)} = cp {cp}" for cp in sorted({one.cp for one in plan.microbatches})]
    parts += ["> forward", "< backward"] if view.split else ["| next microbatch"]
    used = {one.recompute.level for one in plan.microbatches}
    parts += [f"{sign} recompute {level} (share of layers)" for level, sign in AGAIN.items() if level in used]
    parts.append(f"{IDLE} idle")
    return _joined(parts, "   ", width)


def _joined(parts: Sequence[str], between: str, width: int) -> list[str]:
    """The parts in as few lines as they need; a part that is wider than a line is cut."""
    lines = [""]
    for part in parts:
        if lines[-1] and len(lines[-1]) + len(between) + len(part) > width:
            lines.append("")
        lines[-1] += (between if lines[-1] else "") + part
    return [line[:width] for line in lines]
