"""Linears in fp8: rounding, products against a plain reference, what is kept, and that recompute changes no bit."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
import torch
from nn_helpers import distance, documents, gradients, pack, place
from torch.utils._python_dispatch import TorchDispatchMode

from megadcp.backends import torch_fp8
from megadcp.backends.torch_backend import TorchBackend
from megadcp.backends.torch_fp8 import BLOCK, E4M3, E5M2, LARGEST, BlockScaling, CurrentScaling
from megadcp.backends.torch_sharded import torch_backend
from megadcp.config.schema import ModelConfig
from megadcp.nn import compiled
from megadcp.nn.gpt import GPT
from megadcp.parallel.product import PLAIN

BF16 = torch.bfloat16
FORMS = (E4M3, E5M2)
FP8 = ("fp8_current", "fp8_block")
CONFIG = ModelConfig(layers=3, hidden=128, heads=4, kv_heads=2, head_dim=64, ffn=256, vocab=61, init_std=0.05)
RICH = dataclasses.replace(
    CONFIG, mlp="gelu", norm="layernorm", position="learned", max_position=256, qkv_bias=True, out_bias=True, mlp_bias=True, tied=True
)
LEVELS = ("none", "selective", "mlp", "full")


def build(fp8="", config=CONFIG, seed=3, ends=0):
    return GPT(config, torch_backend(BF16, "cpu", fp8=fp8, bf16_ends=ends), seed, 64)


def values(*shape, seed=0, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(BF16)


# --------------------------------------------------------------------------------------------------------------- rounding
def _numbers(form):
    """Every finite number of a form, ascending, with whether its last bit is 0."""
    bits = torch.arange(256, dtype=torch.uint8)
    numbers = bits.view(form).double()
    keep = numbers.isfinite() & (bits != 128)  # one zero is enough
    order = numbers[keep].argsort()
    return numbers[keep][order], (bits[keep] % 2 == 0)[order]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [5, 4096])  # kernels treat the last few of a tensor by themselves
def test_rounding_is_to_the_nearest_even_and_stops_at_the_largest(form, count):
    numbers, even = _numbers(form)
    generator = torch.Generator().manual_seed(1)
    exponents = torch.randint(-26, 20, (4096,), generator=generator)
    x = torch.cat([torch.randn(4000, generator=generator).ldexp(exponents[:4000]), ((numbers[:-1] + numbers[1:]) / 2).float()[-96:]])[:count]
    found = torch_fp8.rounded(x, torch.ones(()), form).double()
    limited = x.double().clamp(-LARGEST[form], LARGEST[form])
    above = torch.searchsorted(numbers, limited).clamp(1, len(numbers) - 1)
    low, high = numbers[above - 1], numbers[above]
    down, up = limited - low, high - limited
    expected = torch.where((down < up) | ((down == up) & even[above - 1]), low, high)
    assert torch.equal(found, expected)
    assert found.abs().max() <= LARGEST[form]


@pytest.mark.parametrize("form", FORMS)
def test_scales(form):
    largest = torch.tensor([1.0, 0.75, 3e-5, 1e30, 0.0, torch.inf, torch.nan])
    plain, rounded = (torch_fp8.scale_for(largest, form, power) for power in (False, True))
    assert torch.equal(plain[:4], LARGEST[form] / largest[:4])
    assert torch.equal(rounded[:5], torch.exp2(plain[:5].double().log2().floor()).float())
    for scale in (plain, rounded):
        assert scale[:5].isfinite().all()
        assert scale[:5].reciprocal().isfinite().all()
        assert scale[5] == 0
        assert scale[6].isnan()


def test_the_largest_of_nothing_is_zero_and_nan_is_seen():
    assert torch_fp8.largest_of(torch.zeros(0, 16, dtype=BF16)) == 0
    x = values(70, 16)
    assert torch_fp8.largest_of(x) == x.abs().max()
    for place_ in (0, 500, -1):
        spoiled = x.clone()
        spoiled.view(-1)[place_] = torch.nan
        assert torch_fp8.largest_of(spoiled).isnan()


# --------------------------------------------------------------------------------------------------------------- products
def _through(x, form=E4M3):
    """x after rounding with one scale, in fp64; and again in fp64 from scratch: 448 / largest."""
    q, inverse = CurrentScaling().quantise(x, form)
    assert q.dtype == form
    return q.double() * inverse.double()


def _blocks(x, dim):
    """x after rounding in blocks of 128 along `dim` (weights: both), by plain loops."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    sizes = [BLOCK if dim in (0, "both") else 1, BLOCK if dim in (1, "both") else 1]
    for row in range(0, x.shape[0], sizes[0]):
        for column in range(0, x.shape[1], sizes[1]):
            piece = (slice(row, row + sizes[0]), slice(column, column + sizes[1]))
            largest = x[piece].abs().max().double()
            scale = torch.exp2((448 / largest).log2().floor())
            out[piece] = (x[piece].double() * scale).float().to(E4M3).double() / scale
    return out


def _expected(fp8, x, weight, bias, slope):
    """Output and gradients in fp64 of the rounded operands."""
    if fp8 == "fp8_current":
        xs, ws, slopes = (_through(x),) * 2, _through(weight), (_through(slope, E5M2),) * 2
    else:
        xs, ws, slopes = (_blocks(x, 1), _blocks(x, 0)), _blocks(weight, "both"), (_blocks(slope, 1), _blocks(slope, 0))
    out = xs[0] @ ws.T + (0 if bias is None else bias.double())
    return out, slopes[0] @ ws, slopes[1].T @ xs[1]


@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [256, 37, 1])
def test_a_linear_against_the_rounded_operands(fp8, bias, tokens):
    """Token counts that no GPU kernel takes are right, too. The tolerance is one rounding to bf16."""
    made = torch_backend(BF16, "cpu", fp8=fp8).linear(256, 128, bias, "column")
    with torch.no_grad():
        made.weight.copy_(values(128, 256, seed=1, scale=0.02))
        if bias:
            made.bias.copy_(values(128, seed=2))
    x, slope = values(tokens, 256).requires_grad_(), values(tokens, 128, seed=3, scale=1e-3)
    out = made(x)
    out.backward(slope)
    expected = _expected(fp8, x.detach(), made.weight.detach(), made.bias.detach() if bias else None, slope)
    found = (out, x.grad, made.weight.grad)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == BF16
        assert distance(one.detach().double(), other) < 2.0**-8
    if bias:
        assert distance(made.bias.grad.double(), slope.double().sum(0)) < 2.0**-7
    exact = (
        x.detach().double() @ made.weight.detach().double().T,
        slope.double() @ made.weight.detach().double(),
        slope.double().T @ x.detach().double(),
    )
    errors = [((one.detach().double() - (made.bias.detach().double() if bias and other is exact[0] else 0) - other).norm() / other.norm()).item()
              for one, other in zip(found, exact, strict=True)]  # fmt: skip
    assert all(0.005 < error < 0.08 for error in errors), errors  # fp8 rounding is there, and no more than that


@pytest.mark.parametrize("fp8", FP8)
def test_weight_gradients_reach_fp32_sums_unrounded(fp8):
    made = torch_backend(BF16, "cpu", fp8=fp8).linear(128, 128, False, "column")
    with torch.no_grad():
        made.weight.copy_(values(128, 128, seed=1))
    made.weight.main_grad, made.weight.grad_added_to_main_grad = torch.ones(128, 128), False
    x, slope = values(64, 128), values(64, 128, seed=3)
    made(x).backward(slope)
    expected = _expected(fp8, x, made.weight.detach(), None, slope)[2]
    assert made.weight.grad_added_to_main_grad
    assert distance(made.weight.main_grad.double() - 1, expected) < 1e-5


@pytest.mark.parametrize("power_of_two", [True, False])
def test_scales_are_powers_of_two_unless_told_otherwise(power_of_two):
    x = values(16, 16, scale=3.0)
    q, inverse = CurrentScaling(power_of_two).quantise(x, E4M3)
    assert (inverse.log2() == inverse.log2().round()) == power_of_two
    assert 224 < q.float().abs().max() <= 448
    assert distance(q.float() * inverse, x.float()) < 2.0**-4
    assert torch.equal(CurrentScaling().quantise(x, E4M3)[1], inverse) == power_of_two


@pytest.mark.parametrize("fp8", FP8)
def test_outliers_are_cut_off_not_infinite(fp8):
    """1e30 among ones: it keeps its value within fp8 rounding, nothing is Inf or NaN; ones in its reach of the scale become zero."""
    made = torch_backend(BF16, "cpu", fp8=fp8).linear(256, 128, False, "column")
    with torch.no_grad():
        made.weight.zero_()
        made.weight[:, :128] = torch.eye(128)
    x = torch.ones(16, 256, dtype=BF16)
    x[3, 5] = 1e30
    out = made(x.requires_grad_())
    out.backward(torch.ones_like(out))
    assert out.isfinite().all()
    assert out[3, 5].item() == pytest.approx(1e30, rel=2.0**-4)
    assert x.grad.isfinite().all()
    assert made.weight.grad.isfinite().all()
    dwarfed = torch.count_nonzero(out[4] == 0).item()
    assert dwarfed == (128 if fp8 == "fp8_current" else 0)  # a block's scale is its own


@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["input", "weight", "slope"])
def test_nan_and_inf_surface(fp8, bad, where):
    made = torch_backend(BF16, "cpu", fp8=fp8).linear(256, 128, False, "column")
    x, slope = values(32, 256), values(32, 128, seed=3)
    with torch.no_grad():
        made.weight.copy_(values(128, 256, seed=1))
        {"input": x, "weight": made.weight, "slope": slope}[where][7, 9] = bad
    out = made(x.requires_grad_())
    out.backward(slope)
    spoiled = {"input": (out, made.weight.grad), "weight": (out, x.grad), "slope": (x.grad, made.weight.grad)}[where]
    for one in spoiled:
        assert one.isnan().any()
        assert not one.isinf().any()
    if fp8 == "fp8_current":
        assert all(one.isnan().all() for one in spoiled)


# ------------------------------------------------------------------------------------------------------------------ models
def _relative(found, expected):
    """Distance of all gradients together."""
    difference = sum(float((found[name].double() - grad.double()).square().sum()) for name, grad in expected.items())
    return (difference / sum(float(grad.double().square().sum()) for grad in expected.values())) ** 0.5


@pytest.mark.parametrize("config", [CONFIG, RICH], ids=["llama", "gpt2"])
@pytest.mark.parametrize("fp8", FP8)
def test_recompute_changes_no_bit(fp8, config):
    """All levels and layer counts, with several microbatches under way before the first backward."""
    made = build(fp8, config)
    batches = [pack(documents([70, 41], config.vocab, seed), [80, 48]) for seed in range(2)]

    def run(*placements):
        made.zero_grad()
        losses = [made(batch, placement) for batch, placement in zip(batches, placements, strict=True)]
        for loss in losses:
            loss.backward()
        return [loss.detach() for loss in losses], {name: p.grad for name, p in made.named_parameters()}

    losses, expected = run(place(), place())
    assert _relative(gradients(build("", config), batches[0])[1], gradients(made, batches[0])[1]) > 0.01  # fp8 is at work
    for level in LEVELS[1:]:
        for layers in (1, 2, 3):
            got_losses, got = run(place(level, layers), place(level, 3 - layers))
            assert got_losses == losses
            assert all(torch.equal(got[name], grad) for name, grad in expected.items()), (level, layers)


PRODUCTS = {"current": CurrentScaling(), "current, any scales": CurrentScaling(power_of_two=False), "block": BlockScaling()}


@pytest.mark.parametrize("kind", PRODUCTS)
def test_another_packing_changes_gradients_no_more_than_fp8_does(kind):
    """The same documents in one microbatch and in three, another order: scales differ, so fp8 rounding does; little with powers of two."""
    chosen = documents([96, 17, 50, 128, 33, 76], CONFIG.vocab)
    plans = {"one": [(0, 1, 2, 3, 4, 5)], "three": [(3, 1), (4, 0), (2, 5)]}
    found = {}
    for product in (PLAIN, PRODUCTS[kind]):
        made = GPT(CONFIG, TorchBackend(BF16, "cpu", product), 3, 64)
        for plan, packs in plans.items():
            total = {name: torch.zeros(parameter.shape) for name, parameter in made.named_parameters()}
            for ids in packs:
                _, got = gradients(made, pack([chosen[index] for index in ids], ids=ids))
                total = {name: value + got[name].float() for name, value in total.items()}
            found[product is PLAIN, plan] = total
    between = {plan: _relative(found[False, plan], found[True, plan]) for plan in plans}
    across = _relative(found[False, "three"], found[False, "one"])
    print(f"{kind}: packings differ by {across:.4f}, fp8 from bf16 by {between['one']:.4f} and {between['three']:.4f}")
    assert 0 < across <= min(between.values())
    assert (across < 0.25 * min(between.values())) == ("any" not in kind)


def test_only_linears_in_layers_are_fp8_and_ends_may_be_bf16():
    counted = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            counted.append(func)
            return func(*args, **(kwargs or {}))

    batch = pack(documents([32], CONFIG.vocab))
    products = {}
    for ends in (0, 1, 2):
        made = build("fp8_current", ends=ends)
        counted.clear()
        with Counting():
            made(batch, place()).backward()
        products[ends] = counted.count(torch.ops.aten._scaled_mm.default)
        if ends == 2:
            expected = gradients(build(), batch)[1]
            assert all(torch.equal(expected[name], p.grad) for name, p in made.named_parameters())
    assert products == {0: 3 * 4 * 3, 1: 4 * 3, 2: 0}  # of three layers with four linears each, three products; none of tables


def test_recompute_makes_products_again_as_without_fp8():
    batch = pack(documents([9, 14], CONFIG.vocab))
    made, counts = build("fp8_current"), {}
    for level in LEVELS:
        counted = []

        class Counting(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                counted.append(func)  # noqa: B023
                return func(*args, **(kwargs or {}))

        with Counting():
            made(batch, place(level, 3)).backward()
        counts[level] = counted.count(torch.ops.aten._scaled_mm.default)
    assert counts["selective"] == counts["none"]
    assert counts["mlp"] == counts["none"] + 3
    assert counts["full"] == counts["none"] + 3 * 3


class _Kept(TorchDispatchMode):
    """Follows every storage made inside; `bytes()` sums those still alive."""

    def __init__(self, made):
        super().__init__()
        self.storages = {}
        self.parameters = {p.untyped_storage()._cdata for p in made.parameters()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if storage._cdata in self.parameters:
                    continue
                self.storages[storage._cdata] = (weakref.ref(storage), storage.nbytes())
        return out

    def bytes(self):
        return sum(size for storage, size in self.storages.values() if storage() is not None)


@pytest.mark.parametrize("fp8", FP8)
def test_kept_bytes_are_less_than_the_plan_reckons(fp8):
    """A linear keeps one byte of each input: norm outputs h each, attention's output h beside its own 2h, the product f. A plan counts bf16."""
    tokens, found = 512, {}
    for layers in (1, 3):
        made = build(fp8, dataclasses.replace(CONFIG, hidden=256, ffn=768, layers=layers))
        batch = pack(documents([300, tokens - 300], CONFIG.vocab))
        made(pack(documents([4], CONFIG.vocab)), place()).backward()
        with _Kept(made) as kept:
            loss = made(batch, place())
        found[layers] = kept.bytes()
        assert loss.requires_grad
    per_token = (found[3] - found[1]) / (2 * tokens)
    h, kv, f = 256, 4 * 256 * 2 / 4, 768
    expected = 11 * h + kv + 5 * f
    assert per_token == pytest.approx(expected * (1 + (1 / 32 if fp8 == "fp8_block" else 0) * (3 * h + f) / expected), rel=0.03)
    assert per_token < 12 * h + kv + 6 * f


@pytest.mark.parametrize("fp8", FP8)
def test_evaluation_of_any_length(fp8):
    made, plain = build(fp8), build()
    for length in (1, 3, 17, 130):
        batch = pack(documents([length], CONFIG.vocab))
        with torch.no_grad():
            found, expected = made.logits(batch, place()), plain.logits(batch, place())
        assert found.isfinite().all()
        assert distance(found.float(), expected.float()) < 0.15


def test_refusals():
    with pytest.raises(ValueError, match="legal: fp8_current, fp8_block"):
        torch_backend(BF16, "cpu", fp8="fp8_delayed")
    with pytest.raises(ValueError, match="bf16 parameters"):
        torch_backend(torch.float32, "cpu", fp8="fp8_current")
    for fp8, size, unit in (("fp8_current", 40, 16), ("fp8_block", 144, 128)):
        with pytest.raises(ValueError, match=f"{size} -> 128 features.*multiples of {unit}"):
            torch_backend(BF16, "cpu", fp8=fp8).linear(size, 128, False, "column")


def test_formulas_are_traced_whole_once_for_all_token_counts():
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    calls = {
        torch_fp8._largest: lambda x: (x,),
        torch_fp8._rounded: lambda x: (x, torch.tensor(3.0), E4M3, 448.0),
        torch_fp8._quantise_blocks: lambda x: (x.view(x.shape[0], -1, BLOCK), 2),
    }
    for formula, arguments in calls.items():
        graphs.clear()
        traced = compiled.open_rows(torch.compile(formula, backend=backend, fullgraph=True))
        for tokens in (24, 40, 7, 24):
            x = values(tokens, 256)
            found, expected = traced(*arguments(x)), formula(*arguments(x))
            for one, other in zip(*((each if isinstance(each, tuple) else (each,)) for each in (found, expected)), strict=True):
                assert torch.equal(one.float(), other.float())
        assert len(graphs) == 1, formula
