"""tools/plan.py on recorded plans: replay proves them, what-if plans their documents for something else."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from plan_tool_helpers import H200, LENGTHS, QUICK, Call, changed, set_first, words

from megadcp.config.load import compose
from megadcp.config.run_file import dump_run
from megadcp.plan.plan_file import PlanWriter, read_plans
from megadcp.plan.simulate import step_seconds
from megadcp.plan.step_plan import StepPlan, from_json, to_json


# ---------------------------------------------------------------------------------------------------------------- replaying
def test_replay_says_the_same_as_planning(call: Call) -> None:
    planned = call.good(*H200, *QUICK, f"lengths={call.lengths(LENGTHS)}", "out=plan.json")
    replayed = call.good("replay", "plan.json", "svg=again.svg")
    assert "holds all invariants and its recorded figures" in words(replayed, "plans")[0]
    for word in ("documents", "microbatches", "cp mix", "recompute", "memory", "step", "throughput", "MFU", "idle", "bound", "gain"):
        assert words(replayed, word) == words(planned, word)
    assert Path("again.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda document: document["microbatches"].pop(), "breaks invariant 1 (every document once)"),
        (set_first(cp=3), "breaks invariant 2 (aligned groups)"),
        (lambda document: document["microbatches"].append(dict(document["microbatches"][0], documents=[0], padded=[0])), "breaks invariant 1"),
        (set_first(padded=[1]), "breaks invariant 4 (padding)"),
        (set_first(recompute={"level": "full", "layers": 99}), "breaks invariant 7 (recompute)"),
        (set_first(seconds=123.0), "breaks invariant 8 (predicted seconds and bytes)"),
        (set_first(lane=99), "breaks invariant 2 (aligned groups)"),
        (lambda document: document["predicted"].update(seconds=0.001), "predicted.seconds is recorded as 0.001, scored again it is"),
        (lambda document: document["predicted"].update(lower_bound_seconds=0.001), "predicted.lower_bound_seconds is recorded as 0.001"),
        (lambda document: document.pop("unit"), "unit: missing"),
    ],
)
def test_a_broken_plan_is_named(call: Call, change: Any, told: str) -> None:
    path = call.plan([4000, 70])
    changed(path, change, rehash="unit" not in told)
    assert told in call.refused("replay", str(path), code=1)


def test_a_changed_plan_is_named_with_what_it_breaks(call: Call) -> None:
    path = call.plan([4000, 70])
    changed(path, set_first(cp=3), rehash=False)
    said = call.refused("replay", str(path), code=1)
    assert "hash: the plan was changed after it was made" in said
    assert "as it stands plan of step 0 breaks invariant 2 (aligned groups)" in said
    path = call.plan([4000, 70], "overwrite=true")
    changed(path, lambda document: document.update(step=5), rehash=False)
    assert "as it stands it breaks no invariant" in call.refused("replay", str(path), code=1)


def records(call: Call, count: int = 4) -> list[StepPlan]:
    """A run folder with plans of one CPU rank."""
    config = compose(["run.name=run", "data.max_length=512"])
    folder = call.folder / "run"
    folder.mkdir()
    dump_run(config, folder / "run.yaml")
    call.good(*QUICK, "data.max_length=512", f"lengths={call.lengths([[400 - step, 90, 7] for step in range(count)])}", "out=some.jsonl")
    plans = list(read_plans("some.jsonl"))
    with PlanWriter(folder / "plans.jsonl") as writer:
        for plan in plans:
            writer.append(plan)
    return plans


def test_replay_of_a_run(call: Call) -> None:
    plans = records(call)
    out = call.good("replay", "run")
    assert "4 hold all invariants and their recorded figures" in words(out, "plans")[0]
    assert "4 steps with 12 documents" in words(out, "documents")[0]
    one = call.good("replay", "run/plans.jsonl", "step=2", "trace=t.json")
    assert words(one, "step")[0].startswith(f"{step_seconds(plans[2]):.4g} s")
    assert "step=9; it holds" in call.refused("replay", "run", "step=9").replace("of step 9", "step=9")
    assert "1 holds" in call.good("replay", "run", "steps=1")


def test_one_broken_plan_among_others(call: Call) -> None:
    plans = records(call)
    worse = dataclasses.replace(plans[1], microbatches=plans[1].microbatches[:-1] or ())
    with PlanWriter(call.folder / "mixed.jsonl") as writer:
        for plan in (plans[0], worse, *plans[2:]):
            writer.append(plan)
    code, out, err = call("replay", "mixed.jsonl")
    assert code == 1
    assert "3 hold all invariants" in out
    assert re.fullmatch(r"error: plan of step 1 breaks invariant 1 [^\n]+\n", err)


def test_replay_of_an_interrupted_run(call: Call) -> None:
    records(call)
    with open(call.folder / "run/plans.jsonl", "ab") as file:
        file.write(b'{"version": 1, "st')
    out = call.good("replay", "run")
    assert "read up to the last complete" in words(out, "note")[0]
    assert "4 hold" in words(out, "plans")[0]


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["replay"], "replay needs a run folder"),
        (["replay", "nowhere"], "nowhere does not exist; give a run folder"),
        (["replay", "empty"], "empty holds no plans; give a run folder with plans.jsonl or plans.jsonl.zst"),
        (["replay", "empty", "model=gpt_8b"], "to plan its lengths again use: what-if empty"),
        (["replay", "empty", "out=x.json"], "out= has no meaning with replay"),
        (["replay", "empty", "lengths=x.json"], "lengths= has no meaning with replay"),
        (["what-if", "empty", "preset=web"], "preset= has no meaning with what-if"),
        (["what-if", "model=gpt_8b"], "what-if needs a run folder"),
        (["replay", "empty", "svg=nowhere/x.svg"], "the folder nowhere does not exist"),
    ],
)
def test_wrong_requests_about_records(call: Call, argv: list[str], told: str) -> None:
    (call.folder / "empty").mkdir()
    assert told in call.refused(*argv)


def test_replay_of_what_is_no_plan(call: Call) -> None:
    assert "expected an object" in call.refused("replay", str(call.lengths([5, 6])), code=1)
    assert "invalid JSON" in call.refused("replay", str(call.lengths("no")), code=1)


# -------------------------------------------------------------------------------------------------------------------- what if
def test_what_if_with_nothing_changed_is_the_same_plan(call: Call) -> None:
    path = call.plan()
    out = call.good("what-if", str(path), "out=again.json")
    assert to_json(from_json(Path("again.json").read_bytes())) == to_json(from_json(path.read_bytes()))
    assert all(row.split()[-1] == "1.000" for row in out.splitlines() if row.startswith(("step seconds", "tokens/s", "peak GB", "microbatches  ")))


def test_what_if_on_more_devices_another_model_and_precision(call: Call) -> None:
    path = call.plan()
    out = call.good("what-if", str(path), "cluster=h200_4x8", "model=gpt_8b", "precision=fp8", "out=other.json")
    plan = from_json(Path("other.json").read_bytes())
    assert (plan.layout.lanes, plan.model.layers, plan.precision, plan.lengths) == (32, 32, "fp8_current", tuple(LENGTHS))
    assert plan.profile.gemm_flops == 720e12
    old = from_json(path.read_bytes())
    row = next(line for line in out.splitlines() if line.startswith("step seconds")).split()
    assert [float(cell) for cell in row[2:]] == pytest.approx(
        [step_seconds(old), step_seconds(plan), step_seconds(plan) / step_seconds(old)], rel=1e-3
    )
    assert any(line.startswith("tokens at cp ") for line in out.splitlines())
    assert any(line.startswith("usable GB ") for line in out.splitlines())


def test_what_if_keeps_what_nobody_changes(call: Call) -> None:
    """A pipeline with stages of its own, slow lanes and another memory: all of it is carried by the plan."""
    settings = ["parallel.pp=2", "parallel.stage_layers=[9,7]", "plan.lane_speed=[1.0,0.5,1.0,1.0]", "hardware.memory_bytes=80e9"]
    path = call.plan(LENGTHS, *settings, "data.max_length=200000")
    call.good("what-if", str(path), "hardware.memory_bytes=90e9", "out=b.json")
    old, new = from_json(path.read_bytes()), from_json(Path("b.json").read_bytes())
    assert dataclasses.replace(new.profile, memory_bytes=80e9) == old.profile
    assert (new.stage_layers, new.lane_speed, new.layout) == (old.stage_layers, old.lane_speed, old.layout)
    out = call.good("what-if", str(path), "parallel.pp=1", "out=c.json")
    flat = from_json(Path("c.json").read_bytes())
    assert (flat.layout.lanes, flat.stage_layers, flat.lane_speed) == (8, (16,), ())
    assert words(out, "note") == ["parallel.stage_layers, plan.lane_speed of the recorded run not kept: the layout changes"]
    said = call.refused("what-if", str(path), "precision=fp8")
    assert "a plan carries the matrix-product rate of its own precision (bf16) only" in said


def test_what_if_of_a_run(call: Call) -> None:
    plans = records(call)
    out = call.good("what-if", "run", "model.layers=8", "out=deeper.jsonl")
    deeper = list(read_plans("deeper.jsonl"))
    assert [plan.lengths for plan in deeper] == [plan.lengths for plan in plans]
    assert {plan.model for plan in deeper} == {dataclasses.replace(plans[0].model, layers=8)}
    assert "the same 12 of 4 steps" in words(out, "documents")[0]
    call.good("what-if", "run", "step=1", "hardware=h200", "out=one.json")
    assert from_json(Path("one.json").read_bytes()).profile.memory_bytes == 141e9
    assert "model=gpt_9b does not exist" in call.refused("what-if", "run", "model=gpt_9b")


def test_what_if_a_recorded_plan_is_broken(call: Call) -> None:
    path = call.plan([4000, 70])
    changed(path, set_first(cp=3))
    assert "breaks invariant 2" in call.refused("what-if", str(path), "model=gpt_8b", code=1)
