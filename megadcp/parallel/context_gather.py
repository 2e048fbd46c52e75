"""Context parallelism by gathering all keys and values on every member.

Forward: gather k and v, put them into the pack's order, and let each chunk of queries see what stands before its end. Backward: gather again
(nothing gathered is kept), compute the gradient of all keys and values in the wide format, and scatter its sum over the members.

Legend: t rows of this member, P members, H query heads, G kv heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megadcp.parallel import collectives
from megadcp.parallel.block_attention import Gradients, Running
from megadcp.parallel.context_share import Share
from megadcp.parallel.context_tiles import gather_tiles


class _GatheredAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, share: Share) -> Tensor:
        whole = _gather(k, v, share)
        running = Running(q, share.memo)
        running.add(q, whole[:, 0], whole[:, 1], _tiles(share), first=True)
        out = running.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, running.lse)
        ctx.share = share
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        share: Share = ctx.share
        whole = _gather(k, v, share)
        sums = Gradients(grads[0], q, out, lse, share.memo)
        d_whole = torch.zeros(whole.shape, dtype=lse.dtype, device=q.device)
        sums.add(whole[:, 0], whole[:, 1], d_whole[:, 0], d_whole[:, 1], _tiles(share))
        d_own = collectives.reduce_scatter(d_whole[share.order(share.group.size)], share.group).to(k.dtype)
        return sums.dq.to(q.dtype), d_own[:, 0].contiguous(), d_own[:, 1].contiguous(), None


def _tiles(share: Share) -> Any:
    return gather_tiles(share.borders, share.lengths, share.group.size, share.group.index)


def _gather(k: Tensor, v: Tensor, share: Share) -> Tensor:
    """[P t, 2, G, d] in the pack's order."""
    by_member = collectives.all_gather(torch.stack((k, v), 1), share.group)
    whole = torch.empty_like(by_member)
    whole[share.order(share.group.size)] = by_member
    return whole


gathered_attention: Callable[[Tensor, Tensor, Tensor, Share], Tensor] = _GatheredAttention.apply
