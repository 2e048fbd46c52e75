"""AdamW in slices over the lanes against one process, and the gathering of what was updated."""

from dataclasses import replace

import pytest
import torch
from gradient_helpers import CPU, PLAIN, RICH, Layout, build, optimizer_state, step, worst
from ranks import run_ranks

from megadcp.backends.torch_sharded import torch_backend
from megadcp.engine.placement import Placement
from megadcp.mesh.coords import Mesh
from megadcp.mesh.groups import GroupPool
from megadcp.nn.backend import PackedTokens
from megadcp.nn.gpt import GPT
from megadcp.nn.shard import is_partial, shard_of
from megadcp.parallel.assemble import weight_pieces, whole_tensors

LAYOUTS = [
    Layout(lanes=4), Layout(tp=2, lanes=2), Layout(pp=2, lanes=2),
    *(
        pytest.param(each, marks=pytest.mark.slow)
        for each in (
            Layout(lanes=2), Layout(lanes=4, bucket=10**6), Layout(tp=4), Layout(pp=4), Layout(tp=2, pp=2), Layout(tp=2, pp=2, lanes=2),
            Layout(pp=2, lanes=4), Layout(pp=2, lanes=2, chunks=2),
        )
    ),
]  # fmt: skip
CASES = [(PLAIN, torch.float64), (RICH, torch.float64), (RICH, torch.bfloat16)]


@pytest.fixture(scope="module", autouse=True)
def warm():
    """What torch imports at the first update is imported before any rank is forked."""
    step(build(PLAIN), 0)


def after_steps(rank, world, layout, cases, steps=3):
    with GroupPool(layout.mesh, rank, CPU) as pool:
        found = []
        for config, dtype in cases:
            run = build(config, pool, layout, dtype)
            for number in range(steps):
                step(run, number)
            run.optimizer.wait()
            weights = whole_tensors(weight_pieces(run.model), pool, config.tied)
            held = {name: parameter.detach() for name, parameter in run.model.named_parameters()}
            found.append((weights, optimizer_state(run), held, [verdict.norm for verdict in run.verdicts], run.optimizer.updates))
        return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_weights_and_state_after_three_steps_are_those_of_one_process(layout):
    results = run_ranks(layout.mesh.world, after_steps, layout, CASES)
    for (config, dtype), ranks in zip(CASES, zip(*results, strict=True), strict=True):
        one, bound = build(config, dtype=dtype), 1e-12 if dtype == torch.float64 else 1e-6
        norms = [step(one, number).norm for number in range(3)]
        weights, state = ({name: p.detach() for name, p in one.model.named_parameters()}, optimizer_state(one))
        found, kept, _, _, updates = ranks[0]
        assert worst(kept, state) < bound
        assert updates == 3
        assert ranks[0][3] == pytest.approx(norms, rel=bound)
        if dtype == torch.float64:
            assert worst(found, weights) < bound
        else:
            assert all(torch.equal(found[name], kept[f"master.{name}"].bfloat16()) for name in found)
            assert worst(found, weights) < 0.01  # next to a rounding border a bf16 weight may be its neighbour


@pytest.mark.parametrize("layout", [Layout(tp=2, lanes=2), Layout(pp=2, lanes=2)], ids=str)
def test_copies_stay_equal_bit_for_bit(layout):
    """The same parameter on other lanes, a replicated one on other tp ranks, a tied table at the other end."""
    for case in zip(*run_ranks(layout.mesh.world, after_steps, layout, [(RICH, torch.float64), (RICH, torch.bfloat16)], 6), strict=True):
        for rank, (_, _, held, norms, _) in enumerate(case):
            coords = layout.mesh.coords(rank)
            other_lane = layout.mesh.rank(coords.pp, 0, coords.tp)
            assert all(torch.equal(case[other_lane][2][name], each) for name, each in held.items())
            assert norms == case[0][3]
        if layout.tp == 2:
            shared = slice(-4, None)  # the one key and value head
            for name in ("norm.weight", "positions.weight", "layers.2.mlp.down.bias", "layers.0.attention.q_norm.weight"):
                assert torch.equal(case[0][2][name], case[1][2][name])
            name = "layers.1.attention.qkv.weight"
            assert torch.equal(case[0][2][name][shared], case[1][2][name][shared])
            assert not torch.equal(case[0][2][name][:4], case[1][2][name][:4])
        else:
            assert torch.equal(case[0][2]["embedding.weight"], case[2][2]["head.weight"])


def test_frozen_parameters_stay_and_have_no_state():
    frozen = ("embedding", "head", "layers.0", "layers.1")

    def work(rank, world):
        layout = Layout(pp=2, lanes=2)
        with GroupPool(layout.mesh, rank, CPU) as pool:
            run = build(RICH, pool, layout, torch.bfloat16, frozen)
            before = {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}
            for number in range(2):
                step(run, number)
            run.optimizer.wait()
            same = {name: torch.equal(before[name], parameter) for name, parameter in run.model.named_parameters()}
            return same, optimizer_state(run), run.verdicts

    results = run_ranks(4, work)
    one = build(RICH, dtype=torch.bfloat16, frozen=frozen)
    verdicts = [step(one, number) for number in range(2)]
    assert worst(results[0][1], optimizer_state(one)) < 1e-6
    for same, _, found in results:
        assert {name for name, each in same.items() if each} == {name for name in same if name.startswith(frozen)}
        assert [each.norm for each in found] == pytest.approx([each.norm for each in verdicts], rel=1e-6)


def test_a_stage_that_is_frozen_altogether():
    def work(rank, world):
        layout = Layout(pp=2, lanes=2)
        with GroupPool(layout.mesh, rank, CPU) as pool:
            run = build(PLAIN, pool, layout, frozen=("embedding", "layers.0", "layers.1"))
            return [step(run, number).finite for number in range(2)], run.optimizer.updates, set(optimizer_state(run))

    results = run_ranks(4, work)
    assert all(each[:2] == ([True, True], 2) for each in results)
    assert "exp_avg.layers.2.mlp.up.weight" in results[0][2]
    assert not any("layers.0" in name for name in results[0][2])


def test_each_lane_keeps_its_share_and_the_parameters_stay_themselves():
    config = replace(RICH, hidden=64, head_dim=16, ffn=128)

    def work(rank, world):
        layout = Layout(tp=2, lanes=2, bucket=10**6)
        with GroupPool(layout.mesh, rank, CPU) as pool:
            plain = GPT(config, torch_backend(torch.bfloat16, CPU, pool.tp), 3, 7)
            run = build(config, pool, layout, torch.bfloat16)
            step(run, 0)
            for (name, one), (_, other) in zip(plain.named_parameters(), run.model.named_parameters(), strict=True):
                assert (shard_of(one), is_partial(one), one.shape) == (shard_of(other), is_partial(other), other.shape), name
                assert other.data_ptr() % 64 == 0
            state = sum(value.numel() for each in run.optimizer.inner.state.values() for value in each.values() if value.numel() > 1)
            return state + sum(master.numel() for master in run.optimizer.masters), sum(each.numel() for each in run.model.parameters())

    for kept, elements in run_ranks(4, work):
        assert elements * 3 / 2 <= kept < elements * 3 / 2 * 1.02  # masters and two moments of one half, and a little padding


class Late:
    """A gather that arrives when it is waited for."""

    def __init__(self, flat, seen):
        self.flat, self.values, self.seen = flat, flat.clone(), seen
        flat.fill_(float("nan"))

    def wait(self):
        self.seen.append(1)
        self.flat.copy_(self.values)


def batch(vocab):
    tokens = torch.arange(8) % vocab
    return PackedTokens(
        tokens, tokens.roll(-1), torch.arange(8), torch.tensor([0, 8], dtype=torch.int32), 8, torch.tensor([0]), torch.tensor([8]), (0, 8), (8,)
    )


@pytest.mark.parametrize("config", [PLAIN, RICH], ids=["plain", "tied"])
def test_modules_wait_for_their_parameters_and_no_longer(config):
    def work(rank, world):
        with GroupPool(Mesh(2), rank, CPU) as pool:
            run = build(config, pool, Layout(lanes=2, bucket=1))
            expected = run.model(batch(config.vocab), Placement())
            sharded, seen = run.optimizer.sharded, []
            sharded._gathering = {number: [Late(flat, seen)] for number, flat in enumerate(sharded.flats)}
            total, counts = len(seen) + len(sharded.flats), []
            for layer in run.model.layers.values():
                layer.register_forward_pre_hook(lambda module, inputs: counts.append(len(seen)))
            loss = run.model(batch(config.vocab), Placement())
            assert torch.equal(loss, expected)
            assert not sharded._gathering
            assert counts == sorted(counts)
            assert 0 < counts[0] < counts[-1] < len(seen) == total
            sharded._gathering = {0: [Late(sharded.flats[0], seen)]}
            run.optimizer.wait()
            assert not sharded._gathering
            sharded.close()
            assert not any(module._forward_pre_hooks for module in run.model.modules() if module not in run.model.layers.values())

    run_ranks(2, work)


def test_the_gathers_are_under_way_when_the_update_returns():
    def work(rank, world):
        with GroupPool(Mesh(2), rank, CPU) as pool:
            run = build(PLAIN, pool, Layout(lanes=2))
            step(run, 0)
            under_way = list(run.optimizer.sharded._gathering)
            run.model.embedding(torch.tensor([1]))
            return under_way, list(run.optimizer.sharded._gathering), len(run.gradients.buckets.buckets)

    for under_way, left, buckets in run_ranks(2, work):
        assert under_way == list(reversed(range(buckets)))  # those of the embedding first
        assert 0 < len(left) < buckets
