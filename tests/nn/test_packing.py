"""Documents in one pack know nothing of each other."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from nn_helpers import FAMILIES, distance, documents, gradients, model, pack, place

from megadcp.config.schema import ModelConfig


def _hidden_and_gradient(made, batch):
    """Logits, and the gradient of the loss at the embedding's output, per token."""
    seen = []
    handle = made.embedding.register_forward_hook(lambda _module, _inputs, out: seen.append(out.requires_grad_()))
    made.zero_grad(set_to_none=True)
    loss = made(batch, place())
    handle.remove()
    (gradient,) = torch.autograd.grad(loss, seen[0])
    return made.logits(batch, place()).detach(), gradient


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [[11, 17, 9], [40, 40, 40], [1, 33, 2]])
def test_neighbours_change_no_bit(family, lengths):
    """C29: other tokens in A, then in C; logits and hidden gradients of B keep every bit."""
    config = FAMILIES[family]
    made = model(config)
    tokens = documents(lengths, config.vocab)
    others = documents(lengths, config.vocab, seed=7)
    middle = slice(lengths[0], lengths[0] + lengths[1])
    logits, gradient = _hidden_and_gradient(made, pack(tokens))
    for changed in ([others[0], tokens[1], tokens[2]], [tokens[0], tokens[1], others[2]], [others[0], tokens[1], others[2]]):
        other_logits, other_gradient = _hidden_and_gradient(made, pack(changed))
        assert torch.equal(logits[middle], other_logits[middle])
        assert torch.equal(gradient[middle], other_gradient[middle])
    assert not torch.equal(logits[: lengths[0]], other_logits[: lengths[0]])


def test_neighbours_change_no_bit_at_a_training_shape():
    """The same where matrix products are cut into blocks and the loss into chunks."""
    config = ModelConfig(layers=1, tied=True)
    made = model(config, loss_chunk=4096)
    tokens, others = documents([312, 500, 212], config.vocab), documents([312, 500, 212], config.vocab, seed=7)
    logits, gradient = _hidden_and_gradient(made, pack(tokens))
    other_logits, other_gradient = _hidden_and_gradient(made, pack([others[0], tokens[1], others[2]]))
    assert torch.equal(logits[312:812], other_logits[312:812])
    assert torch.equal(gradient[312:812], other_gradient[312:812])


def test_a_document_in_a_pack_equals_the_document_alone():
    config = FAMILIES["llama"]
    made = model(config)
    tokens = documents([11, 37, 9], config.vocab)
    logits, gradient = _hidden_and_gradient(made, pack(tokens))
    alone_logits, alone_gradient = _hidden_and_gradient(made, pack(tokens[1:2]))
    assert distance(logits[11:48], alone_logits) < 1e-5
    assert distance(gradient[11:48], alone_gradient) < 1e-5


def test_borders_come_from_lengths_not_from_tokens():
    """C25: no end-of-document token, several of them, one in front: nothing crosses a border and nothing new is cut."""
    config = FAMILIES["llama"]
    made = model(config)
    end = 0
    plain = documents([12, 12], config.vocab)
    for second in (plain[1].clamp(min=1), torch.where(torch.arange(12) % 3 == 0, end, plain[1])):
        for first in (plain[0].clamp(min=1), torch.full((12,), end)):
            together = made.logits(pack([first, second]), place())
            assert distance(together[12:], made.logits(pack([second]), place())) < 1e-5
            assert distance(together[:12], made.logits(pack([first]), place())) < 1e-5
    # A token inside a document is seen by all later ones, an end token before them or not.
    changed = second.clone()
    changed[1] += 1
    assert not torch.allclose(made.logits(pack([second]), place())[-1], made.logits(pack([changed]), place())[-1])


def test_a_genuine_end_token_keeps_its_loss():
    """C21: padding is known by position, so a target that equals the padding's token still counts."""
    config = FAMILIES["llama"]
    made = model(config, torch.float64)
    tokens = torch.tensor([5, 0, 0, 9, 0])
    batch = pack([tokens], [8])
    logits = made.logits(batch, place())[:4]
    expected = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum")
    assert distance(made(batch, place()).detach(), expected) < 1e-12


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_padding_contributes_exactly_zero(family):
    """What stands in padding rows changes no bit of loss or gradients: same shapes, other padding tokens."""
    config = FAMILIES[family]
    made = model(config)
    tokens = documents([7, 22], config.vocab)
    batch = pack(tokens, [16, 24])
    inside = torch.zeros(40, dtype=torch.bool)
    inside[:7] = inside[16:38] = True
    dirty = dataclasses.replace(batch, tokens=torch.where(inside, batch.tokens, 17))
    loss, got = gradients(made, batch)
    other_loss, other = gradients(made, dirty)
    assert torch.equal(loss, other_loss)
    for name, grad in got.items():
        assert torch.equal(grad, other[name]), name


def test_rows_that_occur_in_padding_only_get_no_gradient():
    config = FAMILIES["llama"]
    made = model(config)
    batch = pack([torch.tensor([5, 6, 7]), torch.tensor([8, 9])], [4, 6])
    _, got = gradients(made, batch)
    assert torch.count_nonzero(got["embedding.weight"][0]) == 0
    assert torch.count_nonzero(got["embedding.weight"][5]) > 0


def test_two_runs_are_bit_equal():
    config = FAMILIES["llama"]
    batch = pack(documents([7, 22, 100], config.vocab), [8, 24, 104])
    first, second = gradients(model(config), batch), gradients(model(config), batch)
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])


def test_one_token_documents_have_no_loss():
    made = model(FAMILIES["llama"])
    loss, got = gradients(made, pack([torch.tensor([3]), torch.tensor([4])]))
    assert loss == 0
    assert all(torch.count_nonzero(grad) == 0 for grad in got.values())


def test_learned_positions_refuse_a_token_past_their_table():
    config = FAMILIES["gpt2"]
    made = model(config)
    made(pack(documents([40], config.vocab), [48]), place())  # padding may go past it
    with pytest.raises(IndexError):
        made(pack(documents([41], config.vocab)), place())
