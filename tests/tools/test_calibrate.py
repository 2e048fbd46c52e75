"""tools/calibrate.py: a profile that the settings accept, coefficients that are known, and requests that are refused."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import re
import shutil
import sys
import time

import numpy as np
import pytest
import torch
from plan_tool_helpers import ROOT

from megadcp.config.check import UserError
from megadcp.config.load import compose
from megadcp.config.schema import GemmFlops
from megadcp.plan.basis import basis_from
from megadcp.plan.cost import CostModel
from megadcp.plan.step_plan import Recompute

NAMES = ("calibrate", "calibrate_measure", "calibrate_ranks", "calibrate_file", "calibrate_fit")
TINY = ["model.layers=2", "model.hidden=32", "model.heads=2", "model.kv_heads=2", "model.head_dim=16", "model.ffn=48", "model.vocab=64"]
SMALL = [*TINY, "data.max_length=48", "data.tokens_per_step=96", "quick=true", "cluster.device=cpu"]
MEASURED = {
    "gemm_flops.fp32", "gemm_half_tokens", "attention_flops", "attention_half_length", "layer_overhead_seconds", "memory_bandwidth", "memory_bytes",
    "node_bytes", "node_latency", "ring_step_seconds", "reduce_bytes",
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("time_limit")


@pytest.fixture
def tool(monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("calibrate")
    for name in NAMES:  # the fixture's end takes them out again
        monkeypatch.setitem(sys.modules, name, sys.modules[name])
    yield module
    torch.set_num_threads(threads)


@pytest.fixture
def configs(tmp_path):
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    return tmp_path / "configs"


def flat(hardware):
    values = dataclasses.asdict(hardware)
    return {**{f"gemm_flops.{rate}": value for rate, value in values.pop("gemm_flops").items()}, **values}


# -------------------------------------------------------------------------------------------------------------------- end to end
@pytest.mark.parametrize("processes", [1, 2])
def test_the_profile_can_be_used_and_says_where_its_numbers_come_from(tool, configs, capsys, monkeypatch, processes):
    for name in ("calibrate", "calibrate_measure"):
        monkeypatch.setattr(sys.modules[name], "QUICK", dataclasses.replace(tool.QUICK, rounds=1, sizes=3, steps=2, seconds=1.0))
    out = configs / "hardware" / "mine.yaml"
    assert tool.main([*SMALL, f"out={out}", f"processes={processes}"]) == 0
    said = capsys.readouterr().out
    for line in ("matrix products", "attention", "microbatches", "held-out packs", "held-out steps"):
        assert re.search(rf"^{line} .*median error \d+\.\d%, worst \d+\.\d%, \d+ samples", said, re.MULTILINE), line
    assert "CPU seconds of the process" in said
    assert ("messages" in said) == (processes == 2)
    found, base = (flat(compose([f"hardware={name}"], configs=configs).hardware) for name in ("mine", "cpu"))
    changed = {field for field in found if found[field] != base[field] and field != "name"}
    expected = MEASURED if processes == 2 else MEASURED - {"node_bytes", "node_latency", "ring_step_seconds", "reduce_bytes"}
    assert changed == expected
    text = out.read_text()
    for field in found:
        line = next(line for line in text.splitlines() if line.strip().startswith(f"{field.rpartition('.')[2]}:"))
        if field in ("name", "gemm_flops.bf16", "gemm_flops.fp8"):
            continue
        assert ("kept from cpu" in line) == (field not in expected), line
    assert text.startswith("# Measured by tools/calibrate.py")
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(".")] == []


def test_a_failing_rank_is_told(tool):
    ranks = sys.modules["calibrate_ranks"]

    def work(device, pool):
        if pool.rank == 1:
            raise ValueError("rank one can't")
        return pool.rank

    with pytest.raises(RuntimeError, match="rank one can't"):
        ranks.on_ranks(2, "cpu", 1, work)
    assert ranks.on_ranks(2, "cpu", 1, lambda device, pool: (pool.rank, pool.lanes.size)) == [(0, 2), (1, 2)]


# --------------------------------------------------------------------------------------------------------------------------- fit
def measured_on(tool, config):
    """What a machine would measure that behaves exactly as the config's profile says; attention is half as fast as alone in the model."""
    measure, cost, model = sys.modules["calibrate_measure"], CostModel(basis_from(config)), config.model
    half, attention_half = config.hardware.gemm_half_tokens, config.hardware.attention_half_length
    found = measure.Compute(optimizer_seconds=1e-3)
    for tokens in (4, 16, 64, 256, 1024):
        seconds = 3 * cost.flops_per_token * (tokens + half) / (2 * config.hardware.gemm_flops.fp32)  # twice as fast alone
        found.linear[tokens] = (seconds / 3, 2 * seconds / 3)
    for length in (8, 32, 128, 512):
        pack = measure.near(length, 1024)
        work = sum(each * each + attention_half * each for each in pack)
        seconds = 3.5 * 2 * model.head_dim * model.heads * work / config.hardware.attention_flops
        found.attention[pack] = (seconds / 3.5, 2.5 * seconds / 3.5)
    random = np.random.default_rng(0)
    packs = [measure.mixed(int(random.integers(20, 1024)), random.uniform(5, 400), 512, random) for _ in range(30)]
    samples = [measure.Sample(pack, Recompute(), cost.seconds(measure.microbatch_of(pack)), 1.0) for pack in packs]
    found.fitted, found.held_out = samples[:20], samples[20:]
    full = Recompute("full", model.layers)
    found.recomputed = [measure.Sample(pack, full, cost.seconds(measure.microbatch_of(pack, full)), 1.0) for pack in packs[:5]]
    return found


def test_the_coefficients_of_a_machine_are_found(tool):
    ranks = sys.modules["calibrate_ranks"]
    base = compose(["run.sample_prompt=''"])
    rates = GemmFlops(33e9, base.hardware.gemm_flops.bf16, base.hardware.gemm_flops.fp8)
    truth = dataclasses.replace(
        base.hardware, gemm_flops=rates, gemm_half_tokens=11.0, attention_flops=21e9, attention_half_length=222.0, layer_overhead_seconds=3e-4,
        node_bytes=3e9, node_latency=2e-4, ring_step_seconds=4e-4, reduce_bytes=5e8,
    )  # fmt: skip
    compute = measured_on(tool, dataclasses.replace(base, hardware=truth))
    messages = [
        ranks.Message(size, kind, 1 - kind, size / truth.node_bytes + kind * truth.node_latency + (1 - kind) * truth.ring_step_seconds)
        for size in (1e3, 1e5, 1e7)
        for kind in (0, 1)
    ]
    profile = tool.fit_profile(base, compute, ranks.Communication(messages, truth.reduce_bytes))
    expected = flat(truth) | {"memory_bandwidth": 20 * sys.modules["calibrate_fit"].cost_parameters(base) / 1e-3}
    found = flat(profile.hardware)
    for field in set(expected) - {"name", "peak_flops"}:
        assert found[field] == pytest.approx(expected[field], rel=1e-6), field
    lines = tool.test_lines(dataclasses.replace(base, hardware=profile.hardware), compute)
    assert all("median error 0.0%, worst 0.0%" in line for line in lines)
    assert "recompute full" in lines[1]


def test_the_error_of_what_does_not_fit_is_told(tool):
    base = compose(["run.sample_prompt=''"])
    compute = measured_on(tool, base)
    compute.held_out = [dataclasses.replace(one, seconds=one.seconds * 1.25) for one in compute.held_out]
    profile = tool.fit_profile(base, compute, None)
    lines = tool.test_lines(dataclasses.replace(base, hardware=profile.hardware), compute)
    assert "median error 20.0%, worst 20.0%, 10 samples" in lines[0]
    span = sys.modules["calibrate_measure"].Span
    steps = tool.step_lines([(1.0, span(1.0, 2.0)), (3.0, span(2.0, 2.0))], "CPU seconds of the process")
    assert "median error 25.0%, worst 50.0%, 2 samples (CPU" in steps[0]
    assert "median error 50.0%" in steps[1]
    assert len(tool.step_lines([(1.0, span(1.0, 1.0))], "wall clock")) == 1


def test_ranks_are_averaged_and_the_slowest_decides_a_step(tool):
    measure, ranks = sys.modules["calibrate_measure"], sys.modules["calibrate_ranks"]
    one = measure.Compute({4: (1.0, 2.0)}, {(8, 7): (1.0, 1.0)}, [measure.Sample((3,), Recompute(), 1.0, 2.0)], [], [], 1.0)
    two = measure.Compute({4: (3.0, 4.0)}, {(8, 7): (2.0, 4.0)}, [measure.Sample((3,), Recompute(), 3.0, 4.0)], [], [], 3.0)
    mean = ranks.mean_compute([one, two])
    assert mean == measure.Compute({4: (2.0, 3.0)}, {(8, 7): (1.5, 2.5)}, [measure.Sample((3,), Recompute(), 2.0, 3.0)], [], [], 2.0)
    both = [ranks.Communication([ranks.Message(10, 1, 0, seconds)], rate) for seconds, rate in ((1.0, 4.0), (2.0, 8.0))]
    assert ranks.mean_communication(both) == ranks.Communication([ranks.Message(10, 1, 0, 1.5)], 6.0)
    span = measure.Span
    assert ranks.slowest([[(1.0, span(1.0, 5.0))], [(1.0, span(2.0, 4.0))]]) == [(1.0, span(2.0, 5.0))]


# ------------------------------------------------------------------------------------------------------------------------- measuring
def test_cpu_seconds_leave_out_what_others_take(tool):
    clock = sys.modules["calibrate_measure"].Clock(torch.device("cpu"), 1)
    span = clock.span(lambda: time.sleep(0.2))
    assert span.wall >= 0.2 > 5 * span.seconds
    assert sys.modules["calibrate_measure"].Clock(torch.device("cpu"), 2).name == "wall clock"


def test_medians_leave_out_the_first_round_and_keep_to_a_budget(tool):
    measure = sys.modules["calibrate_measure"]
    seen = iter([(100.0, 1.0), (1.0, 1.0), (3.0, 5.0), (2.0, 3.0)])
    assert measure.medians({"a": lambda: next(seen)}, measure.Effort(rounds=3)) == {"a": (2.0, 3.0)}
    calls = []
    measure.medians({"a": lambda: calls.append(1) or (1.0,)}, measure.Effort(rounds=50, seconds=0.0))
    assert len(calls) == 1 + measure.LEAST_ROUNDS


def test_packs_are_what_was_asked_for_and_the_held_out_ones_are_others(tool):
    measure = sys.modules["calibrate_measure"]
    effort = measure.Effort()
    fitted, tested = measure.packs_to_fit(1024, 512, effort, 1), measure.packs_to_test(1024, 512, effort, 1)
    assert measure.packs_to_fit(1024, 512, effort, 1) == fitted != measure.packs_to_fit(1024, 512, effort, 2)
    assert not set(fitted) & set(tested)
    for pack in fitted + tested:
        assert min(pack) >= 1
        assert max(pack) <= 512
        assert sum(pack) <= 1024
    assert max(map(sum, fitted)) == 1024
    assert {len(pack) == 1 for pack in fitted} == {True, False}
    for length in (1, 2, 9, 300):
        assert all(one != other for one, other in itertools.pairwise(measure.near(length, 4096)))


# ------------------------------------------------------------------------------------------------------------------------- refused
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "out= must say"),
        (["out=x.json"], "name it NAME.yaml"),
        (["out=a b.yaml"], "name it NAME.yaml"),
        (["out=nowhere/x.yaml"], "nowhere does not exist"),
        (["out=x.yaml", "hello"], "'hello' is no setting"),
        (["out=x.yaml", "proceses=2"], "nearest: processes"),
        (["out=x.yaml", "processes=0"], "processes=0 is not a whole number of at least 1"),
        (["out=x.yaml", "tokens=many"], "tokens=many is not a whole number"),
        (["out=x.yaml", "quick=maybe"], "quick=maybe is neither true nor false"),
        (["out=x.yaml", "out=y.yaml"], "out= is given twice"),
        (["out=x.yaml", "model=gpt_9b"], "nearest: gpt_8b"),
        (["out=x.yaml", "model.hiden=3"], "model.hidden"),
        (["out=x.yaml", "parallel.tp=2", "cluster.processes=2"], "without tensor or pipeline parallelism"),
        (["out=x.yaml", "tokens=1_000_000_000_000"], "do not fit this device's memory"),
    ],
)
def test_a_wrong_request_is_one_line_and_leaves_nothing(tool, words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert tool.main([*words, "cluster.device=cpu"]) == 2
    said = capsys.readouterr()
    assert re.fullmatch(r"error: [^\n]+\n", said.err), said.err
    assert message in said.err
    assert list(tmp_path.iterdir()) == []


def test_only_its_own_files_are_replaced(tool, tmp_path, capsys):
    file = sys.modules["calibrate_file"]
    foreign = tmp_path / "cpu.yaml"
    foreign.write_text("# by hand\nname: cpu\n")
    assert tool.main([f"out={foreign}"]) == 2
    assert "was not written by this tool" in capsys.readouterr().err
    assert file.check_output(str(foreign), overwrite=True) == foreign
    own = tmp_path / "mine.yaml"
    own.write_text(f"{file.MARK}: something\n")
    assert file.check_output(str(own), overwrite=False) == own


def test_half_a_profile_is_never_written(tool, tmp_path):
    file, config = sys.modules["calibrate_file"], compose(["run.sample_prompt=''"])
    out = tmp_path / "mine.yaml"
    out.write_text("before")
    wrong = dataclasses.replace(config.hardware, attention_flops=-1.0)
    with pytest.raises(UserError, match="attention_flops"):
        file.write_profile(out, file.profile_text(wrong, [], {}), config)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]


def test_every_number_survives_the_file(tool, tmp_path):
    import yaml

    file, config = sys.modules["calibrate_file"], compose(["run.sample_prompt=''"])
    odd = dataclasses.replace(
        config.hardware, gemm_half_tokens=0.0, node_latency=1.2345e-7, memory_bytes=2.5e10, attention_half_length=1e5, name="odd"
    )
    out = tmp_path / "odd.yaml"
    file.write_profile(out, file.profile_text(odd, ["one", "two"], {"name": "said"}), config)
    read = yaml.safe_load(out.read_text())
    assert {**{f"gemm_flops.{rate}": value for rate, value in read.pop("gemm_flops").items()}, **read} == flat(odd)


def test_help_names_every_key(tool, capsys):
    assert tool.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(re.search(rf"^    {key} ", said, re.MULTILINE) for key in tool.KEYS)
