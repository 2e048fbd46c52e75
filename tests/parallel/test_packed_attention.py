"""All documents of a step in one kernel call: the same numbers as tile by tile, and few calls. The kernel is the plain one, document by document."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from context_helpers import Documents, Where, dense, distance, documents, heads, members
from context_helpers import threads as threads
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megadcp.mesh.groups import Group
from megadcp.parallel import block_attention
from megadcp.parallel.block_attention import PLAIN, Gradients, Running
from megadcp.parallel.context import attention
from megadcp.parallel.context_tiles import gather_tiles, ring_tiles
from megadcp.parallel.packed_attention import CUDA_FLASH, Call, PackedKernel, calls_of, grouped
from megadcp.parallel.tile import Tile, join

CALLS: list[Call] = []


def pieces(call: Call) -> Iterator[tuple[slice, slice]]:
    for (a, b), (c, d) in zip(itertools.pairwise(call.query_borders.tolist()), itertools.pairwise(call.key_borders.tolist()), strict=True):
        assert 0 < b - a <= call.most_queries
        assert 0 < d - c <= call.most_keys
        yield slice(a, b), slice(c, d)


def turned(x: Tensor) -> Tensor:
    """[m, heads, d] <-> [1, heads, m, d]."""
    return x.transpose(0, 1).unsqueeze(0)


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    CALLS.append(call)
    assert all(x.is_contiguous() for x in (q, k, v))
    assert (call.query_borders[-1], call.key_borders[-1]) == (q.shape[0], k.shape[0])
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan, dtype=block_attention.wide(q.dtype))
    for rows, keys in pieces(call):
        part, sums = PLAIN.forward(turned(q[rows]), turned(k[keys]), turned(v[keys]), call.causal)
        out[rows], lse[rows] = part[0].transpose(0, 1).to(q.dtype), sums[0].t()
    return out, lse


def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    found = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    for rows, keys in pieces(call):
        inputs = [turned(x[where]) for x, where in ((grad, rows), (q, rows), (k, keys), (v, keys), (out, rows))]
        parts = PLAIN.backward(*inputs, lse[rows].t().unsqueeze(0), call.causal)
        for total, part, where in zip(found, parts, (rows, keys, keys), strict=True):
            total[where] = part[0].transpose(0, 1).to(q.dtype)
    return found[0], found[1], found[2]


PACKED = PackedKernel(forward, backward)


@pytest.fixture
def packed(monkeypatch):
    monkeypatch.setattr(block_attention, "kernel_of", lambda x: PACKED)
    CALLS.clear()


def test_signatures_are_those_of_the_operators():
    """Bound against torch's own schemas: what the CUDA kernels are called with exists, in this order."""
    forward_schema = torch.ops.aten._flash_attention_forward.default._schema
    names = [argument.name for argument in forward_schema.arguments if not argument.kwarg_only]
    assert names == [
        "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "return_debug_mask",
    ]  # fmt: skip
    backward_schema = torch.ops.aten._flash_attention_backward.default._schema
    assert [argument.name for argument in backward_schema.arguments if not argument.kwarg_only] == [
        "grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal",
        "rng_state", "unused",
    ]  # fmt: skip


def test_the_gpu_kernel_runs_on_meta_tensors():
    """Shapes and formats of what goes in and comes out, as torch describes its operator; nothing asks for a value."""
    tiles = (Tile(0, 3, 0, 4, False), Tile(5, 2, 4, 6, False))
    q, k = torch.empty(8, 4, 16, dtype=torch.bfloat16, device="meta"), torch.empty(10, 2, 16, dtype=torch.bfloat16, device="meta")
    (call,) = calls_of(tiles, q, k, {})
    out, lse = CUDA_FLASH.forward(q[:5], k, k, call)
    assert (out.shape, lse.shape, lse.dtype) == ((5, 4, 16), (5, 4), torch.float32)
    parts = CUDA_FLASH.backward(out, q[:5], k, k, out, lse, call)
    assert [part.shape for part in parts] == [(5, 4, 16), (10, 2, 16), (10, 2, 16)]


# --------------------------------------------------------------------------------------------------------------- calls
LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=6)


@given(LENGTHS, st.sampled_from([1, 2, 3, 4]), st.data())
@settings(deadline=None, max_examples=60)
def test_calls_do_what_the_tiles_say(lengths, size, data):
    docs = documents(lengths, size, extra=data.draw(st.integers(0, 1)))
    index, source = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size - 1))
    borders = docs.member(size, index).cu_seqlens_list
    for tiles, most in ((ring_tiles(borders, docs.lengths, size, index, source), 1), (gather_tiles(borders, docs.lengths, size, index), 2)):
        single = [
            ((tile.query + n * tile.query_stretch, tile.queries), (tile.key + n * tile.key_stretch, tile.keys), tile.causal)
            for tile in tiles
            for n in range(tile.documents)
        ]
        calls = grouped(tiles)
        assert len(calls) <= most
        assert [(query, key, causal) for queries, keys, causal in calls for query, key in zip(queries, keys, strict=True)] == single
        for queries, keys, _ in calls:
            for spans in (queries, keys):
                rows = [row for start, count in spans for row in range(start, start + count)]
                assert len(set(rows)) == len(rows)


def test_whole_tensors_are_not_copied_and_calls_are_made_once():
    tiles, memo = (Tile(0, 4, 0, 4, True), Tile(4, 3, 4, 3, True)), {}
    q, k = torch.empty(7, 1, 2), torch.empty(7, 1, 2)
    (call,) = calls_of(tiles, q, k, memo)
    assert call.queries is None
    assert call.keys is None
    assert call.query_borders.tolist() == [0, 4, 7]
    assert calls_of(tiles, q, k, memo)[0] is call
    (other,) = calls_of(tiles, torch.empty(8, 1, 2), k, memo)  # a row behind them that nobody attends with
    assert other.queries.tolist() == list(range(7))
    with pytest.raises(IndexError):
        calls_of((Tile(0, 8, 0, 8, True),), q, k, memo)


# ----------------------------------------------------------------------------------------------------- whole attention
def run(kind: str, docs: Documents, size: int, inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    def member(group: Group) -> list[Tensor]:
        rows = docs.rows_of(size, group.index)
        q, k, v = (x[rows].to(dtype).requires_grad_() for x in inputs[:3])
        out = attention(q, k, v, docs.member(size, group.index), Where(group, kind))
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3][rows].to(dtype))]

    rows = torch.cat([docs.rows_of(size, index) for index in range(size)])
    whole = [torch.cat(each) for each in zip(*members(size, member), strict=True)]
    return [torch.empty_like(x).index_copy_(0, rows, x) for x in whole]


@pytest.mark.usefixtures("packed", "threads")
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-11), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("kind", ["ring", "all_gather", "ulysses", "2d"])
def test_equal_to_dense(kind, dtype, bound):
    size = 4
    docs = documents([6, 6, 17, 0, 1, 33, 8], size, extra=1)
    inputs = heads(docs.rows, (8, 4), dtype)
    for mine, expected in zip(run(kind, docs, size, inputs, dtype), dense(*inputs, docs), strict=True):
        assert distance(mine, expected) < bound
        assert torch.count_nonzero(mine[~docs.real()]) == 0
    assert len(CALLS) == size * {"ring": size, "all_gather": 2, "ulysses": 1, "2d": 1}[kind]  # forwards of all members


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LENGTHS.filter(any), st.sampled_from([2, 3]), st.sampled_from(["ring", "all_gather"]), st.integers(0, 1))
@pytest.mark.usefixtures("packed", "threads")
def test_equal_to_dense_for_any_pack(lengths, size, kind, extra):
    docs = documents(lengths, size, extra)
    inputs = heads(docs.rows, (2, 1))
    for mine, expected in zip(run(kind, docs, size, inputs, torch.float64), dense(*inputs, docs), strict=True):
        assert torch.allclose(mine, expected, rtol=1e-11, atol=1e-12)  # of a single token dq is rounding about 0


@pytest.mark.usefixtures("packed")
def test_blocks_are_merged_row_by_row():
    """Keys in three blocks, of which some rows see two and some none."""
    q, k, v, grad = heads(12, (2, 1))
    running = Running(q)
    running.add(q, k, v, (Tile(0, 5, 0, 5, True), Tile(6, 5, 6, 5, True)), first=True)
    running.add(q, k, v, tuple(join([Tile(8, 3, 0, 4, False)])))
    docs = torch.full((12, 12), -torch.inf, dtype=torch.float64)
    for start in (0, 6):
        docs[start : start + 5, start : start + 5] = torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    docs[8:11, :4] = 0
    x = [one.clone().requires_grad_() for one in (q, k, v)]
    scores = torch.einsum("ihd,jgd->hij", x[0], x[1]) * q.shape[2] ** -0.5 + docs
    shares = torch.softmax(scores[:, [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]], -1)
    expected = torch.einsum("hij,jgd->ihd", shares, x[2])
    seen = [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]
    assert distance(running.out[seen], expected.detach()) < 1e-13
    assert torch.count_nonzero(running.out[[5, 11]]) == 0
    sums = Gradients(grad, q, running.out, running.lse)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for tiles in ((Tile(0, 5, 0, 5, True), Tile(6, 5, 6, 5, True)), (Tile(8, 3, 0, 4, False),)):
        sums.add(k, v, dk, dv, tiles)
    for mine, wanted in zip((sums.dq, dk, dv), torch.autograd.grad(expected, x, grad[seen]), strict=True):
        assert distance(mine, wanted) < 1e-12
