"""After a step's microbatches: gradients summed over ranks, by one sum for plain parameters, by FSDP2 itself where it shards them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megadcp.config.check import UserError
from megadcp.mesh.groups import GroupPool
from megadcp.parallel.collectives import all_reduce

BUCKET = 1 << 24  # elements of one sum
HALF = (torch.bfloat16, torch.float16)


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that get gradients, each once, in the model's order."""
    return [each for each in model.parameters() if each.requires_grad]


def require_no_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """UserError if an earlier step's gradients are still there: they would be summed over ranks twice."""
    if any(each.grad is not None and bool(_local(each.grad).any()) for each in parameters):
        raise UserError("gradients of an earlier step are still there when a step begins; call optimizer.zero_grad() before its microbatches")


def sum_gradients(parameters: Sequence[nn.Parameter], mine: Tensor, pool: GroupPool | None) -> Tensor:
    """Sum all ranks' gradients in place, half formats in fp32; `mine` (fp64 [n], any numbers) is summed along and returned.

    A parameter that got a gradient on some rank has one everywhere after; one that got none anywhere keeps none, as in one process.
    """
    if pool is None or pool.world.size == 1:
        return mine
    have = torch.tensor([each.grad is not None for each in parameters], dtype=torch.float64, device=mine.device)
    row = all_reduce(torch.cat((mine, have)), pool.world)
    somewhere = row[len(mine) :].tolist()
    taking = [each for each, count in zip(parameters, somewhere, strict=True) if count]
    for each in taking:
        if each.grad is None:
            each.grad = torch.zeros_like(each)
    for bucket in _buckets([each.grad for each in taking if each.grad is not None]):
        wide = torch.float32 if bucket[0].dtype in HALF else bucket[0].dtype
        flat = all_reduce(torch.cat([grad.reshape(-1).to(wide) for grad in bucket]), pool.world)
        for grad, part in zip(bucket, torch.split(flat, [grad.numel() for grad in bucket]), strict=True):
            grad.copy_(part.view_as(grad))
    return row[: len(mine)]


def _buckets(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    """Neighbours of one format, up to BUCKET elements each (one larger gradient has a bucket of its own)."""
    found: list[list[Tensor]] = []
    size = 0
    for grad in gradients:
        if not found or found[-1][0].dtype != grad.dtype or size + grad.numel() > BUCKET:
            found.append([])
            size = 0
        found[-1].append(grad)
        size += grad.numel()
    return found


def same_weights(model: nn.Module, pool: GroupPool | None) -> None:
    """Everybody takes rank 0's parameters and buffers. What FSDP2 shards is left as it is."""
    if pool is None or pool.world.handle is None:
        return
    with torch.no_grad():
        for each in [*model.parameters(), *model.buffers()]:
            if not hasattr(each, "to_local"):
                whole = each.detach().contiguous()
                dist.broadcast(whole, 0, group=pool.world.handle)
                each.copy_(whole)


def _local(x: Tensor) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x


# ----------------------------------------------------------------------------------------------------------------- FSDP2
def fsdp_modules(model: nn.Module) -> list[Any]:
    """What torch.distributed.fsdp.fully_shard was applied to."""
    return [each for each in model.modules() if any(base.__name__ == "FSDPModule" for base in type(each).__mro__)]


def prepare_fsdp(model: nn.Module) -> Callable[[], None]:
    """Sums in place of means, and weights that stay whole from the first microbatch of a step to its last; gives what undoes it.

    FSDP2 gathers and reduces in each forward and backward, which hangs when ranks run different numbers of them. So microbatches run on whole
    weights and add to whole gradients, and the same last one on every rank reduces: of the optimizer, all is sharded.
    """
    root: Any = model
    if not fsdp_modules(root)[:1] == [root]:
        raise UserError("fully_shard was applied to parts of the model, but not to the model itself; call fully_shard(model) last")
    root.set_reshard_after_forward(False, recurse=True)
    for each in fsdp_modules(root):
        _sums(each, 1.0, True)

    def undo() -> None:
        """FSDP2's defaults: it can't be asked what it was told before."""
        reduce_in_backward(root, True)
        for each in fsdp_modules(root):
            each.set_reshard_after_forward(each is not root, recurse=False)
            meshes = [parameter.device_mesh for parameter in each.parameters() if hasattr(parameter, "device_mesh")]
            if meshes:
                _sums(each, float(meshes[0].size()), False)

    return undo


def _sums(module: Any, divide: float, forced: bool) -> None:
    module.set_gradient_divide_factor(divide)
    if hasattr(module, "set_force_sum_reduction_for_comms"):
        module.set_force_sum_reduction_for_comms(forced)


def reduce_in_backward(model: nn.Module, last: bool) -> None:
    """Whether the next backward reduces gradients and gives whole weights up."""
    root: Any = model
    root.set_requires_gradient_sync(last, recurse=True)
    root.set_reshard_after_backward(last, recurse=True)
