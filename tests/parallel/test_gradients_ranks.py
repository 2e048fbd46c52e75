"""Gradients of any layout, summed, scaled and judged, against one process."""

import math
import random
from types import SimpleNamespace

import pytest
import torch
from gradient_helpers import CPU, PLAIN, RICH, Layout, backward, build, local_gradient, step, whole_gradient, worst
from ranks import RankFailed, run_ranks

from megadcp.mesh.coords import Mesh
from megadcp.mesh.groups import GroupPool
from megadcp.nn.shard import put, shard_of, whole_shape
from megadcp.parallel.assemble import whole_tensors
from megadcp.parallel.buckets import lay_out, may_overlap
from megadcp.parallel.gradients import sum_over_tp
from megadcp.parallel.replicas import counted
from megadcp.plan.step_plan import Microbatch

LAYOUTS = [
    Layout(lanes=2), Layout(lanes=4, bucket=10**6), Layout(tp=2, lanes=2), Layout(pp=2, lanes=2, bucket=10**6), Layout(tp=2, pp=2),
    *(
        pytest.param(each, marks=pytest.mark.slow)
        for each in (
            Layout(lanes=4), Layout(lanes=4, bucket=1), Layout(tp=2), Layout(tp=4), Layout(pp=2), Layout(pp=4), Layout(tp=2, pp=2, lanes=2),
            Layout(pp=2, lanes=2, chunks=2), Layout(tp=4, lanes=2), Layout(pp=2, lanes=4),
        )
    ),
]  # fmt: skip
CASES = [(PLAIN, torch.float64), (RICH, torch.float64), (RICH, torch.bfloat16)]


def gradients_of(rank, world, layout, cases):
    with GroupPool(layout.mesh, rank, CPU) as pool:
        results = []
        for config, dtype in cases:
            run = build(config, pool, layout, dtype)
            step(run, 7)  # what it leaves must not reach the next one
            verdict = step(run, 0)
            results.append((verdict, whole_tensors(run.gradients.pieces(), pool, config.tied)))
        return results


@pytest.fixture(scope="module", autouse=True)
def warm():
    """What torch imports at the first update is imported before any rank is forked."""
    step(build(PLAIN), 0)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients_and_verdict_are_those_of_one_process(layout):
    results = run_ranks(layout.mesh.world, gradients_of, layout, CASES)
    for (config, dtype), ranks in zip(CASES, zip(*results, strict=True), strict=True):
        one = build(config, dtype=dtype)
        expected, bound = step(one, 0), 1e-12 if dtype == torch.float64 else 1e-6
        assert expected.norm > 2.0  # so it is clipped
        for verdict, _ in ranks:
            assert verdict == ranks[0][0]
            assert verdict.norm == pytest.approx(expected.norm, rel=bound)
            assert (verdict.loss_sum, verdict.finite) == (expected.loss_sum, True)
        found = ranks[0][1]
        assert worst(found, dict(zip(one.gradients.names, one.gradients.sums(), strict=True))) < bound
        assert math.sqrt(sum(float(each.double().square().sum()) for each in found.values())) == pytest.approx(2.0, rel=1e-6)


def test_the_reference_is_plain_arithmetic():
    """The same numbers without any of the code under test."""
    run = build(RICH)
    verdict = step(run, 0)
    whole = {}
    for name, parameter in run.model.named_parameters():
        whole[name] = sum(whole_gradient(name, tuple(parameter.shape), 0, each) for each in range(6)) / 11
    norm = math.sqrt(sum(float(each.square().sum()) for each in whole.values()))
    assert verdict.norm == pytest.approx(norm, rel=1e-13)
    assert verdict.loss_sum == 1.5 * 15
    found = dict(zip(run.gradients.names, run.gradients.sums(), strict=True))
    assert worst(found, {name: each * (2.0 / norm) for name, each in whole.items()}) < 1e-13


def spoiled(rank, world, layout, name, where):
    with GroupPool(layout.mesh, rank, CPU) as pool:
        run = build(RICH, pool, layout)
        step(run, 0)
        found = []
        for number, value in enumerate((math.nan, math.inf, -math.inf), 1):
            run.optimizer.wait()
            before = {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}
            verdict = step(run, number, (name, value) if rank == where else None)
            found.append((verdict, all(torch.equal(before[name], parameter) for name, parameter in run.model.named_parameters())))
        good = step(run, 4)
        return found, run.optimizer.updates, good.finite


@pytest.mark.parametrize(
    ("layout", "name", "where"),
    [
        (Layout(lanes=2), "layers.0.mlp.up.weight", 1),
        (Layout(lanes=4), "norm.weight", 2),
        (Layout(tp=2), "layers.1.mlp_norm.bias", 1),
        (Layout(tp=2), "layers.1.mlp.up.bias", 1),
        (Layout(tp=2), "layers.1.attention.qkv.weight", 1),  # the last row is a shared one that rank 0 counts
        (Layout(pp=2), "head.weight", 1),
        (Layout(pp=2, lanes=2), "embedding.weight", 0),
    ],
    ids=str,
)
def test_one_bad_number_on_one_rank_skips_the_step_on_all(layout, name, where):
    for found, updates, good in run_ranks(layout.mesh.world, spoiled, layout, name, where):
        for verdict, same in found:
            assert not verdict.finite
            assert math.isfinite(verdict.loss_sum)
            assert same
        assert (updates, good) == (2, True)


def test_a_bad_loss_on_one_rank_is_bad_on_all():
    def work(rank, world):
        with GroupPool(Mesh(2, tp=2), rank, CPU) as pool:
            run, found = build(PLAIN, pool, Layout(tp=2, lanes=2)), []
            for where in range(4):
                run.gradients.zero()
                backward(run, 0, 0)
                found.append(run.gradients.finish([torch.tensor(math.nan if rank == where else 1.0)], 1, 0.0))
            return found

    for found in run_ranks(4, work):
        assert all(math.isnan(verdict.loss_sum) and not verdict.finite for verdict in found)


def test_a_replicated_weight_that_is_bad_on_one_rank_only():
    """Not counted there, but it would update that rank's copy."""

    def work(rank, world):
        with GroupPool(Mesh(1, tp=2), rank, CPU) as pool:
            run = build(RICH, pool, Layout(tp=2))
            run.gradients.zero()
            backward(run, 0, 0)
            parameter = run.model.norm.weight
            parameter.partial = False  # as without sequence parallelism
            parameter.grad[0] = math.nan if rank == 1 else 1.0
            run.gradients._over_tp = lambda pieces: None
            return run.gradients.finish([], 1, 0.0).finite

    assert run_ranks(2, work) == [False, False]


# ------------------------------------------------------------------------------------------------------------ overlapping
def test_sums_start_in_the_last_backward_in_the_buckets_order():
    def work(rank, world):
        with GroupPool(Mesh(2), rank, CPU) as pool:
            run = build(PLAIN, pool, Layout(lanes=2))
            buckets = run.gradients.buckets
            run.gradients.zero()
            backward(run, 0, 0)
            counts = [len(buckets._started)]
            seen = []
            first, last = run.model.layers["3"].mlp.down.weight, run.model.embedding.weight
            for parameter in (first, last):
                parameter.register_hook(lambda gradient: seen.append(len(buckets._started)))
            run.gradients.last_microbatch()
            total = sum((each * local_gradient(run, name, each, 0, 1)).sum() for name, each in run.model.named_parameters())
            total.backward()
            counts.append(len(buckets._started))
            run.gradients.finish([], 1, 0.0)
            return counts, seen, len(buckets.buckets), len(buckets._started)

    for counts, seen, total, left in run_ranks(2, work):
        assert total > 8
        assert counts == [0, total]
        assert min(seen) < max(seen)  # some were under way before the backward ended
        assert left == 0


def test_with_several_chunks_what_is_complete_starts_at_once():
    def work(rank, world):
        with GroupPool(Mesh(2), rank, CPU) as pool:
            run = build(PLAIN, pool, Layout(lanes=2, bucket=1))
            buckets = run.gradients.buckets
            run.gradients.zero()
            backward(run, 0, 0)
            run.gradients.last_microbatch([*run.model.layers["0"].parameters(), run.model.embedding.weight])
            early = len(buckets._started)
            inside = [
                number for number, bucket in enumerate(buckets.buckets) if any(run.gradients.names[i].startswith("layers.0.") for i in bucket.indices)
            ]
            run.gradients.finish([], 1, 0.0)
            return early, min(inside)

    for early, first in run_ranks(2, work):
        assert early == first > 0


def test_overlap_changes_no_bit():
    cases = [(PLAIN, dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)]
    on, off = (run_ranks(4, gradients_of, Layout(lanes=4, overlap=overlap), cases)[0] for overlap in (True, False))
    for (verdict, found), (expected, gradients) in zip(on, off, strict=True):
        assert verdict == expected
        assert all(torch.equal(found[name], each) for name, each in gradients.items())


def test_a_microbatch_after_the_last_one_is_refused():
    def work(rank, world):
        with GroupPool(Mesh(2), rank, CPU) as pool:
            run = build(PLAIN, pool, Layout(lanes=2))
            run.gradients.zero()
            run.gradients.last_microbatch()
            backward(run, 0, 0)
            backward(run, 0, 1)

    with pytest.raises(RankFailed, match="last_microbatch"):
        run_ranks(2, work)


def test_gradients_set_to_none_in_between_are_not_lost():
    def work(rank, world):
        with GroupPool(Mesh(2), rank, CPU) as pool:
            run = build(PLAIN, pool, Layout(lanes=2))
            run.gradients.zero()
            run.model.zero_grad(set_to_none=True)
            backward(run, 0, 0)
            backward(run, 0, 1)
            run.gradients.finish([], 1, 0.0)
            return whole_tensors(run.gradients.pieces(), pool)

    found = run_ranks(2, work)[0]
    name = "layers.0.mlp.up.weight"
    whole = sum(whole_gradient(name, tuple(found[name].shape), 0, each) for each in (0, 1))
    assert torch.equal(found[name], 2 * whole)


def test_slices_are_not_taken_for_sums():
    def work(rank, world):
        with GroupPool(Mesh(2), rank, CPU) as pool:
            build(PLAIN, pool, Layout(lanes=2)).gradients.sums()

    with pytest.raises(RankFailed, match="spread over the lanes"):
        run_ranks(2, work)


def test_a_table_that_is_frozen_at_one_end_only_is_refused():
    def work(rank, world):
        with GroupPool(Mesh(1, pp=2), rank, CPU) as pool:
            build(RICH, pool, Layout(pp=2), frozen=("embedding",))

    with pytest.raises(RankFailed, match="both have to be trained"):
        run_ranks(2, work)


# ------------------------------------------------------------------------------------------------------------------ parts
@pytest.mark.parametrize("lanes", [2, 3, 4])
@pytest.mark.parametrize("limit", [1, 200, 10**6])
def test_buckets_hold_every_parameter_once(lanes, limit):
    parameters = list(build(PLAIN).model.parameters())
    parameters[3] = torch.nn.Parameter(parameters[3].bfloat16())
    buckets = lay_out(parameters, lanes, limit, alone=[0])
    assert sorted(index for bucket in buckets for index in bucket.indices) == list(range(len(parameters)))
    assert [bucket.indices for bucket in buckets if 0 in bucket.indices] == [[0]]
    for bucket in buckets:
        assert bucket.size % (64 * lanes) == 0
        assert {(parameters[index].dtype, parameters[index].ndim >= 2) for index in bucket.indices} == {(bucket.dtype, bucket.decays)}
        ends = [offset + parameters[index].numel() for index, offset in zip(bucket.indices, bucket.offsets, strict=True)]
        assert all(end <= offset and offset % 64 == 0 for end, offset in zip(ends, [*bucket.offsets[1:], bucket.size], strict=True))
        assert bucket.indices == sorted(bucket.indices, reverse=True)
    completed = [min(bucket.indices) for bucket in buckets]
    assert completed == sorted(completed, reverse=True)


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_element_is_counted_once_over_tp(tp):
    def work(rank, world):
        with GroupPool(Mesh(1, tp=tp), rank, CPU) as pool:
            found = {}
            for name, parameter in build(RICH, pool, Layout(tp=tp)).model.named_parameters():
                flat = torch.zeros(parameter.numel())
                for low, high in counted(parameter, pool.tp):
                    flat[low:high] += 1
                whole = torch.zeros(whole_shape(parameter))
                put(whole, shard_of(parameter), flat.view(parameter.shape))
                assert float(flat.sum()) == float(whole.sum())  # no padding row
                found[name] = whole
            return found

    results = run_ranks(tp, work)
    for name in results[0]:
        assert torch.equal(sum(each[name] for each in results), torch.ones_like(results[0][name])), name


@pytest.mark.parametrize(("tp", "config"), [(2, RICH), (4, PLAIN)], ids=["one kv head on 2", "two kv heads on 4"])
def test_sum_over_tp_of_gradients_in_any_memory_order(tp, config):
    def work(rank, world):
        with GroupPool(Mesh(1, tp=tp), rank, CPU) as pool:
            run = build(config, pool, Layout(tp=tp))
            found = {}
            for name, parameter in run.model.named_parameters():
                gradient = local_gradient(run, name, parameter, 0, 0)
                found[name] = (parameter, gradient.t().contiguous().t() if gradient.ndim == 2 else gradient)
            sum_over_tp(found.values(), pool.tp)
            for name, (parameter, gradient) in found.items():
                whole = whole_gradient(name, whole_shape(parameter), 0, 0)
                again = torch.zeros_like(whole)
                put(again, shard_of(parameter), gradient)
                rows = [slice(*piece) for piece in shard_of(parameter).pieces] if shard_of(parameter) else [slice(None)]
                for row in rows:
                    index = (row,) if shard_of(parameter) is None or shard_of(parameter).dim == 0 else (slice(None), row)
                    assert torch.equal(again[index], whole[index]), name

    run_ranks(tp, work)


def random_microbatches(rng, lanes):
    made = []
    for slot in range(rng.randint(1, 5)):
        lane = 0
        while lane < lanes:
            size = rng.choice([1, 1, 2, 4, 8])
            while lane % size or lane + size > lanes:
                size //= 2
            if rng.random() < 0.6:
                made.append(Microbatch(slot, lane, size, (0,), (8,)))
            lane += size
    return made


def test_overlapping_keeps_one_order_of_operations():
    """Any two lanes see the operations they share in one order: those of microbatches, and the sums over lanes in the last backward."""
    rng, early, late = random.Random(1), 0, 0
    for _ in range(300):
        lanes = rng.choice([2, 3, 4, 8])
        plan = SimpleNamespace(microbatches=random_microbatches(rng, lanes))
        orders = []
        for lane in range(lanes):
            mine = sorted((one for one in plan.microbatches if one.lane <= lane < one.lane + one.cp), key=lambda one: one.slot)
            order = [(one.slot, one.lane, half) for one in mine for half in (0, 1)]
            allowed = may_overlap(plan, lane)
            order.insert(len(order) - 1 if allowed else len(order), "sum")
            orders.append(order)
            early, late = early + allowed, late + (not allowed and bool(mine))
        for one in orders:
            for two in orders:
                assert [each for each in one if each in two] == [each for each in two if each in one]
    assert early > 90
    assert late > 90
