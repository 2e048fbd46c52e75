"""What a config.json may say, and what is refused by name."""

from __future__ import annotations

import dataclasses

import pytest

from megadcp.config.check import UserError
from megadcp.config.schema import ModelConfig, RopeConfig
from megadcp.interop.hf_config import family_of, read_config, write_config

# Published files, as they were first written by several versions of transformers.
LLAMA_2 = {
    "_name_or_path": "x", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.31.0", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
LLAMA_31 = LLAMA_2 | {
    "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": [128001, 128008], "intermediate_size": 14336, "mlp_bias": False,
    "max_position_embeddings": 131072, "num_key_value_heads": 8, "rope_theta": 500000.0, "vocab_size": 128256,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
}  # fmt: skip
QWEN_25 = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643, "hidden_act": "silu",
    "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24,
    "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True, "use_mrope": False,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN_3 = QWEN_25 | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "attention_bias": False, "sliding_window": None}
GPT_2 = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256, "embd_pdrop": 0.1,
    "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12,
    "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 50257,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}  # fmt: skip
PUBLISHED = {"llama 2": LLAMA_2, "llama 3.1": LLAMA_31, "qwen 2.5": QWEN_25, "qwen 3": QWEN_3, "gpt 2": GPT_2}


def read(values, *ignored):
    return read_config(values, "config.json", ignored)


def test_llama_31():
    found = read(LLAMA_31)
    rope = RopeConfig(theta=500000.0, scaling="llama3", factor=8.0, original_max_position=8192)
    expected = ModelConfig(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256, rope=rope)
    assert (found.family, found.model, found.context, found.notes) == ("llama", expected, 131072, ())


def test_llama_files_without_theta_have_the_first_ones():
    assert read(LLAMA_2).model.rope == RopeConfig(theta=10000.0)


def test_qwen():
    two, three = read(QWEN_25).model, read(QWEN_3).model
    assert (two.qkv_bias, two.out_bias, two.mlp_bias, two.qk_norm, two.tied, two.head_dim) == (True, False, False, False, True, 64)
    assert (three.qkv_bias, three.out_bias, three.qk_norm, three.head_dim) == (False, False, True, 128)
    assert two.rope.theta == 1e6


def test_gpt_2():
    found = read(GPT_2)
    model = found.model
    assert (model.position, model.max_position, model.ffn, model.mlp, model.tied) == ("learned", 1024, 3072, "gelu_tanh", True)
    assert (model.embedding_dropout, model.residual_dropout, model.attention_dropout) == (0.1, 0.1, 0.0)
    assert found.notes == ("attn_pdrop=0.1 is not taken over: dropout inside attention is not supported",)


@pytest.mark.parametrize("name", PUBLISHED)
def test_written_again_it_says_the_same(name):
    found = read(PUBLISHED[name])
    again = read(write_config(found.model, found.context, "float32", 2))
    assert again.model == found.model
    assert (again.family, again.context) == (found.family, found.context)


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_unknown_field_is_an_error_unless_it_is_named(name):
    values = PUBLISHED[name] | {"sigma_reparam": True, "logit_scale": 0.5}
    with pytest.raises(UserError, match=r"config.json: fields that this program does not know.*: logit_scale=0.5, sigma_reparam=True;"):
        read(values)
    with pytest.raises(UserError, match=r"does not know.*: logit_scale=0.5;"):
        read(values, "sigma_reparam")
    assert read(values, "sigma_reparam", "logit_scale").model == read(PUBLISHED[name]).model


REFUSED = {
    "family": (LLAMA_2 | {"model_type": "falcon"}, "model_type='falcon' is not supported; legal here: llama"),
    "head": (LLAMA_2 | {"architectures": ["LlamaForSequenceClassification"]}, "no plain language model"),
    "code": (LLAMA_2 | {"auto_map": {"AutoModel": "x--y.Z"}}, "auto_map names code"),
    "quantised": (LLAMA_2 | {"quantization_config": {"bits": 4}}, "quantised weights"),
    "act": (LLAMA_2 | {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
    "no size": ({k: v for k, v in LLAMA_2.items() if k != "hidden_size"}, "hidden_size is missing"),
    "no eps": (LLAMA_2 | {"rms_norm_eps": None}, "rms_norm_eps is missing"),
    "layers": (LLAMA_2 | {"num_hidden_layers": -1}, "num_hidden_layers=-1 is no size"),
    "layers text": (LLAMA_2 | {"num_hidden_layers": "32"}, "num_hidden_layers='32' is no size"),
    "flag": (LLAMA_2 | {"tie_word_embeddings": "no"}, "tie_word_embeddings='no' is neither true nor false"),
    "groups": (LLAMA_2 | {"num_key_value_heads": 5}, "num_key_value_heads=5 does not divide num_attention_heads=32"),
    "odd": (LLAMA_2 | {"head_dim": 127}, "head_dim=127 is odd"),
    "eps": (LLAMA_2 | {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan is not legal"),
    "rope kind": (LLAMA_2 | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic' is not supported"),
    "rope field": (LLAMA_2 | {"rope_scaling": {"type": "linear", "factor": 2.0, "tricks": 1}}, "rope_scaling: fields that.*: tricks=1"),
    "rope part": (LLAMA_2 | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 is not supported"),
    "rope 2": (LLAMA_31 | {"rope_parameters": {"rope_theta": 5e5}}, "rope_parameters and rope_scaling contradict"),
    "thetas": (LLAMA_2 | {"rope_theta": 1e5, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta=100000 and rope_parameters' 500000 contradict"),
    "rope factor": (LLAMA_2 | {"rope_scaling": {"type": "linear"}}, "factor is missing"),
    "rope mscale": (LLAMA_2 | {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 1.0}}, "mscale=1.0"),
    "qwen without theta": ({k: v for k, v in QWEN_25.items() if k != "rope_theta"}, "neither rope_parameters nor rope_theta"),
    "window": (QWEN_25 | {"use_sliding_window": True}, "use_sliding_window=True is not supported"),
    "layer types": (QWEN_3 | {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has layers other than"),
    "gpt2 ctx": (GPT_2 | {"n_ctx": 512}, "n_ctx=512 is not supported"),
    "gpt2 scale": (GPT_2 | {"scale_attn_weights": False}, "scale_attn_weights=False"),
    "gpt2 act": (GPT_2 | {"activation_function": "swish"}, "activation_function='swish' is not supported; legal here: gelu_new"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    values, message = REFUSED[name]
    with pytest.raises(UserError, match=message) as caught:
        read(values)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("config.json")


def test_windows_that_do_nothing():
    mistral = LLAMA_31 | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}
    for name in ("attention_bias", "mlp_bias"):
        del mistral[name]
    assert read(mistral).model == read(LLAMA_31).model
    with pytest.raises(UserError, match="sliding_window=4096 is not supported"):
        read(mistral | {"sliding_window": 4096})


def test_dropout_in_attention_is_told():
    assert read(LLAMA_2 | {"attention_dropout": 0.1}).notes == ("attention_dropout=0.1 is not taken over: dropout inside attention is not supported",)


def test_yarn_names_the_context_that_old_versions_divide():
    model = dataclasses.replace(read(LLAMA_2).model, rope=RopeConfig(scaling="yarn", factor=4.0, original_max_position=4096))
    assert write_config(model, 999, "float32", None)["max_position_embeddings"] == 16384
    assert family_of(model) == "llama"
