"""The Gantt picture of a step as SVG: lanes down, seconds across, planned or measured times.

With pipelines there is a panel for each stage, all lanes in each: only so a cp group is one block wherever it runs. What is not covered
by a block is idle time and shows as the shaded ground.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megadcp.plan import render_theme as theme_
from megadcp.plan.actions import FORWARD
from megadcp.plan.render_common import (
    KINDS,
    Scene,
    bytes_of,
    count_of,
    headline,
    lanes_of,
    percent,
    recompute_of,
    scene,
    seconds_of,
    short,
    ticks,
    unit_of,
)
from megadcp.plan.render_theme import LEFT, RIGHT, WIDTH, Swatch, number, rectangle, width_of, write
from megadcp.plan.simulate import Event, Timeline
from megadcp.plan.step_plan import LEVELS, Layout, StepPlan

MOST_TOOLTIPS = 3_000  # largest blocks first: a file stays small enough for a browser
MOST_BLOCKS = 20_000  # largest blocks first; the others of one colour are one path
LABEL_HEIGHT = 12.0  # pixels that a label needs
HEADER = 20.0  # above a stage's panel


@dataclass(frozen=True)
class Frame:
    """Where lanes and seconds lie, in pixels."""

    span: float
    lanes: int
    row: float  # height of a lane, gap included
    gap: float
    tops: tuple[float, ...]  # of each stage's panel

    def across(self, seconds: float) -> float:
        """From the left edge."""
        return LEFT + seconds / (self.span or 1.0) * (WIDTH - LEFT - RIGHT)

    @property
    def bottom(self) -> float:
        """Of the last panel."""
        return self.tops[-1] + self.lanes * self.row

    def box(self, view: Scene, event: Event) -> tuple[float, float, float, float]:
        """(x, y, width, height) of an event on all its lanes."""
        one, left = view.plan.microbatches[event.microbatch], self.across(event.begin)
        return left, self.tops[event.stage] + one.lane * self.row, self.across(event.end) - left, one.cp * self.row - self.gap


def gantt_svg(plan: StepPlan, timeline: Timeline | None = None, title: str = "", theme: str = "auto", span: float = 0.0) -> str:
    """The picture of a plan: its simulated times, or measured ones (`timeline`) with the predicted end marked.

    A block is a microbatch on all lanes of its cp group, coloured by cp; the hatched part of its height is the share of layers that are
    recomputed. Each block carries its numbers as a tooltip (the largest blocks only, where there are thousands).

    Args:
        plan: a legal plan.
        timeline: measured times; none: simulate.simulate(plan).
        title: heading; none: the step's number.
        theme: auto (follows the reader's system), light or dark.
        span: seconds that the axis covers at least, so that several pictures have the same scale.

    Raises:
        UserError: the theme is not known, or the timeline does not belong to the plan.
    """
    sizes = {one.cp for one in plan.microbatches}
    sheet = theme_.style(sizes, theme)
    view = scene(plan, timeline)
    view = replace(view, span=max(view.span, span))
    title = title or f"Step {plan.step}: {'measured' if view.measured else 'planned'} times of each lane"
    parts, y = theme_.heading(title, headline(view))
    swatches = _swatches(view)
    keys, y = theme_.legend(swatches, y)
    frame = _frame(view, y + 8 + 16 * len(view.marks))
    drawn, labels = [*parts, *keys, *_grounds(view, frame)], []
    ranks = _largest(view, frame)
    for stage in range(plan.layout.pp):
        blocks, words = _stage(view, frame, stage, ranks)
        drawn += blocks
        labels += words
    drawn += [*_marks(view, frame), *labels, *_axis(view, frame)]
    hatchings = {theme_.pattern_of(one.recompute.level, one.cp) for one in plan.microbatches if one.recompute.level != "none"}
    head = sheet + theme_.patterns(hatchings | {swatch.pattern for swatch in swatches if swatch.pattern})
    return theme_.document(drawn, title, frame.bottom + 46, head)


def _row(layout: Layout) -> float:
    """Height of a lane's row: as much as the picture allows. Readable with few lanes, a pixel each with a thousand."""
    rows = layout.lanes * layout.pp
    row = 44.0 if rows <= 4 else 30.0 if rows <= 12 else 22.0 if rows <= 40 else 1100 / rows
    return math.floor(row) if row >= 4 else max(0.5, math.floor(2 * row) / 2)


def _node_borders(layout: Layout, row: float) -> bool:
    """Whether lines between nodes are drawn: there are several, and they don't cover the picture."""
    return 1 < layout.lanes_per_node < layout.lanes and layout.lanes_per_node * row >= 24


def _frame(view: Scene, top: float) -> Frame:
    """Panels one under the other, each with room for its heading."""
    layout = view.plan.layout
    row = _row(layout)
    gap = 2.0 if row >= 16 else 1.0 if row >= 8 else 0.5 if row >= 4 else 0.0
    header = HEADER if layout.pp > 1 else 0.0
    tops = tuple(top + (stage + 1) * header + stage * (layout.lanes * row + (8 if layout.pp > 1 else 0)) for stage in range(layout.pp))
    return Frame(view.span, layout.lanes, row, gap, tops)


def _swatches(view: Scene) -> list[Swatch]:
    """The legend: group sizes with their microbatches, directions, recompute levels, idle time, node borders."""
    plan = view.plan
    counts: dict[int, int] = {}
    for one in plan.microbatches:
        counts[one.cp] = counts.get(one.cp, 0) + 1
    swatches = [Swatch(f"cp {cp} ({counts[cp]:,})", f"c{cp}") for cp in sorted(counts)]
    sample = max(sorted(counts), key=lambda cp: counts[cp]) if counts else 1
    if view.split:
        swatches += [Swatch("forward: dark shade", f"c{sample}f"), Swatch("backward: full colour", f"c{sample}")]
    used = {one.recompute.level for one in plan.microbatches}
    for level in LEVELS[1:]:
        if level in used:
            swatches.append(Swatch(f"recompute {level}", f"c{sample}", theme_.pattern_of(level, sample)))
    if view.recomputed:
        swatches[-1] = Swatch(swatches[-1].words + " (hatched height: share of layers)", swatches[-1].fill, swatches[-1].pattern)
    swatches.append(Swatch("idle", "idle"))
    if plan.layout.virtual_stages > 1:
        swatches.append(Swatch("c0, c1, ...: chunk"))
    if _node_borders(plan.layout, _row(plan.layout)):
        swatches.append(Swatch(f"node border ({plan.layout.lanes_per_node} lanes each)", line="node"))
    return swatches


# ------------------------------------------------------------------------------------------------------------------- ground
def _grounds(view: Scene, frame: Frame) -> list[str]:
    """Shaded rows, grid, node borders, and what stands beside them: stage, lane numbers, idle share of each lane."""
    plan, layout = view.plan, view.plan.layout
    idle = view.idle()
    right = frame.across(view.end)
    every = 1
    while every * frame.row < LABEL_HEIGHT:
        every *= 2
    factor, _ = unit_of(view.span)
    parts = [write(LEFT - 8, frame.tops[0] - 7, "lane", "note", "end")]
    if frame.row >= LABEL_HEIGHT:
        parts.append(write(WIDTH - 8, frame.tops[0] - 7, "idle", "note", "end"))
    for stage, top in enumerate(frame.tops):
        if layout.pp > 1:
            share = math.fsum(row[stage] for row in idle) / layout.lanes
            chunks = f" in {layout.virtual_stages} chunks" if layout.virtual_stages > 1 else ""
            words = f"stage {stage}: {count_of(plan.stage_layers[stage], 'layer')}{chunks}, idle {percent(share)}"
            parts.append(write(LEFT, top - 6, words, "title label"))
        if frame.gap:
            rows = [rectangle("idle", (LEFT, top + lane * frame.row, right - LEFT, frame.row - frame.gap), "/>") for lane in range(layout.lanes)]
        else:
            rows = [rectangle("idle", (LEFT, top, right - LEFT, layout.lanes * frame.row), "/>")]
        parts += [f'<g data-ground="{stage}">', *rows, "</g>"]
        for tick in ticks(view.span * factor) if view.span else ():
            parts.append(_line("grid", frame.across(tick / factor), top, top + layout.lanes * frame.row - frame.gap))
        for lane in range(layout.lanes):
            baseline = top + lane * frame.row + (frame.row * every - frame.gap) / 2 + 4
            if lane % every == 0 and baseline <= top + layout.lanes * frame.row + 4:
                speed = f" x{plan.lane_speed[lane]:.3g}" if plan.lane_speed and plan.lane_speed[lane] != 1 else ""
                parts.append(write(LEFT - 8, baseline, f"{lane}{speed}", "note label", "end"))
            if frame.row >= LABEL_HEIGHT:
                parts.append(write(WIDTH - 8, baseline, percent(idle[lane][stage]), "note label", "end"))
    return parts


def _line(kind: str, x: float, top: float, bottom: float) -> str:
    return f'<line class="{kind}" x1="{number(x)}" x2="{number(x)}" y1="{number(top)}" y2="{number(bottom)}"/>'


# ------------------------------------------------------------------------------------------------------------------- blocks
def _stage(view: Scene, frame: Frame, stage: int, ranks: Sequence[int]) -> tuple[list[str], list[str]]:
    """All blocks of a stage with their recompute bands and node borders; and the labels, which go on top of everything."""
    layout = view.plan.layout
    blocks: list[str] = []
    labels: list[str] = []
    bands, tiny = _Paths(), _Paths()
    marked = [frame.across(mark.seconds) for mark in view.marks]
    for index, event in enumerate(view.events):
        if event.stage != stage:
            continue
        box, rank = frame.box(view, event), ranks[index]
        kind = f"c{view.plan.microbatches[event.microbatch].cp}" + ("f" if event.kind == FORWARD else "")
        if rank < MOST_BLOCKS:
            blocks.append(_block(view, event, kind, box, rank < MOST_TOOLTIPS))
            band = _band(view, event, box, bands)
            words, needed = _words(view, event, box)
            if words:
                labels += _label(words, needed, kind, box, (band, marked))
        else:
            tiny.add(kind, box)
    parts = [f'<g data-stage="{stage}">', *tiny.drawn(""), *blocks, "</g>", *bands.drawn("again")]
    if _node_borders(layout, frame.row):
        for lane in range(layout.lanes_per_node, layout.lanes, layout.lanes_per_node):
            y = number(frame.tops[stage] + lane * frame.row - frame.gap / 2)
            parts.append(f'<line class="node" x1="{LEFT - 34}" x2="{number(frame.across(view.end))}" y1="{y}" y2="{y}"/>')
    return parts, labels


def _largest(view: Scene, frame: Frame) -> list[int]:
    """Rank of each event by the area of its block, in hundredths of a pixel, equal areas by their place in the timeline."""
    boxes = [frame.box(view, event) for event in view.events]
    order = sorted(range(len(boxes)), key=lambda index: (-round(100 * boxes[index][2] * boxes[index][3]), index))
    ranks = [0] * len(boxes)
    for rank, index in enumerate(order):
        ranks[index] = rank
    return ranks


class _Paths:
    """Rectangles that share a class (or a pattern), as one path each: a fraction of the bytes."""

    def __init__(self) -> None:
        self.boxes: dict[str, list[str]] = {}

    def add(self, kind: str, box: tuple[float, float, float, float]) -> None:
        x, y, width, height = (number(value) for value in box)
        self.boxes.setdefault(kind, []).append(f"M{x} {y}h{width}v{height}h-{width}z")

    def drawn(self, pattern_class: str) -> list[str]:
        """`pattern_class`: the kinds are patterns, drawn in this class."""
        look = f'class="{pattern_class}" fill="url(#%s)"' if pattern_class else 'class="%s"'
        return [f'<path {look % kind} d="{"".join(self.boxes[kind])}"/>' for kind in sorted(self.boxes)]


def _block(view: Scene, event: Event, kind: str, box: tuple[float, float, float, float], tooltip: bool) -> str:
    """A microbatch: data-m is its index in the plan, data-c its chunk."""
    chunk = f' data-c="{event.chunk}"' if view.plan.layout.virtual_stages > 1 else ""
    edge = " edge" if box[2] >= 3 and box[3] >= 3 else ""
    begin = rectangle(kind + edge, box, f' data-m="{event.microbatch}"{chunk}')
    return f"{begin}><title>{theme_.escape(_tooltip(view, event))}</title></rect>" if tooltip else begin + "/>"


def _tooltip(view: Scene, event: Event) -> str:
    plan, one = view.plan, view.plan.microbatches[event.microbatch]
    real = sum(plan.lengths[document] for document in one.documents)
    padded = f" ({one.tokens - real:,} of them padding)" if one.tokens > real else ""
    stage = f" on stage {event.stage}" if plan.layout.pp > 1 else ""
    chunk = f", chunk {event.chunk}" if plan.layout.virtual_stages > 1 else ""
    comm = f" ({one.cp_comm})" if one.cp > 1 else ""
    lines = [
        f"slot {one.slot}, {lanes_of(one)}, cp {one.cp}{comm}",
        f"{count_of(len(one.documents), 'document')}, {one.tokens:,} tokens{padded}",
        f"recompute {recompute_of(plan, one)}",
        f"{KINDS[event.kind]}{stage}{chunk}: {seconds_of(event.end - event.begin)}, from {seconds_of(event.begin)} to {seconds_of(event.end)}",
        f"planned: {seconds_of(one.seconds)}, {bytes_of(one.bytes)} of activations",
    ]
    return "\n".join(lines)


def _band(view: Scene, event: Event, box: tuple[float, float, float, float], bands: _Paths) -> float:
    """Hatch the share of the height that is recomputed, from below; returns where the band begins."""
    x, y, width, height = box
    share, one = view.again(event), view.plan.microbatches[event.microbatch]
    if share > 0 and height >= 3 and width >= 1:
        band = max(2.0, share * height)
        bands.add(theme_.pattern_of(one.recompute.level, one.cp), (x, y + height - band, width, band))
        return y + height - band
    return y + height


def _words(view: Scene, event: Event, box: tuple[float, float, float, float]) -> tuple[str, float]:
    """What fits a block of documents, tokens and chunk, and its width; empty when nothing does."""
    if box[3] < LABEL_HEIGHT:
        return "", 0.0
    one = view.plan.microbatches[event.microbatch]
    tokens, documents = short(one.tokens), count_of(len(one.documents), "doc")
    group = f"cp {one.cp}, " if one.cp > 1 and box[3] >= 40 else ""
    chunk = f"c{event.chunk}" if view.plan.layout.virtual_stages > 1 else ""
    end = f" {chunk}" if chunk else ""
    for words in (f"{group}{documents}, {tokens} tokens{end}", f"{documents}, {tokens}{end}", f"{tokens}{end}", chunk or tokens):
        needed = width_of(words)
        if needed + 4 <= box[2]:
            return words, needed
    return "", 0.0


def _label(words: str, needed: float, kind: str, box: tuple[float, float, float, float], under: tuple[float, Sequence[float]]) -> list[str]:
    """The words in the middle of the block, above its hatching if they fit there; else on a plate of the block's colour.

    under: where the hatching begins, and the x of the marks.
    """
    (x, y, width, height), (band, marked) = box, under
    middle, centre = y + height / 2, x + width / 2
    if band - y >= LABEL_HEIGHT + 2 and middle + 7 > band:
        middle = y + (band - y) / 2
    text = write(centre, middle + 4, words, f"label t{kind[1:]}", "middle")
    if middle + 6 <= band and not any(abs(mark - centre) <= needed / 2 + 2 for mark in marked):
        return [text]
    high = min(14.0, height)
    return [rectangle(f"{kind} again", (centre - needed / 2 - 2, middle - high / 2, needed + 4, high), ' rx="3"/>'), text]


# --------------------------------------------------------------------------------------------------------------------- time
def _marks(view: Scene, frame: Frame) -> list[str]:
    """Vertical lines with labels to their left, the latest in the top row: no line crosses a label."""
    parts = []
    y = frame.tops[0] - (HEADER if view.plan.layout.pp > 1 else 0) - 16 * len(view.marks) + 2
    for mark in reversed(view.marks):
        x, kind = frame.across(mark.seconds), {"lower bound": "bound", "predicted end": "end", "measured end": "measured"}[mark.name]
        words = f"{mark.name} {seconds_of(mark.seconds)}"
        inside = x - 5 - width_of(words) >= 4
        parts.append(_line(f"mark {kind}line", x, y - 8, frame.bottom))
        parts.append(write(x - 5 if inside else x + 5, y + 1, words, f"{kind}text", "end" if inside else "start"))
        y += 16
    return parts


def _axis(view: Scene, frame: Frame) -> list[str]:
    factor, unit = unit_of(view.span)
    base = frame.bottom + 3
    parts = [f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{number(base)}" y2="{number(base)}"/>']
    for tick in ticks(view.span * factor) if view.span else (0.0,):
        x = frame.across(tick / factor)
        parts += [_line("axis", x, base, base + 4), write(x, base + 17, f"{tick:,g}", anchor="middle")]
    name = {"s": "seconds", "ms": "milliseconds", "µs": "microseconds"}[unit]
    parts.append(write((LEFT + WIDTH - RIGHT) / 2, base + 34, f"{name} from the begin of the step", "note", "middle"))
    return parts
