import json
import random
import subprocess
import sys
from dataclasses import replace
from itertools import combinations

import numpy as np
import plan_reference as ref
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megadcp.config.check import UserError
from megadcp.config.schema import DataConfig, PlanConfig
from megadcp.plan.baselines import static_best
from megadcp.plan.basis import Basis
from megadcp.plan.lower_bound import lower_bound
from megadcp.plan.memory import MemoryModel
from megadcp.plan.planner import planner_for
from megadcp.plan.pricing import Prices
from megadcp.plan.simulate import simulate
from megadcp.plan.step_plan import Recompute, from_json, plan_hash, to_json
from megadcp.plan.verify import verify

LAPTOP = replace(ref.H200, memory_bytes=1.0e9, layer_overhead_seconds=2e-3)  # room for about 30,000 tokens of SMALL without recompute


def planner(model=ref.SMALL, precision="bf16", hardware=LAPTOP, max_length=131072, tp=1, **plan):
    return planner_for(
        replace(ref.config(model, precision, hardware=hardware, tp=tp), data=DataConfig(max_length=max_length), plan=PlanConfig(**plan))
    )


def check(plan, lengths, max_length=131072, choices=()):
    """What must hold of every plan."""
    verify(plan)
    assert from_json(json.dumps(to_json(plan))) == plan
    assert plan.lengths == tuple(lengths)
    assert [one.slot for one in plan.microbatches] == list(range(len(plan.microbatches)))
    assert {(one.lane, one.cp, one.cp_comm) for one in plan.microbatches} == {(0, 1, "none")}
    b = Basis.of(plan)
    assert plan.predicted.seconds == pytest.approx(simulate(plan).makespan, rel=1e-5)
    assert plan.predicted.seconds == pytest.approx(sum(max(ref.stage_seconds(b, one)) for one in plan.microbatches), rel=1e-5)
    need = ref.stage_static(b, 0, 0) + max(sum(ref.stage_bytes(b, one, 0)) for one in plan.microbatches)
    assert plan.predicted.peak_bytes == (pytest.approx(need, rel=1e-5),)
    assert need <= b.profile.usable_fraction * b.profile.memory_bytes * (1 + 1e-9)
    assert plan.predicted.seconds >= plan.predicted.lower_bound_seconds > 0
    assert plan.predicted.lower_bound_seconds == pytest.approx(lower_bound(b, lengths), rel=2e-5)
    static = static_best(b, lengths, max_length, choices)
    if static is None:
        assert plan.predicted.static_seconds == 0
    else:
        assert plan.predicted.static_seconds == pytest.approx(static.makespan, rel=1e-5)
        assert plan.predicted.seconds <= plan.predicted.static_seconds


PRECISIONS = {name: planner(precision=name) for name in ("fp32", "bf16", "fp8_current", "fp8_block")}
MODELS = {
    "small": planner(),
    "untied, plain": planner(replace(ref.SMALL, mlp="gelu")),
    "1b": planner(ref.GPT_1B, "fp8_current", ref.H200),
    "tp": planner(ref.GPT_8B, "fp8_block", ref.H200, tp=4),
}
lengths_of_a_step = st.lists(st.one_of(st.integers(1, 300), st.integers(1, 30000)), min_size=1, max_size=60)


@settings(max_examples=150, deadline=None)
@given(lengths_of_a_step, st.sampled_from(sorted(PRECISIONS)))
@example([1], "fp8_block")
@example([30000] * 20, "bf16")
def test_any_lengths_give_a_legal_deterministic_plan(lengths, precision):
    plan = PRECISIONS[precision](3, lengths)
    check(plan, lengths)
    assert PRECISIONS[precision](3, np.array(lengths)) == plan
    assert planner(precision=precision)(3, lengths) == plan


@settings(max_examples=60, deadline=None)
@given(lengths_of_a_step, st.sampled_from(sorted(MODELS)))
def test_other_models(lengths, name):
    check(MODELS[name](0, lengths), lengths)


@settings(max_examples=100, deadline=None)
@given(lengths_of_a_step, st.integers(1, 40000), st.sampled_from(["auto", "none", "selective", "mlp", "full"]), st.integers(0, 6))
def test_caps_and_named_recompute_are_kept(lengths, cap, level, layers):
    roomy = replace(LAPTOP, memory_bytes=4e9)
    plan = planner(hardware=roomy, pack_tokens=cap, recompute=level, recompute_layers=layers if level not in ("auto", "none") else 0)(0, lengths)
    named = Recompute(level, 0 if level == "none" else layers or 6)
    check(plan, lengths, min(cap, 131072), () if level == "auto" else (named,))
    for one in plan.microbatches:
        assert one.tokens <= cap or len(one.documents) == 1
        assert level == "auto" or one.recompute == named


@settings(max_examples=60, deadline=None)
@given(st.floats(0.34e9, 3e9), st.integers(0, 10**6))
def test_any_budget_gives_a_legal_plan_or_one_clear_line(memory, seed):
    rng = random.Random(seed)
    lengths = [int(1 + 60000 ** rng.random()) for _ in range(rng.randint(1, 40))]
    plan, error = None, ""
    try:
        plan = planner(hardware=replace(ref.H200, memory_bytes=memory))(0, lengths)
    except UserError as caught:
        error = str(caught)
    if plan is not None:
        check(plan, lengths)
    else:
        assert "\n" not in error
        assert "does not fit on the lane" in error or "no memory is left" in error


def test_what_fits_is_one_microbatch_without_recompute_and_meets_the_bound():
    plan = planner()(0, [300, 200, 400, 124])
    assert [(one.documents, one.recompute) for one in plan.microbatches] == [((2, 0, 1, 3), Recompute())]
    assert plan.predicted.seconds / plan.predicted.lower_bound_seconds == pytest.approx(1, abs=1e-5)
    assert plan.predicted.static_seconds == plan.predicted.seconds  # the gain is 1.00, and says so


def test_equal_lengths_gain_nothing_over_static_best():
    plan = planner(ref.GPT_1B, "fp8_current", ref.H200)(0, [8192] * 64)
    assert plan.predicted.static_seconds / plan.predicted.seconds == pytest.approx(1.0, abs=0.02)


def test_skewed_lengths_gain_over_static_best():
    gains = []
    for seed in range(8):
        rng = random.Random(seed)
        lengths = [min(131072, int(rng.lognormvariate(0, 1.2) * 8000) + 1) for _ in range(64)]
        plan = planner(ref.GPT_1B, "fp8_current", ref.H200)(0, lengths)
        check(plan, lengths)
        gains.append(plan.predicted.static_seconds / plan.predicted.seconds)
        assert plan.predicted.seconds / plan.predicted.lower_bound_seconds < 1.01
    assert max(gains) > 1.03


def budget_of(made):
    return made.memory.budget(0, 0)


def most_of(made, choice):
    return made.memory.most_tokens(choice.level, choice.layers, [budget_of(made)])


def test_recompute_is_chosen_pack_by_pack():
    tight = planner(hardware=replace(LAPTOP, layer_overhead_seconds=1e-5))
    longest_plain = most_of(tight, Recompute())
    plan = tight(0, [longest_plain * 3 // 2, longest_plain // 2, longest_plain // 3])
    assert [(one.documents, one.recompute.level != "none") for one in plan.microbatches] == [((0,), True), ((1, 2), False)]
    forced = next(one for one in plan.microbatches if 0 in one.documents)
    memory, budget = MemoryModel(Basis.of(plan)), budget_of(tight)
    # the cheapest that fits: by trying every level and layer count
    b = Basis.of(plan)
    options = [replace(forced, recompute=Recompute(level, n)) for level in ("selective", "mlp", "full") for n in range(1, 7)]
    cheapest = min(max(ref.stage_seconds(b, one)) for one in options if memory.bytes(one) <= budget)
    assert max(ref.stage_seconds(b, forced)) == pytest.approx(cheapest, rel=1e-12)


def all_packings(ids):
    """Every partition of ids."""
    if not ids:
        yield []
        return
    first, rest = ids[0], ids[1:]
    for size in range(len(rest) + 1):
        for others in combinations(rest, size):
            for more in all_packings([k for k in rest if k not in others]):
                yield [[first, *others], *more]


def test_close_to_the_best_of_all_packings():
    tight = planner(replace(ref.SMALL, vocab=200), hardware=replace(LAPTOP, memory_bytes=0.4e9, layer_overhead_seconds=1e-4))
    prices = Prices(tight.basis, tight.limits, [1])
    gaps, counts = [], set()
    for seed in range(12):
        rng = random.Random(seed)
        lengths = [rng.randint(500, 9000) for _ in range(6)]
        plan = tight(0, lengths)
        best = float("inf")
        for packs in all_packings(list(range(6))):
            priced = [prices.microbatch(sorted(pack, key=lambda k: (-lengths[k], k)), lengths, 1, 0) for pack in packs]
            if None not in priced:
                best = min(best, sum(seconds for _, seconds in priced))
        gaps.append(plan.predicted.seconds / best)
        counts.add(len(plan.microbatches))
    assert len(counts) > 1
    assert min(gaps) >= 1 - 1e-5
    assert max(gaps) < 1.03
    assert sum(gaps) / len(gaps) < 1.01


def test_longest_time_first():
    plan = planner(pack_tokens=1000)(0, [100, 900, 5000, 800, 300])
    assert [one.documents for one in plan.microbatches] == [(2,), (1, 0), (3,), (4,)]


def test_same_plan_in_another_process():
    rng = random.Random(5)
    lengths = [int(1 + 20000 ** rng.random()) for _ in range(200)]
    code = (
        "import sys; sys.path.insert(0, 'tests/plan'); import test_planner as t; from megadcp.plan.step_plan import plan_hash; "
        f"print(plan_hash(t.planner()(11, {lengths})))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "77"})
    assert result.stdout.strip() == plan_hash(planner()(11, lengths))


# ---------------------------------------------------------------------------------------------------------------- errors
def refused(call):
    with pytest.raises(UserError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_document_that_fits_nowhere():
    tight = planner()
    most = max(most_of(tight, choice) for choice in tight.limits.choices)
    assert len(tight(0, [most]).microbatches) == 1
    message = refused(lambda: tight(4, [5, most + 1, 7]))
    b, memory = tight.basis, tight.memory
    need = memory.need(0, most + 1, Recompute("full", 6))
    assert f"step 4: document 1 with {most + 1} tokens does not fit on the lane" in message
    assert f"needs {need / 1e9:.4g} GB a rank even with recompute=full on 6 layers, {budget_of(tight) / 1e9:.4g} GB are free" in message
    assert f"data.max_length={most} or less" in message
    enough = int(message.split("a device with ")[1].split(" GB")[0])
    assert len(planner(hardware=replace(LAPTOP, memory_bytes=enough * 1e9))(0, [most + 1]).microbatches) == 1
    assert b.layout.lanes == 1


def test_a_document_that_the_named_level_does_not_hold():
    named = planner(recompute="none")
    most = most_of(named, Recompute())
    message = refused(lambda: named(0, [most + 1]))
    assert "recompute=none on 0 layers" in message
    assert "plan.recompute=auto" in message
    assert len(planner()(0, [most + 1]).microbatches) == 1


def test_the_largest_document_fits_with_alignment():
    for precision in ("fp8_current", "fp8_block"):
        aligned = planner(precision=precision)
        unit = aligned.basis.unit
        most = max(most_of(aligned, choice) for choice in aligned.limits.choices) // unit * unit
        check(aligned(0, [most, 3]), [most, 3])
        assert f"data.max_length={most} or less" in refused(lambda a=aligned, m=most: a(0, [m + 1]))


def test_empty_step_and_bad_lengths():
    assert "step 3 has no documents" in refused(lambda: planner()(3, []))
    assert "step 3: document 1 has length 0; every document needs at least 1 token" in refused(lambda: planner()(3, [4, 0, 2]))
    assert "step 3: lengths must be integers, found 3.5" in refused(lambda: planner()(3, [4, 3.5]))
    assert "lengths must be integers, found '7'" in refused(lambda: planner()(3, ["7"]))
    assert "document 2 has length -7" in refused(lambda: planner()(3, [4, 5, -7]))


def test_no_memory_for_activations():
    message = refused(lambda: planner(ref.GPT_8B, hardware=ref.H200))
    assert "no memory is left for activations: weights, gradients and optimizer take 144.5 GB of the 126.9 GB" in message
    assert "hardware.memory_bytes=1.41e+11 * hardware.usable_fraction=0.9" in message
    assert "more than 160.6 GB" in message


def test_settings_that_the_policy_can_not_keep():
    assert "plan.policy=magic is not known" in refused(lambda: planner(policy="magic"))
    assert "plan.recompute=some is not known; legal here: auto, none" in refused(lambda: planner(recompute="some"))
    assert "plan.recompute_layers=7 must be between 0 (all) and 6" in refused(lambda: planner(recompute="full", recompute_layers=7))
    assert "plan.pack_tokens=-1" in refused(lambda: planner(pack_tokens=-1))
