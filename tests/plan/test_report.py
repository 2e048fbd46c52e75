"""The figures and lines of a report against a second calculation."""

from __future__ import annotations

import random
from dataclasses import replace

import plan_reference as ref
import pytest

from megadcp.nn import flops
from megadcp.plan.figures import Figures, Part, figures, flops_per_device, model_flops, ranks, tokens_per_second
from megadcp.plan.report import Beside, Side, aligned, comparison_lines, layout_line, summary_lines, table_lines
from megadcp.plan.simulate import simulate, step_seconds
from megadcp.plan.step_plan import Microbatch, Predicted, Recompute

LAYOUTS = [{"lanes": 8}, {"lanes": 4, "pp": 2}, {"lanes": 2, "pp": 2, "virtual_stages": 2, "tp": 2}]


def predicted(plan, **fields):
    timeline = simulate(plan)
    values = {
        "seconds": timeline.makespan,
        "peak_bytes": (10**9,) * plan.layout.pp,
        "lower_bound_seconds": timeline.makespan / 1.25,
        "policy": "joint",
    }
    return replace(plan, predicted=Predicted(**{**values, **fields}))


def one_step(step=0, makespan=2.0, static=2.0, alike=False, **fields):
    """Figures as nothing but the ratios needs them."""
    return replace(
        Figures(step, 3, 900, 960, 700, alike, {1: Part(2, 2, 200), 4: Part(1, 1, 700)}, {("none", 0): Part(3, 3, 900)}, (2, 1, 1, 1), makespan,
                makespan + 0.5, 1.6, static, (7 * 10**9,), 0.25, 10**15),
        **fields,
    )  # fmt: skip


def lines_of(basis, steps, **beside):
    return summary_lines(basis, steps, Beside(**beside))


@pytest.mark.parametrize("model", [ref.SMALL, ref.GPT_8B, replace(ref.GPT_1B, mlp="gelu"), replace(ref.SMALL, tied=True)])
def test_model_flops_are_those_of_the_trainer(model):
    lengths = [1, 17, 4096, 131072, 333]
    assert model_flops(ref.basis(model).model, lengths) == flops.flops(model, lengths)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_figures_of_random_plans(layout):
    for seed in range(4):
        plan = predicted(ref.random_plan(ref.basis(ref.SMALL, **layout), random.Random(seed)))
        found = figures(plan)
        assert found.documents == len(plan.lengths)
        assert (found.tokens, found.longest) == (sum(plan.lengths), max(plan.lengths))
        assert found.padded == sum(sum(one.padded) for one in plan.microbatches)
        for mix in (found.cp, found.recompute):
            assert sum(part.microbatches for part in mix.values()) == len(plan.microbatches)
            assert sum(part.documents for part in mix.values()) == found.documents
            assert sum(part.tokens for part in mix.values()) == found.tokens
        assert set(found.cp) == {one.cp for one in plan.microbatches}
        assert sum(found.per_lane) == sum(one.cp for one in plan.microbatches)
        assert found.whole == step_seconds(plan) > found.makespan
        # idle: all lanes' and stages' time, less what each microbatch takes on its lanes
        basis = ref.Basis.of(plan)
        busy = sum(sum(ref.stage_seconds(basis, one)) * one.cp for one in plan.microbatches)
        assert found.idle == pytest.approx(1 - busy / (plan.layout.lanes * plan.layout.pp * simulate(plan).makespan), abs=1e-9)


def test_throughput_counts_every_device():
    basis = ref.basis(ref.SMALL, lanes=2, tp=2, pp=2)
    assert ranks(basis) == 8
    steps = [one_step(), one_step(1, makespan=3.5)]
    assert tokens_per_second(steps) == pytest.approx(1800 / 6.5)
    assert flops_per_device(basis, steps) == pytest.approx(2e15 / 6.5 / 8)


def test_lines_of_one_step():
    basis = ref.basis(ref.SMALL, lanes=4)
    said = lines_of(
        basis,
        [one_step()],
        peak_flops=1e15,
        hardware="h200",
        baselines={"static-best": [2.5], "bucket": [float("inf")], "other": "is away"},
        planning=[0.0123],
    )
    assert said == [
        "documents    3 documents, 900 tokens, longest 700",
        "microbatches 3: 1 to 2 a lane and step, 1.2 on average; padding adds 6.67% tokens",
        "cp mix       cp 1  2 microbatches, 2 documents, 200 tokens (22.2%)",
        "             cp 4  1 microbatch, 1 document, 700 tokens (77.8%)",
        "recompute    none  3 microbatches, 3 documents, 900 tokens (100.0%)",
        "memory       7.0 GB peak of 126.9 GB usable (141 GB devices): 6%",
        "step         2.5 s: makespan 2 s + 0.5 s of gradient reduction and optimizer",
        "throughput   360 tokens/s, 90 per device",
        "MFU          10.0%: 100 of 1000 TFLOP/s (dense bf16) per device in model FLOPs (real tokens, causal attention, no recompute)",
        "idle         25.0% of all lanes' time is spent waiting",
        "bound        makespan 1.250 x the universal lower bound (1.6 s)",
        "gain         1.25x over static-best (2.5 s)",
        "             bucket fits the memory in no layout",
        "             other is away",
        "planning     12.3 ms, the first of this process",
    ]


def test_lanes_that_run_alike():
    said = lines_of(ref.basis(ref.SMALL, lanes=4), [one_step(per_lane=(2, 2, 2, 2))])
    assert "microbatches 3: 2 a lane and step; padding adds 6.67% tokens" in said


def test_a_gain_of_one_is_called_none():
    basis = ref.basis(ref.SMALL, lanes=4)

    def gain(steps, makespans):
        return next(line for line in lines_of(basis, steps, baselines={"static-best": makespans}) if line.startswith("gain"))

    assert gain([one_step()], [2.0]).endswith("1.00x over static-best (2 s), no gain: static-best is as good here")
    assert gain([one_step(alike=True)], [2.004]).endswith("no gain: all documents are equally long")
    assert gain([one_step()], [1.8]).endswith("0.90x over static-best (1.8 s), slower than it")
    assert "no gain" not in gain([one_step()], [2.02])
    both = gain([one_step(), one_step(7)], [2.0, 3.0])
    assert both.endswith("1.25x over static-best: median 1.25, least 1.00, most 1.50; no gain in 1 of 2 steps")
    assert gain([one_step(), one_step(7)], [2.0, 2.0]).endswith("no gain: static-best is as good here")
    assert gain([one_step(), one_step(7)], [3.0, float("inf")]).endswith("it fits the memory in 1 of 2 steps only")


def test_several_steps_name_the_worst():
    basis = ref.basis(ref.SMALL, lanes=4)
    steps = [one_step(3), one_step(4, makespan=4.0), one_step(5)]
    said = "\n".join(lines_of(basis, steps, planning=[0.001, 0.002, 0.009]))
    assert "3 steps with 9 documents, 2,700 tokens" in said
    assert "step         median 2.5 s, worst 4.5 s (step 4): the makespan + 0.5 s of gradient reduction and optimizer; 9.5 s together" in said
    assert "idle         25.0% of" in said  # the same in all of them
    assert "bound        makespan median 1.250, worst 2.500 (step 4) x the universal lower bound" in said
    assert "planning     median 2.0 ms, worst 9.0 ms (step 5)" in said
    table = table_lines(basis, steps, Beside(peak_flops=1e15, baselines={"static-best": [2.5, 4.0, 2.0]}, planning=[0.001, 0.002, 0.009]))
    assert [row.split()[0] for row in table] == ["step", "3", "4", "5"]
    assert table[2].split() == ["4", "3", "900", "700", "4", "4.5", "200", "5.6%", "25.0%", "2.500", "1.00", "2.0", "ms"]
    assert len({len(row) for row in table}) == 1
    many = table_lines(basis, [one_step(step) for step in range(50)], Beside())
    assert len(many) == 1
    assert "50 steps are too many" in many[0]


def test_recompute_is_told_by_level_with_its_layers():
    basis = ref.basis(ref.SMALL, lanes=4, pp=2)
    mix = {("full", 3): Part(1, 1, 300), ("none", 0): Part(1, 1, 300), ("full", 1): Part(1, 1, 300)}
    said = [" ".join(line.split()) for line in lines_of(basis, [one_step(recompute=mix, peak_bytes=(1, 2))])]
    assert "recompute none 1 microbatch, 1 document, 300 tokens (33.3%)" in said
    assert "full on 1 to 3 of 3 layers a stage 2 microbatches, 2 documents, 600 tokens (66.7%)" in said


def test_pipelines_tell_stages_and_the_bound_of_1f1b():
    basis = ref.basis(ref.SMALL, lanes=4, pp=2)
    step = one_step(peak_bytes=(100 * 10**9, 120 * 10**9))
    said = lines_of(basis, [step], bound_1f1b=[1.9])
    assert "             stage 1: 120.0 GB peak of 126.9 GB usable (141 GB devices): 95%" in said
    assert "1F1B bound   makespan 1.053 x the lower bound of 1F1B (1.9 s)" in said
    assert "1F1B bound   not computed: pip install scipy" in lines_of(basis, [step], bound_1f1b="not computed: pip install scipy")
    assert not any(line.startswith("1F1B") for line in lines_of(ref.basis(ref.SMALL, lanes=4), [one_step()], bound_1f1b=[1.9]))
    assert layout_line(basis) == "4 lanes of tp 1 x pp 2 (8 ranks, 8 lanes a node); 1f1b, stages of 3, 3 layers"


def test_unknown_peak():
    said = lines_of(ref.basis(ref.SMALL, lanes=4), [one_step()], hardware="cpu")
    assert any(line.startswith("MFU          not stated, no peak is known of cpu; 100 TFLOP/s per device") for line in said)


def test_side_by_side():
    small, large = ref.basis(ref.SMALL, lanes=4), ref.basis(ref.SMALL, lanes=8)
    other = one_step(makespan=1.0, cp={8: Part(3, 3, 900)}, recompute={("full", 2): Part(3, 3, 900)})
    said = comparison_lines(Side(small, [one_step()], 1e15), Side(large, [other], None))
    cells = {line[:24].strip(): line.split()[-3:] for line in said}
    assert cells["step seconds"] == ["2.5", "1.5", "0.600"]
    assert cells["tokens/s per device"] == ["90", "75", "0.833"]
    assert cells["MFU"][-3:] == ["10.0%", "not", "stated"]
    assert any(line.split() == ["tokens", "at", "cp", "1", "22.2%", "0.0%"] for line in said)
    assert any(line.split() == ["tokens", "at", "cp", "8", "0.0%", "100.0%"] for line in said)
    assert any(line.split() == ["tokens", "at", "recompute", "full", "0.0%", "100.0%"] for line in said)


def test_columns():
    assert aligned([["a", "bb"], ["ccc", "d"]], left=1) == ["a    bb", "ccc   d"]


def test_figures_of_a_plan_written_down():
    """Two lanes; a group of two, then one document on lane 0 while lane 1 waits."""
    basis = ref.basis(ref.SMALL, lanes=2)
    parts = [Microbatch(0, 0, 2, (0,), (8000,), Recompute(), "ulysses"), Microbatch(1, 0, 1, (1,), (4000,), Recompute("full", 6))]
    plan = predicted(ref.plan_of(basis, [8000, 4000], parts))
    found, seconds = figures(plan), [max(ref.stage_seconds(basis, one)) for one in parts]
    assert found.idle == pytest.approx(seconds[1] / 2 / sum(seconds))
    assert found.per_lane == (2, 1)
    assert found.recompute == {("none", 0): Part(1, 1, 8000), ("full", 6): Part(1, 1, 4000)}
