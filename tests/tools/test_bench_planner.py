import importlib
import json
import sys
from pathlib import Path

import pytest

from megadcp.plan import presets

TOOLS = Path(__file__).parents[2] / "tools"
SMALL = ["--only", "model=1b", "lanes=8", "tokens=16384", "max_length=131072", "preset=wikipedia,constant", "--seeds", "1", "--no-peers"]


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    yield importlib.import_module("bench_planner")
    for name in ("bench_planner", "bench_planner_report", "benchmark"):
        sys.modules.pop(name, None)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_results_and_report_and_a_rerun_that_goes_on(bench, tmp_path, capsys, monkeypatch):
    assert bench.main([*SMALL, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    lines = lines_of(tmp_path / "results.jsonl")
    assert {(line["preset"], line["documents"] > 0) for line in lines} == {("wikipedia", True), ("constant", True)}
    for line in lines:
        assert line["bound"] <= line["seconds"] <= line["static-best"] * (1 + 1e-9)
        assert min(line["static-fixed"], line["bucket"]) > line["bound"]
        assert line["megatron-balanced"] is None is line["bound_1f1b"]
        assert line["plan_ms"] > 0
    assert "ratio to the bound, worst" in said
    assert "1/2  1b, 8 lanes, 16k tokens/lane, max 128k, " in said
    text = (tmp_path / "report.md").read_text()
    assert "### By model and lanes" in text
    assert text.startswith(said[said.index("# The planner") :].rstrip())
    assert (tmp_path / "cells.md").read_text().count("\n| 1b, 8 lanes") == 2

    kept = (tmp_path / "results.jsonl").read_text()
    monkeypatch.setattr(bench, "cell_line", lambda *_: pytest.fail("a finished cell ran again"))
    assert bench.main([*SMALL, "--out", str(tmp_path)]) == 0
    assert (tmp_path / "results.jsonl").read_text() == kept


def test_an_interrupted_line_and_other_versions_do_not_count(bench, tmp_path, capsys):
    path = tmp_path / "results.jsonl"
    assert bench.main([*SMALL, "--out", str(tmp_path)]) == 0
    lines = path.read_text().splitlines()
    path.write_text(json.dumps({**json.loads(lines[0]), "version": "older", "seconds": 1e9}) + "\n" + lines[1] + "\n" + lines[0][:50])
    capsys.readouterr()
    assert bench.main([*SMALL, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "1 results of other versions" in said
    assert "1/1  1b, 8 lanes" in said
    again = lines_of(path)
    for line in (*again, *(found := [json.loads(line) for line in lines])):
        line.pop("plan_ms")
    assert again == found


def test_the_time_limit_leaves_the_rest_for_later(bench, tmp_path, capsys):
    assert bench.main([*SMALL, "--time-limit", "0", "--out", str(tmp_path)]) == 0
    assert "stopped by --time-limit: 2 results still to do" in capsys.readouterr().out
    assert (tmp_path / "results.jsonl").read_text() == ""


@pytest.mark.parametrize(("only", "error"), [(["lanes"], "must be NAME=VALUE"), (["lane=8"], "NAME one of"), (["lanes=7"], "leaves no cell")])
def test_a_filter_that_makes_no_sense(bench, tmp_path, capsys, only, error):
    assert bench.main(["--only", *only, "--out", str(tmp_path / "new")]) == 2
    assert error in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_the_grid_is_that_of_the_plan_contract(bench):
    cells = bench.grid(quick=False)
    assert len(cells) == len(set(cells)) == 9 * 3 * 2 * (3 * 4 + 2)
    assert {cell.preset for cell in cells} == set(presets.PRESETS)
    assert {(cell.model, cell.tp, cell.pp) for cell in cells if cell.lanes == 1024} == {("1b", 1, 1), ("8b", 1, 1), ("70b", 8, 4)}
    assert {cell.lanes for cell in cells if (cell.model, cell.pp) == ("8b", 4)} == {8, 32}
    assert {(size.documents, size.lanes, size.pp) for size in bench.times(False)} == {(d, n, pp) for d, n in bench.SIZES for pp in (1, 4)}
    assert len(bench.grid(quick=True)) == 36


def test_what_does_not_fit_is_a_result(bench):
    cell = bench.Cell("8b", 1, 1, 1, 131072, 131072, "mcore")
    line = bench.cell_line(cell, 1, peers=False)
    assert "memory" in line["why"]
    assert "seconds" not in line
    text = bench.report.text([{"kind": "step", **line}], [])
    assert "## What does not fit" in text
    assert line["why"] in text
    assert "fit the memory" in bench.report.text([made(bench)], [])


def test_pipelines_have_the_tighter_bound(bench):
    pytest.importorskip("scipy", reason="pip install scipy")
    line = bench.cell_line(bench.Cell("8b", 1, 4, 8, 16384, 131072, "mcore"), 1, peers=True)
    assert line["bound"] < line["bound_1f1b"] <= line["seconds"]
    assert line["megatron-balanced"] is None  # it knows no pipelines


@pytest.mark.peer
def test_megatron_core_is_among_them(bench):
    pytest.importorskip("megatron.core", reason="pip install megatron-core")
    line = bench.cell_line(bench.Cell("1b", 1, 1, 8, 16384, 131072, "mcore"), 1, peers=True)
    assert line["megatron-balanced"] > line["seconds"]


def test_planning_times(bench, monkeypatch):
    monkeypatch.setattr(bench, "least_ms", lambda call, *_: call() and 12.5)
    line = bench.time_line(bench.Size(1, 100, 8, "wikipedia"))
    assert (line["documents"], line["plan_ms"]) == (100, 12.5)


def test_comments_do_not_change_the_version_and_code_does(bench, tmp_path, monkeypatch):
    (tmp_path / "megadcp" / "plan").mkdir(parents=True)
    source, drawing = tmp_path / "megadcp" / "plan" / "lanes.py", tmp_path / "megadcp" / "plan" / "render_svg.py"
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    versions = []
    for text in ('"""Says."""\nx = 1\n', '"""Says more."""\nx = 1  # one\n', '"""Says."""\nx = 2\n'):
        source.write_text(text)
        drawing.write_text(f"y = {len(versions)}\n")
        versions.append(bench.version())
    assert versions[0] == versions[1] != versions[2]


# ---------------------------------------------------------------------------------------------------------------- the report
def made(bench, **other):
    """A result line."""
    cell = bench.dataclasses.asdict(bench.Cell("8b", 1, other.pop("pp", 1), 8, 32768, 131072, "wikipedia"))
    figures = {"seconds": 1.01, "bound": 1.0, "bound_1f1b": None, "static-best": 1.2, "static-fixed": 1.5, "bucket": 2.0, "megatron-balanced": None}
    return {"kind": "step", **cell, "seed": 1, "documents": 100, **figures, "plan_ms": 5.0, **other}


def rows_of(text, start):
    return [[word.strip() for word in row.split("|")[1:-1]] for row in text.splitlines() if row.startswith(f"| {start}")]


def test_targets_met_and_missed(bench):
    lines = [made(bench), made(bench, seconds=1.1, seed=2), made(bench, seconds=9.0, bound=1.0, documents=15)]
    lines += [made(bench, pp=4, seconds=1.1, bound_1f1b=1.0, **{"static-best": 1.1}), made(bench, pp=4, seconds=0.99, bound_1f1b=0.98)]
    text = bench.report.text(lines, [])
    found = {row[0]: row[2:4] for row in rows_of(text, "ratio") + rows_of(text, "gain") + rows_of(text, "steps")}
    assert found["ratio to the bound, geometric mean"] == ["1.0540", "**missed** by 2.8%"]  # the step with few documents is apart
    assert found["ratio to the bound, worst"][0].startswith("1.1000 (8b, 8 lanes, 32k tokens/lane, max 128k, wikipedia)")
    assert found["gain over static-best, median"] == ["1.1061", "**met**"]
    assert found["ratio to the 1F1B bound, geometric mean"] == ["1.0541", "**missed** by 0.4%"]
    assert found["gain over static-best, least"][1] == "**missed** by 650.0%"  # among all steps: 1.2 / 9
    assert found["steps below a lower bound"] == ["1", "**a bug**"]
    assert "## Fewer than 2 documents per lane" in text


def test_where_it_gains(bench):
    lines = [
        made(bench, preset="constant", **{"static-best": 1.01}),
        made(bench, **{"static-best": 1.5}),
        made(bench, seed=2, **{"static-best": 1.4}),
    ]
    text = bench.report.text(lines, [])
    assert "below 1.005 in 1 of 1 steps" in text
    assert "No gain over static-best (median below 1.005): constant (pp=1, 1.00)." in text
    assert "Large gain over static-best (median at least 1.2): wikipedia (pp=1, 1.44)." in text
    assert rows_of(text, "pp=1")[1][:5] == ["pp=1", "wikipedia", "2", "1.436 [1.411, 1.460]", "1.386 to 1.485"]


def test_planning_time_targets(bench):
    size = {"kind": "time", "documents": 1024, "lanes": 32, "tokens_per_lane": 40960}
    lines = [{**size, "pp": 1, "preset": "web", "plan_ms": 9.0}, {**size, "pp": 1, "preset": "byted", "plan_ms": 15.0}]
    lines.append({**size, "pp": 4, "preset": "web", "plan_ms": 39.0})
    one, four = rows_of(bench.report.text(lines, []), "1,024 on 32 lanes")
    assert one[:4] == ["1,024 on 32 lanes, pp=1", "10", "12.0", "15.0 (byted, 40k tokens/lane)"]
    assert one[4] == "**missed**: 1.50 times the target; met by 1 of 2 presets"
    assert four[1:] == ["40", "39.0", "39.0 (web, 40k tokens/lane)", "**met**"]


def test_steps_that_no_static_layout_fits(bench):
    text = bench.report.text([made(bench, **{"static-best": None})], [])
    assert "In 1 more steps no static layout fits the memory, and the plan does: 8b, 8 lanes" in text
    assert rows_of(text, "gain over static-best, least")[0][2] == "no result"
