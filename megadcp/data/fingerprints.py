"""What the files of a dataset look like, so that one which changed under a run is noticed: size and hash of .idx, size and samples of .bin.

Cheap for large files: an .idx is hashed whole up to WHOLE_BYTES (about a second a gigabyte), a larger one and every .bin by SAMPLES pieces
at fixed places. A run that appended to its corpus, rebuilt it or tokenized it anew differs in one of these; one flipped byte in the middle of
a .bin may not (a checksum of the whole file would take minutes a terabyte).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megadcp.config.check import UserError
from megadcp.config.schema import DataConfig
from megadcp.data.indexed import bin_path, idx_path

WHOLE_BYTES = 1 << 28
SAMPLES, SAMPLE_BYTES = 64, 1 << 12
SAMPLED_INDEX_BYTES = 1 << 20  # of one piece of a large .idx


def dataset_files(data: DataConfig) -> list[Path]:
    """Every file that the training and validation sources of a run read, each once."""
    prefixes = dict.fromkeys(source.prefix for source in (*data.train, *data.validation))
    return [path for prefix in prefixes for path in (idx_path(prefix), bin_path(prefix))]


def print_of(path: Path) -> dict[str, Any]:
    """{"bytes": size, "hash": of the content, "of": whole or samples}. UserError names a file that can't be read."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            if path.suffix == ".idx" and size <= WHOLE_BYTES:
                return {"bytes": size, "hash": hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest(), "of": "whole"}
            piece = SAMPLED_INDEX_BYTES if path.suffix == ".idx" else SAMPLE_BYTES
            digest = hashlib.blake2b(digest_size=16)
            for number in range(SAMPLES):
                file.seek(max(0, size - piece) * number // (SAMPLES - 1))
                digest.update(file.read(piece))
            return {"bytes": size, "hash": digest.hexdigest(), "of": "samples"}
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror or error}; a dataset is a pair PREFIX.bin and PREFIX.idx") from error


def prints_of(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """The print of each file, by its absolute path."""
    return {str(path.absolute()): print_of(path) for path in paths}


def changed_files(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is no longer as it was, one phrase a file that both know: "x.bin had 10 bytes and has 12"."""
    found = []
    for path, new in now.items():
        old = before.get(path)
        if not isinstance(old, dict) or old == new:
            continue
        if old.get("bytes") != new["bytes"]:
            found.append(f"{path} had {old.get('bytes')} bytes and has {new['bytes']}")
        else:
            found.append(f"{path} has other content")
    return found
