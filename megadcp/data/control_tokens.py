"""Control tokens: their usual names, and keeping their ids out of encoded text."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

# Names that people give to tokens which mean something to a program. Only these are kept out of text: other user-defined pieces are text.
CONTROL_NAME = re.compile(
    r"</?s>|<(?:pad|unk|bos|eos|eod|eot|mask|sep|cls)>|\[(?:PAD|UNK|BOS|EOS|EOD|MASK|SEP|CLS)\]|<[|\uff5c].*[|\uff5c]>", re.IGNORECASE
)
# Names of the end-of-document token, likeliest first.
EOD_NAMES: tuple[str, ...] = (
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<eod>", "<|eos|>", "<|eod|>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    *("[EOS]", "[EOD]", "<EOS>", "<EOD>"),
)


def respell(ids: np.ndarray, lengths: np.ndarray, spellings: Mapping[int, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Texts one after another (ids int32 [n], lengths int64 [S]) with every id in `spellings` replaced; lengths grow accordingly."""
    if not spellings:
        return ids, lengths
    hits = np.flatnonzero(np.isin(ids, np.fromiter(spellings, dtype=np.int32, count=len(spellings))))
    if not len(hits):
        return ids, lengths
    grown, parts, done = lengths.copy(), [], 0
    owners = np.searchsorted(np.cumsum(lengths), hits, side="right")  # the text that holds each hit; empty texts hold none
    for hit, owner in zip(hits.tolist(), owners.tolist(), strict=True):
        spelling = spellings[int(ids[hit])]
        parts += [ids[done:hit], spelling]
        grown[owner] += len(spelling) - 1
        done = hit + 1
    return np.concatenate([*parts, ids[done:]]), grown
