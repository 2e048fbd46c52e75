"""The Transformer Engine backend on one GPU against fp32. Skips without a device, or where it can't run. It has not run on one yet."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "nn"))
from nn_helpers import documents, gradients, model, pack, place

from megadcp.backends.choose import choose, make_backend
from megadcp.config.check import UserError
from megadcp.config.schema import ModelConfig, PrecisionConfig
from megadcp.nn.gpt import GPT

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA = torch.device("cuda", 0)
CONFIG = ModelConfig(layers=3, hidden=256, heads=8, kv_heads=2, head_dim=64, ffn=512, vocab=512, init_std=0.05)
LEVELS = ("none", "selective", "mlp", "full")


def te_model(format: str) -> GPT:
    precision = PrecisionConfig(format, "te", 0 if format == "bf16" else 1)
    try:
        choose(precision, CUDA)
    except UserError as reason:
        pytest.skip(str(reason))
    made = GPT(CONFIG, make_backend(precision, torch.bfloat16, CUDA), 3, 64)
    made.load_state_dict({name: tensor.bfloat16().cuda() for name, tensor in model(CONFIG).state_dict().items()})
    return made


def batch(padded: list[int]):
    made = pack(documents([100, 13, 130, 1], CONFIG.vocab), padded)
    moved = {name: value.cuda() for name, value in vars(made).items() if isinstance(value, torch.Tensor)}
    return made, replace(made, **moved, memo={})


@pytest.mark.parametrize(("format", "padded", "bound"), [
    ("bf16", [100, 13, 130, 1], 0.05),
    ("bf16", [100, 13, 130, 13], 0.05),
    ("fp8_current", [100, 13, 130, 13], 0.35),
    ("fp8_block", [112, 16, 144, 112], 0.35),
])  # fmt: skip
def test_gradients(format, padded, bound):
    """Relative to the norm of each gradient: without padding, with some behind the last document, and with some behind all."""
    made = te_model(format)
    here, there = batch(padded)
    _, expected = gradients(model(CONFIG), here)
    for level in LEVELS:
        _, found = gradients(made, there, place(level, 0 if level == "none" else 3))
        for name, gradient in expected.items():
            error = float((found[name].float().cpu() - gradient).norm() / gradient.norm())
            assert error < bound, (level, name, error)


@pytest.mark.parametrize("format", ["bf16", "fp8_current"])
@pytest.mark.parametrize("level", ["mlp", "full"])
def test_recompute_gives_the_same_bits(format, level, monkeypatch):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # else attention's backward adds in no fixed order
    made = te_model(format)
    _, there = batch([112, 16, 144, 112])
    _, expected = gradients(made, there)
    _, found = gradients(made, there, place(level, 3))
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
