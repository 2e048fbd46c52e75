"""Look into a dataset: statistics, the length histogram as text and SVG, and single documents as text.

python tools/inspect_data.py PREFIX                          statistics and histogram
python tools/inspect_data.py PREFIX --svg lengths.svg        the histogram as a picture too
python tools/inspect_data.py PREFIX --document 5 [--tokenizer tokenizer.model]
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import numpy as np

from megadcp.config.check import UserError
from megadcp.data.indexed import IndexedReader
from megadcp.data.manifest import load_manifest
from megadcp.data.pictures import length_histogram_svg, length_histogram_text, summarise
from megadcp.data.tokenizer import Tokenizer, open_tokenizer


def document_lengths(reader: IndexedReader) -> np.ndarray:
    """Tokens of each document, int64 [D - 1]; a document may consist of several sequences."""
    ends = np.concatenate([[0], np.cumsum(reader.lengths, dtype=np.int64)])
    return np.diff(ends[reader.document_index])


def document_tokens(reader: IndexedReader, document: int) -> np.ndarray:
    """Ids of one document."""
    if not 0 <= document < reader.documents:
        legal = f"legal here: 0 to {reader.documents - 1}" if reader.documents else "it is empty"
        raise UserError(f"--document {document}: {reader.prefix} has {reader.documents:,} documents; {legal}")
    first, stop = int(reader.document_index[document]), int(reader.document_index[document + 1])
    return np.concatenate([reader.read(sequence) for sequence in range(first, stop)] or [np.zeros(0, reader.dtype)])


def find_tokenizer(reader: IndexedReader, options: argparse.Namespace) -> Tokenizer:
    """The one that was named, its kind by the file's name where --kind does not say it; else the one of the manifest, if it lies beside it."""
    manifest = load_manifest(reader.prefix)
    made_by = manifest.origin.tokenizer if manifest is not None else {}
    if not options.tokenizer and options.kind is None and made_by:
        beside = Path(reader.prefix).parent / str(made_by["file"])
        if made_by["kind"] == "bytes" or beside.is_file():
            found = open_tokenizer(str(made_by["kind"]), str(beside))
            if found.fingerprint == made_by["fingerprint"]:
                return found
    if not options.tokenizer and options.kind != "bytes":
        raise UserError("--document needs --tokenizer MODEL (a .model or tokenizer.json file), --kind bytes, or --ids to see numbers")
    kind = options.kind or ("huggingface" if options.tokenizer.endswith(".json") or Path(options.tokenizer).is_dir() else "sentencepiece")
    return open_tokenizer(kind, options.tokenizer)


def show_document(reader: IndexedReader, options: argparse.Namespace) -> None:
    """Print one document, as text or as ids."""
    tokens = document_tokens(reader, options.document)
    tokenizer = None if options.ids else find_tokenizer(reader, options)
    shown = tokens if options.tokens == 0 else tokens[: options.tokens]
    cut = f", the first {len(shown):,} of them below" if len(shown) < len(tokens) else ""
    if tokenizer is None:
        print(f"document {options.document}: {len(tokens):,} tokens{cut}\n" + " ".join(map(str, shown.tolist())))
        return
    ends = int(np.count_nonzero(tokens == tokenizer.eod))
    last = len(tokens) and tokens[-1] == tokenizer.eod
    end = "ends with the end-of-document token" if last else "no end-of-document token at its end"
    inside = f", {ends - int(last)} more inside" if ends > int(last) else ""
    if len(tokens) and int(tokens.max()) >= tokenizer.vocab_size:
        raise UserError(
            f"document {options.document} holds id {int(tokens.max())}, the tokenizer has {tokenizer.vocab_size}: it did not make this data"
        )
    print(f"document {options.document}: {len(tokens):,} tokens, {end}{inside}{cut}")
    print(tokenizer.decode(shown.tolist()))


def show_statistics(reader: IndexedReader, options: argparse.Namespace) -> None:
    """Print counts and the histogram; write the picture where asked."""
    lengths = document_lengths(reader)
    summary = summarise(lengths)
    size = reader.tokens_total * reader.dtype.itemsize
    print(f"{reader.prefix}: {reader.dtype.name}, {size / 1e6:,.1f} MB, {len(reader.lengths):,} sequences")
    print(f"documents  {summary['documents']:,} ({summary['empty']:,} empty)")
    print(f"tokens     {summary['tokens']:,}")
    print("length     " + "  ".join(f"{name} {summary[name]:,}" for name in ("p50", "p90", "p99", "max")))
    manifest = load_manifest(reader.prefix)
    if manifest is not None:
        tokenizer = manifest.origin.tokenizer
        end = "an end-of-document token after each" if manifest.origin.append_eod else "no end-of-document tokens appended"
        print(f"made by    {tokenizer['file'] or tokenizer['kind']} ({tokenizer['kind']}, {tokenizer['vocab_size']:,} ids), {end}")
    print()
    print(length_histogram_text(lengths))
    if options.svg:
        file = Path(options.svg)
        file.write_text(length_histogram_svg(lengths, f"Document lengths of {Path(reader.prefix).name}"), encoding="utf-8")
        print(f"wrote {file}")


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("prefix", help="dataset: path without .bin/.idx")
    parser.add_argument("--svg", default="", help="write the length histogram to this file")
    parser.add_argument("--document", type=int, default=None, help="show this document (counted from 0) instead of the statistics")
    parser.add_argument("--tokenizer", default="", help="model file that made the data")
    parser.add_argument("--kind", choices=("sentencepiece", "huggingface", "bytes"), default=None, help="its kind; else by the file's name")
    parser.add_argument("--ids", action="store_true", help="show the document as token ids")
    parser.add_argument("--tokens", type=int, default=0, help="show at most this many tokens; 0 shows all")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Exit code: 0 done, 2 a request that can't be met."""
    options = arguments(argv)
    try:
        prefix = options.prefix.removesuffix(".bin").removesuffix(".idx")
        reader = IndexedReader(prefix)
        if options.document is None:
            show_statistics(reader, options)
        else:
            show_document(reader, options)
    except UserError as error:
        print(f"inspect_data: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output has seen enough (head, less)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        print(f"inspect_data: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
