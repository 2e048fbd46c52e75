"""Splits, pieces, empty and long documents, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from order_helpers import data_config, write_lengths, write_pair

from megadcp.config.check import UserError
from megadcp.config.schema import SourceConfig
from megadcp.data import corpus
from megadcp.data.corpus import DocumentFile, PieceTable, fill_pieces, open_sources, open_train_sources, split_ranges, split_table
from megadcp.data.indexed import IndexedReader
from megadcp.data.step_documents import IGNORE, PIECES, SOURCES, pack_ids, unpack_ids


def table(prefix: str, max_length: int = 1024, long_documents: str = "split", extent: tuple[int, int] | None = None) -> PieceTable:
    file = DocumentFile(IndexedReader(prefix))
    return PieceTable(file, extent or (0, file.count), (max_length, long_documents), 0, "corpus")


def all_pieces(made: PieceTable) -> list[tuple[int, int, int]]:
    """(document, piece, length) of every piece number."""
    documents, inside = made.locate(np.arange(made.count))
    return list(zip(documents.tolist(), inside.tolist(), made.piece_lengths(documents, inside).tolist(), strict=True))


def expected_pieces(lengths: list[int], max_length: int, long_documents: str) -> list[tuple[int, int, int]]:
    """The same by a plain loop."""
    found = []
    for document, length in enumerate(lengths):
        if length > max_length and long_documents == "drop":
            continue
        found += [(document, at // max_length, min(max_length, length - at)) for at in range(0, length, max_length)]
    return found


def test_ids_are_injective_at_their_limits() -> None:
    documents = np.array([0, 1, (1 << 37) - 1], dtype=np.int64)
    pieces = np.array([0, PIECES - 1, PIECES - 1])
    packed = np.concatenate([pack_ids(source, documents, pieces) for source in (0, 1, SOURCES - 1)])
    assert packed.dtype == np.int64
    assert len(set(packed.tolist())) == 9
    assert packed.min() == 0
    sources, back, inside = unpack_ids(packed)
    assert sources.tolist() == [0] * 3 + [1] * 3 + [SOURCES - 1] * 3
    assert back.tolist() == documents.tolist() * 3
    assert inside.tolist() == pieces.tolist() * 3


@pytest.mark.parametrize(
    ("split", "count", "expected"),
    [
        ((0.98, 0.02, 0.0), 100, [(0, 98), (98, 100), (0, 0)]),
        ((98, 1, 1), 1000, [(0, 980), (980, 990), (990, 1000)]),
        ((1.0,), 7, [(0, 7), (0, 0), (0, 0)]),
        ((0.5, 0.5), 5, [(0, 2), (2, 5), (0, 0)]),  # 2.5 rounds to even
        ((0.0, 1.0), 3, [(0, 0), (0, 3), (0, 0)]),
    ],
)
def test_splits_are_contiguous_ranges(split: tuple[float, ...], count: int, expected: list[tuple[int, int]]) -> None:
    assert split_ranges(split, count) == expected


@pytest.mark.parametrize("split", [(0.0, 0.0), (-1.0, 2.0), (float("nan"), 1.0), (1.0, 1.0, 1.0, 1.0)])
def test_senseless_splits_are_refused(split: tuple[float, ...]) -> None:
    with pytest.raises(UserError, match=r"data\.split"):
        split_ranges(split, 10)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=60),
    max_length=st.integers(1, 30),
    long_documents=st.sampled_from(["split", "drop"]),
    block=st.integers(1, 16),
)
def test_pieces_are_those_of_a_plain_loop(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], max_length: int, long_documents: str, block: int
) -> None:
    prefix = write_lengths(tmp_path_factory.mktemp("pieces") / "c", lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "BLOCK", block)
        made = table(prefix, max_length, long_documents)
        expected = expected_pieces(lengths, max_length, long_documents)
        assert all_pieces(made) == expected
        numbered = [(begin, ids.tolist()) for begin, ids in made.all_ids()]
    assert [one for _, ids in numbered for one in ids] == [(document << 16) | piece for document, piece, _ in expected]
    assert [begin for begin, _ in numbered] == list(range(0, made.count, block))
    assert made.tokens == sum(length for _, _, length in expected)
    assert made.longest == max((length for _, _, length in expected), default=0)
    assert made.empty == lengths.count(0)
    assert made.long == sum(length > max_length for length in lengths)


@settings(max_examples=30, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=1, max_size=12),
    max_length=st.integers(1, 12),
)
def test_pieces_reassemble_to_the_document(tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], max_length: int) -> None:
    """Also where a document is several sequences, some of them without tokens."""
    token = iter(range(10_000))
    texts = [[[next(token) for _ in range(length)] for length in document] for document in documents]
    made = table(write_pair(tmp_path_factory.mktemp("sentences") / "c", texts), max_length)
    found: dict[int, list[int]] = {}
    for document, piece, length in all_pieces(made):
        ids = pack_ids(0, np.array([document]), piece)
        tokens, labels = np.full((2, length + 2), -7, np.int64)
        fill_pieces({0: made}, ids, np.array([1]), tokens, labels)
        assert tokens[[0, -1]].tolist() == labels[[0, -1]].tolist() == [-7, -7]  # nothing outside is touched
        assert labels[1:-2].tolist() == tokens[2:-1].tolist()
        assert labels[-2] == IGNORE
        assert len(found.setdefault(document, [])) == piece * max_length
        found[document] += tokens[1:-1].tolist()
    expected = {number: [one for sentence in text for one in sentence] for number, text in enumerate(texts)}
    assert found == {number: text for number, text in expected.items() if text}


def test_a_file_of_sentences_has_documents(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "c", [[[1, 2], [3]], [], [[4]], [[], [5, 6]], [[7]]])
    file = DocumentFile(IndexedReader(prefix))
    assert not file.identity
    assert file.lengths(0, 5).tolist() == [3, 0, 1, 2, 1]
    assert file.lengths(2, 4).tolist() == [1, 2]
    assert file.lengths_at(np.array([4, 1, 3, 0, 0])).tolist() == [1, 0, 2, 3, 3]
    assert file.read(0, 1, 2).tolist() == [2, 3]
    assert file.read(3, 0, 2).tolist() == [5, 6]


def test_equal_counts_do_not_make_documents_sequences(tmp_path: Path) -> None:
    """As many documents as sequences, but one has two and another none."""
    file = DocumentFile(IndexedReader(write_pair(tmp_path / "c", [[[1], [2, 3]], [], [[4]]])))
    assert not file.identity
    assert file.lengths(0, 3).tolist() == [3, 0, 1]


def test_counts_are_told(tmp_path: Path) -> None:
    prefix = write_lengths(tmp_path / "c", [5, 0, 30, 7])
    assert "1 empty documents skipped; 1 documents above 10 tokens cut" in table(prefix, 10).describe()
    assert "1 documents above 10 tokens dropped (30 tokens)" in table(prefix, 10, "drop").describe()


def test_too_many_pieces_of_one_document_are_refused(tmp_path: Path) -> None:
    prefix = write_lengths(tmp_path / "c", [3, PIECES + 1])
    with pytest.raises(UserError, match=r"document 1 has 65537 tokens.*legal: data.max_length >= 2"):
        table(prefix, 1)
    assert table(prefix, 2).count == 2 + PIECES // 2 + 1


def test_the_digest_follows_lengths_and_range_only(tmp_path: Path) -> None:
    one, moved = write_lengths(tmp_path / "a" / "c", [3, 4, 5]), write_lengths(tmp_path / "b" / "d", [3, 4, 5], first_token=9)
    other = write_lengths(tmp_path / "other", [3, 5, 4])
    assert table(one).digest == table(moved).digest
    assert table(one).digest != table(other).digest
    assert table(one, extent=(0, 2)).digest != table(one, extent=(1, 3)).digest


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_weights_without_sense_are_refused_by_name(tmp_path: Path, weight: float) -> None:
    prefixes = [write_lengths(tmp_path / name, [3]) for name in "ab"]
    with pytest.raises(UserError, match=r"data.train\[1\].weight=.* of source s1"):
        open_train_sources(data_config(*prefixes, weights=[1.0, weight]))


def test_shares_add_up_to_one(tmp_path: Path) -> None:
    prefixes = [write_lengths(tmp_path / name, [3]) for name in "ab"]
    assert [source.share for source in open_train_sources(data_config(*prefixes, weights=[1.0, 3.0]))] == [0.25, 0.75]


def test_no_source_and_equal_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.train is empty"):
        open_train_sources(data_config())
    prefix = write_lengths(tmp_path / "c", [3])
    with pytest.raises(UserError, match=r"data.validation\[1\] and data.validation\[0\] are both called c"):
        open_sources([SourceConfig(prefix), SourceConfig(prefix)], "data.validation")


def test_empty_splits_are_refused_by_name(tmp_path: Path) -> None:
    prefix = write_lengths(tmp_path / "c", [3, 4, 0])
    data = data_config(prefix, split=(0.67, 0.33))
    source = open_train_sources(data)[0]
    assert split_table(source, data, "train").count == 2
    with pytest.raises(UserError, match=r"s0 \(validation\) of .*c is empty \(1 of its 3 documents, 1 of them empty\)"):
        split_table(source, data, "validation")
    data = data_config(prefix, max_length=2, long_documents="drop")
    with pytest.raises(UserError, match=r"2 dropped because they are longer than data.max_length=2"):
        split_table(source, data, "train")
