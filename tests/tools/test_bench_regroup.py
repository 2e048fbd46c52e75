import importlib
import json
import math
import sys
import time
from pathlib import Path

import pytest
import torch

from megadcp.plan.baselines import bucket, static_fixed
from megadcp.plan.planner import planner_for
from megadcp.plan.simulate import simulate
from megadcp.plan.step_plan import Recompute
from megadcp.plan.verify import PlanError, verify

TOOLS = Path(__file__).parents[2] / "tools"
MODULES = ("bench_memory", "bench_ranks", "bench_regroup_plans", "bench_regroup_timed", "bench_regroup", "bench_parallel", "benchmark")


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    threads = torch.get_num_threads()
    yield importlib.import_module
    torch.set_num_threads(threads)
    for name in MODULES:
        sys.modules.pop(name, None)


def options_of(bench, *words):
    return bench("bench_regroup")._arguments(list(words))


# ---------------------------------------------------------------------------------------------------------------------- memory
def test_live_bytes_are_those_of_new_storages_while_they_live(bench):
    weight = torch.ones(100, 50, requires_grad=True)
    with bench("bench_memory").LiveBytes() as live:
        rows = torch.zeros(10, 100)
        seen = [live.now]
        view, product = rows.view(100, 10), rows @ weight
        hidden = torch.nn.functional.gelu(product)
        seen.append(live.now)
        del view, product  # rows and product are kept for backward
        total = hidden.sum()
        seen.append(live.now)
        del hidden  # nothing keeps it
        seen.append(live.now)
        total.backward()
        del total
        seen.append(live.now)  # rows and the weight's gradient
        rows.add_(1.0)  # in place: no new storage
        seen.append(live.now)
    assert seen == [4000, 8000, 8004, 6004, 24000, 24000]
    assert live.peak >= 24000 + 2000


# ----------------------------------------------------------------------------------------------------------------------- plans
@pytest.mark.parametrize(("lanes", "pp", "preset"), [(4, 1, "wikipedia"), (8, 1, "web"), (2, 2, "wikipedia")])
def test_static_plans_are_the_baselines_and_legal(bench, lanes, pp, preset):
    regroup, plans = bench("bench_regroup"), bench("bench_regroup_plans")
    setup = regroup.Setup(regroup.TIMED, preset, lanes, pp, 32768)
    config, steps = setup.config(), setup.steps(1)
    found = plans.contestants(config, steps, 3)
    assert set(found) == set(plans.POLICIES)
    basis, capacity = planner_for(config).basis, config.data.max_length
    fixed = static_fixed(basis, steps, capacity)
    for name, own in found.items():
        for step, plan in enumerate(own):
            verify(plan)
            assert plan.step == step
            assert list(plan.lengths) == steps[step]
            assert simulate(plan).makespan == pytest.approx(plan.predicted.seconds, rel=1e-5)
            assert plan.predicted.seconds >= found["planned"][step].predicted.seconds * (1 - 1e-5), name
    for step, lengths in enumerate(steps[:3]):
        assert found["bucket"][step].predicted.seconds == pytest.approx(bucket(basis, lengths, capacity), rel=1e-5)
        assert found["static-fixed"][step].predicted.seconds == pytest.approx(fixed[step], rel=1e-5)
        assert found["static-best"][step].predicted.seconds == pytest.approx(found["planned"][step].predicted.static_seconds, rel=1e-5)
    for own in (found["static-fixed"], found["bucket"]):
        assert all(len({(one.cp, one.recompute) for one in plan.microbatches}) == 1 for plan in own)
    assert len({(one.cp, one.recompute) for plan in found["static-fixed"] for one in plan.microbatches}) == 1  # one for the whole run


def test_a_static_layout_that_does_not_fit_is_left_out(bench):
    regroup, plans = bench("bench_regroup"), bench("bench_regroup_plans")
    config = regroup.Setup(regroup.TIMED, "wikipedia", 2, 1, 32768).config()
    basis = planner_for(config).basis
    assert static_fixed(basis, [[100]], 1 << 24) == [math.inf]
    assert plans.static_fixed_plans(basis, [[100]], 1 << 24) is None
    assert plans.bucket_plan(basis, 0, [100], 1 << 24) is None


def test_buckets_pad_to_powers_of_two_and_keep_to_the_capacity(bench):
    plans = bench("bench_regroup_plans")
    packs, padded = plans.in_buckets([100, 60, 3, 1000, 700, 130, 1100], 1100)
    assert padded == [128, 64, 64, 1024, 1024, 256, 1100]
    assert packs == [[1, 2], [0], [5], [3], [4], [6]]


def test_an_illegal_arrangement_is_refused(bench):
    regroup, plans = bench("bench_regroup"), bench("bench_regroup_plans")
    basis = planner_for(regroup.Setup(regroup.TIMED, "wikipedia", 2, 1, 32768).config()).basis
    microbatches = plans.arranged(basis, [[[0]], [[1]]], [40, 50], 1, Recompute())
    assert plans.plan_of(basis, 0, [40, 50], microbatches, "x").predicted.seconds > 0
    with pytest.raises(PlanError, match="document 2 is in 0 places"):
        plans.plan_of(basis, 0, [40, 50, 60], microbatches, "x")


# ----------------------------------------------------------------------------------------------------------------------- ranks
def test_ranks_return_in_order_and_a_failure_and_a_hang_are_told(bench):
    ranks = bench("bench_ranks")
    assert ranks.on_ranks(3, lambda rank, factor: rank * factor, 7, limit_s=60) == [0, 7, 14]

    def fails(rank):
        if rank == 1:
            raise ValueError("no such thing")

    with pytest.raises(Exception, match="no such thing"):
        ranks.on_ranks(2, fails, limit_s=60)

    def hangs_here(rank):
        if rank == 1:
            time.sleep(1000)

    with pytest.raises(RuntimeError, match="did not finish within 3 s") as caught:
        ranks.on_ranks(2, hangs_here, limit_s=3)
    assert "in hangs_here" in str(caught.value)
    assert "rank 0:" in str(caught.value)


def ring_job(bench, dilation, kinds, pp=1):
    """Two lanes (times pp) that share one document after another."""
    regroup, plans = bench("bench_regroup"), bench("bench_regroup_plans")
    config = regroup.Setup(regroup.TIMED, "wikipedia", 2, pp, 32768).config()
    basis = planner_for(config).basis
    made = {}
    for kind in kinds:
        microbatches = plans.arranged(basis, [[[0], [1], [2], [3]]], [20000, 3000, 8000, 500], 2, Recompute("full", basis.recomputable), kind)
        made[kind] = [plans.plan_of(basis, 0, [20000, 3000, 8000, 500], microbatches, "x")]
    return regroup, regroup.Job(config, made, 1, bench("bench_regroup_timed").Tempo(dilation, 0.0, 1)), made


@pytest.mark.parametrize("pp", [1, 2])
def test_timed_steps_take_their_predicted_seconds(bench, pp):
    regroup, job, made = ring_job(bench, 0.05, ("ring", "all_gather", "ulysses"), pp)
    found = bench("bench_ranks").on_ranks(2 * pp, regroup.timed_rank, job, limit_s=120)
    for ranks in zip(job.schedule(), *(entries for entries, _ in found), strict=True):
        (_, name), first = ranks[0], ranks[1]
        assert len(set(ranks[1:])) == 1  # the slowest rank's, known to all
        assert first[0] >= 0.05 * made[name][0].predicted.seconds * 0.999  # nothing is slept too little; how much longer, the machine decides
        assert first[1] > 0


def test_noise_is_seeded(bench):
    timed, regroup = bench("bench_regroup_timed"), bench("bench_regroup")
    *_, made = ring_job(bench, 0.0, ("ring",))
    plan = made["ring"][0]

    def draws(rank, seeds):
        with regroup.GroupPool(regroup.Mesh(2), rank, torch.device("cpu")) as pool:
            return [timed.TimedLane(plan, pool, timed.Tempo(1.0, 0.1, seed)).random.standard_normal(3).tolist() for seed in seeds]

    first, second = bench("bench_ranks").on_ranks(2, draws, [1, 1, 2], limit_s=60)
    assert first[0] == first[1] != first[2]
    assert first[0] != second[0]


# ---------------------------------------------------------------------------------------------------------------------- whole
def test_regroup_writes_lines_and_a_report(bench, tmp_path, capsys, monkeypatch):
    regroup = bench("bench_regroup")
    monkeypatch.setattr(regroup, "STEP_SECONDS", 0.05)
    setups = [regroup.Setup(regroup.TIMED, "wikipedia", 4, 1, 16384), regroup.Setup(regroup.COMPUTED, "wikipedia", 2, 1, 16384, 128)]
    monkeypatch.setattr(regroup, "setups_of", lambda options: setups)
    assert regroup.main(["--quick", "--turns", "1", "--steps", "1", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "quick.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["policy"]) for line in lines] == [
        *(("timed, not computed", name) for name in ("static-best", "static-fixed", "bucket", "planned")),
        *(("computed", name) for name in ("static-best", "static-fixed", "bucket", "planned")),
    ]
    for line in lines:
        assert line["seconds"] > 0 < line["predicted"]
        if line["kind"] == "computed":
            assert line["whole_seconds"] >= line["seconds"]
            assert line["cpu_seconds"] > 0
            assert 0.3 < line["memory"] / line["memory_predicted"] < 2
        else:
            assert line["seconds"] >= 0.9 * line["predicted"]
    text = (tmp_path / "quick.md").read_text()
    assert text.rstrip() in said
    assert "## Timed, not computed" in text
    assert "load average" in text
    assert text.count("| wikipedia, 4 ranks | ") == text.count("| wikipedia, 2 ranks | ") == 4


def test_ratios_come_from_equal_turns_and_stand_beside_the_predicted(bench):
    regroup = bench("bench_regroup")
    setup = regroup.Setup(regroup.TIMED, "wikipedia", 4, 1, 32768)
    lines = []
    for turn, (ours, theirs) in enumerate([(1.0, 2.0), (3.0, 4.0), (9.0, 10.0)]):
        for name, seconds, predicted in (("planned", ours, 3.0), ("bucket", theirs, 5.0)):
            own = {"policy": name, "turn": turn, "steps": 2, "step_tokens": 10, "seconds": seconds, "predicted": predicted}
            lines.append({**vars(setup), **own, "without_sleep": 0.1, "groups": "1 x 2"})
    planned, best, fixed, buckets = regroup.rows_of(lines, setup)
    assert planned[3:6] == ["1500 (1000 to 3000)", "1500", "-"]
    assert buckets[5:7] == ["**0.750 (0.625 to 0.825)**", "0.600"]
    assert best[2] == fixed[2] == "fits nowhere"
    assert len({len(row) for row in (planned, best, fixed, buckets)}) == 1
    assert regroup.agreement(lines, [setup]) == "largest difference of a timed ratio from its prediction: 25.0% (wikipedia, 4 ranks, bucket)"


def test_parallel_measures_every_layout_and_refuses_another_result(bench, tmp_path, capsys, monkeypatch):
    parallel = bench("bench_parallel")
    small = ["--quick", "--tokens", "256", "--pack", "64", "--max-length", "48", "--turns", "1", "--out", str(tmp_path)]
    assert parallel.main(small) == 0
    lines = [json.loads(line) for line in (tmp_path / "quick.jsonl").read_text().splitlines()]
    assert {line["way"] for line in lines} == set(parallel.WAYS)
    # the last document has at least 2 tokens
    assert all(line["cpu"] > 0 < line["wall"] and line["tokens"] == 257 for line in lines)
    assert (tmp_path / "quick.md").read_text().rstrip() in capsys.readouterr().out
    good, bad = parallel.Taken(1.0, 1.0, 5.0, 1.0), parallel.Taken(1.0, 1.0, 5.0, 1.001)
    entries = [(-1, name, bad if name == "tp 2" else good) for name in parallel.WAYS]
    with pytest.raises(SystemExit, match=r"^tp 2: the gradient norm of the first step is 1\.001"):
        parallel.lines_of([entries, entries], 256)
