"""Pictures of the evidence: spans on an axis of ratios. A span shows median (mark), quartiles (thick) and range (thin) of its values.

The axis begins at 1.0, no gain, unless a value lies below: ratios have no zero to begin at, and marks, unlike bars, do not make a length of
their distance from the axis. Each series has a colour and a shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megadcp.plan import render_theme as theme
from megadcp.plan.render_common import ticks
from megadcp.plan.render_theme import WIDTH, number, rectangle, width_of, write

LINE = 17.0  # pixels of one series in a row
GAP = 11.0
RIGHT = 30.0
SERIES = (("#2f6fd0", "#7fb2ff"), ("#c2560a", "#ffab66"), ("#0a7d5a", "#4fd6a6"), ("#8b3fb5", "#d29bf2"))  # on light, on dark ground


@dataclass(frozen=True)
class Row:
    """A label, and the values of every series (empty where there are none)."""

    label: str
    values: Sequence[Sequence[float]]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    low, middle, high = np.percentile(values, [25, 50, 75])
    return float(low), float(middle), float(high)


def _sheet() -> str:
    def rules(at: int) -> str:
        return " ".join(f".s{n} {{ fill: {pair[at]} }} .l{n} {{ stroke: {pair[at]}; stroke-linecap: round }}" for n, pair in enumerate(SERIES))

    one = theme.DARK["title"], theme.LIGHT["title"]
    dark = f"@media (prefers-color-scheme: dark) {{\n{rules(1)} .one {{ stroke: {one[0]} }}\n}}"
    return theme.style([], "auto").replace("</style>", f"{rules(0)} .one {{ stroke: {one[1]}; stroke-width: 1.4 }}\n{dark}\n</style>")


def _mark(series: int, x: float, y: float) -> str:
    """Circle, diamond, square or triangle."""
    kind = f's{series}" stroke-width="0'
    if series == 0:
        return f'<circle class="{kind}" cx="{number(x)}" cy="{number(y)}" r="5.2"/>'
    shapes = {
        1: ((0, -6.4), (6.4, 0), (0, 6.4), (-6.4, 0)),
        2: ((-4.6, -4.6), (4.6, -4.6), (4.6, 4.6), (-4.6, 4.6)),
        3: ((0, -5.8), (5.8, 4.8), (-5.8, 4.8)),
    }
    points = " ".join(f"{number(x + dx)},{number(y + dy)}" for dx, dy in shapes[series])
    return f'<polygon class="{kind}" points="{points}"/>'


def spans_svg(title: str, notes: Sequence[str], names: Sequence[str], rows: Sequence[Row], axis: str) -> str:
    """The picture. names: of the series, at most four; axis: what the numbers are."""
    every = [value for row in rows for values in row.values for value in values]
    first, last = min(1.0, *every), max(1.05, *every)
    span = last - first
    first = 1.0 if first >= 1.0 - 1e-6 else first - 0.03 * span
    last += 0.03 * span
    left = 24 + max(width_of(row.label) for row in rows)
    marks_end = WIDTH - RIGHT - 46

    def across(value: float) -> float:
        return left + (value - first) / (last - first) * (marks_end - left)

    parts, y = theme.heading(title, notes)
    x = left
    for series, name in enumerate(names):
        parts += [_mark(series, x + 6, y + 12), write(x + 18, y + 16, name)]
        x += 18 + width_of(name) + 26
    top = y + 34
    height = len(names) * LINE + GAP
    bottom = top + height * len(rows)
    for tick in ticks(last - first) if first == 1.0 else ticks(last):
        value = tick + first if first == 1.0 else tick
        if first <= value <= last:
            parts.append(f'<line class="grid" x1="{number(across(value))}" x2="{number(across(value))}" y1="{number(top)}" y2="{number(bottom)}"/>')
            parts.append(write(across(value), bottom + 17, f"{value:.4g}", "note", "middle"))
    parts.append(f'<line class="one" x1="{number(across(1.0))}" x2="{number(across(1.0))}" y1="{number(top - 4)}" y2="{number(bottom)}"/>')
    for at, row in enumerate(rows):
        begin = top + at * height
        parts.append(write(left - 12, begin + (height - GAP) / 2 + GAP / 2 + 4, row.label, "", "end"))
        for series, values in enumerate(row.values):
            if values:
                parts += _span(series, row.label, names[series], values, (begin + GAP / 2 + (series + 0.5) * LINE, across))
    parts.append(write((left + marks_end) / 2, bottom + 37, axis, "note", "middle"))
    return theme.document(parts, title, bottom + 50, _sheet())


def _span(series: int, label: str, name: str, values: Sequence[float], place: tuple[float, object]) -> list[str]:
    y, across = place
    assert callable(across)
    low, middle, high = quartiles(values)
    said = (
        f"{label}, {name}: median {middle:.3f}, quartiles {low:.3f} to {high:.3f}, range {min(values):.3f} to {max(values):.3f}, {len(values)} values"
    )
    parts = [f"<g><title>{theme.escape(said)}</title>"]
    for width, begin, end in ((1.4, min(values), max(values)), (5.0, low, high)):
        line = f'x1="{number(across(begin))}" x2="{number(across(end))}" y1="{number(y)}" y2="{number(y)}"'
        parts.append(f'<line class="l{series}" stroke-width="{width}" stroke-opacity="0.55" {line}/>')
    parts.append(_mark(series, across(middle), y))
    parts.append(write(across(max(values)) + 11, y + 4, f"{middle:.2f}", "label"))
    parts.append(
        rectangle("hit", (across(min(values)) - 6, y - LINE / 2, across(max(values)) - across(min(values)) + 12, LINE), ' fill-opacity="0"/>')
    )
    return [*parts, "</g>"]
