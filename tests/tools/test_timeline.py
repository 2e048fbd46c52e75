"""tools/timeline.py on records made by hand, whose pictures are known."""

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from run_records import ROOT, SLOWER, actions_of, config_of, make_run, tool

from megadcp.config.check import UserError
from megadcp.plan.plan_file import read_plans
from megadcp.plan.simulate import simulate
from megadcp.train import timeline as record

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "lanes", steps=4)
    make_run(folder / "stages", lanes=2, pp=2, steps=3)
    return {name: folder / name for name in ("lanes", "stages")}


@pytest.fixture
def timeline(monkeypatch):
    return tool("timeline", monkeypatch)


def plan_of(folder, number):
    return next(plan for plan in read_plans(folder / "plans.jsonl") if plan.step == number - 1)


@pytest.mark.parametrize("name", ["lanes", "stages"])
def test_measured_times_are_those_that_were_recorded(runs, name):
    plan = plan_of(runs[name], 3)
    found = record.measured_timeline(plan, record.recorded(runs[name], 3))
    planned = simulate(plan)
    assert found.makespan == pytest.approx(SLOWER * planned.makespan, abs=2e-6)
    kinds = {event.kind for event in found.events}
    assert kinds == {"F", "B"}
    by_microbatch = {}
    for event in found.events:
        key = event.microbatch, event.stage
        begin, end = by_microbatch.get(key, (event.begin, event.end))
        by_microbatch[key] = min(begin, event.begin), max(end, event.end)
    for key in {(event.microbatch, event.stage) for event in planned.events}:
        own = [event for event in planned.events if (event.microbatch, event.stage) == key]
        assert by_microbatch[key][0] == pytest.approx(SLOWER * min(event.begin for event in own), abs=2e-6)
        assert by_microbatch[key][1] == pytest.approx(SLOWER * max(event.end for event in own), abs=2e-6)


def test_a_group_runs_when_its_last_rank_has_come(tmp_path):
    """The last lane begins late: what its group does is drawn from there on, and blocks of a lane never overlap."""
    make_run(tmp_path / "run", steps=1)
    plan = plan_of(tmp_path / "run", 1)
    late = 1e-3
    record.add_timeline(tmp_path, 1, plan, actions_of(plan, 1.0, late))
    found = record.measured_timeline(plan, record.recorded(tmp_path, 1))
    planned = {(event.microbatch, "F"): event.begin for event in simulate(plan).events}
    shifted = {
        event.microbatch: event.begin - planned[event.microbatch, "F"] for event in found.events if event.kind == "F"
    }  # fmt: skip
    last = plan.layout.lanes - 1
    for at, one in enumerate(plan.microbatches):
        assert shifted[at] == pytest.approx(late if one.lane <= last < one.lane + one.cp else 0.0, abs=2e-6)
    assert any(one.cp > 1 for one in plan.microbatches), "the plan must share a document for this test to mean anything"


def test_another_plan_is_refused(runs, tmp_path):
    plan = plan_of(runs["lanes"], 3)
    row = record.recorded(runs["lanes"], 3)
    with pytest.raises(UserError, match="another plan"):
        record.measured_timeline(plan, {**row, "plan": "0" * 64})
    with pytest.raises(UserError, match="has 3 ranks, its plan has 4"):
        record.measured_timeline(plan, {**row, "actions": row["actions"][:3]})
    with pytest.raises(UserError, match="slot 99"):
        record.measured_timeline(plan, {**row, "actions": [*row["actions"][:3], [[99, "F", 0, 1, 2]]]})


def test_a_step_that_ran_again_counts_as_it_ran_last(runs, tmp_path):
    plan = plan_of(runs["lanes"], 3)
    record.add_timeline(tmp_path, 3, plan, actions_of(plan, 1.0))
    record.add_timeline(tmp_path, 3, plan, actions_of(plan, 2.0))
    with open(tmp_path / record.NAME, "a") as file:
        file.write('{"step": 6, "plan": "half a li')
    assert record.recorded_steps(tmp_path) == [3]
    found = record.measured_timeline(plan, record.recorded(tmp_path, 3))
    assert found.makespan == pytest.approx(2 * simulate(plan).makespan, abs=2e-6)


def test_which_steps_are_kept():
    import dataclasses

    setup = config_of(steps=25)
    every = [dataclasses.replace(setup, log=dataclasses.replace(setup.log, timeline_every=number)) for number in (10, 0)]
    assert [step for step in range(1, 26) if record.is_due(every[0], step)] == [10, 20, 25]
    assert not any(record.is_due(every[1], step) for step in range(1, 26))


@pytest.mark.parametrize("name", ["lanes", "stages"])
def test_picture_and_trace(runs, name, timeline, tmp_path, capsys):
    svg, trace = tmp_path / "step.svg", tmp_path / "step.json"
    assert timeline.main([str(runs[name]), "--step", "3", "--svg", str(svg), "--trace", str(trace)]) == 0
    said = capsys.readouterr().out
    assert f"planned / measured {1 / SLOWER:.2f}" in said
    assert "1.00 x the step's mean ratio" in said
    picture = ElementTree.fromstring(svg.read_text())
    parts = picture.findall(f"{SVG}svg")
    assert len(parts) == 2
    heights = [float(part.get("height")) for part in parts]
    assert [float(part.get("y")) for part in parts] == [0.0, heights[0]]
    assert float(picture.get("height")) == sum(heights)
    titles = [part.find(f"{SVG}title").text for part in parts]
    assert titles == ["Step 3: planned", "Step 3: measured"]
    ends = [_predicted_end(part) for part in parts]
    assert ends[0] == pytest.approx(ends[1], abs=0.02), "the same second is at the same place in both"
    events = json.loads(trace.read_text())["traceEvents"]
    lanes, pp = (4, 1) if name == "lanes" else (2, 2)
    names = {event["args"]["name"].split()[0] for event in events if event["name"] == "process_name"}
    assert names == {"planned", "measured"}
    assert {event["pid"] for event in events} == set(range(1, 2 * lanes + 1))
    assert len({event["tid"] for event in events if event["ph"] == "X"}) == 2 * lanes * pp
    spent = [sum(event["dur"] for event in events if event["ph"] == "X" and (event["pid"] > lanes) == side) for side in (False, True)]
    assert spent[1] == pytest.approx(SLOWER * spent[0], rel=1e-3)


def _predicted_end(part) -> float:
    return float(next(line for line in part.iter(f"{SVG}line") if "endline" in line.get("class")).get("x1"))


def test_scales_far_apart_are_said_to_differ(runs, timeline, tmp_path):
    plan = plan_of(runs["lanes"], 3)
    planned = simulate(plan)
    record.add_timeline(tmp_path, 3, plan, actions_of(plan, 10.0))
    far = timeline.Step(3, plan, planned, record.measured_timeline(plan, record.recorded(tmp_path, 3)))
    assert timeline.picture(far).count("(scales differ)") >= 2


def test_the_plan_alone(runs, timeline, tmp_path, capsys):
    assert timeline.main([str(runs["lanes"]), "--step", "2", "--planned", "--svg", str(tmp_path / "a.svg"), "--trace", str(tmp_path / "a.json")]) == 0
    assert "measured" not in capsys.readouterr().out
    assert "measured" not in json.dumps(json.loads((tmp_path / "a.json").read_text()))


def test_what_was_not_recorded_is_one_clear_line(runs, timeline, tmp_path, capsys):
    for arguments, wanted in (
        ([str(runs["lanes"]), "--step", "2"], r"step 2 of .* was not recorded; nearest: --step 3; --list names all; --planned draws its plan alone"),
        ([str(runs["lanes"]), "--step", "77", "--planned"], r"holds no plan of step 77 \(plan 76\)"),
        ([str(tmp_path / "nothing")], "is no run folder"),
        ([str(tmp_path)], "no recorded step"),
    ):
        assert timeline.main(arguments) == 2
        said = capsys.readouterr()
        assert re.fullmatch(rf"error: .*{wanted}.*\n", said.err), said.err
    assert timeline.main([str(runs["lanes"]), "--list"]) == 0
    assert capsys.readouterr().out == "3\n"


def test_it_runs_as_a_program_without_torch(runs, tmp_path):
    code = f"import sys; sys.modules['torch'] = None; sys.path.insert(0, {str(ROOT / 'tools')!r})\n"
    code += "import timeline; sys.exit(timeline.main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, str(runs["stages"])], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert (runs["stages"] / "timeline" / "step-00000003.svg").exists()
    assert "step 3 " in done.stdout
