"""megatron-core reads what is written here, and the other way round; bytes are equal."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from preprocess_helpers import EOD, TEXTS, lines, run, write

from megadcp.data.indexed import IndexedReader, IndexedWriter
from megadcp.data.merge import merge
from megadcp.data.tokenizer import BytesTokenizer

pytestmark = pytest.mark.peer

DOCUMENTS = [([3, 1, 4, 1, 5], [2, 3]), ([9], [1]), ([], []), ([2, 6, 5], [3]), ([], [0])]


@pytest.fixture(scope="module")
def peer():  # type: ignore[no-untyped-def]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed (extra peers)")


def theirs(peer, prefix: Path, dtype: str, documents=DOCUMENTS) -> str:  # type: ignore[no-untyped-def]
    builder = peer.IndexedDatasetBuilder(f"{prefix}.bin", dtype=getattr(np, dtype))
    for tokens, lengths in documents:
        builder.add_document(tokens, lengths)
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def ours(prefix: Path, dtype: str) -> str:
    with IndexedWriter(prefix, dtype) as writer:
        for tokens, lengths in DOCUMENTS:
            writer.add_document(tokens, lengths)
    return str(prefix)


def same(a: str, b: str) -> bool:
    return all(Path(f"{a}.{ending}").read_bytes() == Path(f"{b}.{ending}").read_bytes() for ending in ("bin", "idx"))


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"])
def test_equal_bytes_and_both_readers(peer, tmp_path: Path, dtype: str) -> None:  # type: ignore[no-untyped-def]
    a, b = theirs(peer, tmp_path / "theirs", dtype), ours(tmp_path / "ours", dtype)
    assert same(a, b)
    reader, other = IndexedReader(a), peer.IndexedDataset(b)
    assert reader.dtype == np.dtype(dtype) == np.dtype(other.index.dtype)
    assert len(reader) == len(other) == 5
    assert reader.lengths.tolist() == other.sequence_lengths.tolist()
    assert reader.document_index.tolist() == other.document_indices.tolist()
    assert reader.pointers.tolist() == other.index.sequence_pointers.tolist()
    for sequence in range(4):  # the fifth is empty, which their memory map does not read
        assert reader.read(sequence).tolist() == other[sequence].tolist()
    assert reader.read(0, 1, 1).tolist() == other.get(0, offset=1, length=1).tolist()


def test_one_document_at_a_time_as_their_tool_does(peer, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    texts = [[1, 2, 3], [], [4], [5, 6]]
    a = theirs(peer, tmp_path / "theirs", "uint16", [(text, [len(text)] if text else []) for text in texts])
    with IndexedWriter(tmp_path / "ours", np.uint16) as writer:
        writer.add_many(np.concatenate([np.array(text, np.int32) for text in texts]), [len(text) for text in texts])
    assert same(a, str(tmp_path / "ours"))


def test_preprocessing_gives_their_bytes(peer, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """The whole way from text, shards and workers included, against their builder fed document by document."""
    texts = [*TEXTS, "", "\u2028", "x" * 70_000]
    source = write(tmp_path / "in.jsonl", lines(texts))
    for shard in range(2):
        run(source, tmp_path / f"s{shard}", append_eod=True, shard=(shard, 2), workers=2, part_size=700)
    merge([str(tmp_path / "s0"), str(tmp_path / "s1")], str(tmp_path / "ours"), False, lambda line: None)
    encode = BytesTokenizer().encode
    documents = [([*encode(text), EOD], [len(encode(text)) + 1]) if text else ([], []) for text in texts]
    assert same(theirs(peer, tmp_path / "theirs", "uint16", documents), str(tmp_path / "ours"))


def test_merging_equals_their_merging(peer, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    first, second = theirs(peer, tmp_path / "first", "uint16"), theirs(peer, tmp_path / "second", "uint16", [([7, 7], [2]), ([8], [1])])
    builder = peer.IndexedDatasetBuilder(f"{tmp_path}/theirs.bin", dtype=np.uint16)
    for prefix in (first, second, first):
        builder.add_index(prefix)
    builder.finalize(f"{tmp_path}/theirs.idx")
    again = theirs(peer, tmp_path / "again", "uint16")
    assert merge([first, second, again], str(tmp_path / "ours"), False, lambda line: None) is None
    assert same(str(tmp_path / "theirs"), str(tmp_path / "ours"))


def test_their_multimodal_files(peer, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    builder = peer.IndexedDatasetBuilder(f"{tmp_path}/m.bin", dtype=np.int32, multimodal=True)
    builder.add_document([1, 2, 3], [1, 2], modes=[0, 1])
    builder.finalize(f"{tmp_path}/m.idx")
    reader = IndexedReader(tmp_path / "m", multimodal=True)
    assert reader.modes is not None
    assert reader.modes.tolist() == [0, 1]
    assert reader.read(1).tolist() == [2, 3]


def test_dtype_rule_is_theirs(peer) -> None:  # type: ignore[no-untyped-def]
    from megadcp.data.indexed import dtype_for_vocab

    for vocab in (257, 65499, 65500, 65536, 128256):
        assert dtype_for_vocab(vocab) == np.dtype(peer.DType.optimal_dtype(vocab))
