"""On which stream the messages of each purpose travel, and who waits for whom.

On a GPU every purpose (cp, tp, pp, dp; copies to the device too) has one stream, made once per run. Whatever group an operation belongs to, it
is started from its purpose's stream, so operations of different groups of one purpose run one after the other, in the order in which this
rank starts them; all ranks start them in the order of the plan. A stream begins an operation once what the computing stream has done until
then is done (its inputs are there, and the memory it writes to is free), and whoever needs the result lets its own stream wait for an event.
The host waits for nothing.

On a CPU there are no streams: an operation is started, and waited for where its result is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

PURPOSES = ("cp", "tp", "pp", "dp", "copy")
URGENT = ("cp", "tp")  # the next kernel waits for these; the others have time


class Wait(Protocol):
    """Something under way. Waiting twice is allowed."""

    def wait(self) -> object:
        """On a GPU the current stream waits, on a CPU the host."""


Launch = Callable[[bool], Iterable[Wait | None]]
"""Starts operations and gives what to wait for. The flag: whether they must return before they are done (False: they are queued on a stream)."""


class Channel:
    """Starts operations of one purpose. This one is for a CPU."""

    stream: Any = None
    """The stream of a GPU; None on a CPU."""

    def start(self, launch: Launch, touched: Sequence[Tensor] = ()) -> list[Wait]:
        """Start it; wait for each of what is returned before reading a result or writing to an input. `touched` stay alive until then."""
        return [wait for wait in launch(True) if wait is not None]

    def run(self, launch: Launch, touched: Sequence[Tensor] = ()) -> None:
        """Start it and wait for it."""
        for wait in self.start(launch, touched):
            wait.wait()


HERE = Channel()


class Pending:
    """Operations that one event stands for. Keeps their tensors: memory that is freed while a stream uses it would be given to another tensor."""

    def __init__(self, api: Any, event: Any, touched: Sequence[Tensor]) -> None:
        self._api, self._event, self._touched = api, event, tuple(touched)

    def wait(self) -> None:
        """Let the current stream wait; from then on freed tensors are safe, as all memory here is given out for the computing stream."""
        self._api.current_stream().wait_event(self._event)
        self._touched = ()

    def synchronize(self) -> None:
        """Let the host wait, as nobody does before a step's end."""
        self._event.synchronize()
        self._touched = ()


class StreamChannel(Channel):
    """Starts operations of one purpose on its stream."""

    def __init__(self, api: Any, stream: Any) -> None:
        self.api, self.stream = api, stream

    def start(self, launch: Launch, touched: Sequence[Tensor] = ()) -> list[Wait]:
        """Queue it behind what the current stream has done until now and behind everything of this purpose."""
        self.stream.wait_stream(self.api.current_stream())
        with self.api.stream(self.stream):
            for wait in launch(False):
                if wait is not None:  # a library that has a stream of its own: this one waits for it
                    wait.wait()
            event = self.stream.record_event()
        return [Pending(self.api, event, touched)]


class Streams:
    """The channels of one run."""

    def __init__(self, device: torch.device, api: Any = None) -> None:
        """api: what has Stream, stream and current_stream as `torch.cuda` does, which is the default on a GPU."""
        self.device = device
        self._channels: dict[str, Channel] = {}
        if api is None and device.type != "cuda":
            return
        api = api or torch.cuda
        for purpose in PURPOSES:
            self._channels[purpose] = StreamChannel(api, api.Stream(device, priority=-1 if purpose in URGENT else 0))

    def channel(self, purpose: str) -> Channel:
        """That of a purpose, the same object each time."""
        if purpose not in PURPOSES:
            raise ValueError(f"nothing travels for {purpose!r}; known: {', '.join(PURPOSES)}")
        return self._channels.get(purpose, HERE)
