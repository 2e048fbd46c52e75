"""Boxes say where a rank's elements lie in whole parameters; state saved in one layout goes on in any other as if nothing had happened."""

import itertools
import math

import pytest
import torch
from gradient_helpers import CPU, PLAIN, RICH, Layout, build, step, worst
from ranks import run_ranks

from megadcp.mesh.groups import Group, GroupPool
from megadcp.nn.shard import shard_of, take
from megadcp.parallel.assemble import whole_tensors
from megadcp.parallel.boxes import boxes_of, boxes_once, stretch, weight_pieces
from megadcp.train.state import boxes_to_load, boxes_to_save

SAVED = [Layout(lanes=4), Layout(tp=2, pp=2)]
LOADED = [
    Layout(), Layout(lanes=2, bucket=1000), Layout(tp=2, lanes=2), Layout(pp=2),
    pytest.param(Layout(pp=2, lanes=2, chunks=2), marks=pytest.mark.slow), pytest.param(Layout(tp=4), marks=pytest.mark.slow),
    pytest.param(Layout(pp=4), marks=pytest.mark.slow), pytest.param(Layout(tp=2, pp=2, lanes=2), marks=pytest.mark.slow),
]  # fmt: skip
CASES = [(PLAIN, torch.float64), (RICH, torch.bfloat16)]


# -------------------------------------------------------------------------------------------------------------- geometry
@pytest.mark.parametrize("shape", [(7,), (3, 4), (1, 5), (4, 1), (2, 3, 4), (2, 2, 2, 2), ()])
def test_a_stretch_is_made_up_of_its_boxes_in_order(shape):
    whole = torch.arange(math.prod(shape)).view(shape)
    for start, stop in itertools.combinations(range(math.prod(shape) + 1), 2):
        parts = [whole[tuple(slice(low, low + size) for low, size in zip(*box, strict=True))] for box in stretch(shape, start, stop)]
        assert torch.equal(torch.cat([part.reshape(-1) for part in parts]), torch.arange(start, stop))
        assert all(part.is_contiguous() for part in parts)
        assert len(parts) <= max(1, 2 * len(shape) - 1)
    assert stretch(shape, 0, 0) == []


def assembled(boxes):
    """Whole tensors out of everybody's boxes, by plain copies; every element is there once."""
    whole, seen = {}, {}
    for box in boxes:
        tensor = whole.setdefault(box.name, torch.full(box.whole, float("nan"), dtype=box.values.dtype))
        count = seen.setdefault(box.name, torch.zeros(box.whole))
        assert (tuple(tensor.shape), tensor.dtype) == (tuple(box.whole), box.values.dtype)
        place = tuple(slice(low, low + size) for low, size in zip(box.offsets, box.sizes, strict=True))
        tensor[place] = box.values
        count[place] += 1
    assert all((count == 1).all() for count in seen.values()), {name: count for name, count in seen.items() if (count != 1).any()}
    return whole


def fill(boxes, state):
    for box in boxes:
        box.values.copy_(state[box.name][tuple(slice(low, low + size) for low, size in zip(box.offsets, box.sizes, strict=True))])


def own(run, pool):
    """What one rank saves, as copies."""
    run.optimizer.wait()
    boxes = boxes_to_save(run.model, run.optimizer, pool, run.config.tied)
    return [type(box)(box.name, box.whole, box.offsets, box.values.clone()) for box in boxes]


# ----------------------------------------------------------------------------------------------------------- other layouts
def save(rank, world, layout, steps):
    with GroupPool(layout.mesh, rank, CPU) as pool:
        found = []
        for config, dtype in CASES:
            run = build(config, pool, layout, dtype)
            for number in range(steps):
                step(run, number)
            found.append(own(run, pool))
        return found


def go_on(rank, world, layout, states, done):
    with GroupPool(layout.mesh, rank, CPU) as pool:
        found = []
        for (config, dtype), state in zip(CASES, states, strict=True):
            run = build(config, pool if world > 1 else None, layout, dtype)
            run.optimizer.make_room(done)
            wanted = boxes_to_load(run.model, run.optimizer, config.tied)
            for box in wanted:  # nothing of the start may be left
                box.values.fill_(float("nan"))
            fill(wanted, state)
            again = own(run, run.pool)
            for parameter in run.model.parameters():
                shard = shard_of(parameter)
                if shard is not None:  # padding rows are zero
                    padding = parameter[sum(stop - start for start, stop in shard.pieces) :] if shard.dim == 0 else parameter[:0]
                    assert not padding.any()
            for number in range(done, done + 2):
                step(run, number)
            found.append((again, own(run, run.pool), run.optimizer.updates))
        return found


@pytest.fixture(scope="module")
def uninterrupted():
    found = []
    for config, dtype in CASES:
        run = build(config, dtype=dtype)
        for number in range(4):
            step(run, number)
        found.append(assembled(own(run, None)))
    return found


@pytest.fixture(scope="module")
def saved():
    found = {}
    for layout in SAVED:
        ranks = run_ranks(layout.mesh.world, save, layout, 2)
        found[str(layout)] = [assembled(itertools.chain(*boxes)) for boxes in zip(*ranks, strict=True)]
    return found


@pytest.mark.parametrize("layout", LOADED, ids=str)
@pytest.mark.parametrize("source", SAVED, ids=str)
def test_saved_in_one_layout_and_loaded_in_another(source, layout, saved, uninterrupted):
    states = saved[str(source)]
    ranks = run_ranks(layout.mesh.world, go_on, layout, states, 2)
    for (_, dtype), state, expected, each in zip(CASES, states, uninterrupted, zip(*ranks, strict=True), strict=True):
        again, after = (assembled(itertools.chain(*(one[place] for one in each))) for place in (0, 1))
        assert {one[2] for one in each} == {4}
        assert again.keys() == state.keys()
        assert all(torch.equal(again[name], tensor) for name, tensor in state.items())
        kept = {name: tensor for name, tensor in after.items() if tensor.dtype != torch.bfloat16}
        assert worst(kept, {name: expected[name] for name in kept}) < (1e-12 if dtype == torch.float64 else 1e-6)
        assert worst(after, expected) < 0.01


def test_names_and_shapes_are_those_of_one_process():
    def work(rank, world):
        layout = Layout(tp=2, pp=2)
        with GroupPool(layout.mesh, rank, CPU) as pool:
            return own(build(RICH, pool, layout, torch.bfloat16), pool)

    one = build(RICH, dtype=torch.bfloat16)
    expected = assembled(own(one, None))
    found = assembled(itertools.chain(*run_ranks(4, work)))
    assert found.keys() == expected.keys()
    assert {f"model.{name}" for name, _ in one.model.named_parameters()} == {name for name in expected if name.startswith("model.")}
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_frozen_parameters_are_saved_once_and_have_no_moments():
    def work(rank, world):
        layout = Layout(lanes=2)
        with GroupPool(layout.mesh, rank, CPU) as pool:
            return own(build(PLAIN, pool, layout, frozen=("embedding", "layers.0.")), pool)

    found = assembled(itertools.chain(*run_ranks(2, work)))
    assert found.keys() == assembled(own(build(PLAIN, frozen=("embedding", "layers.0.")), None)).keys()
    assert "model.embedding.weight" in found
    assert "exp_avg.embedding.weight" not in found


def test_each_lane_writes_its_slice_only():
    def work(rank, world):
        with GroupPool(Layout(lanes=4).mesh, rank, CPU) as pool:
            return sum(box.nbytes for box in own(build(PLAIN, pool, Layout(lanes=4)), pool))

    sizes = run_ranks(4, work)
    assert max(sizes) < 1.35 * sum(sizes) / 4  # padding of this tiny model's buckets is not spread evenly


def test_state_before_the_first_update_goes_into_any_layout():
    state = assembled(own(build(RICH, dtype=torch.bfloat16), None))

    def work(rank, world):
        layout = Layout(lanes=2)
        with GroupPool(layout.mesh, rank, CPU) as pool:
            run = build(RICH, pool, layout, torch.bfloat16)
            run.optimizer.make_room(0)
            fill(boxes_to_load(run.model, run.optimizer, True), state)
            step(run, 0)
            return own(run, pool), run.optimizer.updates

    one = build(RICH, dtype=torch.bfloat16)
    step(one, 0)
    results = run_ranks(2, work)
    assert [updates for _, updates in results] == [1, 1]
    found, expected = assembled(itertools.chain(*(boxes for boxes, _ in results))), assembled(own(one, None))
    masters = {name: tensor for name, tensor in expected.items() if tensor.dtype == torch.float32}
    assert worst({name: found[name] for name in masters}, masters) < 1e-6


def test_one_rank_has_views_of_its_live_tensors():
    run = build(PLAIN)
    boxes = boxes_once(weight_pieces(run.model), False, Group.single())
    assert [box.name for box in boxes] == [name for name, _ in run.model.named_parameters()]
    assert all(box.values.data_ptr() == parameter.data_ptr() for box, (_, parameter) in zip(boxes, run.model.named_parameters(), strict=True))


def test_a_shard_taken_from_whole_tensors():
    """Elements in the middle of a shard, straight from the definition."""

    def work(rank, world):
        with GroupPool(Layout(tp=2).mesh, rank, CPU) as pool:
            run = build(RICH, pool, Layout(tp=2))
            whole = {
                name: torch.arange(tensor.numel(), dtype=torch.float64).view(tensor.shape) for name, tensor in build(RICH).model.named_parameters()
            }
            fill(boxes_of(weight_pieces(run.model), True), whole)
            assert all(torch.equal(p, take(whole[name], shard_of(p))) for name, p in run.model.named_parameters())
            back = whole_tensors(weight_pieces(run.model), pool)
            assert rank or all(torch.equal(back[name], each) for name, each in whole.items())

    run_ranks(2, work)
