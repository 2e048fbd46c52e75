"""SVG without a plotting library: colours, one file that reads on light and dark backgrounds, legends, escaped text.

A group size has one colour in all pictures. Neighbours in size differ by lightness as well as hue: the eleven stay apart for readers who
see no red, no green or no blue (tests/plan/test_render.py computes how they look to them).
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megadcp.config.check import UserError

THEMES = ("auto", "light", "dark")
WIDTH, LEFT, RIGHT = 1120, 66, 62
SIZE = 11.5  # pixels of the font

# cp 1, 2, 4, ... 1024
CP_COLOURS = ("#7faee9", "#4861d5", "#f6722b", "#c3e143", "#892218", "#7be3f5", "#654e6f", "#eda382", "#314398", "#906520", "#0a8fd1")
FORWARD_COLOUR = 0.5  # a forward's colour is this much of its backward's, the rest is DARK_INK: never like the pale ground of idle time
DARK_INK, LIGHT_INK = "#111827", "#ffffff"

LIGHT = {
    "paper": "#ffffff",
    "title": "#111827",
    "text": "#374151",
    "note": "#6b7280",
    "idle": "#eceef2",
    "grid": "#cfd4dc",
    "axis": "#9ca3af",
    "end": "#111827",
    "bound": "#047857",
    "measured": "#be123c",
}
DARK = {
    "paper": "#161e2e",
    "title": "#f9fafb",
    "text": "#d1d5db",
    "note": "#9ca3af",
    "idle": "#05080f",
    "grid": "#334155",
    "axis": "#6b7280",
    "end": "#f9fafb",
    "bound": "#34d399",
    "measured": "#fb7185",
}

FIXED = """text { font: 11.5px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; pointer-events: none }
.title { font-size: 16px; font-weight: 600 } .label { font-size: 11px } .again { pointer-events: none }
.edge { stroke-width: 0.8 } .grid, .axis { stroke-width: 1 } .node { stroke-width: 1; stroke-dasharray: 2 3 } .mark { stroke-width: 1.6 }
.boundline { stroke-dasharray: 6 3 } .measuredline { stroke-dasharray: 2 2 }"""


def colour_of(cp: int) -> str:
    """The colour of a group size; beyond 1,024 they begin again."""
    return CP_COLOURS[(cp.bit_length() - 1) % len(CP_COLOURS)]


def forward_colour(cp: int) -> str:
    """The colour of a group size's forwards, where they are events of their own."""
    return mix(colour_of(cp), DARK_INK, FORWARD_COLOUR)


def ink_on(colour: str) -> str:
    """Black or white: what reads better on a colour."""
    return DARK_INK if contrast(DARK_INK, colour) >= contrast(LIGHT_INK, colour) else LIGHT_INK


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours, 1 to 21, by WCAG 2's definition."""
    first, second = _luminance(one), _luminance(other)
    return (max(first, second) + 0.05) / (min(first, second) + 0.05)


def _channels(colour: str) -> list[int]:
    return [int(colour[place : place + 2], 16) for place in (1, 3, 5)]


def _luminance(colour: str) -> float:
    linear = [value / 255 / 12.92 if value <= 10 else ((value / 255 + 0.055) / 1.055) ** 2.4 for value in _channels(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def mix(colour: str, other: str, share: float) -> str:
    """`share` of a colour, the rest another."""
    return "#" + "".join(f"{round(a * share + b * (1 - share)):02x}" for a, b in zip(_channels(colour), _channels(other), strict=True))


def style(sizes: Iterable[int], theme: str) -> str:
    """The style sheet for pictures with these group sizes. Class c4: fill of cp 4; c4f: of its forward; t4, t4f: text on them.

    theme: auto follows the reader's system; light and dark are for converters that know no media queries.
    """
    if theme not in THEMES:
        raise UserError(f"theme={theme!r} is not known; legal here: {', '.join(THEMES)}")
    rules = [FIXED, _rules(DARK if theme == "dark" else LIGHT)]
    if theme == "auto":
        rules.append("@media (prefers-color-scheme: dark) {\n" + _rules(DARK) + "\n}")
    for cp in sorted(set(sizes)):
        for name, fill in ((f"{cp}", colour_of(cp)), (f"{cp}f", forward_colour(cp))):
            rules.append(f".c{name} {{ fill: {fill} }} .t{name} {{ fill: {ink_on(fill)} }}")
    return "<style>\n" + "\n".join(rules) + "\n</style>"


def _rules(theme: dict[str, str]) -> str:
    rules = [f"text {{ fill: {theme['text']} }} .paper {{ fill: {theme['paper']} }} .edge {{ stroke: {theme['paper']} }}"]
    rules.append(" ".join(f".{name} {{ fill: {theme[name]} }}" for name in ("title", "note", "idle")))
    rules.append(" ".join(f".{name} {{ stroke: {theme[name]} }}" for name in ("grid", "axis")) + f" .node {{ stroke: {theme['note']} }}")
    rules.append(" ".join(f".{name}line {{ stroke: {theme[name]} }} .{name}text {{ fill: {theme[name]} }}" for name in ("end", "bound", "measured")))
    return "\n".join(rules)


# ------------------------------------------------------------------------------------------------------------ recompute
SHAPES = {  # of one tile of 7 x 7 pixels
    "selective": '<circle cx="2" cy="2" r="1.1" fill="INK"/><circle cx="5.5" cy="5.5" r="1.1" fill="INK"/>',
    "mlp": '<path d="M-1 8L8 -1M-1 1L1 -1M6 8L8 6" stroke="INK" stroke-width="1.2" fill="none"/>',
    "full": '<path d="M-1 8L8 -1M-1 1L1 -1M6 8L8 6M-1 -1L8 8M-1 6L1 8M6 -1L8 1" stroke="INK" stroke-width="1" fill="none"/>',
}


def pattern_of(level: str, cp: int) -> str:
    """Name of the hatching of a recompute level, in the ink that shows on a group size's colour."""
    return f"{level}-{'light' if ink_on(colour_of(cp)) == LIGHT_INK else 'dark'}"


def patterns(names: Iterable[str]) -> str:
    """Definitions of these hatchings."""
    parts = []
    for name in sorted(set(names)):
        level, ink = name.split("-")
        shape = SHAPES[level].replace("INK", LIGHT_INK if ink == "light" else DARK_INK)
        opacity = 0.65 if ink == "light" else 0.6
        parts.append(f'<pattern id="{name}" width="7" height="7" patternUnits="userSpaceOnUse"><g opacity="{opacity}">{shape}</g></pattern>')
    return f"<defs>{''.join(parts)}</defs>" if parts else ""


# ----------------------------------------------------------------------------------------------------------------- text
def escape(text: str) -> str:
    """For XML, which can't hold every character."""
    return html.escape(re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text))


def number(value: float) -> str:
    """A coordinate with two decimals at most."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def write(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    """A line of text, its baseline at y."""
    named = f' class="{kind}"' if kind else ""
    placed = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text{named} x="{number(x)}" y="{number(y)}"{placed}>{escape(text)}</text>'


def rectangle(kind: str, box: tuple[float, float, float, float], more: str = "") -> str:
    """A rectangle (x, y, width, height) without an end tag: `more` holds further attributes."""
    x, y, width, height = box
    return f'<rect class="{kind}" x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"{more}'


def width_of(text: str) -> float:
    """Pixels that a text takes, about: a wide font is assumed, so that what fits here fits everywhere."""
    return SIZE * sum(0.36 if one in "ijlI.,:;|' " else 0.43 if one in "ftr()[]-" else 0.95 if one in "mwMW%" else 0.64 for one in text)


def clip(text: str, width: float) -> str:
    """The text, cut where it would be wider."""
    if width_of(text) <= width:
        return text
    while text and width_of(text + "...") > width:
        text = text[:-1]
    return text + "..."


def wrap(text: str, width: float) -> list[str]:
    """Lines of at most `width` pixels, broken at ` · ` where possible, else cut."""
    lines: list[str] = []
    for part in text.split(" · "):
        if lines and width_of(f"{lines[-1]} · {part}") <= width:
            lines[-1] += " · " + part
        else:
            lines.append(part)
    return [clip(line, width) for line in lines]


@dataclass(frozen=True)
class Swatch:
    """An entry of a legend: a small picture (class of the fill; pattern drawn over it; or a line's class) and its words."""

    words: str
    fill: str = ""
    pattern: str = ""
    line: str = ""


def legend(swatches: Sequence[Swatch], top: float) -> tuple[list[str], float]:
    """The entries in as many rows as they need from `top` on, and where they end."""
    parts, x, y = [], float(LEFT), top
    for one in swatches:
        picture = 21 if one.fill or one.line else 0
        needed = picture + width_of(one.words)
        if x + needed > WIDTH - 12 and x > LEFT:
            x, y = float(LEFT), y + 19
        if one.fill:
            parts.append(rectangle(one.fill, (x, y, 16, 12), "/>"))
        if one.pattern:
            parts.append(f'<rect x="{number(x)}" y="{number(y)}" width="16" height="12" fill="url(#{one.pattern})"/>')
        if one.line:
            parts.append(f'<line class="{one.line}" x1="{number(x)}" x2="{number(x + 16)}" y1="{number(y + 6)}" y2="{number(y + 6)}"/>')
        parts.append(write(x + picture, y + 10, one.words))
        x += needed + 18
    return parts, y + (19 if swatches else 0)


def heading(title: str, notes: Sequence[str]) -> tuple[list[str], float]:
    """Title and lines under it, and where they end."""
    parts, y = [write(LEFT, 28, clip(title, (WIDTH - LEFT - 12) / 1.5), "title")], 28.0
    for note in notes:
        for line in wrap(note, WIDTH - LEFT - 12):
            y += 18
            parts.append(write(LEFT, y, line, "note"))
    return parts, y + 12


def document(parts: Sequence[str], title: str, height: float, head: str) -> str:
    """The whole file; `head`: style sheet and definitions."""
    size = f'viewBox="0 0 {WIDTH} {number(height)}" width="{WIDTH}" height="{number(height)}"'
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    paper = '<rect class="paper" width="100%" height="100%"/>'
    return "\n".join([begin, f"<title>{escape(title)}</title>", head, paper, *parts, "</svg>", ""])
