"""Plans for many lanes without pipelines: legal, near the bound, within the run's limits, balanced."""

import random
from dataclasses import replace

import plan_reference as ref
import pytest

from megadcp.config.check import UserError
from megadcp.config.schema import DataConfig, PlanConfig
from megadcp.plan import presets
from megadcp.plan.balance import Balance, Pack
from megadcp.plan.limits import Limits, everywhere
from megadcp.plan.memory import MOST_TOKENS
from megadcp.plan.planner import planner_for
from megadcp.plan.pricing import Prices
from megadcp.plan.simulate import simulate
from megadcp.plan.step_plan import plan_hash
from megadcp.plan.verify import verify


def planner(model=ref.GPT_1B, lanes=8, hardware=ref.H200, plan=None, max_length=131072, precision="bf16", **parallel):
    config = ref.config(model, precision, lanes, hardware, **parallel)
    return planner_for(replace(config, plan=plan or PlanConfig(), data=DataConfig(max_length=max_length)))


def ratio(plan):
    return plan.predicted.seconds / plan.predicted.lower_bound_seconds


def loads(plan):
    found = [0.0] * plan.layout.lanes
    for one in plan.microbatches:
        for lane in range(one.lane, one.lane + one.cp):
            found[lane] += one.seconds
    return found


# What was measured, with a little room: (preset, lanes, tokens per lane) -> ratio to the bound.
MEASURED = [
    (ref.GPT_1B, "wikipedia", 32, 16384, 1.022),
    (ref.GPT_1B, "byted", 32, 32768, 1.022),
    (ref.GPT_1B, "web", 8, 32768, 1.024),
    (ref.GPT_1B, "prolong", 32, 16384, 1.045),
    (ref.GPT_1B, "constant", 8, 16384, 1.0001),
    (ref.GPT_8B, "midtrain", 32, 32768, 1.030),
    (ref.GPT_8B, "uniform", 32, 32768, 1.040),
    (ref.GPT_8B, "wikipedia", 8, 131072, 1.036),
    (ref.GPT_8B, "constant", 32, 32768, 1.018),
]


@pytest.mark.parametrize(("model", "preset", "lanes", "tokens", "most"), MEASURED, ids=lambda value: value if isinstance(value, (str, int)) else "")
def test_close_to_the_bound_and_not_above_static_best(model, preset, lanes, tokens, most):
    lengths = presets.draw(preset, tokens * lanes, 131072, 1)
    plan = planner(model, lanes)(3, lengths)
    verify(plan)
    assert 1 <= ratio(plan) <= most
    assert plan.predicted.seconds <= plan.predicted.static_seconds
    assert simulate(plan).makespan == pytest.approx(max(loads(plan)), rel=1e-5)  # nothing waits
    assert plan_hash(plan) == plan_hash(planner(model, lanes)(3, lengths))


def test_equal_documents_gain_nothing():
    plan = planner(lanes=8, max_length=16384)(0, [8192] * 16)
    assert plan.predicted.seconds == plan.predicted.static_seconds


def test_a_skewed_step_gains_much():
    plan = planner(ref.GPT_1B, 32)(0, presets.draw("wikipedia", 32 * 16384, 131072, 2))
    assert plan.predicted.static_seconds / plan.predicted.seconds > 1.2


@pytest.mark.parametrize("lanes", [1, 2, 3, 6, 12, 24, 40])
def test_any_number_of_lanes(lanes):
    lengths = presets.draw("midtrain", 9000 * lanes, 65536, lanes)
    plan = planner(lanes=lanes)(0, lengths)
    verify(plan)
    assert ratio(plan) < 1.25


@pytest.mark.parametrize("max_cp", [1, 2, 4, 5])
def test_max_cp(max_cp):
    lengths = [*presets.draw("web", 8 * 16384, 131072, 3), 90000]
    plan = planner(lanes=8, max_cp=max_cp)(0, lengths)
    verify(plan)
    assert max(one.cp for one in plan.microbatches) == min(max_cp, 4) if max_cp != 5 else 4
    assert plan.predicted.seconds <= plan.predicted.static_seconds


def test_max_cp_that_is_no_number():
    with pytest.raises(UserError, match=r"parallel\.max_cp=-1"):
        planner(max_cp=-1)


def test_pack_tokens():
    lengths = presets.draw("midtrain", 8 * 16384, 65536, 3)
    plan = planner(lanes=8, plan=PlanConfig(pack_tokens=6000))(0, lengths)
    verify(plan)
    assert all(one.tokens <= 6000 or len(one.documents) == 1 for one in plan.microbatches)
    assert any(one.tokens > 6000 for one in plan.microbatches)


def test_a_named_recompute():
    lengths = presets.draw("midtrain", 8 * 16384, 65536, 3)
    plan = planner(ref.GPT_8B, 8, plan=PlanConfig(recompute="full", recompute_layers=20))(0, lengths)
    verify(plan)
    assert {(one.recompute.level, one.recompute.layers) for one in plan.microbatches} == {("full", 20)}


def test_slow_lanes_get_less():
    speed = [1.0] * 8
    speed[5] = 0.5
    lengths = presets.draw("wikipedia", 8 * 32768, 8192, 2)
    slow = planner(lanes=8, plan=PlanConfig(lane_speed=tuple(speed)))(0, lengths)
    verify(slow)
    tokens = [0] * 8
    for one in slow.microbatches:
        for lane in range(one.lane, one.lane + one.cp):
            tokens[lane] += one.tokens // one.cp
    others = [tokens[lane] for lane in range(8) if lane != 5]
    assert 0.4 * min(others) < tokens[5] < 0.6 * max(others)
    assert slow.predicted.seconds < 1.03 * planner(lanes=8)(0, lengths).predicted.seconds * 8 / 7.5
    assert slow.predicted.seconds <= slow.predicted.static_seconds


def test_lane_speed_of_the_wrong_number():
    with pytest.raises(UserError, match="lane_speed must be empty or 8 positive numbers"):
        planner(lanes=8, plan=PlanConfig(lane_speed=(1.0, 2.0)))


def test_fewer_documents_than_lanes_and_one_document():
    for lengths in ([131072], [4], [90000, 20], [7, 7, 7]):
        plan = planner(lanes=16)(0, lengths)
        verify(plan)
        assert plan.predicted.seconds <= plan.predicted.static_seconds
    assert planner(lanes=16)(0, [131072]).microbatches[0].cp == 16


def test_alignment_of_eight_bit_formats():
    lengths = presets.draw("midtrain", 16 * 4096, 30000, 5)
    for precision in ("fp8_current", "fp8_block"):
        verify(planner(ref.GPT_8B, 4, precision=precision, tp=2)(0, lengths))


def test_memory_for_few_communicators_only():
    """A document that fits 16 lanes when theirs are the only communicators, but not when every size has some."""
    tight = planner(ref.GPT_8B, 16)
    most, _ = tight._most[16]
    plan = tight(0, [most, 3000, 50])
    verify(plan)
    assert {one.cp for one in plan.microbatches if one.cp > 1} == {16}
    # and as many sizes as before where the memory is there
    assert len({one.cp for one in planner(ref.GPT_8B, 16)(0, [100000, 40000, 20000, *[900] * 90]).microbatches}) > 2


def test_static_policy():
    lengths = presets.draw("web", 8 * 16384, 131072, 3)
    static, joint = (planner(lanes=8, plan=PlanConfig(policy=policy))(0, lengths) for policy in ("static", "joint"))
    verify(static)
    assert static.predicted.policy == "static"
    assert static.predicted.seconds == static.predicted.static_seconds > joint.predicted.seconds
    assert len({(one.cp, one.recompute) for one in static.microbatches}) == 1


# --------------------------------------------------------------------------------------------------------------- moves
def one_lane_packs(contents, lanes=4):
    b = ref.basis(lanes=lanes)
    limits = Limits(lanes, MOST_TOKENS, everywhere(b))
    prices = Prices(b, limits, [1, 2, 4])
    lengths = [length for pack in contents for length in pack]

    def new(cp, lane):
        return Pack(lane, prices.group(cp, lane), 1.0, [])

    packs, at = [], 0
    for lane, pack in enumerate(contents):
        made = new(1, lane)
        made.documents = sorted(range(at, at + len(pack)), key=lambda one: (-lengths[one], one))
        made.tokens, made.squares = sum(pack), sum(length * length for length in pack)
        made.seconds = made.group.seconds(made.tokens, made.squares)
        packs.append(made)
        at += len(pack)
    return packs, lengths, new


def test_moves_even_out_and_keep_every_document():
    rng = random.Random(4)
    contents = [[rng.randint(50, 9000) for _ in range(count)] for count in (25, 4, 3, 8)]
    packs, lengths, new = one_lane_packs(contents)
    before = max(pack.seconds for pack in packs)
    balance = Balance(packs, 4, lengths, new, [1, 2, 4], 5000)
    after = balance.run()
    assert sorted(document for pack in after for document in pack.documents) == list(range(len(lengths)))
    assert max(balance.loads) < 1.01 * sum(balance.loads) / 4 < before
    for pack in after:  # the books are right
        padded = [-(-lengths[document] // pack.group.step) * pack.group.step for document in pack.documents]
        assert (pack.tokens, pack.squares) == (sum(padded), sum(length * length for length in padded))
        assert pack.seconds == pack.group.seconds(pack.tokens, pack.squares)
        assert pack.documents == sorted(pack.documents, key=lambda one: (-lengths[one], one))
    fresh = [0.0] * 4
    for pack in after:
        for lane in pack.lanes:
            fresh[lane] += pack.seconds
    assert fresh == pytest.approx(balance.loads, rel=1e-12)


def test_a_move_is_worth_what_it_says():
    packs, lengths, new = one_lane_packs([[30000, 500, 400], [2000], [100], [900, 80]])
    balance = Balance(packs, 4, lengths, new, [1, 2, 4], 5000)
    latest = max(balance.loads)
    moves = list(balance._moves(balance.loads.index(latest), latest))
    kinds = {(move.source.cp, move.target.cp, bool(move.target.documents), bool(move.enter)) for move in moves}
    assert {(1, 1, True, False), (1, 2, False, False), (1, 1, True, True)} <= kinds
    for move in moves:
        copies, _, _ = one_lane_packs([[30000, 500, 400], [2000], [100], [900, 80]])
        again = Balance(copies, 4, lengths, new, [1, 2, 4], 5000)
        source = copies[packs.index(move.source)]
        target = copies[packs.index(move.target)] if move.target in packs else move.target
        again._make(replace(move, source=source, target=target))
        touched = set(source.lanes) | set(target.lanes)
        assert max(again.loads[lane] for lane in touched) == pytest.approx(move.end, rel=1e-12)


def test_the_budget_bounds_the_moves():
    rng = random.Random(4)
    packs, lengths, new = one_lane_packs([[rng.randint(50, 9000) for _ in range(count)] for count in (60, 4, 3, 8)])
    balance = Balance(packs, 4, lengths, new, [1, 2, 4], 40)
    balance.run()
    assert -40 < balance.budget <= 0
