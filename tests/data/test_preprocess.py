"""Preprocessing: every record once, in order, whatever the kind of file, the cut, the workers and the shards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from preprocess_helpers import EOD, TEXTS, Said, files_of, lines, run, texts_of, write

from megadcp.config.check import UserError
from megadcp.data.indexed import IndexedReader
from megadcp.data.manifest import load_manifest
from megadcp.data.merge import merge
from megadcp.data.preprocess import Preprocess, preprocess
from megadcp.data.preprocess_worker import with_eod
from megadcp.data.raw_files import find_sources
from megadcp.data.raw_parts import cut, part_bytes
from megadcp.data.raw_records import read_part
from megadcp.data.tokenizer import open_tokenizer

# ------------------------------------------------------------------------------------------------------- C01, line ends
ODD = ["plain", "a\u2028b\u2029c\u0085d\x0b\x0c\x1c\x1e", 'tab\tquote" back\\slash', "crlf\r\nstays", "\ufeffmark", "\U0001f9ea", "  spaces  "]


@pytest.mark.parametrize("part_size", [1, 7, 50, 10_000])
def test_records_end_at_lf_only(tmp_path: Path, part_size: int) -> None:
    records = [json.dumps({"text": text}, ensure_ascii=False).encode() for text in ODD]
    data = b"\xef\xbb\xbf" + b"\r\n".join(records)  # BOM, CRLF, raw separators, no final line end
    manifest = run(write(tmp_path / "odd.jsonl", data), tmp_path / "out", part_size=part_size)
    assert texts_of(tmp_path / "out") == ODD
    assert manifest.counts.documents == len(ODD)


def test_blank_lines_are_no_records(tmp_path: Path) -> None:
    said = Said()
    data = b"\n" + lines(["a"]) + b"  \r\n" + lines(["", "b"]) + b"\n\n"
    manifest = run(write(tmp_path / "in.jsonl", data), tmp_path / "out", append_eod=True, say=said)
    assert texts_of(tmp_path / "out") == ["a", "", "b"]
    assert (manifest.counts.blank_lines, manifest.counts.documents, manifest.counts.empty_documents, manifest.counts.tokens) == (4, 3, 1, 4)
    assert said.has("4 blank lines")
    assert said.has("1 documents are empty")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(max_size=12), max_size=10), st.integers(1, 80), st.integers(1, 5), st.booleans())
def test_any_cut_gives_all_records_once(tmp_path_factory: pytest.TempPathFactory, texts: list[str], size: int, shards: int, final: bool) -> None:
    folder = tmp_path_factory.mktemp("cut")
    texts = [text.encode("utf-8", "ignore").decode() for text in texts]
    data = b"".join(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n" for text in texts)
    middle = len(texts) // 2
    write(folder / "a.jsonl", data[: None if final else -1])
    write(folder / "b.txt", "".join(texts[:middle]).encode())
    write(folder / "c.jsonl.gz", lines(texts[middle:]))
    sources, ignored = find_sources([str(folder)])
    found, numbers = [], []
    for shard in range(shards):
        for part in cut(sources, (shard, shards), size):
            count: list[int] = []
            found += [record.texts[0] for record in read_part(part, sources, ["text"], count)]
            numbers += count
    assert found == [*texts, "".join(texts[:middle]), *texts[middle:]]
    assert ignored == 0
    assert sum(numbers) == len(found)


def test_size_of_a_part() -> None:
    assert part_bytes(0) == part_bytes(40_000_000) == 1 << 20
    assert part_bytes(1 << 32) == 1 << 24
    assert part_bytes(1 << 37) == 1 << 26
    assert 10**13 // part_bytes(10**13) <= 20_000


# --------------------------------------------------------------------------------- C05, workers and shards leave no trace
def test_shards_and_workers_give_identical_bytes(tmp_path: Path) -> None:
    middle = 12
    inputs = [
        write(tmp_path / "a.jsonl", lines(TEXTS[:middle])),
        write(tmp_path / "b.jsonl", lines(["x" * 3_000])),
        write(tmp_path / "c.jsonl", lines(TEXTS[middle:])),
    ]
    expected = [*TEXTS[:middle], "x" * 3_000, *TEXTS[middle:]]
    run(inputs, tmp_path / "one", append_eod=True)
    assert texts_of(tmp_path / "one") == expected
    for workers in (2, 3):
        run(inputs, tmp_path / f"w{workers}", append_eod=True, workers=workers, part_size=500)
        assert files_of(tmp_path / f"w{workers}") == files_of(tmp_path / "one")
    counts = [run(inputs, tmp_path / f"s{i}", append_eod=True, shard=(i, 3)).counts for i in range(3)]
    assert sum(count.documents for count in counts) == len(expected)
    merge([str(tmp_path / f"s{i}") for i in (2, 0, 1)], str(tmp_path / "merged"), False, lambda line: None)
    assert files_of(tmp_path / "merged") == files_of(tmp_path / "one")


def test_a_shard_may_hold_one_document_or_none(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines(["long " * 200, "b"]))
    run(path, tmp_path / "one")
    counts = [run(path, tmp_path / f"s{i}", shard=(i, 4)).counts.documents for i in range(4)]
    assert counts == [1, 0, 0, 1]
    merge([str(tmp_path / f"s{i}") for i in range(4)], str(tmp_path / "merged"), False, lambda line: None)
    assert files_of(tmp_path / "merged") == files_of(tmp_path / "one")


# --------------------------------------------------------------------------------------------------------- kinds of files
def test_a_folder_of_all_kinds(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    folder = tmp_path / "in"
    write(folder / "1.jsonl", lines(TEXTS[0:5]))
    write(folder / "2.jsonl.gz", lines(TEXTS[5:10]))
    write(folder / "deep" / "3.jsonl.zst", lines(TEXTS[10:15]))
    pyarrow.parquet.write_table(pa.table({"text": TEXTS[15:20], "other": [1] * 5}), folder / "deep" / "4.parquet", row_group_size=2)
    write(folder / "deeper.txt", b"\xef\xbb\xbf" + TEXTS[20].encode() + b"\r\n")
    write(folder / "empty.txt", b"")
    write(folder / "notes.md", b"not text to train on")
    write(folder / ".hidden.jsonl", lines(["hidden"]))
    write(folder / ".git" / "x.jsonl", lines(["hidden"]))
    said = Said()
    for part_size in (0, 1, 100):
        run(folder, tmp_path / f"out{part_size}", part_size=part_size, say=said)
        assert texts_of(tmp_path / f"out{part_size}") == [*TEXTS[:20], TEXTS[20] + "\r\n", ""]
        assert files_of(tmp_path / f"out{part_size}") == files_of(tmp_path / "out0")
    assert said.has("6 input files")
    assert said.has("1 files of other kinds passed over")


def test_inputs_keep_their_order_and_globs_are_sorted(tmp_path: Path) -> None:
    for name in "cab":
        write(tmp_path / f"{name}.jsonl", lines([name]))
    write(tmp_path / "z.jsonl", lines(["z"]))
    run([str(tmp_path / "z.jsonl"), str(tmp_path / "[abc].*")], tmp_path / "out")
    assert texts_of(tmp_path / "out") == ["z", "a", "b", "c"]


def test_several_keys_give_several_pairs(tmp_path: Path) -> None:
    data = b"".join(json.dumps({"title": f"t{n}", "body": "x" * n, "id": n}).encode() + b"\n" for n in range(5))
    job = Preprocess((write(tmp_path / "in.jsonl", data),), str(tmp_path / "out"), "bytes", keys=("title", "body"), part_size=30)
    titles, bodies = preprocess(job, Said())
    assert texts_of(tmp_path / "out_title") == [f"t{n}" for n in range(5)]
    assert texts_of(tmp_path / "out_body") == ["x" * n for n in range(5)]
    assert (titles.key, bodies.key, bodies.counts.empty_documents) == ("title", "body", 1)
    assert not (tmp_path / "out.bin").exists()
    write(tmp_path / "in.txt", b"one")
    with pytest.raises(UserError, match=r"in\.txt is plain text.*2 keys \(title, body\)"):
        preprocess(Preprocess((str(tmp_path / "in.txt"),), str(tmp_path / "o2"), "bytes", keys=("title", "body")), Said())


# -------------------------------------------------------------------------------------------------------------- tokenizers
def test_ids_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 3), model_prefix=str(tmp_path / "m"), vocab_size=340, byte_fallback=True, minloglevel=2, model_type="bpe"
    )
    job = Preprocess(
        (write(tmp_path / "in.jsonl", lines([*TEXTS, ""])),), str(tmp_path / "out"), "sentencepiece", str(tmp_path / "m.model"), append_eod=True
    )
    manifest = preprocess(job, Said())[0]
    tokenizer = open_tokenizer("sentencepiece", str(tmp_path / "m.model"))
    reader = IndexedReader(tmp_path / "out")
    assert reader.documents == len(TEXTS) + 1
    assert [reader.read(i).tolist() for i in range(len(reader))] == [[*tokenizer.encode(text), tokenizer.eod] for text in TEXTS]
    assert manifest.origin.tokenizer == {
        "kind": "sentencepiece",
        "file": "m.model",
        "fingerprint": tokenizer.fingerprint,
        "vocab_size": 340,
        "eod": 2,
    }
    assert manifest.dtype == reader.dtype.name == "uint16"


FORGED = ["</s>", "a </s> b</s></s>", "<s><pad><unk>", "<|endoftext|>", "ends with </s>"]


@pytest.mark.parametrize("kind", ["control_symbols", "user_defined_symbols"])
def test_text_does_not_forge_the_end_of_a_document(tmp_path: Path, kind: str) -> None:
    """C19: as many end-of-document ids as documents, and the same text back."""
    symbols = {kind: ["<pad>", "<|endoftext|>"] + (["</s>"] if kind == "user_defined_symbols" else [])}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS + FORGED), model_prefix=str(tmp_path / "m"), vocab_size=350, byte_fallback=True, minloglevel=2, model_type="bpe",
        remove_extra_whitespaces=False, add_dummy_prefix=False, normalization_rule_name="identity", **symbols,
    )  # fmt: skip
    source = write(tmp_path / "in.jsonl", lines([*FORGED, *TEXTS]))
    said = Said()
    manifest = preprocess(Preprocess((source,), str(tmp_path / "out"), "sentencepiece", str(tmp_path / "m.model"), append_eod=True), said)[0]
    reader = IndexedReader(tmp_path / "out")
    tokenizer = open_tokenizer("sentencepiece", str(tmp_path / "m.model"))
    documents = [reader.read(i) for i in range(len(reader))]
    assert sum(int((document == tokenizer.eod).sum()) for document in documents) == len(documents) == len(FORGED) + len(TEXTS)
    assert all(document[-1] == tokenizer.eod for document in documents)
    assert manifest.counts.documents_with_eod_in_text == 0
    assert not said.has("warning")


def test_eod_goes_after_documents_with_text() -> None:
    ids, lengths = with_eod(np.array([1, 2, 3], np.int32), np.array([2, 0, 1, 0]), 9, np.dtype(np.uint16))
    assert ids.tolist() == [1, 2, 9, 3, 9]
    assert lengths.tolist() == [3, 0, 2, 0]
    assert ids.dtype == np.uint16
    ids, lengths = with_eod(np.zeros(0, np.int32), np.zeros(0, np.int64), 9, np.dtype(np.int32))
    assert (ids.tolist(), lengths.tolist()) == ([], [])


# ---------------------------------------------------------------------------------------------------- what is said and kept
def test_manifest_and_summary(tmp_path: Path) -> None:
    said = Said()
    path = write(tmp_path / "in.jsonl", lines(TEXTS))
    manifest = run(path, tmp_path / "deep" / "out", append_eod=True, say=said)
    assert load_manifest(tmp_path / "deep" / "out") == manifest
    reader = IndexedReader(tmp_path / "deep" / "out")
    assert (manifest.counts.documents, manifest.counts.tokens) == (40, reader.tokens_total)
    assert reader.tokens_total == sum(len(text.encode()) + 1 for text in TEXTS)
    assert all(int(reader.read(i)[-1]) == EOD for i in range(len(reader)))
    source = manifest.origin.sources[0]
    assert (source.path, source.bytes, source.modified_ns) == (path, os.path.getsize(path), os.stat(path).st_mtime_ns)
    assert sorted(os.listdir(tmp_path / "deep")) == ["out.bin", "out.idx", "out.json"]
    for text in ("tokenizer bytes: 257 ids, kept as uint16", "documents/s", "MB/s", "tokens/s", "40 documents", "of docs"):
        assert said.has(text), text


def test_requests_that_can_not_be_met(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", lines(TEXTS))
    write(tmp_path / "notes.md", b"")
    (tmp_path / "empty").mkdir()
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    wrong: list[tuple[dict[str, object], str]] = [
        ({"shard": (3, 3)}, "legal are 0/3 to 2/3"),
        ({"workers": 0}, "--workers 0: at least 1"),
        ({"bad_records": "ignore"}, "legal are stop and skip"),
        ({"keys": ("a", "a")}, "each once"),
        ({"keys": ("a/b", "c")}, "names a file"),
        ({"inputs": tmp_path / "none.jsonl"}, "no such file"),
        ({"inputs": tmp_path / "empty"}, "without files of these kinds"),
        ({"inputs": tmp_path / "notes.md"}, r"unknown kind of file; legal endings: \.jsonl, "),
        ({"inputs": [path, path]}, "given twice"),
        ({"inputs": [path, str(link)]}, "given twice"),
        ({"prefix": tmp_path / "empty"}, "--output-prefix"),
    ]
    for setting, message in wrong:
        with pytest.raises(UserError, match=message):
            run(setting.pop("inputs", path), setting.pop("prefix", tmp_path / "out"), **setting)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="does not exist"):
        preprocess(Preprocess((path,), str(tmp_path / "out"), "sentencepiece", str(tmp_path / "none.model")), Said())
    assert sorted(os.listdir(tmp_path)) == ["empty", "in.jsonl", "link.jsonl", "notes.md"], "nothing was begun"


def test_parquet_columns_are_checked_first(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.table({"body": ["a"], "number": [1]}), tmp_path / "in.parquet")
    with pytest.raises(UserError, match=r"no column 'text'; its columns: body, number"):
        run(tmp_path / "in.parquet", tmp_path / "out")
    with pytest.raises(UserError, match=r"column 'number' holds int64, expected text"):
        run(tmp_path / "in.parquet", tmp_path / "out", keys=("number",))


def test_workers_load_no_torch() -> None:
    code = "import sys, megadcp.data.preprocess_worker; print(sorted({'torch', 'hydra', 'pyarrow', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
