"""Document lengths by the cp that the plans chose for them: as SVG and as text. Lengths are real tokens, in bins that double."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megadcp.plan import render_theme as theme_
from megadcp.plan.render_common import count_of, cp_symbol, percent, short, ticks
from megadcp.plan.render_theme import LEFT, WIDTH, Swatch, number, rectangle, write
from megadcp.plan.step_plan import StepPlan

PANEL_HEIGHT = 260.0
BETWEEN = 64.0  # pixels from panel to panel
BAR = 44  # characters of the longest bar


@dataclass(frozen=True)
class Lengths:
    """Bin i holds edges[i] <= length < 2 edges[i]. documents and tokens: [bin][size] for the group sizes in `sizes`, rising."""

    steps: int
    edges: tuple[int, ...]
    sizes: tuple[int, ...]
    documents: tuple[tuple[int, ...], ...]
    tokens: tuple[tuple[int, ...], ...]

    def shares(self, tokens: bool) -> list[list[float]]:
        """Of all documents, or of all tokens: [bin][size]."""
        counts = self.tokens if tokens else self.documents
        total = sum(map(sum, counts))
        return [[count / total for count in row] for row in counts]

    def of_size(self, place: int) -> tuple[int, int]:
        """(documents, tokens) of one group size."""
        return sum(row[place] for row in self.documents), sum(row[place] for row in self.tokens)


def count_lengths(plans: Sequence[StepPlan]) -> Lengths:
    """The documents of all plans by length bin and chosen cp."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for plan in plans:
        for one in plan.microbatches:
            for document in one.documents:
                length = plan.lengths[document]
                key = length.bit_length() - 1, one.cp
                count, tokens = found.get(key, (0, 0))
                found[key] = count + 1, tokens + length
    if not found:
        return Lengths(len(plans), (), (), (), ())
    powers = range(min(power for power, _ in found), max(power for power, _ in found) + 1)
    sizes = tuple(sorted({cp for _, cp in found}))
    table = [[found.get((power, cp), (0, 0)) for cp in sizes] for power in powers]
    return Lengths(
        len(plans),
        tuple(1 << power for power in powers),
        sizes,
        tuple(tuple(count for count, _ in row) for row in table),
        tuple(tuple(tokens for _, tokens in row) for row in table),
    )


def _described(found: Lengths) -> tuple[str, list[str]]:
    """What the picture is of, and a line for each group size."""
    documents, tokens = sum(map(sum, found.documents)), sum(map(sum, found.tokens))
    lines = []
    for place, cp in enumerate(found.sizes):
        own, own_tokens = found.of_size(place)
        lines.append(f"cp {cp}: {percent(own / documents)} of documents, {percent(own_tokens / tokens)} of tokens")
    return f"{count_of(found.steps, 'step')} · {count_of(documents, 'document')}, {tokens:,} tokens", lines


def _bin(edge: int) -> str:
    """The lengths of a bin."""
    return "1" if edge == 1 else f"{edge:,}-{2 * edge - 1:,}"


# ---------------------------------------------------------------------------------------------------------------------- SVG
def lengths_svg(plans: Sequence[StepPlan], theme: str = "auto", title: str = "Document lengths by chosen cp") -> str:
    """Two histograms side by side, bars stacked by cp: share of all documents, and share of all tokens.

    Raises:
        UserError: the theme is not known.
    """
    found = count_lengths(plans)
    head = theme_.style(found.sizes, theme)
    if not found.edges:
        parts, y = theme_.heading(title, ["no documents"])
        return theme_.document(parts, title, y + 12, head)
    note, lines = _described(found)
    parts, y = theme_.heading(title, [note])
    keys, y = theme_.legend([Swatch(line, f"c{cp}") for cp, line in zip(found.sizes, lines, strict=True)], y)
    parts += keys
    panel = (WIDTH - LEFT - 24 - BETWEEN) / 2
    for side, name in enumerate(("documents", "tokens")):
        parts += _panel(found, name, (LEFT + side * (panel + BETWEEN), y + 30, panel))
    return theme_.document(parts, title, y + 30 + PANEL_HEIGHT + 48, head)


def _panel(found: Lengths, name: str, place: tuple[float, float, float]) -> list[str]:
    """One histogram at (x, y, width)."""
    left, top, width = place
    shares = found.shares(name == "tokens")
    counts = found.tokens if name == "tokens" else found.documents
    highest = max(map(sum, shares))
    marks = ticks(100 * highest, 5)
    step = marks[1] if len(marks) > 1 else 100 * highest
    scale = PANEL_HEIGHT / max(100 * highest, step * round(-(-100 * highest // step)))  # pixels of a percent
    base = top + PANEL_HEIGHT
    parts = [write(left, top - 12, f"share of {name}", "title label")]
    for mark in [*marks, marks[-1] + step] if marks[-1] < 100 * highest else marks:
        y = base - mark * scale
        if y < top - 1:
            continue
        parts.append(f'<line class="grid" x1="{number(left)}" x2="{number(left + width)}" y1="{number(y)}" y2="{number(y)}"/>')
        parts.append(write(left - 8, y + 4, f"{mark:g}%", "note", "end"))
    bar = width / len(found.edges)
    for index, edge in enumerate(found.edges):
        wide = min(0.84 * bar, 64.0)
        y, x = base, left + (index + 0.5) * bar - wide / 2
        for at, cp in enumerate(found.sizes):
            height = 100 * shares[index][at] * scale
            if height > 0:
                y -= height
                words = f"{_bin(edge)} tokens, cp {cp}: {shares[index][at]:.2%} of {name} ({counts[index][at]:,})"
                more = f' data-bin="{edge}" data-cp="{cp}"><title>{theme_.escape(words)}</title></rect>'
                parts.append(rectangle(f"c{cp}", (x, y, wide, height), more))
    parts.append(f'<line class="axis" x1="{number(left)}" x2="{number(left + width)}" y1="{number(base)}" y2="{number(base)}"/>')
    edges = [*found.edges, 2 * found.edges[-1]]
    every = 1 if bar >= 36 else 2 if bar >= 18 else 4
    for index in range(0, len(edges), every):
        parts.append(write(left + index * bar, base + 17, short(edges[index]), "note", "middle"))
    parts.append(write(left + width / 2, base + 36, "document length, tokens (bins double)", "note", "middle"))
    return parts


# --------------------------------------------------------------------------------------------------------------------- text
def lengths_text(plans: Sequence[StepPlan]) -> str:
    """A row per length bin: documents, their share, the share of tokens, and as a bar the tokens by cp (one character a size)."""
    found = count_lengths(plans)
    if not found.edges:
        return "no documents"
    documents, tokens = found.shares(False), found.shares(True)
    highest = max(map(sum, tokens))
    names = [_bin(edge) for edge in found.edges]
    column = max(len("length"), *map(len, names))
    rows = [f"{'length':>{column}}  {'documents':>11}  of docs  of tokens  tokens by cp"]
    for index, name in enumerate(names):
        bar = _stack(tokens[index], [cp_symbol(cp) for cp in found.sizes], BAR / highest)
        shares = f"{percent(sum(documents[index])):>7}  {percent(sum(tokens[index])):>9}"
        rows.append(f"{name:>{column}}  {sum(found.documents[index]):>11,}  {shares}  {bar}".rstrip())
    note, lines = _described(found)
    legend = [f"{cp_symbol(cp)} = {line}" for cp, line in zip(found.sizes, lines, strict=True)]
    return "\n".join([*rows, note.replace(" · ", ", "), *legend])


def _stack(shares: Sequence[float], signs: Sequence[str], scale: float) -> str:
    """A bar of characters, each part rounded so that the whole is right; whatever is not zero shows in a bar of its own."""
    bar, ends = "", 0.0
    for share, sign in zip(shares, signs, strict=True):
        ends += share * scale
        bar += sign * (round(ends + 1e-9) - len(bar))
    if not bar and ends > 0:
        return signs[max(range(len(shares)), key=lambda place: (shares[place], -place))]
    return bar
