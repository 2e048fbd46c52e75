"""What each lane gets of a step: its share of shared packs (public cases C31, C33) and its own packs, in slot order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from order_helpers import data_config, write_lengths

from megadcp.data.batch import LoadedStep, Pack, StepLoader, build_pack, lane_packs, lane_share, split_for_lanes
from megadcp.data.order import DocumentSource, StepDocuments, open_training
from megadcp.data.step_documents import IGNORE
from megadcp.plan.step_plan import Layout, Microbatch, ModelShape, Profile, StepPlan

MODEL = ModelShape(1, 8, 1, 1, 8, 8, 16, False, False)
PROFILE = Profile(*(1.0,) * 12, loss_chunk=1, gpus_per_node=1, reduce_bytes=1.0, reduce_overlap=1.0, memory_bandwidth=1.0)


def whole_pack(lengths: list[int], cp: int, extra: int = 0) -> Pack:
    """Tokens and labels name their places."""
    padded = np.array([-(-length // (2 * cp)) * 2 * cp + 2 * cp * extra for length in lengths])
    borders = np.concatenate([[0], np.cumsum(padded)])
    rows = int(borders[-1])
    labels = np.full(rows, IGNORE)
    for start, length in zip(borders, lengths, strict=False):
        labels[start : start + max(length - 1, 0)] = np.arange(start + 1, start + max(length, 1)) + 1000
    positions = np.concatenate([np.arange(size) for size in padded])
    return Pack(
        np.arange(rows), labels, positions, borders.astype(np.int32), int(padded.max()), np.arange(len(lengths)), np.array(lengths),
        tuple(borders.tolist()),
    )  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6), cp=st.sampled_from([1, 2, 4, 8]), extra=st.integers(0, 1))
def test_shares_follow_the_index_of_the_zigzag(lengths: list[int], cp: int, extra: int) -> None:
    """Local row j of a document with m rows here stands at j + start + m / 2 * (index in the first half, else 2 (cp - 1) - index)."""
    pack = whole_pack(lengths, cp, extra)
    shares = split_for_lanes(pack, cp)
    assert len(shares) == cp
    for index, share in enumerate(shares):
        rows = []
        for start, end in zip(pack.cu_seqlens_list, pack.cu_seqlens_list[1:], strict=False):
            if cp == 1:
                rows += list(range(start, end))
                continue
            local = (end - start) // cp
            rows += [start + j + local // 2 * (index if j < local // 2 else 2 * (cp - 1) - index) for j in range(local)]
        assert share.tokens.tolist() == rows
        for name in ("labels", "positions"):
            assert getattr(share, name).tolist() == getattr(pack, name)[rows].tolist()
        assert share.cu_seqlens_list == tuple(border // cp for border in pack.cu_seqlens_list)
        assert share.cu_seqlens.tolist() == list(share.cu_seqlens_list)
        assert share.max_length == max(np.diff(share.cu_seqlens_list))
        assert share.real_lengths.tolist() == lengths
        assert share.document_ids.tolist() == pack.document_ids.tolist()
        assert (share.tokens.dtype, share.labels.dtype, share.positions.dtype, share.cu_seqlens.dtype) == (np.int64, np.int64, np.int64, np.int32)
    together = np.concatenate([share.tokens for share in shares])
    assert sorted(together.tolist()) == list(range(len(pack.tokens)))


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_every_token_keeps_its_position_and_target(cp: int) -> None:
    """C33: put together, each token has its place in its document, whatever the cp size; one document twice as long as another."""
    pack = whole_pack([16, 32, 9], cp)
    shares = split_for_lanes(pack, cp)
    rows = np.argsort(np.concatenate([share.tokens for share in shares]))
    for name in ("positions", "labels"):
        assert np.concatenate([getattr(share, name) for share in shares])[rows].tolist() == getattr(pack, name).tolist()


@pytest.mark.parametrize("cp", [2, 4])
def test_targets_are_counted_once_wherever_they_are(cp: int) -> None:
    """C31: one valid target, and targets in one half only."""
    pack = whole_pack([32], cp)
    for kept in (slice(5, 6), slice(0, 10), slice(20, 31)):
        labels = np.full_like(pack.labels, IGNORE)
        labels[kept] = pack.labels[kept]
        counts = [int((share.labels != IGNORE).sum()) for share in split_for_lanes(replace(pack, labels=labels), cp)]
        assert sum(counts) == kept.stop - kept.start


def test_a_lane_with_padding_only() -> None:
    """Three tokens on four lanes: the last one has no token, but the shapes of all."""
    share = lane_share(whole_pack([3], 4), 4, 3)
    assert share.labels.tolist() == [IGNORE, IGNORE]
    assert share.positions.tolist() == [3, 4]
    assert share.real_lengths.tolist() == [3]


def test_rows_that_make_no_zigzag_are_refused() -> None:
    with pytest.raises(ValueError, match=r"18 padded tokens can't be cut into 2 \* 4 equal chunks"):
        split_for_lanes(whole_pack([18], 1), 4)


# ------------------------------------------------------------------------------------------------------------ StepLoader
LANES = 4


def mixed(documents: StepDocuments) -> StepPlan:
    """Slot 0: cp 4; slot 1: cp 2 on lanes 0 and 1, cp 1 on lane 3, lane 2 idle; slot 2: cp 1 on every lane, several documents on lane 2."""
    lengths = documents.lengths.tolist()
    count = len(lengths)

    def microbatch(slot: int, lane: int, cp: int, chosen: list[int]) -> Microbatch:
        unit = 2 * cp if cp > 1 else 1
        return Microbatch(slot, lane, cp, tuple(chosen), tuple(-(-lengths[one] // unit) * unit for one in chosen))

    first = [microbatch(2, 0, 1, [0]), microbatch(2, 1, 1, [1]), microbatch(2, 2, 1, [2, 3]), microbatch(2, 3, 1, [4])]
    plans = (*first, microbatch(1, 3, 1, [5]), microbatch(1, 0, 2, [6, 7]), microbatch(0, 0, 4, list(range(8, count))))
    return StepPlan(documents.step, Layout(LANES, LANES), "none", (1,), MODEL, "fp32", 1, PROFILE, tuple(lengths), plans)


@pytest.fixture
def source(tmp_path: Path) -> DocumentSource:
    return open_training(data_config(write_lengths(tmp_path / "c", list(range(3, 40)), first_token=1), tokens_per_step=220), 100)


class Counting:
    """A source that notes which documents are read."""

    def __init__(self, source: DocumentSource) -> None:
        self.source, self.read_ids = source, []  # type: ignore[var-annotated]
        self.step = source.step

    def fill(self, ids: np.ndarray, *rest: np.ndarray) -> None:
        self.read_ids += ids.tolist()
        self.source.fill(ids, *rest)


@pytest.mark.parametrize("ahead", [0, 2])
def test_lanes_together_have_every_document_once(source: DocumentSource, ahead: int) -> None:
    steps: list[list[LoadedStep]] = []
    for lane in range(LANES):
        counting = Counting(source)
        with StepLoader(counting, mixed, 0, 4, ahead, lane, LANES) as loader:  # type: ignore[arg-type]
            steps.append(list(loader))
        plans = [step.plan for step in steps[-1]]
        own = [one for plan in plans for one in plan.microbatches if one.lane <= lane < one.lane + one.cp]
        assert len(counting.read_ids) == sum(len(one.documents) for one in own)  # only what it takes part in

    for of_lanes in zip(*steps, strict=True):
        documents = of_lanes[0].documents
        assert len(documents.ids) >= 9
        assert [len(step.packs) for step in of_lanes] == [3, 3, 2, 3]
        expected = {}  # token -> (position, label) of all documents of the step
        for document in documents.ids.tolist():
            text, labels = source.read(document)
            expected |= {token: (place, label) for place, (token, label) in enumerate(zip(text.tolist(), labels.tolist(), strict=True))}
        found = [
            (token, (position, label))
            for step in of_lanes
            for pack in step.packs
            for token, position, label in zip(pack.tokens.tolist(), pack.positions.tolist(), pack.labels.tolist(), strict=True)
            if token  # 0 is padding here
        ]
        assert len(found) == len(expected)
        assert dict(found) == expected


def test_a_lane_gets_its_packs_in_slot_order(source: DocumentSource) -> None:
    documents = source.step(0)
    plan = mixed(documents)
    whole = {(one.slot, one.lane): build_pack(source, documents, one) for one in plan.microbatches}
    packs = lane_packs(source, documents, plan, 1)
    expected = [lane_share(whole[0, 0], 4, 1), lane_share(whole[1, 0], 2, 1), whole[2, 1]]
    assert [pack.tokens.tolist() for pack in packs] == [pack.tokens.tolist() for pack in expected]
    assert [pack.cu_seqlens_list for pack in packs] == [pack.cu_seqlens_list for pack in expected]
    (first, last) = lane_packs(source, documents, plan, 2)
    assert first.tokens.tolist() == lane_share(whole[0, 0], 4, 2).tokens.tolist()
    assert last.tokens.tolist() == whole[2, 2].tokens.tolist()


def test_wrong_lanes_are_refused(source: DocumentSource) -> None:
    for lane, lanes in ((4, 4), (-1, 4), (0, 0)):
        with pytest.raises(ValueError, match=f"there is no lane {lane} among {lanes}"):
            StepLoader(source, mixed, 0, 1, 0, lane, lanes)
    for ahead in (0, 1):
        with (
            StepLoader(source, mixed, 0, 1, ahead) as loader,
            pytest.raises(ValueError, match="the plan of step 0 is for 4 lanes, but this loader is for one of 1"),
        ):
            next(loader)
