"""Gradients of one stage in flat buckets, and their sum over lanes: each lane ends with an equal slice of every bucket.

A bucket has parameters of one dtype that decay alike, in reverse order of use, so that the backward fills one bucket after the other. Its
gradients are one fp32 tensor (fp64 for fp64 parameters); modules may add to it themselves (main_grad.py). Sums over lanes start in the
buckets' order on every lane: as soon as a lane's last backward has filled a bucket and those before it, or at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megadcp.mesh.groups import Group
from megadcp.mesh.streams import Wait
from megadcp.parallel.main_grad import offer, was_added, withdraw
from megadcp.parallel.replicas import Piece
from megadcp.plan.step_plan import StepPlan

ALIGN = 64  # elements: parameters start on borders that fast kernels want
BUCKET_ELEMENTS = 1 << 24

# 2.13 warns at the old name, which is the only one in 2.11
_REDUCE_SCATTER: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass
class Bucket:
    """Which parameters (by index, in reverse order of use) lie where. size: elements with all padding, a multiple of the lanes."""

    dtype: torch.dtype
    decays: bool
    indices: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    size: int = 0

    def add(self, index: int, elements: int) -> None:
        """Place one more parameter behind the others."""
        self.indices.append(index)
        self.offsets.append(self.size)
        self.size += -(-elements // ALIGN) * ALIGN


def lay_out(parameters: Sequence[Tensor], lanes: int, limit: int = BUCKET_ELEMENTS, alone: Sequence[int] = ()) -> list[Bucket]:
    """Buckets for parameters given in order of use, of at most `limit` elements each unless one parameter is larger.

    Matrices decay, vectors don't (nn.gpt.decay_groups). `alone`: indices that get a bucket to themselves. The order is that in which a
    backward fills them.
    """
    done: list[Bucket] = []
    filling: dict[tuple[torch.dtype, bool], Bucket] = {}
    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        key = (parameter.dtype, parameter.ndim >= 2)
        if index in alone:
            done.append(Bucket(*key))
            done[-1].add(index, parameter.numel())
            continue
        if key not in filling or filling[key].size + parameter.numel() > limit:
            filling[key] = Bucket(*key)
            done.append(filling[key])
        filling[key].add(index, parameter.numel())
    for bucket in done:
        bucket.size = -(-bucket.size // (ALIGN * lanes)) * ALIGN * lanes
    return sorted(done, key=lambda bucket: -min(bucket.indices))


def may_overlap(plan: StepPlan, lane: int) -> bool:
    """Whether a lane may start sums over lanes in its last backward.

    It may when the lanes of its last microbatch all have their last one there: then any two ranks start the sums and the operations of their
    common cp groups in one order. Another order can hang where operations of two groups can't run side by side.
    """
    last: dict[int, tuple[int, int, int]] = {}  # lane -> slot, first lane, lanes of its last microbatch
    for one in plan.microbatches:
        for each in range(one.lane, one.lane + one.cp):
            last[each] = max(last.get(each, (-1, 0, 0)), (one.slot, one.lane, one.cp))
    if lane not in last:
        return False
    slot, first, count = last[lane]
    return all(last[each][0] == slot for each in range(first, first + count))


def on_gradient(parameter: nn.Parameter, act: Callable[[Tensor], None]) -> RemovableHandle:
    """Call act(parameter) after each backward that gave it a gradient."""
    register: Callable[[Callable[[Tensor], None]], RemovableHandle] = parameter.register_post_accumulate_grad_hook  # untyped in torch
    return register(act)


class GradientBuckets:
    """The buckets of one rank's trainable parameters. Hooks fill them during each backward; `close` takes the hooks off."""

    def __init__(self, parameters: Sequence[nn.Parameter], lanes: Group, limit: int = BUCKET_ELEMENTS, alone: Sequence[int] = ()) -> None:
        """parameters: in order of use, the same on all lanes; so are `limit` and `alone`."""
        self.parameters, self.lanes = parameters, lanes
        self.buckets = lay_out(parameters, lanes.size, limit, alone)
        self.flats = [
            torch.zeros(bucket.size, dtype=torch.promote_types(bucket.dtype, torch.float32), device=parameters[bucket.indices[0]].device)
            for bucket in self.buckets
        ]
        self.places = {
            index: (number, offset) for number, each in enumerate(self.buckets) for index, offset in zip(each.indices, each.offsets, strict=True)
        }
        self._views = [self._view(index) for index in range(len(parameters))]
        for parameter, view in zip(parameters, self._views, strict=True):
            offer(parameter, view)
        self._numbers = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._started: list[list[Wait]] = []  # of the first buckets; the rest are not started
        self._awaited: list[set[int]] | None = None  # by bucket, parameters whose last gradient is to come; None: more microbatches come
        self._hooks = [on_gradient(parameter, partial(self._arrived, index)) for index, parameter in enumerate(parameters)]

    def _view(self, index: int) -> Tensor:
        number, offset = self.places[index]
        parameter = self.parameters[index]
        return self.flats[number][offset : offset + parameter.numel()].view(parameter.shape)

    def zero(self) -> None:
        """Start a step: all sums zero, nothing under way."""
        self._wait()
        self._awaited = None
        for flat in self.flats:
            flat.zero_()
        for view, parameter in zip(self._views, self.parameters, strict=True):
            # Of the same dtype the backward adds into the bucket by itself.
            parameter.grad = view if view.dtype == parameter.dtype else None

    @torch.no_grad()
    def _arrived(self, index: int, parameter: Tensor) -> None:
        gradient, view = parameter.grad, self._views[index]
        assert gradient is not None
        number = self.places[index][0]
        if number < len(self._started):
            raise RuntimeError("a gradient came after its bucket was sent to the other lanes: `last_microbatch` was called before the last one")
        if was_added(parameter):
            parameter.grad = None
        elif gradient.dtype != view.dtype:
            view.add_(gradient)
            parameter.grad = None
        elif gradient.data_ptr() != view.data_ptr():  # somebody took the bucket's view away
            view.add_(gradient)
            parameter.grad = view
        if self._awaited is not None:
            self._awaited[number].discard(index)
            self._start_full()

    def last_microbatch(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """The next backward is the last of this step on this rank; it reaches `parameters` (None: all), others have all they will get."""
        chosen = set(range(len(self.parameters)))
        if parameters is not None:
            chosen = {self._numbers[id(parameter)] for parameter in parameters if id(parameter) in self._numbers}
        self._awaited = [chosen.intersection(bucket.indices) for bucket in self.buckets]
        self._start_full()

    def _start_full(self) -> None:
        assert self._awaited is not None
        while len(self._started) < len(self.buckets) and not self._awaited[len(self._started)]:
            self._start()

    def _start(self) -> None:
        flat = self.flats[len(self._started)]
        own, lanes = self.slice(flat), self.lanes
        self._started.append(lanes.channel.start(lambda later: [_REDUCE_SCATTER(own, flat, group=lanes.handle, async_op=later)]))

    def finish(self) -> None:
        """Start the sums that are not under way and wait for all: this lane's slices then hold sums over lanes, the rest is worthless."""
        while len(self._started) < len(self.buckets):
            self._start()
        self._wait()

    def _wait(self) -> None:
        for waits in self._started:
            for wait in waits:
                wait.wait()
        self._started.clear()
        self._awaited = None

    def slice(self, flat: Tensor) -> Tensor:
        """The part that this lane keeps of a bucket's flat tensor."""
        size = flat.numel() // self.lanes.size
        return flat[self.lanes.index * size : (self.lanes.index + 1) * size]

    def pieces(self, names: Sequence[str], slices: Sequence[Tensor]) -> list[Piece]:
        """What this lane's slices (one for each bucket, of gradients or of anything laid out like them) hold of each parameter."""
        found = []
        for bucket, values in zip(self.buckets, slices, strict=True):
            begin = self.lanes.index * values.numel()
            for index, offset in zip(bucket.indices, bucket.offsets, strict=True):
                parameter = self.parameters[index]
                first, last = max(begin, offset), min(begin + values.numel(), offset + parameter.numel())
                if first < last:
                    found.append(Piece(names[index], parameter, first - offset, values[first - begin : last - begin]))
        return found

    def close(self) -> None:
        """Take the hooks and sums off the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for parameter, view in zip(self.parameters, self._views, strict=True):
            withdraw(parameter, view)
