"""State saved in one layout goes on in any other as if nothing had happened."""

import pytest
import torch
from gradient_helpers import CPU, PLAIN, RICH, Layout, build, step, worst
from ranks import run_ranks

from megadcp.mesh.groups import GroupPool
from megadcp.nn.shard import shard_of, take
from megadcp.parallel.assemble import fill, weight_pieces, whole_shapes, whole_tensors

SAVED = [Layout(lanes=4), Layout(tp=2, pp=2)]
LOADED = [
    Layout(), Layout(lanes=2, bucket=1000), Layout(tp=2, lanes=2), Layout(pp=2),
    pytest.param(Layout(pp=2, lanes=2, chunks=2), marks=pytest.mark.slow), pytest.param(Layout(tp=4), marks=pytest.mark.slow),
    pytest.param(Layout(pp=4), marks=pytest.mark.slow), pytest.param(Layout(tp=2, pp=2, lanes=2), marks=pytest.mark.slow),
]  # fmt: skip
CASES = [(PLAIN, torch.float64), (RICH, torch.bfloat16)]


def state_of(run, pool):
    run.optimizer.wait()
    weights = whole_tensors(weight_pieces(run.model), pool, run.config.tied)
    return {name: tensor.clone() for name, tensor in (weights | run.optimizer.tensors()).items()}


def save(rank, world, layout, steps):
    with GroupPool(layout.mesh, rank, CPU) as pool:
        found = []
        for config, dtype in CASES:
            run = build(config, pool, layout, dtype)
            for number in range(steps):
                step(run, number)
            found.append(state_of(run, pool))
        return found


def go_on(rank, world, layout, states, done):
    with GroupPool(layout.mesh, rank, CPU) as pool:
        found = []
        for (config, dtype), state in zip(CASES, states, strict=True):
            run = build(config, pool if world > 1 else None, layout, dtype)
            with torch.no_grad():  # nothing of the start may be left
                for each in (*run.model.parameters(), *run.optimizer.masters):
                    each.fill_(float("nan"))
            fill(weight_pieces(run.model), state, config.tied)
            run.optimizer.load(state, done)
            again = state_of(run, run.pool)
            for parameter in run.model.parameters():
                shard = shard_of(parameter)
                if shard is not None:  # padding rows are zero
                    padding = parameter[sum(stop - start for start, stop in shard.pieces) :] if shard.dim == 0 else parameter[:0]
                    assert not padding.any()
            for number in range(done, done + 2):
                step(run, number)
            found.append((again, state_of(run, run.pool), run.optimizer.updates))
        return found


@pytest.fixture(scope="module")
def uninterrupted():
    found = []
    for config, dtype in CASES:
        run = build(config, dtype=dtype)
        for number in range(4):
            step(run, number)
        found.append(state_of(run, None))
    return found


@pytest.fixture(scope="module")
def saved(uninterrupted):
    return {str(layout): run_ranks(layout.mesh.world, save, layout, 2)[0] for layout in SAVED}


@pytest.mark.parametrize("layout", LOADED, ids=str)
@pytest.mark.parametrize("source", SAVED, ids=str)
def test_saved_in_one_layout_and_loaded_in_another(source, layout, saved, uninterrupted):
    states = saved[str(source)]
    results = run_ranks(layout.mesh.world, go_on, layout, states, 2)[0]
    for (_, dtype), state, expected, (again, after, updates) in zip(CASES, states, uninterrupted, results, strict=True):
        assert updates == 4
        assert again.keys() == state.keys()
        assert all(torch.equal(again[name], tensor) for name, tensor in state.items())
        kept = {name: tensor for name, tensor in after.items() if tensor.dtype != torch.bfloat16}
        assert worst(kept, {name: expected[name] for name in kept}) < (1e-12 if dtype == torch.float64 else 1e-6)
        assert worst(after, expected) < 0.01


def test_names_and_shapes_are_those_of_one_process():
    def work(rank, world):
        layout = Layout(tp=2, pp=2)
        with GroupPool(layout.mesh, rank, CPU) as pool:
            run = build(RICH, pool, layout, torch.bfloat16)
            return run.optimizer.shapes() | whole_shapes(weight_pieces(run.model), pool, True), run.optimizer.tensors()

    run = build(RICH, dtype=torch.bfloat16)
    expected = run.optimizer.tensors() | {name: parameter.detach() for name, parameter in run.model.named_parameters()}
    results = run_ranks(4, work)
    for shapes, _ in results:
        assert {name: (each.shape, each.dtype) for name, each in shapes.items()} == {
            name: (each.shape, each.dtype) for name, each in expected.items()
        }
        assert all(each.is_meta for each in shapes.values())
    assert run.optimizer.shapes().keys() == run.optimizer.tensors().keys()
    assert all(torch.equal(each, expected[name]) for name, each in results[0][1].items())
    assert [each[1] for each in results[1:]] == [{}] * 3


def test_state_before_the_first_update_goes_into_any_layout():
    state = state_of(build(RICH, dtype=torch.bfloat16), None)

    def work(rank, world):
        layout = Layout(lanes=2)
        with GroupPool(layout.mesh, rank, CPU) as pool:
            run = build(RICH, pool, layout, torch.bfloat16)
            run.optimizer.load(state, 0)
            step(run, 0)
            return state_of(run, pool), run.optimizer.updates

    one = build(RICH, dtype=torch.bfloat16)
    step(one, 0)
    found, updates = run_ranks(2, work)[0]
    assert updates == 1
    masters = {name: tensor for name, tensor in state_of(one, None).items() if tensor.dtype == torch.float32}
    assert worst({name: found[name] for name in masters}, masters) < 1e-6


def test_one_rank_gets_its_live_tensors():
    run = build(PLAIN)
    found = whole_tensors(weight_pieces(run.model), None)
    assert all(found[name].data_ptr() == parameter.data_ptr() for name, parameter in run.model.named_parameters())
    assert list(found) == [name for name, _ in run.model.named_parameters()]


def test_a_shard_taken_from_whole_tensors():
    """Elements in the middle of a shard, straight from the definition."""

    def work(rank, world):
        with GroupPool(Layout(tp=2).mesh, rank, CPU) as pool:
            run = build(RICH, pool, Layout(tp=2))
            whole = {
                name: torch.arange(tensor.numel(), dtype=torch.float64).view(tensor.shape) for name, tensor in build(RICH).model.named_parameters()
            }
            fill(weight_pieces(run.model), whole)
            assert all(torch.equal(p, take(whole[name], shard_of(p))) for name, p in run.model.named_parameters())
            back = whole_tensors(weight_pieces(run.model), pool)
            assert rank or all(torch.equal(back[name], each) for name, each in whole.items())

    run_ranks(2, work)
