from dataclasses import replace
from pathlib import Path

import plan_reference as ref
import pytest
import yaml

from megadcp.config.check import UserError
from megadcp.config.schema import MISSING, ClusterConfig, ParallelConfig
from megadcp.plan.basis import layout_from, profile_from, shape_from, stage_layers_from, unit_of
from megadcp.plan.step_plan import Layout

CONFIGS = Path(__file__).parents[2] / "configs"


def test_profile_takes_the_rate_of_the_precision():
    assert [profile_from(ref.H200, precision).gemm_flops for precision in ("fp32", "bf16", "fp8_current", "fp8_block")] == [
        50e12,
        480e12,
        720e12,
        720e12,
    ]
    profile = profile_from(replace(ref.H200, attention_flops=123456789123.0, loss_chunk=100), "bf16")
    assert (profile.attention_flops, profile.loss_chunk) == (123456789000.0, 100)
    assert isinstance(profile.gemm_half_tokens, float)  # also from YAML's 512


def test_h200_config_is_the_contract_s_profile():
    written = yaml.safe_load((CONFIGS / "hardware" / "h200.yaml").read_text())
    for name, value in vars(ref.H200).items():
        assert written[name] == (vars(value) if name == "gemm_flops" else value) or name == "peak_flops"


def test_a_profile_that_is_not_set_is_refused_by_name():
    with pytest.raises(UserError, match=r"hardware.node_bytes is not set"):
        profile_from(replace(ref.H200, node_bytes=MISSING), "bf16")
    with pytest.raises(UserError, match=r"hardware.gemm_flops.fp8 is not set"):
        profile_from(replace(ref.H200, gemm_flops=ref.GemmFlops(1e12, 1e12, MISSING)), "fp8_block")
    with pytest.raises(UserError, match=r"precision\.format=int8 is not known; legal here: fp32, bf16, fp8_current, fp8_block"):
        profile_from(ref.H200, "int8")


def test_units():
    assert [unit_of(name) for name in ("fp32", "bf16", "fp8_current", "fp8_block")] == [1, 1, 16, 128]
    assert ref.basis(ref.GPT_8B, "fp8_current", tp=4).align == 64
    assert ref.basis(ref.GPT_8B, "fp8_current", tp=4, sequence_parallel=False).align == 16


def test_layout():
    assert layout_from(ParallelConfig(), ClusterConfig(nodes=4, processes=8), 8) == Layout(32, 8)
    assert layout_from(ParallelConfig(tp=8, pp=4), ClusterConfig(nodes=16, processes=8), 8) == Layout(4, 1, 8, 4)
    assert layout_from(ParallelConfig(tp=16), ClusterConfig(nodes=4, processes=8), 8).lanes_per_node == 1
    with pytest.raises(UserError, match=r"parallel.tp=3 \* parallel.pp=1 = 3 does not divide the job's 8 ranks .* 1, 2, 4, 8"):
        layout_from(ParallelConfig(tp=3), ClusterConfig(processes=8), 8)
    with pytest.raises(UserError, match="does not divide"):
        layout_from(ParallelConfig(tp=8), ClusterConfig(processes=1), 8)


def test_stage_layers():
    assert stage_layers_from(ParallelConfig(pp=4), 8) == (2, 2, 2, 2)
    assert stage_layers_from(ParallelConfig(pp=4), 10) == (3, 3, 2, 2)  # the last stage has the head already
    assert stage_layers_from(ParallelConfig(pp=2, stage_layers=(5, 3)), 8) == (5, 3)


def test_shape():
    shape = shape_from(replace(ref.SMALL, mlp="gelu", tied=True))
    assert (shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.ffn, shape.vocab) == (6, 256, 8, 4, 32, 640, 1000)
    assert (shape.gated, shape.tied) == (False, True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(pp=2, stage_layers=(3, 2)), r"stage_layers=\[3, 2\] must be 2 numbers with sum 6"),
        (dict(pp=2, virtual_stages=4), "every stage needs at least one layer per chunk"),
        (dict(virtual_stages=2), "layout.virtual_stages=2 needs a pipeline"),
        (dict(tp=16), "tp=16 does not divide model.heads=8; legal here: 1, 2, 4, 8"),
        (dict(model=replace(ref.SMALL, kv_heads=3)), "model.kv_heads=3 does not divide model.heads=8"),
        (dict(model=replace(ref.SMALL, heads=6, kv_heads=3), tp=2), "tp=2 and model.kv_heads=3: one must divide the other"),
        (dict(model=replace(ref.SMALL, ffn=0)), "model.ffn=0 must be at least 1"),
        (dict(hardware=replace(ref.H200, net_bytes=0.0)), "profile.net_bytes=0.0 must be above 0"),
        (dict(hardware=replace(ref.H200, node_latency=-1.0)), "profile.node_latency=-1.0 must be at least 0"),
        (dict(hardware=replace(ref.H200, usable_fraction=1.5)), "shares: at most 1"),
    ],
)
def test_what_contradicts_itself_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        ref.basis(**{"model": ref.SMALL, **settings})
