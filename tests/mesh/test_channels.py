"""Who waits for whom, on streams that are only written down."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from fake_streams import FakeCuda

from megadcp.mesh.coords import Mesh
from megadcp.mesh.groups import GroupPool
from megadcp.mesh.streams import HERE, PURPOSES, URGENT, Channel, Streams

CPU = torch.device("cpu")


class Work:
    """An operation on a stream of the library's own: waiting makes the current stream wait."""

    def __init__(self, api: FakeCuda) -> None:
        self.api, self.waited = api, []
        self.event = None
        self.stream = api.Stream()

    def launch(self, later: bool) -> list[Work]:
        assert not later
        self.stream.wait_stream(self.api.current)
        self.stream.tick()
        self.event = self.stream.record_event()
        return [self]

    def wait(self) -> None:
        self.api.current.wait_event(self.event)


def test_one_stream_for_each_purpose():
    api = FakeCuda()
    streams = Streams(CPU, api)
    made = [streams.channel(purpose).stream for purpose in PURPOSES]
    assert len({id(one) for one in made}) == len(PURPOSES) == len(api.streams) - 1
    assert streams.channel("cp") is streams.channel("cp")
    assert {purpose for purpose, stream in zip(PURPOSES, made, strict=True) if stream.priority < 0} == set(URGENT)
    with pytest.raises(ValueError, match="known: cp, tp"):
        streams.channel("ep")


def test_on_a_cpu_there_are_none():
    assert all(Streams(CPU).channel(purpose) is HERE for purpose in PURPOSES)
    assert HERE.stream is None
    with GroupPool(Mesh(1), 0, CPU) as pool:
        assert pool.streams.channel("cp") is HERE


def test_an_operation_begins_behind_what_was_computed_and_the_result_is_waited_for():
    api = FakeCuda()
    computing, channel, work = api.current, Streams(CPU, api).channel("cp"), Work(api)
    made = computing.tick()
    (pending,) = channel.start(work.launch)
    assert work.stream.clock[computing.number] == made
    beside = computing.tick()
    assert computing.clock.get(work.stream.number, 0) == 0  # nobody has waited yet
    assert channel.stream.clock[computing.number] == made < beside
    pending.wait()
    assert computing.clock[work.stream.number] == 1
    pending.wait()
    assert api.current is computing


def test_groups_of_one_purpose_follow_each_other_without_the_computing_stream():
    """The last operation of one group is done before the next group's first, though nobody has waited for it."""
    api = FakeCuda()
    channel, first, second, other = Streams(CPU, api).channel("cp"), Work(api), Work(api), Work(api)
    channel.start(first.launch)
    channel.start(second.launch)
    assert second.stream.clock[first.stream.number] == 1
    Streams(CPU, api).channel("tp").start(other.launch)  # another purpose need not wait
    assert first.stream.number not in other.stream.clock


def test_whoever_waits_is_the_stream_that_is_current_then():
    api = FakeCuda()
    work, aside = Work(api), api.Stream()
    (pending,) = Streams(CPU, api).channel("dp").start(work.launch)
    with api.stream(aside):
        pending.wait()
    assert aside.clock[work.stream.number] == 1
    assert work.stream.number not in api.current.clock


def test_tensors_live_until_they_are_waited_for():
    api, x = FakeCuda(), torch.ones(3)
    seen = weakref.ref(x)
    (pending,) = Streams(CPU, api).channel("dp").start(Work(api).launch, [x])
    del x
    gc.collect()
    assert seen() is not None
    pending.wait()
    gc.collect()
    assert seen() is None


def test_on_a_cpu_operations_are_started_and_waited_for_later():
    done, flags = [], []

    class Soon:
        def wait(self) -> None:
            done.append(1)

    def launch(later: bool) -> list[Soon | None]:
        flags.append(later)
        return [Soon(), None, Soon()]

    waits = Channel().start(launch)
    assert (len(waits), done, flags) == (2, [], [True])
    Channel().run(launch)
    assert done == [1, 1]
