"""tools/gpu_check.py on a CPU: the whole of it with tiny sizes and without Hydra or YAML, faults that end nothing else, time, and the refit.

What it measures on a GPU, nobody has seen yet.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from plan_tool_helpers import ROOT

from megadcp.config.check import UserError
from megadcp.config.load import compose
from megadcp.config.schema import GemmFlops
from megadcp.plan.basis import basis_from
from megadcp.plan.cost import CostModel
from megadcp.plan.step_plan import Recompute

SECTIONS = ["correct", "recompute", "memory", "gemm", "attention", "fit", "steps", "layers"]
BLOCKED = ["hydra", "omegaconf", "wandb", "yaml", "rich", "sentencepiece", "safetensors", "transformers", "scipy"]
PARTS = ("", "_table", "_child", "_setup", "_exact", "_speed", "_predict", "_profile")

pytestmark = pytest.mark.usefixtures("time_limit")


@pytest.fixture(scope="module")
def tool():
    """The module, with its parts as attributes."""
    sys.path.insert(0, str(ROOT / "tools"))
    before = dict(sys.modules)
    module = importlib.import_module("gpu_check")
    for part in PARTS[1:]:
        setattr(module, part[1:], importlib.import_module(f"gpu_check{part}"))
    yield module
    sys.path.remove(str(ROOT / "tools"))
    for name in set(sys.modules) - set(before):
        if name.startswith(("gpu_check", "calibrate")):
            del sys.modules[name]


# ------------------------------------------------------------------------------------------------------------------- the whole of it
@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One run in processes that can import neither Hydra nor YAML nor most else."""
    folder = tmp_path_factory.mktemp("gpu_check")
    (folder / "sitecustomize.py").write_text(
        textwrap.dedent(f"""
        import sys
        class Blocked:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in {BLOCKED}:
                    raise ImportError(f"{{name}} is blocked")
        sys.meta_path.insert(0, Blocked())
        """)
    )
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tools" / "gpu_check.py"), "--device", "cpu", "--quick", "--seconds", "300"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads((folder / "gpu_check.json").read_text())


def test_the_file_has_everything(whole):
    report = whole[1]
    assert (report["version"], report["tool"], report["quick"]) == (1, "gpu_check", True)
    assert list(report["sections"]) == SECTIONS
    for name, section in report["sections"].items():
        assert section["status"] == "ok", (name, section)
        assert section["left_out"] == []
        assert [row for row in section["rows"] if "status" not in row], name
    device = report["device"]
    assert (device["cuda"], device["torch"], device["cuda_version"]) == (False, torch.__version__, torch.version.cuda)
    assert device["name"].startswith("CPU")


def test_it_says_plainly_that_it_was_a_cpu(whole):
    said, report = whole
    assert "A CPU, NO GPU" in said
    assert all(target["found"] is None and target["met"] is None for target in report["targets"])
    assert len(report["targets"]) == 3
    assert all(row["mfu"] is None for row in report["sections"]["layers"]["rows"] if "status" not in row)
    peaks = [row["peak_ratio"] for row in report["sections"]["memory"]["rows"] if "status" not in row]
    assert peaks
    assert set(peaks) == {None}


def test_transformer_engine_is_said_to_be_absent(whole):
    said, report = whole
    for name in ("correct", "recompute", "memory", "gemm", "attention", "layers"):
        rows = [row for row in report["sections"][name]["rows"] if row["backend"] == "te"]
        assert rows
        assert {row["status"] for row in rows} == {"not installed"}, name
    assert "Transformer Engine: not installed" in said
    assert re.search(r"te \(\d+ rows\): not installed", said)


def test_results_are_right_here(whole):
    sections = whole[1]["sections"]
    rows = [row for row in sections["correct"]["rows"] if row["backend"] == "torch" and "status" not in row]
    assert [row["format"] for row in rows] == ["bf16", "fp8_current", "fp8_block"]
    assert all(row["ok"] and 0 < row["logits_error"] < row["gradient_error"] * 3 for row in rows)
    assert rows[0]["gradient_error"] < rows[1]["gradient_error"]
    again = [row for row in sections["recompute"]["rows"] if "status" not in row]
    assert len(again) == 9
    assert all(row["repeats"] and row["loss_same"] and row["gradients_same"] and row["largest"] == 0 for row in again)


def test_kept_bytes_are_those_of_the_memory_model(whole):
    rows = [row for row in whole[1]["sections"]["memory"]["rows"] if row.get("format") == "bf16" and "status" not in row]
    assert [row["level"] for row in rows] == ["none", "selective", "mlp", "full"]
    for row in rows:
        assert row["ratio"] == pytest.approx(1, rel=0.02), row


def test_the_fit_and_the_steps(whole):
    fit, steps = (whole[1]["sections"][name] for name in ("fit", "steps"))
    assert set(fit["profile"]["hardware"]) == {field.name for field in dataclasses.fields(compose().hardware)}
    assert len(fit["data"]["bf16"]["fitted"]) >= 2
    assert {row["profile"] for row in steps["rows"]} == {"fitted"}
    assert {row["recompute"] for row in steps["rows"]} == {"auto", "selective", "mlp", "full"}
    assert all(row["predicted_s"] > 0 and row["measured_s"] > 0 for row in steps["rows"])
    assert steps["worst_error"] >= steps["median_error"] >= 0


# ------------------------------------------------------------------------------------------------------------------------ faults
def request(**values):
    return {"device": "cpu", "quick": True, "sections": SECTIONS, "until": time.time() + 60, "results": {}, **values}


def events_of(child, asked):
    found = []
    code = child.run(asked, found.append)
    return code, {each["section"]: each for each in found if "section" in each}


def test_a_section_that_fails_ends_nothing_else(tool, monkeypatch):
    rows = {"rows": [], "left_out": [], "failed_rows": 0}

    def broken(setup, end):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(tool.child, "SECTIONS", {"correct": (broken, 1), "steps": (lambda setup, end, earlier: {**rows, "seen": list(earlier)}, 1)})
    code, found = events_of(tool.child, request(sections=["correct", "steps"]))
    assert code == 0
    assert (found["correct"]["status"], found["correct"]["error"]) == ("failed", "RuntimeError: no such kernel")
    assert "in broken" in found["correct"]["trace"]
    assert (found["steps"]["status"], found["steps"]["seen"]) == ("ok", ["correct"])


def test_a_row_that_fails_is_one_line(tool):
    rows = tool.setup.Rows(tool.setup.Setup("cpu", True), time.monotonic() + 60)

    def work(error):
        if error:
            raise error
        return {"rate": float("nan"), "seconds": 1.0}

    missing, memory = tool.setup.Unavailable("not installed"), torch.OutOfMemoryError("CUDA out of memory")
    for number, error in enumerate((None, missing, memory, ValueError("bad\nshape"))):
        rows.add({"number": number}, lambda error=error: work(error))
    assert rows.rows == [
        {"number": 0, "rate": None, "seconds": 1.0},
        {"number": 1, "status": "not installed"},
        {"number": 2, "status": "out of memory"},
        {"number": 3, "status": "failed: ValueError: bad"},
    ]
    assert rows.result()["failed_rows"] == 1


def test_a_lost_device_ends_the_process_but_keeps_its_rows(tool, monkeypatch):
    def losing(setup, end):
        rows = tool.setup.Rows(setup, end)
        rows.add({"number": 0}, lambda: {"rate": 1.0})
        monkeypatch.setattr(setup, "wait", lambda: (_ for _ in ()).throw(RuntimeError("illegal memory access")))
        rows.add({"number": 1}, lambda: (_ for _ in ()).throw(RuntimeError("illegal memory access")))
        return rows.result()

    monkeypatch.setattr(tool.child, "SECTIONS", {"correct": (losing, 1), "gemm": (losing, 1)})
    code, found = events_of(tool.child, request(sections=["correct", "gemm"]))
    assert code == tool.child.LOST
    assert list(found) == ["correct"]
    assert found["correct"]["status"] == "failed"
    assert "device was lost" in found["correct"]["error"]
    assert [row["number"] for row in found["correct"]["rows"]] == [0, 1]


def test_what_there_is_no_time_for_is_named(tool):
    code, found = events_of(tool.child, request(sections=["correct", "attention"], until=time.time() - 1))
    assert code == 0
    assert {each["status"] for each in found.values()} == {"partial"}
    assert found["correct"]["rows"] == []
    assert found["correct"]["left_out"] == [f"{backend} {format}" for backend in ("torch", "te") for format in ("bf16", "fp8_current", "fp8_block")]
    assert "torch 16 8" in found["attention"]["left_out"]


def test_fp8_that_quantises_nothing_is_found(tool, monkeypatch):
    setup = tool.setup.Setup("cpu", True)
    real, case = setup.backend, tool.setup.Case

    def backend(asked, dtype=torch.bfloat16):
        return real(asked if asked.format == "fp32" else case(asked.backend, "bf16"), dtype)

    monkeypatch.setattr(setup, "backend", backend)
    monkeypatch.setattr(setup, "batch", lambda lengths, format, vocab, make=setup.batch: make(lengths, "fp8_block", vocab))
    found = tool.exact.correct(setup, time.monotonic() + 60)
    told = {row["format"]: row.get("status", "") for row in found["rows"] if row["backend"] == "torch"}
    assert told["bf16"] == ""
    assert "nothing was quantised" in told["fp8_current"]
    assert "nothing was quantised" in told["fp8_block"]


FAKE = """
import json, os, sys, time
asked = json.load(sys.stdin)
out = os.fdopen(int(sys.argv[1]), "w")
def send(event):
    out.write(json.dumps(event) + "\\n"); out.flush()
send({"device": {"cuda": False, "name": "CPU"}})
for name in asked["sections"]:
    send({"begin": name, "seconds": 0.1})
    if name == "memory":
        print("last words", flush=True)
        ACTION
    send({"section": name, "status": "ok", "seconds": 0.0, "rows": [], "left_out": [], "failed_rows": 0})
"""


@pytest.mark.parametrize(
    ("action", "told"),
    [
        ("os.kill(os.getpid(), 11)", "the process ended with signal SIGSEGV"),
        ("sys.exit(3)", "the process ended with exit code 3"),
        ("time.sleep(600)", "no result within its time"),
    ],
)
def test_a_process_that_dies_or_hangs_is_replaced(tool, monkeypatch, tmp_path, action, told):
    child = tmp_path / "child.py"
    child.write_text(FAKE.replace("ACTION", action))
    monkeypatch.setattr(tool, "CHILD", child)
    monkeypatch.setattr(tool, "GRACE", 0.5)
    lines = []
    report = tool.measure(tool.parse(["--device", "cpu", "--quick", "--out", str(tmp_path / "x.json")]), lines.append)
    assert sorted(report["sections"]) == sorted(SECTIONS)
    assert {name for name, section in report["sections"].items() if section["status"] == "failed"} == {"memory"}
    assert told in report["sections"]["memory"]["error"]
    assert "last words" in report["sections"]["memory"]["output"]
    assert len(lines) == len(SECTIONS)
    assert any("its last words: last words" in line for line in tool.table.report_lines(report))


def test_a_process_that_never_begins_is_not_started_for_ever(tool, monkeypatch, tmp_path):
    child = tmp_path / "child.py"
    child.write_text("raise SystemExit(1)")
    monkeypatch.setattr(tool, "CHILD", child)
    report = tool.measure(tool.parse(["--device", "cpu", "--quick", "--only", "gemm,fit", "--out", str(tmp_path / "x.json")]), lambda line: None)
    assert [section["status"] for section in report["sections"].values()] == ["failed", "failed"]


# ---------------------------------------------------------------------------------------------------------------------- requests
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--only", "gem"], "--only=gem is no section; nearest: gemm"),
        (["--seconds", "0"], "--seconds=0 leaves no time"),
        (["--device", "cpu"], "add --quick"),
        (["--out", "nowhere/x.json"], "nowhere does not exist"),
        (["--from", "nowhere.json"], "--from=nowhere.json can't be read"),
        (["--write-hardware", "x.json"], "name it NAME.yaml"),
    ],
)
def test_a_wrong_request_is_one_line(tool, words, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert tool.main(words) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(r"error: [^\n]+\n", said), said
    assert told in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_would_work(tool):
    found = []
    assert tool.child.run(request(device="cuda"), found.append) == 2
    assert "--device cpu --quick" in found[0]["refused"]


def test_settings_are_read_without_yaml(tool):
    for name in ("model/gpt_1b", "model/gpt_8b", "hardware/h200", "hardware/cpu"):
        path = ROOT / "configs" / f"{name}.yaml"
        assert tool.setup.read_settings(path) == yaml.safe_load(path.read_text()), name
    assert tool.setup.model_of("gpt_8b") == compose(["model=gpt_8b"]).model
    assert tool.setup.hardware_of("h200") == compose(["hardware=h200"]).hardware


# ------------------------------------------------------------------------------------------------------------------------- refit
@pytest.fixture(scope="module")
def known():
    """The coefficients of a machine, and a report of measurements that follow them exactly (linears are twice as fast alone as in the model)."""
    config = compose(["experiment=quickstart", "model=gpt_1b", "hardware=h200", "run.sample_prompt=''", "data.tokenizer.path=t"])
    model = dataclasses.replace(config.model, layers=2)
    truth = dataclasses.replace(
        config.hardware, gemm_flops=GemmFlops(config.hardware.gemm_flops.fp32, 555e12, 888e12), gemm_half_tokens=321.0, attention_flops=222e12,
        attention_half_length=444.0, layer_overhead_seconds=123e-6,
    )  # fmt: skip

    def cost_in(format):
        asked = dataclasses.replace(config, model=model, hardware=truth, precision=dataclasses.replace(config.precision, format=format))
        return CostModel(basis_from(asked))

    random, cost = np.random.default_rng(0), cost_in("bf16")
    sys.path.insert(0, str(ROOT / "tools"))
    from calibrate_measure import microbatch_of, mixed, near

    sys.path.remove(str(ROOT / "tools"))
    packs = [mixed(int(random.integers(256, 16384)), random.uniform(50, 9000), 16384, random) for _ in range(24)]
    full = Recompute("full", 2)

    def samples(cost, lengths, value=None):
        return [[list(pack), *((value.level, value.layers) if value else ("none", 0)), cost.seconds(microbatch_of(pack, value))] for pack in lengths]

    linear = []
    for tokens in (128, 512, 2048, 8192):
        seconds = 3 * cost.flops_per_token * (tokens + truth.gemm_half_tokens) / (2 * truth.gemm_flops.bf16)
        linear.append([tokens, seconds / 3, 2 * seconds / 3])
    attention = []
    for length in (64, 512, 4096, 16384):
        pack = near(length, 16384)
        work = sum(each * each + truth.attention_half_length * each for each in pack)
        seconds = 3.5 * 2 * model.head_dim * model.heads * work / truth.attention_flops
        attention.append([list(pack), seconds / 3.5, 2.5 * seconds / 3.5])
    data = {
        "model": dataclasses.asdict(model), "hardware": dataclasses.asdict(config.hardware), "device": "cuda", "max_length": 16384,
        "bf16": {
            "linear": linear, "attention": attention, "fitted": samples(cost, packs[:16]), "held_out": samples(cost, packs[16:]),
            "recomputed": samples(cost, packs[:3], full), "optimizer_seconds": 0.01,
        },
        "fp8_current": {"fitted": samples(cost_in("fp8_current"), packs[:16])},
    }  # fmt: skip
    section = {"status": "ok", "seconds": 1.0, "rows": [], "left_out": [], "failed_rows": 0, "data": data}
    device = {
        "cuda": True,
        "name": "NVIDIA H200",
        "memory_bytes": 150e9,
        "cuda_version": "13.0",
        "torch": "2.11.0",
        "python": "3.12.3",
        "te": "2.20.2",
    }
    return truth, {"version": 1, "tool": "gpu_check", "quick": False, "seconds": 1.0, "device": device, "sections": {"fit": section}, "targets": []}


def test_known_coefficients_are_found(tool, known):
    truth, report = known
    profile = tool.profile.profile_of(report["sections"]["fit"]["data"])
    for field in ("gemm_half_tokens", "attention_flops", "attention_half_length", "layer_overhead_seconds"):
        assert getattr(profile.hardware, field) == pytest.approx(getattr(truth, field), rel=1e-6), field
    for rate in ("fp32", "bf16", "fp8"):
        assert getattr(profile.hardware.gemm_flops, rate) == pytest.approx(getattr(truth.gemm_flops, rate), rel=1e-6), rate
    told = "\n".join(profile.lines)
    assert told.count("median error 0.0%, worst 0.0%") >= 5
    assert "fp8_current" in profile.comments["gemm_flops.fp8"]


def test_the_profile_is_written_from_a_file(tool, known, tmp_path, monkeypatch, capsys):
    truth, report = known
    monkeypatch.chdir(tmp_path)
    Path("report.json").write_text(json.dumps(report))
    Path("theirs.yaml").write_text("name: theirs\n")
    assert tool.main(["--from", "report.json", "--write-hardware", "theirs.yaml"]) == 2
    assert "was not written by this tool" in capsys.readouterr().err
    for _ in range(2):  # its own files it replaces
        assert tool.main(["--from", "report.json", "--write-hardware", "mine.yaml"]) == 0
    text = Path("mine.yaml").read_text()
    assert text.startswith("# Measured by tools/gpu_check.py: NVIDIA H200, torch 2.11.0")
    assert "A CPU was measured" not in text
    read = yaml.safe_load(text)
    assert read["gemm_flops"]["fp8"] == pytest.approx(truth.gemm_flops.fp8, rel=1e-5)
    assert (read["name"], read["gpus_per_node"], read["peak_flops"]) == ("mine", 8, 989e12)
    assert "kept from h200: not measured here" in next(line for line in text.splitlines() if line.startswith("net_bytes"))
    assert tool.setup.read_settings(tmp_path / "mine.yaml") == read


def test_without_measurements_there_is_no_profile(tool, known, tmp_path):
    report = json.loads(json.dumps(known[1]))
    del report["sections"]["fit"]["data"]["bf16"]["attention"]
    with pytest.raises(UserError, match=r"attention of it was not measured.*--only fit"):
        tool.profile.write_hardware(tmp_path / "x.yaml", report)
    with pytest.raises(UserError, match="no fit section"):
        tool.profile.write_hardware(tmp_path / "x.yaml", {"sections": {}})
    assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------------------------------------------------------------- targets
def test_targets(tool, known):
    def layer(backend, format, packing, mfu, tokens=8192, model="gpt_8b"):
        return {"backend": backend, "format": format, "model": model, "tokens": tokens, "packing": packing, "mfu": mfu}

    rows = [
        layer("torch", "bf16", "one document", 0.50), layer("torch", "bf16", "packed", 0.44), layer("te", "bf16", "packed", 0.99),
        layer("te", "fp8_current", "one document", 0.70), layer("te", "fp8_block", "packed", 0.61), layer("torch", "fp8_current", "packed", 0.30),
        layer("te", "fp8_current", "packed", 0.10, 4096), layer("te", "fp8_current", "packed", 0.10, 8192, "gpt_1b"),
        {**layer("te", "fp8_current", "packed", 0.0), "status": "out of memory"},
    ]  # fmt: skip
    linears = [
        {"what": "linears", "model": "gpt_8b", "format": "fp8_current", "both": 649.0},
        {"what": "product", "model": "gpt_8b", "format": "fp8"},
    ]
    sections = {"gemm": {"rows": linears}, "layers": {"rows": rows}}
    found = tool.table.targets_of({**known[1], "sections": sections})
    assert [(each["found"], each["met"]) for each in found] == [(649.0, False), (0.61, True), (0.44, False)]
    assert all(each["found"] is None for each in tool.table.targets_of({**known[1], "sections": sections, "quick": True}))
