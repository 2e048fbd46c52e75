"""A Hugging Face config.json and our ModelConfig, both ways. No torch.

Families: llama and its kin (qwen2: biases on queries, keys and values only; qwen3: norms on queries and keys; mistral: no biases), and gpt2.
All of them turn rotary features in halves, as nn/rope.py does (feature i with feature i + d/2), so no rows change places.

Old and new spellings of the rotary settings are read (rope_theta + rope_scaling; rope_parameters since transformers 5) and both are written: a
program that knows only one of them would otherwise take its own default without a word.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megadcp.config.check import UserError
from megadcp.config.schema import ModelConfig, RopeConfig
from megadcp.interop.hf_fields import Fields
from megadcp.interop.hf_rope import read_rope, rope_fields

ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "mistral": "MistralForCausalLM", "gpt2": "GPT2LMHeadModel",
}  # fmt: skip
ACTIVATIONS = {"gelu_tanh": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu": ("gelu",), "squared_relu": ("relu2",)}
WITHOUT_EFFECT = (  # on the logits of one whole text
    "transformers_version", "_name_or_path", "use_cache", "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id", "tokenizer_class",
    "output_attentions", "output_hidden_states", "return_dict", "return_dict_in_generate", "id2label", "label2id", "problem_type", "finetuning_task",
    "task_specific_params", "_attn_implementation_autoset", "_attn_implementation", "attn_implementation", "gradient_checkpointing", "use_bfloat16",
    "pretraining_tp", "prefix", "is_decoder", "chunk_size_feed_forward",
    "max_length", "min_length", "do_sample", "temperature", "top_k", "top_p", "num_beams", "repetition_penalty",  # generation, in old files
)  # fmt: skip
GPT2_WITHOUT_EFFECT = (
    "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout", "summary_hidden_size",
)  # fmt: skip


@dataclass(frozen=True)
class Described:
    """What a config.json says. context: the longest text it names, in tokens. notes: what is not taken over, a line each."""

    family: str
    model: ModelConfig
    context: int
    notes: tuple[str, ...] = ()


# ------------------------------------------------------------------------------------------------------------------- read
def read_config(values: dict[str, Any], where: str, ignored: Iterable[str] = ()) -> Described:
    """The model that config.json's `values` describe; `where` names the file in errors.

    `ignored`: names of unknown fields that a person has looked at and found without effect.

    Raises:
        UserError: a family, field or value that we have nothing for, by name.
    """
    fields = Fields(values, where)
    if "auto_map" in values:
        raise fields.fail("auto_map names code that comes with the weights; such code is never run here, and the model may differ from its family")
    if values.get("quantization_config") is not None:
        raise fields.fail("quantization_config: quantised weights can't be read; take the original weights")
    family = fields.get("model_type")
    if family not in ARCHITECTURES:
        raise fields.fail(f"model_type={family!r} is not supported; legal here: {', '.join(ARCHITECTURES)}")
    architectures = fields.get("architectures", [ARCHITECTURES[family]])
    base = ARCHITECTURES[family].replace("ForCausalLM", "Model").replace("LMHeadModel", "Model")
    if not isinstance(architectures, list) or not set(architectures) <= {ARCHITECTURES[family], base}:
        raise fields.fail(f"architectures={architectures!r} is no plain language model; legal here: [{ARCHITECTURES[family]!r}]")
    fields.without_effect((*WITHOUT_EFFECT, "quantization_config"))
    fields.only("is_encoder_decoder", False, "only decoders")
    fields.only("add_cross_attention", False, "only decoders")
    described = _read_gpt2(fields) if family == "gpt2" else _read_llama(fields, family)
    fields.done(ignored)
    return described


def _read_llama(fields: Fields, family: str) -> Described:
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    if "head_dim" not in fields.values and hidden % heads:
        raise fields.fail(f"hidden_size={hidden} is no multiple of num_attention_heads={heads} and head_dim is missing")
    head_dim = fields.whole("head_dim") if family == "qwen3" else fields.whole("head_dim", hidden // heads)
    kv_heads = fields.whole("num_key_value_heads", heads) if family == "llama" else fields.whole("num_key_value_heads")
    if heads % kv_heads:
        raise fields.fail(f"num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}")
    if head_dim % 2:
        raise fields.fail(f"head_dim={head_dim} is odd, but rotary features come in pairs")
    fields.only("hidden_act", "silu", "the gated MLP is swiglu")
    context = fields.whole("max_position_embeddings")
    _no_window(fields, family)
    attention_bias = {"qwen2": True, "mistral": False}.get(family)
    if attention_bias is None:
        attention_bias = fields.flag("attention_bias", False)
    mlp_bias = fields.flag("mlp_bias", False) if family == "llama" else False
    dropped = fields.number("attention_dropout", 0.0)
    notes = [f"attention_dropout={dropped:g} is not taken over: dropout inside attention is not supported"] if dropped else []
    model = ModelConfig(
        layers=fields.whole("num_hidden_layers"), hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        ffn=fields.whole("intermediate_size"), vocab=fields.whole("vocab_size"), norm="rmsnorm", norm_eps=fields.number("rms_norm_eps"),
        position="rope", max_position=0, rope=read_rope(fields, context, old_default=family == "llama"), mlp="swiglu",
        qkv_bias=attention_bias, out_bias=attention_bias and family != "qwen2", mlp_bias=mlp_bias,
        qk_norm=family == "qwen3", tied=fields.flag("tie_word_embeddings", False), init_std=fields.number("initializer_range", 0.02),
    )  # fmt: skip
    return Described(family, model, context, tuple(notes))


def _no_window(fields: Fields, family: str) -> None:
    """Attention over the whole text in every layer."""
    if family in ("qwen2", "qwen3"):
        fields.only("use_sliding_window", False, "attention sees the whole document")
        fields.without_effect(("max_window_layers", "sliding_window"))  # without the flag they do nothing
        fields.only("use_mrope", False, "positions are plain numbers")
        kinds = fields.get("layer_types", ["full_attention"])
        if not isinstance(kinds, list) or set(kinds) != {"full_attention"}:
            raise fields.fail("layer_types has layers other than full_attention; attention sees the whole document here")
    if family == "mistral" and fields.get("sliding_window", None) is not None:
        raise fields.fail(f"sliding_window={fields.values['sliding_window']!r} is not supported (attention sees whole documents); legal here: null")


def _read_gpt2(fields: Fields) -> Described:
    hidden, heads, context = fields.whole("n_embd"), fields.whole("n_head"), fields.whole("n_positions")
    if hidden % heads:
        raise fields.fail(f"n_head={heads} does not divide n_embd={hidden}")
    fields.only("n_ctx", context, "it has to be n_positions")
    fields.only("scale_attn_weights", True, "scores are divided by the root of the head's width")
    fields.only("scale_attn_by_inverse_layer_idx", False, "all layers scale alike")
    fields.only("reorder_and_upcast_attn", False, "a trick for fp16")
    fields.without_effect(GPT2_WITHOUT_EFFECT)
    named = fields.get("activation_function")
    mlp = next((ours for ours, theirs in ACTIVATIONS.items() if named in theirs), None)
    if mlp is None:
        legal = ", ".join(name for names in ACTIVATIONS.values() for name in names)
        raise fields.fail(f"activation_function={named!r} is not supported; legal here: {legal}")
    dropped = fields.number("attn_pdrop", 0.1)
    notes = [f"attn_pdrop={dropped:g} is not taken over: dropout inside attention is not supported"] if dropped else []
    model = ModelConfig(
        layers=fields.whole("n_layer"), hidden=hidden, heads=heads, kv_heads=heads, head_dim=hidden // heads,
        ffn=fields.whole("n_inner", 4 * hidden), vocab=fields.whole("vocab_size"), norm="layernorm", norm_eps=fields.number("layer_norm_epsilon"),
        position="learned", max_position=context, mlp=mlp, qkv_bias=True, out_bias=True, mlp_bias=True,
        tied=fields.flag("tie_word_embeddings", True), init_std=fields.number("initializer_range", 0.02),
        embedding_dropout=fields.number("embd_pdrop", 0.1), residual_dropout=fields.number("resid_pdrop", 0.1),
    )  # fmt: skip
    return Described("gpt2", model, context, tuple(notes))


# ------------------------------------------------------------------------------------------------------------------ write
def family_of(model: ModelConfig) -> str:
    """The family that the model can be written as.

    Raises:
        UserError: none computes the same; lists what stands in the way.
    """
    if model.position == "learned":
        problems = _not_gpt2(model)
        if problems:
            raise UserError(f"no Hugging Face family computes what this model does; for gpt2: {', '.join(problems)}")
        return "gpt2"
    problems = [f"model.{name}={getattr(model, name)}" for name, legal in (("norm", "rmsnorm"), ("mlp", "swiglu")) if getattr(model, name) != legal]
    if model.qk_norm:
        family = "qwen3"
        problems += ["model.mlp_bias=True"] if model.mlp_bias else []
        problems += ["model.qkv_bias and model.out_bias differ"] if model.qkv_bias != model.out_bias else []
    elif model.qkv_bias and not model.out_bias:
        family = "qwen2"
        problems += ["model.mlp_bias=True without model.out_bias"] if model.mlp_bias else []
    else:
        family = "llama"
        problems += ["model.out_bias=True without model.qkv_bias"] if model.out_bias != model.qkv_bias else []
        problems += [f"model.hidden={model.hidden} is no multiple of model.heads={model.heads}"] if model.hidden % model.heads else []
    if problems:
        raise UserError(f"no Hugging Face family computes what this model does; for {family}: {', '.join(problems)}")
    return family


def _not_gpt2(model: ModelConfig) -> list[str]:
    wanted = {"norm": "layernorm", "qkv_bias": True, "out_bias": True, "mlp_bias": True, "qk_norm": False, "kv_heads": model.heads}
    problems = [f"model.{name}={getattr(model, name)} (it has {legal})" for name, legal in wanted.items() if getattr(model, name) != legal]
    if model.mlp not in ACTIVATIONS:
        problems.append(f"model.mlp={model.mlp}")
    if model.heads * model.head_dim != model.hidden:
        problems.append(f"model.heads * model.head_dim = {model.heads * model.head_dim} is not model.hidden={model.hidden}")
    return problems


def write_config(model: ModelConfig, context: int, dtype: str, end: int | None) -> dict[str, Any]:
    """The values of a config.json.

    context: longest text in tokens (gpt2: the rows of its position table instead; yarn: what its factor makes of the original context).
    dtype: name of the stored format, "float32" or the like. end: id of the end-of-document token.
    """
    family = family_of(model)
    common: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]], "model_type": family, "vocab_size": model.vocab, "tie_word_embeddings": model.tied,
        "initializer_range": model.init_std, "bos_token_id": None, "eos_token_id": end, "pad_token_id": None, "use_cache": True,
        "dtype": dtype, "torch_dtype": dtype,
    }  # fmt: skip
    if family == "gpt2":
        return common | {
            "n_embd": model.hidden, "n_layer": model.layers, "n_head": model.heads, "n_positions": model.max_position, "n_inner": model.ffn,
            "activation_function": ACTIVATIONS[model.mlp][0], "layer_norm_epsilon": model.norm_eps, "attn_pdrop": 0.0,
            "embd_pdrop": model.embedding_dropout, "resid_pdrop": model.residual_dropout,
        }  # fmt: skip
    common |= {
        "hidden_size": model.hidden, "intermediate_size": model.ffn, "num_hidden_layers": model.layers, "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads, "head_dim": model.head_dim, "rms_norm_eps": model.norm_eps, "hidden_act": "silu",
        "attention_dropout": 0.0, "max_position_embeddings": longest(model.rope, context), **rope_fields(model.rope),
    }  # fmt: skip
    if family == "qwen2":
        return common | {"use_sliding_window": False}
    if family == "qwen3":
        return common | {"use_sliding_window": False, "attention_bias": model.qkv_bias}
    return common | {"attention_bias": model.qkv_bias, "mlp_bias": model.mlp_bias}


def longest(rope: RopeConfig, context: int) -> int:
    """Tokens to name as the longest text. Before version 5 transformers divided it by yarn's original context and took that for the factor."""
    return round(rope.factor * rope.original_max_position) if rope.scaling == "yarn" else context
