"""Context parallelism on gloo ranks: attention, group sizes that change, recompute, and whole models (public cases C23, C27, C31, C33)."""

from __future__ import annotations

import dataclasses
import itertools

import nn_helpers
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from context_helpers import Where, dense, distance, documents, heads
from nn_helpers import FAMILIES, SMALL
from ranks import run_ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megadcp.config.schema import ModelConfig
from megadcp.data.batch import Pack, split_for_lanes
from megadcp.engine.placement import Placement
from megadcp.engine.transfer import to_device
from megadcp.mesh.coords import Mesh
from megadcp.mesh.groups import Group, GroupPool
from megadcp.nn.backend import IGNORE, PackedTokens
from megadcp.nn.gpt import GPT
from megadcp.parallel.context import KINDS, attention
from megadcp.plan.step_plan import Recompute

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """The first checkpoint imports for seconds: once here, before the ranks are forked, not in each of them."""
    checkpoint(torch.neg, torch.ones(1, requires_grad=True), use_reentrant=False).backward()


def world_group(rank: int, world: int) -> Group:
    return Group(tuple(range(world)), rank, dist.group.WORLD)


# ------------------------------------------------------------------------------------------------------ attention alone
def attention_errors(rank: int, world: int) -> dict[str, float]:
    group, errors = world_group(rank, world), {}
    for lengths in ([22, 7, 1, 40], [1], [16, 16, 16, 3]):
        docs = documents(lengths, world, extra=1)
        rows, real = docs.rows_of(world, rank), docs.real()
        for sizes in ((8, 8), (8, 4), (8, 1)):
            inputs = heads(docs.rows, sizes)
            wanted = dense(*inputs, docs)
            for kind in KINDS:
                if kind == "ulysses" and sizes[1] % world:
                    continue
                q, k, v = (x[rows].requires_grad_() for x in inputs[:3])
                out = attention(q, k, v, docs.member(world, rank), Where(group, kind, 4))
                found = (out, *torch.autograd.grad(out, (q, k, v), inputs[3][rows]))
                name = f"{kind} {sizes} {lengths}"
                errors[name] = max(
                    float((mine - expected[rows]).detach().abs().max() / expected.abs().max()) for mine, expected in zip(found, wanted, strict=True)
                )
                assert all(torch.isfinite(mine).all() for mine in found), name
                assert all(torch.count_nonzero(mine[~real[rows]]) == 0 for mine in found), name
    return errors


@pytest.mark.parametrize("world", [2, 4, 8])
def test_attention_equals_dense(world):
    for errors in run_ranks(world, attention_errors):
        assert len(errors) > 20
        assert max(errors.values()) < 1e-11, max(errors, key=errors.__getitem__)


# -------------------------------------------------------------------------------------------- sizes and kinds that change
WORK = [  # (cp, kind, lengths, again): what every block of cp lanes runs, one after the other
    (8, "ring", [30, 1], False),
    (1, "none", [9, 3], False),
    (2, "ulysses", [13, 2], True),
    (8, "2d", [50], True),
    (4, "all_gather", [5, 17], True),
    (2, "ring", [1], False),
    (4, "2d", [21, 4], False),
    (8, "all_gather", [3, 3, 3], False),
    (1, "none", [40], False),
    (4, "ring", [11], True),
    (8, "ring", [64], True),
]


def _weight(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(12 * 8, 16, generator=generator, dtype=torch.float64) / 4


def _tokens(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def changing_groups(rank: int, world: int, in_flight: int) -> tuple[Tensor, float]:
    """Summed gradient of a qkv projection and summed loss. Up to `in_flight` forwards wait for their backward."""
    weight = _weight(0).requires_grad_()
    waiting: list[Tensor] = []
    total = torch.zeros((), dtype=torch.float64)
    with GroupPool(Mesh(world), rank, CPU) as pool:
        for number, (cp, kind, lengths, again) in enumerate(WORK):
            lane = rank // cp * cp
            docs = documents(lengths, max(cp, 2))
            group = pool.cp(lane, cp)
            x = _tokens(docs.rows, 100 * number + lane)[docs.rows_of(cp, group.index)]

            def layer(x: Tensor, group: Group = group, kind: str = kind, batch: PackedTokens = docs.member(cp, group.index)) -> Tensor:  # noqa: B008
                q, k, v = torch.split(F.linear(x, weight).unflatten(1, (12, 8)), [4, 4, 4], 1)
                if group.size == 1:
                    wanted = documents_alone(q, k, v, batch)
                    return wanted.square().sum()
                return attention(q, k, v, batch, Where(group, kind, 4)).square().sum()

            loss = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
            total += loss.detach()
            waiting.append(loss)
            if len(waiting) > in_flight:
                waiting.pop(0).backward()
        for loss in waiting:
            loss.backward()
        sums = weight.grad.clone()
        dist.all_reduce(sums)
        dist.all_reduce(total)
    return sums, float(total)


def documents_alone(q: Tensor, k: Tensor, v: Tensor, batch: PackedTokens) -> Tensor:
    parts = []
    for start, length in zip(batch.cu_seqlens_list, batch.real_lengths.tolist(), strict=False):
        q_, k_, v_ = (x[start : start + length].transpose(0, 1) for x in (q, k, v))
        parts.append(F.scaled_dot_product_attention(q_, k_, v_, is_causal=True).transpose(0, 1))
    return torch.cat(parts)


def one_process(world: int) -> tuple[Tensor, float]:
    weight, total = _weight(0).requires_grad_(), 0.0
    for number, (cp, _, lengths, _) in enumerate(WORK):
        docs = documents(lengths, max(cp, 2))
        for lane in range(0, world, cp):
            q, k, v = torch.split(F.linear(_tokens(docs.rows, 100 * number + lane), weight).unflatten(1, (12, 8)), [4, 4, 4], 1)
            loss = documents_alone(q, k, v, docs.member(1, 0)).square().sum()
            loss.backward()
            total += float(loss.detach())
    return weight.grad, total


@pytest.mark.parametrize("in_flight", [0, 3])
def test_sizes_and_kinds_change_from_one_microbatch_to_the_next(in_flight):
    """Recompute and backward use the group of their own forward, also when others came between."""
    gradient, loss = one_process(8)
    for mine, total in run_ranks(8, changing_groups, in_flight):
        assert distance(mine, gradient) < 1e-11
        assert abs(total / loss - 1) < 1e-12


# --------------------------------------------------------------------------------------------------------- whole models
def share_of(batch: PackedTokens, cp: int, index: int) -> PackedTokens:
    """As the loader and the engine make it."""
    names = ("tokens", "labels", "positions", "cu_seqlens", "document_ids", "real_lengths")
    pack = Pack(**{name: getattr(batch, name).numpy() for name in names}, max_length=batch.max_length, cu_seqlens_list=batch.cu_seqlens_list)
    return to_device(split_for_lanes(pack, cp)[index], CPU)


def padded_to(lengths: list[int], unit: int) -> list[int]:
    return [-(-length // unit) * unit for length in lengths]


Case = tuple[str, str, int]  # kind, recompute level, layers


def model_gradients(
    rank: int, world: int, config: ModelConfig, batches: list[PackedTokens], cases: list[Case]
) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Loss and gradients of each batch in each case, summed over the group."""
    made, found = model(config), []
    for batch, (kind, level, layers) in itertools.product(batches, cases):
        own = share_of(batch, world, rank)
        loss, gradients = nn_helpers.gradients(made, own, Placement(5, Recompute(level, layers), world, kind, world_group(rank, world)))
        for tensor in (loss, *gradients.values()):
            dist.all_reduce(tensor)
        found.append((loss, {name: gradient.clone() for name, gradient in gradients.items()}))
    return found if rank == 0 else []


def model(config: ModelConfig, dtype: torch.dtype = torch.float64) -> GPT:
    return nn_helpers.model(config, dtype).train()


CASES = [("ring", "none", 0), ("ring", "full", 2), ("all_gather", "selective", 2), ("ulysses", "mlp", 1), ("2d", "full", 1)]
LENGTHS = [22, 1, 7, 13, 2]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("family", ["llama_tied_mha", "qk_norm_learned", "gpt2", "gelu_mqa", "squared_relu_yarn"])
def test_a_model_has_the_gradients_of_one_process(family, world):
    """C23, C33: every kind and recompute level, rope and learned positions, keyed dropout; reference without padding and without groups."""
    config = dataclasses.replace(FAMILIES[family], residual_dropout=0.2, embedding_dropout=0.1)
    tokens = nn_helpers.documents(LENGTHS, config.vocab)
    loss, expected = nn_helpers.gradients(model(config), nn_helpers.pack(tokens), nn_helpers.place(step=5))
    cases = [case for case in CASES if case[0] != "ulysses" or config.kv_heads % world == 0]
    batch = nn_helpers.pack(tokens, padded_to(LENGTHS, 2 * world))
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for mine, gradients in run_ranks(world, model_gradients, config, [batch], cases)[0]:
        assert abs(mine / loss - 1) < 1e-12
        for name, gradient in expected.items():
            scale = max(float(gradient.abs().max()), 1e-3 * largest)
            assert float((gradients[name] - gradient).abs().max()) < 1e-10 * scale, name


@pytest.mark.parametrize("world", [2, 4])
def test_one_valid_target(world):
    """C31: the sum over members is the gradient of one process, for any mask; the division by the global count comes after."""
    config = FAMILIES["llama"]
    tokens = nn_helpers.documents([32], config.vocab)
    whole, batches, wanted = nn_helpers.pack(tokens), [], []
    for kept in (slice(5, 6), slice(30, 31), slice(0, 10), slice(11, 31)):
        labels = torch.full_like(whole.labels, IGNORE)
        labels[kept] = whole.labels[kept]
        batches.append(dataclasses.replace(whole, labels=labels))
        wanted += [nn_helpers.gradients(model(config), batches[-1])] * 3
    found = run_ranks(world, model_gradients, config, batches, CASES[:3])[0]
    for (mine, gradients), (loss, expected) in zip(found, wanted, strict=True):
        assert abs(mine / loss - 1) < 1e-12
        assert all(distance(gradients[name], gradient) < 1e-10 for name, gradient in expected.items())


def logits_of(rank: int, world: int, config: ModelConfig, batches: list[PackedTokens]) -> list[Tensor]:
    """Of this member's rows of each batch."""
    made, group = model(config), world_group(rank, world)
    with torch.no_grad():
        return [made.logits(share_of(batch, world, rank), Placement(0, Recompute(), world, kind, group)) for kind in KINDS[:3:2] for batch in batches]


@pytest.mark.parametrize("world", [2, 4])
def test_lengths_that_are_no_multiple(world):
    """C27: 7, 22 and 2,999 tokens, several documents and one in a row; logits of all real tokens equal the unpadded run."""
    config = dataclasses.replace(FAMILIES["llama_tied_mha"], layers=1)
    rows_of_documents = [nn_helpers.documents(lengths, config.vocab) for lengths in ([7, 2999, 22], [2999])]
    batches = [nn_helpers.pack(tokens, padded_to([len(one) for one in tokens], 2 * world)) for tokens in rows_of_documents]
    found = run_ranks(world, logits_of, config, batches)
    for number, members in enumerate(zip(*found, strict=True)):
        batch, tokens = batches[number % 2], rows_of_documents[number % 2]
        with torch.no_grad():
            expected = model(config).logits(nn_helpers.pack(tokens), nn_helpers.place())
        places = dataclasses.replace(batch, labels=torch.arange(len(batch.tokens)))
        whole = torch.empty(len(batch.tokens), config.vocab, dtype=torch.float64)
        whole[torch.cat([share_of(places, world, rank).labels for rank in range(world)])] = torch.cat(members)
        assert distance(whole[nn_helpers.real(batch)], expected) < 1e-11


def three_steps(rank: int, world: int, batches: list[PackedTokens], kind: str) -> list[tuple[float, dict[str, Tensor]]]:
    """Plain SGD with summed gradients in fp32; world 1: alone. Loss and gradients of each step."""
    made, found = model(ModelConfig(**SMALL), torch.float32), []
    for step, batch in enumerate(batches):
        if world == 1:
            own, placement = batch, nn_helpers.place(step=step)
        else:
            own, placement = share_of(batch, world, rank), Placement(step, Recompute(), world, kind, world_group(rank, world))
        loss, gradients = nn_helpers.gradients(made, own, placement)
        if world > 1:
            for tensor in (loss, *gradients.values()):
                dist.all_reduce(tensor)
        found.append((float(loss), {name: gradient.clone() for name, gradient in gradients.items()}))
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                parameter -= 0.05 / sum(LENGTHS) * gradients[name]
    return found


@pytest.mark.parametrize(("world", "kind"), [(2, "ring"), (2, "ulysses"), (4, "ring"), (4, "all_gather"), (4, "2d")])
def test_three_steps_in_fp32(world, kind):
    """C23: every parameter's gradient, in every step, and no growth over the steps."""
    batches = [nn_helpers.pack(nn_helpers.documents(LENGTHS, SMALL["vocab"], seed), padded_to(LENGTHS, 2 * world)) for seed in range(3)]
    expected = three_steps(0, 1, batches, "none")
    for (mine, gradients), (loss, wanted) in zip(run_ranks(world, three_steps, batches, kind)[0], expected, strict=True):
        assert abs(mine / loss - 1) < 1e-5
        assert all(distance(gradients[name], gradient) < 1e-5 for name, gradient in wanted.items())
