"""tools/evidence.py: a handful of tiny cells from start to report, going on where it stopped, and being cut off."""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

TOOLS = Path(__file__).parents[2] / "tools"
NAMES = (
    "",
    "_ablation",
    "_cells",
    "_children",
    "_losses",
    "_measured",
    "_packs",
    "_pictures",
    "_report",
    "_sensitivity",
    "_steps",
    "_tables",
    "_texts",
)
OTHERS = (
    "bench_planner",
    "bench_planner_report",
    "bench_ranks",
    "bench_regroup_plans",
    "benchmark",
    "gpu_check_table",
    "plan_files",
    "report_page",
    "report_pictures",
)


@pytest.fixture(scope="module")
def tool() -> Any:
    """The tool's modules by name, imported as its command does; forgotten afterwards."""
    sys.path.insert(0, str(TOOLS))
    kept = {name: sys.modules.pop(name, None) for name in [*(f"evidence{name}" for name in NAMES), *OTHERS]}

    def module(name: str = "") -> ModuleType:
        return importlib.import_module(f"evidence_{name}" if name else "evidence")

    module()
    yield module
    sys.path.remove(str(TOOLS))
    for name, one in kept.items():
        sys.modules.pop(name, None)
        if one is not None:
            sys.modules[name] = one


@pytest.fixture(scope="module")
def made(tool: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `--smoke` leaves."""
    folder = tmp_path_factory.mktemp("evidence")
    assert tool().main(["--smoke", "--minutes", "10", "--out", str(folder)]) == 0
    return folder / "evidence" / "smoke"


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "cells.jsonl").read_text(encoding="utf-8").splitlines()]


def results(folder: Path) -> list[dict[str, Any]]:
    return [line for line in lines_of(folder) if line["kind"] != "run"]


# ------------------------------------------------------------------------------------------------------------------- the grid
def test_the_grid_is_the_one_that_was_asked_for(tool: Any) -> None:
    jobs = tool("cells").jobs()
    assert len(jobs) == len(set(jobs))
    steps = [job for job in jobs if job.kind == "step"]
    main = [job for job in steps if job.gpus == 32 and job.preset not in tool("cells").MIXES]
    assert len(main) == 4 * 9 * 3 * 3 * 20
    assert {(job.model, job.tp, job.pp) for job in main} == {("1b", 1, 1), ("8b", 1, 1), ("8b", 1, 4), ("70b", 8, 4)}
    assert {job.tokens for job in main} == {16384, 32768, 131072}
    assert {job.max_length for job in main} == {32768, 131072, 524288}
    others = [job for job in steps if job.gpus != 32]
    assert len(others) == 4 * 9 * 3 * 2 * 3
    assert {(job.gpus, job.tokens, job.max_length) for job in others} == {
        (gpus, tokens, 131072) for gpus in (8, 128, 1024) for tokens in (16384, 131072)
    }
    assert all(job.lanes * job.tp * job.pp == job.gpus for job in steps if job.lanes)


def test_all_cells_come_before_further_seeds(tool: Any) -> None:
    seeds = [job.seed for job in tool("cells").jobs()]
    assert seeds == sorted(seeds)


def test_a_mix_has_the_stated_shares(tool: Any) -> None:
    cells = tool("cells")
    lengths = np.array(cells.mix("balanced", 20_000_000, 1, 0))
    shares = np.histogram(lengths, cells.MIX_EDGES)[0] / len(lengths)
    assert shares == pytest.approx([0.6, 0.3, 0.1], abs=0.03)
    part = np.log(lengths[lengths >= 16384] / 16384) / math.log(8)  # log-uniform: a uniform share of the logarithm
    assert part.mean() == pytest.approx(0.5, abs=0.05)
    assert cells.mix("balanced", 1000, 1, 0) == cells.mix("balanced", 1000, 1, 0) != cells.mix("balanced", 1000, 2, 0)


# ------------------------------------------------------------------------------------------------------------------ results
def test_every_result_is_there_and_makes_sense(made: Path, tool: Any) -> None:
    found = results(made)
    wanted = [*tool("cells").jobs("smoke"), *tool("packs").packs_jobs("smoke")]
    assert {tool("cells").key_of(line) for line in found} == {tool("cells").key_of(vars(job)) for job in wanted}
    steps = [line for line in found if "seconds" in line]
    assert len(steps) >= 8
    for line in steps:
        assert line["bound"] <= line["seconds"] <= line["static-best"] * (1 + 1e-6)
        assert line["seconds"] <= min(line["static-fixed"], line["bucket"])
        assert line["static-any"] <= line["static-best"] * (1 + 1e-6)
        assert 0 < line["static_peak"] < 141e9
        assert 0 < line["peak"] < 141e9
        assert ("bound_1f1b" in line) == (line["pp"] > 1)
        assert line["plan_ms"] >= 0  # clocks of some machines tick in tens of milliseconds
    alike = [line for line in steps if line["preset"] == "constant" and line["pp"] == 1]
    assert all(line["static-best"] / line["seconds"] < 1.1 for line in alike)
    unfit = [line for line in found if "why" in line]
    assert {line["model"] for line in unfit} == {"70b"}
    assert "32 GPUs" in unfit[0]["why"]


def test_a_tuned_size_of_packs_is_at_least_as_good_over_its_steps(tool: Any) -> None:
    """All seven sizes and all (P, level), scored one by one."""
    packs, job = tool("packs"), next(tool("packs").packs_jobs("smoke"))
    basis, steps = job.planner().basis, job.steps(packs.FIRST_STEPS)
    totals = {}
    for halving in range(7):
        size = job.max_length >> halving
        for choice in packs._that_hold(basis, job.max_length, 0):
            each = [packs._Dealt(basis, packs.in_arrival_order(lengths, size), lengths).makespan(*choice) for lengths in steps]
            totals[size, choice] = (sum(each), each[0])
    best = min(totals, key=lambda key: totals[key][0])
    found = packs._tuned(job)
    assert found["pack"] == best[0]
    assert found["static-fixed-any"] == pytest.approx(totals[best][1], rel=1e-6)
    assert totals[best][0] <= min(total for (size, _), (total, _) in totals.items() if size == job.max_length)


def test_ablation_rises(made: Path, tool: Any) -> None:
    found = [line for line in results(made) if line["kind"] == "ablation"]
    assert {line["pp"] for line in found} == {1, 4}
    for line in found:
        rungs = line["rungs"]
        order = [name for name in tool("ablation").RUNGS if name in rungs]
        seconds = [rungs[name] for name in order]
        assert seconds == sorted(seconds, reverse=True)
        assert ("order" in rungs) == (line["pp"] > 1)
        step = next(
            one for one in results(made) if tool("cells").cell_of(one) == tool("cells").cell_of(line) and (one["kind"], one["seed"]) == ("step", 1)
        )
        assert seconds[-1] == pytest.approx(step["seconds"])
        assert rungs["bucket"] == pytest.approx(step["bucket"])


def test_sensitivity_has_every_variant(made: Path, tool: Any) -> None:
    (found,) = (line for line in results(made) if line["kind"] == "sensitivity")
    gains = found["gains"]
    assert len(gains) == 1 + 2 * len(tool("sensitivity").COEFFICIENTS) + 2 + 4
    step = next(
        line for line in results(made) if line["kind"] == "step" and tool("cells").cell_of(line) == tool("cells").cell_of(found) and line["seed"] == 1
    )
    assert gains["right"] == pytest.approx(step["static-best"] / step["seconds"], rel=1e-4)
    assert gains["gemm_flops x 0.8"] <= gains["right"] + 0.02
    assert gains["slow lane, unaware"] < gains["slow lane, aware"]


# ------------------------------------------------------------------------------------------------------------------- going on
def test_it_goes_on_where_it_stopped(
    made: Path, tool: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "evidence" / "smoke"
    folder.mkdir(parents=True)
    every = lines_of(made)
    runs, found = [line for line in every if line["kind"] == "run"], results(made)
    wrong = {**found[1], "version": "other", "seconds": 1e9}
    kept = "".join(json.dumps(line) + "\n" for line in [*runs, wrong, *found[2:]])
    (folder / "cells.jsonl").write_text(kept + json.dumps(found[0])[:40], encoding="utf-8")
    assert tool().main(["--smoke", "--out", str(tmp_path), "--minutes", "0"]) == 0
    said = capsys.readouterr().out
    assert "1 results of other code" in said
    assert "**Partial**: 14 of 16 results" in (folder / "EVIDENCE.md").read_text(encoding="utf-8")
    assert tool().main(["--smoke", "--out", str(tmp_path)]) == 0
    assert "2 of 2 results" in capsys.readouterr().out

    def timeless(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{name: value for name, value in line.items() if name not in ("plan_ms", "megatron_ms", "run")} for line in lines]

    assert timeless(results(folder)) == timeless(found)
    again = [line for line in results(folder) if line["run"] != 1]
    assert len(again) == 2
    monkeypatch.setattr(tool(), "work", lambda *_: pytest.fail("finished cells ran again"))
    assert tool().main(["--smoke", "--out", str(tmp_path)]) == 0


def test_what_takes_too_long_is_cut_off_and_the_rest_goes_on(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, children = tool("steps"), tool("children")
    job = next(job for job in tool("cells").jobs("smoke") if job.kind == "step" and job.lanes)

    def endless(job: Any, clock: Any) -> Any:
        return clock.milliseconds(lambda: [_ for _ in iter(int, 1)])

    monkeypatch.setitem(children.OPERATIONS, "plan", endless)
    monkeypatch.setattr(steps, "PLAN_LIMIT", 0.2)
    slow, lines = steps.Slow(), []
    assert children.work(iter([steps.step_line(job, vars(job), slow)]), 1, lines.append, math.inf)
    assert lines[0]["over"]["plan"] == 0.2
    assert "seconds" not in lines[0]
    assert lines[0]["bucket"] > 0
    slow.learn(lines[0])
    monkeypatch.setitem(children.OPERATIONS, "plan", lambda job, clock: 1 / 0)  # it must not be asked again
    children.work(iter([steps.step_line(job, vars(job), slow)]), 1, lines.append, math.inf)
    assert lines[1]["over"]["plan"] == 0.2
    assert lines[1]["bucket"] == lines[0]["bucket"]


def test_an_error_in_a_child_is_shown(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, children = tool("steps"), tool("children")
    job = next(job for job in tool("cells").jobs("smoke") if job.kind == "step" and job.lanes)
    monkeypatch.setitem(children.OPERATIONS, "plan", lambda job, clock: 1 / 0)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        children.work(iter([steps.step_line(job, vars(job), steps.Slow())]), 1, lambda line: None, math.inf)


def test_two_runs_do_not_write_to_one_file(tool: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tool().alone(tmp_path / "evidence" / "smoke") as free:
        assert free
        assert tool().main(["--smoke", "--out", str(tmp_path)]) == 2
    assert "another run computes" in capsys.readouterr().err
    assert not (tmp_path / "evidence" / "smoke" / "cells.jsonl").exists()


def test_settings_that_make_no_sense(tool: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        tool().main(["--workers", "0"])
    assert end.value.code == 2
    assert "workers at least 1" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------------------- report
class Page(HTMLParser):
    """Everything a page asks for, its tags, and whether they close."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.asked: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.asked += [value for name, value in attrs if name in ("src", "href") and not value.startswith(("#", "data:"))]
        if tag not in ("meta", "link", "br", "rect", "line", "circle", "polygon"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_holds_everything_itself(made: Path) -> None:
    text = (made / "evidence.html").read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert page.asked == []
    assert page.open == []
    assert page.tags.count("svg") >= 2
    assert "script" not in page.tags
    assert "prefers-color-scheme: dark" in text


def test_the_text_says_what_it_is(made: Path) -> None:
    text = (made / "EVIDENCE.md").read_text(encoding="utf-8")
    for title in ("(a) Predicted", "(b) What", "(c) When", "(d) Measured", "(e) Measured", "(f) Circumstances", "(g) When it does not help"):
        assert f"## {title}" in text
    assert "Complete: 16 of 16" in text
    assert "**No data**: nothing of this project has been measured on a GPU" in text
    assert "These are not the project page's mixes" in text
    run = next(line for line in lines_of(made) if line["kind"] == "run")
    for value in (run["commit"], run["planner"], run["packages"]["numpy"]):
        assert f" {value}" in text
    assert re.search(r"70b tp 8 pp 4, 8 GPUs.*takes tp 8 x pp 4 = 32 GPUs", text)
    rows = [line for line in text.splitlines() if line.startswith("| 1b, 8 GPUs, 4k tokens/lane")]
    assert any("constant" in row for row in rows), "equal lengths do not help"
    assert "nan" not in text


def test_every_cell_has_a_row(made: Path, tool: Any) -> None:
    text = (made / "cells.md").read_text(encoding="utf-8")
    cells = {tool("cells").cell_of(line) for line in results(made) if "seconds" in line}
    assert text.count("\n| 1b") + text.count("\n| 8b") == len(cells)


def test_what_could_not_be_planned_in_time_is_entered(tool: Any) -> None:
    line = {"kind": "step", "model": "8b", "tp": 1, "pp": 1, "gpus": 1024, "tokens": 131072, "max_length": 131072, "preset": "uniform", "seed": 1}
    table = tool("tables").over_table([{**line, "over": {"plan": 10.0}}, {**line, "seed": 2, "over": {"plan": 10.0}}])
    assert table.rows == [["this project's planner", "> 10 s", "8b, 1,024 GPUs, 128k tokens/lane, max 128k, uniform", "2"]]


# ------------------------------------------------------------------------------------------------------------------- pictures
def test_the_axis_of_gains_begins_at_one(tool: Any) -> None:
    pictures = tool("pictures")
    svg = pictures.spans_svg("t", [], ["a", "b"], [pictures.Row("x", [[1.1, 1.2, 1.3], [1.5, 2.0]]), pictures.Row("y", [[1.0], []])], "times")
    ticks = [float(text) for text in re.findall(r'class="note" x="[\d.]+" y="[\d.]+" text-anchor="middle">([\d.]+)<', svg)]
    assert ticks[0] == 1.0
    assert ticks[-1] <= 2.05
    assert "x, a: median 1.200, quartiles 1.150 to 1.250, range 1.100 to 1.300, 3 values" in svg
    lower = pictures.spans_svg("t", [], ["a"], [pictures.Row("x", [[0.8, 0.9]])], "times")
    assert ">0.8<" in lower


def test_the_chart_is_drawn_from_8b_on_32_gpus(tool: Any, tmp_path: Path) -> None:
    line = {"kind": "step", "model": "8b", "tp": 1, "pp": 1, "gpus": 32, "tokens": 16384, "max_length": 32768, "seconds": 1.0, "bucket": 2.0}
    lines = [
        {**line, "preset": "web", "static-best": 1.1},
        {**line, "preset": "wikipedia", "static-best": 1.3},
        {**line, "preset": "byted", "pp": 4, "static-best": 9},
    ]
    assert [row.label for row in tool("tables").gain_rows(lines)] == ["wikipedia", "web"]
    assert not tool("report").write_chart(lines[2:], tmp_path / "none.svg")
    assert tool("report").write_chart(lines, tmp_path / "pictures" / "gain.svg")
    assert "not measured on GPUs" in (tmp_path / "pictures" / "gain.svg").read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------------------------------- measured
def regroup(policy: str, turn: int, seconds: float, kind: str = "timed, not computed") -> dict[str, Any]:
    line = {"kind": kind, "preset": "web", "lanes": 4, "pp": 1, "policy": policy, "turn": turn, "steps": 3, "seconds": seconds, "predicted": 2.0}
    return line if kind.startswith("timed") else {**line, "cpu_seconds": 2 * seconds, "memory": 30_000_000, "memory_predicted": 4e7}


def test_ratios_of_turns_and_their_interval(tool: Any) -> None:
    lines = [regroup("planned", turn, 1.0 + 0.01 * turn) for turn in range(5)] + [regroup("bucket", turn, 2.0) for turn in range(5)]
    (one,) = tool("measured").ratios(lines)
    assert one.mean == pytest.approx(0.51)
    assert one.least <= one.interval[0] < one.mean < one.interval[1] <= one.most
    assert one.error == pytest.approx(1.02 / 2 - 1)
    assert tool("measured").interval([1.0, 2.0, 3.0, 4.0]) == pytest.approx((2.5 - 3.182 * 1.2910 / 2, 2.5 + 3.182 * 1.2910 / 2), rel=1e-4)
    few = [line for line in lines if line["turn"] < 2]
    assert tool("measured").ratios(few)[0].interval is None


def test_wall_clock_counts_where_there_is_a_core_for_each_rank(tool: Any) -> None:
    lines = [regroup(policy, turn, 1.0, "computed") for policy in ("planned", "bucket") for turn in range(5)]
    assert [one.of for one in tool("measured").ratios(lines, 4)] == ["seconds", "cpu_seconds"]
    assert [one.of for one in tool("measured").ratios(lines, 2)] == ["cpu_seconds"]
    assert tool("measured").cores_of(["x86_64, 2 cores, Python"]) == 2


def test_kept_measurements_are_read(tool: Any, tmp_path: Path) -> None:
    (tmp_path / "regroup").mkdir()
    lines = [regroup(policy, turn, seconds, "computed") for policy, seconds in (("planned", 1.0), ("static-best", 1.25)) for turn in range(5)]
    (tmp_path / "regroup" / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (tmp_path / "evidence").mkdir()
    runs = {"fp64, planned, 1 rank": {"losses": [3.0, 2.0], "held_out": 2.5}, "fp64, static, 1 rank": {"losses": [3.0, 2.0 + 2e-10], "held_out": 2.5}}
    kept = {"steps": 2, "torch": "2", "machine": "m", "runs": runs}
    (tmp_path / "evidence" / "losses.json").write_text(json.dumps(kept), encoding="utf-8")
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "cpu.json").write_text(json.dumps({"device": {"name": "a CPU"}, "sections": {"gemm": {}}}), encoding="utf-8")
    tool("report").write(tool("report").Evidence([], [], [], tmp_path), tmp_path / "EVIDENCE.md", tmp_path / "evidence" / "evidence.html")
    text = (tmp_path / "EVIDENCE.md").read_text(encoding="utf-8")
    assert "| computed | web, 4 ranks | static-best | wall clock | **0.800** |" in text
    assert "| web, 4 ranks | planned | 30.0 | 40.0 | 0.75 |" in text
    assert "at no step more than 1.0e-10 apart" in text
    assert "**No data**" in text, "a CPU's report is no GPU's"
    assert (tmp_path / "evidence" / "evidence.html").read_text(encoding="utf-8").count("<svg") == 1


@pytest.mark.slow
def test_loss_curves_in_fp64_are_one(tool: Any, tmp_path: Path) -> None:
    losses = tool("losses")
    losses.record(tmp_path / "losses.json", 3, losses.TRAININGS[:2])
    kept = tool("measured").losses(tmp_path / "losses.json")
    one, other = kept["runs"].values()
    assert one["losses"] == pytest.approx(other["losses"], rel=1e-10)
    losses.record(tmp_path / "losses.json", 3, losses.TRAININGS[:2])
    assert tool("measured").losses(tmp_path / "losses.json") == kept
