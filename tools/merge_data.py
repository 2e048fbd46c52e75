"""Several datasets as one: python tools/merge_data.py --input data/shard-* --output-prefix data/corpus.

Shards of one run (preprocess_data.py --shard) are put in their order, and all of them must be there; the result is, byte for byte, what a
run without shards gives. Other datasets keep the order in which they are given; they must share dtype and tokenizer.
"""

from __future__ import annotations

import argparse
import sys


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--input", "--inputs", dest="inputs", nargs="+", required=True, metavar="PREFIX", help="prefixes; names of .bin, .idx and .json files will do"
    )
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="writes PREFIX.bin, .idx and .json")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output")
    return parser


def main(argv: list[str] | None = None) -> int:
    """0: done; 1: a failure; 2: a request that can't be met."""
    asked = arguments().parse_args(argv)
    from megadcp.config.check import UserError
    from megadcp.data.indexed import IndexedReader
    from megadcp.data.merge import merge

    try:
        merge(asked.inputs, asked.output_prefix, asked.overwrite, print)
        merged = IndexedReader(asked.output_prefix)
        print(f"{asked.output_prefix}: {merged.documents:,} documents, {merged.tokens_total:,} tokens of {merged.dtype.name}")
    except UserError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    except OSError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
