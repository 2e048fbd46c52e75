"""Fp8 linears on tensor-parallel ranks: one scale for the rows of all of them, recompute, and how far results are from one rank's."""

from __future__ import annotations

import pytest
import torch
from nn_helpers import documents, pack
from ranks import run_ranks

from megadcp.backends.torch_fp8 import E4M3, CurrentScaling, product_of
from megadcp.backends.torch_sharded import torch_backend
from megadcp.config.schema import ModelConfig
from megadcp.engine.placement import Placement
from megadcp.mesh.coords import Mesh
from megadcp.mesh.groups import Group, GroupPool
from megadcp.nn.gpt import GPT
from megadcp.nn.shard import put, shard_of
from megadcp.parallel.product import gathered_linear, linear
from megadcp.plan.step_plan import Recompute

BF16 = torch.bfloat16
CONFIG = ModelConfig(layers=2, hidden=256, heads=4, kv_heads=2, head_dim=64, ffn=256, vocab=61, init_std=0.05, qkv_bias=True)
FP8 = ("fp8_current", "fp8_block")
LENGTHS, PADDED = [70, 41], [72, 48]  # 60 rows a rank: no multiple of 16


def values(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def _scales(rank, world):
    with GroupPool(Mesh(1, tp=world), rank, torch.device("cpu")) as pool:
        found = []
        for bad in (None, torch.nan, torch.inf):
            x = values(32, 16)
            x[20, 3] *= 9  # in the second rank's rows
            if bad is not None:
                x[5, 5] = bad  # in the first one's
            rows = x.chunk(world)[rank]
            found.append((CurrentScaling().quantise(rows, E4M3, pool.tp), CurrentScaling().quantise(x, E4M3)))
        return [[(q.view(torch.uint8), s) for q, s in pair] for pair in found]


def test_rows_of_all_ranks_share_a_scale():
    """As if one rank had them all, bit for bit; what is not finite on one rank spoils all."""
    results = run_ranks(2, _scales)
    for case in range(3):
        (_, scale), (whole, expected) = results[0][case]
        rows = torch.cat([one[case][0][0] for one in results])
        if case == 0:
            assert torch.equal(rows, whole)
            assert scale == expected == results[1][case][0][1]
        else:
            products = [rows.view(E4M3).float() * one[case][0][1] for one in results]
            assert all(product.isnan().all() for product in products)


def _gathered(rank, world, fp8):
    """A column linear of two ranks that each hold all of its rows: only the rows of x are spread."""
    with GroupPool(Mesh(1, tp=world), rank, torch.device("cpu")) as pool:
        weight = torch.nn.Parameter(values(128, 256, seed=1))
        x = values(2 * 60, 256).chunk(world)[rank].clone().requires_grad_()
        out = gathered_linear(x, weight, None, product_of(fp8), pool.tp, True)
        out.backward(values(2 * 60, 128, seed=2))
        return out.detach(), x.grad, weight.grad


@pytest.mark.parametrize("fp8", FP8)
def test_spread_rows_give_what_one_rank_gives(fp8):
    """Every rank's part of the input's gradient is the whole one here: their sum is twice it."""
    weight, x = torch.nn.Parameter(values(128, 256, seed=1)), values(2 * 60, 256).requires_grad_()
    out = linear(x, weight, None, product_of(fp8))
    out.backward(values(2 * 60, 128, seed=2))
    results = run_ranks(2, _gathered, fp8)
    for own, _, dw in results:
        assert torch.equal(own, out.detach())
        # Blocks of tokens end where a rank's rows do: other blocks than one rank's.
        tolerance = 0.05 if fp8 == "fp8_block" else 0.0
        assert (dw.float() - weight.grad.float()).norm() <= tolerance * weight.grad.float().norm()
    assert torch.equal(torch.cat([one[1] for one in results]), 2 * x.grad)


def _model(tp, fp8, sequence_parallel=True):
    return GPT(CONFIG, torch_backend(BF16, "cpu", tp, sequence_parallel, fp8), 3, 64)


def _gradients(model, level="none"):
    model.zero_grad()
    loss = model(pack(documents(LENGTHS, CONFIG.vocab), PADDED), Placement(0, Recompute(level, 0 if level == "none" else 2)))
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def _of_ranks(rank, world, fp8, sequence_parallel):
    with GroupPool(Mesh(1, tp=world), rank, torch.device("cpu")) as pool:
        model = _model(pool.tp, fp8, sequence_parallel)
        loss, found = _gradients(model)
        same = True
        for level in ("selective", "mlp", "full"):
            other, again = _gradients(model, level)
            same = same and other == loss and all(torch.equal(again[name], grad) for name, grad in found.items())
        return loss, same, {name: (shard_of(p), found[name]) for name, p in model.named_parameters() if p.ndim == 2 and name.startswith("layers")}


def _whole(results, like):
    whole = {name: torch.zeros_like(grad, dtype=torch.float32) for name, grad in like.items() if name in results[0][2]}
    for _, _, shards in results:
        for name, (shard, grad) in shards.items():
            piece = torch.zeros_like(whole[name])
            put(piece, shard, grad.float())
            whole[name] += piece
    return whole


def _distance(found, expected):
    difference = sum(float((found[name] - expected[name].float()).square().sum()) for name in found)
    return (difference / sum(float(expected[name].float().square().sum()) for name in found)) ** 0.5


@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_two_ranks_differ_from_one_by_fp8_rounding(fp8, sequence_parallel):
    """And on two ranks no recompute level changes a bit."""
    loss, one = _gradients(_model(None, fp8))
    wide_loss, wide = _gradients(_model(None, ""))
    results = run_ranks(2, _of_ranks, fp8, sequence_parallel)
    assert results[0][0] == results[1][0]
    assert all(same for _, same, _ in results)
    whole = _whole(results, one)
    across, rounding = _distance(whole, one), _distance({name: one[name].float() for name in whole}, wide)
    print(f"{fp8}: two ranks differ from one by {across:.4f}, fp8 from bf16 by {rounding:.4f}")
    assert 0 < across <= rounding
    assert abs(results[0][0] - loss) <= 4 * abs(loss - wide_loss) + 0.01


def test_nothing_is_shared_by_one_rank():
    assert type(torch_backend(BF16, "cpu", Group.single(), True, "fp8_current")).__name__ == "TorchBackend"
