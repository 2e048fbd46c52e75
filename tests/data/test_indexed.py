"""The .bin/.idx format: what is written, what is read, and what is refused."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megadcp.config.check import UserError
from megadcp.data.indexed import IndexedReader, IndexedWriter, dtype_for_vocab

DOCUMENTS = [[5, 6, 7], [], [8], [9, 10]]


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    path = str(tmp_path / "pair")
    with IndexedWriter(path, np.uint16) as writer:
        for document in DOCUMENTS:
            writer.add(document)
    return path


def by_hand(prefix: Path, dtype_code: int, lengths: list[int], pointers: list[int], index: list[int], **header: object) -> str:
    """An .idx as the format's table says; fields of the header can be replaced."""
    fields = {"magic": b"MMIDIDX\x00\x00", "version": 1, "code": dtype_code, "sequences": len(lengths), "entries": len(index), **header}
    data = struct.pack("<9sQBQQ", *fields.values())
    data += struct.pack(f"<{len(lengths)}i{len(pointers)}q{len(index)}q", *lengths, *pointers, *index)
    Path(f"{prefix}.idx").write_bytes(data)
    return str(prefix)


def test_bytes_are_those_of_the_format(prefix: str, tmp_path: Path) -> None:
    by_hand(tmp_path / "expected", 8, [3, 1, 2], [0, 6, 8], [0, 1, 1, 2, 3])
    assert Path(f"{prefix}.idx").read_bytes() == (tmp_path / "expected.idx").read_bytes()
    assert Path(f"{prefix}.bin").read_bytes() == struct.pack("<6H", 5, 6, 7, 8, 9, 10)
    assert sorted(os.listdir(tmp_path)) == ["expected.idx", "pair.bin", "pair.idx"]


def test_reading(prefix: str) -> None:
    reader = IndexedReader(prefix)
    assert (reader.dtype, len(reader), reader.documents, reader.tokens_total, reader.empty, reader.empty_sequences) == (np.uint16, 3, 4, 6, 1, 0)
    assert reader.lengths.dtype == np.int32
    assert reader.pointers.dtype == reader.document_index.dtype == np.int64
    assert [reader.read(i).tolist() for i in range(3)] == [[5, 6, 7], [8], [9, 10]]
    assert reader.read(0, 1).tolist() == [6, 7]
    assert reader.read(2, 0, 1).tolist() == [9]
    assert reader.read(1, 1, 0).tolist() == []
    assert reader.read(0).base is not None, "a view, not a copy"
    assert not reader.read(0).flags.writeable
    for wrong in [(3,), (-1,), (0, 4), (0, 0, 4), (0, -1), (0, 2, -1)]:
        with pytest.raises(IndexError, match="pair"):
            reader.read(*wrong)


def test_another_process_reopens_the_files(prefix: str) -> None:
    sent = pickle.dumps(IndexedReader(prefix))
    assert len(sent) < 500
    assert pickle.loads(sent).read(2).tolist() == [9, 10]


@settings(max_examples=30, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 255), max_size=6), max_size=12),
    dtype=st.sampled_from(["uint8", "int16", "int32", "int64"]),
    data=st.data(),
)
def test_one_by_one_equals_many_at_once(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], dtype: str, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("pairs")
    with IndexedWriter(folder / "one", dtype) as one, IndexedWriter(folder / "many", dtype) as many:
        for document in documents:
            one.add(document)
        cut = data.draw(st.integers(0, len(documents)))
        for group in (documents[:cut], documents[cut:]):
            many.add_many([token for document in group for token in document], [len(document) for document in group])
    for ending in ("bin", "idx"):
        assert (folder / f"one.{ending}").read_bytes() == (folder / f"many.{ending}").read_bytes()
    reader = IndexedReader(folder / "one")
    index = reader.document_index
    read = [np.concatenate([[], *(reader.read(s) for s in range(index[d], index[d + 1]))]).tolist() for d in range(reader.documents)]
    assert read == documents
    assert reader.empty == sum(not document for document in documents)


def test_sentences_and_zero_length_sequences(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "s", np.int32) as writer:
        writer.add_document([1, 2, 3], [2, 0, 1])
        writer.add([4])
        writer.add_document([], [0, 0])
        writer.add_document([], [])
    reader = IndexedReader(tmp_path / "s")
    assert reader.lengths.tolist() == [2, 0, 1, 1, 0, 0]
    assert reader.document_index.tolist() == [0, 3, 4, 6, 6]
    assert (reader.empty, reader.empty_sequences) == (2, 3)


def test_an_empty_pair_is_legal(tmp_path: Path) -> None:
    IndexedWriter(tmp_path / "none", np.uint16).finish()
    reader = IndexedReader(tmp_path / "none")
    assert (len(reader), reader.documents, reader.tokens_total) == (0, 0, 0)


# ------------------------------------------------------------------------------------------------------------- C07, damage
def _lengthen(path: str, tail: bytes) -> None:
    with open(path, "ab") as file:
        file.write(tail)


def _cut_tail(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


DAMAGE = {
    "last 8 bytes missing": (lambda p: _cut_tail(Path(f"{p}.idx"), 8), r"pair\.idx.*size.*expected 110 bytes.*found 102.*cut short"),
    "longer than it says": (lambda p: _lengthen(f"{p}.idx", b"x"), r"pair\.idx.*size.*expected 110.*found 111.*longer"),
    "empty index": (lambda p: Path(f"{p}.idx").write_bytes(b""), r"pair\.idx.*at least 34 bytes.*found 0"),
    "wrong magic": (lambda p: by_hand(p, 8, [3], [0], [0, 1], magic=b"TNTIDX\x00\x00\x00"), r"pair\.idx.*magic.*MMIDIDX.*TNTIDX"),
    "other version": (lambda p: by_hand(p, 8, [3], [0], [0, 1], version=2), r"pair\.idx.*version.*expected 1, found 2"),
    "unknown dtype": (lambda p: by_hand(p, 9, [3], [0], [0, 1]), r"pair\.idx.*dtype code.*4 int32.*found 9"),
    "no document entries": (lambda p: by_hand(p, 8, [3], [0], []), r"pair\.idx.*document index entries.*found 0"),
    "absurd count": (lambda p: by_hand(p, 8, [3], [0], [0, 1], sequences=2**61), r"pair\.idx.*size.*2305843009213693952 sequences"),
    "last entry": (lambda p: by_hand(p, 8, [6], [0], [0, 7]), r"pair\.idx.*document index.*last entry 1.*found 7"),
    "first entry": (lambda p: by_hand(p, 8, [6], [0], [1, 1]), r"pair\.idx.*first entry 0, found 1"),
    "falling entries": (lambda p: by_hand(p, 8, [3, 3], [0, 6], [0, 2, 1, 2]), r"pair\.idx.*entry 2.*at least 2, found 1"),
    "negative length": (lambda p: by_hand(p, 8, [-6], [0], [0, 1]), r"pair\.idx.*length of sequence 0.*found -6"),
    "wrapped pointer": (lambda p: by_hand(p, 8, [3, 3], [0, -6], [0, 1, 2]), r"pair\.idx.*pointer of sequence 1.*expected 6, found -6.*overflow"),
    "short bin": (lambda p: _cut_tail(Path(f"{p}.bin"), 2), r"pair\.bin.*expected 12 bytes.*found 10"),
    "empty bin": (lambda p: Path(f"{p}.bin").write_bytes(b""), r"pair\.bin.*expected 12 bytes.*found 0"),
    "bin of another corpus": (lambda p: _lengthen(f"{p}.bin", b"more"), r"pair\.bin.*expected 12.*found 16.*do not belong together"),
    "bin missing": (lambda p: os.remove(f"{p}.bin"), r"pair\.bin can't be opened: No such file"),
    "index missing": (lambda p: os.remove(f"{p}.idx"), r"pair\.idx can't be opened: No such file"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_on_opening(prefix: str, damage: str) -> None:
    inflict, message = DAMAGE[damage]
    inflict(prefix)
    with pytest.raises(UserError, match=message):
        IndexedReader(prefix)


def test_multimodal_section_must_be_told(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "m", np.uint8) as writer:
        writer.add_many([1, 2, 3], [1, 2])
    with open(tmp_path / "m.idx", "ab") as file:
        file.write(bytes([0, 1]))
    with pytest.raises(UserError, match=r"multimodal=True"):
        IndexedReader(tmp_path / "m")
    reader = IndexedReader(tmp_path / "m", multimodal=True)
    assert reader.modes is not None
    assert reader.modes.tolist() == [0, 1]


# -------------------------------------------------------------------------------------------------- C03, beyond 32 bits
def test_offsets_beyond_32_bits(tmp_path: Path) -> None:
    """Hand-made, over a sparse .bin: the byte offset passes 2^31 and 2^32 between sequences of ordinary size."""
    lengths = [700_000_000, 500_000_000, 3]
    pointers = [0, 2_800_000_000, 4_800_000_000]
    prefix = by_hand(tmp_path / "far", 4, lengths, pointers, [0, 1, 2, 3])
    with open(f"{prefix}.bin", "wb") as file:
        file.seek(pointers[1] - 4)
        file.write(struct.pack("<2i", 11, 12))
        file.seek(pointers[2])
        file.write(struct.pack("<3i", 7, 8, 9))
    reader = IndexedReader(prefix)
    assert reader.tokens_total == 1_200_000_003
    assert reader.read(2).tolist() == [7, 8, 9]
    assert reader.read(0, 699_999_999).tolist() == [11]
    assert reader.read(1, 0, 2).tolist() == [12, 0]


def test_counts_that_do_not_fit_are_refused_before_writing(tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "w", np.uint16)
    with pytest.raises(UserError, match="0 to 2147483647 tokens, found 2147483648"):
        writer.add_many(np.zeros(0, np.uint16), [2**31])
    with pytest.raises(UserError, match="found -1"):
        writer.add_many([], [-1])
    writer.tokens_total = 2**62
    with pytest.raises(UserError, match="can't be addressed"):
        writer.add([1])
    writer.discard()


# --------------------------------------------------------------------------------------------------------------- writing
def test_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="add up to 2"), IndexedWriter(tmp_path / "w", np.uint16) as writer:
        writer.add_many([1], [2])
    assert os.listdir(tmp_path) == []


def test_final_names_appear_at_the_end(tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "w", np.uint16)
    writer.add([1])
    assert not {"w.bin", "w.idx"} & set(os.listdir(tmp_path))
    writer.finish()
    writer.finish()
    assert sorted(os.listdir(tmp_path)) == ["w.bin", "w.idx"]
    with pytest.raises(RuntimeError, match="closed"):
        writer.add([1])


@pytest.mark.parametrize(("dtype", "ids"), [("uint16", [65536]), ("uint16", [-1]), ("int32", [2**31]), ("uint8", [256])])
def test_ids_never_wrap(tmp_path: Path, dtype: str, ids: list[int]) -> None:
    with pytest.raises(UserError, match=f"do not fit {dtype}"), IndexedWriter(tmp_path / "w", dtype) as writer:
        writer.add(ids)
    with pytest.raises(UserError, match="must be integers"), IndexedWriter(tmp_path / "w", dtype) as writer:
        writer.add(np.array([1.5]))
    assert os.listdir(tmp_path) == []


def test_lengths_must_add_up(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"add up to 3 tokens, .* \(2,\)"), IndexedWriter(tmp_path / "w", np.uint16) as writer:
        writer.add_many([1, 2], [1, 2])


def test_dtype_for_vocab() -> None:
    assert dtype_for_vocab(65499) == np.uint16
    assert dtype_for_vocab(65500) == np.int32
    with pytest.raises(UserError, match="legal"):
        dtype_for_vocab(2**31 + 1)
    with pytest.raises(UserError, match="no code"):
        IndexedWriter("unused", np.uint32)
