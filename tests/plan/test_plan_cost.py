import random
from dataclasses import replace

import numpy as np
import plan_reference as ref
import pytest

from megadcp.plan.cost import CostModel, Load
from megadcp.plan.step_plan import Microbatch, Recompute


def test_one_lane_by_hand():
    # h = 100, H = G = 2, d = 50, f = 200, gated: one layer has 100*50*8 + 3*100*200 = 100,000 weights.
    model = ref.ModelConfig(layers=2, hidden=100, heads=2, kv_heads=2, head_dim=50, ffn=200, vocab=1000)
    hardware = replace(
        ref.H200,
        gemm_flops=ref.GemmFlops(1e9, 2e9, 4e9),
        gemm_half_tokens=100.0,
        attention_flops=1e9,
        attention_half_length=50.0,
        layer_overhead_seconds=0.001,
    )
    cost = CostModel(ref.basis(model, "fp32", hardware=hardware))
    one = Microbatch(0, 0, 1, (0, 1), (200, 100))
    # Linear forward: 2 * 300 * 100,000 FLOPs = 6e7 at 1e9 * 300/400 = 0.75e9: 0.08 s; with backward 0.24 s.
    # Attention forward: 2*50*2*(200^2/0.8 + 100^2/(2/3)) / 1e9 = 200 * (50,000 + 15,000) / 1e9 = 0.013 s; with backward 0.0455 s.
    # Head: 6 * 300 * 100 * 1000 FLOPs = 1.8e8 at 0.75e9: 0.24 s.
    assert cost.seconds(one) == pytest.approx(2 * (0.24 + 0.0455 + 0.001) + 0.24, rel=1e-12)
    # MLP forward is 60,000 of the 100,000 weights: 0.048 s. Selective: 6% of 0.08. Full: 0.08 + 0.013.
    for level, extra in (("mlp", 0.048), ("selective", 0.0048), ("full", 0.093)):
        again = replace(one, recompute=Recompute(level, 1))
        assert cost.seconds(again) - cost.seconds(one) == pytest.approx(extra, rel=1e-9)
    assert CostModel(ref.basis(model, "bf16", hardware=hardware)).seconds(one) == pytest.approx(2 * (0.12 + 0.0455 + 0.001) + 0.12, rel=1e-12)


def test_8b_on_h200_by_hand():
    cost = CostModel(ref.basis(ref.GPT_8B, "bf16"))
    assert cost.flops_per_token == 2 * (4096 * 128 * 80 + 3 * 4096 * 14336)  # 436,207,616
    # 32,768 tokens in one document: per layer 3 * 436207616 * 33280 / 480e12 + 3.5 * 8192 * 32768 * 33368 / 384e12 + 0.0002
    layer = 3 * 436207616 * 33280 / 480e12 + 3.5 * 8192 * 32768 * 33368 / 384e12 + 0.0002
    head = 6 * 4096 * 128256 * 33280 / 480e12
    assert cost.seconds(Microbatch(0, 0, 1, (0,), (32768,))) == pytest.approx(32 * layer + head, rel=1e-12)


BASES = {
    "one lane": dict(model=ref.SMALL),
    "sixteen lanes": dict(model=ref.GPT_1B, lanes=16, precision="fp8_current"),
    "tp 4": dict(model=ref.GPT_8B, lanes=4, tp=4),
    "tp above kv heads": dict(model=replace(ref.SMALL, kv_heads=2), lanes=4, tp=4),
    "uneven pipeline": dict(model=ref.SMALL, lanes=8, pp=3, stage_layers=(3, 2, 1), precision="fp32"),
    "interleaved": dict(model=ref.GPT_8B, lanes=4, pp=4, virtual_stages=2, stage_layers=(9, 9, 8, 6)),
    "plain mlp": dict(model=replace(ref.SMALL, mlp="gelu", tied=True), lanes=2),
    "three lanes a node": dict(model=ref.SMALL, lanes=6, hardware=replace(ref.H200, gpus_per_node=3)),
}


@pytest.mark.parametrize("name", BASES)
def test_equals_a_literal_reading(name):
    b = ref.basis(**BASES[name])
    kinds = set()
    for seed in range(20):
        for one in ref.random_plan(b, random.Random(seed), longest=60000).microbatches:
            kinds.add(one.cp_comm)
            assert CostModel(b).stage_seconds(one) == pytest.approx(ref.stage_seconds(b, one), rel=1e-12)
    if name == "sixteen lanes":
        assert kinds == {"none", "ring", "all_gather", "ulysses", "2d"}


def test_legal_kinds():
    cost = CostModel(ref.basis(ref.GPT_1B, lanes=32))  # 8 kv heads, 8 lanes a node
    assert cost.legal_kinds(1) == ("none",)
    assert cost.legal_kinds(8) == ("ring", "all_gather", "ulysses")  # 2d would have A = P
    assert cost.legal_kinds(16) == ("ring", "all_gather", "2d")
    assert not cost.legal("none", 2)
    assert not cost.legal("ring", 1)
    assert not cost.legal("carrier pigeon", 2)
    assert CostModel(ref.basis(replace(ref.SMALL, heads=6, kv_heads=3), lanes=4)).legal_kinds(2) == ("ring", "all_gather")


def test_default_kind_is_the_least_and_ties_go_in_order():
    b = ref.basis(ref.GPT_8B, lanes=32)
    cost = CostModel(b)
    chosen = set()
    for cp in (2, 4, 8, 16, 32):
        for tokens, documents in ((512, 8), (8192, 1), (65536, 16), (131072, 1)):
            load = Load(tokens, tokens * tokens // documents, cp, "none", cost.in_node(0, cp))
            times = {}
            for kind in cost.legal_kinds(cp):
                layer = cost.layer(load._replace(kind=kind))
                times[kind] = 3.5 * layer.attention + layer.exposed
            chosen.add(cost.best_kind(load))
            assert times[cost.best_kind(load)] == pytest.approx(min(times.values()), abs=1e-9)
    assert len(chosen) >= 3
    free = replace(ref.H200, attention_half_length=0.0, node_bytes=1e30, net_bytes=1e30, node_latency=0.0, ring_step_seconds=0.0)
    assert CostModel(ref.basis(ref.GPT_8B, lanes=4, hardware=free)).best_kind(Load(4096, 4096**2, 4)) == "ring"


def test_many_at_once_equals_one_by_one():
    cost = CostModel(ref.basis(ref.GPT_8B, lanes=16, tp=2))
    tokens = np.array([64.0, 1000.0, 131072.0])
    for kind in ("ring", "all_gather", "2d"):
        many = cost.layer(Load(tokens, tokens * tokens, 8, kind, False))
        together = cost.stages(many, tokens / 8, "full", np.array([1.0, 2.0, 3.0]))[0]
        for index, length in enumerate((64, 1000, 131072)):
            alone = cost.layer(Load(length, length * length, 8, kind, False))
            assert together[index] == cost.stages(alone, length / 8, "full", index + 1)[0]
