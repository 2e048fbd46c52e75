"""Every recompute level gives the same bits; each keeps what the plan's memory formula says."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
import torch
from nn_helpers import FAMILIES, documents, gradients, model, pack, place
from torch.utils._python_dispatch import TorchDispatchMode

from megadcp.config.schema import ModelConfig

LEVELS = ("none", "selective", "mlp", "full")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_every_level_and_layer_count_gives_the_same_bits(family, dropout):
    config = dataclasses.replace(FAMILIES[family], residual_dropout=dropout, embedding_dropout=dropout)
    made = model(config)
    batch = pack(documents([7, 22, 13], config.vocab), [8, 24, 16])
    loss, expected = gradients(made, batch, place(step=4))
    for level in LEVELS[1:]:
        for layers in (1, 2):
            got_loss, got = gradients(made, batch, place(level, layers, step=4))
            assert torch.equal(got_loss, loss)
            for name, grad in expected.items():
                assert torch.equal(got[name], grad), (level, layers, name)


def test_bf16_levels_agree_too():
    config = FAMILIES["llama"]
    made = model(config, torch.bfloat16)
    batch = pack(documents([7, 22, 13], config.vocab))
    _, expected = gradients(made, batch)
    for level in LEVELS[1:]:
        _, got = gradients(made, batch, place(level, 2))
        assert all(torch.equal(got[name], grad) for name, grad in expected.items())


def test_levels_may_change_between_microbatches_before_any_backward():
    """C41 in one process: each backward uses the placement and the documents that its own forward had."""
    config = dataclasses.replace(FAMILIES["llama"], residual_dropout=0.2)
    made = model(config)
    batches = [pack(documents([9, 14], config.vocab, seed)) for seed in range(4)]
    for batch, step in zip(batches, range(4), strict=True):
        made(batch, place(step=step)).backward()
    expected = {name: p.grad.clone() for name, p in made.named_parameters()}
    made.zero_grad()
    losses = [made(batch, place(level, 2, step)) for step, (batch, level) in enumerate(zip(batches, LEVELS, strict=True))]
    for loss in losses:
        loss.backward()
    for name, p in made.named_parameters():
        assert torch.equal(p.grad, expected[name]), name


@pytest.mark.parametrize("level", LEVELS[1:])
@pytest.mark.parametrize("frozen", ["embedding", "embedding and first layer", "all but the last norm"])
def test_frozen_parts_do_not_cut_gradients(level, frozen):
    """C43: the recomputed layers' only inputs are integers or frozen, yet their own parameters train."""
    config = FAMILIES["llama"]
    made = model(config)
    batch = pack(documents([9, 14], config.vocab))
    if frozen == "all but the last norm":
        made.requires_grad_(False)
        made.norm.requires_grad_(True)
    else:
        made.embedding.requires_grad_(False)
        made.layers["0"].requires_grad_(frozen == "embedding")
    _, expected = gradients(made, batch)
    _, got = gradients(made, batch, place(level, 2))
    assert got.keys() == expected.keys()
    for name, grad in expected.items():
        assert torch.equal(got[name], grad), name
        assert torch.count_nonzero(grad) > 0, name
    assert all(p.grad is None for p in made.parameters() if not p.requires_grad)


def test_an_unknown_level_is_refused():
    config = FAMILIES["llama"]
    with pytest.raises(ValueError, match="legal: none, selective, mlp, full"):
        model(config)(pack(documents([4], config.vocab)), place("some", 1))


def test_evaluation_ignores_the_level():
    config = FAMILIES["llama"]
    made = model(config)
    batch = pack(documents([9, 14], config.vocab))
    with torch.no_grad():
        assert all(torch.equal(made(batch, place(level, 2)), made(batch, place())) for level in LEVELS)


# ---------------------------------------------------------------------------------------------------- what is kept, what is made again
class _Kept(TorchDispatchMode):
    """Follows every storage made inside; `bytes()` sums those still alive. Unlike saved-tensor hooks it sees recompute's inputs too."""

    def __init__(self, made):
        super().__init__()
        self.storages = {}
        self.parameters = {p.untyped_storage()._cdata for p in made.parameters()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in self.parameters:
                    self.storages[storage._cdata] = (weakref.ref(storage), storage.nbytes())
        return out

    def bytes(self):
        return sum(size for storage, size in self.storages.values() if storage() is not None)


def _kept_per_token_and_layer(config, level, tokens=512):
    batch = pack(documents([300, tokens - 300], config.vocab))
    found = []
    for layers in (1, 3):
        made = model(dataclasses.replace(config, layers=layers), loss_chunk=64)
        made(pack(documents([4], config.vocab)), place(level, layers)).backward()  # fills what is made only once
        with _Kept(made) as kept:
            loss = made(batch, place(level, layers))
        found.append(kept.bytes())
        assert loss.requires_grad
    return (found[1] - found[0]) / (2 * tokens)


def _formula(config, level):
    """docs/plan.md section 3, bytes per token per layer in bf16; fp32 doubles them."""
    h, share, f = config.hidden, 4 * config.hidden * config.kv_heads / config.heads, config.ffn
    whole, inner = (6 * f, 4 * f) if config.gated else (4 * f, 2 * f)
    return {"none": 12 * h + share + whole, "selective": 8 * h + share + inner, "mlp": 10 * h + share, "full": 2 * h}[level]


@pytest.mark.parametrize("mlp", ["swiglu", "gelu_tanh", "squared_relu"])
def test_kept_bytes_follow_the_memory_formula(mlp):
    """Within 3%: the formula leaves out the norms' and the softmax's one number per row (and per head)."""
    config = ModelConfig(hidden=256, heads=4, kv_heads=2, head_dim=64, ffn=704, vocab=64, mlp=mlp)
    kept = {level: _kept_per_token_and_layer(config, level) for level in LEVELS}
    for level in LEVELS:
        assert kept[level] == pytest.approx(2 * _formula(config, level), rel=0.03), level
    assert kept["none"] > kept["selective"] > kept["mlp"] > kept["full"]


class _Products(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def test_what_each_level_makes_again():
    """Matrix products per layer: selective repeats none, mlp the up projection only (the down projection's output is not needed),
    full the qkv, output and up projections."""
    config = FAMILIES["llama"]
    made = model(config)
    batch = pack(documents([9, 14], config.vocab))
    counts = {}
    for level in LEVELS:
        with _Products() as products:
            made(batch, place(level, 2)).backward()
        counts[level] = products.count
    assert counts["selective"] == counts["none"]
    assert counts["mlp"] == counts["none"] + 2
    assert counts["full"] == counts["none"] + 2 * 3
    with _Products() as products:
        made(batch, place("full", 1)).backward()
    assert products.count == counts["none"] + 3
