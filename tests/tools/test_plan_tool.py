"""tools/plan.py as a person calls it: steps planned, and every request it must refuse in one line."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plan_tool_helpers import H200, LENGTHS, QUICK, ROOT, Call, number, words

from megadcp.config.load import compose
from megadcp.config.run_file import dump_run
from megadcp.data.indexed import IndexedWriter
from megadcp.data.order import open_training
from megadcp.nn.flops import flops
from megadcp.plan import presets
from megadcp.plan.plan_file import read_plans
from megadcp.plan.simulate import simulate, step_seconds
from megadcp.plan.step_plan import from_json
from megadcp.plan.verify import verify


# ---------------------------------------------------------------------------------------------------------------- planning
def test_the_command_of_the_documentation(call: Call) -> None:
    out = call.good("model=gpt_8b", "cluster=h200_4x8", "precision=bf16", f"lengths={call.lengths(LENGTHS)}", "out=PLAN.json")
    plan = from_json(Path("PLAN.json").read_bytes())
    verify(plan)
    assert plan.lengths == tuple(LENGTHS)
    assert (plan.layout.lanes, plan.precision, plan.model.hidden) == (32, "bf16", 4096)
    assert plan.profile.memory_bytes == 141e9  # the profile that the cluster's name begins with
    assert "note         hardware=h200, which cluster=h200_4x8 is made of" in out
    assert words(out, "hardware") == ["h200 in cluster h200_4x8"]
    assert words(out, "wrote") == ["PLAN.json (1 plan)"]


def test_what_is_printed_is_what_the_plan_says(call: Call) -> None:
    out = call.good(*H200, f"lengths={call.lengths(LENGTHS)}", "out=plan.json")
    plan = from_json(Path("plan.json").read_bytes())
    whole, devices = step_seconds(plan), 8
    assert number(out, r"^step +([\d.]+) s: makespan") == pytest.approx(whole, rel=1e-3)
    assert number(out, r"makespan ([\d.]+) s \+") == pytest.approx(plan.predicted.seconds, rel=1e-3)
    assert number(out, r"^throughput +([\d,]+) tokens/s") == pytest.approx(sum(LENGTHS) / whole, abs=1)
    assert number(out, r"tokens/s, ([\d,]+) per device") == pytest.approx(sum(LENGTHS) / whole / devices, abs=1)
    model = compose(["model=gpt_1b", "precision=bf16"]).model
    assert number(out, r"^MFU +([\d.]+)%") == pytest.approx(100 * flops(model, LENGTHS) / whole / devices / 989e12, abs=0.06)
    assert number(out, r"makespan ([\d.]+) x the universal") == pytest.approx(plan.predicted.seconds / plan.predicted.lower_bound_seconds, abs=1e-3)
    assert number(out, r"^memory +([\d.]+) GB peak") == pytest.approx(plan.predicted.peak_bytes[0] / 1e9, abs=0.06)
    assert number(out, r"([\d.]+)x over static-best") == pytest.approx(plan.predicted.static_seconds / plan.predicted.seconds, abs=0.006)
    sizes = {one.cp for one in plan.microbatches}
    assert [int(line.split()[1]) for line in words(out, "cp mix")] == sorted(sizes)
    for line in words(out, "cp mix"):
        mine = [one for one in plan.microbatches if one.cp == int(line.split()[1])]
        documents = [document for one in mine for document in one.documents]
        assert f"  {len(mine):,} microbatch" in line
        assert f" {len(documents):,} document" in line
        assert f" {sum(LENGTHS[document] for document in documents):,} tokens" in line


def test_every_baseline_is_told(call: Call) -> None:
    gains = words(call.good(*H200, f"lengths={call.lengths(LENGTHS)}"), "gain")
    for name in ("static-best", "static-fixed", "bucket"):
        assert sum(f"over {name}" in line or line.startswith(f"{name} fits") for line in gains) == 1
    assert all(float(line.split("x over")[0]) >= 1 for line in gains if "x over" in line)


def test_the_peer_is_imported_when_asked_for_only(call: Call) -> None:
    lengths = f"lengths={call.lengths(LENGTHS)}"
    assert words(call.good(*H200, lengths), "gain")[-1] == "megatron-balanced left out; peers=true adds it, which takes seconds"
    assert "megatron" not in call.good(*H200, "parallel.pp=2", lengths)  # it knows no pipelines


@pytest.mark.peer
def test_megatron_core_as_a_baseline(call: Call) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core")
    gains = words(call.good(*H200, f"lengths={call.lengths(LENGTHS)}", "peers=true"), "gain")
    assert re.match(r"[1-9][\d.]*x over megatron-balanced", gains[-1])


def test_limits_of_the_run_hold_for_the_static_layout_it_is_compared_with(call: Call) -> None:
    gains = words(call.good(*H200, f"lengths={call.lengths(LENGTHS)}", "plan.recompute=full"), "gain")
    assert "x over static-best within plan.recompute and plan.pack_tokens" in gains[0]
    assert float(gains[0].split("x")[0]) >= 1
    assert "slower than it" in gains[1]  # static-best without the limit recomputes nothing here


def test_equal_lengths_gain_nothing_and_it_says_so(call: Call) -> None:
    out = call.good(*H200, *QUICK, "preset=constant", "tokens_per_lane=32768")
    assert "all equally long" in words(out, "documents")[0]
    assert words(out, "gain")[0].startswith("1.00x over static-best")
    assert "no gain: all documents are equally long" in words(out, "gain")[0]


def test_several_steps(call: Call) -> None:
    steps = [LENGTHS, [500] * 40, [100, 200, 60000]]
    out = call.good(*H200, *QUICK, f"lengths={call.lengths(steps)}", "out=plans.jsonl")
    plans = list(read_plans("plans.jsonl"))
    assert [plan.step for plan in plans] == [0, 1, 2]
    assert [list(plan.lengths) for plan in plans] == steps
    rows = [line.split() for line in out.splitlines() if re.match(r" +\d+ ", line)]
    assert [row[:4] for row in rows] == [[str(n), str(len(one)), f"{sum(one):,}", f"{max(one):,}"] for n, one in enumerate(steps)]
    assert "3 steps with 59 documents" in words(out, "documents")[0]
    only = call.good(*H200, *QUICK, f"lengths={call.lengths(steps)}", "step=1", "steps=1", "out=one.json")
    assert "40 documents, 20,000 tokens" in words(only, "documents")[0]
    assert from_json(Path("one.json").read_bytes()) == plans[1]


def test_compressed_plans(call: Call) -> None:
    pytest.importorskip("zstandard")
    call.good(*H200, *QUICK, f"lengths={call.lengths([LENGTHS, LENGTHS[:5]])}", "out=plans.jsonl.zst")
    assert [len(plan.lengths) for plan in read_plans("plans.jsonl.zst")] == [16, 5]
    assert "2 hold all invariants" in call.good("replay", "plans.jsonl.zst")


def test_presets(call: Call) -> None:
    out = call.good(*H200, *QUICK, "preset=web", "tokens_per_lane=4000", "seed=3", "steps=2", "out=plans.jsonl")
    assert [list(plan.lengths) for plan in read_plans("plans.jsonl")] == presets.steps("web", 8 * 4000, 131072, 3, 2)
    assert "note         preset web: 32000 tokens a step (4000 x 8 lanes), documents up to 131072" in out
    call.good(*H200, *QUICK, "preset=web", "tokens_per_lane=4000", "seed=3", "step=1", "data.max_length=9000", "out=plan.json")
    assert list(from_json(Path("plan.json").read_bytes()).lengths) == presets.draw("web", 32000, 9000, 3, 1)


def test_pipelines_are_honoured(call: Call) -> None:
    layout = ["parallel.tp=2", "parallel.pp=2", "parallel.virtual_stages=2", "parallel.stage_layers=[9,7]"]
    out = call.good(*H200, *QUICK, *layout, "preset=mcore", "tokens_per_lane=3000", "out=plan.json")
    plan = from_json(Path("plan.json").read_bytes())
    assert dataclasses.astuple(plan.layout)[:5] == (2, 4, 2, 2, 2)
    assert (plan.stage_layers, plan.schedule) == ((9, 7), "interleaved")
    assert 12000 <= sum(plan.lengths) < 12000 + 8192  # tokens_per_lane x lanes x pp
    assert words(out, "layout") == ["2 lanes of tp 2 x pp 2 (8 ranks, 4 lanes a node); interleaved, 2 chunks a stage, stages of 9, 7 layers"]
    assert [line.split(":")[0] for line in words(out, "memory")] == ["stage 0", "stage 1"]
    assert words(out, "1F1B bound") == ["there is none for the interleaved schedule"]


def test_the_bound_of_1f1b(call: Call) -> None:
    pytest.importorskip("scipy")
    out = call.good(*H200, *QUICK, "parallel.pp=4", "preset=mcore", "tokens_per_lane=4096", "out=plan.json")
    ratio = number(out, r"makespan ([\d.]+) x the lower bound of 1F1B")
    assert 1 <= ratio <= number(out, r"makespan ([\d.]+) x the universal") + 1e-9


def test_the_corpus_of_the_config(call: Call) -> None:
    with IndexedWriter(Path("corpus"), np.uint16) as writer:
        writer.add_many(np.ones(8000, np.uint16), [10, 190, 600] * 10)
    settings = ["data.train=[{prefix: corpus}]", "data.prepare.kind=none", "data.max_length=500", "data.tokens_per_step=2000"]
    call.good(*settings, *QUICK, "step=1", "steps=2", "out=plans.jsonl")
    source = open_training(compose(settings).data, 100)
    assert [list(plan.lengths) for plan in read_plans("plans.jsonl")] == [source.step(step).lengths.tolist() for step in (1, 2)]
    assert [plan.step for plan in read_plans("plans.jsonl")] == [1, 2]


def test_the_longest_document_that_a_run_would_keep(call: Call) -> None:
    assert "note         the longest" not in call.good(*H200, *QUICK, f"lengths={call.lengths([131072, 5])}")
    out = call.good(*H200, *QUICK, f"lengths={call.lengths([131073, 5])}")
    assert "note         the longest document has 131073 tokens, more than data.max_length=131072" in out
    assert "more than data.max_length=4000" in call.good(*H200, *QUICK, f"lengths={call.lengths([5000])}", "data.max_length=4000")


def test_pictures(call: Call) -> None:
    out = call.good(*H200, *QUICK, f"lengths={call.lengths(LENGTHS)}", "svg=g.svg", "histogram=h.svg", "trace=t.json", "theme=dark", "chart=true")
    assert Path("g.svg").read_text().startswith("<svg")
    assert Path("h.svg").read_text().startswith("<svg")
    assert json.loads(Path("t.json").read_text())["traceEvents"]
    assert "lane" in out
    again = call.good(*H200, *QUICK, f"lengths={call.lengths(LENGTHS)}", "svg=g.svg", "theme=light")  # its own may be replaced
    assert "wrote        g.svg (Gantt chart of step 0)" in again


# -------------------------------------------------------------------------------------------------------------- refusing
@pytest.mark.parametrize(
    ("value", "told"),
    [
        ([], "is an empty list: a step needs at least one document"),
        ([[5], []], "step 1 is an empty list"),
        ([5, 0], "document 1 has length 0; every document needs at least 1 token"),
        ([[5], [7, -3]], "step 1: document 1 has length -3"),
        ([5, 1.5], "document 1 is a fraction (1.5)"),
        ([True], "document 0 is true or false"),
        ([5, "7"], 'document 1 is text ("7")'),
        ([5, None], "document 1 is null"),
        ([[5], 6], "item 1 is a number (6) among lists"),
        ({"lengths": [5]}, "holds an object"),
        ("[5, 6", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("\x00\x01", "is not JSON"),
    ],
)
def test_lengths_that_make_no_step(call: Call, value: Any, told: str) -> None:
    assert told in call.refused(*H200, f"lengths={call.lengths(value)}", "out=plan.json")


def test_lengths_that_can_not_be_read(call: Call) -> None:
    assert "nowhere.json does not exist" in call.refused(*H200, "lengths=nowhere.json")
    assert "is a folder" in call.refused(*H200, f"lengths={call.folder}")


def test_a_document_that_fits_nowhere(call: Call) -> None:
    said = call.refused(*H200, f"lengths={call.lengths([50_000_000, 7])}", "out=plan.json")
    for told in ("50000000 tokens", "GB", "full", "what would make it fit"):
        assert told in said


def test_no_memory_for_activations(call: Call) -> None:
    said = call.refused("model=gpt_70b", "cluster=h200_4x8", "precision=bf16", f"lengths={call.lengths(LENGTHS)}")
    assert "no memory is left for activations" in said
    assert "GB" in said


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["parallel.tp=3"], "parallel.tp=3 does not divide"),
        (["parallel.tp=2", "parallel.pp=3"], "does not divide cluster.nodes"),
        (["parallel.pp=2", "parallel.stage_layers=[9,8]"], "must have parallel.pp=2 stages and model.layers=16"),
        (["model=gpt_9b"], "model=gpt_9b does not exist; nearest: gpt_8b"),
        (["length=x.json"], "length= is neither a key of this tool nor a group of settings; nearest: lengths"),
        (["data.maxlength=5"], "data.maxlength is not a setting; nearest: data.max_length"),
        (["preset=web"], "lengths= and preset= are both given"),
        (["seed=1"], "seed= belongs to preset=NAME"),
        (["step=1"], "holds 1 step, step 0 to 0; asked for: step=1"),
        (["steps=2"], "asked for: step=0 steps=2"),
        (["steps=0"], "steps=0 is not a whole number of at least 1"),
        (["step=x"], "step=x is not a whole number of at least 0"),
        (["theme=blue"], "theme=blue is not known; legal here: auto, light, dark"),
        (["overwrite=maybe"], "overwrite=maybe is neither true nor false"),
        (["out="], "out= names no file"),
        (["out=nowhere/plan.json"], "the folder nowhere does not exist"),
        (["out=folder"], "out=folder is a folder"),
        (["out=foreign.json"], "out=foreign.json exists and is not what this tool writes there"),
        (["svg=foreign.json"], "svg=foreign.json exists and is not what this tool writes there"),
        (["svg=a.svg", "histogram=a.svg"], "is the file of another output, too"),
        (["lengths=again.json"], "lengths= is given twice"),
        (["plan.json"], "'plan.json' is no setting"),
        (["--cfg", "job"], "'--cfg' is no setting"),
    ],
)
def test_wrong_requests(call: Call, argv: list[str], told: str) -> None:
    (call.folder / "folder").mkdir()
    (call.folder / "foreign.json").write_text("[1, 2]")
    lengths = call.lengths(LENGTHS)
    assert told in call.refused(*H200, f"lengths={lengths}", *argv)
    assert (call.folder / "foreign.json").read_text() == "[1, 2]"


def test_wrong_presets_and_corpora(call: Call) -> None:
    assert "preset=wiki is not known; legal here: wikipedia" in call.refused(*H200, "preset=wiki")
    assert "tokens_per_lane=0 is not a whole number of at least 1" in call.refused(*H200, "preset=web", "tokens_per_lane=0")
    said = call.refused("data=corpus", "data.train=[{prefix: here}]")
    assert "the corpus here.bin and .idx does not exist" in said
    assert "tools/preprocess_data.py" in said
    assert "pretrain_gpt.py makes it" in call.refused("data.prepare.folder=nowhere")


def test_several_steps_need_a_file_for_several(call: Call) -> None:
    said = call.refused(*H200, f"lengths={call.lengths([[5], [6]])}", "out=plan.json")
    assert "holds one plan, but there are 2 steps; write out=NAME.jsonl" in said


def test_files_are_replaced_only_on_purpose(call: Call) -> None:
    path = call.plan()
    before = path.read_bytes()
    call.plan(LENGTHS[:4])  # a plan of this tool gives way to another
    assert path.read_bytes() != before
    path.write_text("mine")
    assert "overwrite=true" in call.refused(*H200, f"lengths={call.lengths(LENGTHS)}", f"out={path}")
    call.plan(LENGTHS, "overwrite=true")
    assert path.read_bytes() == before
    (call.folder / "run").mkdir()
    dump_run(compose([]), call.folder / "run" / "run.yaml")
    assert "records of a run" in call.refused(*H200, f"lengths={call.lengths(LENGTHS)}", "out=run/plans.jsonl")


# --------------------------------------------------------------------------------------------------------- as a program
def run(*argv: str, cwd: Path, code: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *argv] if code else [sys.executable, str(ROOT / "tools/plan.py"), *argv]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=120)


def test_as_a_program(call: Call) -> None:
    path = call.plan()
    result = run("replay", str(path), cwd=call.folder)
    assert (result.returncode, result.stderr) == (0, "")
    assert "holds all invariants" in result.stdout
    result = run("replay", "nowhere", cwd=call.folder)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1


def test_neither_torch_nor_hydra_where_they_are_not_needed(call: Call) -> None:
    path = call.plan()
    block = "import sys; sys.modules.update(dict.fromkeys({blocked})); sys.path.insert(0, {tools!r}); import plan; sys.exit(plan.main(sys.argv[1:]))"
    for blocked, argv in (
        (["torch", "hydra", "omegaconf", "scipy"], ["replay", str(path), "svg=x.svg"]),
        (["torch", "scipy"], [*H200, f"lengths={call.lengths(LENGTHS)}", "baselines=false"]),
    ):
        result = run(*argv, cwd=call.folder, code=block.format(blocked=blocked, tools=str(ROOT / "tools")))
        assert (result.returncode, result.stderr) == (0, "")


def test_help_names_every_key(call: Call) -> None:
    out = call.good("--help")
    keys = call.tool.KEYS
    assert all(re.search(rf"^    {key} +{re.escape(text)}", out, re.MULTILINE) for key, text in keys.items())
    assert "KEYS" not in out
    assert re.findall(r"\w+", keys["preset"])[2:] == [*presets.PRESETS[:-1], "or", presets.PRESETS[-1]]


def test_scores_are_the_simulators(call: Call) -> None:
    plan = from_json(call.plan().read_bytes())
    assert plan.predicted.seconds == pytest.approx(simulate(plan).makespan, rel=1e-5)
