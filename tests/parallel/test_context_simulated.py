"""All kinds of context parallelism in one process, members as threads, against dense attention in fp64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from context_helpers import Documents, Where, Wires, dense, distance, documents, heads, members
from context_helpers import threads as threads
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megadcp.mesh.groups import Group
from megadcp.parallel import block_attention
from megadcp.parallel.block_attention import PLAIN
from megadcp.parallel.context import KINDS, attention
from megadcp.parallel.context_ring import ring_attention
from megadcp.parallel.context_share import Share

pytestmark = pytest.mark.usefixtures("threads", "one_thread")
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def legal(kind: str, sizes: tuple[int, int], size: int) -> bool:
    """As the planner has it, except that 2d with A = 1 or A = P is let through."""
    return kind != "ulysses" or (sizes[0] % size == 0 and sizes[1] % size == 0)


def run(kind: str, docs: Documents, size: int, inputs: list[Tensor], dtype: torch.dtype, wires: Wires | None = None) -> list[Tensor]:
    """Output, dq, dk, dv of the whole pack, put together from the members'."""

    def member(group: Group) -> list[Tensor]:
        rows = docs.rows_of(size, group.index)
        # views of one buffer, as the model makes them
        buffer = torch.cat([x[rows] for x in inputs[:3]], 1).to(dtype).requires_grad_()
        q, k, v = torch.split(buffer, [x.shape[1] for x in inputs[:3]], 1)
        out = attention(q, k, v, docs.member(size, group.index), Where(group, kind))
        assert (out.shape, out.dtype) == (q.shape, dtype)
        grads = torch.autograd.grad(out, (q, k, v), inputs[3][rows].to(dtype))
        return [out.detach(), *grads]

    return together(docs, size, members(size, member, wires))


def together(docs: Documents, size: int, parts: list[list[Tensor]]) -> list[Tensor]:
    """Rows of all members back in the pack's order."""
    rows = torch.cat([docs.rows_of(size, index) for index in range(size)])
    whole = [torch.cat(each) for each in zip(*parts, strict=True)]
    return [torch.empty_like(x).index_copy_(0, rows, x) for x in whole]


def check(results: list[Tensor], inputs: list[Tensor], docs: Documents, tolerance: float) -> None:
    for mine, expected in zip(results, dense(*inputs, docs), strict=True):
        assert distance(mine, expected) < tolerance
        assert torch.count_nonzero(mine[~docs.real()]) == 0


PACKS = [
    documents([22, 7, 1, 40], 8, extra=1),  # padding in the middle, documents shorter than P
    documents([1], 8),  # all other members have padding only
    documents([16, 16, 16, 3, 16], 8),  # equal neighbours
    documents([0, 5, 0], 8, extra=1),  # documents without tokens
]


HEADS = [(8, 8), (8, 4), (8, 2), (8, 1), (6, 3), (12, 6)]


@pytest.mark.parametrize(("kind", "size", "sizes"), [one for one in itertools.product(KINDS, (2, 3, 4, 8), HEADS) if legal(one[0], one[2], one[1])])
def test_equal_to_dense_in_fp64(kind, size, sizes):
    for docs in PACKS if size != 3 else [documents([22, 7, 1, 40], 3, extra=1)]:
        inputs = heads(docs.rows, sizes)
        check(run(kind, docs, size, inputs, torch.float64), inputs, docs, TOLERANCE[torch.float64])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_dense_in_other_formats(kind, dtype):
    docs = documents([300, 22, 7, 1], 4, extra=1)
    inputs = heads(docs.rows, (8, 4), dtype)
    check(run(kind, docs, 4, inputs, dtype), inputs, docs, TOLERANCE[dtype])


@pytest.mark.parametrize("kind", KINDS)
def test_with_the_plain_kernel(kind, monkeypatch):
    """What a GPU without a fused kernel for the format computes; in pieces of 16 queries, bottom-right causal in one tile."""
    monkeypatch.setattr(block_attention, "ROWS", 16)
    monkeypatch.setattr(block_attention, "kernel_of", lambda x: PLAIN)
    docs = documents([100, 22, 7, 1], 4, extra=1)
    inputs = heads(docs.rows, (8, 4))
    check(run(kind, docs, 4, inputs, torch.float64), inputs, docs, TOLERANCE[torch.float64])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=6),
    size=st.sampled_from([2, 4, 8]),
    kind=st.sampled_from(KINDS),
    sizes=st.sampled_from([(8, 8), (4, 2), (3, 1)]),
    extra=st.integers(0, 2),
    seed=st.integers(0, 1 << 30),
)
def test_equal_to_dense_for_any_pack(lengths, size, kind, sizes, extra, seed):
    if not legal(kind, sizes, size):
        kind = "ring"
    docs = documents([*lengths, 1], size, extra)
    inputs = heads(docs.rows, sizes, seed=seed, d=4)
    check(run(kind, docs, size, inputs, torch.float64), inputs, docs, 1e-10)


class Simulated(torch.autograd.Function):
    """The whole group as one function of the whole pack's q, k, v: its backward lets all members go backward together."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, docs: Documents, size: int, kind: str) -> Tensor:
        def member(group: Group) -> list[Tensor]:
            with torch.enable_grad():
                own = [x.detach()[docs.rows_of(size, group.index)].requires_grad_() for x in (q, k, v)]
                return [*own, attention(*own, docs.member(size, group.index), Where(group, kind))]

        ctx.wires = Wires(size)
        ctx.graphs, ctx.docs, ctx.size = members(size, member, ctx.wires), docs, size
        return together(docs, size, [[graph[3].detach()] for graph in ctx.graphs])[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        def member(group: Group) -> list[Tensor]:
            *own, out = ctx.graphs[group.index]
            return list(torch.autograd.grad(out, own, grad[ctx.docs.rows_of(ctx.size, group.index)], retain_graph=True))

        return *together(ctx.docs, ctx.size, members(ctx.size, member, ctx.wires)), None, None, None


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_by_finite_differences(kind, size):
    sizes = (2 * size, size) if kind == "ulysses" else (4, 2)
    docs = documents([2 * size - 1, 1], size)
    inputs = [x.requires_grad_() for x in heads(docs.rows, sizes, d=2)[:3]]
    assert torch.autograd.gradcheck(Simulated.apply, (*inputs, docs, size, kind), atol=1e-7, fast_mode=size > 2)


def test_what_each_kind_sends():
    """Bytes sent by each member, and how many messages, follow the formulas of the cost model (with fp64 sums of fp64 gradients)."""
    size, heads_, kv_heads, d, item = 4, 8, 4, 8, 8
    docs = documents([64], size)
    inputs, rows = heads(docs.rows, (heads_, kv_heads)), docs.rows
    token = d * item
    ring = 2 * rows * kv_heads * token * (size - 1) // size  # forward; the backward moves the same keys again, and their gradients P times
    own = rows // size * (2 * heads_ + 2 * kv_heads) * token // size  # q, k, v and out for one member
    expected = {
        "ring": (2 * ring + 2 * rows * kv_heads * token // size * size, 3 + 3 + 4),
        "all_gather": (3 * ring, 9),
        "ulysses": (2 * own * (size - 1), 4 * (size - 1)),
    }
    for kind, (wanted, count) in expected.items():
        wires = Wires(size)
        run(kind, docs, size, inputs, torch.float64, wires)
        for index, log in enumerate(wires.log):
            sent = [amount for member, amount in log if member != index]
            assert (sum(sent), len(sent)) == (wanted, count), kind


@pytest.mark.parametrize(("lanes_per_node", "near"), [(64, 4), (2, 2)])
def test_2d_swaps_heads_with_its_neighbours_only(lanes_per_node, near):
    """A of 8 members are neighbours; the ring goes over index + A."""
    docs = documents([32, 5], 8)
    inputs = heads(docs.rows, (8, 4))

    def member(group: Group) -> list[Tensor]:
        rows = docs.rows_of(8, group.index)
        own = [x[rows].requires_grad_() for x in inputs[:3]]
        out = attention(*own, docs.member(8, group.index), Where(group, "2d", lanes_per_node))
        return [out.detach(), *torch.autograd.grad(out, own, inputs[3][rows])]

    wires = Wires(8)
    check(together(docs, 8, members(8, member, wires)), inputs, docs, TOLERANCE[torch.float64])
    for index, log in enumerate(wires.log):
        block = set(range(index // near * near, index // near * near + near))
        assert {to for to, _ in log} == block | {(index + near) % 8}


def test_only_inputs_output_and_sums_are_kept():
    """Whatever the number of steps: q, k, v, the output, and the log-sum-exp."""
    for kind, size in (("ring", 2), ("ring", 8), ("all_gather", 8), ("ulysses", 4), ("2d", 8)):
        docs = documents([64, 9], size)
        inputs = heads(docs.rows, (8, 4))

        def member(group: Group, kind: str = kind, size: int = size, docs: Documents = docs, inputs: list[Tensor] = inputs) -> int:
            rows = docs.rows_of(size, group.index)
            own = [x[rows].requires_grad_() for x in inputs[:3]]
            kept: list[int] = []
            with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.numel()), x)[1], lambda x: x):
                attention(*own, docs.member(size, group.index), Where(group, kind))
            return sum(kept)

        t = docs.rows // size
        assert members(size, member) == [t * (8 + 4 + 4 + 8) * 8 + t * 8] * size


def test_documents_do_not_see_each_other():
    """Public case C29: B's output and gradients do not change by one bit when A or C changes."""
    docs = documents([13, 21, 6], 4)
    middle = slice(docs.padded[0], docs.padded[0] + docs.padded[1])
    for kind in KINDS:
        inputs = heads(docs.rows, (8, 4))
        first = run(kind, docs, 4, inputs, torch.float64)
        for other in (slice(0, docs.padded[0]), slice(middle.stop, None)):
            changed = [x.clone() for x in inputs]
            for x in changed:
                x[other] = torch.randn(x[other].shape, dtype=torch.float64) * 30
            second = run(kind, docs, 4, changed, torch.float64)
            assert all(torch.equal(a[middle], b[middle]) for a, b in zip(first, second, strict=True))


def test_padding_is_never_read():
    """NaN in padding rows stays there."""
    docs = documents([13, 1, 6], 4, extra=1)
    for kind in KINDS:
        inputs = heads(docs.rows, (8, 4))
        poisoned = [x.masked_fill(~docs.real()[:, None, None], float("nan")) for x in inputs]
        check(run(kind, docs, 4, poisoned, torch.float64), inputs, docs, TOLERANCE[torch.float64])


def test_two_runs_are_bit_equal():
    docs = documents([130, 1, 60], 4, extra=1)
    for kind in KINDS:
        inputs = heads(docs.rows, (8, 4))
        first, second = (run(kind, docs, 4, inputs, torch.float32) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_wrong_calls_are_refused():
    docs = documents([13, 1], 2)
    q, k, v, _ = heads(docs.rows // 2, (4, 2))
    group = Group((0, 1), 0, None)
    with pytest.raises(ValueError, match="cp_comm=none is unknown"):
        attention(q, k, v, docs.member(2, 0), Where(group, "none"))
    with pytest.raises(ValueError, match="borders are those of 10 rows, but there are 9"):
        attention(q[1:], k[1:], v[1:], docs.member(2, 0), Where(group, "ring"))

    class Wrong(Where):
        cp = 4  # type: ignore[assignment]

    with pytest.raises(ValueError, match="cp=4, but its group has 2 ranks"):
        attention(q, k, v, docs.member(2, 0), Wrong(group, "ring"))


def test_a_group_of_one_needs_no_messages():
    docs = Documents((5, 1), (7, 1))
    inputs = heads(docs.rows, (4, 2))
    own = [x.requires_grad_() for x in inputs[:3]]
    batch = docs.member(1, 0)
    out = ring_attention(*own, Share(Group((0,), 0, Wires(1)), batch.cu_seqlens, batch.cu_seqlens_list, docs.lengths), 1)  # type: ignore[arg-type]
    check([out, *torch.autograd.grad(out, own, inputs[3])], inputs, docs, TOLERANCE[torch.float64])
