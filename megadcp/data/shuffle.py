"""The shuffled order of one source over any number of epochs, with token offsets: a pure function of (seed, corpus, epoch).

Every piece of a source gets a 32-bit key from an integer hash of (seed, epoch, id); an epoch is the pieces sorted by key, equal keys in
file order. The hash is ours (the mixing steps of splitmix64), not a random generator of a library, so an order never changes with
the version of anything. Epochs follow each other without a gap: piece offsets count tokens from the start of epoch 0.

What is stored of a block of epochs is the piece numbers in order (4 bytes each) and the token offset of every 256th (0.03 bytes
each); finding the pieces of a stretch of tokens is one binary search and a read of a few hundred entries.

Measured once each on one core of a 2-core x86-64 machine, numpy 2.4, one-piece documents of lognormal length:

| documents | scanning the index at start | making one epoch | extra memory while making it | kept (on disk, mapped) | finding a step of 2^20 tokens |
|---|---|---|---|---|---|
| 10^7 | 0.13 s | 1.6 s | 0.12 GiB | 38 MiB an epoch | 0.07 ms (at most 0.2 ms in 200) |
| 10^8 | 1.1 s | 20 s | 1.2 GiB | 384 MiB an epoch | 0.12 ms (at most 1.3 ms in 200) |
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megadcp.config.check import UserError
from megadcp.data.corpus import BLOCK, PieceTable
from megadcp.data.order_cache import Arrays, OrderCache

STRIDE = 256  # pieces between two stored token offsets
SMALL_BLOCK = 1 << 16  # a small source's epochs are made so many pieces at a time
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
HIGH = np.uint64(0xFFFFFFFF00000000)
ORDER_VERSION = 1  # part of every fingerprint; another rule gets another number


def mix(value: np.ndarray) -> np.ndarray:
    """The output function of splitmix64 (Steele, Lea, Flood 2014): a bijection of uint64 [n] in which every bit depends on every bit."""
    with np.errstate(over="ignore"):
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(value ^ (value >> np.uint64(31)))


def epoch_keys(seed: int, epochs: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """uint64 [epochs, ids]: key of each id in each epoch; the order uses the upper 32 bits."""
    with np.errstate(over="ignore"):
        base = mix(np.array([seed % (1 << 64)], dtype=np.uint64) + GOLDEN) + epochs.astype(np.uint64) * GOLDEN
        return mix(mix(base)[:, None] + ids.astype(np.uint64)[None, :] * GOLDEN)


def epoch_orders(table: PieceTable, seed: int, first: int, count: int) -> np.ndarray:
    """Piece numbers of epochs first .. first + count - 1 in their order, uint32 [count, table.count].

    The numbers ride in the lower half of the sorted words, so that all words differ and every correct sort gives the same result.
    """
    words = np.empty((count, table.count), np.uint64)
    epochs = np.arange(first, first + count)
    for begin, ids in table.all_ids():
        end = begin + len(ids)
        words[:, begin:end] = (epoch_keys(seed, epochs, ids) & HIGH) | np.arange(begin, end, dtype=np.uint64)
    words.sort(axis=1)
    order = np.empty(words.shape, np.uint32)
    for begin in range(0, table.count, BLOCK):
        order[:, begin : begin + BLOCK] = words[:, begin : begin + BLOCK].astype(np.uint32)  # drops the key
    return order


@dataclass(frozen=True)
class Stretch:
    """Consecutive pieces of one source's order: ids, lengths and first token offsets (from the start of epoch 0), each int64 [n]."""

    ids: np.ndarray
    lengths: np.ndarray
    starts: np.ndarray


class SourceOrder:
    """The endless sequence of one source's pieces, epoch after epoch."""

    def __init__(self, table: PieceTable, seed: int, cache: OrderCache) -> None:
        """Nothing is built before it is asked for."""
        if table.count >= 1 << 32:
            raise UserError(
                f"{table.label}: {table.count} pieces do not fit a 32-bit order (at most {(1 << 32) - 1}): divide the file into several sources"
            )
        self.table, self.seed, self.cache = table, seed, cache
        self.epochs_per_block = max(1, SMALL_BLOCK // table.count)
        self.block_tokens = self.epochs_per_block * table.tokens
        self.digest = f"{table.digest}-v{ORDER_VERSION}-s{seed % (1 << 64):x}-{table.source}-{table.max_length}{table.long_documents[0]}"
        self._blocks: dict[int, Arrays] = {}

    def block(self, number: int, check: bool = False) -> Arrays:
        """Block `number`: "order" uint32 [pieces] and "starts" int64 [pieces / STRIDE, and the total], offsets within the block."""
        found = self._blocks.get(number)
        if found is None or check:
            found = self.cache.get(f"{self.digest}-{number:06d}", lambda: self._build(number), check)
            newest = [key for key in self._blocks if key != number][-1:]
            self._blocks = {**{key: self._blocks[key] for key in newest}, number: found}  # two are enough to cross a border
        return found

    def blocks_for(self, tokens: float) -> int:
        """Blocks that hold the first `tokens` tokens."""
        return max(1, -int(-tokens // self.block_tokens))

    def _build(self, number: int) -> Arrays:
        order = epoch_orders(self.table, self.seed, number * self.epochs_per_block, self.epochs_per_block).reshape(-1)
        sums = [np.zeros(1, np.int64)]
        for begin in range(0, len(order), BLOCK):  # BLOCK is a multiple of STRIDE
            _, lengths = self.table.ids(order[begin : begin + BLOCK])
            sums.append(np.add.reduceat(lengths, np.arange(0, len(lengths), STRIDE)))
        return {"order": order, "starts": np.cumsum(np.concatenate(sums))}

    def between(self, low: int, high: int) -> Stretch:
        """The pieces whose first token has an offset in [low, high), in order."""
        low = max(0, low)
        parts = []
        for number in range(low // self.block_tokens, max(0, high - 1) // self.block_tokens + 1 if high > low else 0):
            base = number * self.block_tokens
            parts.append(self._inside(number, low - base, high - base))
        if not parts:
            return Stretch(*(np.zeros(0, np.int64),) * 3)
        return Stretch(*(np.concatenate(arrays) if len(arrays) > 1 else arrays[0] for arrays in zip(*parts, strict=True)))

    def _inside(self, number: int, low: int, high: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        block = self.block(number)
        group_starts = block["starts"]
        first = max(0, int(np.searchsorted(group_starts, low, side="right")) - 1)
        stop = int(np.searchsorted(group_starts[:-1], high, side="left"))
        ids, lengths = self.table.ids(block["order"][first * STRIDE : stop * STRIDE])
        starts = group_starts[first] + np.cumsum(lengths) - lengths
        a, b = np.searchsorted(starts, [low, high])
        return ids[a:b], lengths[a:b], starts[a:b] + number * self.block_tokens
