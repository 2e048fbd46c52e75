"""Train a sentencepiece tokenizer that gives every text back exactly.

python tools/train_tokenizer.py corpus/*.jsonl --output tokenizer.model --vocab 32000
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from megadcp.config.check import UserError
from megadcp.data.raw_files import find_sources
from megadcp.data.raw_parts import cut, lines_before, part_bytes
from megadcp.data.raw_records import read_part
from megadcp.data.train_tokenizer import MODELS, NORMALISATIONS, TrainSettings, refuse_existing, save, train


def documents(inputs: list[str], key: str) -> Iterator[str]:
    """Every document's text, in the order of the files; a bad record is a UserError that names its place."""
    sources, ignored = find_sources(inputs)
    total = sum(source.bytes for source in sources)
    print(f"input: {len(sources)} files, {total / 1e6:.1f} MB" + (f" ({ignored} files of other kinds passed over)" if ignored else ""))
    for part in cut(sources, (0, 1), part_bytes(total)):
        for record in read_part(part, sources, [key], []):
            if isinstance(record.texts, str):
                span = part.spans[record.span]
                source = sources[span.source]
                before = part.first_line - 1 if part.text is not None or source.kind in ("gzip", "zstd") else lines_before(source, span, {})
                raise UserError(f"{source.path}:{before + record.line + 1}: {record.texts}; preprocess with --bad-records, or mend the line")
            yield record.texts[0]


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("inputs", nargs="+", help="files, globs or folders: .jsonl, .jsonl.gz, .jsonl.zst, .parquet, .txt (one document a file)")
    parser.add_argument("--output", required=True, help="model file to write")
    parser.add_argument("--vocab", type=int, default=32_000, help="entries, bytes and control tokens included")
    parser.add_argument("--model", choices=MODELS, default="bpe", help="kind of model; unigram trains more slowly and encodes faster")
    parser.add_argument("--lines", type=int, default=1_000_000, help="size of the sample of lines it is trained on")
    parser.add_argument("--seed", type=int, default=1234, help="of the sample")
    parser.add_argument("--text-key", default="text", help="key of the text in each record")
    parser.add_argument("--threads", type=int, default=1, help="another number may give another unigram model")
    parser.add_argument("--normalisation", choices=NORMALISATIONS, default="identity", help="anything but identity changes texts")
    parser.add_argument("--overwrite", action="store_true", help="replace the output file")
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> None:
    """Train, check, write; prints what it decided."""
    output = Path(options.output)
    refuse_existing(output, options.overwrite)
    for name in ("vocab", "lines", "threads"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name} {getattr(options, name)}: give 1 or more")
    settings = TrainSettings(options.vocab, options.model, options.lines, options.seed, options.threads, options.normalisation)
    begin = time.perf_counter()
    trained = train(documents(options.inputs, options.text_key), settings)
    save(trained.definition, output, options.overwrite)
    print(f"sample: {trained.lines_used:,} of {trained.lines_seen:,} lines, seed {settings.seed}")
    print(f"model: {settings.model}, {trained.vocab:,} entries, {time.perf_counter() - begin:.1f} s")
    note = "" if trained.exact == trained.checked else f" (normalisation={settings.normalisation} changes texts; identity does not)"
    print(f"round trip: {trained.exact} of {trained.checked} sampled documents come back exactly{note}")
    print(f"wrote {output}")


def main(argv: list[str]) -> int:
    """Exit code: 0 done, 2 a request that can't be met."""
    try:
        run(arguments(argv))
    except UserError as error:
        print(f"train_tokenizer: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
