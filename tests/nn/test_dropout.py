"""Keyed dropout: a pure function of (seed, step, document, position, site, feature)."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from nn_helpers import FAMILIES, documents, gradients, model, pack, place

from megadcp.config.check import UserError
from megadcp.nn.dropout import _mix, _mix_number, dropout, keep_mask, row_keys


def _mask(batch, seed=1, step=2, site=3, features=64, probability=0.25):
    return keep_mask(row_keys(batch, seed, step), site, features, probability)


def test_share_and_scale():
    batch = pack(documents([2000], 9))
    x = torch.ones(2000, 256)
    out = dropout(x, row_keys(batch, 1, 2), 0, 0.25)
    kept = out != 0
    assert kept.float().mean().item() == pytest.approx(0.75, abs=0.003)
    assert torch.equal(out[kept], torch.full_like(out[kept], 1 / 0.75))
    assert kept.float().mean(0).min() > 0.68  # no feature and no token is favoured: 0.75 within 7 sigma
    assert kept.float().mean(1).min() > 0.55


def test_mask_follows_the_document_wherever_it_is_packed():
    a, b, c = documents([7, 22, 13], 9)
    whole = _mask(pack([a, b, c], ids=[100, 200, 1 << 40]))
    other = _mask(pack([c, b], [16, 24], ids=[1 << 40, 200]))
    assert torch.equal(whole[29:], other[:13])
    assert torch.equal(whole[7:29], other[16:38])


@pytest.mark.parametrize("change", [{"seed": 9}, {"seed": 1 + (1 << 32)}, {"step": 9}, {"step": 2 + (1 << 32)}, {"site": 4}])
def test_every_part_of_the_key_matters(change):
    batch = pack(documents([50], 9))
    assert (_mask(batch) ^ _mask(batch, **change)).float().mean().item() == pytest.approx(2 * 0.25 * 0.75, abs=0.04)


@pytest.mark.parametrize("ids", [(0, 1), (5, 5 + (1 << 31)), (5, 5 + (1 << 32)), (5, 5 + (1 << 50))])
def test_documents_have_independent_masks(ids):
    tokens = documents([300, 300], 9)
    mask = _mask(pack(tokens, ids=ids))
    first, second = mask[:300], mask[300:]
    rows = {tuple(row) for row in first.tolist()}
    assert len(rows) == 300
    # No row of one document turns up in the other at any offset: they share no stretch.
    assert not rows & {tuple(row) for row in second.tolist()}
    assert (first ^ second).float().mean().item() == pytest.approx(0.375, abs=0.02)


def test_neighbouring_tokens_features_and_sites_are_uncorrelated():
    mask = _mask(pack(documents([1000], 9)), features=128, probability=0.5).float() - 0.5
    other = _mask(pack(documents([1000], 9)), site=4, features=128, probability=0.5).float() - 0.5
    for product in (mask[1:] * mask[:-1], mask[:, 1:] * mask[:, :-1], mask * other, mask[:, 2:] * mask[:, :-2]):
        assert abs(product.mean().item()) < 0.25 * 4.5 / product.numel() ** 0.5


def test_number_and_tensor_hash_agree():
    values = [0, 1, -1, 2**31 - 1, -(2**31), 123456789]
    assert _mix(torch.tensor(values, dtype=torch.int32)).tolist() == [_mix_number(value) for value in values]


def test_gradient_uses_the_same_mask():
    batch = pack(documents([20], 9))
    x = torch.randn(20, 16, dtype=torch.float64, requires_grad=True)
    rows = row_keys(batch, 1, 2)
    assert torch.autograd.gradcheck(lambda x: dropout(x, rows, 1, 0.4), (x,))


def test_not_a_number_dropped_is_zero():
    batch = pack(documents([20], 9))
    out = dropout(torch.full((20, 16), float("nan")), row_keys(batch, 1, 2), 1, 0.4)
    assert torch.equal(out == 0, ~keep_mask(row_keys(batch, 1, 2), 1, 16, 0.4))


def test_model_gradients_do_not_depend_on_the_packing():
    """The sum over microbatches is the same however documents are packed, padded and ordered."""
    config = dataclasses.replace(FAMILIES["gpt2"], embedding_dropout=0.2, residual_dropout=0.3)
    made = model(config, torch.float64)
    tokens = documents([7, 22, 13, 1], config.vocab)
    packings = [[([0, 1, 2, 3], None)], [([2, 0], [16, 8]), ([3], None), ([1], [24])]]
    sums = []
    for packing in packings:
        made.zero_grad()
        for ids, padded in packing:
            made(pack([tokens[i] for i in ids], padded, ids), place(step=5)).backward()
        sums.append({name: p.grad.clone() for name, p in made.named_parameters()})
    for name, grad in sums[0].items():
        assert (sums[1][name] - grad).abs().max() <= 1e-12 * grad.abs().max(), name


def test_model_drops_in_training_only_and_by_step():
    config = dataclasses.replace(FAMILIES["llama"], residual_dropout=0.3)
    made = model(config)
    plain = model(FAMILIES["llama"])
    batch = pack(documents([30], config.vocab))
    losses = [made(batch, place(step=step)).item() for step in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]
    made.eval()
    assert made(batch, place()).item() == plain(batch, place()).item()


def test_both_kinds_of_dropout_act():
    base = FAMILIES["llama"]
    batch = pack(documents([30], base.vocab))
    kinds = [{}, {"embedding_dropout": 0.3}, {"residual_dropout": 0.3}]
    losses = {gradients(model(dataclasses.replace(base, **kind)), batch)[0].item() for kind in kinds}
    assert len(losses) == 3


def test_attention_dropout_is_refused_with_the_reason():
    with pytest.raises(UserError, match=r"attention_dropout=0.1 .*packing.*attention_dropout=0"):
        model(dataclasses.replace(FAMILIES["llama"], attention_dropout=0.1))
