"""Raw text to a dataset: python tools/preprocess_data.py --input corpus/ --tokenizer tokenizer.model --append-eod --output-prefix data/corpus.

Reads .jsonl, .jsonl.gz, .jsonl.zst, .parquet and .txt (one document a file); writes PREFIX.bin, PREFIX.idx (Megatron's format) and
PREFIX.json (what made them). Run again after an interruption: finished parts are not made twice.
"""

from __future__ import annotations

import argparse
import sys


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", "--inputs", dest="inputs", nargs="+", required=True, metavar="PATH", help="files, globs or folders")
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="writes PREFIX.bin, .idx and .json; PREFIX_KEY.* with several keys")
    parser.add_argument("--tokenizer-kind", default="sentencepiece", help="sentencepiece (default), huggingface or bytes")
    parser.add_argument("--tokenizer", default="", metavar="FILE", help="a .model or tokenizer.json file; none for bytes")
    parser.add_argument("--eod-token", default="", metavar="TOKEN", help="end-of-document token, where the file does not make it clear")
    parser.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys (columns) that hold the text; each gives a dataset")
    parser.add_argument("--append-eod", action="store_true", help="end every document that is not empty with the end-of-document id")
    parser.add_argument("--workers", type=int, default=1, help="processes; the output does not depend on them")
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="make the I-th of N pieces (0 <= I < N) of the corpus; see merge_data.py")
    parser.add_argument("--bad-records", choices=("stop", "skip"), default="stop", help="stop (default), or list them in PREFIX.rejects.jsonl")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    parser.add_argument("--console", choices=("auto", "rich", "plain"), default="auto", help="live line or plain lines")
    return parser


def main(argv: list[str] | None = None) -> int:
    """0: done; 1: bad input or a failure; 2: a request that can't be met."""
    asked = arguments().parse_args(argv)
    if asked.workers > 1:
        from megadcp.data.worker_server import warm_up

        warm_up()  # does a worker's imports while this process does its own
    from megadcp.config.check import UserError
    from megadcp.data.preprocess import Preprocess, preprocess
    from megadcp.data.raw_files import InputError
    from megadcp.data.worker_pool import WorkerDied

    def error(text: object, code: int) -> int:
        print(f"error: {text}", file=sys.stderr)
        return code

    try:
        index, count = (int(part) for part in asked.shard.split("/"))
    except ValueError:
        return error(f"--shard {asked.shard}: give I/N, for example 0/4", 2)
    job = Preprocess(
        inputs=tuple(asked.inputs),
        output_prefix=asked.output_prefix,
        tokenizer_kind=asked.tokenizer_kind,
        tokenizer_path=asked.tokenizer,
        eod_token=asked.eod_token,
        keys=tuple(asked.json_keys),
        append_eod=asked.append_eod,
        workers=asked.workers,
        shard=(index, count),
        bad_records=asked.bad_records,
        overwrite=asked.overwrite,
        console=asked.console,
    )
    try:
        preprocess(job, lambda line: print(line, flush=True))
    except InputError as fault:
        return error(fault, 1)
    except UserError as fault:
        return error(fault, 2)
    except (WorkerDied, RuntimeError, OSError) as fault:
        return error(fault, 1)
    except KeyboardInterrupt:
        return error("interrupted; finished parts are kept, the same command goes on from there", 130)
    return 0


if __name__ == "__main__":
    sys.exit(main())
