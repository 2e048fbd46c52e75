"""A model in parts, run one after the other in one process, is the model in one part."""

from dataclasses import replace

import pytest
import torch

from megadcp.backends.torch_backend import TorchBackend
from megadcp.config.schema import ModelConfig
from megadcp.engine.placement import Placement
from megadcp.nn.backend import IGNORE, PackedTokens
from megadcp.nn.gpt import GPT
from megadcp.nn.part import parts_of
from megadcp.plan.step_plan import Recompute

MODEL = ModelConfig(layers=5, hidden=16, heads=4, kv_heads=2, head_dim=4, ffn=24, vocab=37, residual_dropout=0.1, embedding_dropout=0.1)


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = [5, 1, 7]
    tokens = torch.randint(0, 37, (13,), generator=generator)
    labels = torch.roll(tokens, -1)
    borders = (0, 5, 6, 13)
    labels[[4, 5, 12]] = IGNORE
    positions = torch.cat([torch.arange(length) for length in lengths])
    return PackedTokens(
        tokens, labels, positions, torch.tensor(borders, dtype=torch.int32), 7, torch.arange(3), torch.tensor(lengths), borders, tuple(lengths)
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("stage_layers", "chunks"), [((5,), 1), ((2, 3), 1), ((3, 2), 2), ((2, 2, 1), 1)])
@pytest.mark.parametrize("level", ["none", "full"])
def test_parts_give_the_whole_models_loss_and_gradients(tied, stage_layers, chunks, level):
    config = replace(MODEL, tied=tied, position="learned", max_position=8)
    backend = TorchBackend(torch.float64)
    one = GPT(config, backend, 3, 4096)
    placement = Placement(2, Recompute(level, 0 if level == "none" else 1))
    packed = batch()
    loss = one(packed, placement)
    loss.backward()

    parts = [GPT(config, backend, 3, 4096, part) for part in parts_of(stage_layers, chunks)]
    x = None
    for chunk in range(chunks):
        for part in parts:
            x = part.run(chunk, x, packed, placement)
    assert x is not None
    x.backward()
    assert torch.equal(x.detach(), loss.detach())
    whole = {name: parameter.grad for name, parameter in one.named_parameters()}
    found: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            name = "embedding.weight" if tied and name == "head.weight" else name
            found[name] = found[name] + parameter.grad if name in found else parameter.grad
    assert sorted(found) == sorted(whole)
    for name, grad in whole.items():
        assert torch.allclose(found[name], grad, rtol=1e-12, atol=1e-14), name


def test_a_tied_head_of_its_own_starts_as_the_embedding():
    config = replace(MODEL, tied=True)
    first, last = (GPT(config, TorchBackend(), 3, 4096, part) for part in parts_of((3, 2)))
    assert torch.equal(first.embedding.weight, last.head.weight)
    assert "head.weight" not in dict(GPT(config, TorchBackend(), 3, 4096).named_parameters())


def test_names_are_those_of_the_whole_model():
    names = {name for name, _ in GPT(MODEL, TorchBackend(), 3, 4096).named_parameters()}
    parts = [{name for name, _ in GPT(MODEL, TorchBackend(), 3, 4096, part).named_parameters()} for part in parts_of((2, 3), 2)]
    assert parts[0] | parts[1] == names
    assert not parts[0] & parts[1]
    assert "layers.1.mlp.up.weight" in parts[1]  # chunk 0 of stage 0 has layer 0 only
