"""Weight gradients that a linear's backward adds to the fp32 sums: the numbers, the hooks' order, sums that start early."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from ranks import run_ranks

from megadcp.backends.torch_backend import TorchBackend
from megadcp.backends.torch_sharded import ShardedBackend
from megadcp.config.schema import ModelConfig, OptimConfig
from megadcp.engine.placement import Placement
from megadcp.mesh.coords import Mesh
from megadcp.mesh.groups import GroupPool
from megadcp.nn.backend import IGNORE, PackedTokens
from megadcp.nn.gpt import GPT
from megadcp.parallel import main_grad
from megadcp.parallel.buckets import GradientBuckets, on_gradient
from megadcp.parallel.gradients import GradientBuffers
from megadcp.parallel.product import PLAIN, PlainProduct, add_product
from megadcp.plan.step_plan import Recompute
from megadcp.train.optim import Optimizer

BF16, CPU = torch.bfloat16, torch.device("cpu")
CONFIG = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=61, init_std=0.1, qkv_bias=True)
FUSED = PlainProduct(add_product)
SLOTS = 4


def build(product, tp=None):
    backend = TorchBackend(BF16, CPU, product) if tp is None else ShardedBackend(BF16, CPU, tp, True, product)
    return GPT(CONFIG, backend, 3, 16)


def packed(seed, tokens=32):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, CONFIG.vocab, (2, tokens), generator=generator)
    drawn[1, -1] = IGNORE
    lengths, borders = torch.tensor([tokens]), (0, tokens)
    fields = {"real_lengths_list": (tokens,)} if "real_lengths_list" in PackedTokens.__dataclass_fields__ else {}
    return PackedTokens(drawn[0], drawn[1], torch.arange(tokens), torch.tensor(borders, dtype=torch.int32), tokens, torch.tensor([seed]),
                        lengths, borders, **fields)  # fmt: skip


def run(made, buffers, slots, level="none", order=None):
    """Forward all, then backward in another order: the first forward need not be the first backward."""
    buffers.zero()
    losses = {slot: made(packed(slot), Placement(0, Recompute(level, 2 if level != "none" else 0))) for slot in slots}
    for slot in order or reversed(slots):
        losses[slot].backward()
    return [loss.detach() for loss in losses.values()]


def distance(found, expected):
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


def exact_sums(slots):
    """The same model's gradients in fp64, from the same bf16 values."""
    wide = GPT(CONFIG, TorchBackend(torch.float64), 3, 16)
    wide.load_state_dict({name: value.double() for name, value in build(PLAIN).state_dict().items()})
    buffers = GradientBuffers(wide.named_parameters())
    run(wide, buffers, slots)
    return buffers.sums()


@pytest.mark.parametrize("level", ["none", "selective", "full"])
def test_fused_sums_are_the_sums_without_a_rounding(level):
    made, plain = build(FUSED), build(PLAIN)
    buffers, others = GradientBuffers(made.named_parameters()), GradientBuffers(plain.named_parameters())
    slots = list(range(SLOTS))
    for step in range(2):  # what the first step left does not count in the second
        assert run(made, buffers, slots, level) == run(plain, others, slots, level)
        found = [total.clone() for total in buffers.sums()]
        expected = others.sums()
        assert distance(found, expected) < 0.02, step
        for name, one, other in zip(buffers.names, found, expected, strict=True):
            in_layer_matrix = name.startswith("layers") and one.ndim == 2
            assert torch.equal(one, other) != in_layer_matrix, name
    assert all(parameter.grad is None for parameter in made.parameters())
    exact = exact_sums(slots)
    assert distance(found, [one.float() for one in exact]) <= distance(others.sums(), [one.float() for one in exact])


def test_order_of_backwards_matters_by_fp32_rounding_only():
    """Nothing is overwritten by what was forwarded first."""
    made = build(FUSED)
    buffers = GradientBuffers(made.named_parameters())
    slots = list(range(SLOTS))
    found = []
    for order in (slots, list(reversed(slots)), [2, 0, 3, 1]):
        run(made, buffers, slots, order=order)
        found.append([total.clone() for total in buffers.sums()])
    matrices = [index for index, name in enumerate(buffers.names) if name.startswith("layers") and found[0][index].ndim == 2]
    for other in found[1:]:
        assert distance([other[index] for index in matrices], [found[0][index] for index in matrices]) < 1e-5


def test_a_weight_that_no_backward_reaches_has_zeros():
    made = build(FUSED)
    buffers = GradientBuffers(made.named_parameters())
    run(made, buffers, [0])
    assert all(torch.count_nonzero(total) for total in buffers.sums())
    buffers.zero()
    assert all(torch.count_nonzero(total) == 0 for total in buffers.sums())


def test_parameters_are_as_before_when_buffers_close():
    made = build(FUSED)
    first = GradientBuffers(made.named_parameters())
    second = GradientBuffers(made.named_parameters())
    first.close()  # must not take away what the second gave
    weight = made.layers["0"].mlp.up.weight
    assert weight.main_grad is second._wide[second.names.index("layers.0.mlp.up.weight")]
    assert weight.grad_added_to_main_grad is False  # Transformer Engine answers only where this is there
    second.close()
    assert not hasattr(weight, "main_grad")
    made(packed(0), Placement()).backward()
    assert weight.grad is not None
    assert torch.count_nonzero(weight.grad)


def test_wide_and_unasked_parameters_get_no_sums():
    weight = main_grad.adds_itself(torch.nn.Parameter(torch.zeros(2, 2)))
    assert not main_grad.offer(weight, torch.zeros(2, 2))
    assert not main_grad.offer(torch.nn.Parameter(torch.zeros(2, 2, dtype=BF16)), torch.zeros(2, 2))
    assert main_grad.total_of(weight) is None


def _lanes(rank, world, product):
    """One step on two lanes; the hooks' order, the buckets that started inside the last backward, masters after an update."""
    with GroupPool(Mesh(world), rank, CPU, overlap=True) as pool:
        made = build(product)
        buffers = GradientBuffers(made.named_parameters(), pool, bucket=3000)
        optimizer = Optimizer(made, buffers, TorchBackend(BF16), OptimConfig(lr=0.01, eps=1e-3), {})
        fired, started = [], []

        def note(name, _):
            fired.append(name)
            started.append(len(buffers.buckets._started))

        for name, parameter in made.named_parameters():
            on_gradient(parameter, partial(note, name))
        buffers.zero()
        losses = []
        for slot in (2 * rank, 2 * rank + 1):
            if slot == 2 * rank + 1:
                fired.clear()
                started.clear()
                buffers.last_microbatch()
            losses.append(made(packed(slot), Placement()))
            losses[-1].backward()
        verdict = buffers.finish([loss.detach() for loss in losses], 100, 0.0)
        optimizer.step(0.01)
        optimizer.wait()
        return fired, started, verdict, {name: parameter.detach().clone() for name, parameter in made.named_parameters()}


def _fused_lanes(rank, world):
    return _lanes(rank, world, FUSED)


def _plain_lanes(rank, world):
    return _lanes(rank, world, PLAIN)


def _modules(names):
    return list(dict.fromkeys(name.rpartition(".")[0] for name in names))


def test_on_lanes_hooks_and_early_sums_are_as_without_fusion():
    fused, plain = run_ranks(2, _fused_lanes), run_ranks(2, _plain_lanes)
    assert fused[0][0] == fused[1][0]
    assert fused[0][1] == fused[1][1]
    assert _modules(fused[0][0]) == _modules(plain[0][0])  # weight and bias of one linear come in any order
    assert fused[0][1][0] == plain[0][1][0]
    assert fused[0][1][-1] > fused[0][1][0]  # sums did start while the backward ran
    assert fused[0][1][-1] == plain[0][1][-1]
    assert fused[0][2].norm == pytest.approx(plain[0][2].norm, rel=1e-3)
    assert all(torch.equal(fused[0][3][name], fused[1][3][name]) for name in fused[0][3])
    start = {name: parameter.detach() for name, parameter in build(PLAIN).named_parameters()}
    moved = [(fused[0][3][name].float() - start[name].float(), plain[0][3][name].float() - start[name].float()) for name in start]
    assert all(torch.count_nonzero(one) for one, _ in moved)
    assert max(float((one - other).norm() / other.norm()) for one, other in moved) < 0.3  # updates are a few bf16 steps


def _late(rank, world):
    with GroupPool(Mesh(world), rank, CPU) as pool:
        made = build(FUSED)
        buffers = GradientBuckets(list(made.parameters()), pool.lanes)
        buffers.zero()
        buffers.last_microbatch()
        made(packed(0), Placement()).backward()
        try:
            made(packed(1), Placement()).backward()
        except RuntimeError as error:
            found = str(error)
        else:
            found = ""
        buffers.finish()
        return found


def test_a_gradient_behind_its_bucket_is_an_error():
    assert all("came after its bucket was sent" in message for message in run_ranks(2, _late))
