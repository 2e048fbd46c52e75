"""Cross-field checks: each names the keys, the values and what is legal, and what it calls legal passes."""

import dataclasses
import math
import re
import subprocess
import sys
from typing import Any

import pytest

from megadcp.config import check as check_module
from megadcp.config.check import UserError, check, nearest
from megadcp.config.load import compose
from megadcp.config.run_file import from_dict, to_dict
from megadcp.config.schema import Config, settings

QUICKSTART, LARGE = to_dict(compose()), to_dict(compose(["experiment=gpt_70b"]))


def changed(base: dict[str, Any], **values: Any) -> Config:
    """`base` with some settings replaced: a__b=1 sets a.b."""
    config: Any = from_dict(base)
    for name, value in values.items():
        config = replaced(config, name.split("__"), value)
    return config


def replaced(node: Any, names: list[str], value: Any) -> Any:
    new = value if len(names) == 1 else replaced(getattr(node, names[0]), names[1:], value)
    return dataclasses.replace(node, **{names[0]: new})


def refusal(config: Config) -> str:
    with pytest.raises(UserError) as error:
        check(config)
    assert "\n" not in str(error.value)
    return str(error.value)


def sources(*items: dict[str, Any]) -> tuple[Any, ...]:
    return from_dict({"data": {"train": list(items)}}, allow_missing=True).data.train


def test_the_example_of_the_style_guide() -> None:
    config = changed(QUICKSTART, model__heads=16, model__kv_heads=16, parallel__tp=3, cluster__processes=3)
    assert refusal(config) == "parallel.tp=3 does not divide model.heads=16; legal here: 1, 2, 4, 8, 16"


QUICKSTART_FAULTS: list[tuple[dict[str, Any], list[str]]] = [
    ({"model__norm": "rmsnrom"}, ["model.norm=rmsnrom", "nearest: rmsnorm", "layernorm"]),
    ({"model__rope__scaling": "llama"}, ["model.rope.scaling=llama", "nearest: llama3"]),
    ({"precision__format": "fp16"}, ["precision.format=fp16", "bf16"]),
    ({"model__layers": 0}, ["model.layers=0", "1 and above"]),
    ({"model__layers": -1}, ["model.layers=-1"]),
    ({"optim__lr": 0.0}, ["optim.lr=0.0", "above 0"]),
    ({"optim__lr": math.nan}, ["optim.lr=nan", "finite"]),
    ({"optim__lr": math.inf}, ["optim.lr=inf", "finite"]),
    ({"optim__weight_decay": -0.1}, ["optim.weight_decay=-0.1", "0 and above"]),
    ({"optim__beta2": 1.0}, ["optim.beta2=1.0", "below 1"]),
    ({"optim__min_lr_share": 1.5}, ["optim.min_lr_share=1.5", "up to 1"]),
    ({"hardware__peak_flops": 0.0}, ["hardware.peak_flops=0.0", "above 0"]),
    ({"run__name": "???"}, ["run.name", "must be given"]),
    ({"run__name": "a/b"}, ["run.name='a/b'"]),
    ({"run__name": ".."}, ["run.name='..'"]),
    ({"run__name": "-m"}, ["run.name='-m'"]),
    ({"run__folder": ""}, ["run.folder"]),
    ({"data__tokenizer__path": ""}, ["run.sample_prompt", "data.tokenizer.path"]),
    ({"model__attention_dropout": 0.1}, ["model.attention_dropout=0.1", "depend on the packing", "set 0", "residual_dropout"]),
    ({"model__residual_dropout": 1.0}, ["model.residual_dropout=1.0", "below 1"]),
    ({"model__kv_heads": 3}, ["model.kv_heads=3", "model.heads=4", "1, 2, 4"]),
    ({"model__kv_heads": 8}, ["model.kv_heads=8", "model.heads=4"]),
    ({"model__position": "learned"}, ["model.max_position", "data.max_length=512"]),
    ({"model__position": "learned", "model__max_position": 511}, ["model.max_position=511", "data.max_length=512"]),
    ({"model__max_position": 512}, ["model.max_position=512", "model.position=rope"]),
    ({"model__head_dim": 33}, ["model.head_dim=33", "even"]),
    ({"model__rope__scaling": "yarn", "model__rope__factor": 0.5}, ["model.rope.factor=0.5", "model.rope.scaling=yarn"]),
    ({"model__rope__scaling": "yarn", "model__rope__beta_slow": 40.0}, ["model.rope.beta_slow=40.0", "model.rope.beta_fast=32.0"]),
    ({"model__rope__scaling": "llama3", "model__rope__low_freq_factor": 4.0}, ["model.rope.low_freq_factor=4.0", "model.rope.high_freq_factor=4.0"]),
    ({"parallel__cuda_graphs": -1}, ["parallel.cuda_graphs=-1", "0 and above"]),
    ({"parallel__cuda_graphs": 2}, ["parallel.cuda_graphs=2", "precision.format=bf16", "not for fp32"]),
    ({"data__max_length": 1}, ["data.max_length=1", "2 or more"]),
    ({"data__tokens_per_step": 511}, ["data.tokens_per_step=511", "data.max_length=512", "at least 512"]),
    ({"data__mode": "stream", "data__tokens_per_step": 1000}, ["data.mode=stream", "data.tokens_per_step=1000", "512 or 1024"]),
    ({"data__mask_eod_loss": True}, ["data.mask_eod_loss=true", "data.mode=documents"]),
    ({"data__tokenizer__kind": "bytes"}, ["data.prepare.kind=python_library", "data.tokenizer.kind=bytes"]),
    ({"data__train": ()}, ["data.train is empty"]),
    ({"data__train": sources({"prefix": "a/x"}, {"prefix": "b/x"})}, ["data.train[0]", "data.train[1]", "called x", "data.train[1].name"]),
    ({"data__validation": sources({"prefix": "a", "weight": 0.0})}, ["data.validation[0].weight=0.0", "above 0"]),
    ({"data__train": sources({"prefix": "a"}, {"prefix": "b", "weight": 0.0})}, ["data.train[1].weight=0.0", "above 0"]),
    ({"data__train": sources({"prefix": ""})}, ["data.train[0].prefix"]),
    ({"data__split": (0.9, 0.1)}, ["data.split=[0.9, 0.1]", "three"]),
    ({"data__split": (0.9, 0.2, 0.0)}, ["data.split=[0.9, 0.2, 0.0]", "sums to 1.1", "[0.818182,0.181818,0]"]),
    ({"data__split": (1.5, -0.5, 0.0)}, ["data.split", "below 0"]),
    ({"data__split": (0.0, 1.0, 0.0)}, ["data.split", "nothing to train on"]),
    ({"data__split": (0.0, 0.0, 0.0)}, ["data.split", "sums to 0"]),
    ({"plan__pack_tokens": 511}, ["plan.pack_tokens=511", "data.max_length=512", "at least 512"]),
    ({"plan__recompute_layers": 2}, ["plan.recompute_layers=2", "plan.recompute=auto"]),
    ({"plan__recompute": "full", "plan__recompute_layers": 5}, ["plan.recompute_layers=5", "0 to 4"]),
    ({"optim__warmup_tokens": 10}, ["optim.warmup_steps=40", "optim.warmup_tokens=10", "both"]),
    ({"optim__warmup_steps": 801}, ["optim.warmup_steps=801", "run.steps=800"]),
    ({"optim__warmup_steps": 0, "optim__warmup_tokens": 819201}, ["optim.warmup_tokens=819201", "0 to 819200"]),
    ({"precision__format": "fp8_block"}, ["precision.format=fp8_block", "128", "model.ffn / parallel.tp = 320", "256 or 384", "precision=bf16"]),
    ({"precision__format": "fp8_current", "model__hidden": 100}, ["precision.format=fp8_current", "by 16", "model.hidden = 100", "96 or 112"]),
    ({"precision__backend": "te", "cluster__device": "cuda"}, ["precision.backend=te", "fp32", "legal with it: bf16, fp8_current, fp8_block"]),
    ({"precision__backend": "te", "precision__format": "bf16", "cluster__device": "cpu"}, ["needs a GPU", "cluster.device=cuda"]),
    (
        {"precision__backend": "te", "precision__format": "bf16", "cluster__device": "cuda", "model__head_dim": 20},
        ["model.head_dim=20", "multiples of 8"],
    ),
    ({"precision__format": "fp8_delayed"}, ["precision.format=fp8_delayed is not had", "different numbers", "fp8_current, fp8_block"]),
    ({"precision__backend": "tr"}, ["precision.backend=tr does not exist", "auto, torch, te"]),
    ({"precision__bf16_ends": 1}, ["precision.bf16_ends=1 has no effect with precision.format=fp32"]),
    ({"precision__bf16_ends": 2, "precision__format": "fp8_current"}, ["precision.bf16_ends=2", "model.layers=4", "legal here: 0 to 1"]),
    ({"precision__format": "fp8_current", "model__hidden": 8}, ["model.hidden = 8", "nearest: 16,"]),
    ({"precision__format": "fp8_current", "model__heads": 8, "model__kv_heads": 1, "model__head_dim": 4}, ["kv_heads", "= 40", "32 or 48"]),
    ({"cluster__environment": {"2X": "1"}}, ["cluster.environment", "'2X'", "letters"]),
    ({"cluster__environment": {"LOCAL_RANK": "1"}}, ["cluster.environment.LOCAL_RANK", "starts the ranks"]),
    ({"cluster__environment": {"SLURM_NTASKS": "1"}}, ["cluster.environment.SLURM_NTASKS"]),
    ({"cluster__environment": {"NCCL_DEBUG": "WARN\nX=1"}}, ["cluster.environment.NCCL_DEBUG", "one line"]),
    ({"parallel__virtual_stages": 2}, ["parallel.virtual_stages=2", "parallel.pp=1"]),
    ({"parallel__max_cp": 2}, ["parallel.max_cp=2", "1 lanes", "0, 1"]),
    ({"parallel__pp": 2}, ["parallel.pp=2", "cluster.nodes=1", "1 ranks"]),
]


@pytest.mark.parametrize(("values", "parts"), QUICKSTART_FAULTS, ids=lambda each: "-".join(each)[:60])
def test_contradictions_of_a_small_run(values: dict[str, Any], parts: list[str]) -> None:
    message = refusal(changed(QUICKSTART, **values))
    for part in parts:
        assert part in message, message


LARGE_FAULTS: list[tuple[dict[str, Any], list[str]]] = [
    ({"parallel__tp": 3}, ["parallel.tp=3", "model.heads=64", "1, 2, 4, 8"]),
    ({"parallel__tp": 5, "model__heads": 80, "model__kv_heads": 8}, ["parallel.tp=5", "model.ffn=28672"]),
    ({"parallel__tp": 16, "model__heads": 48, "model__kv_heads": 24}, ["parallel.tp=16 neither", "model.kv_heads=24"]),
    ({"parallel__pp": 3}, ["parallel.tp=8", "parallel.pp=3", "24", "32 ranks"]),
    ({"parallel__tp": 16, "parallel__pp": 2}, ["parallel.tp=16", "cluster.processes=8", "1, 2, 4, 8"]),
    ({"model__layers": 81}, ["parallel.pp=4", "model.layers=81", "1, 3, 9, 27, 81", "stage_layers"]),
    ({"parallel__virtual_stages": 3}, ["parallel.pp=4 x parallel.virtual_stages=3", "model.layers=80"]),
    ({"parallel__stage_layers": (20, 20, 20)}, ["parallel.stage_layers=[20, 20, 20]", "3 stages", "parallel.pp=4"]),
    ({"parallel__stage_layers": (20, 20, 20, 21)}, ["81 layers", "model.layers=80"]),
    ({"parallel__stage_layers": (79, 1, 0, 0)}, ["fewer layers", "parallel.virtual_stages=1"]),
    ({"parallel__pp": 1, "parallel__max_cp": 3}, ["parallel.max_cp=3", "4 lanes", "0, 1, 2, 4"]),
    ({"model__ffn": 28680}, ["precision.format=fp8_current", "model.ffn / parallel.tp = 3585", "3584 or 3600"]),
]


@pytest.mark.parametrize(("values", "parts"), LARGE_FAULTS, ids=lambda each: "-".join(each)[:60])
def test_contradictions_of_a_layout(values: dict[str, Any], parts: list[str]) -> None:
    message = refusal(changed(LARGE, **values))
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize(
    ("base", "values"),
    [
        (QUICKSTART, {"model__kv_heads": 1}),
        (QUICKSTART, {"precision__format": "fp8_current", "model__hidden": 112}),
        (QUICKSTART, {"precision__format": "fp8_block", "model__ffn": 384}),
        (QUICKSTART, {"cluster__environment": {"NCCL_DEBUG": "WARN", "_X": ""}}),
        (QUICKSTART, {"model__position": "learned", "model__max_position": 512}),
        (QUICKSTART, {"model__position": "learned", "model__max_position": 512, "model__head_dim": 33}),
        (QUICKSTART, {"data__tokens_per_step": 512}),
        (QUICKSTART, {"data__mode": "stream", "data__mask_eod_loss": True}),
        (QUICKSTART, {"data__split": (0.8, 0.1, 0.1)}),
        (QUICKSTART, {"data__split": (1 / 3, 1 / 3, 1 / 3)}),
        (QUICKSTART, {"data__train": sources({"prefix": "a/x"}, {"prefix": "b/x", "name": "y"})}),
        (QUICKSTART, {"plan__recompute": "full", "plan__recompute_layers": 4}),
        (QUICKSTART, {"optim__warmup_steps": 800}),
        (QUICKSTART, {"optim__warmup_steps": 0, "optim__warmup_tokens": 819200}),
        (QUICKSTART, {"run__sample_prompt": "", "data__tokenizer__path": ""}),
        (LARGE, {"parallel__virtual_stages": 5}),
        (LARGE, {"parallel__stage_layers": (19, 21, 21, 19)}),
        (LARGE, {"parallel__pp": 1, "parallel__max_cp": 4}),
        (LARGE, {"model__kv_heads": 4}),  # fewer key heads than tp: they are kept more than once
    ],
    ids=lambda each: "-".join(each)[:60],
)
def test_legal_neighbours_pass(base: dict[str, Any], values: dict[str, Any]) -> None:
    check(changed(base, **values))


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_what_a_message_calls_legal_is_legal(tp: int) -> None:
    message = refusal(changed(LARGE, parallel__tp=3))
    legal = [int(each) for each in message.rsplit("legal here: ", 1)[1].split(", ")]
    assert tp in legal
    check(changed(LARGE, parallel__tp=tp))


def test_every_numeric_setting_has_a_lower_bound() -> None:
    base = from_dict(QUICKSTART)
    for name, _ in settings():
        value: Any = base
        for part in name.split("."):
            value = getattr(value, part)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            assert name in refusal(replaced(base, name.split("."), type(value)(-1))), name


def test_tables_of_bounds_name_real_settings() -> None:
    names = {name for name, _ in settings()}
    for table in (check_module.AT_LEAST_ONE, check_module.ABOVE_ZERO, check_module.BELOW_ONE, check_module.UP_TO_ONE):
        assert table <= names


def test_nearest() -> None:
    assert nearest("rmsnrom", ["rmsnorm", "layernorm"]).startswith("nearest: rmsnorm")
    assert nearest("zzz", ["rmsnorm", "layernorm"]) == "legal here: rmsnorm, layernorm"
    assert re.fullmatch("nearest: name7", nearest("nam7", [f"name{index}" for index in range(20)]))


def test_check_needs_the_standard_library_only() -> None:
    code = "import sys; sys.modules.update(hydra=None, omegaconf=None, torch=None, numpy=None, yaml=None)\nimport megadcp.config.check"
    subprocess.run([sys.executable, "-c", code], check=True)
