"""Raw text to .bin/.idx: this tool against the tokenizer alone and against megatron-core's builder, in one run.

`python tools/benchmark.py preprocess [--megabytes N] [--workers N] [--repeats N] [--vocab N] [--out FILE]`

The corpus is the source text that this Python and its packages bring along, the tokenizers (BPE and unigram) are trained on it. In turn:
- encode: sentencepiece's batch encode of all texts, which lie in memory, to lists of ids, with as many threads as the tool has workers;
- encode + conversion: the same, each list turned into an array of the on-disk dtype; still in memory;
- encode to arrays + conversion: the same without lists of Python integers, where this sentencepiece can (0.2.3);
- this tool: tools/preprocess_data.py from the command line on the .jsonl files: start of Python and of the workers, reading, JSON,
  encoding, end-of-document ids, writing and syncing both files, summary;
- megatron-core (where installed): lines through Pool.imap in chunks of 32, the parent adds each document to IndexedDatasetBuilder, as
  Megatron's own preprocessing program does it; imports are not counted.
Both write the same token counts, which is checked. Throughput is text bytes (UTF-8) per second.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from benchmark import interleaved, machine

from megadcp.config.check import UserError
from megadcp.data.indexed import IndexedReader, dtype_for_vocab
from megadcp.data.python_library import collect, write_corpus
from megadcp.data.train_tokenizer import TrainSettings, train

TOOL = Path(__file__).with_name("preprocess_data.py")
CHUNK = 32  # lines handed to a worker at a time, as in Megatron's program
PEER = "megatron-core"


class Peer:
    """Megatron's way, with the real IndexedDatasetBuilder."""

    def __init__(self, files: list[Path], model: Path, workers: int) -> None:
        """Imports megatron-core; ImportError where it is not installed."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what else it would like to have installed
            from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        self.builder_class: Any = IndexedDatasetBuilder
        self.files, self.model, self.workers = files, model, workers

    def run(self, prefix: Path, dtype: np.dtype[Any]) -> float:
        """Seconds to build the pair at `prefix`."""
        begin = time.perf_counter()
        builder = self.builder_class(f"{prefix}.bin", dtype=dtype.type)
        with multiprocessing.get_context("fork").Pool(self.workers, _start, (str(self.model),)) as pool:
            for ids, lengths in pool.imap(_encode_line, self._lines(), CHUNK):
                builder.add_document(ids, lengths)
        builder.finalize(f"{prefix}.idx")
        return time.perf_counter() - begin

    def _lines(self) -> Iterator[str]:
        for path in self.files:
            with open(path, encoding="utf-8", newline="\n") as file:
                yield from file


_worker: dict[str, sentencepiece.SentencePieceProcessor] = {}  # of a pool process, which has no other way to keep its tokenizer


def _start(model: str) -> None:
    _worker["model"] = sentencepiece.SentencePieceProcessor(model_file=model)


def _encode_line(line: str) -> tuple[list[int], list[int]]:
    model = _worker["model"]
    ids = model.encode(json.loads(line)["text"])
    if ids:
        ids.append(model.eos_id())
    return ids, [len(ids)] if ids else []


def tool(files: list[Path], model: Path, workers: int, prefix: Path) -> None:
    """The command line, start to end."""
    command = [sys.executable, str(TOOL), "--input", *map(str, files), "--tokenizer", str(model), "--append-eod"]
    command += ["--workers", str(workers), "--output-prefix", str(prefix), "--overwrite"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr}")


def contestants(texts: list[str], files: list[Path], model: Path, workers: int, folder: Path) -> dict[str, Callable[[], float | None]]:
    """What is measured, by name."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    dtype = dtype_for_vocab(processor.vocab_size())
    runs: dict[str, Callable[[], Any]] = {
        "encode": lambda: processor.encode(texts, num_threads=workers) and None,
        "encode + conversion": lambda: [np.array(ids, dtype) for ids in processor.encode(texts, num_threads=workers)] and None,
    }
    if hasattr(processor, "encode_as_numpy"):
        runs["encode to arrays + conversion"] = lambda: (
            [ids.astype(dtype) for ids in processor.encode(texts, return_type="numpy", num_threads=workers)] and None
        )
    runs["this tool"] = lambda: tool(files, model, workers, folder / "ours")
    try:
        peer = Peer(files, model, workers)
        runs[PEER] = lambda: peer.run(folder / "theirs", dtype)
    except ImportError:
        print("megatron-core is not installed (extra peers): not compared")
    return runs


def measure(kind: str, texts: list[str], files: list[Path], asked: argparse.Namespace, folder: Path) -> list[str]:
    """Rows of the table for one kind of tokenizer; prints them too."""
    begin = time.perf_counter()
    model = folder / f"{kind}.model"
    model.write_bytes(train(texts, TrainSettings(asked.vocab, kind, asked.lines)).definition)
    print(f"{kind}: tokenizer of {asked.vocab:,} entries trained in {time.perf_counter() - begin:.1f} s", flush=True)
    seconds = interleaved(contestants(texts, files, model, asked.workers, folder), asked.repeats)
    size = sum(len(text.encode()) for text in texts) / 1e6
    tokens = IndexedReader(folder / "ours").tokens_total
    if PEER in seconds and IndexedReader(folder / "theirs").tokens_total != tokens:
        print(f"note: the tool wrote {tokens:,} tokens, {PEER} {IndexedReader(folder / 'theirs').tokens_total:,}")
    rows = []
    for name, times in seconds.items():
        ratios = sorted(other / own for other, own in zip(times, seconds["this tool"], strict=True))
        spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        median = statistics.median(times)
        print(f"{kind:<8} {name:<30} {median:7.2f} s {size / median:8.1f} MB/s   this tool's throughput / this: {spread}", flush=True)
        rows.append(f"| {kind} | {name} | {median:.2f} | {size / median:.1f} | {tokens / median / 1e6:.2f} | {spread} |")
    return rows


def main(argv: list[str]) -> int:
    """Run and print; with --out also write a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=100.0, help="size of the corpus; 40 or more for figures worth quoting")
    parser.add_argument("--workers", type=int, default=2, help="worker processes, and threads of the tokenizer alone")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--lines", type=int, default=40_000, help="lines that the tokenizers are trained on")
    parser.add_argument("--kinds", nargs="+", default=["bpe", "unigram"], choices=["bpe", "unigram"])
    parser.add_argument("--out", default="", help="markdown file to write the table to")
    asked = parser.parse_args(argv)
    try:
        return run(asked)
    except UserError as fault:  # a vocabulary that the corpus can't fill, for instance
        print(f"error: {fault}", file=sys.stderr)
        return 2


def run(asked: argparse.Namespace) -> int:
    """Build the corpus, measure each kind of tokenizer, print, write."""
    with tempfile.TemporaryDirectory(prefix="bench-preprocess-") as name:
        folder = Path(name)
        found = collect(int(asked.megabytes * 1e6))
        write_corpus(found, folder / "corpus")
        files = sorted((folder / "corpus").iterdir())
        texts = [text for _, text in found.documents]
        about = f"{len(texts):,} documents, {found.bytes / 1e6:.1f} MB, {asked.workers} workers, {asked.repeats} repeats; {machine()}"
        print(about, flush=True)
        if found.bytes < 0.99e6 * asked.megabytes:
            print(f"note: this Python has no more source text than {found.bytes / 1e6:.1f} MB")
        rows = [row for kind in asked.kinds for row in measure(kind, texts, files, asked, folder)]
    if asked.out:
        columns = ["tokenizer", "what", "seconds (median)", "MB/s", "million tokens/s", "this tool's throughput / this, median (range)"]
        head = f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|"
        Path(asked.out).write_text(f"{about}\n\n{head}\n" + "\n".join(rows) + "\n", encoding="utf-8")
    return 0
