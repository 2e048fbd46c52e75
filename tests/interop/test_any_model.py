"""A model that is not ours, trained with plans on four ranks, gets the gradients of its plain loop in one process."""

from __future__ import annotations

import pickle
from dataclasses import replace

import any_helpers as tiny
import layouts
import numpy as np
import pytest
import torch
from ranks import RankFailed, run_ranks
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from megadcp.config.check import UserError
from megadcp.config.schema import PlanConfig
from megadcp.interop.any_model import Options, Steps
from megadcp.interop.any_shape import always_bytes, config_of, shape_of
from megadcp.plan.planner import planner_for
from megadcp.plan.step_plan import StepPlan

BOUNDS = {torch.float32: 2e-5, torch.float64: 1e-10}


def run_model(model: nn.Module, microbatch) -> torch.Tensor:
    return microbatch.loss(model(**microbatch)) if isinstance(model, tiny.PlainModel) else model(**microbatch).loss


def gradients_on_rank(rank: int, world: int, cases) -> list:
    """(loss, gradients) of every step of every (family, dtype, seed); seed None: the planner's own plans."""
    found = []
    for family, dtype, seed in cases:
        model = tiny.make_model(family, dtype)
        if rank:
            with torch.no_grad():
                next(iter(model.parameters())).add_(1.0)  # rank 0's weights count
        plans = None if seed is None else tiny.random_plans(model, world, seed)
        with Steps(model, tiny.loader_of(), tiny.options_of(model), plans) as steps:
            for step in steps:
                model.zero_grad()
                for microbatch in step:
                    run_model(model, microbatch).backward()
                loss = step.finish().item()
                found.append((loss, tiny.gradients(model) if rank in (0, world - 1) else {}, pickle.dumps(step.plan)))
    return found


def check_equal(cases) -> list[StepPlan]:
    """Gives the plans that ran."""
    results = run_ranks(4, gradients_on_rank, cases, timeout_s=120)
    at, plans = 0, []
    for family, dtype, seed in cases:
        model = tiny.make_model(family, dtype)
        for batch in range(len(tiny.LENGTHS)):
            loss, true = tiny.truth(model, batch)
            for rank in (0, 3):
                found_loss, found, plan = results[rank][at]
                assert found_loss == pytest.approx(loss, rel=BOUNDS[dtype])
                assert tiny.error(found, true) < BOUNDS[dtype], (family, dtype, seed, batch, rank)
            plans.append(pickle.loads(plan))
            at += 1
    return plans


def test_gradients_equal_the_plain_loop_under_random_plans() -> None:
    cases = [(family, dtype, seed) for family in tiny.FAMILIES for dtype, seed in ((torch.float64, 7), (torch.float32, 3))]
    cases += [(family, torch.float32, None) for family in ("gpt2", "plain")]  # the planner's own
    plans = check_equal(cases)
    used = [one for plan in plans for one in plan.microbatches]
    assert {one.cp for one in used} >= {1, 2, 4}
    assert {one.cp_comm for one in used} >= {"ring", "all_gather", "ulysses", "2d"}
    assert {one.recompute.level for one in used} >= {"none", "full"}
    assert any(len({one.lane + k for one in plan.microbatches for k in range(one.cp)}) < 4 for plan in plans), "no rank was idle"


@pytest.mark.slow
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_gradients_equal_under_many_plans(family: str) -> None:
    check_equal([(family, torch.float64, seed) for seed in range(10, 18)])


# ------------------------------------------------------------------------------------------------------- sharded optimizers
def train_on_rank(rank: int, world: int, how: str) -> dict[str, np.ndarray]:
    """Weights after two passes over three batches."""
    model = tiny.make_model("llama", torch.float64)
    if how == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    plans = tiny.random_plans(model, world, 7)
    with Steps(model, tiny.loader_of(), tiny.options_of(model), plans) as steps:
        for step in (step for _ in range(2) for step in steps):
            optimizer.zero_grad()
            for microbatch in step:
                model(**microbatch).loss.backward()
            step.finish()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    whole = {name: each.full_tensor() if how == "fsdp" else each for name, each in model.named_parameters()}
    return {name: each.detach().numpy().copy() for name, each in whole.items()}


@pytest.mark.parametrize("how", ["zero", "fsdp"])
def test_sharded_optimizers_end_with_the_weights_of_one_process(how: str) -> None:
    found = run_ranks(4, train_on_rank, how, timeout_s=120)
    model = tiny.make_model("llama", torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in (*range(3), *range(3)):
        tiny.truth(model, batch)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    for weights in found:
        for name, each in model.named_parameters():
            assert np.abs(weights[name] - each.detach().numpy()).max() < 1e-8, name


# ------------------------------------------------------------------------------------------------------------ one process
def test_whole_layers_are_recomputed_where_memory_is_short() -> None:
    model = tiny.make_model("llama", torch.float32)
    shape = shape_of(model)
    assert (shape.layers, shape.hidden, shape.kv_heads, shape.head_dim, shape.gated, shape.tied) == (3, 16, 2, 4, True, False)
    with Steps(model, tiny.loader_of(), tiny.OPTIONS) as steps:
        need = max(step.plan.predicted.peak_bytes[0] - min(one.bytes for one in step.plan.microbatches) for step in steps)
    levels = set()
    for share in (0.5, 0.7, 0.9, 1.1):
        tight = replace(tiny.HARDWARE, memory_bytes=share * need / tiny.HARDWARE.usable_fraction + 50_000)
        try:
            with Steps(model, tiny.loader_of(), Options(hardware=tight, plan=PlanConfig(ahead=0))) as steps:
                for step in steps:
                    levels |= {one.recompute.level for one in step.plan.microbatches}
        except UserError:
            continue
    assert levels <= {"none", "full"}
    assert "full" in levels


def test_what_always_stays_is_the_models_own() -> None:
    model = tiny.make_model("gpt2", torch.float32)
    count = sum(each.numel() for each in model.parameters())
    for shared, lanes in ((False, 1), (True, 4)):
        config = config_of(shape_of(model), PlanConfig(), tiny.HARDWARE, 4, torch.float32, (0, 64), always_bytes(list(model.parameters()), lanes))
        hardware = tiny.HARDWARE
        budget = planner_for(config).memory.budget(0, 0)
        always = count * (4 + 4 + 8 / lanes)
        assert budget == pytest.approx(hardware.usable_fraction * hardware.memory_bytes - always, abs=100), shared


def test_steps_of_a_document_source() -> None:
    model = tiny.make_model("llama", torch.float32)
    source = layouts.Documents((5, 9, 3), tiny.VOCAB)
    options = Options(hardware=tiny.HARDWARE, plan=PlanConfig(ahead=0), steps=2, first_step=7)
    with Steps(model, source, options) as steps:
        for step in steps:
            model.zero_grad()
            for microbatch in step:
                model(**microbatch).loss.backward()
            assert np.isfinite(step.finish().item())
            assert step.targets == 14
    assert step.number == 8
    assert "say how many steps" in refused(model, source)


def test_recompute_happens_and_evaluation_stays_as_it_was() -> None:
    model = tiny.make_model("llama", torch.float32)
    tokens = torch.arange(20)[None]
    before = model(input_ids=tokens).logits
    calls: list[int] = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(0))
    model.model.layers[2].mlp.register_forward_pre_hook(lambda *_: calls.append(2))
    options = Options(hardware=tiny.HARDWARE, plan=PlanConfig(ahead=0, recompute="full", recompute_layers=2))
    with Steps(model, tiny.loader_of(), options) as steps:
        step = next(iter(steps))
        for microbatch in step:
            model(**microbatch).loss.backward()
        assert calls.count(0) == 2 * len(step.plan.microbatches)
        assert calls.count(2) == len(step.plan.microbatches)
        assert torch.equal(model(input_ids=tokens).logits, before)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(input_ids=tokens).logits, before)


def test_a_second_pass_goes_on_counting() -> None:
    model = tiny.make_model("llama", torch.float32)
    with Steps(model, tiny.loader_of(), tiny.OPTIONS) as steps:
        assert len(steps) == 3
        assert [step.number for _ in range(2) for step in steps] == [0, 1, 2, 3, 4, 5]


def test_plans_come_from_a_process_of_their_own() -> None:
    model = tiny.make_model("llama", torch.float32)
    plans = []
    for ahead in (0, 2):
        with Steps(model, tiny.loader_of(), Options(hardware=tiny.HARDWARE, plan=PlanConfig(ahead=ahead))) as steps:
            plans.append([step.plan for step in steps])
    assert plans[0] == plans[1]


# ----------------------------------------------------------------------------------------------------------------- errors
def train(model: nn.Module, loader: DataLoader, options: Options) -> None:
    with Steps(model, loader, options) as steps:
        for step in steps:
            model.zero_grad()
            for microbatch in step:
                run_model(model, microbatch).backward()
            step.finish()


def refused(model: nn.Module, loader=None, options: Options = tiny.OPTIONS) -> str:
    with pytest.raises(UserError) as raised:
        train(model, loader or tiny.loader_of(), options)
    message = str(raised.value)
    assert "\n" not in message
    return message


def config_model(name: str, **fields) -> nn.Module:
    import transformers

    sizes = dict(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    sizes |= dict(pad_token_id=None, bos_token_id=None, eos_token_id=None) | fields
    config = getattr(transformers, f"{name}Config")(**sizes)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("Mamba", dict(state_size=4), "outside attention"),
        ("Gemma2", dict(head_dim=4, sliding_window=64), "soft"),
        ("GptOss", dict(head_dim=4, num_local_experts=2, sliding_window=64, layer_types=["full_attention"] * 2), "attention sinks"),
        ("Mistral", dict(sliding_window=8), "sliding_window=8, but documents have up to 22"),
        ("Bloom", dict(n_head=4), "takes no position_ids"),
        ("GPT2", dict(n_embd=16, n_head=4, n_layer=2), "drops 0.1 of its inputs"),
        ("Bert", dict(is_decoder=False), "is not causal"),
        ("Llama", dict(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "rope_type=dynamic"),
        ("Llama", dict(attention_dropout=0.1), "attention_dropout=0.1"),
        ("Mixtral", dict(num_local_experts=2, output_router_logits=True), "output_router_logits"),
    ],
)
def test_models_that_cannot_be_sharded_are_refused(name: str, fields: dict, expected: str) -> None:
    model = config_model(name, **fields)
    if name == "Bert":
        for each in model.modules():
            if isinstance(each, nn.Dropout):
                each.p = 0.0
    assert expected in refused(model)


class Odd(tiny.PlainModel):
    """A plain model with one more module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.more = module


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.BatchNorm1d(4), "statistics over all tokens"),
        (nn.Conv1d(4, 4, 3), "mixes neighbouring tokens"),
        (nn.GRU(4, 4), "carries state"),
        (nn.Dropout(0.1), "drops 0.1"),
        (type("RwkvBlock", (nn.Module,), {})(), "carries state"),
    ],
)
def test_modules_that_mix_tokens_are_refused(module: nn.Module, expected: str) -> None:
    assert expected in refused(Odd(module), options=Options(shape=tiny.PLAIN_SHAPE, hardware=tiny.HARDWARE, plan=PlanConfig(ahead=0)))


def test_a_plain_model_needs_figures_positions_and_attention() -> None:
    assert "Options(shape=" in refused(tiny.PlainModel(), options=tiny.OPTIONS)
    shape = Options(shape=tiny.PLAIN_SHAPE, hardware=tiny.HARDWARE, plan=PlanConfig(ahead=0))
    assert "takes no position_ids and no attention" in refused(type("Bare", (nn.Module,), {"forward": lambda self, input_ids: None})(), options=shape)
    assert "is wrapped in DistributedDataParallel" in refused(type("DistributedDataParallel", (nn.Module,), {})(), options=shape)


def test_a_model_that_keeps_its_own_attention_is_found_in_its_first_microbatch() -> None:
    model = tiny.make_model("llama", torch.float32)
    layer = model.model.layers[1]
    layer.self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    assert "2 times for 3 layers" in refused(model)


def test_documents_beyond_the_position_table_are_refused() -> None:
    model = tiny.make_model("gpt2", torch.float32)
    assert "has 40 positions" in refused(model, tiny.loader_of([torch.arange(41) % 30] * 4))


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ({"text": "abc"}, "has no input_ids"),
        ({"input_ids": [1, 2], "labels": [1]}, "2 input_ids and 1 labels"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "in its middle"),
        ([], "has no tokens"),
        ([0.5], "one row of token ids"),
    ],
)
def test_items_that_are_no_documents_are_refused(item, expected: str) -> None:
    assert expected in refused(tiny.make_model("llama", torch.float32), tiny.loader_of([item] * 4))


def test_padding_of_items_is_left_out() -> None:
    model = tiny.make_model("llama", torch.float32)
    data = tiny.documents()
    padded = [
        {
            "input_ids": torch.cat([one["input_ids"], torch.zeros(3, dtype=torch.int64)]),
            "labels": torch.cat([one["labels"], torch.full((3,), -100)]),
            "attention_mask": torch.cat([torch.ones(len(one["input_ids"])).long(), torch.zeros(3).long()]),
        }
        for one in data
    ]
    losses = []
    for each in (data, padded):
        with Steps(model, tiny.loader_of(each), tiny.OPTIONS) as steps:
            step = next(iter(steps))
            for microbatch in step:
                model(**microbatch)
            losses.append(step.finish().item())
    assert losses[0] == losses[1]


def test_steps_that_were_not_run_or_not_cleared_are_errors() -> None:
    model = tiny.make_model("llama", torch.float32)
    with Steps(model, tiny.loader_of(), tiny.OPTIONS) as steps:
        passes = iter(steps)
        step = next(passes)
        with pytest.raises(UserError, match=r"microbatches of step 0 were not run"):
            step.finish()
        for microbatch in step:
            model(**microbatch).loss.backward()
        step.finish()
        with pytest.raises(UserError, match=r"step 0 is finished already"):
            step.finish()
        with pytest.raises(UserError, match=r"can't be run again"):
            next(iter(step))
        with pytest.raises(UserError, match=r"zero_grad"):
            next(iter(next(passes)))
        with pytest.raises(UserError, match=r"step 1 was not finished"):
            next(passes)
        with pytest.raises(UserError, match=r"position_ids"):
            model(input_ids=torch.zeros(1, 4, dtype=torch.int64), microbatch=microbatch)
        with pytest.raises(UserError, match=r"has Steps already"):
            Steps(model, tiny.loader_of(), tiny.OPTIONS)


def differing_on_rank(rank: int, world: int, how: str) -> None:
    model = tiny.make_model("llama", torch.float32)
    data = tiny.documents()
    if how == "order":
        data = DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(rank), collate_fn=list)
    elif how == "broken":
        data = tiny.loader_of([[]] * 12 if rank else data)
    else:
        data = DataLoader(data, 4, sampler=DistributedSampler(data), collate_fn=list)
    with Steps(model, data, tiny.OPTIONS) as steps:
        for step in steps:
            for microbatch in step:
                model(**microbatch).loss.backward()


@pytest.mark.parametrize(
    ("how", "expected"),
    [("order", "different documents for one step"), ("broken", "has no tokens|could not load"), ("divided", "DistributedSampler")],
)
def test_ranks_that_differ_end_with_one_line_and_no_hang(how: str, expected: str) -> None:
    with pytest.raises(RankFailed, match=expected):
        run_ranks(2, differing_on_rank, how, timeout_s=30)
