import dataclasses
import math

import numpy as np
import pytest
import torch
from engine_helpers import CPU, LENGTHS, MODEL, RandomDocuments, engine, gradients, packs_of, plan_of, reference

from megadcp.data.step_documents import IGNORE
from megadcp.engine.lane import lane_shares
from megadcp.engine.measure import Stopwatch
from megadcp.engine.step import run_step, to_device
from megadcp.plan.step_plan import Recompute
from megadcp.plan.verify import PlanError

FULL, MLP, SELECTIVE = Recompute("full", 3), Recompute("mlp", 2), Recompute("selective", 3)
PLANS = {
    "one microbatch": ([[0, 1, 2, 3, 4, 5]], []),
    "one microbatch, another order": ([[4, 1, 5, 0, 3, 2]], []),
    "each document alone": ([[0], [1], [2], [3], [4], [5]], []),
    "three microbatches": ([[2], [4, 0], [5, 3, 1]], []),
    "every level in turn": ([[2], [4, 0], [5, 3], [1]], [FULL, Recompute(), MLP, SELECTIVE]),
    "all recomputed": ([[2, 0], [4, 5], [3, 1]], [FULL]),
}


def worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name].double() - expected[name]).abs().max() / expected[name].abs().max()) for name in expected)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("groups", PLANS)
def test_gradients_do_not_depend_on_the_plan(groups, dropout):
    model = dataclasses.replace(MODEL, residual_dropout=dropout, embedding_dropout=dropout)
    documents, plan = RandomDocuments(masked=[3]), plan_of(*PLANS[groups], step=5)
    loss, targets, expected = reference(documents, model, step=5)
    one = engine(torch.float64, model)
    result = run_step(one, plan, packs_of(plan, documents), lr=0.1)
    assert result.targets == targets == sum(LENGTHS) - len(LENGTHS) - LENGTHS[3] + 1
    assert result.loss_sum == pytest.approx(loss, rel=1e-12)
    assert result.loss == pytest.approx(loss / targets, rel=1e-12)
    assert worst(gradients(one), expected) < 1e-11
    assert one.optimizer.rates == [0.1]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.08)])
def test_gradients_of_narrower_formats(dtype, bound):
    documents, plan = RandomDocuments(), plan_of(*PLANS["every level in turn"])
    _, _, expected = reference(documents)
    one = engine(dtype)
    result = run_step(one, plan, packs_of(plan, documents), lr=0.1)
    found = gradients(one)
    assert worst(found, expected) < bound
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    naive = math.sqrt(sum(float((gradient.double() ** 2).sum()) for gradient in expected.values()))
    assert result.grad_norm == pytest.approx(naive, rel=bound)


def test_the_norm_and_the_clipping_follow_neither_packing_nor_order():
    documents = RandomDocuments()
    norms, clipped = [], []
    for groups, levels in PLANS.values():
        one, plan = engine(clip_norm=0.5), plan_of(groups, levels)
        result = run_step(one, plan, packs_of(plan, documents), lr=0.1)
        norms.append(result.grad_norm)
        clipped.append(math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients(one).values())))
    assert norms == pytest.approx([norms[0]] * len(norms), rel=1e-12)
    assert norms[0] > 0.5
    assert clipped == pytest.approx([0.5] * len(clipped), rel=1e-12)


def test_two_steps_do_not_add_up():
    documents, one = RandomDocuments(), engine()
    for groups in ("three microbatches", "one microbatch"):
        plan = plan_of(*PLANS[groups])
        run_step(one, plan, packs_of(plan, documents), lr=0.1)
    _, _, expected = reference(documents)
    assert worst(gradients(one), expected) < 1e-11


def test_the_level_is_the_one_of_the_forward():
    """Recompute on in one microbatch and off in its neighbours: each backward follows its own forward, as often as the levels say."""
    documents, one = RandomDocuments(), engine()
    calls = []
    one.model.layers["0"].attention.out.register_forward_hook(lambda module, inputs, output: calls.append(len(inputs[0])))
    plan = plan_of([[2], [4, 0], [5, 3, 1]], [FULL, Recompute(), FULL])
    run_step(one, plan, packs_of(plan, documents), lr=0.1)
    assert calls == [30, 30, 29, 16, 16]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_gradient_skips_the_step(value):
    documents, plan, one = RandomDocuments(), plan_of(*PLANS["three microbatches"]), engine(torch.float32)
    spoiled = one.model.layers["1"].mlp.down.weight
    backward = iter([False, True, False])
    spoiled.register_hook(lambda gradient: torch.full_like(gradient, value) if next(backward) else gradient)
    before = {name: parameter.detach().clone() for name, parameter in one.model.named_parameters()}
    result = run_step(one, plan, packs_of(plan, documents), lr=0.1)
    assert not result.updated
    assert result.problem == "the gradient is not finite"
    assert math.isfinite(result.loss)
    assert one.optimizer.rates == []
    assert all(torch.equal(before[name], parameter) for name, parameter in one.model.named_parameters())
    one.model.zero_grad()
    spoiled._backward_hooks.clear()
    assert run_step(one, plan, packs_of(plan, documents), lr=0.1).updated


def test_a_bad_loss_of_one_microbatch_skips_the_step():
    documents, plan, one = RandomDocuments(), plan_of(*PLANS["three microbatches"]), engine(torch.float32)
    losses = iter([1.0, float("nan"), 1.0])
    one.model.register_forward_hook(lambda module, inputs, output: output.detach() * next(losses) + 0 * output)
    result = run_step(one, plan, packs_of(plan, documents), lr=0.1)
    assert (result.updated, result.problem) == (False, "the loss is not finite")
    assert one.optimizer.rates == []


def test_a_step_without_targets_is_skipped():
    documents = RandomDocuments([1, 1, 1])
    plan, one = plan_of([[0, 2], [1]], lengths=[1, 1, 1]), engine()
    result = run_step(one, plan, packs_of(plan, documents), lr=0.1)
    assert (result.updated, result.problem, result.targets) == (False, "no document has a target", 0)
    assert math.isnan(result.loss)


def test_an_illegal_plan_is_refused_before_anything_runs():
    documents, plan, one = RandomDocuments(), plan_of(*PLANS["three microbatches"]), engine()
    broken = dataclasses.replace(plan, microbatches=plan.microbatches[:2])
    with pytest.raises(PlanError, match="every document once"):
        run_step(one, broken, packs_of(plan, documents)[:2], lr=0.1)
    assert all(parameter.grad is None for parameter in one.model.parameters())


def test_packs_of_another_plan_are_refused():
    documents, plan = RandomDocuments(), plan_of(*PLANS["three microbatches"])
    with pytest.raises(ValueError, match=r"packs of \[16, 29, 30\]"):
        lane_shares(plan, packs_of(plan, documents)[::-1])


def test_slots_rule_the_order_not_the_position_in_the_plan():
    plan = plan_of(*PLANS["three microbatches"])
    turned = dataclasses.replace(plan, microbatches=plan.microbatches[::-1])
    documents, one = RandomDocuments(), engine()
    result = run_step(one, turned, packs_of(plan, documents), lr=0.1)
    assert [measured.slot for measured in result.microbatches] == [0, 1, 2]


def test_measures_stand_beside_predictions():
    documents, plan, one = RandomDocuments(), plan_of(*PLANS["three microbatches"]), engine()
    result = run_step(one, plan, packs_of(plan, documents), lr=0.1)
    assert [(m.predicted_seconds, m.predicted_bytes) for m in result.microbatches] == [(m.seconds, m.bytes) for m in plan.microbatches]
    assert all(m.seconds > 0 and m.bytes > 50e6 for m in result.microbatches)
    assert 0 < result.measured_seconds < result.seconds
    assert result.memory_bytes >= max(m.bytes for m in result.microbatches)


def test_padding_changes_nothing():
    documents, plan = RandomDocuments(), plan_of(*PLANS["three microbatches"])
    padded = dataclasses.replace(plan.microbatches[1], padded=(22, 7 + 9))
    from megadcp.data.batch import build_pack

    packs = packs_of(plan, documents)
    packs[1] = build_pack(documents, documents.step(), padded)
    assert (packs[1].labels[-10:] == IGNORE).all()
    one, loss = engine(), reference(documents)
    from megadcp.engine.placement import Placement

    one.gradients.zero()
    losses = []
    for pack in packs:
        losses.append(one.model(to_device(pack, CPU), Placement()))
        losses[-1].backward()
    verdict = one.gradients.finish([each.detach() for each in losses], loss[1], 0.0)
    assert verdict.loss_sum == pytest.approx(loss[0], rel=1e-12)
    assert worst(gradients(one), loss[2]) < 1e-11


def test_no_copy_on_the_cpu():
    plan = plan_of(*PLANS["one microbatch"])
    pack = packs_of(plan, RandomDocuments())[0]
    batch = to_device(pack, CPU)
    for name in ("tokens", "labels", "positions", "cu_seqlens", "document_ids", "real_lengths"):
        assert getattr(batch, name).data_ptr() == getattr(pack, name).ctypes.data
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.cu_seqlens_list == tuple(np.cumsum([0, *LENGTHS]).tolist())


def test_actions_say_what_ran_when():
    watch = Stopwatch(torch.device("cpu"))
    with watch.action(3, True, 1, "F3.1 cp2"):
        pass
    with watch.action(3, False):
        pass
    first, second = watch.actions()
    assert (first.slot, first.kind, first.chunk, second.kind, second.chunk) == (3, "F", 1, "B", 0)
    assert 0 <= first.begin <= first.end <= second.begin <= second.end


def test_profilers_see_the_actions_of_the_plan():
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as found, Stopwatch(torch.device("cpu")).action(3, True, 1, "F3.1 cp2"):
        torch.zeros(1)
    assert "F3.1 cp2" in {one.name for one in found.events()}
