"""Blocks of attention against formulas, and how they add up."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from context_helpers import dense, distance, documents, heads
from torch import Tensor

from megadcp.parallel import block_attention
from megadcp.parallel.block_attention import CPU_FLASH, PLAIN, Gradients, Running, kernel_of, merge
from megadcp.parallel.tile import Tile, join

TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2}
HEADS = [(4, 4), (4, 2), (4, 1)]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def formula(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """[B, H, m, d], [B, G, l, d] -> out and log-sum-exp; causality aligned at the end."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        m, keys = scores.shape[-2:]
        scores = scores.masked_fill(torch.arange(keys) > torch.arange(m)[:, None] + keys - m, -math.inf)
    return torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1)


def strided(batch: int, heads: int, rows: int, d: int, seed: int, dtype: torch.dtype) -> Tensor:
    """As documents of a fused qkv are: rows and heads apart, features adjacent."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(batch, rows + 2, heads + 3, d, generator=generator, dtype=torch.float64).to(dtype)
    return whole[:, 1 : rows + 1, 1 : heads + 1].transpose(1, 2)


@pytest.mark.parametrize("kernel", [CPU_FLASH, PLAIN], ids=["flash", "plain"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("m", "keys", "causal"), [(1, 1, True), (5, 5, True), (70, 70, True), (5, 9, False), (9, 5, False), (1, 70, False)])
def test_kernels_follow_the_formulas_with_foreign_sums(kernel, dtype, m, keys, causal):
    """The backward gets output and log-sum-exp of a softmax over more keys than the block has."""
    for number, kv_heads in HEADS:
        q, k, v = strided(2, number, m, 8, 1, dtype), strided(2, kv_heads, keys, 8, 2, dtype), strided(2, kv_heads, keys, 8, 3, dtype)
        more = [strided(2, kv_heads, 6, 8, seed, dtype) for seed in (4, 5)]
        grad = strided(2, number, m, 8, 6, dtype)
        out, lse = kernel.forward(q, k, v, causal)
        wanted, sums = formula(q.double(), k.double(), v.double(), causal)
        assert distance(out, wanted) < TOLERANCE[dtype]
        assert distance(lse, sums) < TOLERANCE[dtype]

        wide = [x.double().requires_grad_() for x in (q, k, v)]
        part, sums = formula(*wide, causal)
        other, other_sums = formula(wide[0], more[0].double(), more[1].double(), False)
        total = torch.logaddexp(sums, other_sums)
        merged = torch.exp(sums - total)[..., None] * part + torch.exp(other_sums - total)[..., None] * other
        wanted = torch.autograd.grad(merged, wide, grad.double())
        arguments = (merged.detach().to(dtype), total.detach().to(block_attention.wide(dtype)))
        first = kernel.backward(grad, q, k, v, *arguments, causal)
        second = kernel.backward(grad, q, *more, *arguments, False)
        for mine, expected in zip((first[0] + second[0], first[1], first[2]), wanted, strict=True):
            assert distance(mine, expected) < 2 * TOLERANCE[dtype]


def test_kernels_agree_on_sizes_beyond_their_inner_blocks():
    q, k, v, grad = (strided(1, number, 700, 16, seed, torch.float64) for seed, number in enumerate((2, 1, 1, 2)))
    for causal in (True, False):
        (out, lse), (plain, sums) = CPU_FLASH.forward(q, k, v, causal), PLAIN.forward(q, k, v, causal)
        assert distance(out, plain) < 1e-13
        assert distance(lse, sums) < 1e-13
        flash = CPU_FLASH.backward(grad, q, k, v, out, lse, causal)
        for mine, expected in zip(flash, PLAIN.backward(grad, q, k, v, out, lse, causal), strict=True):
            assert distance(mine, expected) < 1e-13


def test_which_kernel():
    for dtype in TOLERANCE:
        assert kernel_of(torch.empty(1, 1, 8, dtype=dtype)) is CPU_FLASH
        assert kernel_of(torch.empty(1, 1, 8, dtype=dtype, device="meta")) is PLAIN


@pytest.mark.parametrize("rows", [3, 512])
def test_plain_rows_without_keys_are_zero(rows, monkeypatch):
    """Five queries aligned with two keys at the end: three see nothing. In pieces of three rows, one piece sees nothing at all."""
    monkeypatch.setattr(block_attention, "ROWS", rows)
    q, k, v, grad = (strided(2, number, m, 4, m, torch.float64) for number, m in ((4, 5), (2, 2), (2, 2), (4, 5)))
    out, lse = PLAIN.forward(q, k, v, True)
    wanted, sums = formula(q[:, :, 3:], k, v, True)
    assert torch.count_nonzero(out[:, :, :3]) == 0
    assert (lse[:, :, :3] == -math.inf).all()
    assert distance(out[:, :, 3:], wanted) < 1e-14
    assert distance(lse[:, :, 3:], sums) < 1e-14
    dq, dk, dv = PLAIN.backward(grad, q, k, v, out, lse, True)
    assert torch.count_nonzero(dq[:, :, :3]) == 0
    rest = PLAIN.backward(grad[:, :, 3:], q[:, :, 3:], k, v, wanted, sums, True)
    for mine, expected in zip((dq[:, :, 3:], dk, dv), rest, strict=True):
        assert distance(mine, expected) < 1e-14


# -------------------------------------------------------------------------------------------------------------- merging
def test_merging_with_nothing_is_exact():
    inf = math.inf
    out, other = torch.tensor([[1.0, 2.0]]).repeat(4, 1), torch.tensor([[5.0, 6.0]]).repeat(4, 1)
    out[2:], other[1::2] = 0.0, 0.0
    lse, other_lse = torch.tensor([[0.3], [0.3], [-inf], [-inf]]), torch.tensor([[0.7], [-inf], [0.7], [-inf]])
    merge(out, lse, other, other_lse)
    share = math.exp(0.7) / (math.exp(0.3) + math.exp(0.7))
    assert torch.allclose(out[0], torch.tensor([1 + 4 * share, 2 + 4 * share]))
    assert out[1:].tolist() == [[1.0, 2.0], [5.0, 6.0], [0.0, 0.0]]
    assert torch.allclose(lse[0, 0], torch.tensor(math.log(math.exp(0.3) + math.exp(0.7))))
    assert lse[1:, 0].tolist() == [torch.tensor(0.3).item(), torch.tensor(0.7).item(), -inf]


@pytest.mark.parametrize(("large", "small"), [(900.0, -900.0), (1e5, 1e5)])
def test_merging_far_apart_or_large_sums_does_not_overflow(large, small):
    out, lse = torch.ones(1, 2), torch.full((1, 1), small)
    merge(out, lse, torch.full((1, 2), 3.0), torch.full((1, 1), large))
    assert torch.allclose(out, torch.full((1, 2), 3.0 if large > small else 2.0))
    assert torch.allclose(lse, torch.tensor(large + (0.0 if large > small else math.log(2))))


def test_what_is_wrong_in_the_data_stays_visible():
    """The guard for rows without keys hides no NaN."""
    out, lse = torch.ones(1, 2), torch.zeros(1, 1)
    merge(out, lse, torch.full((1, 2), math.nan), torch.full((1, 1), math.nan))
    assert out.isnan().all()
    assert lse.isnan().all()


def test_many_bf16_blocks_are_summed_in_fp32():
    """256 blocks of one key each: a bf16 sum would stop growing, or round 256 times."""
    q, k, v, _ = (x.to(torch.bfloat16) for x in heads(256, (2, 1), torch.bfloat16))
    running = Running(q)
    for key in range(256):
        running.add(q, k, v, [Tile(0, 256, key, 1, False)])
    wanted, sums = formula(*(x.double().transpose(0, 1)[None] for x in (q, k, v)), False)
    assert running.out.dtype == torch.float32
    assert distance(running.out, wanted[0].transpose(0, 1)) < 1e-5
    assert distance(running.lse, sums[0].transpose(0, 1)) < 1e-5


# ---------------------------------------------------------------------------------------------------------------- tiles
def test_equal_tiles_become_one():
    def tile(query: int, queries: int, key: int, keys: int, causal: bool = False) -> Tile:
        return Tile(query, queries, key, keys, causal)

    assert join([tile(0, 3, 0, 2), tile(4, 3, 8, 2), tile(8, 3, 16, 2), tile(12, 3, 24, 1)]) == [Tile(0, 3, 0, 2, False, 3, 4, 8), tile(12, 3, 24, 1)]
    assert join([tile(0, 3, 0, 2), tile(4, 3, 8, 2), tile(9, 3, 16, 2)]) == [Tile(0, 3, 0, 2, False, 2, 4, 8), tile(9, 3, 16, 2)]
    assert join([tile(0, 3, 0, 2), tile(4, 3, 8, 2), tile(8, 3, 15, 2)]) == [Tile(0, 3, 0, 2, False, 2, 4, 8), tile(8, 3, 15, 2)]
    assert join([tile(0, 3, 0, 3, True), tile(4, 3, 8, 3)]) == [tile(0, 3, 0, 3, True), tile(4, 3, 8, 3)]
    assert join([tile(0, 0, 0, 2), tile(4, 3, 8, 0)]) == []


def test_rows_outside_a_tensor_are_refused():
    q, k, v, _ = heads(10, (1, 1))
    for bad in (Tile(8, 3, 0, 3, True), Tile(0, 3, 8, 3, False), Tile(-1, 2, 0, 2, True), Tile(0, 2, 0, 2, True, 3, 5, 5)):
        with pytest.raises(IndexError):
            Running(q).add(q, k, v, [bad])
    with pytest.raises(ValueError, match="5 queries against 3 keys"):
        Running(q).add(q, k, v, [Tile(0, 5, 0, 3, True)])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("sizes", HEADS)
def test_a_pack_of_documents_in_pieces_equals_dense(dtype, sizes):
    """Each document's queries in two parts, keys before them apart or in one tile; equal documents together; padding between."""
    docs = documents([6, 6, 6, 1, 9], 2, extra=1)
    q, k, v, grad = heads(docs.rows, sizes, dtype)
    starts = [0, *itertools.accumulate(docs.padded)]
    early = join(Tile(start, length // 2, start, length // 2, True) for start, length in zip(starts, docs.lengths, strict=False))
    late = join(Tile(start + n // 2, n - n // 2, start, n, True) for start, n in zip(starts, docs.lengths, strict=False))
    q, k, v, grad = (x.to(dtype) for x in (q, k, v, grad))
    running = Running(q)
    running.add(q, k, v, early, first=True)
    running.add(q, k, v, late, first=True)
    out = running.out.to(dtype)
    sums = Gradients(grad, q, out, running.lse)
    dk, dv = torch.zeros_like(k, dtype=sums.dq.dtype), torch.zeros_like(v, dtype=sums.dq.dtype)
    sums.add(k, v, dk, dv, [*late, *early])
    for mine, expected in zip((out, sums.dq, dk, dv), dense(*(x.double() for x in (q, k, v, grad)), docs), strict=True):
        assert distance(mine, expected) < 2 * TOLERANCE[dtype]
        assert torch.count_nonzero(mine[~docs.real()]) == 0


def test_joined_tiles_change_no_bit():
    docs = documents([70] * 4, 1)
    q, k, v, grad = (x.float() for x in heads(docs.rows, (4, 2)))
    apart = [Tile(70 * at, 70, 70 * at, 70, True) for at in range(4)]
    results = []
    for tiles in (apart, join(apart)):
        running = Running(q)
        running.add(q, k, v, tiles, first=True)
        sums = Gradients(grad, q, running.out, running.lse)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        sums.add(k, v, dk, dv, tiles)
        results.append((running.out, running.lse, sums.dq, dk, dv))
    assert len(join(apart)) == 1
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
