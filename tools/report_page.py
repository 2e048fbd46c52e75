"""The page of a report: one HTML file without scripts and without anything from elsewhere, light or dark as the reader's system is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from megadcp.plan.render_theme import DARK, LIGHT

# Nothing may be loaded, whatever a run's names and texts hold.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
PAGE = {"light": "#f3f4f6", "dark": "#0b1220"}

SHEET = """
:root { color-scheme: light dark; PALETTE }
@media (prefers-color-scheme: dark) { :root { DARKPALETTE } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 24px 20px 60px; max-width: 1184px; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif }
h1 { margin: 0; font-size: 26px; line-height: 1.25; color: var(--title); overflow-wrap: anywhere }
h2 { margin: 36px 0 10px; font-size: 19px; color: var(--title) }
p { margin: 6px 0 }
a { color: inherit }
code, pre { font: 13px/1.45 ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere }
.note { color: var(--note) }
nav { margin-top: 10px } nav a { margin-right: 14px; white-space: nowrap }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(174px, 1fr)); gap: 10px; margin-top: 18px }
.tile, .card { background: var(--paper); border: 1px solid var(--grid); border-radius: 8px }
.tile { padding: 10px 12px } .tile b { display: block; font-size: 21px; line-height: 1.3; color: var(--title); font-weight: 600 }
.tile span { font-size: 13px; color: var(--note) }
.card { padding: 12px; margin-top: 12px }
.beside { display: grid; grid-template-columns: minmax(0, 760px) minmax(200px, 1fr); gap: 14px; align-items: center }
.beside ul { margin: 0; padding-left: 18px } .beside li { margin: 4px 0 }
@media (max-width: 1000px) { .beside { grid-template-columns: minmax(0, 1fr) } }
.picture svg { display: block; width: 100%; height: auto }
.wide .picture { overflow-x: auto } .wide .picture svg { min-width: 860px }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: 5px 12px 5px 0; vertical-align: top; border-bottom: 1px solid var(--grid) }
th { font-weight: 600; color: var(--title) } td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
tr:last-child td { border-bottom: 0 } td { overflow-wrap: anywhere } .kind { white-space: nowrap }
summary { cursor: pointer } pre { margin: 0; overflow-x: auto } summary + pre { margin-top: 10px }
"""


@dataclass(frozen=True)
class Tile:
    """A figure that people look for first: its value, and what it is."""

    value: str
    name: str


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it, as HTML."""

    name: str
    title: str
    body: list[str] = field(default_factory=list)


def picture_card(picture: str, notes: Sequence[str] = ()) -> str:
    """A picture, with what to know of it beside it; without notes over the whole width."""
    if not notes:
        return f'<div class="card wide">{picture}</div>'
    points = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<div class="card beside">{picture}<ul>{points}</ul></div>'


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """A table in a card; columns in `numbers` stand right."""

    def cells(values: Sequence[str], tag: str) -> str:
        return "".join(f"<{tag}{' class=number' if at in numbers else ''}>{escape(value)}</{tag}>" for at, value in enumerate(values))

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f'<div class="card"><table><thead><tr>{cells(heads, "th")}</tr></thead><tbody>{body}</tbody></table></div>'


def page(title: str, lines: Sequence[str], tiles: Sequence[Tile], sections: Sequence[Section]) -> str:
    """The whole file."""
    sheet = SHEET.replace("DARKPALETTE", _palette(DARK, "dark")).replace("PALETTE", _palette(LIGHT, "light"))
    links = "\n".join(f'<a href="#{one.name}">{escape(one.title)}</a>' for one in sections)
    shown = "".join(f'<div class="tile"><b>{escape(one.value)}</b><span>{escape(one.name)}</span></div>' for one in tiles)
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<title>{escape(title)}</title>\n<link rel="icon" href="data:,">\n<style>{sheet}</style>\n</head>\n<body>',
        f"<header>\n<h1>{escape(title)}</h1>",
        *(f'<p class="note">{escape(line)}</p>' for line in lines),
        f"<nav>{links}</nav>\n</header>",
        f'<div class="tiles">{shown}</div>',
        *(f'<section>\n<h2 id="{one.name}">{escape(one.title)}</h2>\n' + "\n".join(one.body) + "\n</section>" for one in sections),
        "</body>\n</html>\n",
    ]
    return "\n".join(parts)


def _palette(colours: dict[str, str], theme: str) -> str:
    names = ("paper", "title", "text", "note", "grid")
    return " ".join(f"--{name}: {colours[name]};" for name in names) + f" --page: {PAGE[theme]};"
