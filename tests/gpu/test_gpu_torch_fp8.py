"""The torch backend's fp8 linears and compiled formulas on a GPU. Skips without a device; not run on one yet."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "nn"))
from nn_helpers import distance, documents, gradients, pack, place

from megadcp.backends import apex_backend
from megadcp.backends.torch_fp8 import product_of
from megadcp.backends.torch_sharded import torch_backend
from megadcp.config.schema import ModelConfig
from megadcp.nn import compiled
from megadcp.nn.gpt import GPT
from megadcp.parallel.product import add_product, linear

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
BF16 = torch.bfloat16
CONFIG = ModelConfig(layers=2, hidden=256, heads=4, kv_heads=2, head_dim=64, ffn=512, vocab=128, init_std=0.05)


def _values(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def _on(device, batch):
    moved = {name: value.to(device) for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    return type(batch)(**{**vars(batch), **moved})


@pytest.mark.parametrize("fp8", ["fp8_current", "fp8_block"])
@pytest.mark.parametrize("tokens", [256, 37])
def test_a_linear_is_the_cpus(fp8, tokens):
    """The 8 bits are equal, so results differ by the order of sums and one rounding to bf16."""
    found = []
    for device in ("cpu", "cuda"):
        x, weight = _values(tokens, 256).to(device).requires_grad_(), torch.nn.Parameter(_values(128, 256, seed=1).to(device))
        out = linear(x, weight, None, product_of(fp8))
        out.backward(_values(tokens, 128, seed=2).to(device))
        found.append([one.detach().float().cpu() for one in (out, x.grad, weight.grad)])
    for one, other in zip(*found, strict=True):
        assert distance(other, one) < 2.0**-7


@pytest.mark.parametrize("fp8", ["", "fp8_current", "fp8_block"])
def test_recompute_changes_no_bit(fp8):
    """Compiled formulas and fp8 kernels repeat; token counts change in between."""
    made = GPT(CONFIG, torch_backend(BF16, "cuda", fp8=fp8), 3, 64)
    batches = [_on("cuda", pack(documents(lengths, CONFIG.vocab), padded)) for lengths, padded in (([70, 41], [80, 48]), ([200], [208]))]
    for batch in batches:
        _, expected = gradients(made, batch)
        for level in ("selective", "mlp", "full"):
            for other in batches:
                gradients(made, other, place(level, 1))
            _, found = gradients(made, batch, place(level, 2))
            assert all(torch.equal(found[name], grad) for name, grad in expected.items()), level


def test_formulas_are_compiled_here():
    assert compiled.missing() == ""
    assert compiled.compiles(torch.zeros(1, device="cuda"))


@pytest.mark.skipif(not apex_backend.probe().wgrad, reason="needs NVIDIA apex with its extensions")
def test_apex_adds_weight_gradients():
    x, slope = _values(512, 256).cuda(), _values(512, 128, seed=1).cuda()
    found, expected = torch.ones(128, 256, device="cuda"), torch.ones(128, 256, device="cuda")
    apex_backend.add_product()(x, slope, found)
    add_product(x, slope, expected)
    assert distance(found, expected) < 1e-4


@pytest.mark.skipif(not apex_backend.probe().adam, reason="needs NVIDIA apex with its extensions")
def test_apex_updates_as_torch_does():
    ends = []
    for make in (apex_backend.fused_adamw, lambda groups, lr, betas, eps: torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps)):
        one = torch.nn.Parameter(_values(64, 64).float().cuda())
        optimizer = make([{"params": [one], "weight_decay": 0.1}], 0.01, (0.9, 0.95), 1e-8)
        for step in range(5):
            one.grad = _values(64, 64, seed=step + 1).float().cuda()
            optimizer.step()
        ends.append(one.detach())
    assert distance(*ends) < 1e-5
