"""Tensor parallelism against one rank in fp64: outputs, gradients of whole parameters, losses, logits; any model shape."""

from dataclasses import replace

import pytest
import torch
from ranks import run_ranks

from megadcp.backends.torch_backend import TorchBackend
from megadcp.backends.torch_sharded import torch_backend
from megadcp.config.schema import ModelConfig
from megadcp.engine.placement import Placement
from megadcp.mesh.coords import Mesh
from megadcp.mesh.groups import GroupPool
from megadcp.nn.backend import IGNORE, PackedTokens
from megadcp.nn.gpt import GPT
from megadcp.nn.shard import is_partial, put, shard_of, take, whole_shape
from megadcp.plan.step_plan import Recompute

MODEL = ModelConfig(layers=2, hidden=16, heads=4, kv_heads=2, head_dim=4, ffn=12, vocab=29)
MODELS = {
    "gated": MODEL,
    "one kv head": replace(MODEL, kv_heads=1),
    "tied, odd vocabulary": replace(MODEL, tied=True, vocab=31),
    "biases, layernorm, learned positions": replace(
        MODEL, mlp="gelu", norm="layernorm", position="learned", max_position=16, qkv_bias=True, out_bias=True, mlp_bias=True
    ),
    "q and k norms, dropout": replace(MODEL, qk_norm=True, residual_dropout=0.2, embedding_dropout=0.1),
    "vocabulary smaller than some ranks": replace(MODEL, vocab=5),
}


def packed(config, targets="some"):
    generator = torch.Generator().manual_seed(5)
    lengths, padded = [5, 1, 6], [6, 2, 8]
    borders = (0, 6, 8, 16)
    tokens = torch.randint(0, config.vocab, (16,), generator=generator)
    labels = torch.randint(0, config.vocab, (16,), generator=generator)
    positions = torch.cat([torch.arange(length) for length in padded])
    real = torch.cat([torch.arange(stretch) < length for stretch, length in zip(padded, lengths, strict=True)])
    labels[~real] = IGNORE
    tokens[~real] = 0
    if targets == "one":
        labels[torch.arange(16) != 9] = IGNORE
    if targets == "none":
        labels[:] = IGNORE
    return PackedTokens(
        tokens, labels, positions, torch.tensor(borders, dtype=torch.int32), 8, torch.arange(3), torch.tensor(lengths), borders, tuple(lengths)
    )


def one_rank(config, level, targets):
    model = GPT(config, TorchBackend(torch.float64), 3, 7)
    loss = model(packed(config, targets), Placement(2, level))
    loss.backward()
    logits = model.logits(packed(config, targets), Placement(2, level)).detach()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}, logits


def one_of(rank, world, config, level, targets, sequence_parallel):
    with GroupPool(Mesh(1, tp=world), rank, torch.device("cpu")) as pool:
        model = GPT(config, torch_backend(torch.float64, "cpu", pool.tp, sequence_parallel), 3, 7)
        loss = model(packed(config, targets), Placement(2, level))
        loss.backward()
        logits = model.logits(packed(config, targets), Placement(2, level)).detach()
    shards = {name: (whole_shape(p), shard_of(p), is_partial(p), p.grad) for name, p in model.named_parameters()}
    return loss.detach(), shards, logits


def whole_gradients(found):
    """Shards of all ranks into whole gradients: partial ones and shared rows are summed."""
    result = {}
    for name, (shape, shard, partial, grad) in found[0].items():
        if shard is None:
            grads = [one[name][3] for one in found]
            if partial:
                result[name] = sum(grads)
            else:
                assert all(torch.allclose(other, grad, rtol=1e-12, atol=1e-14) for other in grads), name
                result[name] = grad
            continue
        total = torch.zeros(shape, dtype=grad.dtype)
        for one in found:
            _, own, _, part = one[name]
            piece = torch.zeros(shape, dtype=grad.dtype)
            put(piece, own, part)
            total += piece
            held = sum(stop - start for start, stop in own.pieces)
            assert not part.narrow(own.dim, held, own.local - held).any()  # padding rows have no gradient
        result[name] = total
    return result


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("ranks", "sequence_parallel"), [(2, True), (4, True), (2, False), (4, False)])
def test_equal_to_one_rank(kind, ranks, sequence_parallel):
    config = MODELS[kind]
    level = Recompute("none") if sequence_parallel else Recompute("selective", 1)
    loss, gradients, logits = one_rank(config, level, "some")
    results = run_ranks(ranks, one_of, config, level, "some", sequence_parallel)
    for own, _, table in results:
        assert own == pytest.approx(loss.item(), rel=1e-12)
        assert table.shape == logits.shape
        assert torch.allclose(table, logits, rtol=1e-10, atol=1e-12)
    found = whole_gradients([shards for _, shards, _ in results])
    assert sorted(found) == sorted(gradients)
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    for name, gradient in gradients.items():
        assert torch.allclose(found[name], gradient, rtol=1e-10, atol=1e-12 * largest), name


@pytest.mark.parametrize("level", [Recompute("selective", 2), Recompute("mlp", 1), Recompute("full", 2)], ids=lambda one: one.level)
def test_recompute_changes_nothing(level):
    loss, gradients, _ = one_rank(MODEL, Recompute(), "some")
    results = run_ranks(2, one_of, MODEL, level, "some", True)
    found = whole_gradients([shards for _, shards, _ in results])
    assert results[0][0] == pytest.approx(loss.item(), rel=1e-12)
    for name, gradient in gradients.items():
        assert torch.allclose(found[name], gradient, rtol=1e-10, atol=1e-12), name


@pytest.mark.parametrize("targets", ["one", "none"])
def test_few_targets(targets):
    loss, gradients, _ = one_rank(MODEL, Recompute(), targets)
    results = run_ranks(4, one_of, MODEL, Recompute(), targets, True)
    found = whole_gradients([shards for _, shards, _ in results])
    assert results[2][0] == pytest.approx(loss.item(), rel=1e-12, abs=0)
    for name, gradient in gradients.items():
        assert torch.isfinite(found[name]).all()
        assert torch.allclose(found[name], gradient, rtol=1e-10, atol=1e-13), name


def start_values(rank, world, config):
    with GroupPool(Mesh(1, tp=world), rank, torch.device("cpu")) as pool:
        model = GPT(config, torch_backend(torch.float32, "cpu", pool.tp), 3, 7)
    return {name: (shard_of(p), p.detach()) for name, p in model.named_parameters()}


def test_start_values_do_not_depend_on_the_ranks():
    config = MODELS["one kv head"]
    whole = {name: parameter.detach() for name, parameter in GPT(config, TorchBackend(), 3, 7).named_parameters()}
    for found in run_ranks(4, start_values, config):
        assert sorted(found) == sorted(whole)
        for name, (shard, value) in found.items():
            assert torch.equal(value, take(whole[name], shard)), name


def outside(rank, world):
    with GroupPool(Mesh(1, tp=world), rank, torch.device("cpu")) as pool:
        model = GPT(MODEL, torch_backend(torch.float64, "cpu", pool.tp, False), 3, 7)
        messages = []
        for token in (MODEL.vocab, -1):
            try:
                model.embedding(torch.tensor([token, 0]))
                messages.append("")
            except IndexError as error:
                messages.append(str(error))
    return messages


def test_a_token_outside_the_vocabulary_is_an_error():
    """Without sums over ranks before it, so every rank raises by itself."""
    for messages in run_ranks(2, outside):
        assert all("index out of range" in message for message in messages)


def test_what_can_not_be_divided():
    from megadcp.parallel.tensor import local_heads

    with pytest.raises(ValueError, match="6 query and 3 kv heads can't be divided among 4"):
        local_heads(6, 3, 4)
