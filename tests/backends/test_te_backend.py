"""The Transformer Engine backend in one process, with the recording stand-in: the torch backend's results, and what is asked of the engine."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import te_fake
import torch
from nn_helpers import FAMILIES, distance, documents, gradients, model, pack, place
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from megadcp.backends.te_attention import borders_of
from megadcp.backends.te_backend import RECIPES, TeBackend
from megadcp.backends.te_modules import TeLinear, TeNorm, share
from megadcp.backends.te_remake import Remaking
from megadcp.backends.torch_backend import TorchBackend
from megadcp.config.schema import ModelConfig
from megadcp.nn.gpt import GPT
from megadcp.parallel.main_grad import offer

LEVELS = ("none", "selective", "mlp", "full")
WIDE = torch.float64


def te_model(config: ModelConfig, recorder: te_fake.Recorder, dtype: torch.dtype = WIDE, **options: object) -> GPT:
    """With the values of nn_helpers.model."""
    made = GPT(config, TeBackend(te_fake.make(recorder), (dtype, "cpu"), **options), 3, 16)
    made.load_state_dict(model(config, dtype).state_dict())
    return made


def batch_of(config: ModelConfig, padded: bool = True):
    return pack(documents([7, 22, 13], config.vocab), [8, 24, 16] if padded else None)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_level_equals_the_torch_backend(family):
    """Padding rows come back from the stand-in as NaN: no gradient may see them."""
    config = dataclasses.replace(FAMILIES[family], residual_dropout=0.2, embedding_dropout=0.2)
    loss, expected = gradients(model(config, WIDE), batch_of(config))
    recorder = te_fake.Recorder()
    made = te_model(config, recorder)
    assert [name for name, _ in made.named_parameters()] == list(expected)
    for level in LEVELS:
        for layers in (0,) if level == "none" else (1, 2):
            found_loss, found = gradients(made, batch_of(config), place(level, layers))
            assert abs(float(found_loss - loss)) < 1e-11 * abs(float(loss))
            for name, gradient in expected.items():
                assert distance(found[name], gradient) < 1e-11, (level, layers, name)


def test_the_models_tree_holds_no_module_of_the_engine():
    recorder = te_fake.Recorder()
    made = te_model(FAMILIES["gpt2"], recorder)
    theirs = set(map(id, recorder.modules))
    assert len(theirs) == 2 * (4 * 2 + 1)  # a linear with and without norm or what it saves, and attention, of two layers
    assert not theirs & set(map(id, made.modules()))
    assert set(made.state_dict()) == set(model(FAMILIES["gpt2"], WIDE).state_dict())
    ours = set(map(id, made.parameters()))
    assert all(id(parameter) in ours for module in recorder.modules for parameter in module.parameters())


def test_parameters_may_be_moved_into_a_flat_tensor():
    """As ZeRO-1 does: the engine's modules read the new memory."""
    config = FAMILIES["gpt2"]
    made, plain = te_model(config, te_fake.Recorder()), model(config, WIDE)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(0.5)
        for parameter, other in zip(made.parameters(), plain.parameters(), strict=True):
            flat = torch.empty(parameter.numel() + 3, dtype=parameter.dtype)
            parameter.data = flat[3:].view(parameter.shape)
            parameter.copy_(other)
    _, expected = gradients(plain, batch_of(config))
    _, found = gradients(made, batch_of(config))
    assert max(distance(found[name], expected[name]) for name in expected) < 1e-11


def test_norms_run_in_the_linear_behind_them_and_are_still_called():
    """Hooks on the norm fire: they wait for its parameters."""
    recorder, called = te_fake.Recorder(), []
    made = te_model(FAMILIES["llama"], recorder)
    for name, module in made.named_modules():
        if isinstance(module, TeNorm):
            module.register_forward_pre_hook(lambda module, inputs, name=name: called.append(name))
    gradients(made, batch_of(FAMILIES["llama"]))
    assert called == ["layers.0.attention_norm", "layers.0.mlp_norm", "layers.1.attention_norm", "layers.1.mlp_norm", "norm"]
    assert [one["name"] for one in recorder.of("linear")] == ["LayerNormLinear", "Linear", "LayerNormLinear", "Linear"] * 2
    assert len(recorder.of("norm")) == 1  # the last one
    assert made.norm.fused is False


@pytest.mark.parametrize(("level", "again"), [("none", ""), ("selective", ""), ("mlp", "up down"), ("full", "qkv out up down")])
def test_what_each_level_multiplies_again(level, again):
    config = FAMILIES["llama"]
    recorder = te_fake.Recorder()
    made = te_model(config, recorder)
    loss = made(batch_of(config), place(level, 2))
    first = len(recorder.of("product"))
    assert first == 8
    loss.backward()
    names = {"qkv": (64, 32), "out": (32, 32), "up": (96, 32), "down": (32, 48)}
    found = sorted(one["shape"][1:] for one in recorder.of("product")[first:])
    assert found == sorted(2 * [names[name] for name in again.split()])
    assert len(recorder.of("norm")) == {"none": 1, "mlp": 1, "full": 1, "selective": 1 + 4 + 4}[level]  # selective: once and again


@pytest.mark.parametrize("selective", [False, True])
def test_selective_keeps_nothing_between_norm_or_activation_and_linear(selective):
    remaking, x = Remaking(), torch.randn(6, 4, dtype=WIDE, requires_grad=True)
    weight = torch.randn(3, 4, dtype=WIDE, requires_grad=True)
    read = []

    def piece(x: torch.Tensor) -> torch.Tensor:
        inner = x * 2
        read.append(StorageWeakRef(inner.untyped_storage()))
        return remaking.linear(product, inner) if selective else product(inner)

    def product(x: torch.Tensor) -> torch.Tensor:
        return _Saves.apply(x, weight, False)

    out = remaking.run(piece, x) if selective else piece(x)
    gc.collect()
    assert not remaking.active
    assert read[0].expired() is selective
    out.square().sum().backward()
    wanted = torch.autograd.grad(((x * 2) @ weight.t()).square().sum(), (x, weight))
    assert torch.equal(x.grad, wanted[0])
    assert torch.equal(weight.grad, wanted[1])
    assert len(read) == 1 + selective


class _Saves(torch.autograd.Function):
    """A product that saves what it read, or a copy of it."""

    @staticmethod
    def forward(ctx, x, weight, copy):
        ctx.save_for_backward(x.clone() if copy else x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, *grads):
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].t() @ x, None


@pytest.mark.parametrize(("copy", "times"), [(False, 2), (True, 1)])
def test_a_linear_that_saves_a_copy_is_right_too(copy, times):
    remaking, x = Remaking(), torch.randn(6, 4, dtype=WIDE, requires_grad=True)
    weight, ran = torch.randn(3, 4, dtype=WIDE, requires_grad=True), []

    def piece(x: torch.Tensor) -> torch.Tensor:
        ran.append(1)
        return remaking.linear(lambda x: _Saves.apply(x, weight, copy), x * 2)

    remaking.run(piece, x).square().sum().backward()
    wanted = torch.autograd.grad(((x * 2) @ weight.t()).square().sum(), (x, weight))
    assert torch.equal(x.grad, wanted[0])
    assert torch.equal(weight.grad, wanted[1])
    assert len(ran) == times


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("frozen", ["embedding", "embedding and first layer", "all but the last norm"])
def test_frozen_parts_do_not_cut_gradients(level, frozen):
    """Recompute of the kind that runs backwards inside a backward would give none where no input wants a gradient."""
    config = FAMILIES["llama"]
    made, plain = te_model(config, te_fake.Recorder()), model(config, WIDE)
    for one in (made, plain):
        if frozen == "all but the last norm":
            one.requires_grad_(False)
            one.norm.requires_grad_(True)
        else:
            one.embedding.requires_grad_(False)
            one.layers["0"].requires_grad_(frozen == "embedding")
    _, expected = gradients(plain, batch_of(config))
    _, found = gradients(made, batch_of(config), place(level, 0 if level == "none" else 2))
    assert found.keys() == expected.keys()
    assert max(distance(found[name], expected[name]) for name in expected) < 1e-11


def test_levels_may_change_between_microbatches_before_any_backward():
    config = dataclasses.replace(FAMILIES["llama"], residual_dropout=0.2)
    made, plain = te_model(config, te_fake.Recorder()), model(config, WIDE)
    batches = [pack(documents([9, 14], config.vocab, seed)) for seed in range(4)]
    for step, batch in enumerate(batches):
        plain(batch, place(step=step)).backward()
    losses = [made(batch, place(level, 2 if step else 0, step)) for step, (batch, level) in enumerate(zip(batches, LEVELS, strict=True))]
    for loss in losses:
        loss.backward()
    for (name, found), wanted in zip(made.named_parameters(), plain.parameters(), strict=True):
        assert distance(found.grad, wanted.grad) < 1e-11, name


# ------------------------------------------------------------------------------------------------------------- precision
def fp8_config() -> ModelConfig:
    """Sides that fp8 can multiply."""
    return ModelConfig(layers=4, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=61, init_std=0.1)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("ends", [0, 1])
def test_one_region_of_autocast_for_each_microbatch(level, ends):
    """Entered once, the layers at the ends leave it for their linears, attention's products are bf16's; recompute enters it again."""
    config = fp8_config()
    recorder = te_fake.Recorder(unit=16)
    made = te_model(config, recorder, fp8="fp8_current", unquantised_ends=ends)
    batch = pack(documents([7, 22], config.vocab), [8, 24])
    _, expected = gradients(model(config, WIDE), batch)
    _, found = gradients(made, batch, place(level, 0 if level == "none" else 4))
    assert max(distance(found[name], expected[name]) for name in expected) < 1e-11
    outer = [one for one in recorder.of("enter") if one["depth"] == 1 and not one["again"]]
    assert [one["enabled"] for one in outer] == [True]
    assert not recorder.regions
    first = [one for one in recorder.of("linear") if not one["again"]]
    quantised = [1 <= layer < 3 if ends else True for layer in range(4)]
    assert [one["fp8"] for one in first] == [yes for yes in quantised for _ in range(4)]
    again = [one for one in recorder.of("linear") if one["again"]]
    assert len(again) == {"none": 0, "selective": 0, "mlp": 8, "full": 16}[level]
    assert sum(one["fp8"] for one in again) == len(again) * sum(quantised) // 4
    assert len({one["region"] for one in recorder.of("enter")}) > 0


def test_regions_are_new_ones_each_time():
    recorder = te_fake.Recorder(unit=16)
    made = te_model(fp8_config(), recorder, fp8="fp8_block")
    batch = pack(documents([16], 61))
    regions = []
    backend_precision = made._precision
    made._precision = lambda: regions.append(backend_precision()) or regions[-1]
    made(batch, place())
    made(batch, place())
    assert len(regions) == 2
    assert regions[0] is not regions[1]
    assert [type(one.given["recipe"]).__name__ for one in regions] == ["Float8BlockScaling"] * 2


def test_without_fp8_nothing_is_quantised():
    recorder = te_fake.Recorder()
    gradients(te_model(FAMILIES["llama"], recorder), batch_of(FAMILIES["llama"]))
    assert [one["enabled"] for one in recorder.of("enter")] == [False]


@pytest.mark.parametrize("name", ["DelayedScaling", "fp8_delayed", "mxfp8"])
def test_other_recipes_are_refused(name):
    with pytest.raises(ValueError, match=f"precision.format={name} is no recipe .* legal: fp8_current, fp8_block"):
        TeBackend(te_fake.make(te_fake.Recorder()), (torch.bfloat16, "cpu"), fp8=name)
    assert "DelayedScaling" not in RECIPES.values()


def test_evaluation_runs_the_fused_way():
    recorder = te_fake.Recorder()
    made = te_model(FAMILIES["llama"], recorder)
    with torch.no_grad():
        loss = made(batch_of(FAMILIES["llama"]), place("selective", 2))
        assert torch.equal(loss, made(batch_of(FAMILIES["llama"]), place("full", 2)))
    assert {one["name"] for one in recorder.of("linear")} == {"LayerNormLinear", "Linear"}
    assert not recorder.of("checkpoint")


def test_text_of_any_length_in_fp8():
    """Generation has as many rows as there are tokens: what fp8 can't multiply runs in bf16. Training must not get there: it is refused."""
    recorder = te_fake.Recorder(unit=16)
    made = te_model(fp8_config(), recorder, fp8="fp8_current")
    for length in (1, 5, 16, 33):
        batch = pack(documents([length], 61))
        with torch.no_grad():
            logits = made.logits(batch, place())
            assert distance(logits, model(fp8_config(), WIDE).logits(batch, place())) < 1e-11
    assert [one["fp8"] for one in recorder.of("linear")] == [length == 16 for length in (1, 5, 16, 33) for _ in range(16)]
    with pytest.raises(AssertionError, match="fp8 can't multiply"):
        made(batch, place())


# ------------------------------------------------------------------------------------------------------- weight gradients
def test_weight_gradients_go_to_the_sums_that_are_offered():
    """fp32 sums beside bf16 weights: the products are added there, and what comes as gradient is never read."""
    config = FAMILIES["llama"]
    made, plain = te_model(config, te_fake.Recorder(), torch.bfloat16), model(config, torch.bfloat16)
    batch = batch_of(config)
    sums = {}
    for name, parameter in made.named_parameters():
        total = torch.zeros(parameter.shape, dtype=torch.float32)
        if offer(parameter, total):
            sums[name] = total
    assert set(sums) == {f"layers.{layer}.{name}.weight" for layer in range(2) for name in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")}
    made(batch, place()).backward()
    made(batch, place("full", 2)).backward()
    _, expected = gradients(plain, batch)
    parameters = dict(made.named_parameters())
    for name, total in sums.items():
        assert parameters[name].grad_added_to_main_grad
        assert distance(total / 2, expected[name].float()) < 0.05, name


def test_without_an_offer_gradients_come_as_always():
    config = FAMILIES["llama"]
    _, found = gradients(te_model(config, te_fake.Recorder(), torch.bfloat16), batch_of(config))
    assert all(torch.isfinite(each).all() for each in found.values())


# ------------------------------------------------------------------------------------------------------------- attention
def test_attention_hears_of_documents_and_their_padding():
    recorder = te_fake.Recorder()
    config = FAMILIES["llama"]
    made = te_model(config, recorder)
    gradients(made, batch_of(config), place("full", 1))
    gradients(made, batch_of(config, padded=False))
    calls = recorder.of("attention")
    assert len(calls) == 3 + 2
    assert all(
        (one["real"], one["padded"], one["longest"], one["pad_between_seqs"]) == ([0, 7, 29, 42], [0, 8, 32, 48], 24, True) for one in calls[:3]
    )
    assert all(
        (one["real"], one["padded"], one["longest"], one["pad_between_seqs"]) == ([0, 7, 29, 42], [0, 7, 29, 42], 22, False) for one in calls[3:]
    )


def test_borders_are_made_once_for_all_layers():
    recorder = te_fake.Recorder()
    batch = batch_of(FAMILIES["llama"])
    made = te_model(FAMILIES["llama"], recorder)
    gradients(made, batch, place("full", 2))
    assert len(batch.memo) == 1


@pytest.mark.parametrize(("padded", "cp"), [(True, 1), (True, 2), (False, 1), (False, 2)])
def test_borders_are_made_without_waiting_for_the_device(padded, cp):
    """Of tensors without values: whatever asks for one raises."""
    here = batch_of(FAMILIES["llama"], padded)
    there = {name: value.to("meta") for name, value in vars(here).items() if isinstance(value, torch.Tensor)}
    borders = borders_of(dataclasses.replace(here, **there, memo={}), cp)
    assert borders.longest == cp * here.max_length
    assert (borders.padding is None) == (borders.real is borders.padded) == (not padded and cp == 1)
    if borders.padding is not None:
        assert borders.padding.shape == (len(here.tokens), 1)
    with pytest.raises((RuntimeError, NotImplementedError)):
        borders.padded.tolist()


@pytest.mark.parametrize("length", [1, 5, 16])
def test_one_document(length):
    config = FAMILIES["llama"]
    batch = pack(documents([length], config.vocab), [16])
    _, expected = gradients(model(config, WIDE), batch)
    _, found = gradients(te_model(config, te_fake.Recorder()), batch)
    assert all(torch.isfinite(each).all() for each in found.values())
    assert max(float((found[name] - expected[name]).abs().max()) for name in expected) < 1e-10


# ---------------------------------------------------------------------------------------------------------------- parts
def test_a_norm_of_somebody_else_is_not_fused():
    backend = TeBackend(te_fake.make(te_fake.Recorder()), (WIDE, "cpu"))
    other = TorchBackend(WIDE).norm("rmsnorm", 32, 1e-5)
    made = backend.linear(32, 64, False, "column", norm=other)
    assert isinstance(made, TeLinear)
    assert other(torch.ones(1, 32, dtype=WIDE)).shape == (1, 32)


def test_heads_norms_are_the_torch_backends():
    backend = TeBackend(te_fake.make(te_fake.Recorder()), (WIDE, "cpu"))
    assert not isinstance(backend.norm("rmsnorm", 8, 1e-5, stream=False), TeNorm)
    assert isinstance(backend.norm("layernorm", 8, 1e-5), TeNorm)
    with pytest.raises(ValueError, match="legal: rmsnorm, layernorm"):
        backend.norm("batchnorm", 8, 1e-5)


def test_parameters_that_do_not_fit_are_refused():
    module = nn.Linear(3, 4)
    with pytest.raises(ValueError, match="Linear of Transformer Engine has parameters"):
        share(module, {"weight": nn.Parameter(torch.zeros(4, 5)), "bias": nn.Parameter(torch.zeros(4))})
    with pytest.raises(ValueError, match="has parameters"):
        share(module, {"weight": nn.Parameter(torch.zeros(4, 3))})
