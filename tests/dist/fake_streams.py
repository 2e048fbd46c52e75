"""CUDA streams and events that are only written down, and a watch that finds tensors which two streams touch without an order between them.

Operations run at once on the CPU, in the order in which they are queued: one of the orders that a GPU may take. The watch knows which others
it may take: each stream runs in order, an event carries what its stream had done when it was recorded to the streams that wait for it.
A tensor's memory counts as one place, also after it was freed and given to another tensor: on a GPU that is how races come about.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Clock = dict[int, int]  # stream -> operations of it that are known to be done


@dataclass
class FakeEvent:
    api: FakeCuda
    clock: Clock

    def synchronize(self) -> None:
        """The host waits: all that it queues from now on comes after."""
        self.api.host_waits += 1
        for stream in self.api.streams:
            stream.wait_event(self)


class FakeStream:
    def __init__(self, api: FakeCuda, number: int, priority: int) -> None:
        self.api, self.number, self.priority = api, number, priority
        self.clock: Clock = {number: 0}

    def record_event(self) -> FakeEvent:
        return FakeEvent(self.api, dict(self.clock))

    def wait_event(self, event: FakeEvent) -> None:
        for stream, count in event.clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), count)

    def wait_stream(self, other: FakeStream) -> None:
        self.wait_event(other.record_event())

    def tick(self) -> int:
        self.clock[self.number] += 1
        return self.clock[self.number]


class FakeCuda:
    """What streams.Streams takes for `torch.cuda`."""

    def __init__(self) -> None:
        self.streams: list[FakeStream] = []
        self.entered = 0
        self.host_waits = 0
        self.current = self.Stream(None)

    def Stream(self, device: Any = None, priority: int = 0) -> FakeStream:
        self.streams.append(FakeStream(self, len(self.streams), priority))
        return self.streams[-1]

    def current_stream(self) -> FakeStream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        self.entered += 1
        try:
            yield
        finally:
            self.current = before


@dataclass(frozen=True)
class Operation:
    """A collective, or a message to or from a member of a group. start: those of one batch have the same."""

    start: int
    stream: int
    name: str
    group: str
    message: tuple[int, int] | None  # members that send and receive


@dataclass
class _Touch:
    stream: int
    count: int
    what: str


class Watch(TorchDispatchMode):
    """Notes what each operation reads and writes, on the stream that is current. `races` are the pairs without an order."""

    def __init__(self, api: FakeCuda) -> None:
        super().__init__()
        self.api = api
        self.races: list[str] = []
        self.operations = 0
        self.log: list[Operation] = []
        self.beside: Counter[int] = Counter()  # stream -> computing operations that need not wait for what is under way there
        self._inside = -1
        self._writes: dict[int, _Touch] = {}
        self._reads: dict[int, dict[int, _Touch]] = {}
        self._owners: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        schema = func._schema
        if schema.name.startswith("c10d::"):
            self._inside = self.api.entered
            self.log.append(self._operation(schema.name, args))
        elif self.api.current.number and self._inside == self.api.entered:
            return out  # what gloo does with tensors of its own
        if not func.is_view:
            written, read = [], []
            for place, argument in enumerate(schema.arguments):
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                writes = argument.alias_info is not None and argument.alias_info.is_write
                (written if writes else read).extend(_tensors(value))
            if not any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns):
                written += _tensors(out)
            if schema.name.startswith("c10d::"):  # their schemas don't say what they write
                tensors = read + written
                split = {"c10d::send": 0, "c10d::_allgather_base_": 1, "c10d::_reduce_scatter_base_": 1, "c10d::alltoall_base_": 1}
                written, read = tensors[: split.get(schema.name, len(tensors))], tensors[split.get(schema.name, len(tensors)) :]
            self._allocated(_tensors(out), _tensors(list(args)) + _tensors(list(kwargs.values())))
            self.touch(read, written, schema.name)
        return out

    def _operation(self, name: str, args: Any) -> Operation:
        group = next(dist.ProcessGroup.unbox(one) for one in args if isinstance(one, torch.ScriptObject) and "ProcessGroup" in str(one._type()))
        me, other = group.rank(), next((one for one in args if isinstance(one, int)), -1)
        message = {"c10d::send": (me, other), "c10d::recv_": (other, me)}.get(name)
        return Operation(self.api.entered, self.api.current.number, name, group.group_name, message)

    def _allocated(self, out: list[Tensor], given: list[Tensor]) -> None:
        """Forget memory that comes from another stream: a GPU's allocator hands memory out to the stream that it was first given to."""
        old = {_place(tensor) for tensor in given}
        for place in {_place(tensor) for tensor in out} - old:
            if self._owners.get(place, self.api.current.number) != self.api.current.number:
                self._writes.pop(place, None)
                self._reads.pop(place, None)
            self._owners[place] = self.api.current.number

    def touch(self, read: list[Tensor], written: list[Tensor], what: str) -> None:
        stream = self.api.current
        now = _Touch(stream.number, stream.tick(), what)
        self.operations += 1
        if not stream.number:
            for other in self.api.streams[1:]:
                self.beside[other.number] += other.clock[other.number] > stream.clock.get(other.number, 0)
        places = {_place(tensor) for tensor in written if tensor.numel()}
        for place in {_place(tensor) for tensor in read if tensor.numel()} - places:
            self._ordered(stream, self._writes.get(place), now)
            self._reads.setdefault(place, {})[stream.number] = now
        for place in places:
            self._ordered(stream, self._writes.get(place), now)
            for touch in self._reads.pop(place, {}).values():
                self._ordered(stream, touch, now)
            self._writes[place] = now

    def _ordered(self, stream: FakeStream, before: _Touch | None, now: _Touch) -> None:
        if before is not None and stream.clock.get(before.stream, 0) < before.count:
            self.races.append(f"{before.what} on stream {before.stream} and {now.what} on stream {now.stream}")


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for one in value for tensor in _tensors(one)]
    return []
