"""Sums, gathers and exchanges inside one Group, without autograd. For a group of one rank all of them are local.

All members call the same functions in the same order. Results are in group order. n: rows of one member, s: size of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from megadcp.mesh.groups import Group

OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# 2.13 warns at the old names, which are the only ones in 2.11
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Sum (or max, min) of everybody's x, in place; returns x."""
    if group.handle is not None:
        if x.is_contiguous():
            dist.all_reduce(x, OPERATIONS[op], group=group.handle)
        else:
            whole = x.contiguous()
            dist.all_reduce(whole, OPERATIONS[op], group=group.handle)
            x.copy_(whole)
    return x


def all_gather(x: Tensor, group: Group) -> Tensor:
    """Everybody's x [n, ...], n equal on all members -> [s n, ...]. A group of one returns x itself."""
    if group.handle is None:
        return x
    out = x.new_empty((group.size * x.shape[0], *x.shape[1:]))
    if x.numel():
        _GATHER(_plain(out), _plain(x.contiguous()), group=group.handle)
    return out


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """Sum of everybody's x [s n, ...], of which this member gets its n rows. A group of one returns x itself."""
    if group.handle is None:
        return x
    rows, rest = divmod(x.shape[0], group.size)
    if rest:
        raise ValueError(f"{x.shape[0]} rows can't be scattered over {group.size} ranks")
    out = x.new_empty((rows, *x.shape[1:]))
    if x.numel():
        _SCATTER(out, x.contiguous(), group=group.handle)
    return out


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
    dist.all_to_all_single(_plain(received), _plain(sent), sizes, [part.numel() for part in parts], group=group.handle)
    return [flat.view(shape) for flat, shape in zip(torch.split(received, sizes), arriving, strict=True)]


def exchange(sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], group: Group) -> list[dist.Work]:
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
    return dist.batch_isend_irecv(operations) if operations else []


def broadcast(x: Tensor, group: Group, source: int = 0) -> Tensor:
    """Member `source`'s x, in place on all others; returns x."""
    if group.handle is not None and x.numel():
        whole = x.detach().contiguous()
        dist.broadcast(_plain(whole), group.ranks[source], group=group.handle)
        if whole.data_ptr() != x.data_ptr():
            x.detach().copy_(whole)
    return x


def _plain(x: Tensor) -> Tensor:
    """The same memory in a dtype that every library moves: fp8 as bytes."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 and x.dtype.is_floating_point else x
