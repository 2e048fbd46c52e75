"""A run as one HTML page: loss, speed, how good its plans are, lengths and cp, memory, one step in full, checkpoints, incidents, settings.

    python tools/report.py runs/NAME                     writes runs/NAME/report.html
    python tools/report.py runs/NAME --out page.html

The file holds everything and asks for nothing from elsewhere; it can be sent and kept. It can be made at any time, also while the run trains.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

import report_pictures as pictures
import timeline
from plan_files import write_file
from report_page import Section, Tile, page, picture_card, table
from report_records import LAST, Records, is_number, read, settings_text

from megadcp.config.check import UserError
from megadcp.data.pictures import curve_svg
from megadcp.plan import render
from megadcp.plan.basis import Basis
from megadcp.plan.render_common import bytes_of, percent, seconds_of, short
from megadcp.plan.report import layout_line
from megadcp.plan.step_plan import LEVELS

MARK = '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'  # how a page of this tool begins
MOST_INCIDENTS = 200  # in the table, newest ones
Points = list[tuple[float, float]]


# ----------------------------------------------------------------------------------------------------------------- header
def lines_of(run: Records) -> list[str]:
    """What the run is, and how far."""
    config, model = run.config, run.config.model
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.when))
    state = {"finished": "finished", "training": "training", "stopped": "not training; the same command goes on"}[run.state]
    layout = layout_line(Basis.of(run.plans[-1])) if run.plans else f"{config.cluster.world} ranks"
    return [
        f"Step {run.last:,} of {config.run.steps:,} ({state}); the last row is of {when}.",
        f"{model.layers} layers, hidden {model.hidden}, {model.heads} heads, vocabulary {model.vocab:,}; precision {config.precision.format}; "
        f"{layout}; cluster {config.cluster.name}, hardware {config.hardware.name}; plan policy {config.plan.policy}.",
        *run.notes,
    ]


def tiles_of(run: Records) -> list[Tile]:
    """The figures that people look for first."""
    last = run.steps[-1]
    found = [Tile(f"{run.last:,} / {run.config.run.steps:,}", "steps"), Tile(short(int(last["tokens"])), "tokens")]

    def add(points: Points, name: str, text: Callable[[float], str]) -> None:
        now = run.now(points)
        if now is not None:
            found.append(Tile(text(now), name))

    add(run.column("loss"), f"loss, median of the last {min(LAST, len(run.steps))} steps", lambda value: f"{value:.3f}")
    for name in dict.fromkeys(row["name"] for row in run.validations):
        value = [row["validation_loss"] for row in run.validations if row["name"] == name][-1]
        if is_number(value):
            found.append(Tile(f"{value:.3f}", f"validation loss, {name}"))
    add(run.column("tokens_per_second"), "real tokens/s, all ranks", lambda value: short(round(value)))
    peak = run.config.hardware.peak_flops
    if run.column("mfu") and peak:
        add(run.column("mfu"), f"MFU, of {peak / 1e12:.0f} TFLOP/s dense bf16", percent)
    unit, points = flops_of(run)
    add(points, f"{unit} of a rank", lambda value: f"{value:.3g}")
    add(run.ratio("predicted_seconds", "measured_seconds"), "predicted / measured", lambda value: f"{value:.2f}")
    add(run.column("static_gain"), "predicted gain over static-best", lambda value: f"{value:.2f}x")
    add(run.column("bound_ratio"), "predicted / lower bound", lambda value: f"{value:.2f}x")
    add(run.column("bubble"), "bubble, measured", percent)
    add(run.ratio("data_seconds", "seconds"), "waiting for data", percent)
    add(run.column("memory_bytes"), "memory, largest rank", bytes_of)
    skipped = sum(bool(row.get("skipped")) for row in run.steps)
    if skipped:
        found.append(Tile(f"{skipped:,}", "steps that were skipped"))
    return found


def flops_of(run: Records) -> tuple[str, Points]:
    """Of a rank, in the unit that fits: a CPU makes thousandths of a TFLOP/s."""
    points = run.column("tflops")
    small = 0 < max((value for _, value in points), default=0.0) < 1
    return ("GFLOP/s", [(step, 1000 * value) for step, value in points]) if small else ("TFLOP/s", points)


# --------------------------------------------------------------------------------------------------------------- sections
class Page:
    """Sections with pictures, each of which gets a name of its own."""

    def __init__(self, run: Records) -> None:
        self.run, self._count = run, 0

    def curve(self, series: dict[str, Points], title: str, y_label: str, notes: Sequence[str], x_label: str = "step") -> str:
        """A card with curves; empty without any point."""
        if not any(series.values()):
            return ""
        return picture_card(self.inline(curve_svg({name: points for name, points in series.items() if points}, title, x_label, y_label)), notes)

    def inline(self, svg: str) -> str:
        """A picture for the page."""
        self._count += 1
        return pictures.inline(svg, f"picture{self._count}")

    def sections(self) -> list[Section]:
        """All that have something to show."""
        made = (self.loss(), self.speed(), self.plans(), self.lengths(), self.step(), self.memory(), self.checkpoints(), self.incidents())
        kept = [Section(one.name, one.title, [part for part in one.body if part]) for one in (*made, self.settings())]
        return [one for one in kept if one.body]

    def loss(self) -> Section:
        """Of training and validation, by steps and by tokens; gradient norms."""
        run = self.run
        series: dict[str, Points] = {"training": run.column("loss")}
        tokens = {float(row["step"]): row["tokens"] / 1e6 for row in run.steps}
        for row in run.validations:
            if is_number(row["validation_loss"]):
                series.setdefault(f"validation {row['name']}", []).append((float(row["step"]), float(row["validation_loss"])))
        by_tokens = {name: [(tokens[step], value) for step, value in points if step in tokens] for name, points in series.items()}
        worst = [f"steps that were skipped: {_some([row['step'] for row in run.steps if row.get('skipped')])}"]
        unit = "mean loss of a token of the step's global batch, in nats"
        return Section(
            "loss",
            "Loss",
            [
                self.curve(series, "Loss by step", "loss (nats per token)", [unit, *_last_of(series)]),
                self.curve(by_tokens, "Loss by tokens", "loss (nats per token)", ["real tokens, without padding"], "tokens (millions)"),
                self.curve(
                    {"gradient norm": run.column("grad_norm")}, "Gradient norm", "global norm before clipping",
                    [f"clipped to {run.config.optim.clip_norm:g}" if run.config.optim.clip_norm else "not clipped", *worst],
                ),
            ],
        )  # fmt: skip

    def speed(self) -> Section:
        """Tokens and FLOP/s."""
        run, peak = self.run, self.run.config.hardware.peak_flops
        mfu, (unit, flops) = run.column("mfu"), flops_of(run)
        seconds = run.column("seconds")
        what = ["model FLOPs of real lengths, without recompute and padding, of the mean rank"]
        if mfu and peak:
            what.append(f"MFU is their share of {peak / 1e12:.0f} TFLOP/s, the dense bf16 peak of {run.config.hardware.name}")
        data = run.ratio("data_seconds", "seconds")
        return Section(
            "speed",
            "Speed",
            [
                self.curve(
                    {"tokens/s": run.column("tokens_per_second")}, "Real tokens per second, of all ranks together", "tokens per second",
                    [f"a step takes {seconds_of(run.now(seconds) or 0.0)} (median of the last {min(LAST, len(seconds))})", "padding does not count"],
                ),
                self.curve(
                    {"MFU": [(step, 100 * value) for step, value in mfu]} if mfu else {unit: flops},
                    "Model FLOPs utilisation" if mfu else f"{unit} of a rank", "MFU, %" if mfu else unit, what,
                ),
                self.curve(
                    {"waiting for data": [(step, 100 * value) for step, value in data]}, "Waiting for data", "share of the step, %",
                    ["the rank that waited longest; plans that were not ready are part of it"],
                ),
            ],
        )  # fmt: skip

    def plans(self) -> Section:
        """How good the plans are, over time."""
        run = self.run
        ratio = run.ratio("predicted_seconds", "measured_seconds")
        slowest = [int(row["slowest_lane"]) for row in run.steps if is_number(row.get("slowest_lane"))]
        often = max(set(slowest), key=slowest.count) if slowest else 0
        lanes = [f"lane {often} was busy longest in {percent(slowest.count(often) / len(slowest))} of all steps"] if len(set(slowest)) > 1 else []
        return Section(
            "plans",
            "Plan quality",
            [
                self.curve(
                    {"predicted / measured": ratio}, "Predicted / measured", "ratio",
                    ["forward and backward of all microbatches, on the rank where that took longest", "below 1: it took longer than predicted"],
                ),
                self.curve(
                    {"gain over static-best": run.column("static_gain"), "predicted / lower bound": run.column("bound_ratio")},
                    "Plans against static layouts and the bound", "ratio of predicted seconds",
                    ["gain: the best static layout's predicted seconds / the plan's", "bound: the plan's / what no plan can beat; 1 is perfect"],
                ),
                self.curve(
                    {"bubble": [(step, 100 * value) for step, value in run.column("bubble")]}, "Bubble", "share of all ranks' time, %",
                    ["time in which ranks ran no action, measured; waiting for messages inside an action is not part of it", *lanes],
                ),
            ],
        )  # fmt: skip

    def lengths(self) -> Section:
        """Documents by length and cp; what was shared and recomputed over time."""
        run = self.run
        body = []
        if run.plans:
            steps = f"steps {run.plans[0].step + 1:,} to {run.plans[-1].step + 1:,}"
            body.append(picture_card(self.inline(render.lengths_svg(run.plans, title=f"Document lengths by chosen cp, {steps}"))))
        sizes = sorted({int(size) for row in run.steps for size in row.get("cp", {})})
        if len(sizes) > 1:
            body.append(self.mix("cp", [(f"cp {size}", f"c{size}", str(size)) for size in sizes], "Microbatches by cp"))
        used = [level for level in LEVELS if any(level in row.get("recompute", {}) for row in run.steps)]
        if used != ["none"]:
            body.append(self.mix("recompute", [(level, level, level) for level in used], "Microbatches by recompute level"))
        return Section("lengths", "Lengths, cp and recompute", body)

    def mix(self, key: str, parts: Sequence[tuple[str, str, str]], title: str) -> str:
        """Shares of one column of counts over time. parts: (name, class, key in the row)."""
        rows = [row for row in self.run.steps if sum(row.get(key, {}).values())]
        bands = [pictures.Band(name, kind, [row[key].get(part, 0) / sum(row[key].values()) for row in rows]) for name, kind, part in parts]
        return picture_card(self.inline(pictures.bands_svg(title, "share of each step's microbatches", [float(row["step"]) for row in rows], bands)))

    def step(self) -> Section:
        """The last step whose timeline was kept."""
        try:
            one = timeline.load(self.run.folder)
        except UserError:
            return Section("step", "One step")
        words = f"<pre>{escape(chr(10).join(timeline.told(one)))}</pre>"
        return Section(
            "step", f"Step {one.number}, planned and measured", [picture_card(self.inline(timeline.picture(one))), f'<div class="card">{words}</div>']
        )

    def memory(self) -> Section:
        """Of the largest rank."""
        run, hardware = self.run, self.run.config.hardware
        points = [(step, value / 1e9) for step, value in run.column("memory_bytes")]
        limit = hardware.memory_bytes * hardware.usable_fraction
        notes = [f"plans may fill {bytes_of(limit)} of {bytes_of(hardware.memory_bytes)}", "on a CPU it is the resident set of the whole process"]
        if points:
            notes.insert(0, f"highest so far {bytes_of(1e9 * max(value for _, value in points))}")
        return Section("memory", "Memory", [self.curve({"largest rank": points}, "Memory of the largest rank", "GB", notes)])

    def checkpoints(self) -> Section:
        """What lies in checkpoints/."""
        rows = [
            (
                one.name,
                bytes_of(one.size),
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.when)),
                "the run goes on from here" if one.current else "",
            )
            for one in self.run.checkpoints
        ]
        return Section("checkpoints", "Checkpoints", [table(("checkpoint", "size", "written", ""), rows, (1,)) if rows else ""])

    def incidents(self) -> Section:
        """incidents.jsonl."""
        rows = [
            (str(row.get("time", "")), str(row.get("step", "")), str(row.get("kind", "")), str(row.get("text", ""))) for row in self.run.incidents
        ]
        nothing = '<p class="note">None: no skipped step, no slow lane, no hang, no rank out of memory. Stops and goings-on are not listed.</p>'
        left = len(rows) - MOST_INCIDENTS
        more = f'<p class="note">{left:,} older ones are in incidents.jsonl.</p>' if left > 0 else ""
        shown = table(("time (UTC)", "step", "kind", "what happened"), rows[-MOST_INCIDENTS:], (1,)) if rows else nothing
        return Section("incidents", "Incidents", [shown, more])

    def settings(self) -> Section:
        """run.yaml."""
        text = escape(settings_text(self.run.folder))
        return Section("settings", "Settings", [f'<details class="card"><summary>run.yaml</summary><pre>{text}</pre></details>'])


def _last_of(series: dict[str, Points]) -> list[str]:
    return [f"{name}: {points[-1][1]:.4f} at step {points[-1][0]:,g}" for name, points in series.items() if points]


def _some(steps: Sequence[int]) -> str:
    more = f" and {len(steps) - 8:,} more" if len(steps) > 8 else ""
    return ", ".join(map(str, steps[:8])) + more if steps else "none"


# --------------------------------------------------------------------------------------------------------------------- entry
def report(folder: Path) -> str:
    """The page of a run. UserError when there is nothing to show."""
    run = read(folder)
    return page(f"Run {run.config.run.name}", lines_of(run), tiles_of(run), Page(run).sections())


def main(argv: list[str] | None = None) -> int:
    """0: done; 1: the disk; 2: a request that can't be met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run folder")
    parser.add_argument("--out", default="", help="the file; without it report.html in the run folder")
    parser.add_argument("--overwrite", action="store_true", help="replace a file that this tool has not made")
    asked = parser.parse_args(argv)
    try:
        out = Path(asked.out or Path(asked.run) / "report.html")
        text = report(Path(asked.run))
        if out.is_dir() or not out.parent.is_dir():
            raise UserError(f"--out {out} can't be written: " + ("it is a folder" if out.is_dir() else f"there is no folder {out.parent}"))
        if out.exists() and not asked.overwrite and not out.read_text(encoding="utf-8", errors="replace").startswith(MARK):
            raise UserError(f"--out {out} exists and is no report; choose another name, or --overwrite")
        write_file(str(out), text)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"report    {out} ({bytes_of(len(text.encode()))})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
