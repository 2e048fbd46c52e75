"""One step of a run, planned and measured: as SVG, and as a trace for ui.perfetto.dev. No torch.

    python tools/timeline.py runs/NAME                       the last step that was recorded
    python tools/timeline.py runs/NAME --step 1200           another one; steps count as on the console and in metrics.jsonl
    python tools/timeline.py runs/NAME --step 1201 --planned the plan alone, of any step
    python tools/timeline.py runs/NAME --list                which steps were recorded

Measured are the begin and end of every action on every rank, kept for the steps that log.timeline_every names. An action of several ranks is drawn
from when the last of them has begun to when the first has ended. The pictures lie in runs/NAME/timeline/ unless --svg or --trace say otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plan_files import check_outputs, find_plans, recorded, write_file

from megadcp.config.check import UserError
from megadcp.plan import render
from megadcp.plan.render_common import lanes_of, percent, scene, seconds_of
from megadcp.plan.render_theme import THEMES
from megadcp.plan.simulate import Timeline, simulate
from megadcp.plan.step_plan import PlanFormatError, StepPlan
from megadcp.train import timeline as record

WORST = 5  # microbatches that are told of
FAR = 4.0  # times as long: planned and measured don't fit one scale


@dataclass(frozen=True)
class Step:
    """One step of a run. number: as on the console; measured: None when it was not recorded."""

    number: int
    plan: StepPlan
    planned: Timeline
    measured: Timeline | None


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run folder")
    parser.add_argument("--step", type=int, default=0, help="steps done after it, as on the console; without it the last one that was recorded")
    parser.add_argument("--planned", action="store_true", help="the plan alone")
    parser.add_argument("--list", action="store_true", help="only say which steps were recorded")
    parser.add_argument("--svg", default="", help="where the picture goes")
    parser.add_argument("--trace", default="", help="where the trace goes")
    parser.add_argument("--theme", default="auto", choices=THEMES, help="auto follows the reader's system")
    parser.add_argument("--overwrite", action="store_true", help="replace files that this tool has not made")
    return parser


def load(folder: Path, number: int = 0, planned_only: bool = False) -> Step:
    """A step of a run; 0 is the last one that was recorded.

    Raises:
        UserError: no such step, or it was not recorded.
    """
    steps = record.recorded_steps(folder)
    if not number:
        if not steps:
            raise UserError(
                f"{folder} has no recorded step (timeline.jsonl): log.timeline_every says which are kept; --step N --planned draws a plan"
            )
        number = steps[-1]
    row = None if planned_only else record.recorded(folder, number)
    if row is None and not planned_only:
        nearest = min(steps, key=lambda step: abs(step - number), default=0)
        there = f"nearest: --step {nearest}; --list names all" if steps else "no step was (log.timeline_every)"
        raise UserError(f"step {number} of {folder} was not recorded; {there}; --planned draws its plan alone")
    plan = plan_of(folder, number)
    return Step(number, plan, simulate(plan), None if row is None else record.measured_timeline(plan, row))


def plan_of(folder: Path, number: int) -> StepPlan:
    """The plan that step `number` was run with: plans count from 0."""
    path = find_plans(str(folder))
    for plan in recorded(path, number - 1, 1, lambda line: None):
        return plan
    raise UserError(f"{path} holds no plan of step {number} (plan {number - 1})")


# ------------------------------------------------------------------------------------------------------------------ pictures
def picture(step: Step, theme: str = "auto") -> str:
    """The plan above, what was measured below it, in one SVG with one scale (unless one of them would then be too short to see)."""
    if step.measured is None:
        return render.gantt_svg(step.plan, None, f"Step {step.number}: planned", theme)
    spans = scene(step.plan).span, scene(step.plan, step.measured).span
    far = max(spans) > FAR * min(spans)
    span, words = (0.0, " (scales differ)") if far else (max(spans), "")
    return stacked(
        [
            render.gantt_svg(step.plan, None, f"Step {step.number}: planned{words}", theme, span),
            render.gantt_svg(step.plan, step.measured, f"Step {step.number}: measured{words}", theme, span),
        ]
    )


def stacked(parts: Iterable[str]) -> str:
    """SVGs of one width, one below the other."""
    top, width, drawn = 0.0, 0.0, []
    for part in parts:
        head = part[: part.index(">")]
        wide, high = (float(head.split(f'{name}="')[1].split('"')[0]) for name in (" width", " height"))
        drawn.append(part.replace("<svg ", f'<svg y="{top:g}" ', 1).rstrip())
        top, width = top + high, max(width, wide)
    size = f'viewBox="0 0 {width:g} {top:g}" width="{width:g}" height="{top:g}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">', *drawn, "</svg>", ""])


def trace(step: Step) -> dict[str, Any]:
    """Both in one trace: the processes of planned lanes, then those of measured ones."""
    found = render.perfetto(step.plan)
    if step.measured is None:
        return found
    lanes, pp = step.plan.layout.lanes, step.plan.layout.pp
    other = render.perfetto(step.plan, step.measured)
    for event in found["traceEvents"]:
        _rename(event, "planned", 0)
    for event in other["traceEvents"]:
        _rename(event, "measured", lanes)
        event["pid"] += lanes
        if "tid" in event:
            event["tid"] += lanes * pp
    marks = {event["name"] for event in found["traceEvents"] if event["ph"] == "i"}
    found["traceEvents"] += [event for event in other["traceEvents"] if event["ph"] != "i" or event["name"] not in marks]
    found["otherData"] = {**found["otherData"], **other["otherData"], "times": "planned and measured", "step": step.number}
    return found


def _rename(event: dict[str, Any], words: str, shift: int) -> None:
    if event["name"] == "process_name":
        event["args"] = {"name": f"{words} {event['args']['name']}"}
    elif event["name"] == "process_sort_index":
        event["args"] = {"sort_index": event["args"]["sort_index"] + shift}


# --------------------------------------------------------------------------------------------------------------------- words
def told(step: Step) -> list[str]:
    """What the picture says, in figures."""
    plan, planned = step.plan, scene(step.plan)
    lines = [f"step {step.number}    plan {plan.step} of plans.jsonl: {len(plan.microbatches)} microbatches of {len(plan.lengths)} documents"]
    if step.measured is None:
        return [*lines, f"planned   {seconds_of(planned.end)}, idle {percent(_idle(planned.idle()))}"]
    measured = scene(plan, step.measured)
    return [
        *lines,
        f"planned   {seconds_of(planned.end)}, idle {percent(_idle(planned.idle()))}",
        f"measured  {seconds_of(measured.end)}, idle {percent(_idle(measured.idle()))}; planned / measured {planned.end / measured.end:.2f}",
        *_worst(step),
    ]


def _idle(shares: list[list[float]]) -> float:
    return sum(map(sum, shares)) / (len(shares) * len(shares[0]))


def _worst(step: Step) -> list[str]:
    """The microbatches that took longest against their prediction, seen on their slowest stage."""
    spent = [defaultdict[tuple[int, int], float](float) for _ in range(2)]
    assert step.measured is not None
    for into, timeline in zip(spent, (step.planned, step.measured), strict=True):
        for event in timeline.events:
            into[event.microbatch, event.stage] += event.end - event.begin
    planned, measured = spent
    total = sum(measured[key] for key in planned) / (sum(planned.values()) or 1.0)
    found = []
    for at, one in enumerate(step.plan.microbatches):
        stage = max(range(step.plan.layout.pp), key=lambda stage: measured[at, stage])
        if planned[at, stage] > 0:
            found.append((measured[at, stage] / planned[at, stage] / (total or 1.0), at, stage, one))
    found.sort(key=lambda entry: (-entry[0], entry[1]))
    lines = []
    for ratio, at, stage, one in found[:WORST]:
        where = f"slot {one.slot}, {lanes_of(one)}" + (f", stage {stage}" if step.plan.layout.pp > 1 else "")
        times = f"{seconds_of(planned[at, stage])} planned, {seconds_of(measured[at, stage])} measured"
        lines.append(f"{'longest' if not lines else '':<9} {where}: {one.tokens:,} tokens, cp {one.cp}: {times}, {ratio:.2f} x the step's mean ratio")
    return lines


# --------------------------------------------------------------------------------------------------------------------- entry
def main(argv: list[str] | None = None) -> int:
    """0: done; 1: broken records; 2: a request that can't be met."""
    asked = arguments().parse_args(argv)
    try:
        return _draw(asked)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (PlanFormatError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _draw(asked: argparse.Namespace) -> int:
    folder = Path(asked.run)
    if not folder.is_dir():
        raise UserError(f"{folder} is no run folder; give one, for example runs/quickstart")
    if asked.list:
        steps = record.recorded_steps(folder)
        print(", ".join(map(str, steps)) if steps else "no step was recorded (log.timeline_every)")
        return 0
    step = load(folder, asked.step, asked.planned)
    own = folder / "timeline"
    files = {"svg": asked.svg or str(own / f"step-{step.number:08}.svg"), "trace": asked.trace or str(own / f"step-{step.number:08}.json")}
    if not (asked.svg and asked.trace):
        own.mkdir(exist_ok=True)
    check_outputs(files, 1, asked.overwrite)
    write_file(files["svg"], picture(step, asked.theme))
    write_file(files["trace"], json.dumps(trace(step)))
    print("\n".join(told(step)))
    print(f"picture   {files['svg']}\ntrace     {files['trace']} (for ui.perfetto.dev)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
