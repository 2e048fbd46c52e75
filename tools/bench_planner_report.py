"""The planner benchmark's report: tables from result lines (bench_planner.py has their fields)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

Line = dict[str, Any]

DETAILS = "## By group"  # where the part that is printed ends
BASELINES = ("static-best", "static-fixed", "bucket", "megatron-balanced")
SKEWED = ("wikipedia", "web", "midtrain", "prolong", "longsft", "byted", "mcore")  # long tails; not uniform, not constant
FEW = 2  # documents per lane; cells with fewer are listed apart
TIME_TARGETS = {(1024, 32): 10.0, (4096, 64): 50.0, (32768, 1024): 1000.0}  # documents, lanes: milliseconds; with pipelines four times that
DIGITS = 1e-6  # seconds have six or seven
NONE, LARGE = 1.005, 1.2  # gains below the one count as none, above the other as large


# --------------------------------------------------------------------------------------------------------------------- figures
def ratio(line: Line, bound: str = "bound") -> float | None:
    """Predicted seconds of the plan / a lower bound."""
    return line["seconds"] / line[bound] if line.get(bound) else None


def gain(line: Line, baseline: str) -> float | None:
    """Seconds of a baseline / those of the plan; None where the baseline fits nowhere or was not asked."""
    return line[baseline] / line["seconds"] if line.get(baseline) else None


def known(values: Iterable[float | None]) -> list[float]:
    """Those that are there."""
    return [value for value in values if value is not None]


def many(line: Line) -> bool:
    """Whether the step has at least two documents per lane."""
    return bool(line["documents"] >= FEW * line["lanes"])


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Median [lower quartile, upper quartile]."""
    if not values:
        return "-"
    low, middle, high = np.percentile(values, [25, 50, 75])
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def place(line: Line) -> str:
    """A cell in words."""
    size = f"{line['tokens'] // 1024}k tokens/lane, max {line['max_length'] // 1024}k"
    return f"{layout(line)}, {line['lanes']} lanes, {size}, {line['preset']}"


def layout(line: Line) -> str:
    """Model and pipeline."""
    return str(line["model"]) + (f" tp={line['tp']}" if line["tp"] > 1 else "") + (f" pp={line['pp']}" if line["pp"] > 1 else "")


def one_line(line: Line) -> str:
    """A result while the benchmark runs."""
    if line["kind"] == "time":
        return f"planning {line['documents']:,} documents on {line['lanes']} lanes, pp={line['pp']}, {line['preset']}: {line['plan_ms']:.1f} ms"
    if "why" in line:
        return f"{place(line)}, seed {line['seed']}: does not fit"
    best = gain(line, "static-best")
    said = f"ratio {ratio(line):.4f}, gain {best:.3f}" if best else f"ratio {ratio(line):.4f}, no static layout fits"
    return f"{place(line)}, seed {line['seed']}: {said}, {line['plan_ms']:.1f} ms"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A markdown table."""
    return ["| " + " | ".join(header) + " |", "|" + "---|" * len(header), *("| " + " | ".join(row) + " |" for row in rows), ""]


def grouped(lines: Sequence[Line], key: Callable[[Line], Any]) -> list[tuple[Any, list[Line]]]:
    """Lines by key, keys rising."""
    groups: dict[Any, list[Line]] = {}
    for line in lines:
        groups.setdefault(key(line), []).append(line)
    return sorted(groups.items())


# --------------------------------------------------------------------------------------------------------------------- targets
def _target(name: str, value: float | None, limit: float, over: str, where: str = "", least: bool = False) -> list[str]:
    """A row: what, target, found, met or by how much not."""
    wanted = f"{'at least' if least else 'at most'} {limit:g}"
    if value is None:
        return [name, wanted, "no result", "not measured", over]
    miss = (limit / value if least else value / limit) - 1
    return [name, wanted, f"{value:.4f}{where}", "**met**" if miss <= 0 else f"**missed** by {miss:.1%}", over]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.geometric_mean(values) if values else None


def targets(steps: Sequence[Line]) -> list[str]:
    """The issue's targets, one row each."""
    flat = [line for line in steps if line["pp"] == 1 and many(line)]
    piped = [line for line in steps if line["pp"] == 4 and line["lanes"] in (8, 32) and many(line)]
    skewed = [line for line in piped if line["preset"] in SKEWED]
    ratios = known(map(ratio, flat))
    worst = max(flat, key=lambda line: ratio(line) or 0.0, default=None)
    gains = known(gain(line, "static-best") for line in skewed)
    tight = known(ratio(line, "bound_1f1b") for line in piped)
    every = [line for line in steps if gain(line, "static-best")]
    slowest = min(every, key=lambda line: gain(line, "static-best") or 0.0, default=None)
    some = f"{len(flat)} steps without pipelines"
    where = f" ({place(worst)})" if worst else ""
    rows = [
        _target("ratio to the bound, geometric mean", _mean(ratios), 1.025, some),
        _target("ratio to the bound, worst", max(ratios, default=None), 1.08, some, where),
        _target("gain over static-best, median", statistics.median(gains) if gains else None, 1.08, f"{len(gains)} steps, pp=4, skewed", least=True),
        _target("ratio to the 1F1B bound, geometric mean", _mean(tight), 1.05, f"{len(tight)} steps, pp=4, lanes 8 and 32"),
        _target("gain over static-best, least", gain(slowest, "static-best") if slowest else None, 1.0, f"all {len(every)} steps", least=True),
    ]
    below = [line for line in steps if min(known((ratio(line), ratio(line, "bound_1f1b")))) < 1.0 - DIGITS]
    rows.append(["steps below a lower bound", "0", str(len(below)), "**met**" if not below else "**a bug**", f"all {len(steps)} steps"])
    said = f"Cells with at least {FEW} documents per lane, except in the last two rows. Skewed presets: {', '.join(SKEWED)}."
    return ["## Targets", "", *table(("figure", "target", "found", "", "over"), rows), said, ""]


def planning(lines: Sequence[Line]) -> list[str]:
    """CPU time of planning a step, by size."""
    if not lines:
        return []
    rows = []
    for (documents, lanes, pp), group in grouped(lines, lambda line: (line["documents"], line["lanes"], line["pp"])):
        limit = TIME_TARGETS[documents, lanes] * (4 if pp > 1 else 1)
        slowest = max(group, key=lambda line: line["plan_ms"])
        middle, worst = statistics.median(line["plan_ms"] for line in group), slowest["plan_ms"]
        met = sum(line["plan_ms"] <= limit for line in group)
        verdict = "**met**" if worst <= limit else f"**missed**: {worst / limit:.2f} times the target; met by {met} of {len(group)} presets"
        rest = f"{worst:.1f} ({slowest['preset']}, {slowest['tokens_per_lane'] // 1024}k tokens/lane)"
        rows.append([f"{documents:,} on {lanes:,} lanes, pp={pp}", f"{limit:,.0f}", f"{middle:.1f}", rest, verdict])
    said = "CPU milliseconds of one core for the whole plan of a step (static-best and bound included): 8b, least of a few calls."
    return ["## Planning time", "", said, "", *table(("documents", "target", "median of presets", "worst preset", ""), rows)]


# ---------------------------------------------------------------------------------------------------------------------- groups
def _row(name: str, lines: Sequence[Line]) -> list[str]:
    ratios, tight = known(map(ratio, lines)), known(ratio(line, "bound_1f1b") for line in lines)
    row = [name, str(len(lines))]
    row += [f"{spread(values)}, worst {max(values):.3f}, mean {_mean(values):.3f}" if values else "-" for values in (ratios, tight)]
    row += [spread(known(gain(line, baseline) for line in lines), 2) for baseline in BASELINES]
    milliseconds = [line["plan_ms"] for line in lines]
    return [*row, f"{statistics.median(milliseconds):.1f}, worst {max(milliseconds):.1f}"]


HEADER = ("", "steps", "ratio to bound", "ratio to 1F1B bound", *(f"gain over {name}" for name in BASELINES), "planning, ms")


def by_group(steps: Sequence[Line]) -> list[str]:
    """Ratios, gains and times by model and lanes, by tokens per lane, by maximum length."""
    keys: list[tuple[str, Callable[[Line], Any], Callable[[Line], str]]] = [
        ("model and lanes", lambda line: (line["pp"], layout(line), line["lanes"]), lambda line: f"{layout(line)}, {line['lanes']} lanes"),
        ("tokens per lane", lambda line: (line["pp"], line["tokens"]), lambda line: f"pp={line['pp']}, {line['tokens'] // 1024}k"),
        ("maximum length", lambda line: (line["pp"], line["max_length"]), lambda line: f"pp={line['pp']}, {line['max_length'] // 1024}k"),
    ]
    said = [
        DETAILS,
        "",
        "Median [quartiles]; `mean` is geometric. Ratio: predicted seconds / lower bound. Gain: a baseline's seconds / the plan's.",
        "megatron-core's scheduler knows no pipelines, and is asked where documents * lanes is at most 500,000: there it answers in seconds.",
        "",
    ]
    for title, key, name in keys:
        said += [f"### By {title}", "", *table(HEADER, [_row(name(group[0]), group) for _, group in grouped(steps, key)])]
    return said


def gains(steps: Sequence[Line]) -> list[str]:
    """Where planning gains nothing over the best static layout, and where much: by preset."""
    nothing: list[str] = []
    large: list[str] = []
    rows = []
    for (pp, preset), group in grouped(steps, lambda line: (line["pp"], line["preset"])):
        own = known(gain(line, "static-best") for line in group)
        if not own:
            continue
        middle = statistics.median(own)
        (nothing if middle < NONE else large if middle >= LARGE else []).append(f"{preset} (pp={pp}, {middle:.2f})")
        others = [spread(known(gain(line, name) for line in group), 2) for name in BASELINES[1:]]
        rows.append([f"pp={pp}", preset, str(len(group)), spread(own), f"{min(own):.3f} to {max(own):.3f}", *others])
    even = known(gain(line, "static-best") for line in steps if line["preset"] == "constant")
    said = ["## Where it gains", ""]
    if even:
        same = sum(value < NONE for value in even)
        said += [
            f"Equal lengths (constant), the negative control: gain over static-best {spread(even)}; below {NONE} in {same} of {len(even)} steps.",
            "",
        ]
    said += [f"No gain over static-best (median below {NONE}): {', '.join(nothing) or 'no preset'}.", ""]
    said += [f"Large gain over static-best (median at least {LARGE}): {', '.join(large) or 'no preset'}.", ""]
    header = ("", "preset", "steps", "over static-best", "least to most", *(f"over {name}" for name in BASELINES[1:]))
    return [*said, *table(header, rows)]


def unfit(lines: Sequence[Line]) -> list[str]:
    """Cells whose model, or a document of theirs, fits nowhere; and steps that no static layout fits."""
    said = []
    none = [line for line in lines if "why" in line]
    if lines and not none:
        said += ["## What does not fit", "", f"Nothing: the model and all documents of these {len(lines)} steps fit the memory.", ""]
    if none:
        rows = []
        for _, group in grouped(none, lambda line: (layout(line), line["lanes"], line["max_length"])):
            one = group[0]
            which = ", ".join(sorted({line["preset"] for line in group}))
            rows.append([f"{layout(one)}, {one['lanes']} lanes, max {one['max_length'] // 1024}k", str(len(group)), which, one["why"]])
        said += ["## What does not fit", "", *table(("cells", "steps", "presets", "why (the first of them)"), rows)]
    alone = [line for line in lines if "why" not in line and not line.get("static-best")]
    if alone:
        said += [
            f"In {len(alone)} more steps no static layout fits the memory, and the plan does: {'; '.join(sorted({place(line) for line in alone}))}.",
            "",
        ]
    return said


def few(steps: Sequence[Line]) -> list[str]:
    """Cells with too few documents to spread."""
    if not steps:
        return []
    said = f"Too few to spread: the longest document decides, or lanes stay empty. {len(steps)} steps, not in the tables above."
    rows = [_row(f"{layout(group[0])}, {group[0]['preset']}", group) for _, group in grouped(steps, lambda line: (layout(line), line["preset"]))]
    return [f"## Fewer than {FEW} documents per lane", "", said, "", *table(HEADER, rows)]


def text(lines: Sequence[Line], head: Sequence[str]) -> str:
    """The whole report, in markdown."""
    found = [line for line in lines if line["kind"] == "step"]
    steps = [line for line in found if "why" not in line]
    enough, scarce = [line for line in steps if many(line)], [line for line in steps if not many(line)]
    parts = ["# The planner, measured", "", *head, "", "Made by `python tools/benchmark.py planner`; all seconds are predicted (H200, bf16).", ""]
    if steps:
        parts += targets(steps)
    parts += planning([line for line in lines if line["kind"] == "time"])
    if enough:
        parts += [*gains(enough), *by_group(enough)]
    parts += [*few(scarce), *unfit(found)]
    return "\n".join(parts).rstrip() + "\n"


def cells(lines: Sequence[Line]) -> str:
    """Every cell, the median of its steps."""
    header = ("cell", "documents per lane", "ratio to bound", "to 1F1B bound", *BASELINES, "planning, ms")
    steps = [line for line in lines if line["kind"] == "step" and "why" not in line]
    rows = []
    for _, group in grouped(steps, lambda line: (line["pp"], layout(line), line["lanes"], line["tokens"], line["max_length"], line["preset"])):
        columns: list[list[float]] = [known(map(ratio, group)), known(ratio(line, "bound_1f1b") for line in group)]
        columns += [known(gain(line, name) for line in group) for name in BASELINES]
        documents = statistics.median(line["documents"] / line["lanes"] for line in group)
        figures = [f"{statistics.median(column):.3f}" if column else "-" for column in columns]
        rows.append([place(group[0]), f"{documents:.1f}", *figures, f"{statistics.median(line['plan_ms'] for line in group):.1f}"])
    return "\n".join(
        ["# Every cell that fits: medians of its steps", "", "Ratios to the bounds, gains over the baselines.", "", *table(header, rows)]
    )
