"""The model equals a naive fp64 model that sees one document at a time, dense attention and all."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nn_helpers import FAMILIES, distance, documents, gradients, model, pack, place, real, reference


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_loss_and_all_gradients_in_fp64(family):
    config = FAMILIES[family]
    made = model(config, torch.float64)
    tokens = documents([7, 1, 22, 13, 13, 2], config.vocab)
    batch = pack(tokens)
    logits, loss, grads = reference(config, made, tokens)
    assert distance(made.logits(batch, place()).detach(), torch.cat(logits)) < 1e-12
    got_loss, got = gradients(made, batch)
    assert got_loss.dtype == torch.float64
    assert abs(got_loss - loss) / loss < 1e-13
    assert got.keys() == grads.keys()
    for name, grad in grads.items():
        assert distance(got[name], grad) < 1e-12, name


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_padding_changes_nothing_in_fp64(family):
    """C27 at cp 1: lengths that are no multiples of anything, padding between documents and at the tail only."""
    config = FAMILIES[family]
    made = model(config, torch.float64)
    tokens = documents([7, 22, 1, 29], config.vocab)
    logits, loss, grads = reference(config, made, tokens)
    for padded in ([8, 24, 8, 32], [7, 22, 1, 40], [16, 22, 3, 29]):
        batch = pack(tokens, padded)
        assert distance(made.logits(batch, place())[real(batch)].detach(), torch.cat(logits)) < 1e-12
        got_loss, got = gradients(made, batch)
        assert abs(got_loss - loss) / loss < 1e-13
        for name, grad in grads.items():
            assert distance(got[name], grad) < 1e-12, (padded, name)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=6), st.sampled_from(["none", "selective", "mlp", "full"]))
def test_any_packing(shapes, level):
    config = FAMILIES["qk_norm_free_head"]
    made = model(config, torch.float64)
    tokens = documents([length for length, _ in shapes], config.vocab)
    batch = pack(tokens, [length + more for length, more in shapes])
    logits, loss, grads = reference(config, made, tokens)
    assert distance(made.logits(batch, place())[real(batch)].detach(), torch.cat(logits)) < 1e-12
    got_loss, got = gradients(made, batch, place(level, 2))
    assert abs(got_loss - loss) <= 1e-13 * loss
    for name, grad in grads.items():
        assert (got[name] - grad).abs().max() <= 1e-12 * max(grad.abs().max(), 1.0), name


def test_fp32_is_close_to_fp64():
    config = FAMILIES["llama"]
    tokens = documents([30, 11, 40], config.vocab)
    narrow, wide = model(config), model(config, torch.float64)
    wide.load_state_dict(narrow.state_dict())
    loss, got = gradients(narrow, pack(tokens))
    expected_loss, expected = gradients(wide, pack(tokens))
    assert loss.dtype == torch.float32
    assert distance(loss.double(), expected_loss) < 1e-6
    for name, grad in expected.items():
        assert distance(got[name].double(), grad) < 1e-5, name


@pytest.mark.parametrize("family", ["llama", "gpt2", "squared_relu_yarn"])
def test_bf16_is_close_to_fp64(family):
    """bf16 keeps 8 bits: values may differ by percents, but the loss is fp32 and the direction of each gradient holds."""
    config = FAMILIES[family]
    tokens = documents([30, 11, 40], config.vocab)
    narrow, wide = model(config, torch.bfloat16), model(config, torch.float64)
    wide.load_state_dict(narrow.state_dict())
    loss, got = gradients(narrow, pack(tokens, [32, 16, 40]))
    expected_loss, expected = gradients(wide, pack(tokens))
    assert loss.dtype == torch.float32
    assert distance(loss.double(), expected_loss) < 5e-3
    for name, grad in expected.items():
        assert got[name].dtype == torch.bfloat16
        assert torch.cosine_similarity(got[name].double().flatten(), grad.flatten(), dim=0) > 0.99, name
