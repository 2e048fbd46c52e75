"""Models of every family with random weights, as plain tensors."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from megadcp.backends.choose import make_backend
from megadcp.config.schema import ModelConfig, PrecisionConfig, RopeConfig
from megadcp.interop.hf import Export
from megadcp.interop.tensors import lazy
from megadcp.nn.gpt import GPT

SMALL = {"layers": 2, "hidden": 48, "heads": 4, "kv_heads": 4, "head_dim": 12, "ffn": 80, "vocab": 131, "init_std": 0.08}
GROUPED = SMALL | {"kv_heads": 2}
LLAMA3 = RopeConfig(theta=500000.0, scaling="llama3", factor=8.0, original_max_position=32)
YARN = RopeConfig(scaling="yarn", factor=4.0, original_max_position=16)
GPT2 = ModelConfig(
    **SMALL, norm="layernorm", position="learned", max_position=70, mlp="gelu_tanh", qkv_bias=True, out_bias=True, mlp_bias=True, tied=True
)
MODELS = {
    "llama": ModelConfig(**SMALL),
    "llama grouped, tied": ModelConfig(**GROUPED, tied=True, norm_eps=1e-6),
    "llama one kv head, free head dim": ModelConfig(**SMALL | {"kv_heads": 1, "head_dim": 20}),
    "llama biases": ModelConfig(**GROUPED, qkv_bias=True, out_bias=True, mlp_bias=True),
    "llama theta": ModelConfig(**GROUPED, rope=RopeConfig(theta=500000.0)),
    "llama linear": ModelConfig(**GROUPED, rope=RopeConfig(scaling="linear", factor=4.0)),
    "llama llama3": ModelConfig(**GROUPED, rope=LLAMA3, tied=True),
    "llama yarn": ModelConfig(**GROUPED, rope=YARN),
    "llama yarn, own ramp": ModelConfig(**GROUPED, rope=dataclasses.replace(YARN, beta_fast=16.0, beta_slow=2.0, attention_factor=1.3)),
    "qwen2": ModelConfig(**GROUPED, qkv_bias=True, tied=True),
    "qwen3": ModelConfig(**GROUPED | {"head_dim": 20}, qk_norm=True, rope=RopeConfig(theta=1e6)),
    "qwen3 biases": ModelConfig(**GROUPED, qk_norm=True, qkv_bias=True, out_bias=True),
    "gpt2": GPT2,
    "gpt2 untied": dataclasses.replace(GPT2, tied=False),
    "gpt2 gelu": dataclasses.replace(GPT2, mlp="gelu"),
    "gpt2 squared relu": dataclasses.replace(GPT2, mlp="squared_relu"),
}


def weights(model: ModelConfig, seed: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random weights; norms and biases too, which start as ones and zeros."""
    gpt = GPT(model, make_backend(PrecisionConfig("fp32"), torch.float32, "cpu"), seed, 64)
    draw = torch.Generator().manual_seed(seed)
    found = {}
    for name, parameter in gpt.named_parameters():
        value = parameter.detach().clone()
        found[name] = (value + 0.2 * torch.randn(value.shape, generator=draw) if value.ndim == 1 else value).to(dtype)
    return found


def export(model: ModelConfig, dtype: torch.dtype = torch.float32) -> Export:
    return Export(model, lazy(weights(model, dtype=dtype)), context=128)
