import random
from dataclasses import replace

import plan_reference as ref
import pytest

from megadcp.plan.basis import basis_from
from megadcp.plan.lower_bound import fixed_seconds, lower_bound
from megadcp.plan.memory import MemoryModel
from megadcp.plan.simulate import simulate
from megadcp.plan.step_plan import LEVELS, Microbatch, Recompute


def literal_bound(b, lengths):
    """Section 4, one document, group size, level, count and kind at a time, with the literal cost and memory of plan_reference."""
    ideal = replace(b, profile=replace(b.profile, gemm_half_tokens=0.0, layer_overhead_seconds=0.0))
    mute = replace(ideal, profile=replace(ideal.profile, node_bytes=1e300, net_bytes=1e300, node_latency=0.0, ring_step_seconds=0.0))
    stages, hw, T = range(b.layout.pp), b.profile, b.layout.tp
    shape = b.model
    c = 2 * (shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads) + (3 if shape.gated else 2) * shape.hidden * shape.ffn) / T
    F = [n * (hw.layer_overhead_seconds + 3 * c * hw.gemm_half_tokens / hw.gemm_flops) for n in b.stage_layers]
    F[-1] += 6 * shape.hidden * shape.vocab / T * hw.gemm_half_tokens / hw.gemm_flops
    work, tau = [[] for _ in stages], [[] for _ in stages]
    for length in lengths:
        w, t = [float("inf")] * b.layout.pp, [float("inf")] * b.layout.pp
        for cp in (1, 2, 4, 8, 16):
            if cp > b.layout.lanes:
                continue
            for level in LEVELS:
                counts = [0] if level == "none" else range(1, min(b.stage_layers) + 1)
                fitting = []
                for count in counts:
                    one = Microbatch(0, 0, cp, (0,), (length,), Recompute(level, count))
                    room = [0.9 * hw.memory_bytes - ref.stage_static(b, s, int(cp > 1)) for s in stages]
                    if all(sum(ref.stage_bytes(b, one, s)) <= room[s] for s in stages):
                        fitting.append(count)
                if not fitting:
                    continue
                for kind in ref.CostModel(b).legal_kinds(cp):
                    one = Microbatch(0, 0, cp, (0,), (length,), Recompute(level, min(fitting)), kind)
                    heard, silent = ref.stage_seconds(ideal, one), ref.stage_seconds(mute, one)
                    # what tp costs moves over node_bytes too: put it back
                    tp = hw.tp_exposed * 8 * (length / cp) * shape.hidden * 2 * (T - 1) / T / hw.node_bytes
                    for s in stages:
                        w[s] = min(w[s], cp * (silent[s] + tp * b.stage_layers[s]))
                        t[s] = min(t[s], heard[s])
        for s in stages:
            work[s].append(w[s])
            tau[s].append(F[s] + t[s])
    bound = 0.0
    for s in stages:
        fill = sum(min(tau[before]) for before in range(s)) / b.layout.virtual_stages
        bound = max(bound, max(F[s] + sum(work[s]) / b.layout.lanes, max(tau[s])) + fill)
    return bound


TIGHT = replace(ref.H200, memory_bytes=1.5e9)
LAYOUTS = [
    dict(hardware=TIGHT),
    dict(lanes=8),
    dict(lanes=8, hardware=replace(ref.H200, memory_bytes=2.2e9, gpus_per_node=2)),
    dict(lanes=4, tp=2),
    dict(lanes=4, pp=3, stage_layers=(3, 2, 1), hardware=TIGHT),
    dict(lanes=4, pp=2, virtual_stages=3),
    dict(precision="fp32", lanes=2),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_a_literal_reading(layout):
    b = ref.basis(ref.SMALL, **layout)
    for lengths in ([5000], [1, 17, 300, 300, 4000], [60000, 60000, 3]):
        assert lower_bound(b, lengths) == pytest.approx(literal_bound(b, lengths), rel=1e-12)


@pytest.mark.parametrize("memory", [0.8e9, 1.1e9, 2e9])
def test_equals_a_literal_reading_on_any_mix(memory):
    """Few, some or most documents fit without recompute; some fit on no group."""
    b = ref.basis(ref.SMALL, lanes=8, hardware=replace(ref.H200, memory_bytes=memory, gpus_per_node=4))
    model, with_recompute, nowhere = MemoryModel(b), 0, 0
    for seed in range(12):
        rng = random.Random(seed)
        lengths = [int(20 + rng.choice((2000, 60000, 300000)) ** rng.random()) for _ in range(rng.randint(1, 8))]
        bound = lower_bound(b, lengths)
        assert bound == pytest.approx(literal_bound(b, lengths), rel=1e-12)
        with_recompute += model.least_layers(max(lengths) / 8, "none", [model.budget(0, 1)]) < 0
        nowhere += bound == float("inf")
    assert with_recompute > nowhere or memory == 2e9
    assert nowhere or memory > 0.8e9


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_plan_is_below(layout, slow):
    b = ref.basis(ref.SMALL, **layout)
    if slow:
        b = replace(b, lane_speed=tuple(1.3 - 0.2 * (lane % 3) for lane in range(b.layout.lanes)))
    ratios = []
    for seed in range(20):
        rng = random.Random(seed)
        plan = ref.random_plan(b, rng, slots=rng.choice((1, 2, 5)), longest=rng.choice((100, 3000, 30000)))
        ratios.append(simulate(plan).makespan / lower_bound(b, plan.lengths))
    assert min(ratios) >= 1.0


def test_one_document_on_one_lane_meets_it():
    b = ref.basis(ref.GPT_1B)
    plan = ref.plan_of(b, [9000], [Microbatch(0, 0, 1, (0,), (9000,))])
    assert simulate(plan).makespan == pytest.approx(lower_bound(b, [9000]), rel=1e-12)


def test_fixed_costs_by_hand():
    b = ref.basis(ref.GPT_8B, pp=4, stage_layers=(9, 9, 8, 6))
    per_layer = 0.0002 + 3 * 436207616 * 512 / 480e12
    assert fixed_seconds(b) == pytest.approx([9 * per_layer, 9 * per_layer, 8 * per_layer, 6 * per_layer + 6 * 4096 * 128256 * 512 / 480e12])


def test_what_fits_nowhere_has_no_bound():
    b = basis_from(ref.config(ref.SMALL, hardware=TIGHT))
    budget = MemoryModel(b).budget(0, 0)
    assert 0 < budget < MemoryModel(b).need(0, 10**6, Recompute("full", 6))
    assert lower_bound(b, [10**6]) == float("inf")
