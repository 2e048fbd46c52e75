"""The evidence as markdown and as one HTML page with pictures, both from the same sections. Nothing is computed here but medians."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import evidence_measured as measured
import evidence_tables as tables
import evidence_texts as texts
import numpy as np
from evidence_cells import MIXES, Cell, Job, Line, cell_of
from evidence_pictures import Row, spans_svg
from evidence_tables import Table
from gpu_check_table import headline, report_lines
from plan_files import write_file
from report_page import Section, Tile, page, picture_card
from report_page import table as html_table
from report_pictures import inline

from megadcp.data.pictures import curve_svg

COMMAND = "python tools/evidence.py"
CHART = "python tools/evidence.py chart"


@dataclass(frozen=True)
class Evidence:
    """Everything that a report is made of. folder: where measured figures lie (benchmarks/)."""

    runs: Sequence[Line]
    lines: Sequence[Line]
    wanted: Sequence[Job]
    folder: Path


@dataclass(frozen=True)
class Picture:
    """An SVG; only the HTML page has it."""

    svg: str


@dataclass
class Part:
    """A section: paragraphs, tables, pictures, in order."""

    name: str
    title: str
    blocks: list[str | Table | Picture] = field(default_factory=list)


# ------------------------------------------------------------------------------------------------------------------ sections
def parts(all_of_it: Evidence) -> list[Part]:
    """All sections, in order."""
    lines = list(all_of_it.lines)
    return [
        Part("short", "In short", list(_short(all_of_it))),
        Part("compared", "What is compared", _compared()),
        Part("predicted", "(a) Predicted", list(_predicted(lines))),
        Part("ablation", "(b) What each freedom is worth", list(_ablation(lines))),
        Part("sensitivity", "(c) When the cost model or the machine is not as told", list(_sensitivity(lines))),
        Part("local", "(d) Measured on ranks of one machine", list(_local(all_of_it.folder))),
        Part("gpu", "(e) Measured on one H200", list(_gpu(all_of_it.folder))),
        Part("circumstances", "(f) Circumstances of each number", list(_circumstances(all_of_it))),
        Part("helps", "(g) When it does not help", list(_no_help(lines))),
        Part("published", "What was published, and what it can be compared with", _published()),
    ]


def progress(all_of_it: Evidence) -> str:
    """How much of what was to be done is there."""
    done = {(line["kind"], cell_of(line)) for line in all_of_it.lines}
    wanted = {(job.kind, Cell(*(getattr(job, name) for name in Cell._fields))) for job in all_of_it.wanted}
    said = f"{len(all_of_it.lines):,} of {len(all_of_it.wanted):,} results; {len(done & wanted):,} of {len(wanted):,} cells have at least one"
    if len(all_of_it.lines) >= len(all_of_it.wanted):
        return f"Complete: {said}."
    seeds = [line["seed"] for line in all_of_it.lines if line["kind"] == "step"]
    return f"**Partial**: {said}, and at most {max(seeds, default=0)} seeds of those wanted. `{COMMAND}` goes on from here."


def _short(all_of_it: Evidence) -> Iterator[str | Table | Picture]:
    yield progress(all_of_it)
    steps = tables.planned(all_of_it.lines, 32)
    if not steps:
        yield "No step on 32 GPUs is planned yet."
        return
    presets = tables.of_presets(steps)
    yield "Gains on 32 H200, predicted: median [quartiles] (range) over steps of all tokens per lane and maximum lengths."
    yield tables.short_table(presets)
    yield texts.SHORT
    yield f"{tables.memory_in_words(presets)} {texts.MEMORY}"


def _compared() -> list[str | Table | Picture]:
    return [*texts.COMPARED, Table(["baseline", "what it is"], texts.BASELINES), texts.LIMITS]


def _predicted(lines: Sequence[Line]) -> Iterator[str | Table | Picture]:
    main = sorted(tables.planned(lines, 32), key=lambda line: (tables.layout(line), line["preset"], line["tokens"], line["max_length"], line["seed"]))
    presets, mixes = tables.of_presets(main), [line for line in main if line["preset"] in MIXES]
    yield "Median [quartiles] (range) over steps."
    rows = tables.gain_rows(lines)
    if rows:
        yield Picture(gain_svg(lines))
    by = {"layout": tables.layout, "distribution": lambda line: str(line["preset"])}
    yield "### 32 H200, by distribution"
    yield tables.gain_table(presets, list(by.items()))
    yield "### 32 H200, by tokens per lane and maximum length"
    by = {
        "layout": tables.layout,
        "tokens per lane": lambda line: tables.k(line["tokens"]),
        "maximum length": lambda line: tables.k(line["max_length"]),
    }
    yield tables.gain_table(sorted(presets, key=lambda line: (tables.layout(line), line["tokens"], line["max_length"])), list(by.items()))
    others = [line for line in tables.of_presets(tables.planned(lines)) if line["gpus"] != 32]
    yield "### 8, 128 and 1,024 H200, documents of at most 128k"
    by = {"layout": tables.layout, "GPUs": lambda line: f"{line['gpus']:,}", "tokens per lane": lambda line: tables.k(line["tokens"])}
    yield tables.gain_table(sorted(others, key=lambda line: (tables.layout(line), line["gpus"], line["tokens"])), list(by.items()))
    yield "### Three mixes of our own, 32 H200"
    yield texts.MIXES
    yield tables.gain_table(mixes, [("layout", tables.layout), ("mix", lambda line: str(line["preset"]))])
    packs = tables.packs_table(sorted(lines, key=lambda line: (tables.layout(line), line["max_length"], line["preset"] == tables.EVEN)))
    if packs.rows:
        yield "### One size of packs for the whole run, or the best of seven"
        yield texts.PACKS
        yield packs
    yield "### Memory, planning time, distance to the lower bound"
    yield texts.COSTS
    yield tables.cost_table(tables.planned(lines))
    over = tables.over_table(lines)
    yield "### Over the time limit"
    yield over if over.rows else "Nothing was cut off."
    unfit = tables.unfit_table(lines)
    yield "### What does not fit"
    yield unfit if unfit.rows else "Everything that has a result fits."
    yield "Every cell by itself: `evidence/cells.md`."


def _ablation(lines: Sequence[Line]) -> Iterator[str | Table | Picture]:
    yield from texts.ABLATION
    names, rows = tables.ablation_picture(lines)
    if rows:
        notes = [
            "predicted, nine distributions, 32k tokens per lane, documents of at most 128k · mark: median, thick: quartiles, thin: range over steps"
        ]
        yield Picture(spans_svg("Speed-up over bucket, one freedom after the other", notes, names, rows, "seconds of bucket / seconds of the rung"))
    yield from tables.ablation_in_words(lines)
    found = tables.ablation_table(lines)
    yield found if found.rows else "No result yet."


def _sensitivity(lines: Sequence[Line]) -> Iterator[str | Table | Picture]:
    yield from texts.SENSITIVITY
    names, found, unfit = tables.sensitivity_rows(lines)
    if not found:
        yield "No result yet."
        return
    rows = [Row(variant, [each.get(name, []) for name in names]) for variant, each in found.items()]
    notes = ["planned with what is told, scored with what is true · mark: median, thick: quartiles, thin: range over steps"]
    yield Picture(
        spans_svg("Gain over static-best when something is wrong", notes, names, rows, "seconds of static-best (tuned with the truth) / of the plan")
    )
    yield tables.sensitivity_in_words(lines)
    yield tables.sensitivity_table(lines)
    if unfit:
        yield f"{unfit} plans made with wrong coefficients did not fit the memory, or no static layout did."


# ------------------------------------------------------------------------------------------------------------------- measured
def _local(folder: Path) -> Iterator[str | Table | Picture]:
    lines, name = measured.regroup_lines(folder / "regroup")
    if not lines:
        yield "No kept data of `python tools/benchmark.py regroup` (benchmarks/regroup/); benchmarks/README.md has the tables of earlier runs."
    else:
        command = "python tools/benchmark.py regroup" + (" --quick" if name.startswith("quick") else "")
        yield f"`{command}`, kept in regroup/{name}. {texts.REGROUP}"
        notes = measured.regroup_notes(folder / "regroup", name)
        yield from notes
        yield Table(RATIO_HEAD, [_ratio_row(one) for one in measured.ratios(lines, measured.cores_of(notes))])
        yield texts.REGROUP_ERROR
    memory = measured.memory(lines)
    yield texts.REGROUP_MEMORY if memory else texts.NO_MEMORY
    if memory:
        head = ["setup", "contestant", "measured, MB", "model, MB", "measured / model"]
        yield Table(head, [_memory_row(one) for one in memory])
    yield "### Loss: planned against static"
    found = measured.losses(folder / "evidence" / "losses.json")
    if not found:
        yield f"No curves are kept; `{COMMAND} losses` makes them. {texts.KNOWN_LOSSES}"
        return
    yield from _losses(found)


RATIO_HEAD = [
    "kind", "setup", "planned against", "of", "mean ratio", "95% interval", "range", "turns", "predicted", "ratio / predicted - 1",
    "planned: seconds / predicted - 1", "ms a step without sleeping: planned, other",
]  # fmt: skip


def _ratio_row(one: measured.Ratio) -> list[str]:
    sure = "-" if one.interval is None else f"[{one.interval[0]:.3f}, {one.interval[1]:.3f}]"
    row = [one.kind, one.where, one.other, "wall clock" if one.of == "seconds" else "CPU seconds of all ranks", f"**{one.mean:.3f}**", sure]
    row += [f"{one.least:.3f} to {one.most:.3f}", str(one.turns)]
    if one.of != "seconds":
        return [*row, "-", "-", "-", "-"]
    messages = "-" if one.messages is None else f"{one.messages[0]:.0f}, {one.messages[1]:.0f}"
    return [*row, f"{one.predicted:.3f}", f"{100 * (one.mean / one.predicted - 1):+.1f}%", f"{100 * one.error:+.1f}%", messages]


def _memory_row(one: measured.Memory) -> list[str]:
    ratio = f"{one.measured / one.predicted:.2f}"
    return [f"{one.preset}, {one.ranks} ranks", one.policy, f"{one.measured / 1e6:.1f}", f"{one.predicted / 1e6:.1f}", ratio]


def _losses(found: Line) -> Iterator[str | Table | Picture]:
    runs = found["runs"]
    where = f"torch {found['torch']}, CPU, {found['machine']}"
    yield f"{found['steps']} quickstart steps on the same documents ({where}); in fp64 the curves must be one."
    for form in ("fp64", "fp32"):
        own = {name.removeprefix(f"{form}, "): run for name, run in runs.items() if name.startswith(form)}
        if own:
            series = {name: [(float(step + 1), loss) for step, loss in enumerate(run["losses"])] for name, run in own.items()}
            yield Picture(curve_svg(series, f"Training loss, {form}", "step", "nats per token"))
    rows = [[name, f"{run['held_out']:.6f}"] for name, run in runs.items()]
    yield Table(["run", "held-out loss at the end"], rows)
    for one in [name for name in runs if name.startswith("fp64") and "static" in name][:1]:
        for name in [name for name in runs if name.startswith("fp64") and name != one]:
            apart = max(abs(a / b - 1) for a, b in zip(runs[name]["losses"], runs[one]["losses"], strict=True))
            yield f"{name} against {one}: at no step more than {apart:.1e} apart (relative)."
    yield texts.KNOWN_LOSSES


def _gpu(folder: Path) -> Iterator[str | Table | Picture]:
    reports = measured.gpu_reports(folder / "gpu")
    taken = {name: report for name, report in reports.items() if (report.get("device") or {}).get("cuda") and report.get("sections")}
    if not taken:
        yield (
            "**No data**: nothing of this project has been measured on a GPU. `python tools/gpu_check.py` on one H200, its JSON in "
            "benchmarks/gpu/, fills this section."
        )
    for name, report in taken.items():
        yield f"gpu/{name}: {headline(report)}"
        yield Table(["as tools/gpu_check.py prints it"], [[line] for line in report_lines(report) if line.strip()])


def _no_help(lines: Sequence[Line]) -> Iterator[str | Table | Picture]:
    said, found = tables.no_help(lines)
    yield " ".join(said)
    yield texts.NO_HELP
    yield found if found.rows else "No such cell among the results so far."
    _, variants, _ = tables.sensitivity_rows(lines)
    poor = [
        f"{variant} ({name}: {np.median(values):.3f})"
        for variant, each in variants.items()
        for name, values in each.items()
        if np.median(values) <= tables.HELPS
    ]
    if poor:
        yield f"With wrong or missing knowledge (c), median gain at most {tables.HELPS:g}: {'; '.join(poor)}."


def _published() -> list[str | Table | Picture]:
    return [Table(["published", "what of it is known", "can be compared with"], texts.HEADLINES)]


def _circumstances(all_of_it: Evidence) -> Iterator[str | Table | Picture]:
    yield (
        "Every result is a line of cells.jsonl with the number of its run and the hash of the code that made it; cells.md "
        "names the runs of every cell. Seeds are 1 to 20 (others 1 to 3, studies 1 to 5). Settings: model=gpt_1b, gpt_8b, "
        "gpt_70b, hardware=h200, precision=bf16, all else as in configs/."
    )
    rows = []
    for run in all_of_it.runs:
        results = sum(line["run"] == run["run"] for line in all_of_it.lines)
        if results:
            packages = ", ".join(f"{name} {version}" for name, version in run["packages"].items())
            where = f"{run['machine']}, load {run['load']} at its begin, {run['workers']} workers"
            rows.append([str(run["run"]), run["begun"], run["commit"], run["planner"], f"Python {run['python']}, {packages}", where, f"{results:,}"])
    yield Table(["run", "begun", "commit", "planner's code", "versions", "machine", "results kept"], rows)
    yield "Planning times are CPU time of one core and suffer on a busy machine; predicted seconds do not depend on the machine at all."


# ------------------------------------------------------------------------------------------------------------------------ output
def gain_svg(lines: Sequence[Line]) -> str:
    """The README's chart."""
    rows = tables.gain_rows(lines)
    steps = sum(len(row.values[0]) for row in rows)
    drawn = tables.chart_lines(lines)

    def sizes(name: str) -> str:
        return ", ".join(tables.k(size) for size in sorted({line[name] for line in drawn}))

    notes = [
        f"8b on 32 H200, bf16: predicted by the cost model, not measured on GPUs · {steps:,} steps",
        f"tokens per lane: {sizes('tokens')}; longest document allowed: {sizes('max_length')}",
        "mark: median, thick: quartiles, thin: range over steps · linear axis from 1, no gain · constant: equal lengths, the negative control",
    ]
    title = "What planning each step gains, by distribution of document lengths"
    return spans_svg(
        title,
        notes,
        ["over static-best (tuned by an oracle for every step)", "over bucket", "over static-any (the same with seven pack sizes)"],
        rows,
        "times as fast; 1 = no gain",
    )


def write_chart(lines: Sequence[Line], place: Path) -> bool:
    """The README's chart; False where there is nothing to draw."""
    if not tables.gain_rows(lines):
        return False
    place.parent.mkdir(parents=True, exist_ok=True)
    write_file(str(place), gain_svg(lines))
    return True


def write(all_of_it: Evidence, markdown: Path, html: Path) -> None:
    """Both reports, and cells.md beside the page."""
    found = parts(all_of_it)
    html.parent.mkdir(parents=True, exist_ok=True)
    write_file(str(markdown), _markdown(found, markdown, html))
    write_file(str(html.with_name("cells.md")), "# Every cell\n\nMade by `" + COMMAND + "`.\n\n" + _table(tables.every_cell(all_of_it.lines)))
    write_file(str(html), _html(found, all_of_it))


def _markdown(found: Sequence[Part], markdown: Path, html: Path) -> str:
    beside = html.relative_to(markdown.parent).as_posix()
    said = [f"# Evidence\n\nMade by `{COMMAND}`. [{html.name}]({beside}) is the same with pictures. `{CHART}` redraws the README's chart.\n"]
    for part in found:
        said.append(f"## {part.title}\n")
        for block in part.blocks:
            if isinstance(block, Table):
                said.append(_table(block))
            elif isinstance(block, str):
                said.append(block + "\n")
    return "\n".join(said)


def _table(one: Table) -> str:
    if not one.rows:
        return "No result yet.\n"
    rows = [one.head, ["---"] * len(one.head), *one.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows) + "\n"


def _html(found: Sequence[Part], all_of_it: Evidence) -> str:
    sections = []
    for part in found:
        body = []
        for number, block in enumerate(part.blocks):
            if isinstance(block, Picture):
                body.append(picture_card(inline(block.svg, f"{part.name}-{number}")))
            elif isinstance(block, Table):
                body.append(
                    '<div class="wide-table">' + _marked(html_table(block.head, block.rows)) + "</div>" if block.rows else "<p>No result yet.</p>"
                )
            elif block.startswith("### "):
                body.append(f"<h3>{escape(block[4:])}</h3>")
            else:
                body.append(f"<p>{_marked(escape(block))}</p>")
        sections.append(Section(part.name, part.title, body))
    steps = [line for line in tables.chart_lines(all_of_it.lines) if line["preset"] != tables.EVEN]
    tiles = [
        Tile(f"{np.median(values):.2f}", f"median gain over {name}, 8b on 32 H200, skewed lengths, predicted")
        for name in tables.BASELINES
        if (values := tables.gains(steps, name))
    ]
    plain = re.sub(r"[*`]", "", progress(all_of_it))
    text = page("Evidence", [plain, "Predicted by a cost model unless a section says measured; nothing of it ran on a GPU."], tiles, sections)
    return text.replace(
        "</style>", ".wide-table { overflow-x: auto } .wide-table table { font-size: 13px }\nh3 { margin: 22px 0 6px; font-size: 16px }\n</style>", 1
    )


def _marked(text: str) -> str:
    """Code and bold of escaped text."""
    return re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", re.sub(r"`([^`]+)`", r"<code>\1</code>", text))
