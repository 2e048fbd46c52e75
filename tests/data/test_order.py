"""Documents mode: the global order, its cut into steps, blends, validation sets, and the cache (public cases C11, C13, C15, C17)."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from order_helpers import data_config, ids_of, places, write_lengths

from megadcp.config.check import UserError
from megadcp.config.schema import SourceConfig
from megadcp.data import shuffle
from megadcp.data.order import open_training, open_validation
from megadcp.data.shuffle import epoch_keys, mix
from megadcp.data.step_documents import IGNORE

WORD = (1 << 64) - 1


def silent(text: str) -> None:
    raise AssertionError(f"nothing should be said, but: {text}")


def mix_of(value: int) -> int:
    """Splitmix64's output function in plain integers."""
    value &= WORD
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & WORD
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & WORD
    return value ^ value >> 31


def key_of(seed: int, epoch: int, document: int) -> int:
    """The key of one document, as documented."""
    golden = 0x9E3779B97F4A7C15
    return mix_of(mix_of(mix_of(seed + golden) + epoch * golden) + document * golden)


def test_the_hash_is_fixed_for_ever() -> None:
    """Reference values of splitmix64 with seed 0, and of our keys: if these change, runs can't be resumed."""
    states = np.arange(1, 4, dtype=np.uint64) * shuffle.GOLDEN
    assert [int(value) for value in mix(states)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    keys = epoch_keys(-1234, np.array([0, 3]), np.array([0, 5 << 16], dtype=np.int64))
    assert keys.tolist() == [[key_of(-1234, epoch, one) for one in (0, 5 << 16)] for epoch in (0, 3)]


def test_an_order_is_fixed_for_ever(tmp_path: Path) -> None:
    source = open_training(data_config(write_lengths(tmp_path / "c", [3, 4, 5, 6, 7]), tokens_per_step=25), 4)
    assert [[document for _, document, _ in places(source.step(index))] for index in range(3)] == [[0, 1, 3, 2, 4], [2, 3, 1, 0, 4], [4, 1, 3, 0, 2]]


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=40).filter(any),
    max_length=st.integers(1, 30),
    extra=st.integers(0, 60),
    seed=st.integers(-5, 1 << 40),
    small_block=st.integers(1, 200),
    stride=st.sampled_from([1, 2, 8]),
)
def test_every_epoch_holds_every_piece_once_and_steps_cover_everything(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], max_length: int, extra: int, seed: int, small_block: int, stride: int
) -> None:
    """Plain definition: write the epochs down one after the other, cut by the offset at which a piece starts."""
    prefix = write_lengths(tmp_path_factory.mktemp("order") / "c", lengths)
    budget = min(max_length, max(lengths)) + extra
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shuffle, "SMALL_BLOCK", small_block)
        patch.setattr(shuffle, "STRIDE", stride)
        patch.setattr(shuffle, "BLOCK", stride * 4)
        source = open_training(data_config(prefix, max_length=max_length, tokens_per_step=budget, seed=seed), 1)
        steps = [source.step(index) for index in range(12)]
        again = open_training(data_config(prefix, max_length=max_length, tokens_per_step=budget, seed=seed), 1)
        backwards = {index: again.step(index) for index in reversed(range(12))}  # seek(k) equals iterating
    tokens = sum(lengths)
    pieces = sum(-(-length // max_length) for length in lengths)
    ids, sizes = np.concatenate([step.ids for step in steps]), np.concatenate([step.lengths for step in steps])
    starts = np.cumsum(sizes) - sizes
    owner = np.repeat(np.arange(12), [len(step.ids) for step in steps])
    assert (owner == starts // budget).all()
    for epoch in range(len(ids) // pieces):
        part = slice(epoch * pieces, (epoch + 1) * pieces)
        assert len(set(ids[part].tolist())) == pieces
        assert int(sizes[part].sum()) == tokens
    for index, step in enumerate(steps):
        assert len(step.ids) >= 1
        assert step.step == index
        assert step.epoch == starts[owner == index][0] / tokens
        assert np.array_equal(step.ids, backwards[index].ids)
        assert np.array_equal(step.lengths, backwards[index].lengths)


def test_blocks_do_not_change_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many epochs are made at a time is an inner matter: SMALL_BLOCK and STRIDE must not show."""
    data = data_config(write_lengths(tmp_path / "c", [3, 4, 5, 6, 7, 8, 9]), tokens_per_step=10)
    expected = ids_of(open_training(data, 1), 60)
    for small_block, stride in ((1, 2), (20, 256), (1 << 16, 1)):
        monkeypatch.setattr(shuffle, "SMALL_BLOCK", small_block)
        monkeypatch.setattr(shuffle, "STRIDE", stride)
        assert np.array_equal(ids_of(open_training(data, 1), 60), expected)


def test_epochs_and_seeds_differ_and_are_well_mixed(tmp_path: Path) -> None:
    """4,000 documents: positions in two epochs, two seeds and the file are uncorrelated (|r| < 5 / sqrt(n))."""
    count = 4000
    prefix = write_lengths(tmp_path / "c", [2] * count)
    orders = []
    for seed in (1, 2):
        source = open_training(data_config(prefix, seed=seed, tokens_per_step=2 * count), 2)
        orders += [source.step(0).ids, source.step(1).ids]
    for order in orders:
        assert len(np.unique(order)) == count
    positions = [np.argsort(order) for order in orders] + [np.arange(count)]
    for a in range(len(positions)):
        for b in range(a):
            assert abs(np.corrcoef(positions[a], positions[b])[0, 1]) < 5 / np.sqrt(count)


def test_three_documents_and_a_step_of_several_epochs(tmp_path: Path) -> None:
    """C13: a step larger than the corpus crosses as many epoch borders as it needs, and the epoch counter is right."""
    source = open_training(data_config(write_lengths(tmp_path / "c", [3, 2, 3]), tokens_per_step=64, max_length=8), 5, silent)
    seen: Counter[int] = Counter()
    for index in range(5):
        step = source.step(index)
        assert step.epoch == 8 * index
        assert int(step.lengths.sum()) == 64
        assert len(step.ids) == 24
        seen.update(step.ids.tolist())
    assert sorted(seen.values()) == [40, 40, 40]
    assert "40 epochs in 5 steps" in source.describe()[0]


def test_a_corpus_much_smaller_than_a_step_is_not_slow_or_wrong(tmp_path: Path) -> None:
    source = open_training(data_config(write_lengths(tmp_path / "c", [1, 2, 1]), tokens_per_step=1 << 20), 2)
    step = source.step(1)
    assert len(step.ids) == 3 << 18
    assert step.epoch == 1 << 18
    assert set(Counter(step.ids.tolist()).values()) == {1 << 18}


def test_a_budget_below_the_longest_piece_is_refused(tmp_path: Path) -> None:
    prefix = write_lengths(tmp_path / "c", [10, 30])
    with pytest.raises(UserError, match=r"data.tokens_per_step=20 is below the longest piece \(30 tokens.*>= 30, or data.max_length <= 20"):
        open_training(data_config(prefix, tokens_per_step=20), 1)
    open_training(data_config(prefix, tokens_per_step=20, max_length=20), 1)
    open_training(data_config(prefix, tokens_per_step=30), 1)


@pytest.mark.parametrize(
    ("settings_", "message"),
    [({"tokens_per_step": 0}, "data.tokens_per_step=0"), ({"max_length": 0}, "data.max_length=0"), ({"mode": "files"}, "data.mode=files"),
     ({"long_documents": "keep"}, "data.long_documents=keep")],
)  # fmt: skip
def test_bad_settings_are_refused(tmp_path: Path, settings_: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_training(data_config(write_lengths(tmp_path / "c", [3]), **settings_), 1)


def test_steps_before_the_first_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the first step is 0"):
        open_training(data_config(write_lengths(tmp_path / "c", [3])), 1).step(-1)


def test_resume_and_layout_see_the_same_documents(tmp_path: Path) -> None:
    """C11, C17 for one process: the order knows only the step number, so a new process going on at step 7 in mid-epoch sees the rest."""
    data = data_config(write_lengths(tmp_path / "c", list(range(1, 60))), max_length=16, tokens_per_step=100)
    whole = open_training(data, 20)
    assert 0 < whole.step(7).epoch % 1 < 1
    resumed = open_training(dataclasses.replace(data, cache=str(tmp_path / "cache")), 20)
    for index in range(7, 20):
        assert np.array_equal(resumed.step(index).ids, whole.step(index).ids)
    assert resumed.fingerprint == whole.fingerprint


def test_the_fingerprint_changes_with_the_order(tmp_path: Path) -> None:
    a, b = write_lengths(tmp_path / "a", [3, 4, 5]), write_lengths(tmp_path / "b", [3, 4, 6])
    base = data_config(a, b, weights=[1, 2])
    same = [base, dataclasses.replace(base, cache=str(tmp_path / "cache")), data_config(a, b, weights=[2, 4])]
    other = [
        dataclasses.replace(base, seed=5),
        dataclasses.replace(base, tokens_per_step=500),
        dataclasses.replace(base, max_length=2),
        dataclasses.replace(base, split=(0.5, 0.5)),
        data_config(a, b, weights=[1, 3]),
        data_config(b, a, weights=[1, 2]),
        data_config(a),
    ]
    assert len({open_training(data, 3).fingerprint for data in same}) == 1
    assert len({open_training(data, 3).fingerprint for data in [base, *other]}) == 1 + len(other)


@settings(max_examples=40, deadline=None)
@given(
    corpora=st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=15), min_size=2, max_size=4),
    weights=st.lists(st.floats(0.01, 10), min_size=4, max_size=4),
    extra=st.integers(0, 40),
)
def test_a_blend_is_every_sources_own_order_merged(
    tmp_path_factory: pytest.TempPathFactory, corpora: list[list[int]], weights: list[float], extra: int
) -> None:
    folder = tmp_path_factory.mktemp("blend")
    prefixes = [write_lengths(folder / str(index), lengths) for index, lengths in enumerate(corpora)]
    weights = weights[: len(corpora)]
    longest = max(max(lengths) for lengths in corpora)
    source = open_training(data_config(*prefixes, weights=weights, tokens_per_step=longest + extra), 10)
    steps = [source.step(index) for index in range(15)]
    ids, sizes = np.concatenate([step.ids for step in steps]), np.concatenate([step.lengths for step in steps])
    starts = np.cumsum(sizes) - sizes
    assert (np.repeat(np.arange(15), [len(step.ids) for step in steps]) == starts // (longest + extra)).all()
    origin = ids >> 53
    for index, lengths in enumerate(corpora):
        mine = ids[origin == index]
        # the source's own epochs, in its own order: each epoch of its documents is complete
        for epoch in range(len(mine) // len(lengths)):
            assert len(set(mine[epoch * len(lengths) : (epoch + 1) * len(lengths)].tolist())) == len(lengths)
        # and its share of the tokens is kept at every prefix as closely as whole documents allow
        taken = np.cumsum(np.where(origin == index, sizes, 0))
        error = taken - np.cumsum(sizes) * weights[index] / sum(weights)
        assert np.abs(error).max() <= sum(max(one) for one in corpora)


def test_a_blend_seeks_far(tmp_path: Path) -> None:
    """A step a billion tokens on is found at once, and consecutive far steps join without a gap."""
    prefixes = [write_lengths(tmp_path / "a", [3, 9, 4, 7]), write_lengths(tmp_path / "b", [20, 1, 5])]
    source = open_training(data_config(*prefixes, weights=[0.3, 0.7], tokens_per_step=50), 10)
    far = [source.step(index) for index in range(20_000_000, 20_000_040)]
    assert abs(sum(int(step.lengths.sum()) for step in far) - 40 * 50) < 2 * 20
    second = np.concatenate([step.lengths[step.ids >> 53 == 1] for step in far]).sum()
    assert abs(second - 0.7 * 2000) < 2 * 20


def test_equal_weights_of_equal_sources_alternate(tmp_path: Path) -> None:
    prefixes = [write_lengths(tmp_path / name, [4] * 10) for name in "ab"]
    source = open_training(data_config(*prefixes, tokens_per_step=16), 5)
    assert [place[0] for place in places(source.step(0))] == [0, 1, 0, 1]


def test_a_blend_by_hand(tmp_path: Path) -> None:
    """Pieces of 2 have keys 1, 3, 5, .. (over the share), pieces of 10 have 5, 15, ..; at 5 the first source comes first."""
    prefixes = [write_lengths(tmp_path / "a", [2] * 5), write_lengths(tmp_path / "b", [10] * 3)]
    source = open_training(data_config(*prefixes, tokens_per_step=40), 5)
    for index in range(3):  # the last piece of a step starts at its token 38, and 40 tokens on the pattern repeats
        assert [place[0] for place in places(source.step(index))] == [0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0]


def test_read_gives_next_tokens_as_labels_and_none_at_the_end(tmp_path: Path) -> None:
    source = open_training(data_config(write_lengths(tmp_path / "c", [5, 1, 11]), max_length=6, tokens_per_step=17), 1)
    texts = {}
    for document in source.step(0).ids.tolist():
        tokens, labels = source.read(document)
        assert tokens.dtype == labels.dtype == np.int64
        assert labels[-1] == IGNORE  # a one-token document has no target at all
        assert labels[:-1].tolist() == tokens[1:].tolist()
        texts[document] = tokens.tolist()
    assert sorted(texts.values()) == [[0, 1, 2, 3, 4], [5], [6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 16]]


def test_documents_before_and_after_the_split_do_not_mix(tmp_path: Path) -> None:
    prefix = write_lengths(tmp_path / "c", [4] * 50)
    data = data_config(prefix, split=(0.8, 0.2), tokens_per_step=160)
    assert {place[1] for place in places(open_training(data, 1).step(0))} == set(range(40))
    (held_out,) = open_validation(data)
    assert {place[1] for place in places(held_out.documents(10**9))} == set(range(40, 50))


def test_validation_sets_by_name(tmp_path: Path) -> None:
    """C13: several validation sets, each with whole documents, at least one."""
    train, far = write_lengths(tmp_path / "train", [5] * 20), write_lengths(tmp_path / "far", [7, 30, 7])
    data = dataclasses.replace(data_config(train, split=(0.9, 0.1)), validation=(SourceConfig(far), SourceConfig(far, name="again")))
    sets = open_validation(data)
    assert [one.name for one in sets] == ["s0", "far", "again"]
    assert len(sets[0].documents(10**9).ids) == 2
    assert len(sets[0].documents(5).ids) == len(sets[0].documents(1).ids) == len(sets[0].documents(0).ids) == 1
    for budget in (1, 7, 14, 37, 44, 1000):
        chosen = sets[1].documents(budget)
        assert len(chosen.ids) == 1 or int(chosen.lengths.sum()) <= budget
        assert chosen.ids.tolist() == sets[1].documents(1000).ids[: len(chosen.ids)].tolist()
    assert int(sets[1].documents(1000).lengths.sum()) == 44
    tokens, labels = sets[1].read(int(sets[1].documents(1).ids[0]))
    assert labels.tolist() == [*tokens[1:].tolist(), IGNORE]
    other_seed = open_validation(dataclasses.replace(data, seed=99))
    assert other_seed[1].documents(1000).ids.tolist() == sets[1].documents(1000).ids.tolist()


def test_data_loads_no_torch() -> None:
    code = "import sys, megadcp.data.order, megadcp.data.batch; sys.exit('torch' in sys.modules or 'hydra' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_no_validation_is_an_empty_list(tmp_path: Path) -> None:
    assert open_validation(data_config(write_lengths(tmp_path / "c", [3]))) == []


def test_empty_validation_and_clashing_names_are_refused(tmp_path: Path) -> None:
    prefix = write_lengths(tmp_path / "c", [3, 3])
    with pytest.raises(UserError, match=r"s0 \(validation\) of .* is empty"):
        open_validation(data_config(prefix, split=(0.99, 0.01)))
    data = dataclasses.replace(data_config(prefix, split=(0.5, 0.5)), validation=(SourceConfig(prefix, name="s0"),))
    with pytest.raises(UserError, match="two validation sets are called s0"):
        open_validation(data)
