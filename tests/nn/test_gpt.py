"""Initial weights, names, optimizer groups and what is refused."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from nn_helpers import FAMILIES, documents, pack, place

from megadcp.backends.torch_backend import TorchBackend
from megadcp.config.check import UserError
from megadcp.config.schema import ModelConfig
from megadcp.nn.gpt import GPT, decay_groups
from megadcp.nn.init import initial


def _make(config, seed=1, dtype=torch.float32):
    return GPT(config, TorchBackend(dtype), seed, 64)


def test_parameter_names_are_layout_free():
    names = set(dict(_make(FAMILIES["gpt2"]).named_parameters()))
    layer = [
        "attention_norm.weight",
        "attention_norm.bias",
        "attention.qkv.weight",
        "attention.qkv.bias",
        "attention.out.weight",
        "attention.out.bias",
    ]
    layer += ["mlp_norm.weight", "mlp_norm.bias", "mlp.up.weight", "mlp.up.bias", "mlp.down.weight", "mlp.down.bias"]
    whole = {"embedding.weight", "positions.weight", "norm.weight", "norm.bias"}
    assert names == whole | {f"layers.{index}.{name}" for index in range(2) for name in layer}
    assert "head.weight" in dict(_make(FAMILIES["llama"]).named_parameters())
    assert "layers.1.attention.q_norm.weight" in dict(_make(FAMILIES["qk_norm_learned"]).named_parameters())


def test_initial_weights_depend_on_seed_and_name_only():
    config = FAMILIES["llama"]
    state = torch.get_rng_state()
    first = _make(config).state_dict()
    assert torch.equal(torch.get_rng_state(), state), "the global generator was drawn from"
    torch.manual_seed(12345)
    torch.rand(7)
    again = _make(config).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    deeper = _make(dataclasses.replace(config, layers=5, depth_scaled_init=False)).state_dict()
    assert torch.equal(first["layers.1.attention.qkv.weight"], deeper["layers.1.attention.qkv.weight"])
    other = _make(config, seed=2).state_dict()
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])
    assert not torch.equal(first["layers.0.mlp.up.weight"], first["layers.1.mlp.up.weight"])
    assert torch.equal(_make(config, dtype=torch.bfloat16).state_dict()["head.weight"], first["head.weight"].bfloat16())


def test_initial_weights_keep_their_values_over_versions():
    """Golden: a change here changes every run's start, so it must be on purpose."""
    values = initial("layers.0.attention.qkv.weight", (4, 8), ModelConfig(), 1234)
    assert values[0, :4].tolist() == pytest.approx([-0.02195496, 0.00660888, -0.02339701, -0.00410545], rel=1e-5)


def test_standard_deviations():
    config = ModelConfig(layers=8, hidden=64, heads=4, kv_heads=4, head_dim=32, ffn=256, vocab=500, init_std=0.05)
    state = _make(config).state_dict()
    for name, value in state.items():
        if value.ndim == 1:
            assert torch.equal(value, torch.ones_like(value)), name
            continue
        residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
        expected = 0.05 / math.sqrt(16) if residual else 0.05
        assert value.std().item() == pytest.approx(expected, rel=0.05), name
    flat = _make(dataclasses.replace(config, depth_scaled_init=False)).state_dict()
    assert flat["layers.0.mlp.down.weight"].std().item() == pytest.approx(0.05, rel=0.05)
    biased = _make(FAMILIES["gpt2"]).state_dict()
    assert all(torch.count_nonzero(value) == 0 for name, value in biased.items() if name.endswith("bias"))


def test_initial_loss_is_that_of_guessing():
    config = ModelConfig(layers=2, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=128, vocab=512)
    batch = pack(documents([200, 57], config.vocab))
    loss = _make(config)(batch, place()).item() / 255
    assert loss == pytest.approx(math.log(512), abs=0.05)


def test_a_meta_model_holds_nothing():
    made = GPT(ModelConfig(), TorchBackend(device="meta"), 1, 64)
    assert all(parameter.is_meta for parameter in made.parameters())


def test_decay_groups():
    made = _make(FAMILIES["gpt2"])
    decayed, plain = decay_groups(made, 0.1)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    by_id = {id(p): name for name, p in made.named_parameters()}
    assert all(by_id[id(p)].endswith("weight") and "norm" not in by_id[id(p)] for p in decayed["params"])
    assert all(by_id[id(p)].endswith("bias") or "norm" in by_id[id(p)] for p in plain["params"])
    assert len(decayed["params"]) + len(plain["params"]) == len(by_id)
    made.embedding.requires_grad_(False)
    assert len(decay_groups(made, 0.1)[0]["params"]) == len(decayed["params"]) - 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_heads": 3}, "kv_heads=3 does not divide model.heads=4; legal here: 1, 2, 4"),
        ({"head_dim": 7}, "head_dim=7 is odd"),
        ({"position": "learned"}, "max_position >= 1"),
        ({"residual_dropout": 1.0}, "residual_dropout=1.0 is no probability"),
    ],
)
def test_impossible_models_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        _make(dataclasses.replace(FAMILIES["llama"], **change))


@pytest.mark.parametrize(("change", "message"), [({"norm": "batch"}, "norm=batch"), ({"mlp": "relu"}, "mlp=relu")])
def test_unknown_choices_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        _make(dataclasses.replace(FAMILIES["llama"], **change))


def test_a_few_optimizer_steps_learn_a_pattern():
    config = FAMILIES["llama"]
    made = _make(config)
    optimizer = TorchBackend().optimizer(decay_groups(made, 0.1), 1e-2, (0.9, 0.95), 1e-8)
    batch = pack([torch.arange(20) % 7, torch.arange(3, 18) % 7])
    losses = []
    for _ in range(30):
        loss = made(batch, place()) / 33
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]
