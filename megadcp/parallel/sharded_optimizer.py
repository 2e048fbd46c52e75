"""Parameters in the buckets of their gradients, of which each lane updates a slice: the memory of the update is divided by the lanes (ZeRO-1).

After the update every lane gathers the others' slices, bucket by bucket in order of use, while the next forward may begin: a module waits for
the buckets that it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megadcp.mesh.streams import Wait
from megadcp.parallel.buckets import GradientBuckets

# 2.13 warns at the old name, which is the only one in 2.11
_ALL_GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ShardedParameters:
    """Moves the parameters into flat tensors laid out like the gradients' buckets, and holds this lane's slice of what the update changes.

    masters: one flat nn.Parameter for each bucket, without a parameter's shape: the slice of the parameters themselves (4 bytes and more), or
    an fp32 copy of it with their exact values.
    """

    def __init__(self, buckets: GradientBuckets, names: Sequence[str], start: Mapping[str, Tensor]) -> None:
        """start: exact fp32 values of narrow parameters (local tensors) by name; one that is missing starts from the parameter itself."""
        self.buckets, self.names = buckets, names
        self.flats: list[Tensor] = []
        self.masters: list[nn.Parameter] = []
        self._gathering: dict[int, list[Wait]] = {}
        self._hooks: list[RemovableHandle] = []
        for bucket, gradients in zip(buckets.buckets, buckets.flats, strict=True):
            flat = torch.zeros(bucket.size, dtype=bucket.dtype, device=gradients.device)
            exact = flat if gradients.dtype == bucket.dtype else torch.zeros_like(gradients)
            for index, offset in zip(bucket.indices, bucket.offsets, strict=True):
                parameter = buckets.parameters[index]
                place = slice(offset, offset + parameter.numel())
                if exact is not flat:
                    exact[place] = start.get(names[index], parameter).detach().reshape(-1)
                flat[place] = parameter.detach().reshape(-1)
                parameter.data = flat[place].view(parameter.shape)
            own = buckets.slice(exact)
            self.flats.append(flat)
            self.masters.append(nn.Parameter(own if exact is flat else own.clone()))  # a clone: the rest of `exact` is not kept

    @torch.no_grad()
    def publish(self) -> None:
        """After an update: round this lane's masters and start gathering everybody's slices, in order of use."""
        for number in reversed(range(len(self.flats))):
            flat, master = self.flats[number], self.masters[number]
            own = self.buckets.slice(flat)
            if own.dtype != master.dtype:
                own.copy_(master)
            self._gathering[number] = self._start(flat, own)

    def _start(self, flat: Tensor, own: Tensor) -> list[Wait]:
        lanes = self.buckets.lanes
        return lanes.channel.start(lambda later: [_ALL_GATHER(flat, own, group=lanes.handle, async_op=later)])

    def wait(self, numbers: Sequence[int] | None = None) -> None:
        """Wait until the parameters of these buckets (None: all) are there."""
        for number in list(self._gathering) if numbers is None else numbers:
            for wait in self._gathering.pop(number, ()):
                wait.wait()

    def attach(self, model: nn.Module) -> None:
        """Make every module wait for its own parameters and for those of the module after it, before its forward.

        So a module that is never called (an LM head whose matrix the loss reads) must come, in the model's order, right behind one that is.
        """
        numbers = {id(parameter): self.buckets.places[index][0] for index, parameter in enumerate(self.buckets.parameters)}
        read = [
            (module, sorted({numbers[id(parameter)] for parameter in module.parameters(recurse=False) if id(parameter) in numbers}))
            for module in model.modules()
        ]
        read = [(module, needed) for module, needed in read if needed]
        for place, (module, needed) in enumerate(read):
            after = read[place + 1][1] if place + 1 < len(read) else []
            self._hooks.append(module.register_forward_pre_hook(self._waiter([*needed, *after])))

    def _waiter(self, numbers: list[int]) -> Callable[[nn.Module, Any], None]:
        def wait(module: nn.Module, inputs: Any) -> None:
            if self._gathering:
                self.wait(numbers)

        return wait

    def close(self) -> None:
        """Wait for what is under way and take the hooks off the modules."""
        self.wait()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
