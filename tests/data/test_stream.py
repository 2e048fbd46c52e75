"""Stream mode without the peer: sample borders, the blend rule by plain loops, epochs, refusals. See test_stream_peer.py for equality."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from order_helpers import data_config, ids_of, write_lengths, write_pair

from megadcp.config.check import UserError
from megadcp.config.schema import DataConfig, SourceConfig, TokenizerConfig
from megadcp.data.order import DocumentSource, open_training, open_validation
from megadcp.data.stream import blend_index, epochs_needed, final_epoch_samples, sample_borders


def stream_config(*prefixes: str, **changes: object) -> DataConfig:
    return data_config(*prefixes, **{"mode": "stream", "max_length": 8, "tokens_per_step": 16, **changes})  # type: ignore[arg-type]


def blend_loop(weights: list[float], size: int) -> list[int]:
    """The rule as it is stated, one sample at a time."""
    taken, chosen = [0] * len(weights), []
    for index in range(size):
        errors = [weight * float(max(index, 1)) - count for weight, count in zip(weights, taken, strict=True)]
        best = errors.index(max(errors))
        taken[best] += 1
        chosen.append(best)
    return chosen


@settings(max_examples=80, deadline=None)
@given(raw=st.lists(st.floats(1e-4, 1), min_size=1, max_size=9), size=st.integers(0, 900))
def test_blend_equals_the_sequential_rule(raw: list[float], size: int) -> None:
    weights = [weight / sum(raw) for weight in raw]
    assert blend_index(weights, size).tolist() == blend_loop(weights, size)


@pytest.mark.parametrize("weights", [[0.5, 0.5], [1 / 3] * 3, [0.1] * 10, [0.25, 0.25, 0.5], [1e-6, 1 - 1e-6], [0.7, 0.2, 0.05, 0.05]])
def test_blend_with_many_ties(weights: list[float]) -> None:
    """Round shares tie all the time, and a tie's winner depends on the whole past: the guessed starts must all be put right."""
    assert blend_index(weights, 3000).tolist() == blend_loop(weights, 3000)


@settings(max_examples=80, deadline=None)
@given(lengths=st.lists(st.integers(0, 12), min_size=1, max_size=40).filter(lambda values: sum(values) > 1), length=st.integers(1, 9))
def test_samples_are_the_concatenation_cut_with_one_token_of_overlap(lengths: list[int], length: int) -> None:
    sizes = np.array(lengths, dtype=np.int32)
    samples = (int(sizes.sum()) - 1) // length
    rows = sample_borders(sizes, samples, length)
    assert rows.shape == (samples + 1, 2)
    starts = np.cumsum(sizes) - sizes
    for index, (place, offset) in enumerate(rows.tolist()):
        assert starts[place] + offset == index * length
        assert 0 <= offset < max(1, lengths[place])


def test_epochs_are_the_fewest_that_hold_all_samples() -> None:
    assert epochs_needed(None, 8, 100) == 1
    assert epochs_needed(12, 8, 97) == 1  # 12 * 8 + 1 tokens are needed
    assert epochs_needed(12, 8, 96) == 2
    assert epochs_needed(10**12, 4096, 10**9) == -(-(10**12 * 4096 + 1) // 10**9)


def test_the_last_epoch_is_apart_below_80_percent() -> None:
    """1,001 tokens in samples of 10: 100 samples a pass, so fewer than 80 of the second pass are shuffled apart."""
    assert final_epoch_samples(179, 10, 1001, 2) == 100
    assert final_epoch_samples(180, 10, 1001, 2) == 0
    assert final_epoch_samples(None, 10, 1001, 1) == final_epoch_samples(50, 10, 1001, 1) == 0


def test_samples_of_a_pass_hold_each_token_once_as_input(tmp_path: Path) -> None:
    lengths = [5, 0, 13, 7, 16, 1]
    ends = np.cumsum([0, *lengths]).tolist()
    prefix = write_pair(tmp_path / "c", [[list(range(a, b))] for a, b in itertools.pairwise(ends)])
    source = open_training(stream_config(prefix, tokens_per_step=8), 5)
    rows = np.unique(ids_of(source, 5))
    assert len(rows) == 5
    read = [source.read(int(document)) for document in rows]
    inputs = np.concatenate([tokens for tokens, _ in read])
    targets = np.concatenate([labels for _, labels in read])
    assert inputs.dtype == targets.dtype == np.int64
    assert len(np.unique(inputs)) == 40
    assert np.array_equal(inputs[1:], targets[:-1])  # in row order, the next token is the target, also across samples
    assert "1 empty sequences skipped" in source.describe()[0]


def test_steps_cut_the_shuffled_samples(tmp_path: Path) -> None:
    prefix = write_lengths(tmp_path / "c", [10] * 30)
    steps = [open_training(stream_config(prefix), 9).step(index) for index in range(9)]
    assert all(step.lengths.tolist() == [8, 8] for step in steps)
    assert [step.epoch for step in steps] == [16 * index / 300 for index in range(9)]
    ids = np.concatenate([step.ids for step in steps])
    assert len(np.unique(ids)) == 18
    assert not (np.diff(ids) > 0).all()


def test_the_number_of_steps_is_the_end(tmp_path: Path) -> None:
    source = open_training(stream_config(write_lengths(tmp_path / "c", [10] * 30)), 9)
    for index in (-1, 9):
        with pytest.raises(UserError, match="9 steps"):
            source.step(index)


def test_the_fingerprint_knows_the_number_of_steps(tmp_path: Path) -> None:
    """As in Megatron the order of stream mode depends on the samples asked for, once they need another epoch."""
    prefix = write_lengths(tmp_path / "c", [10] * 30)
    prints = [open_training(stream_config(prefix, seed=seed), steps).fingerprint for seed, steps in ((1, 9), (1, 30), (2, 9))]
    assert len(set(prints)) == 3


def test_budgets_that_are_no_multiple_are_refused(tmp_path: Path) -> None:
    prefix = write_lengths(tmp_path / "c", [10] * 30)
    with pytest.raises(UserError, match=r"data\.tokens_per_step=20 must be a multiple of data\.max_length=8.*legal: 16, 24"):
        open_training(stream_config(prefix, tokens_per_step=20), 9)
    with pytest.raises(UserError, match=r"legal: 8$"):
        open_training(stream_config(prefix, tokens_per_step=5), 9)
    with pytest.raises(UserError, match=r"run\.steps=0"):
        open_training(stream_config(prefix), 0)


def test_an_index_that_does_not_fit_is_refused_before_it_is_made(tmp_path: Path) -> None:
    """C03: 3 sequences in more than 2^31 / 3 epochs. Making the arrays would take 8 GB."""
    prefix = write_lengths(tmp_path / "c", [3, 3, 3])
    with pytest.raises(UserError, match=r"s0: \d+ epochs of 3 sequences .* do not fit .*fewer steps"):
        open_training(stream_config(prefix, max_length=2000, tokens_per_step=2000), 4_000_000)


def test_empty_and_too_small_splits_are_refused(tmp_path: Path) -> None:
    empty, small = write_pair(tmp_path / "empty", [[[]], [[]]]), write_lengths(tmp_path / "small", [4, 3])
    with pytest.raises(UserError, match=r"s0: .* hold no tokens"):
        open_training(stream_config(empty), 1)
    with pytest.raises(UserError, match=r"s0 \(validation\) of .* is empty"):
        open_validation(stream_config(small, split=(0.99, 0.01)))
    with pytest.raises(UserError, match=r"s0: 3 tokens hold no sample of data\.max_length=8.*legal: data\.max_length < 3"):
        open_validation(stream_config(small, split=(0.5, 0.5)))


def test_validation_is_one_pass_of_whole_samples(tmp_path: Path) -> None:
    prefix = write_lengths(tmp_path / "c", [10] * 30)
    far = write_lengths(tmp_path / "far", [50])
    sets = open_validation(stream_config(prefix, split=(0.5, 0.5)))
    assert [one.name for one in sets] == ["s0"]
    assert [len(sets[0].documents(tokens).ids) for tokens in (1, 8, 17, 10**9)] == [1, 1, 2, 149 // 8]
    tokens, labels = sets[0].read(int(sets[0].documents(1).ids[0]))
    assert (tokens >= 150).all()  # the second half of the file
    assert tokens[1:].tolist() == labels[:-1].tolist()
    data = stream_config(prefix)
    data = DataConfig(train=data.train, validation=(SourceConfig(far),), split=(1.0,), mode="stream", max_length=8)
    assert len(open_validation(data)[0].documents(10**9).ids) == 6


def test_eod_as_input_has_no_target_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The byte tokenizer's EOD; what comes after a document is not predicted from its end."""
    tokenizer = pytest.importorskip("megadcp.data.tokenizer", reason="the tokenizer is part of the project")
    eod = tokenizer.open_tokenizer("bytes", "").eod
    prefix = write_pair(tmp_path / "c", [[[1, 2, 3, eod]]] * 20)

    def read_all(mask: bool) -> tuple[np.ndarray, np.ndarray]:
        source: DocumentSource = open_training(stream_config(prefix, mask_eod_loss=mask, tokenizer=TokenizerConfig("bytes")), 4)
        read = [source.read(int(document)) for document in ids_of(source, 4)]
        return np.concatenate([tokens for tokens, _ in read]), np.concatenate([labels for _, labels in read])

    tokens, labels = read_all(True)
    assert (tokens == eod).sum() == 16
    assert np.array_equal(labels == -100, tokens == eod)
    assert (labels == eod).sum() == 16  # the end itself is learned
    assert (read_all(False)[1] != -100).all()


def test_a_blend_draws_each_source_in_its_own_order(tmp_path: Path) -> None:
    prefixes = [write_lengths(tmp_path / "a", [9] * 20), write_lengths(tmp_path / "b", [11] * 20, first_token=5000)]
    source = open_training(stream_config(*prefixes, weights=[3, 1]), 20)
    ids = ids_of(source, 20)
    assert (ids >> 53).tolist() == blend_loop([0.75, 0.25], 40)
    for document in ids.tolist():
        tokens, _ = source.read(document)
        assert (tokens >= 5000).all() == (document >> 53 == 1)
