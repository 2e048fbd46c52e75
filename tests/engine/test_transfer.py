"""Microbatches on their way to the device: the same arrays, one ahead of the one that runs."""

from __future__ import annotations

import engine_helpers as helpers
import numpy as np
import pytest
import torch
from fake_streams import FakeCuda, Watch

from megadcp.engine.transfer import WIDE, Transfer, Transfers, to_device
from megadcp.mesh.streams import HERE, Streams
from megadcp.nn.backend import PackedTokens

GROUPS = [[2], [4, 0], [5, 3, 1]]


def packs():
    documents, plan = helpers.RandomDocuments(masked=[3]), helpers.plan_of(GROUPS)
    return dict(enumerate(helpers.packs_of(plan, documents)))


def check(batch: PackedTokens, pack) -> None:
    for name in (*WIDE, "cu_seqlens"):
        found = getattr(batch, name)
        assert found.is_contiguous()
        assert np.array_equal(found.numpy(), getattr(pack, name))
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.cu_seqlens_list == pack.cu_seqlens_list
    assert batch.real_lengths_list == tuple(pack.real_lengths.tolist())
    assert batch.max_length == pack.max_length
    assert batch.memo == {}


@pytest.mark.parametrize("number", [0, 1, 2])  # of documents 1, 2 and 3: borders of even and of odd number
def test_one_copy_holds_all_arrays(number):
    api, pack = FakeCuda(), packs()[number]
    transfer = Transfer(pack, helpers.CPU, Streams(helpers.CPU, api).channel("copy"))
    batch = transfer.get()
    check(batch, pack)
    assert len({getattr(batch, name).untyped_storage().data_ptr() for name in (*WIDE, "cu_seqlens")}) == 1
    check(to_device(pack, helpers.CPU), pack)


def test_the_next_one_travels_while_one_is_used():
    api, all_packs = FakeCuda(), packs()
    channel = Streams(helpers.CPU, api).channel("copy")
    with Watch(api) as watch:
        transfers = Transfers(all_packs, [2, 0, 1], helpers.CPU, channel)
        assert channel.stream.clock[channel.stream.number] == 1
        first = transfers.take(2)
        assert api.current.clock[channel.stream.number] == 1  # waited for the first
        assert channel.stream.clock[channel.stream.number] == 2  # .. and the second is on its way
        first.tokens.add(1)
        second = transfers.take(0)
        third = transfers.take(1)
        third.labels.add(1)
    assert watch.races == []
    for slot, batch in ((2, first), (0, second), (1, third)):
        check(batch, all_packs[slot])
    with pytest.raises(KeyError):
        transfers.take(1)


def test_reading_before_the_copy_is_waited_for_is_seen():
    api, pack = FakeCuda(), packs()[0]
    with Watch(api) as watch:
        transfer = Transfer(pack, helpers.CPU, Streams(helpers.CPU, api).channel("copy"))
        transfer._whole.add(1)
    assert len(watch.races) == 1


def test_a_lane_without_microbatches_needs_nothing():
    Transfers({}, [], helpers.CPU, HERE)
