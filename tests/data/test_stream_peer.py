"""Stream mode against megatron-core itself: every sample of every split, under the same seed."""

from __future__ import annotations

import itertools
import warnings
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from order_helpers import data_config, write_pair

from megadcp.config.schema import DataConfig
from megadcp.data.corpus import open_train_sources, split_ranges
from megadcp.data.order import open_training
from megadcp.data.step_documents import IGNORE, unpack_ids
from megadcp.data.stream import StreamSet, StreamSteps, blend_index

pytestmark = [
    pytest.mark.peer,
    pytest.mark.filterwarnings("ignore"),
]
EOD = 0


@pytest.fixture(scope="module")
def peer() -> SimpleNamespace:
    """What is needed of megatron-core. Its C++ helpers come compiled with the wheel."""
    reason = "megatron-core 0.16.1 is not installed"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        builder = pytest.importorskip("megatron.core.datasets.blended_megatron_dataset_builder", reason=reason)
        gpt = pytest.importorskip("megatron.core.datasets.gpt_dataset", reason=reason)
        config = pytest.importorskip("megatron.core.datasets.blended_megatron_dataset_config", reason=reason)
        helpers = pytest.importorskip("megatron.core.datasets.helpers", reason="megatron-core's C++ helpers are not compiled")
    return SimpleNamespace(
        builder=builder.BlendedMegatronDatasetBuilder, gpt=gpt.GPTDataset, gpt_config=gpt.GPTDatasetConfig, config=config, helpers=helpers
    )


def corpus(prefix: Path, seed: int, count: int, longest: int, sentences: bool = False) -> str:
    """Random documents with a long tail, an EOD at each end, now and then one without tokens."""
    state = np.random.RandomState(seed)
    documents = []
    for _ in range(count):
        parts = []
        for _ in range(state.randint(1, 4) if sentences else 1):
            length = int(min(longest, state.lognormal(2.5, 1.2)))
            parts.append([*state.randint(1, 60_000, size=length).tolist(), EOD] if length else [])
        documents.append(parts)
    return write_pair(prefix, documents)


def theirs(peer: SimpleNamespace, data: DataConfig, sizes: list[int | None], **changes: Any) -> list[Any]:
    """Their train, validation and test sets."""
    tokenizer = SimpleNamespace(vocab_size=70_000, eod=EOD, unique_identifiers=OrderedDict(name="numbers"))
    prefixes = [source.prefix for source in data.train]
    weights = [source.weight for source in data.train] if len(prefixes) > 1 else None
    config = peer.gpt_config(
        random_seed=data.seed,
        sequence_length=data.max_length,
        blend=(prefixes, weights),
        split=",".join(str(share) for share in data.split),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        **changes,
    )
    return list(peer.builder(peer.gpt, sizes, lambda: True, config).build())


def assert_same_samples(ours: list[tuple[np.ndarray, np.ndarray]], dataset: Any) -> None:
    """Every sample of theirs, in order, or as many as ours."""
    assert len(ours) <= len(dataset)
    for index, (tokens, labels) in enumerate(ours):
        item = dataset[index]
        assert np.array_equal(tokens, item["tokens"].numpy()), f"tokens of sample {index}"
        assert np.array_equal(labels, np.where(item["loss_mask"].numpy() > 0, item["labels"].numpy(), IGNORE)), f"labels of sample {index}"


def samples(source: Any, steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    return [source.read(int(document)) for index in range(steps) for document in source.step(index).ids]


@pytest.mark.parametrize(
    ("count", "length", "steps"),
    [
        (200, 64, 10),  # part of one epoch
        (50, 32, 60),  # several epochs, the last one shuffled apart
        (50, 7, 417),  # the borders of samples at other places
        (50, 7, 480),
        (3, 100, 50),  # samples of many epochs each
        (1, 5, 30),
    ],
)
@pytest.mark.parametrize("seed", [1234, 7])
def test_one_source(peer: SimpleNamespace, tmp_path: Path, count: int, length: int, steps: int, seed: int) -> None:
    prefix = corpus(tmp_path / "c", count, count, 300)
    data = data_config(prefix, mode="stream", max_length=length, tokens_per_step=2 * length, seed=seed, split=(1.0, 0.0, 0.0))
    source = open_training(data, steps)
    dataset = theirs(peer, data, [2 * steps, 0, 0])[0]
    assert isinstance(source, StreamSteps)
    assert_same_samples(samples(source, steps), dataset)
    index = source.sets[0].index()
    assert np.array_equal(index["documents"], dataset.document_index)
    assert np.array_equal(index["borders"], dataset.sample_index)
    assert np.array_equal(index["shuffle"], dataset.shuffle_index)


def test_both_kinds_of_last_epoch_are_met(peer: SimpleNamespace, tmp_path: Path) -> None:
    """Over a range of sizes that crosses several epoch borders, so that each rule decides both ways."""
    prefix = corpus(tmp_path / "c", 5, 30, 100)
    kinds = set()
    for steps in range(1, 160, 6):
        data = data_config(prefix, mode="stream", max_length=16, tokens_per_step=16, split=(0.9, 0.1, 0.0))
        source = open_training(data, steps)
        dataset = theirs(peer, data, [steps, 0, 0], path_to_cache=str(tmp_path / f"cache{steps}"))[0]
        assert isinstance(source, StreamSteps)
        index = source.sets[0].index()
        assert np.array_equal(index["documents"], dataset.document_index)
        assert np.array_equal(index["borders"], dataset.sample_index)
        assert np.array_equal(index["shuffle"], dataset.shuffle_index)
        kinds.add((source.sets[0].epochs > 1, source.sets[0].before_final > 0))
    assert kinds == {(False, False), (True, False), (True, True)}


def test_a_file_of_sentences_is_shuffled_by_sentence(peer: SimpleNamespace, tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "c", 3, 40, 60, sentences=True)
    data = data_config(prefix, mode="stream", max_length=20, tokens_per_step=20)
    assert_same_samples(samples(open_training(data, 90), 90), theirs(peer, data, [90, 0, 0])[0])


@pytest.mark.parametrize("seed", range(5))
def test_zero_length_sequences(peer: SimpleNamespace, tmp_path: Path, seed: int) -> None:
    """They take part in the shuffles; half of them here, so that some orders begin and some samples end with them."""
    state = np.random.RandomState(seed)
    lengths = state.randint(1, 20, size=40) * state.randint(0, 2, size=40)
    prefix = write_pair(tmp_path / "c", [[state.randint(1, 100, size=length).tolist()] for length in lengths])
    data = data_config(prefix, mode="stream", max_length=9, tokens_per_step=9, seed=seed)
    source = open_training(data, 50)
    dataset = theirs(peer, data, [50, 0, 0])[0]
    assert isinstance(source, StreamSteps)
    assert_same_samples(samples(source, 50), dataset)
    assert np.array_equal(source.sets[0].index()["borders"], dataset.sample_index)


@pytest.mark.parametrize("weights", [[0.3, 0.7], [1.0, 1.0, 1.0], [5.0, 0.1, 2.0]])
def test_blends(peer: SimpleNamespace, tmp_path: Path, weights: list[float]) -> None:
    prefixes = [corpus(tmp_path / f"c{index}", 10 + index, 20 + 15 * index, 200) for index in range(len(weights))]
    data = data_config(*prefixes, weights=weights, mode="stream", max_length=24, tokens_per_step=48, split=(0.9, 0.1))
    source = open_training(data, 60)
    dataset = theirs(peer, data, [120, 0, 0])[0]
    assert isinstance(source, StreamSteps)
    assert_same_samples(samples(source, 60), dataset)
    assert np.array_equal(source.blend()["source"], dataset.dataset_index)
    assert np.array_equal(source.blend()["sample"], dataset.dataset_sample_index)


def test_blend_index_at_length(peer: SimpleNamespace) -> None:
    state = np.random.RandomState(0)
    for count, size in itertools.product((2, 3, 17), (1, 1000, 200_000)):
        weights = state.dirichlet(np.full(count, 0.5)) + 1e-9
        weights /= weights.sum()
        index, sample = np.zeros(size, np.int16), np.zeros(size, np.int64)
        peer.helpers.build_blending_indices(index, sample, weights, count, size, False)
        assert np.array_equal(blend_index(weights.tolist(), size), index)


def test_the_validation_split(peer: SimpleNamespace, tmp_path: Path) -> None:
    """One pass, as they make it when no size is given."""
    prefix = corpus(tmp_path / "c", 8, 120, 100)
    data = data_config(prefix, mode="stream", max_length=30, tokens_per_step=30, split=(0.7, 0.2, 0.1))
    held_out = StreamSet.held_out(open_train_sources(data)[0], data, "validation", None)
    dataset = theirs(peer, data, [10, None, None])[1]
    chosen = held_out.documents(10**9).ids
    assert len(chosen) == len(dataset)
    assert_same_samples([held_out.read(int(document)) for document in chosen], dataset)
    assert len(set(unpack_ids(chosen)[1].tolist())) == len(chosen)


@pytest.mark.parametrize("split", [(0.98, 0.02, 0.0), (969, 30, 1), (0.7, 0.2, 0.1), (1, 0, 0), (0, 1, 0), (1 / 3, 1 / 3, 1 / 3)])
def test_split_borders(peer: SimpleNamespace, split: tuple[float, ...]) -> None:
    vector = peer.config.parse_and_normalize_split(",".join(f"{share:.17f}" for share in split))
    matrix = peer.config.convert_split_vector_to_split_matrix(vector)
    for count in (1, 2, 5, 50, 101, 12_345, 99_999_999):
        expected = [(round(pair[0] * float(count)), round(pair[1] * float(count))) if pair else (0, 0) for pair in matrix]
        assert split_ranges(split, count) == expected
