"""Tables of the evidence's predicted parts, from results (evidence.py has their lines)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from evidence_ablation import RUNGS
from evidence_cells import MIXES, Cell, Line, cell_of
from evidence_pictures import Row, quartiles

BASELINES = ("static-best", "static-any", "static-fixed", "bucket", "megatron")
EVEN = "constant"  # the preset of equal lengths
HELPS = 1.02  # a median gain up to here is called none
MOST_ROWS = 40
DIGITS = 1e-5  # a plan carries six digits of its seconds


@dataclass(frozen=True)
class Table:
    """Headings, rows of text."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


# --------------------------------------------------------------------------------------------------------------------- figures
def gain(line: Line, baseline: str) -> float | None:
    """Seconds of a baseline / those of the plan; None where either is missing."""
    return line[baseline] / line["seconds"] if line.get(baseline) and line.get("seconds") else None


def gains(lines: Iterable[Line], baseline: str) -> list[float]:
    """Those that are there."""
    return [value for line in lines if (value := gain(line, baseline)) is not None]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median [quartiles] (range)."""
    if not values:
        return "-"
    low, middle, high = (f"{value:.{digits}f}" for value in quartiles(values))
    return f"**{middle}** [{low}, {high}] ({min(values):.{digits}f} to {max(values):.{digits}f})"


def spread_of(group: Sequence[Line], baseline: str, digits: int = 2) -> str:
    """Of the gains over a baseline; how many steps have one, where not all do (it fits nowhere, is over its time limit, or was not asked)."""
    values = gains(group, baseline)
    return spread(values, digits) + (f" n={len(values)}" if 0 < len(values) < len(group) else "")


def k(tokens: int) -> str:
    """16384 -> 16k."""
    return f"{tokens // 1024}k"


def layout(cell: Cell | Line) -> str:
    """Model and degrees."""
    model, tp, pp = (cell.model, cell.tp, cell.pp) if isinstance(cell, Cell) else (cell["model"], cell["tp"], cell["pp"])
    return str(model) + (f" tp {tp}" if tp > 1 else "") + (f" pp {pp}" if pp > 1 else "")


def place(cell: Cell) -> str:
    """A cell in words."""
    return f"{layout(cell)}, {cell.gpus:,} GPUs, {k(cell.tokens)} tokens/lane, max {k(cell.max_length)}, {cell.preset}"


def grouped(lines: Iterable[Line], key: Callable[[Line], Any]) -> dict[Any, list[Line]]:
    """Lines by key, in the order of their first line."""
    groups: dict[Any, list[Line]] = {}
    for line in lines:
        groups.setdefault(key(line), []).append(line)
    return groups


def planned(lines: Sequence[Line], gpus: int = 0) -> list[Line]:
    """Steps that were planned; gpus: only on so many."""
    return [line for line in lines if line["kind"] == "step" and "seconds" in line and (not gpus or line["gpus"] == gpus)]


def of_presets(lines: Sequence[Line]) -> list[Line]:
    """Without the mixes."""
    return [line for line in lines if line["preset"] not in MIXES]


# ----------------------------------------------------------------------------------------------------------------------- gains
def short_table(lines: Sequence[Line]) -> Table:
    """Gains by layout; equal lengths, the negative control, beside all others."""
    rows = []
    for where, group in sorted(grouped(lines, layout).items(), key=lambda item: (item[1][0]["pp"], item[0])):
        even = [line for line in group if line["preset"] == EVEN]
        lanes = group[0]["lanes"]
        what = f"{where} ({lanes} lane{'s' if lanes > 1 else ''})"
        for name, part in (("eight skewed", [line for line in group if line["preset"] != EVEN]), ("equal lengths", even)):
            if part:
                rows.append([what, name, str(len(part)), *(spread_of(part, baseline) for baseline in BASELINES)])
    return Table(["layout", "distributions", "steps", *(f"over {name}" for name in BASELINES)], rows)


def gain_table(lines: Sequence[Line], by: Sequence[tuple[str, Callable[[Line], str]]]) -> Table:
    """Gains over the baselines, a row for every combination of the columns in `by`, in the order of the lines."""
    rows = []
    for names, group in grouped(lines, lambda line: tuple(text(line) for _, text in by)).items():
        cells = len({cell_of(line) for line in group})
        rows.append([*names, f"{cells} / {len(group)}", *(spread_of(group, name) for name in BASELINES)])
    return Table([*(name for name, _ in by), "cells / steps", *(f"over {name}" for name in BASELINES)], rows)


def packs_table(lines: Sequence[Line]) -> Table:
    """static-fixed with packs of one size and of the best of seven, on the steps for which there are both."""
    steps = {(cell_of(line), line["seed"]): line for line in planned(lines)}
    both = [
        (steps[key], {**steps[key], **{name: line[name] for name in ("static-fixed-any", "pack")}})
        for line in lines
        if line.get("static-fixed-any") and (key := (cell_of(line), line["seed"])) in steps
    ]
    rows = []
    for (where, most, even), group in grouped(
        [new for _, new in both], lambda line: (layout(line), line["max_length"], line["preset"] == EVEN)
    ).items():
        sizes = sorted({line["pack"] for line in group})
        chosen = k(sizes[0]) if len(sizes) == 1 else f"{k(sizes[0])} to {k(sizes[-1])}"
        kind = "equal lengths" if even else "eight skewed"
        rows.append([where, k(most), kind, str(len(group)), spread_of(group, "static-fixed"), spread_of(group, "static-fixed-any"), chosen])
    head = ["layout", "maximum length", "distributions", "steps", "over static-fixed", "over static-fixed-any", "packs chosen, tokens"]
    return Table(head, rows)


def cost_table(lines: Sequence[Line]) -> Table:
    """Memory, planning time and bound, by layout and GPUs."""
    rows = []
    for (where, gpus), group in sorted(grouped(lines, lambda line: (layout(line), line["gpus"])).items()):
        extra = [(line["peak"] - line["static_peak"]) / 1e9 for line in group if line.get("static_peak")]
        ratio = [line["peak"] / line["static_peak"] for line in group if line.get("static_peak")]
        bound = [line["seconds"] / line["bound"] for line in group if line.get("bound")]
        tight = [line["seconds"] / line["bound_1f1b"] for line in group if line.get("bound_1f1b")]
        times = [line["plan_ms"] for line in group]
        theirs = [line["megatron_ms"] for line in group if line.get("megatron_ms")]
        row = [where, f"{gpus:,}", str(len(group)), spread([line["peak"] / 1e9 for line in group], 0), spread(extra, 1), spread(ratio)]
        share = [line["plan_ms"] / 1e3 / line["seconds"] for line in group]
        late = sum(value > 1 for value in share)
        said = f"{100 * float(np.median(share)):.1f}% (to {100 * max(share):.1f}%" + (f", longer in {late})" if late else ")")
        row += [spread(times, 0), said, spread(theirs, 0), spread(bound, 3), spread(tight, 3)]
        rows.append(row)
    head = ["layout", "GPUs", "steps", "peak of a plan, GB", "more than static-best, GB", "ratio to it", "planning, CPU ms", "of the step's time"]
    return Table([*head, "megatron's scheduler, one cap, CPU ms", "ratio to the bound", "ratio to the 1F1B bound"], rows)


def over_table(lines: Sequence[Line]) -> Table:
    """What was cut off."""
    found: dict[tuple[str, float], dict[Cell, int]] = {}
    for line in lines:
        for operation, limit in line.get("over", {}).items():
            found.setdefault((operation, limit), {}).setdefault(cell_of(line), 0)
            found[operation, limit][cell_of(line)] += 1
    said = {
        "plan": "this project's planner",
        "megatron_once": "megatron-core's scheduler, one cap",
        "megatron": "megatron-core's scheduler, all caps",
    }
    rows = []
    for (operation, limit), cells in sorted(found.items()):
        rows += [[said.get(operation, operation), f"> {limit:g} s", place(cell), str(steps)] for cell, steps in sorted(cells.items())]
    return Table(["what", "CPU time", "cell", "steps"], rows)


def unfit_table(lines: Sequence[Line]) -> Table:
    """Cells that do not fit, those with one reason together; and steps that no static layout fits."""
    rows = []
    none = [line for line in lines if "why" in line]
    for (where, gpus, most), group in grouped(none, lambda line: (layout(line), line["gpus"], line["max_length"])).items():
        presets = ", ".join(sorted({line["preset"] for line in group}))
        rows.append([f"{where}, {gpus:,} GPUs, max {k(most)}", str(len(group)), presets, group[0]["why"]])
    alone = [line for line in lines if line.get("seconds") and "static-best" in line and not line["static-best"]]
    for cell, group in grouped(alone, cell_of).items():
        rows.append([place(cell), str(len(group)), cell.preset, "no static layout fits; the plan does"])
    return Table(["cells", "steps", "distributions", "why (the first of them)"], rows)


def every_cell(lines: Sequence[Line]) -> Table:
    """A row for every cell: the spread over its steps."""
    rows = []
    for cell, group in sorted(grouped(planned(lines), cell_of).items()):
        ratio = [line["seconds"] / line["bound"] for line in group if line.get("bound")]
        extra = [(line["peak"] - line["static_peak"]) / 1e9 for line in group if line.get("static_peak")]
        times = [line["plan_ms"] for line in group]
        runs = sorted({line["run"] for line in group})
        row = [place(cell), str(len(group)), *(spread_of(group, name, 3) for name in BASELINES)]
        rows.append([*row, spread(ratio, 3), spread(extra, 1), spread(times, 0), ", ".join(map(str, runs))])
    head = ["cell", "steps", *(f"over {name}" for name in BASELINES)]
    return Table([*head, "ratio to bound", "GB more than static-best", "planning, CPU ms", "runs"], rows)


# ---------------------------------------------------------------------------------------------------------- where it does not help
def no_help(lines: Sequence[Line]) -> tuple[list[str], Table]:
    """In words, and the cells whose median gain over static-best is at most HELPS; by distribution and layout where there are many."""
    cells = {cell: gains(group, "static-best") for cell, group in grouped(planned(lines), cell_of).items()}
    cells = {cell: values for cell, values in cells.items() if values}
    poor = {cell: values for cell, values in cells.items() if float(np.median(values)) <= HELPS}
    said = [f"In {len(poor)} of {len(cells)} cells the median gain over static-best is at most {HELPS:g}."]
    for name in BASELINES[1:]:
        own = {cell: gains(group, name) for cell, group in grouped(planned(lines), cell_of).items()}
        own = {cell: values for cell, values in own.items() if values}
        count = sum(float(np.median(values)) <= HELPS for values in own.values())
        said.append(f"Over {name}: {count} of {len(own)} cells.")
    for name in BASELINES:
        below = [(value, line) for line in planned(lines) if (value := gain(line, name)) and value < 1 - DIGITS]
        if below:
            value, worst = min(below, key=lambda one: one[0])
            said.append(f"Slower than {name} in {len(below)} steps, at worst {value:.3f} ({place(cell_of(worst))}, seed {worst['seed']}).")
    late = [line for line in planned(lines) if line["plan_ms"] / 1e3 > line["seconds"]]
    if late:
        where = ", ".join(sorted({f"{layout(line)} on {line['gpus']:,} GPUs" for line in late}))
        said.append(f"Planning takes longer than the step in {len(late)} steps ({where}): one planner can't keep up with them.")
    if len(poor) <= MOST_ROWS:
        return said, Table(["cell", "over static-best"], [[place(cell), spread(values, 3)] for cell, values in sorted(poor.items())])
    rows = []
    for (where, gpus, preset), group in _by(poor).items():
        alike = [cell for cell in cells if (layout(cell), cell.gpus, cell.preset) == (where, gpus, preset)]
        sizes = ", ".join(f"{k(tokens)}/{k(most)}" for tokens, most in sorted({(cell.tokens, cell.max_length) for cell in group}))
        values = [value for cell in group for value in poor[cell]]
        rows.append([f"{where}, {gpus:,} GPUs", preset, f"{len(group)} of {len(alike)}", sizes, spread(values, 3)])
    return said, Table(["layout", "distribution", "cells", "tokens per lane / maximum length", "over static-best, their steps"], rows)


def _by(cells: Iterable[Cell]) -> dict[tuple[str, int, str], list[Cell]]:
    found: dict[tuple[str, int, str], list[Cell]] = {}
    for cell in sorted(cells):
        found.setdefault((layout(cell), cell.gpus, cell.preset), []).append(cell)
    return found


# --------------------------------------------------------------------------------------------------------------------- studies
def ablation_rows(lines: Sequence[Line]) -> dict[str, list[dict[str, float]]]:
    """By layout: of every step the speed-up over bucket of each rung that applies."""
    found: dict[str, list[dict[str, float]]] = {}
    for line in lines:
        rungs = line.get("rungs") if line["kind"] == "ablation" else None
        if rungs and rungs["bucket"]:
            name = f"{layout(line)}, {line['gpus']} GPUs" + (", mixes" if line["preset"] in MIXES else "")
            found.setdefault(name, []).append({rung: rungs["bucket"] / value for rung, value in rungs.items() if value})
    return found


def ablation_table(lines: Sequence[Line]) -> Table:
    """Speed-up over bucket after each rung, and what the rung adds (median of quotients)."""
    rows = []
    for name, steps in ablation_rows(lines).items():
        before = "bucket"
        for rung in (*RUNGS, "static-best"):
            values = [step[rung] for step in steps if rung in step]
            if not values:
                continue
            added = [step[rung] / step[before] for step in steps if rung in step and before in step]
            more = "-" if rung in ("bucket", "static-best") else f"{100 * (float(np.median(added)) - 1):+.1f}%"
            rows.append([name, rung if rung != "static-best" else "(static-best)", str(len(values)), spread(values), more])
            before = rung
    return Table(["layout", "rung", "steps", "speed-up over bucket", "the rung adds"], rows)


def ablation_in_words(lines: Sequence[Line]) -> list[str]:
    """By layout: the rung that adds most, and how far static-best alone comes."""
    said = []
    for name, steps in ablation_rows(lines).items():
        added, before = {}, "bucket"
        for rung in RUNGS[1:]:
            both = [step[rung] / step[before] for step in steps if rung in step and before in step]
            if both:
                added[rung], before = float(np.median(both)), rung
        if added:
            most = max(added, key=lambda rung: added[rung])
            static, last = (float(np.median([step[rung] for step in steps if rung in step])) for rung in ("static-best", before))
            said.append(f"{name}: {most} adds most ({100 * (added[most] - 1):+.0f}%); static-best alone reaches {static:.2f} of {last:.2f}.")
    return said


def ablation_picture(lines: Sequence[Line]) -> tuple[list[str], list[Row]]:
    """Names of the series, and a row for each rung; layouts with the presets, at most four."""
    found = {name: steps for name, steps in ablation_rows(lines).items() if not name.endswith("mixes")}
    names = list(found)[:4]
    rows = [Row(rung, [[step[rung] for step in found[name] if rung in step] for name in names]) for rung in RUNGS[1:]]
    return names, [row for row in rows if any(row.values)]


def sensitivity_rows(lines: Sequence[Line]) -> tuple[list[str], dict[str, dict[str, list[float]]], int]:
    """Names of the layouts; variant -> layout -> gains; how many plans did not fit what is true."""
    names: list[str] = []
    found: dict[str, dict[str, list[float]]] = {}
    unfit = 0
    for line in lines:
        for variant, value in line.get("gains", {}).items():
            where = f"{layout(line)}, {line['gpus']} GPUs"
            if where not in names:
                names.append(where)
            unfit += value is None
            if value is not None and math.isfinite(value):
                found.setdefault(variant, {}).setdefault(where, []).append(value)
    return names, found, unfit


def sensitivity_in_words(lines: Sequence[Line]) -> str:
    """How many gains are below 1, by layout."""
    names, found, _ = sensitivity_rows(lines)
    said = []
    for name in names:
        values = [value for each in found.values() for value in each.get(name, [])]
        below = [value for value in values if value < 1 - DIGITS]
        said.append(f"{name}: {len(below)} of {len(values)} gains are below 1" + (f" (least {min(below):.3f})" if below else ""))
    return "; ".join(said) + "."


def sensitivity_table(lines: Sequence[Line]) -> Table:
    """Gains over static-best by variant and layout."""
    names, found, _ = sensitivity_rows(lines)
    rows = [[variant, *(spread(each.get(name, []), 3) for name in names)] for variant, each in found.items()]
    return Table(["variant", *names], rows)


def memory_in_words(lines: Sequence[Line]) -> str:
    """Median peaks of plans against static-best's, on 32 GPUs."""
    said = []
    for where, group in sorted(grouped(lines, layout).items()):
        ratio = [line["peak"] / line["static_peak"] for line in group if line.get("static_peak")]
        extra = [(line["peak"] - line["static_peak"]) / 1e9 for line in group if line.get("static_peak")]
        if ratio:
            said.append(f"{where} {np.median(ratio):.2f} times ({np.median(extra):+.0f} GB)")
    return "Peak memory of a plan against static-best's, medians on 32 H200: " + ", ".join(said) + "." if said else ""


def chart_lines(lines: Sequence[Line]) -> list[Line]:
    """What the README's chart shows: 8b without pipelines on 32 GPUs, nine distributions."""
    return [line for line in of_presets(planned(lines, 32)) if (line["model"], line["pp"]) == ("8b", 1)]


def gain_rows(lines: Sequence[Line]) -> list[Row]:
    """For the README's chart: gains by distribution, most gain over static-best first."""
    chosen = chart_lines(lines)
    rows = [
        Row(preset, [gains(group, "static-best"), gains(group, "bucket"), gains(group, "static-any")])
        for preset, group in grouped(chosen, lambda line: line["preset"]).items()
    ]
    rows = [row for row in rows if row.values[0]]
    return sorted(rows, key=lambda row: -float(np.median(row.values[0])))
