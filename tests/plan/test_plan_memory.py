import random
from dataclasses import replace

import numpy as np
import plan_reference as ref
import pytest

from megadcp.plan.memory import MemoryModel, group_sizes
from megadcp.plan.step_plan import LEVELS, Microbatch, Recompute


def test_8b_by_hand():
    memory = MemoryModel(ref.basis(ref.GPT_8B, "bf16", lanes=32))
    layer = 4096 * 128 * 80 + 3 * 4096 * 14336 + 2 * 4096
    parameters = 32 * layer + 2 * 128256 * 4096 + 4096
    assert parameters == 8030261248  # the published size of Llama 3.1 8B
    assert memory.parameters(0) == parameters
    assert memory.static(0, 2) == pytest.approx(parameters * 6 + 12 * parameters / 32 + 1e9, rel=1e-12)
    assert memory.budget(0, 0) == pytest.approx(0.9 * 141e9 - parameters * 6.375, rel=1e-12)
    # none: 12*4096 + 4*4096/4 + 6*14336 = 139,264 bytes; selective 94,208; mlp 45,056; full 8,192
    assert memory.token_bytes == {"none": 139264, "selective": 94208, "mlp": 45056, "full": 8192}
    one = Microbatch(0, 0, 2, (0,), (20000,), Recompute("full", 30), "ring")
    assert memory.bytes(one) == 10000 * (30 * 8192 + 2 * 139264) + 10000 * 139264 + 4096 * 128256 * 6


def test_fp8_keeps_a_third_copy_and_fp32_doubles_activations():
    assert MemoryModel(ref.basis(ref.SMALL, "fp8_block")).static(0, 0) / MemoryModel(ref.basis(ref.SMALL, "bf16")).static(0, 0) == pytest.approx(
        19 / 18
    )
    doubled, plain = MemoryModel(ref.basis(ref.SMALL, "fp32")), MemoryModel(ref.basis(ref.SMALL, "bf16"))
    assert all(doubled.token_bytes[level] == 2 * plain.token_bytes[level] for level in LEVELS)
    assert doubled.passing(0, 100, "none") == plain.passing(0, 100, "none")  # logits are what they are


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("pp", [1, 2, 3])
def test_static_equals_a_literal_reading(pp, tied):
    for precision in ("bf16", "fp8_current"):
        b = ref.basis(replace(ref.SMALL, tied=tied), precision, lanes=4, pp=pp, tp=2)
        memory = MemoryModel(b)
        for stage in range(pp):
            assert memory.static(stage, 2) == pytest.approx(ref.stage_static(b, stage, 2), rel=1e-12)


@pytest.mark.parametrize(
    "layout",
    [
        dict(),
        dict(lanes=8),
        dict(lanes=4, pp=3, stage_layers=(3, 2, 1)),
        dict(lanes=4, pp=2, virtual_stages=2),
        dict(lanes=2, pp=3, virtual_stages=2),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_in_flight_equals_a_walk_of_the_action_lists(layout, precision):
    b = ref.basis(replace(ref.SMALL, mlp="gelu") if precision == "fp32" else ref.SMALL, precision, **layout)
    memory = MemoryModel(b)
    for seed in range(8):
        plan = ref.random_plan(b, random.Random(seed), slots=random.Random(seed).choice((1, 3, 6)))
        _, peaks = ref.event_simulation(b, plan.microbatches)
        assert memory.peaks(plan.microbatches) == pytest.approx(peaks, rel=1e-12)
        for one in plan.microbatches:
            own = [sum(ref.stage_bytes(b, one, stage)) for stage in range(b.layout.pp)]
            assert memory.bytes(one) == pytest.approx(max(own), rel=1e-12)


def test_1f1b_holds_the_largest_sum_over_consecutive_slots():
    b = ref.basis(ref.SMALL, pp=3)
    tokens = [100, 900, 300, 500, 200, 800]
    plan = ref.plan_of(b, tokens, [Microbatch(slot, 0, 1, (slot,), (count,)) for slot, count in enumerate(tokens)])
    per_token = MemoryModel(b).token_bytes["none"] * 2
    peaks = MemoryModel(b).peaks(plan.microbatches)
    assert peaks[0] == per_token * 1700  # 900 + 300 + 500, all three slots in flight on the first of three stages
    assert peaks[1] == per_token * 1200
    assert peaks[2] == per_token * 900 + 900 * 1000 * 6


def test_least_layers_is_the_least():
    hardware = replace(ref.H200, memory_bytes=3e9)
    for layout in (dict(), dict(pp=3, stage_layers=(3, 2, 1)), dict(tp=2)):
        b = ref.basis(ref.SMALL, hardware=hardware, **layout)
        memory = MemoryModel(b)
        budgets = [memory.budget(stage, 0) for stage in range(b.layout.pp)]
        counts = set()
        tokens = [1, 5000, 30000, 70000, 90000, 120000, 140000, 160000, 200000, 300000, 10**7]
        for level in LEVELS:
            several = memory.least_layers_many(np.array(tokens, dtype=np.float64), level, budgets)
            for local, together in zip(tokens, several.tolist(), strict=True):
                legal = [0] if level == "none" else range(1, b.recomputable + 1)
                fitting = [n for n in legal if all(memory.need(s, local, Recompute(level, n)) <= budgets[s] for s in range(b.layout.pp))]
                expected = min(fitting, default=-1)
                assert memory.least_layers(local, level, budgets) == together == expected
                counts.add(expected)
        assert len(counts) > 2


def test_most_tokens_is_the_most():
    memory = MemoryModel(ref.basis(ref.GPT_1B))
    budgets = [memory.budget(0, 0)]
    for recompute in (Recompute(), Recompute("selective", 16), Recompute("full", 16)):
        most = memory.most_tokens(recompute.level, recompute.layers, budgets)
        assert memory.need(0, most, recompute) <= budgets[0] < memory.need(0, most + 1, recompute)
    assert memory.most_tokens("none", 0, [0.0]) == 0


def test_group_sizes_counts_sizes_above_one():
    sizes = [Microbatch(0, 0, cp, (0,), (64,)) for cp in (1, 1, 2, 4, 4)]
    assert group_sizes(sizes) == 2
