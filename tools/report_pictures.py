"""Pictures of a report that nothing else draws, and how several pictures share one page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megadcp.plan import render_theme as theme
from megadcp.plan.render_theme import LEFT, RIGHT, WIDTH, Swatch, number, rectangle, write

COLUMNS = 160  # of one picture; more steps are averaged in groups
HEIGHT = 190.0
LEVEL_COLOURS = {"none": "#7faee9", "selective": "#c3e143", "mlp": "#f6722b", "full": "#892218"}


@dataclass(frozen=True)
class Band:
    """One part of a whole over time: its name, its class in the style sheet, and its share at each step."""

    name: str
    kind: str
    shares: Sequence[float]


def bands_svg(title: str, note: str, steps: Sequence[float], bands: Sequence[Band]) -> str:
    """Shares that sum to one at each step, stacked: a column for each step, or for the mean of several."""
    head = theme.style([int(one.kind[1:]) for one in bands if one.kind[1:].isdigit()], "auto")
    head = head.replace("</style>", "".join(f".{level} {{ fill: {colour} }} " for level, colour in LEVEL_COLOURS.items()) + "</style>")
    parts, y = theme.heading(title, [note])
    mean = [sum(one.shares) / max(1, len(one.shares)) for one in bands]
    keys, y = theme.legend([Swatch(f"{one.name}: {share:.1%}", one.kind) for one, share in zip(bands, mean, strict=True)], y)
    parts += keys
    top, base = y + 14, y + 14 + HEIGHT
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(write(LEFT - 8, base - share * HEIGHT + 4, f"{share:.0%}", "note", "end"))
    groups = _groups(len(steps))
    width = (WIDTH - LEFT - RIGHT) / len(groups)
    for place, (first, after) in enumerate(groups):
        bottom = base
        for one in bands:
            share = sum(one.shares[first:after]) / (after - first)
            if share > 0:
                bottom -= share * HEIGHT
                span = f"step {steps[first]:g}" if after - first == 1 else f"steps {steps[first]:g} to {steps[after - 1]:g}"
                tooltip = f"><title>{theme.escape(f'{span}: {one.name} {share:.1%}')}</title></rect>"
                parts.append(rectangle(one.kind, (LEFT + place * width, bottom, width + 0.3, share * HEIGHT + 0.2), tooltip))
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{number(base)}" y2="{number(base)}"/>')
    every = max(1, -(-len(groups) // 12))
    for place in range(0, len(groups), every):
        parts.append(write(LEFT + (place + 0.5) * width, base + 17, f"{steps[groups[place][0]]:,g}", "note", "middle"))
    parts.append(write((LEFT + WIDTH - RIGHT) / 2, base + 36, "step", "note", "middle"))
    return theme.document([f'<g data-top="{number(top)}">', *parts, "</g>"], title, base + 46, head)


def _groups(count: int) -> list[tuple[int, int]]:
    """Ranges of neighbours, at most COLUMNS."""
    size = -(-count // COLUMNS)
    return [(first, min(count, first + size)) for first in range(0, count, size)]


def inline(svg: str, name: str) -> str:
    """An SVG that can stand in a page beside others: its style and its ids are its own. `name`: of a kind that ids may have."""
    ground = f"#{name} .paper {{ fill: transparent }}"  # the page's own
    svg = re.sub(r"<style>(.*?)</style>", lambda found: f"<style>{_scoped(found[1], f'#{name}')}\n{ground}</style>", svg, flags=re.DOTALL)
    ids = set(re.findall(r'\bid="([^"]+)"', svg))
    for one in sorted(ids, key=len, reverse=True):
        svg = re.sub(rf'(\bid="|url\(#){re.escape(one)}("|\))', rf"\g<1>{name}-{one}\g<2>", svg)
    return f'<div class="picture" id="{name}">{svg}</div>'


def _scoped(sheet: str, scope: str) -> str:
    """Every selector of a style sheet below `scope`."""

    def rule(found: re.Match[str]) -> str:
        if found[1].lstrip().startswith("@"):
            return found[0]
        selectors = ", ".join(f"{scope} {one.strip()}" for one in found[1].split(","))
        return f"{selectors} {{"

    return re.sub(r"([^{}]+)\{", rule, sheet)
