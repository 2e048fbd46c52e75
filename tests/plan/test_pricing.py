"""pricing.py against cost.py and memory.py, which price one finished microbatch at a time."""

import random
from dataclasses import replace
from math import inf

import plan_reference as ref
import pytest

from megadcp.plan.limits import Limits, everywhere
from megadcp.plan.memory import MOST_TOKENS
from megadcp.plan.pricing import Prices
from megadcp.plan.step_plan import Recompute

MODELS = [
    {"model": ref.GPT_1B, "lanes": 16},
    {"model": ref.GPT_8B, "lanes": 32},
    {"model": ref.GPT_8B, "lanes": 8, "precision": "fp8_block", "tp": 2},
    {"model": replace(ref.GPT_8B, mlp="gelu"), "lanes": 32, "tp": 4},
    {"model": replace(ref.GPT_8B, kv_heads=2), "lanes": 64, "precision": "fp32", "hardware": replace(ref.H200, memory_bytes=1e12)},
]


def prices(choices=None, pack_tokens=MOST_TOKENS, **layout):
    b = ref.basis(**layout)
    limits = Limits(b.layout.lanes, pack_tokens, choices or everywhere(b), choices is None)
    return Prices(b, limits, [1 << power for power in range(b.layout.lanes.bit_length())])


@pytest.mark.parametrize("layout", MODELS, ids=range(len(MODELS)))
def test_seconds_equal_the_finished_microbatch(layout):
    made = prices(**layout)
    rng = random.Random(1)
    recomputed = 0
    for cp in made.sizes:
        group = made.group(cp)
        for share in (0.01, 0.5, 0.97, 1.2, 2.0, 5.0):
            length = max(1, int(group.plain * share) // group.grain * group.grain) or group.grain
            found = made.microbatch([0], [length], cp, 0)
            seconds = group.seconds(length, length * length)
            if found is None:
                assert seconds == inf
                continue
            one, exact = found
            assert seconds == pytest.approx(exact, rel=1e-12)
            assert max(ref.stage_seconds(made.basis, one)) == pytest.approx(exact, rel=1e-12)
            assert sum(ref.stage_bytes(made.basis, one, 0)) <= made.budget * (1 + 1e-9)
            recomputed += one.recompute != Recompute()
        lengths = [rng.randint(1, max(2, group.plain // 8)) // group.step * group.step + group.step for _ in range(5)]
        lengths[-1] += -sum(lengths) % group.grain
        one, exact = made.microbatch([0, 1, 2, 3, 4], lengths, cp, 0)
        assert group.seconds(sum(lengths), sum(length * length for length in lengths)) == pytest.approx(exact, rel=1e-12)
    assert recomputed > 2


@pytest.mark.parametrize("layout", MODELS[:2], ids=range(2))
def test_no_kind_or_recompute_is_cheaper(layout):
    made = prices(**layout)
    for cp in (1, 2, 8):
        for length in (4096, 40960, 131072):
            found = made.microbatch([0], [length], cp, 0)
            if found is None:
                continue
            one, exact = found
            for kind in made.cost.legal_kinds(cp):
                for level in ("none", "selective", "mlp", "full"):
                    for layers in (0,) if level == "none" else (1, 2, 5, made.basis.recomputable // 2, made.basis.recomputable):
                        other = replace(one, cp_comm=kind, recompute=Recompute(level, layers))
                        if made.memory.bytes(other) <= made.budget:
                            assert made.cost.seconds(other) >= exact * (1 - 1e-9)


def test_plain_and_most_are_where_memory_ends():
    made = prices(**MODELS[1])
    for cp in made.sizes:
        group = made.group(cp)
        for tokens, level, layers in ((group.plain, "none", 0), (group.most, "full", 32)):
            assert made.memory.need(0, tokens / cp, Recompute(level, layers)) <= made.budget
            assert made.memory.need(0, (tokens + group.grain) / cp, Recompute(level, layers)) > made.budget


def test_a_named_recompute_is_the_only_one():
    named = Recompute("mlp", 7)
    made = prices(choices=(named,), **MODELS[1])
    one, exact = made.microbatch([0], [9000], 1, 0)
    assert one.recompute == named
    assert made.group(1).seconds(9000, 9000 * 9000) == pytest.approx(exact, rel=1e-12)
    assert made.group(1).plain == made.group(1).most
    assert made.group(1).seconds(made.group(1).most + 1, 1.0) == inf
    assert made.microbatch([0], [made.group(1).most + 1], 1, 0) is None


def test_packs_divide_equally_and_at_the_least_sum():
    group = prices(**MODELS[1]).group(1)
    for tokens in (group.plain // 2, group.plain, int(group.plain * 1.1), int(group.plain * 1.9), group.plain * 5 + 7, group.plain * 8):
        squares = tokens * 2000
        count, seconds = group.divided(tokens, squares)
        each = [k * group.seconds(-(-tokens // k), squares / k) for k in range(1, 14)]
        assert seconds == min(each)
        assert seconds == each[count - 1]


def test_pack_tokens_cap_the_packs():
    group = prices(pack_tokens=3000, **MODELS[1]).group(1)
    assert group.divided(12000, 12000 * 500)[0] >= 4
    assert group.divided(3000, 3000 * 500)[0] == 1
