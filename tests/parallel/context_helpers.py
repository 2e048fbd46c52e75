"""Packs, a dense reference, and P members of a cp group as threads of this process.

Legend: t rows of the whole pack, H query heads, G kv heads, d head dim, P members.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from megadcp.mesh.coords import zigzag_spans
from megadcp.mesh.groups import Group
from megadcp.nn.backend import PackedTokens
from megadcp.parallel import collectives

TIMEOUT_SECONDS = 20.0


@dataclass(frozen=True)
class Where:
    """A Placement, as far as attention reads it."""

    group: Group
    cp_comm: str
    lanes_per_node: int = 64

    @property
    def cp(self) -> int:
        return self.group.size


# ---------------------------------------------------------------------------------------------------------------- packs
@dataclass(frozen=True)
class Documents:
    """Real and padded lengths."""

    lengths: tuple[int, ...]
    padded: tuple[int, ...]

    @property
    def rows(self) -> int:
        return sum(self.padded)

    def real(self) -> Tensor:
        """Mask [t] of real rows, by plain loops."""
        mask, start = torch.zeros(self.rows, dtype=torch.bool), 0
        for length, padded in zip(self.lengths, self.padded, strict=True):
            mask[start : start + length] = True
            start += padded
        return mask

    def member(self, size: int, index: int) -> PackedTokens:
        """What attention reads of one member's batch; tokens are the rows in the whole pack."""
        borders = [0]
        for padded in self.padded:
            borders.append(borders[-1] + padded // size)
        rows = self.rows_of(size, index)
        return PackedTokens(
            tokens=rows,
            labels=rows,
            positions=rows,
            cu_seqlens=torch.tensor(borders, dtype=torch.int32),
            max_length=max(self.padded) // size,
            document_ids=torch.arange(len(self.lengths)),
            real_lengths=torch.tensor(self.lengths),
            cu_seqlens_list=tuple(borders),
            real_lengths_list=self.lengths,
        )

    def rows_of(self, size: int, index: int) -> Tensor:
        """Rows of the pack that a member holds, in its order."""
        return torch.cat([torch.arange(start, end) for start, end in zigzag_spans(self.padded, size, index)])


def documents(lengths: Sequence[int], size: int, extra: int = 0) -> Documents:
    """Padded to the next multiple of 2 P, and every other one by `extra` times as much."""
    unit = 2 * size
    return Documents(tuple(lengths), tuple(-(-length // unit) * unit + unit * extra * (at % 2) for at, length in enumerate(lengths)))


def heads(rows: int, sizes: tuple[int, int], dtype: torch.dtype = torch.float64, seed: int = 0, d: int = 8) -> list[Tensor]:
    """Random q, k, v and the gradient of the output: values of `dtype`, kept in fp64."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, count, d, generator=generator, dtype=torch.float64).to(dtype).double() for count in (*sizes, sizes[1], sizes[0])]


def dense(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, docs: Documents) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output and dq, dk, dv by masked softmax, document by document over real rows, zero elsewhere."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    out, start, group = torch.zeros_like(q), 0, q.shape[1] // k.shape[1]
    for length, padded in zip(docs.lengths, docs.padded, strict=True):
        piece = slice(start, start + length)
        scores = torch.einsum("ihd,jhd->hij", q[piece], k[piece].repeat_interleave(group, 1)) / math.sqrt(q.shape[2])
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -math.inf)
        out[piece] = torch.einsum("hij,jhd->ihd", torch.softmax(scores, -1), v[piece].repeat_interleave(group, 1))
        start += padded
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), grad))


def distance(mine: Tensor, theirs: Tensor) -> float:
    """Largest difference, relative to the largest value of theirs; NaN never passes."""
    if not torch.isfinite(mine).all():
        return math.inf
    return float((mine.detach().double() - theirs.detach()).abs().max() / theirs.detach().abs().max().clamp(min=1e-30))


# -------------------------------------------------------------------------------------------------- members as threads
@dataclass
class Wires:
    """Queues from each member to each other one; the handle of a simulated group."""

    size: int
    queues: dict[tuple[int, int], queue.Queue[Tensor]] = field(default_factory=dict)
    log: list[list[Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.queues = {(a, b): queue.Queue() for a in range(self.size) for b in range(self.size)}
        self.log = [[] for _ in range(self.size)]


class Wait:
    def __init__(self, function: Callable[[], None]) -> None:
        self.wait = function


def _exchange(sends: Any, receives: Any, group: Any) -> list[Wait]:
    wires: Wires = group.handle
    for tensor, member in sends:
        wires.log[group.index].append((member, tensor.numel() * tensor.element_size()))
        wires.queues[group.index, member].put(tensor.detach().clone())

    def arrive(buffer: Tensor, member: int) -> None:
        came = wires.queues[member, group.index].get(timeout=TIMEOUT_SECONDS)
        assert buffer.is_contiguous()
        assert (came.shape, came.dtype) == (buffer.shape, buffer.dtype)
        buffer.copy_(came)

    return [Wait(lambda b=buffer, m=member: arrive(b, m)) for buffer, member in receives]


def _all_gather(x: Tensor, group: Any) -> Tensor:
    out = x.new_empty((group.size, *x.shape))
    members = range(group.size)
    for wait in _exchange([(x, member) for member in members], [(out[member], member) for member in members], group):
        wait.wait()
    return out.flatten(0, 1)


def _reduce_scatter(x: Tensor, group: Any) -> Tensor:
    parts = x.unflatten(0, (group.size, -1))
    out = torch.empty_like(parts)
    members = range(group.size)
    for wait in _exchange([(parts[member], member) for member in members], [(out[member], member) for member in members], group):
        wait.wait()
    return out.sum(0)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives between threads."""
    for name, function in (("exchange", _exchange), ("all_gather", _all_gather), ("reduce_scatter", _reduce_scatter)):
        monkeypatch.setattr(collectives, name, function)


def members(size: int, function: Callable[[Group], Any], wires: Wires | None = None) -> list[Any]:
    """function(group) of each member, each in a thread; an exception of any is raised here."""
    wires = wires or Wires(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = function(Group(tuple(range(size)), index, wires))  # type: ignore[arg-type]
        except BaseException as error:
            errors.append(error)

    started = [threading.Thread(target=run, args=(index,)) for index in range(size)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if errors:
        raise min(errors, key=lambda error: isinstance(error, queue.Empty))
    assert all(each.empty() for each in wires.queues.values()), "a message was never received"
    return results
