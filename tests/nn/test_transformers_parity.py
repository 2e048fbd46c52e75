"""Logits and all gradients equal transformers' models with the same weights (fp32, largest difference 1e-5 of the largest value)."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from nn_helpers import distance, documents, gradients, model, pack, place

from megadcp.config.schema import ModelConfig, RopeConfig

pytestmark = pytest.mark.peer
transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")

LENGTHS = [70, 1, 33, 128, 2]
SMALL = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 4, "head_dim": 16, "ffn": 112, "vocab": 211, "init_std": 0.08}
LLAMAS = {
    "plain": ModelConfig(**SMALL),
    "grouped": ModelConfig(**{**SMALL, "kv_heads": 2}),
    "one kv head, free head dim, tied": ModelConfig(**{**SMALL, "kv_heads": 1, "head_dim": 24, "tied": True}),
    "biases": ModelConfig(**SMALL, qkv_bias=True, out_bias=True, mlp_bias=True),
    "theta": ModelConfig(**SMALL, rope=RopeConfig(theta=500000.0)),
    "linear": ModelConfig(**SMALL, rope=RopeConfig(scaling="linear", factor=4.0)),
    "llama3": ModelConfig(**SMALL, rope=RopeConfig(theta=500000.0, scaling="llama3", factor=8.0, original_max_position=64)),
    "llama3 other bounds": ModelConfig(
        **SMALL, rope=RopeConfig(scaling="llama3", factor=32.0, original_max_position=100, low_freq_factor=2.0, high_freq_factor=6.0)
    ),
    "yarn": ModelConfig(**SMALL, rope=RopeConfig(scaling="yarn", factor=4.0, original_max_position=64)),
    "yarn, own amplitude and ramp": ModelConfig(
        **SMALL, rope=RopeConfig(scaling="yarn", factor=4.0, original_max_position=64, beta_fast=16.0, beta_slow=2.0, attention_factor=1.3)
    ),
}  # fmt: skip


def _rope(rope: RopeConfig) -> dict[str, object]:
    kind = "default" if rope.scaling == "none" else rope.scaling
    found: dict[str, object] = {"rope_type": kind, "rope_theta": rope.theta}
    if kind != "default":
        found["factor"] = rope.factor
    if kind in ("llama3", "yarn"):
        found["original_max_position_embeddings"] = rope.original_max_position
    if kind == "llama3":
        found |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if kind == "yarn":
        found |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        if rope.attention_factor:
            found["attention_factor"] = rope.attention_factor
    return found


def _common(config: ModelConfig) -> dict[str, object]:
    return {
        "vocab_size": config.vocab, "hidden_size": config.hidden, "intermediate_size": config.ffn, "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads, "head_dim": config.head_dim, "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied, "max_position_embeddings": 256, "rope_parameters": _rope(config.rope), "attn_implementation": "eager",
    }  # fmt: skip


def _llama_names(config: ModelConfig) -> dict[str, list[str]]:
    """Our name -> their names, whose rows stand one after the other in ours."""
    names = {"embedding.weight": ["model.embed_tokens.weight"], "norm.weight": ["model.norm.weight"]}
    if not config.tied:
        names["head.weight"] = ["lm_head.weight"]
    for index in range(config.layers):
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        names[f"{ours}.attention_norm.weight"] = [f"{theirs}.input_layernorm.weight"]
        names[f"{ours}.mlp_norm.weight"] = [f"{theirs}.post_attention_layernorm.weight"]
        if config.qk_norm:
            names |= {f"{ours}.attention.{x}_norm.weight": [f"{theirs}.self_attn.{x}_norm.weight"] for x in "qk"}
        for kind, asked in (("weight", (True, True, True)), ("bias", (config.qkv_bias, config.out_bias, config.mlp_bias))):
            if asked[0]:
                names[f"{ours}.attention.qkv.{kind}"] = [f"{theirs}.self_attn.{x}_proj.{kind}" for x in "qkv"]
            if asked[1]:
                names[f"{ours}.attention.out.{kind}"] = [f"{theirs}.self_attn.o_proj.{kind}"]
            if asked[2]:
                names[f"{ours}.mlp.up.{kind}"] = [f"{theirs}.mlp.gate_proj.{kind}", f"{theirs}.mlp.up_proj.{kind}"]
                names[f"{ours}.mlp.down.{kind}"] = [f"{theirs}.mlp.down_proj.{kind}"]
    return names


def _gpt2_names(config: ModelConfig) -> dict[str, list[str]]:
    names = {"embedding.weight": ["transformer.wte.weight"], "positions.weight": ["transformer.wpe.weight"]}
    for kind in ("weight", "bias"):
        names[f"norm.{kind}"] = [f"transformer.ln_f.{kind}"]
        for index in range(config.layers):
            ours, theirs = f"layers.{index}", f"transformer.h.{index}"
            pairs = {"attention_norm": "ln_1", "mlp_norm": "ln_2", "attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj"}
            pairs |= {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
            names |= {f"{ours}.{mine}.{kind}": [f"{theirs}.{other}.{kind}"] for mine, other in pairs.items()}
    return names


def _compare(config, theirs, names, transposed=()):
    """Copy our weights into theirs, run their model document by document, compare logits, loss and every gradient."""
    ours = model(config, loss_chunk=64)
    parameters = dict(theirs.named_parameters())
    assert sorted(name for group in names.values() for name in group) == sorted(parameters)
    assert set(names) == set(dict(ours.named_parameters()))
    with torch.no_grad():
        for name, value in ours.named_parameters():
            parts = [parameters[other] for other in names[name]]
            turned = any(name.endswith(end) for end in transposed)
            pieces = value.split([part.shape[1 if turned else 0] for part in parts])
            for part, piece in zip(parts, pieces, strict=True):
                part.copy_(piece.T if turned else piece)
    tokens = documents(LENGTHS, config.vocab)
    batch = pack(tokens)
    logits = [theirs(input_ids=document[None]).logits[0] for document in tokens]
    expected = sum(torch.nn.functional.cross_entropy(out[:-1], document[1:], reduction="sum") for out, document in zip(logits, tokens, strict=True))
    expected.backward()
    assert distance(ours.logits(batch, place()), torch.cat(logits)) < 1e-5
    loss, got = gradients(ours, batch)
    assert distance(loss, expected.detach()) < 1e-6
    for name, grad in got.items():
        turned = any(name.endswith(end) for end in transposed)
        theirs_grad = torch.cat([parameters[other].grad.T if turned else parameters[other].grad for other in names[name]])
        assert distance(grad, theirs_grad) < 1e-5, name


@pytest.mark.parametrize("name", LLAMAS)
def test_llama(name):
    config = LLAMAS[name]
    options = {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    _compare(config, transformers.LlamaForCausalLM(transformers.LlamaConfig(**_common(config), **options)), _llama_names(config))


def test_gpt2():
    config = ModelConfig(
        **SMALL, norm="layernorm", position="learned", max_position=130, mlp="gelu_tanh", qkv_bias=True, out_bias=True, mlp_bias=True, tied=True
    )
    options = transformers.GPT2Config(
        vocab_size=config.vocab, n_positions=config.max_position, n_embd=config.hidden, n_layer=config.layers, n_head=config.heads,
        n_inner=config.ffn, activation_function="gelu_new", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        layer_norm_epsilon=config.norm_eps, attn_implementation="eager",
    )  # fmt: skip
    turned = ("qkv.weight", "out.weight", "up.weight", "down.weight")  # their matrices are [in, out]
    _compare(config, transformers.GPT2LMHeadModel(options), _gpt2_names(config), turned)


def test_qwen3():
    if not hasattr(transformers, "Qwen3ForCausalLM"):
        pytest.skip("this transformers has no Qwen3")
    config = ModelConfig(**{**SMALL, "kv_heads": 2, "head_dim": 24, "tied": True}, qk_norm=True)
    options = transformers.Qwen3Config(**_common(config), attention_bias=False, use_sliding_window=False)
    _compare(config, transformers.Qwen3ForCausalLM(options), _llama_names(config))


@pytest.mark.parametrize("scaling", ["linear", "llama3", "yarn"])
def test_scaled_rope_differs_from_plain(scaling):
    """So that the parity above can fail: these settings do change the logits."""
    name = next(name for name in LLAMAS if name.startswith(scaling))
    tokens = pack(documents([100], SMALL["vocab"]))
    plain = dataclasses.replace(LLAMAS[name], rope=RopeConfig(theta=LLAMAS[name].rope.theta))
    assert distance(model(LLAMAS[name]).logits(tokens, place()), model(plain).logits(tokens, place())) > 1e-3
