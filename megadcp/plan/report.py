"""What plans say in lines that a person reads: one step, several together, or the same documents planned twice."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megadcp.plan.basis import Basis
from megadcp.plan.figures import Figures, Part, flops_per_device, ranks, tokens_per_second
from megadcp.plan.step_plan import LEVELS

SAME = 0.005  # a gain nearer to 1 than this is printed as 1.00 and called none
MOST_ROWS = 40  # steps that are listed one by one


@dataclass(frozen=True)
class Beside:
    """What is known of the same steps besides their plans, one value a step; what is empty or None isn't told.

    baselines: makespans, inf where nothing fits, or in a word why there are none. bound_1f1b: seconds, or the same.
    """

    peak_flops: float | None = None
    hardware: str = ""
    baselines: Mapping[str, Sequence[float] | str] = field(default_factory=dict)
    bound_1f1b: Sequence[float] | str = ()
    planning: Sequence[float] = ()


# ------------------------------------------------------------------------------------------------------------ one line each
def layout_line(basis: Basis) -> str:
    """Lanes, ranks and schedule."""
    layout = basis.layout
    lanes = f"{layout.lanes} lane{'s' if layout.lanes > 1 else ''} of tp {layout.tp} x pp {layout.pp}"
    lanes += f" ({ranks(basis)} rank{'s' if ranks(basis) > 1 else ''}, {layout.lanes_per_node} lane{'s' if layout.lanes_per_node > 1 else ''} a node)"
    if layout.pp == 1:
        return f"{lanes}, {basis.model.layers} layers"
    chunks = f", {layout.virtual_stages} chunks a stage" if layout.virtual_stages > 1 else ""
    return f"{lanes}; {basis.schedule}{chunks}, stages of {', '.join(map(str, basis.stage_layers))} layers"


def summary_lines(basis: Basis, steps: Sequence[Figures], beside: Beside) -> list[str]:
    """Everything about one step, or about several together: each line a word and what is to be said under it."""
    lines = [
        ("documents", _documents(steps)),
        ("microbatches", _microbatches(basis, steps)),
        *_mix("cp mix", _together([one.cp for one in steps]), lambda cp: f"cp {cp}"),
        *_recompute(basis, _together([one.recompute for one in steps])),
        *(("memory", line) for line in _memory(basis, steps)),
        ("step", _seconds(steps)),
        ("throughput", f"{tokens_per_second(steps):,.0f} tokens/s, {tokens_per_second(steps) / ranks(basis):,.0f} per device"),
        ("MFU", _mfu(basis, steps, beside)),
        ("idle", f"{_spread(steps, [100 * one.idle for one in steps], '{:.1f}%')} of all lanes' time is spent waiting" + _pipeline(basis)),
        ("bound", _ratio(steps, [one.bound for one in steps], "the universal lower bound")),
    ]
    if basis.layout.pp > 1 and beside.bound_1f1b:
        told = beside.bound_1f1b
        lines.append(("1F1B bound", told if isinstance(told, str) else _ratio(steps, told, "the lower bound of 1F1B")))
    for name, makespans in beside.baselines.items():
        lines.append(("gain", f"{name} {makespans}" if isinstance(makespans, str) else _gain(steps, name, makespans)))
    if beside.planning:
        shown = _spread(steps, [1e3 * seconds for seconds in beside.planning], "{:.1f} ms")
        lines.append(("planning", shown + (", the first of this process" if len(steps) == 1 else "")))
    before = ""
    text = []
    for word, line in lines:
        text.append(f"{word if word != before else '':<13}{line}")
        before = word
    return text


def _spread(steps: Sequence[Figures], values: Sequence[float], form: str) -> str:
    """One value, or the median and the worst (largest) of several with its step."""
    extreme = max(values)
    if form.format(extreme) == form.format(min(values)):
        return form.format(extreme)
    return f"median {form.format(statistics.median(values))}, worst {form.format(extreme)} (step {steps[list(values).index(extreme)].step})"


def _documents(steps: Sequence[Figures]) -> str:
    count, tokens = sum(one.documents for one in steps), sum(one.tokens for one in steps)
    several = f"{len(steps)} steps with " if len(steps) > 1 else ""
    alike = ", all equally long" if all(one.alike and one.longest == steps[0].longest for one in steps) and count > 1 else ""
    return f"{several}{count:,} document{'s' if count > 1 else ''}, {tokens:,} tokens, longest {max(one.longest for one in steps):,}{alike}"


def _microbatches(basis: Basis, steps: Sequence[Figures]) -> str:
    count = sum(part.microbatches for one in steps for part in one.cp.values())
    lanes = [number for one in steps for number in one.per_lane]
    least, most = min(lanes), max(lanes)
    runs = f"{least} to {most} a lane and step, {statistics.fmean(lanes):.1f} on average" if least < most else f"{most} a lane and step"
    padding = sum(one.padded for one in steps) / sum(one.tokens for one in steps) - 1
    return f"{count:,}: {runs}; padding adds {100 * padding:.2f}% tokens"


def _together(mixes: Sequence[Mapping[Any, Part]]) -> dict[Any, Part]:
    """The sum of several steps' mixes, in the order of their first appearance; cp sizes sorted."""
    total: dict[Any, Part] = {}
    for mix in mixes:
        for key, part in mix.items():
            total[key] = Part(*(a + b for a, b in zip(total.get(key, Part()), part, strict=True)))
    return dict(sorted(total.items())) if all(isinstance(key, int) for key in total) else total


def _mix(word: str, parts: Mapping[Any, Part], name: Callable[[Any], str]) -> list[tuple[str, str]]:
    tokens = sum(part.tokens for part in parts.values())
    width = max(len(name(key)) for key in parts)
    return [
        (
            word,
            f"{name(key):<{width}}  {part.microbatches:,} microbatch{'es' if part.microbatches > 1 else ''}, "
            f"{part.documents:,} document{'s' if part.documents > 1 else ''}, {part.tokens:,} tokens ({100 * part.tokens / tokens:.1f}%)",
        )
        for key, part in parts.items()
    ]


def _recompute(basis: Basis, parts: Mapping[tuple[str, int], Part]) -> list[tuple[str, str]]:
    """A line for each level, with the range of its layer counts."""
    levels: dict[str, Part] = {}
    for level in [level for level in LEVELS if any(key[0] == level for key in parts)]:
        layers = [key[1] for key in parts if key[0] == level]
        least, most = min(layers), max(layers)
        counts = f"{least} to {most}" if least < most else f"{most}"
        name = level if level == "none" else f"{level} on {counts} of {basis.recomputable} layers" + (" a stage" if basis.layout.pp > 1 else "")
        levels[name] = next(iter(_together([{level: part} for key, part in parts.items() if key[0] == level]).values()))
    return _mix("recompute", levels, str)


def _memory(basis: Basis, steps: Sequence[Figures]) -> list[str]:
    """Peak of each stage against what may be used of the device."""
    profile = basis.profile
    usable = profile.usable_fraction * profile.memory_bytes
    peaks = [max(stage) for stage in zip(*(one.peak_bytes for one in steps), strict=True)]
    of = f"GB peak of {usable / 1e9:.1f} GB usable ({profile.memory_bytes / 1e9:.0f} GB devices)"
    if len(peaks) == 1:
        return [f"{peaks[0] / 1e9:.1f} {of}: {100 * peaks[0] / usable:.0f}%"]
    return [f"stage {stage}: {peak / 1e9:.1f} {of}: {100 * peak / usable:.0f}%" for stage, peak in enumerate(peaks)]


def _seconds(steps: Sequence[Figures]) -> str:
    whole = _spread(steps, [one.whole for one in steps], "{:.4g} s")
    rest = steps[0].whole - steps[0].makespan
    makespan = f"makespan {steps[0].makespan:.4g} s" if len(steps) == 1 else "the makespan"
    together = f"; {math.fsum(one.whole for one in steps):.4g} s together" if len(steps) > 1 else ""
    return f"{whole}: {makespan} + {rest:.3g} s of gradient reduction and optimizer{together}"


def _mfu(basis: Basis, steps: Sequence[Figures], beside: Beside) -> str:
    flops = flops_per_device(basis, steps)
    if beside.peak_flops is None:
        share = f"not stated, no peak is known of {beside.hardware or 'this hardware'}; {flops / 1e12:.4g} TFLOP/s per device"
    else:
        share = f"{100 * flops / beside.peak_flops:.1f}%: {flops / 1e12:.4g} of {beside.peak_flops / 1e12:.4g} TFLOP/s (dense bf16) per device"
    return share + " in model FLOPs (real tokens, causal attention, no recompute)"


def _pipeline(basis: Basis) -> str:
    return " (lanes without work, and the pipeline's fill, drain and unequal stages)" if basis.layout.pp > 1 else ""


def _ratio(steps: Sequence[Figures], bounds: Sequence[float], name: str) -> str:
    ratios = [one.makespan / bound for one, bound in zip(steps, bounds, strict=True)]
    shown = f"makespan {_spread(steps, ratios, '{:.3f}')} x {name}"
    return shown + (f" ({bounds[0]:.4g} s)" if len(steps) == 1 else "")


def _gain(steps: Sequence[Figures], name: str, makespans: Sequence[float]) -> str:
    """How many times longer the baseline takes, makespan against makespan. Says so where there is nothing to gain."""
    fits = [(one, seconds) for one, seconds in zip(steps, makespans, strict=True) if math.isfinite(seconds) and seconds > 0]
    if not fits:
        return f"{name} fits the memory in no layout" + ("" if len(steps) == 1 else " in any step")
    gains = [seconds / one.makespan for one, seconds in fits]
    none = sum(abs(gain - 1) < SAME for gain in gains)
    nothing = ", no gain: all documents are equally long" if all(one.alike for one, _ in fits) else f", no gain: {name} is as good here"
    if len(steps) == 1:
        gain = gains[0]
        slower = ", slower than it" if gain <= 1 - SAME else ""
        return f"{gain:.2f}x over {name} ({fits[0][1]:.4g} s)" + (nothing if none else slower)
    together = math.fsum(seconds for _, seconds in fits) / math.fsum(one.makespan for one, _ in fits)
    line = f"{together:.2f}x over {name}: median {statistics.median(gains):.2f}, least {min(gains):.2f}, most {max(gains):.2f}"
    if none == len(gains):
        line += nothing
    elif none:
        line += f"; no gain in {none} of {len(gains)} steps"
    return line + (f"; it fits the memory in {len(fits)} of {len(steps)} steps only" if len(fits) < len(steps) else "")


# ------------------------------------------------------------------------------------------------------------------- tables
def table_lines(basis: Basis, steps: Sequence[Figures], beside: Beside) -> list[str]:
    """A row for every step, where they are not too many."""
    if len(steps) > MOST_ROWS:
        return [f"{len(steps)} steps are too many to list (at most {MOST_ROWS}); together:"]
    told = beside.baselines.get("static-best", "")
    static = [one.static for one in steps] if isinstance(told, str) else told
    rows = [["step", "documents", "tokens", "longest", "cp up to", "seconds", "tokens/s", "MFU", "idle", "x bound", "x static-best", "planning"]]
    for number, one in enumerate(steps):
        usage = f"{100 * flops_per_device(basis, [one]) / beside.peak_flops:.1f}%" if beside.peak_flops else "-"
        gain = f"{static[number] / one.makespan:.2f}" if math.isfinite(static[number]) and static[number] > 0 else "-"
        planning = f"{1e3 * beside.planning[number]:.1f} ms" if beside.planning else "-"
        cells = f"{one.step} {one.documents:,} {one.tokens:,} {one.longest:,} {max(one.cp)} {one.whole:.4g} {one.tokens / one.whole:,.0f}".split()
        rows.append([*cells, usage, f"{100 * one.idle:.1f}%", f"{one.makespan / one.bound:.3f}", gain, planning])
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]], left: int = 0) -> list[str]:
    """Columns of equal width, the first `left` ones flush left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            f"{cell:<{width}}" if place < left else f"{cell:>{width}}" for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


class Side(NamedTuple):
    """Steps of one basis, and the peak of its devices."""

    basis: Basis
    steps: Sequence[Figures]
    peak_flops: float | None


def comparison_lines(before: Side, after: Side) -> list[str]:
    """The same documents planned twice, side by side; seconds are means of the steps."""
    rows = [["", "recorded", "what if", "what if / recorded"]]
    sides = (before, after)
    for word, form, values in (
        ("step seconds", "{:.4g}", [statistics.fmean(one.whole for one in side.steps) for side in sides]),
        ("makespan seconds", "{:.4g}", [statistics.fmean(one.makespan for one in side.steps) for side in sides]),
        ("tokens/s", "{:,.0f}", [tokens_per_second(side.steps) for side in sides]),
        ("tokens/s per device", "{:,.0f}", [tokens_per_second(side.steps) / ranks(side.basis) for side in sides]),
        ("TFLOP/s per device", "{:.4g}", [flops_per_device(side.basis, side.steps) / 1e12 for side in sides]),
        ("idle", "{:.1%}", [statistics.fmean(one.idle for one in side.steps) for side in sides]),
        ("peak GB", "{:.1f}", [max(max(one.peak_bytes) for one in side.steps) / 1e9 for side in sides]),
        ("usable GB", "{:.1f}", [side.basis.profile.usable_fraction * side.basis.profile.memory_bytes / 1e9 for side in sides]),
        ("microbatches", "{:,}", [sum(part.microbatches for one in side.steps for part in one.cp.values()) for side in sides]),
    ):
        rows.append([word, *map(form.format, values), "" if "%" in form else f"{values[1] / values[0]:.3f}"])
    shares = [f"{flops_per_device(side.basis, side.steps) / side.peak_flops:.1%}" if side.peak_flops else "not stated" for side in sides]
    rows.insert(6, ["MFU", *shares, ""])
    for cp in sorted({cp for side in sides for one in side.steps for cp in one.cp}):
        rows.append([f"tokens at cp {cp}", *(_share(side.steps, [one.cp.get(cp) for one in side.steps]) for side in sides), ""])
    used = {level for side in sides for one in side.steps for level, _ in one.recompute}
    for level in [level for level in LEVELS if level in used]:
        parts = [[part for one in side.steps for key, part in one.recompute.items() if key[0] == level] for side in sides]
        rows.append([f"tokens at recompute {level}", *(_share(side.steps, of) for side, of in zip(sides, parts, strict=True)), ""])
    return aligned(rows, left=1)


def _share(steps: Sequence[Figures], parts: Sequence[Part | None]) -> str:
    return f"{sum(part.tokens for part in parts if part) / sum(one.tokens for one in steps):.1%}"
