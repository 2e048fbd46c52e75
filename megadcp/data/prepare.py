"""Making the data of a run that has none: corpus, tokenizer and dataset, from the running Python's own library.

Three stages, each of them whole or absent: the corpus is a folder renamed when finished, the tokenizer and the dataset are files
written under temporary names. A call does the stages that are missing, so it goes on after an interruption and does nothing when all is
there. A lock on a file, which the system gives back when its holder dies, lets one process work while others wait.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megadcp.config.check import UserError
from megadcp.config.schema import DataConfig, PrepareConfig
from megadcp.data.indexed import bin_path, idx_path
from megadcp.data.manifest import load_manifest
from megadcp.data.preprocess import Preprocess, preprocess
from megadcp.data.python_library import collect, write_corpus
from megadcp.data.tokenizer import Tokenizer, open_tokenizer
from megadcp.data.train_tokenizer import TrainSettings, VocabularyError, save, train

Say = Callable[[str], None]
ABOUT = "prepared.json"  # what the folder was made with
SEED = 1234  # of the tokenizer's sample
DEFINING = ("kind", "corpus_bytes", "tokenizer_model", "tokenizer_lines")


def prepare(data: DataConfig, say: Say, vocab: int = 4096) -> None:
    """Make what is missing under data.prepare.folder: corpus/*.jsonl, tokenizer.model, dataset.bin/.idx/.json.

    vocab: the model's vocabulary; a new tokenizer gets that many entries (or as many as the text can fill), an existing one may have
    fewer. UserError when the folder was made with other settings.
    """
    wanted = data.prepare
    if wanted.kind == "none":
        return
    if wanted.kind != "python_library":
        raise UserError(f"data.prepare.kind={wanted.kind!r} does not exist; legal here: none, python_library")
    folder = Path(wanted.folder)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"data.prepare.folder={folder} is a file; give a folder")
    folder.mkdir(parents=True, exist_ok=True)
    with _only_one(folder, say) as alone:
        _settle(folder, wanted)
        if _complete(folder, vocab, say):
            return
        _corpus(folder, wanted, alone, say)
        _tokenizer(folder, wanted, vocab, say)
        _dataset(folder, wanted, say)


def _settle(folder: Path, wanted: PrepareConfig) -> None:
    """Refuse a folder made with other settings; write them down in a new one."""
    about = folder / ABOUT
    asked = {name: getattr(wanted, name) for name in DEFINING}
    if not about.is_file():
        if any(folder.joinpath(name).exists() for name in ("corpus", "tokenizer.model", "dataset.bin", "dataset.idx")):
            raise UserError(f"data.prepare.folder={folder} holds data of another origin (no {ABOUT}); choose another folder")
        _write_json(about, asked)
        return
    try:
        found = json.loads(about.read_text(encoding="utf-8"))
    except ValueError as fault:
        raise UserError(f"{about} is damaged ({fault}); remove {folder} to have it made again") from None
    for name, value in asked.items():
        if found.get(name) != value:
            what = f"was made with data.prepare.{name}={found.get(name)}, asked for is {value}"
            raise UserError(f"data.prepare.folder={folder} {what}; give another folder, or remove this one to have it made again")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


@contextlib.contextmanager
def _only_one(folder: Path, say: Say) -> Iterator[bool]:
    """Hold the folder's lock; False where the file system knows none: then several may work, each under names of its own."""
    try:
        import fcntl
    except ImportError:
        yield False
        return
    alone = True
    with open(folder / ".lock", "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"data: another process is preparing {folder}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as fault:
            alone = False
            say(f"data: no file locks in {folder} ({fault.strerror}); going on without")
        yield alone


def _corpus(folder: Path, wanted: PrepareConfig, alone: bool, say: Say) -> None:
    target = folder / "corpus"
    if target.is_dir():
        return
    for left in folder.glob(".corpus.*.tmp") if alone else ():  # of processes that were ended: the lock says that none is at work
        shutil.rmtree(left, ignore_errors=True)
    begin = time.perf_counter()
    found = collect(wanted.corpus_bytes)
    if not found.documents:
        raise UserError("data.prepare.kind=python_library: this Python comes without source files; give your own data (data=corpus)")
    temporary = folder / f".corpus.{os.getpid()}.tmp"
    try:
        write_corpus(found, temporary)
        os.rename(temporary, target)
    except OSError:
        if not target.is_dir():  # else another process was faster, with the same content
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    origin = f"{found.from_library:,} from the library of Python {sys.version.split()[0]}"
    origin += f", {found.from_packages:,} from installed packages" if found.from_packages else ""
    few = f" (fewer than data.prepare.corpus_bytes={wanted.corpus_bytes:,}: no more files)" if found.bytes < wanted.corpus_bytes else ""
    skipped = f"; passed over: {found.skipped()}" if found.skipped() else ""
    say(f"corpus: {len(found.documents):,} documents, {found.bytes / 1e6:.1f} MB{few}, {origin}{skipped} ({time.perf_counter() - begin:.1f} s)")


def corpus_texts(folder: Path) -> Iterator[str]:
    """The text of each document, in order."""
    for part in sorted((folder / "corpus").glob("*.jsonl")):
        with open(part, encoding="utf-8", newline="\n") as file:
            for line in file:
                yield json.loads(line)["text"]


def _tokenizer(folder: Path, wanted: PrepareConfig, vocab: int, say: Say) -> None:
    path = folder / "tokenizer.model"
    if not path.is_file():
        begin = time.perf_counter()
        settings = TrainSettings(vocab, wanted.tokenizer_model, wanted.tokenizer_lines, SEED)
        try:
            trained = train(corpus_texts(folder), settings)
        except VocabularyError as fault:
            if fault.largest is None:
                raise UserError(f"model.vocab={vocab} is too small for a tokenizer of this corpus: {fault}") from None
            say(f"tokenizer: the corpus can fill {fault.largest:,} entries of model.vocab={vocab:,}; the rest of the rows will not be used")
            trained = train(corpus_texts(folder), dataclasses.replace(settings, vocab=fault.largest))
        save(trained.definition, path, overwrite=True)
        kind = f"{settings.model}, {trained.vocab:,} entries from {trained.lines_used:,} of {trained.lines_seen:,} lines"
        check = f"{trained.exact} of {trained.checked} sampled documents come back exactly"
        say(f"tokenizer: sentencepiece {kind}; {check} ({time.perf_counter() - begin:.1f} s)")
    _open(folder, vocab)


def _complete(folder: Path, vocab: int, say: Say) -> bool:
    """Whether tokenizer and dataset are there (the corpus has done its work then), and belong together."""
    prefix = folder / "dataset"
    manifest = load_manifest(prefix)
    files = (bin_path(prefix), idx_path(prefix), folder / "tokenizer.model")
    if manifest is None or not all(file.is_file() for file in files):
        return False
    tokenizer = _open(folder, vocab)
    if manifest.origin.tokenizer.get("fingerprint") != tokenizer.fingerprint:
        raise UserError(f"{prefix}.json says that another tokenizer than {files[2]} made the dataset; remove {folder} to have it made again")
    counts = manifest.counts
    say(f"dataset: {prefix} is there: {counts.documents:,} documents, {counts.tokens:,} tokens of a vocabulary of {tokenizer.vocab_size:,}")
    return True


def _open(folder: Path, vocab: int) -> Tokenizer:
    """The folder's tokenizer, if the model has room for it."""
    path = folder / "tokenizer.model"
    tokenizer = open_tokenizer("sentencepiece", str(path))
    if tokenizer.vocab_size > vocab:
        what = f"{path} has {tokenizer.vocab_size} entries, model.vocab={vocab} has room for fewer"
        raise UserError(f"{what}; legal here: model.vocab={tokenizer.vocab_size} or more, or another data.prepare.folder")
    return tokenizer


def _dataset(folder: Path, wanted: PrepareConfig, say: Say) -> None:
    """The same function that tools/preprocess_data.py calls; overwrite, since whatever is there is not complete."""
    job = Preprocess(
        inputs=(str(folder / "corpus"),),
        output_prefix=str(folder / "dataset"),
        tokenizer_kind="sentencepiece",
        tokenizer_path=str(folder / "tokenizer.model"),
        append_eod=True,
        workers=wanted.workers,
        overwrite=True,
        console="auto",
    )
    preprocess(job, lambda text: None if "\n" in text else say(f"dataset: {text.strip()}"))  # the histogram comes with the run
