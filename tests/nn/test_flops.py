"""Parameter counts of known models; FLOPs against torch's counter."""

from __future__ import annotations

import pytest
import torch
from nn_helpers import FAMILIES, documents, model, pack, place
from torch.utils.flop_counter import FlopCounterMode

from megadcp.backends.torch_backend import TorchBackend
from megadcp.config.schema import ModelConfig
from megadcp.nn.flops import flops, forward_flops, parameters
from megadcp.nn.gpt import GPT

LLAMA = {"kv_heads": 8, "vocab": 128256}
GPT2 = {
    "norm": "layernorm",
    "position": "learned",
    "max_position": 1024,
    "mlp": "gelu_tanh",
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
    "tied": True,
}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (ModelConfig(layers=12, hidden=768, heads=12, kv_heads=12, head_dim=64, ffn=3072, vocab=50257, **GPT2), 124_439_808),
        (ModelConfig(layers=32, hidden=4096, heads=32, head_dim=128, ffn=14336, **LLAMA), 8_030_261_248),
        (ModelConfig(layers=80, hidden=8192, heads=64, head_dim=128, ffn=28672, **LLAMA), 70_553_706_496),
        # Llama 3.2 1B is tied: 1,235,814,400; untied the table counts twice.
        (ModelConfig(layers=16, hidden=2048, heads=32, head_dim=64, ffn=8192, tied=True, **LLAMA), 1_235_814_400),
        (ModelConfig(layers=16, hidden=2048, heads=32, head_dim=64, ffn=8192, **LLAMA), 1_235_814_400 + 128256 * 2048),
    ],
    ids=["gpt2", "8b", "70b", "1b tied", "1b"],
)
def test_parameters_of_known_models(config, expected):
    assert parameters(config) == expected
    built = GPT(config, TorchBackend(device="meta"), 1, 64)
    assert sum(parameter.numel() for parameter in built.parameters()) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_of_every_family(family):
    assert parameters(FAMILIES[family]) == sum(p.numel() for p in model(FAMILIES[family]).parameters())


def _square(q, k, *args, out_val=None, **kwargs):
    """Two full products, 4 H d l^2: how torch's counter counts fused attention, causal or not (it has no entry for the CPU kernel)."""
    batch, heads, length, head_dim = q
    return 4 * batch * heads * head_dim * length * length


def _square_backward(grad, q, *args, out_val=None, **kwargs):
    """Five full products: the scores again, and the gradients of weights, values, queries and keys."""
    batch, heads, length, head_dim = q
    return 10 * batch * heads * head_dim * length * length


KERNELS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _square,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _square_backward,
}


@pytest.mark.parametrize("family", ["llama", "llama_tied_mha", "gelu_mqa"])
def test_flops_equal_torchs_counter(family):
    """Linear layers and head exactly; the counter's full squares are twice the causal attention that is stated here."""
    config = FAMILIES[family]
    made = model(config, loss_chunk=64)  # one chunk: torch's counter has no entry for the addmm_ that adds the next ones
    lengths = [7, 22, 1, 13]
    batch = pack(documents(lengths, config.vocab))
    counter = FlopCounterMode(display=False, custom_mapping=KERNELS)
    with counter, torch.no_grad():
        made.logits(batch, place())
    once = forward_flops(config, lengths)
    assert counter.get_total_flops() == once.linear + once.head + 2 * once.attention
    assert flops(config, lengths, backward=False) == once.total

    counter = FlopCounterMode(display=False, custom_mapping=KERNELS)
    with counter:
        made(batch, place()).backward()
    assert counter.get_total_flops() == 3 * (once.linear + once.head) + 2 * (once.attention + round(2.5 * once.attention))
    assert flops(config, lengths, attention_backward=2.5) == 3 * (once.linear + once.head) + round(3.5 * once.attention)
    assert flops(config, lengths) == 3 * once.total


def test_attention_counts_documents_not_the_pack():
    config = FAMILIES["llama"]
    assert forward_flops(config, [10, 10]).attention * 2 == forward_flops(config, [20]).attention
    assert forward_flops(config, [10, 10]).linear == forward_flops(config, [20]).linear
    assert forward_flops(config, [20]).attention == config.layers * 2 * config.head_dim * config.heads * 400
