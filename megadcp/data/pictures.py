"""Small pictures without a plotting library: SVG that reads well on light and dark backgrounds, and the same as text.

SVG is written by hand: one file, no scripts, no fonts of its own, colours by class so that `prefers-color-scheme` can swap them.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, BOTTOM = 68, 24, 56
POINTS = 600  # points of one drawn curve; longer ones are averaged in equal groups
SMOOTH_ABOVE = 100  # points from which a curve is drawn faint, with a running mean over it

STYLE = """<style>
text { font: 12px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #374151 }
.title { font-size: 16px; font-weight: 600; fill: #111827 } .note { fill: #6b7280 }
.paper { fill: #ffffff } .grid { stroke: #e5e7eb } .axis { stroke: #9ca3af } .mark { stroke: #6b7280; stroke-dasharray: 3 3; fill: none }
.fill0 { fill: #2563eb } .fill1 { fill: #f59e0b } .fill2 { fill: #059669 } .fill3 { fill: #db2777 } .fill4 { fill: #7c3aed } .fill5 { fill: #0891b2 }
.line0 { stroke: #2563eb } .line1 { stroke: #f59e0b } .line2 { stroke: #059669 }
.line3 { stroke: #db2777 } .line4 { stroke: #7c3aed } .line5 { stroke: #0891b2 }
.line { fill: none; stroke-width: 2; stroke-linejoin: round } .faint { fill: none; stroke-width: 1; opacity: 0.35 }
@media (prefers-color-scheme: dark) {
text { fill: #d1d5db } .title { fill: #f9fafb } .note { fill: #9ca3af }
.paper { fill: #111827 } .grid { stroke: #1f2937 } .axis { stroke: #6b7280 } .mark { stroke: #9ca3af }
.fill0 { fill: #60a5fa } .fill1 { fill: #fbbf24 } .fill2 { fill: #34d399 } .fill3 { fill: #f472b6 } .fill4 { fill: #a78bfa } .fill5 { fill: #22d3ee }
.line0 { stroke: #60a5fa } .line1 { stroke: #fbbf24 } .line2 { stroke: #34d399 }
.line3 { stroke: #f472b6 } .line4 { stroke: #a78bfa } .line5 { stroke: #22d3ee }
}
</style>"""
COLOURS = 6


@dataclass(frozen=True)
class Frame:
    """The plotting area: data ranges and the way from data to pixels."""

    x: tuple[float, float]
    y: tuple[float, float]
    top: int = 80  # pixels above the area: title, note and legend

    def across(self, value: float) -> float:
        """Pixels from the left edge."""
        return LEFT + (value - self.x[0]) / (self.x[1] - self.x[0]) * (WIDTH - LEFT - RIGHT)

    def down(self, value: float) -> float:
        """Pixels from the top edge."""
        return HEIGHT - BOTTOM - (value - self.y[0]) / (self.y[1] - self.y[0]) * (HEIGHT - self.top - BOTTOM)


@dataclass(frozen=True)
class Histogram:
    """Lengths in bins that double: bin i holds edges[i] <= length < edges[i + 1]. Shares are of all documents and of all tokens."""

    edges: list[int]
    counts: list[int]
    document_shares: list[float]
    token_shares: list[float]
    summary: dict[str, int]  # documents, tokens, p50, p90, p99, max, empty


def summarise(lengths: np.ndarray | Sequence[int]) -> dict[str, int]:
    """Counts and percentiles of document lengths in tokens. A percentile is the length of an actual document (nearest rank)."""
    sizes = np.sort(np.asarray(lengths, dtype=np.int64))
    result = {"documents": len(sizes), "tokens": int(sizes.sum())}
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0)):
        result[name] = int(sizes[max(0, math.ceil(share * len(sizes)) - 1)]) if len(sizes) else 0
    result["empty"] = int(np.count_nonzero(sizes == 0))
    return result


def histogram(lengths: np.ndarray | Sequence[int]) -> Histogram:
    """Bins from the shortest to the longest document: powers of two; empty documents have a bin of their own, edges 0 to 1."""
    sizes = np.asarray(lengths, dtype=np.int64)
    summary = summarise(sizes)
    if not len(sizes):
        return Histogram([], [], [], [], summary)
    low, high = (0 if size == 0 else 1 << (int(size).bit_length() - 1) for size in (sizes.min(), sizes.max()))
    edges = [low]
    while edges[-1] <= high:
        edges.append(max(1, 2 * edges[-1]))
    bins = np.searchsorted(np.array(edges), sizes, side="right") - 1
    counts = np.bincount(bins, minlength=len(edges) - 1)
    tokens = np.bincount(bins, weights=sizes, minlength=len(edges) - 1)
    total = max(1, summary["tokens"])
    return Histogram(edges, counts.tolist(), (counts / len(sizes)).tolist(), (tokens / total).tolist(), summary)


def length_histogram_text(lengths: np.ndarray | Sequence[int], width: int = 40) -> str:
    """A row per bin: lengths, documents, their share as a bar, and the share of all tokens that lies in them."""
    found = histogram(lengths)
    if not found.counts:
        return "no documents"
    labels = [_range(low, high) for low, high in zip(found.edges, found.edges[1:], strict=False)]
    column = max(len("tokens"), *(len(label) for label in labels))
    top = max(found.document_shares)
    rows = [f"{'tokens':>{column}}  {'documents':>11}  {'':<{width}}  of docs  of tokens"]
    for label, count, documents, tokens in zip(labels, found.counts, found.document_shares, found.token_shares, strict=True):
        bar = _bar(documents / top, width)
        rows.append(f"{label:>{column}}  {count:>11,}  {bar:<{width}}  {documents:>7.1%}  {tokens:>9.1%}")
    return "\n".join([*rows, _describe(found.summary)])


def _range(low: int, high: int) -> str:
    return str(low) if high == low + 1 else f"{low:,}-{high - 1:,}"


def _bar(share: float, width: int) -> str:
    """Eighths of a character; whatever is not zero shows."""
    eighths = max(round(share * width * 8), int(share > 0))
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _describe(summary: dict[str, int]) -> str:
    empty = f", {summary['empty']:,} empty" if summary["empty"] else ""
    lengths = ", ".join(f"{name} {summary[name]:,}" for name in ("p50", "p90", "p99", "max"))
    return f"{summary['documents']:,} documents, {summary['tokens']:,} tokens; length {lengths}{empty}"


def length_histogram_svg(lengths: np.ndarray | Sequence[int], title: str = "Document lengths") -> str:
    """Share of documents and share of tokens per length bin, side by side, with the percentiles marked."""
    found = histogram(lengths)
    bins = len(found.counts)
    if not bins:
        return _document([_title(title, "no documents")], title)
    ticks = _ticks(0.0, max(*found.document_shares, *found.token_shares) * 100)
    frame = Frame((0.0, float(bins)), (0.0, ticks[-1]), top=104)
    parts = [_title(title, _describe(found.summary)), _legend(["share of documents", "share of tokens"])]
    parts += _horizontal(frame, ticks, "%")
    for series, shares in enumerate((found.document_shares, found.token_shares)):
        for place, share in enumerate(shares):
            if share:
                count = f"{found.counts[place]:,} documents" if series == 0 else "tokens"
                label = f"{_range(found.edges[place], found.edges[place + 1])} tokens: {share:.1%} ({count})"
                parts.append(_column(frame, (place + 0.12 + 0.38 * series, 0.38), share * 100, (series, label)))
    every = math.ceil(bins / 16)
    for place in range(0, bins + 1, every):
        parts.append(_text(frame.across(place), HEIGHT - BOTTOM + 18, _short(found.edges[place]), "middle"))
    parts += _percentiles(frame, found)
    parts += _axes(frame, "document length, tokens (bins double)", "share, %")
    return _document(parts, title)


def _column(frame: Frame, across: tuple[float, float], height: float, look: tuple[int, str]) -> str:
    """A bar at (left, width) in bins; look = (colour, tooltip)."""
    left, right, top = frame.across(across[0]), frame.across(across[0] + across[1]), frame.down(height)
    top = min(top, HEIGHT - BOTTOM - 1.0)  # whatever is not zero shows
    size = f'x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{HEIGHT - BOTTOM - top:.1f}"'
    return f'<rect class="fill{look[0]}" {size} rx="1.5"><title>{escape(look[1])}</title></rect>'


def _percentiles(frame: Frame, found: Histogram) -> list[str]:
    """Dashed lines with their labels in one row above the area; lines at the same length share a label, close labels move apart."""
    names: dict[int, str] = {}
    for name in ("p50", "p90", "p99", "max"):
        length = found.summary[name]
        names[length] = f"{names[length]} = {name}" if length in names else name
    labels = [f"{name} {_short(length)}" for length, name in names.items()]
    lines = [frame.across(_place(found.edges, length)) for length in names]
    centres = _apart(lines, [7.0 * len(label) + 10 for label in labels])
    parts = []
    for at, centre, label in zip(lines, centres, labels, strict=True):
        path = f"{centre:.1f},{frame.top - 10} {at:.1f},{frame.top} {at:.1f},{HEIGHT - BOTTOM}"
        parts += [f'<polyline class="mark" points="{path}"/>', _text(centre, frame.top - 14, label, "middle", "note")]
    return parts


def _apart(wanted: list[float], widths: list[float]) -> list[float]:
    """Centres near the wanted ones (rising), so that boxes of these widths do not touch and stay inside the picture."""
    placed: list[float] = []
    edge = 4.0
    for centre, width in zip(wanted, widths, strict=True):
        placed.append(max(centre, edge + width / 2))
        edge = placed[-1] + width / 2
    edge = WIDTH - 4.0
    for index in range(len(placed) - 1, -1, -1):
        placed[index] = min(placed[index], edge - widths[index] / 2)
        edge = placed[index] - widths[index] / 2
    return placed


def _place(edges: list[int], length: int) -> float:
    """Where a length lies, in bins; inside a bin the scale is logarithmic."""
    place = int(np.searchsorted(np.array(edges), length, side="right")) - 1
    low, high = edges[place], edges[place + 1]
    return place + (math.log2(length / low) if low and high == 2 * low else 0.5)


def _figure(value: float) -> str:
    """4 digits, and no power of ten for what people count: 4.005, 1,394,000."""
    return f"{value:.4g}" if abs(value) < 1000 or abs(value) >= 1e12 else f"{float(f'{value:.4g}'):,.0f}"


def curve_svg(series: dict[str, list[tuple[float, float]]], title: str, x_label: str, y_label: str) -> str:
    """Curves over a common x. series: name -> (x, y) points in rising x; NaN and infinite points are left out.

    A curve of many points is drawn faint with its running mean on top; the y axis is fitted to the means, so that single spikes may
    leave the picture but never flatten it.
    """
    kept = {name: [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)] for name, points in series.items()}
    kept = {name: _thin(points) for name, points in kept.items() if points}
    if not kept:
        return _document([_title(title, "no data")], title)
    smooth = {name: _running_mean(points) for name, points in kept.items()}
    xs = [x for points in kept.values() for x, _ in points]
    ys = [y for points in smooth.values() for _, y in points]
    x_ticks, y_ticks = _ticks(min(xs), max(xs)), _ticks(min(ys), max(ys))
    low, high = _wide(min(xs), max(xs))
    frame = Frame((x_ticks[0] if low - x_ticks[0] < 0.03 * (high - low) else low, high), (y_ticks[0], y_ticks[-1]))
    last = " · ".join(f"{name} {_figure(points[-1][1])}" for name, points in kept.items())
    parts = [_title(title, "last values: " + last), _legend(list(kept))]
    parts += _horizontal(frame, y_ticks)
    parts += [_text(frame.across(x), HEIGHT - BOTTOM + 18, _number(x), "middle") for x in x_ticks if frame.x[0] <= x <= frame.x[1]]
    parts.append(
        f'<clipPath id="area"><rect x="{LEFT}" y="{frame.top}" width="{WIDTH - LEFT - RIGHT + 6}" height="{HEIGHT - frame.top - BOTTOM}"/></clipPath>'
    )
    for index, name in enumerate(kept):
        colour = index % COLOURS
        if smooth[name] is not kept[name]:
            parts.append(_polyline(frame, kept[name], f"faint line{colour}"))
        parts.append(_polyline(frame, smooth[name], f"line line{colour}"))
        if len(smooth[name]) <= 30:
            dots = [f'<circle class="fill{colour}" cx="{frame.across(x):.1f}" cy="{frame.down(y):.1f}" r="3"/>' for x, y in smooth[name]]
            parts += dots
    parts += _axes(frame, x_label, y_label)
    return _document(parts, title)


def _thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most POINTS points: means of consecutive groups; the last point stays exact, since the picture quotes it."""
    if len(points) <= POINTS:
        return points
    groups = np.array_split(np.array(points), POINTS - 1)
    return [(float(group[:, 0].mean()), float(group[:, 1].mean())) for group in groups] + [points[-1]]


def _running_mean(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Centred mean over 5% of the points. At the steep start the window shrinks evenly, at the end it loses its right half only."""
    if len(points) <= SMOOTH_ABOVE:
        return points
    half = max(1, len(points) // 40)
    sums = np.concatenate([[0.0], np.cumsum([y for _, y in points])])
    result = []
    for place, (x, _) in enumerate(points):
        first, last = place - min(half, place), min(place + min(half, place), len(points) - 1)
        result.append((x, float((sums[last + 1] - sums[first]) / (last + 1 - first))))
    return result


def _wide(low: float, high: float) -> tuple[float, float]:
    """A range that is not empty; one that rounding has made is empty, too."""
    return (low, high) if high - low > 1e-9 * max(abs(low), abs(high)) else (low - 0.5, high + 0.5)


def _ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) from at or below `low` to at or above `high`."""
    low, high = _wide(low, high)
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{place * step:.12g}") for place in range(first, last + 1)]


def _number(value: float) -> str:
    return _short(round(value)) if value == round(value) and abs(value) >= 1000 else f"{value:.6g}"


def _short(value: int) -> str:
    """1,536 -> 1.5K. Powers of two from 1,024 on are counted in 1,024s, as people read lengths."""
    base = 1024 if value >= 1024 and value & (value - 1) == 0 else 1000
    for size, letter in ((base**3, "G"), (base**2, "M"), (base, "K")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return str(value)


def _text(x: float, y: float, text: str, anchor: str = "start", style: str = "") -> str:
    named = f' class="{style}"' if style else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def escape(text: str) -> str:
    """For XML, which can't hold every character."""
    return html.escape(re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text))


def _title(title: str, note: str) -> str:
    return _text(LEFT, 26, title, style="title") + _text(LEFT, 44, note, style="note")


def _legend(names: list[str]) -> str:
    parts, x = [], float(LEFT)
    for index, name in enumerate(names):
        parts.append(f'<rect class="fill{index % COLOURS}" x="{x:.1f}" y="54" width="12" height="10" rx="2"/>' + _text(x + 18, 63, name))
        x += 42 + 6.6 * len(name)
    return "".join(parts)


def _horizontal(frame: Frame, ticks: list[float], unit: str = "") -> list[str]:
    parts = []
    for tick in ticks:
        y = frame.down(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 8, y + 4, _number(tick) + unit, "end"))
    return parts


def _axes(frame: Frame, x_label: str, y_label: str) -> list[str]:
    base, middle = HEIGHT - BOTTOM, (frame.top + HEIGHT - BOTTOM) / 2
    turned = f'<text x="18" y="{middle:.1f}" text-anchor="middle" transform="rotate(-90 18 {middle:.1f})">{escape(y_label)}</text>'
    line = f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>'
    return [line, _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, x_label, "middle"), turned]


def _polyline(frame: Frame, points: list[tuple[float, float]], style: str) -> str:
    path = " ".join(f"{frame.across(x):.1f},{frame.down(y):.1f}" for x, y in points)
    return f'<polyline class="{style}" clip-path="url(#area)" points="{path}"/>'


def _document(parts: list[str], title: str) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">'
    return "\n".join([head, f"<title>{escape(title)}</title>", STYLE, '<rect class="paper" width="100%" height="100%"/>', *parts, "</svg>", ""])
