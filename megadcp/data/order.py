"""The global order of training documents and its cut into steps: documents mode. Opens training and validation data in both modes.

One source: its shuffled epochs follow each other (shuffle.py). Several sources: each is such an endless sequence of its own, and
they are merged so that every source's share of TOKENS is as close to its weight as whole documents allow: a piece that covers
tokens [c, c + n) of its source has the key (c + n/2) / share, and pieces are taken by key, equal keys by source. After any prefix of the
merge a source is at most about one longest piece away from its share. The merge is never stored: a place in it is found from the
sources' own offsets, in time that doesn't depend on the step number.

A piece belongs to step k iff the offset of its first token in the merged sequence lies in [k B, (k+1) B), B = data.tokens_per_step.
So a step is a function of (seed, corpus, k) alone: the same for any number of ranks, and resuming needs nothing but the step number.
Steps hold B tokens on average, at most B - 1 + the longest piece; B must be at least the longest piece so that no step is empty.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from megadcp.config.check import UserError
from megadcp.config.schema import DataConfig
from megadcp.data.corpus import PieceTable, Source, fill_pieces, open_sources, open_train_sources, split_table
from megadcp.data.order_cache import OrderCache, Say
from megadcp.data.shuffle import ORDER_VERSION, SourceOrder, Stretch
from megadcp.data.step_documents import Documents, DocumentSource, StepDocuments, ValidationSet, unpack_ids
from megadcp.data.stream import StreamSet, eod_to_mask, open_stream

__all__ = ["DocumentSource", "Documents", "StepDocuments", "ValidationSet", "build_cache", "open_training", "open_validation"]

SMALL_SOURCE = 1_000_000  # pieces below which an order is made in memory (under 0.1 s) unless data.cache names a folder
VALIDATION_SEED = 0  # not data.seed: runs of different seeds are validated on the same documents


def to_stderr(text: str) -> None:
    """The default way to tell a person something."""
    print(text, file=sys.stderr, flush=True)


class DocumentSteps:
    """Documents mode as a DocumentSource."""

    def __init__(self, orders: Sequence[SourceOrder], shares: Sequence[float], tokens_per_step: int, steps: int) -> None:
        """`shares` add up to 1. `steps` is only told to people: any step can be asked for."""
        worst = max((order.table for order in orders), key=lambda table: table.longest)
        if tokens_per_step < worst.longest:
            raise UserError(
                f"data.tokens_per_step={tokens_per_step} is below the longest piece ({worst.longest} tokens, in {worst.label}): a step could hold no "
                f"document; legal: data.tokens_per_step >= {worst.longest}, or data.max_length <= {tokens_per_step}"
            )
        self.orders, self.shares, self.tokens_per_step, self.steps = list(orders), list(shares), tokens_per_step, steps
        self.tables = {order.table.source: order.table for order in orders}
        self.tokens = sum(order.table.tokens for order in orders)
        parts = [[order.digest, repr(share)] for order, share in zip(orders, shares, strict=True)]
        text = json.dumps(["documents", ORDER_VERSION, tokens_per_step, parts])
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()

    def step(self, index: int) -> StepDocuments:
        """See DocumentSource.step."""
        if index < 0:
            raise ValueError(f"step {index}: the first step is 0")
        low, high = index * self.tokens_per_step, (index + 1) * self.tokens_per_step
        stretch = self.orders[0].between(low, high) if len(self.orders) == 1 else self._merged(low, high)
        return StepDocuments(index, stretch.ids, stretch.lengths, float(stretch.starts[0]) / self.tokens)

    def _merged(self, low: int, high: int) -> Stretch:
        """Pieces of the merged sequence that start in [low, high).

        With all pieces of keys below x taken, a source is less than half its longest piece away from share * x; so looking at keys
        from `low` less all longest pieces to `high` plus them is enough.
        """
        slack = sum(order.table.longest for order in self.orders)
        first_key, last_key = max(0, low - slack), high + slack
        before = 0  # tokens of all pieces with a key below first_key
        found: list[tuple[np.ndarray, ...]] = []
        for place, (order, share) in enumerate(zip(self.orders, self.shares, strict=True)):
            margin = 2 * order.table.longest + 1
            near = order.between(int(share * first_key) - margin, int(share * last_key) + margin)
            keys = (near.starts + 0.5 * near.lengths) / share
            a, b = np.searchsorted(keys, [first_key, last_key])
            before += int(near.starts[a])
            found.append((keys[a:b], np.full(b - a, place), near.ids[a:b], near.lengths[a:b]))
        keys, places, ids, lengths = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
        by_key = np.lexsort((places, keys))
        ids, lengths = ids[by_key], lengths[by_key]
        starts = before + np.cumsum(lengths) - lengths
        a, b = np.searchsorted(starts, [low, high])
        return Stretch(ids[a:b], lengths[a:b], starts[a:b])

    def fill(self, ids: np.ndarray, starts: np.ndarray, tokens: np.ndarray, labels: np.ndarray) -> None:
        """See Documents.fill."""
        fill_pieces(self.tables, ids, starts, tokens, labels)

    def read(self, document: int) -> tuple[np.ndarray, np.ndarray]:
        """See Documents.read."""
        return read_piece(self.tables, document)

    def describe(self) -> list[str]:
        """See DocumentSource.describe."""
        lines = []
        for order, share in zip(self.orders, self.shares, strict=True):
            epochs = share * self.steps * self.tokens_per_step / order.table.tokens
            lines.append(f"{order.table.describe()}; {100 * share:.4g}% of the tokens, {epochs:.3g} epochs in {self.steps:,} steps")
        places = sorted({order.cache.place for order in self.orders})
        lines.append(f"order: documents, {self.tokens_per_step:,} tokens per step, kept in {', '.join(places)}")
        return lines

    def build(self) -> None:
        """Make the order of all steps on disk, checking what is there already."""
        slack = sum(order.table.longest for order in self.orders)
        for order, share in zip(self.orders, self.shares, strict=True):
            if order.cache.folder:
                for number in range(order.blocks_for(share * (self.steps * self.tokens_per_step + slack) + 2 * order.table.longest)):
                    order.block(number, check=True)


def read_piece(tables: dict[int, PieceTable], document: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, labels) of one piece, int64 [n]."""
    ids = np.array([document], np.int64)
    source, documents, pieces = unpack_ids(ids)
    tokens, labels = np.empty((2, int(tables[int(source[0])].piece_lengths(documents, pieces)[0])), np.int64)
    fill_pieces(tables, ids, np.zeros(1, np.int64), tokens, labels)
    return tokens, labels


class HeldOutDocuments:
    """Documents mode's ValidationSet: the pieces of one table in an order of their own, from the start."""

    def __init__(self, name: str, order: SourceOrder) -> None:
        """`order` is seeded by VALIDATION_SEED."""
        self.name, self.order = name, order
        self.tables = {order.table.source: order.table}

    def documents(self, max_tokens: int) -> StepDocuments:
        """See ValidationSet.documents; never more than one pass over the set."""
        stretch = self.order.between(0, min(max(1, max_tokens), self.order.table.tokens))
        count = max(1, int(np.searchsorted(stretch.starts + stretch.lengths, max_tokens, side="right")))
        return StepDocuments(0, stretch.ids[:count], stretch.lengths[:count], 0.0)

    def fill(self, ids: np.ndarray, starts: np.ndarray, tokens: np.ndarray, labels: np.ndarray) -> None:
        """See Documents.fill."""
        fill_pieces(self.tables, ids, starts, tokens, labels)

    def read(self, document: int) -> tuple[np.ndarray, np.ndarray]:
        """See Documents.read."""
        return read_piece(self.tables, document)


def cache_chooser(data: DataConfig, say: Say) -> Callable[[str, int], OrderCache]:
    """The cache of a source, by its prefix and number of items.

    That is data.cache where it is set; else a folder beside a large dataset (PREFIX.order), and memory for a small one.
    """
    caches: dict[Path | None, OrderCache] = {}  # one object a folder, so that its trouble is told once

    def choose(prefix: str, items: int) -> OrderCache:
        folder = Path(data.cache) if data.cache else None if items < SMALL_SOURCE else Path(f"{prefix}.order")
        return caches.setdefault(folder, OrderCache(folder, say))

    return choose


def _check(data: DataConfig) -> None:
    for key, value in (("max_length", data.max_length), ("tokens_per_step", data.tokens_per_step)):
        if value < 1:
            raise UserError(f"data.{key}={value}: must be at least 1")
    for key, got, legal in (("mode", data.mode, ("documents", "stream")), ("long_documents", data.long_documents, ("split", "drop"))):
        if got not in legal:
            raise UserError(f"data.{key}={got}: legal here: {', '.join(legal)}")


def open_training(data: DataConfig, steps: int, say: Say = to_stderr) -> DocumentSource:
    """The training data of a run of `steps` steps. Makes what is missing of the order when a step first needs it (stream mode: now).

    UserError names the setting or source that is wrong. `say` gets one line if an order cache is damaged or can't be written.
    """
    _check(data)
    sources = open_train_sources(data)
    choose = cache_chooser(data, say)
    if data.mode == "stream":
        return open_stream(sources, data, steps, choose)
    tables = [split_table(source, data, "train") for source in sources]
    orders = [SourceOrder(table, data.seed, choose(source.prefix, table.count)) for source, table in zip(sources, tables, strict=True)]
    return DocumentSteps(orders, [source.share for source in sources], data.tokens_per_step, steps)


def open_validation(data: DataConfig, say: Say = to_stderr) -> list[ValidationSet]:
    """The validation sets: the validation split of each training source (if data.split gives it a share), then data.validation, by name."""
    _check(data)
    wanted: list[tuple[Source, str]] = []
    if len(data.split) > 1 and data.split[1] > 0:
        wanted += [(source, "validation") for source in open_train_sources(data)]
    wanted += [(source, "all") for source in open_sources(data.validation, "data.validation")]
    names = [source.name for source, _ in wanted]
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"two validation sets are called {name} (one from data.split, one from data.validation): give one of them a name of its own"
            )
    if data.mode == "stream":
        return [StreamSet.held_out(source, data, split, eod_to_mask(data)) for source, split in wanted]
    choose = cache_chooser(data, say)
    made: list[ValidationSet] = []
    for source, split in wanted:
        table = split_table(source, data, split)
        made.append(HeldOutDocuments(source.name, SourceOrder(table, VALIDATION_SEED, choose(source.prefix, table.count))))
    return made


def build_cache(data: DataConfig, steps: int, say: Say = to_stderr) -> None:
    """Make the order of a whole run on disk (a tool, or rank 0 before any process group exists) and check what is there already.

    Small sources without data.cache need no files: every process makes their order in memory.
    """
    source = open_training(data, steps, say)
    source.build()
    for line in source.describe():
        say(line)
