"""Sums, gathers and exchanges inside one Group, without autograd. For a group of one rank all of them are local.

All members call the same functions in the same order. On a GPU operations are queued on the stream of the group's purpose (mesh/streams.py).
Results are in group order. n: rows of one member, s: size of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from megadcp.mesh.groups import Group
    from megadcp.mesh.streams import Wait

OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# 2.13 warns at the old names, which are the only ones in 2.11
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Arriving:
    """The result of an operation that was started: `get` waits for it (on a GPU the current stream does, not the host)."""

    def __init__(self, result: Tensor, waits: Sequence[Wait] = ()) -> None:
        self._result, self._waits = result, waits

    def get(self) -> Tensor:
        """The result."""
        for wait in self._waits:
            wait.wait()
        self._waits = ()
        return self._result


def all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Sum (or max, min) of everybody's x, in place; returns x."""
    if x.is_contiguous():
        return start_all_reduce(x, group, op).get()
    x.copy_(start_all_reduce(x.contiguous(), group, op).get())
    return x


def start_all_reduce(x: Tensor, group: Group, op: str = "sum") -> Arriving:
    """Begin an all_reduce of a contiguous x, in place."""
    if group.handle is None:
        return Arriving(x)
    return Arriving(x, group.channel.start(lambda later: [dist.all_reduce(x, OPERATIONS[op], group=group.handle, async_op=later)], [x]))


def all_gather(x: Tensor, group: Group) -> Tensor:
    """Everybody's x [n, ...], n equal on all members -> [s n, ...]. A group of one returns x itself."""
    return start_all_gather(x, group).get()


def start_all_gather(x: Tensor, group: Group) -> Arriving:
    """Begin an all_gather. x must not be written to before the result is taken."""
    if group.handle is None:
        return Arriving(x)
    x = x.contiguous()
    out = x.new_empty((group.size * x.shape[0], *x.shape[1:]))
    if not x.numel():
        return Arriving(out)
    return Arriving(out, group.channel.start(lambda later: [_GATHER(_plain(out), _plain(x), group=group.handle, async_op=later)], [x, out]))


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """Sum of everybody's x [s n, ...], of which this member gets its n rows. A group of one returns x itself."""
    return start_reduce_scatter(x, group).get()


def start_reduce_scatter(x: Tensor, group: Group) -> Arriving:
    """Begin a reduce_scatter. x must not be written to before the result is taken."""
    if group.handle is None:
        return Arriving(x)
    rows, rest = divmod(x.shape[0], group.size)
    if rest:
        raise ValueError(f"{x.shape[0]} rows can't be scattered over {group.size} ranks")
    x, out = x.contiguous(), x.new_empty((rows, *x.shape[1:]))
    if not x.numel():
        return Arriving(out)
    return Arriving(out, group.channel.start(lambda later: [_SCATTER(out, x, group=group.handle, async_op=later)], [x, out]))


def all_to_all(parts: Sequence[Tensor], group: Group, shapes: Sequence[Sequence[int]] | None = None) -> list[Tensor]:
    """parts[i] goes to member i; returns what the members sent here, in group order.

    All parts everywhere have one dtype and any shapes, empty ones too. `shapes[i]` is that of the part from member i; None: parts[i] and
    it have the same shape. A group of one returns its part itself.
    """
    if len(parts) != group.size:
        raise ValueError(f"{len(parts)} parts for a group of {group.size} ranks")
    if group.handle is None:
        return list(parts)
    arriving = [torch.Size(shape) for shape in (shapes if shapes is not None else [part.shape for part in parts])]
    sizes = [shape.numel() for shape in arriving]
    sent = torch.cat([part.reshape(-1) for part in parts])
    received = sent.new_empty(sum(sizes))
    counts = [part.numel() for part in parts]

    def launch(later: bool) -> list[Any]:
        return [dist.all_to_all_single(_plain(received), _plain(sent), sizes, counts, group=group.handle, async_op=later)]

    group.channel.run(launch, [sent, received])
    return [flat.view(shape) for flat, shape in zip(torch.split(received, sizes), arriving, strict=True)]


def exchange(sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], group: Group) -> list[Wait]:
    """Start sending tensors to members and receiving from members into contiguous buffers, all at once; wait() for each that is returned.

    Two neighbours may send to each other without deadlock. Several tensors for one member arrive in the order of the list. What goes to
    this member itself is copied at once; empty tensors are not sent. Sent tensors may be dropped before the wait, but not written to.
    """
    operations = []
    to_self = [tensor for tensor, member in sends if member == group.index]
    from_self = [buffer for buffer, member in receives if member == group.index]
    for buffer, tensor in zip(from_self, to_self, strict=True):
        buffer.copy_(tensor)
    for function, transfers in ((dist.isend, sends), (dist.irecv, receives)):
        for tensor, member in transfers:
            if member == group.index or not tensor.numel():
                continue
            if function is dist.isend:
                tensor = tensor.contiguous()
            elif not tensor.is_contiguous():
                raise ValueError("a buffer for receiving must be contiguous")
            operations.append(dist.P2POp(function, _plain(tensor.detach()), group.ranks[member], group=group.handle))
    if not operations:
        return []
    return group.channel.start(lambda later: dist.batch_isend_irecv(operations), [operation.tensor for operation in operations])


def broadcast(x: Tensor, group: Group, source: int = 0) -> Tensor:
    """Member `source`'s x, in place on all others; returns x."""
    if group.handle is not None and x.numel():
        whole = x.detach().contiguous()
        group.channel.run(lambda later: [dist.broadcast(_plain(whole), group.ranks[source], group=group.handle, async_op=later)], [whole])
        if whole.data_ptr() != x.data_ptr():
            x.detach().copy_(whole)
    return x


def _plain(x: Tensor) -> Tensor:
    """The same memory in a dtype that every library moves: fp8 as bytes."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 and x.dtype.is_floating_point else x
