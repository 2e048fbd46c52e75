"""What all pictures of a plan share: the scene (which times, which marks), numbers as people read them, round ticks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megadcp.config.check import UserError
from megadcp.plan.actions import BACKWARD, FORWARD
from megadcp.plan.basis import Basis
from megadcp.plan.lower_bound import lower_bound
from megadcp.plan.simulate import Event, Timeline, simulate
from megadcp.plan.step_plan import Microbatch, StepPlan

KINDS = {FORWARD: "forward", BACKWARD: "backward", FORWARD + BACKWARD: "forward and backward"}


@dataclass(frozen=True)
class Mark:
    """A moment that a picture names: `name` is "lower bound", "predicted end" or "measured end"."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Scene:
    """A plan with the times to draw. `end`: when the last lane is done; `span`: seconds that the axis covers; marks in order of time."""

    plan: StepPlan
    events: tuple[Event, ...]
    measured: bool
    end: float
    span: float
    marks: tuple[Mark, ...]

    @property
    def split(self) -> bool:
        """Whether forward and backward are events of their own."""
        return any(event.kind != FORWARD + BACKWARD for event in self.events)

    @property
    def recomputed(self) -> bool:
        """Whether any microbatch is recomputed."""
        return any(one.recompute.level != "none" for one in self.plan.microbatches)

    def again(self, event: Event) -> float:
        """Share of the stage's layers that this event computes again: the backward does it, a forward alone does nothing twice."""
        if event.kind == FORWARD:
            return 0.0
        return layer_share(self.plan, self.plan.microbatches[event.microbatch], event.stage)

    def idle(self) -> list[list[float]]:
        """Share of [0, end] in which a lane waits: [lane][stage]."""
        layout = self.plan.layout
        spent: list[list[list[float]]] = [[[] for _ in range(layout.pp)] for _ in range(layout.lanes)]
        for event in self.events:
            one = self.plan.microbatches[event.microbatch]
            for lane in range(one.lane, one.lane + one.cp):
                spent[lane][event.stage].append(event.end - event.begin)
        return [[1 - math.fsum(parts) / self.end if self.end > 0 else 0.0 for parts in stages] for stages in spent]


def scene(plan: StepPlan, timeline: Timeline | None = None) -> Scene:
    """What to draw: the plan's own simulation, or measured times over its prediction.

    The predicted end and the lower bound are those that the plan carries, computed where it carries none.

    Raises:
        UserError: a measured event that belongs to no microbatch or stage of the plan, or whose times make no sense.
    """
    drawn = timeline
    if timeline is not None:
        _check(plan, timeline)
        predicted = plan.predicted.seconds or simulate(plan).makespan
    else:
        drawn = simulate(plan)
        predicted = plan.predicted.seconds or drawn.makespan
    assert drawn is not None
    end = max([drawn.makespan, *(event.end for event in drawn.events)])
    bound = plan.predicted.lower_bound_seconds or (lower_bound(Basis.of(plan), plan.lengths) if plan.lengths else 0.0)
    marks = [Mark("predicted end", predicted)]
    if 0 < bound < math.inf:
        marks.append(Mark("lower bound", bound))
    if timeline is not None:
        marks.append(Mark("measured end", end))
    marks.sort(key=lambda mark: (mark.seconds, mark.name))
    return Scene(plan, drawn.events, timeline is not None, end, max(end, marks[-1].seconds), tuple(marks))


def _check(plan: StepPlan, timeline: Timeline) -> None:
    for number, event in enumerate(timeline.events):
        wrong = ""
        if not 0 <= event.microbatch < len(plan.microbatches):
            wrong = f"names microbatch {event.microbatch}, but the plan has {len(plan.microbatches)}"
        elif not 0 <= event.stage < plan.layout.pp:
            wrong = f"names stage {event.stage}, but the plan has {plan.layout.pp}"
        elif event.kind not in KINDS:
            wrong = f"is of kind {event.kind!r}; legal here: {', '.join(KINDS)}"
        elif not 0 <= event.begin <= event.end < math.inf:
            wrong = f"lasts from {event.begin} to {event.end}; seconds count from the begin of the step"
        if wrong:
            raise UserError(f"timeline of step {plan.step}: event {number} {wrong}")
    if not 0 <= timeline.makespan < math.inf:
        raise UserError(f"timeline of step {plan.step}: makespan={timeline.makespan} is no time")


# --------------------------------------------------------------------------------------------------------------------- words
def layer_share(plan: StepPlan, one: Microbatch, stage: int) -> float:
    """Share of a stage's layers that a microbatch recomputes."""
    return 0.0 if one.recompute.level == "none" else min(1.0, one.recompute.layers / plan.stage_layers[stage])


def lanes_of(one: Microbatch) -> str:
    """`lane 8` or `lanes 8-11`."""
    return f"lane {one.lane}" if one.cp == 1 else f"lanes {one.lane}-{one.lane + one.cp - 1}"


def recompute_of(plan: StepPlan, one: Microbatch) -> str:
    """`none`, or level and layers: `full, 12 of 32 layers`; with uneven stages the layers of each."""
    if one.recompute.level == "none":
        return "none"
    whole = sorted(set(plan.stage_layers))
    of = str(whole[0]) if len(whole) == 1 else f"{whole[0]} to {whole[-1]}"
    stages = "" if plan.layout.pp == 1 else " of each stage"
    return f"{one.recompute.level}, {one.recompute.layers} of {of} layers{stages}"


def cp_symbol(cp: int) -> str:
    """One character for a group size: 1 2 4 8, then a = 16, b = 32, ..."""
    return str(cp) if cp < 10 else chr(ord("a") + cp.bit_length() - 5)


def headline(view: Scene) -> list[str]:
    """What a picture says in words: the layout, and the times."""
    plan, layout = view.plan, view.plan.layout
    ranks = "".join(f", {name} {count}" for name, count in (("tp", layout.tp), ("pp", layout.pp)) if count > 1)
    schedule = "" if layout.pp == 1 else f", {plan.schedule}" + (f" x {layout.virtual_stages} chunks" if layout.virtual_stages > 1 else "")
    work = f"{count_of(len(plan.lengths), 'document')}, {sum(plan.lengths):,} tokens, {count_of(len(plan.microbatches), 'microbatch')}"
    first = [count_of(layout.lanes, "lane") + ranks + schedule, work]
    times = {mark.name: mark.seconds for mark in view.marks}
    predicted, bound = times["predicted end"], times.get("lower bound", 0.0)
    parts = [f"predicted {seconds_of(predicted)}" + (f" = {predicted / bound:.3f} x bound" if bound else "")]
    if view.measured:
        parts.append(f"measured {seconds_of(view.end)}" + (f" ({view.end / predicted - 1:+.1%})" if predicted > 0 else ""))
    idle = view.idle()
    parts.append(f"idle {percent(math.fsum(share for row in idle for share in row) / (layout.lanes * layout.pp))}")
    static = plan.predicted.static_seconds
    if static and predicted > 0:
        parts.append(f"static-best {seconds_of(static)} ({static / predicted:.2f}x)")
    if plan.predicted.policy:
        parts.append(f"policy {plan.predicted.policy}")
    return [" · ".join(first), " · ".join(parts)]


def count_of(count: int, noun: str) -> str:
    """`1 document`, `1,024 microbatches`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "es" if noun.endswith("ch") else "s")


def percent(share: float) -> str:
    """A share as percent with one decimal; never `-0.0%`."""
    return f"{max(0.0, share) if share > -5e-4 else share:.1%}"


def seconds_of(seconds: float) -> str:
    """Seconds in the unit that fits them: `1.234 s`, `12.3 ms`, `45.6 µs`."""
    factor, unit = unit_of(seconds)
    return f"{seconds * factor:.4g} {unit}"


def unit_of(seconds: float) -> tuple[float, str]:
    """(factor, short name) of the unit in which a time of this size reads well."""
    return (1.0, "s") if seconds >= 1 or seconds == 0 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")


def bytes_of(count: float) -> str:
    """`61.0 GB`, `512 MB`."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"


def short(value: int) -> str:
    """1,500 -> 1.5K. Multiples of 1,024 are counted in 1,024s, as people read lengths."""
    base = 1024 if value >= 1024 and value % 1024 == 0 else 1000
    for size, letter in ((base**3, "G"), (base**2, "M"), (base, "K")):
        if value >= size * (1 if base == 1024 else 0.9995):
            return f"{value / size:.3g}{letter}" if value < 999.5 * size else f"{value / size:.0f}{letter}"
    return str(value)


def ticks(high: float, about: int = 6) -> list[float]:
    """Round numbers from 0 to at most `high` (> 0): 1, 2 or 5 times a power of ten apart."""
    rough = high / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    return [float(f"{place * step:.12g}") for place in range(math.floor(high / step + 1e-9) + 1)]
