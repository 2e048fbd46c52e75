"""Stream mode: fixed-length samples cut from concatenated documents, the semantics of Megatron's GPTDataset and BlendedDataset.

Sample for sample equal to megatron-core's under the same seed (tests/data/test_stream_peer.py), so a run can be moved over: the same
rule for epochs, the separately shuffled last epoch, the same draws of RandomState in the same order (numpy guarantees that legacy
stream), samples that overlap by one token, and the blend rule. Works on the file's SEQUENCES, like Megatron: a file split into
sentences is shuffled by sentence. As there, the order depends on the number of samples asked for, that is on run.steps.

What differs is how it is computed: sample borders by binary search in running sums, and the blend in parallel stretches.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Sequence

import numpy as np

from megadcp.config.check import UserError
from megadcp.config.schema import DataConfig
from megadcp.data.corpus import BLOCK, SPLITS, Source, split_ranges
from megadcp.data.order_cache import Arrays, OrderCache
from megadcp.data.step_documents import IGNORE, StepDocuments, pack_ids, unpack_ids

FINAL_EPOCH_SHARE = 0.80  # a last epoch of which less is needed is shuffled apart from the others
SURPLUS = 0.005  # samples made beyond what the blend should draw from a source
LARGEST_INDEX = 2**31 - 1
STREAM_VERSION = 1


def epochs_needed(samples: int | None, length: int, tokens: int) -> int:
    """Least number of passes over `tokens` that holds `samples` samples of `length` tokens and one extra token; None takes one pass."""
    return 1 if samples is None else max(1, -(-(samples * length + 1) // tokens))


def final_epoch_samples(samples: int | None, length: int, tokens: int, epochs: int) -> int:
    """Number of samples that end before the last epoch if that one is to be shuffled apart, else 0 (with one epoch always 0)."""
    if epochs == 1 or samples is None:
        return 0
    before = ((epochs - 1) * tokens - 1) // length
    per_epoch = (tokens - 1) // length
    return before if samples - before < int(FINAL_EPOCH_SHARE * per_epoch) else 0


def shuffled(parts: Sequence[np.ndarray], state: np.random.RandomState) -> np.ndarray:
    """Each part shuffled in place by `state`, in order, then joined."""
    for part in parts:
        state.shuffle(part)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def sample_borders(lengths: np.ndarray, samples: int, length: int) -> np.ndarray:
    """Where samples start: int32 [samples + 1, 2] of (place in the document order, token offset in that document).

    lengths: tokens of each document in order. Sample i is the tokens from row i up to and including the one that row i + 1 names.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    rows = np.empty((samples + 1, 2), np.int32)
    for begin in range(0, samples + 1, BLOCK):
        wanted = np.arange(begin, min(begin + BLOCK, samples + 1), dtype=np.int64) * length
        places = np.searchsorted(ends, wanted, side="right")
        rows[begin : begin + BLOCK, 0] = places
        rows[begin : begin + BLOCK, 1] = wanted - (ends[places] - lengths[places])
    rows[0] = 0
    return rows


def blend_index(weights: Sequence[float], size: int) -> np.ndarray:
    """Which source each of `size` samples comes from, int16 [size]: always the one with the largest weight * max(i, 1) - taken.

    Every choice depends on all choices before it, but only through how often each source was taken. So the samples are divided into stretches that
    start from guessed counts and run side by side; a stretch whose guess was wrong runs again from its predecessor's true end, until
    every start equals its predecessor's end. That is the sequential result, bit for bit; the rule forgets wrong guesses
    quickly, so a few rounds do.
    """
    shares = np.asarray(weights, np.float64)
    if size == 0:
        return np.zeros(0, np.int16)
    stretch = max(1, math.isqrt(size))
    begins = np.arange(0, size, stretch)
    starts = _guess(shares, begins)
    stale = np.arange(len(begins))  # stretches whose start has changed since they ran
    ends = np.zeros_like(starts)
    chosen = np.zeros((len(begins), stretch), np.int16)
    while len(stale):
        taken = starts[stale]
        rows = np.arange(len(stale))
        for step in range(stretch):
            position = np.maximum(begins[stale] + step, 1).astype(np.float64)
            best = np.argmax(shares * position[:, None] - taken, axis=1)  # the first of equals
            chosen[stale, step] = best
            taken[rows, best] += 1.0
        ends[stale] = taken
        wrong = np.flatnonzero((starts[1:] != ends[:-1]).any(axis=1)) + 1
        starts[wrong] = ends[wrong - 1]
        stale = wrong
    return chosen.reshape(-1)[:size]


def _guess(shares: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Whole counts near shares * position that add up to position, as float64 [positions, sources]; exact at position 0."""
    ideal = shares[None, :] * positions[:, None]
    counts = np.floor(ideal)
    missing = np.maximum(positions - counts.sum(axis=1), 0)
    rank = np.argsort(np.argsort(-(ideal - counts), axis=1, kind="stable"), axis=1, kind="stable")
    return np.asarray(counts + (rank < missing[:, None]))


class StreamSet:
    """The samples of one split of one source."""

    def __init__(self, source: Source, extent: tuple[int, int], length: int, samples: int | None, seed: int, eod: int | None) -> None:
        """extent: [first, stop) in sequences; samples None is one pass; eod: the token behind which nothing is predicted, or None."""
        self.source, self.name, self.length, self.seed, self.eod = source, source.name, length, seed, eod
        self.first, self.stop = extent
        self.lengths = source.file.sequence_lengths[self.first : self.stop]
        self.tokens = int(self.lengths.sum(dtype=np.int64))
        self.empty = int((self.lengths == 0).sum())
        if self.tokens == 0:
            raise UserError(
                f"{self.name}: sequences {self.first} to {self.stop} of {source.prefix} hold no tokens: change data.split or leave the source out"
            )
        self.epochs = epochs_needed(samples, length, self.tokens)
        self.before_final = final_epoch_samples(samples, length, self.tokens, self.epochs)
        self.count = (self.epochs * self.tokens - 1) // length
        entries = self.epochs * (self.stop - self.first)
        if entries > LARGEST_INDEX or self.count >= LARGEST_INDEX:
            raise UserError(
                f"{self.name}: {self.epochs} epochs of {self.stop - self.first} sequences ({self.count} samples) do not fit stream mode's 32-bit "
                f"index (at most {LARGEST_INDEX}): ask for fewer steps, or use data.mode=documents, which has no such limit"
            )
        if self.count == 0:
            raise UserError(
                f"{self.name}: {self.tokens} tokens hold no sample of data.max_length={length} and one more; legal: data.max_length < {self.tokens}"
            )
        digest = hashlib.blake2b(np.ascontiguousarray(self.lengths, dtype="<i4").data, digest_size=16).hexdigest()
        self.digest = f"{digest}-stream-v{STREAM_VERSION}-s{seed}-{self.first}-{length}-{self.count}-{self.before_final}"
        self._arrays: Arrays | None = None
        self.cache = OrderCache(None, print)

    @staticmethod
    def held_out(source: Source, data: DataConfig, split: str, eod: int | None) -> StreamSet:
        """One pass over a validation split (split=all: over the whole file)."""
        return StreamSet(source, _extent(source, data, split), data.max_length, None, data.seed, eod)

    def index(self, check: bool = False) -> Arrays:
        """Arrays documents int32 [entries], borders int32 [count + 1, 2] (sample_borders), shuffle uint32 [count]."""
        if self._arrays is None or check:
            self._arrays = self.cache.get(self.digest, self._build, check)
        return self._arrays

    def _build(self) -> Arrays:
        state = np.random.RandomState(self.seed)
        whole = np.arange(self.first, self.stop, dtype=np.int32)
        epochs = [np.tile(whole, self.epochs - 1), whole] if self.before_final else [np.tile(whole, self.epochs)]
        documents = shuffled(epochs, state)
        borders = sample_borders(self.source.file.sequence_lengths[documents], self.count, self.length)
        edges = [0, self.before_final, self.count] if self.before_final else [0, self.count]
        shuffle = shuffled([np.arange(a, b, dtype=np.uint32) for a, b in itertools.pairwise(edges)], state)
        return {"documents": documents, "borders": borders, "shuffle": shuffle}

    def rows(self, positions: np.ndarray) -> np.ndarray:
        """Rows of the sample index at these places of the set's order, int64 [n]."""
        return np.asarray(self.index()["shuffle"][positions], dtype=np.int64)

    def sample(self, row: int) -> np.ndarray:
        """The `length` + 1 tokens of one row of the sample index, in the file's dtype."""
        arrays = self.index()
        (place, offset), (last, end) = arrays["borders"][row].tolist(), arrays["borders"][row + 1].tolist()
        parts = []
        for sequence in arrays["documents"][place : last + 1].tolist():
            size = end + 1 if place == last else int(self.source.file.sequence_lengths[sequence])
            if size > offset:
                parts.append(self.source.file.reader.read(sequence, offset, size - offset))
            place, offset = place + 1, 0
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def fill(self, ids: np.ndarray, starts: np.ndarray, tokens: np.ndarray, labels: np.ndarray) -> None:
        """See step_documents.Documents.fill."""
        for row, start in zip(unpack_ids(ids)[1].tolist(), np.asarray(starts).tolist(), strict=True):
            text = self.sample(row)
            end = start + self.length
            tokens[start:end] = text[:-1]
            labels[start:end] = text[1:]
            if self.eod is not None:
                labels[start:end][text[:-1] == self.eod] = IGNORE

    def read(self, document: int) -> tuple[np.ndarray, np.ndarray]:
        """See step_documents.Documents.read."""
        tokens, labels = np.empty((2, self.length), np.int64)
        self.fill(np.array([document]), np.zeros(1, np.int64), tokens, labels)
        return tokens, labels

    def documents(self, max_tokens: int) -> StepDocuments:
        """See step_documents.ValidationSet.documents."""
        count = min(self.count, max(1, max_tokens // self.length))
        ids = pack_ids(self.source.index, self.rows(np.arange(count)), 0)
        return StepDocuments(0, ids, np.full(count, self.length, np.int64), 0.0)


class StreamSteps:
    """Stream mode as a DocumentSource: a step is tokens_per_step / max_length samples."""

    def __init__(self, sets: Sequence[StreamSet], shares: Sequence[float], size: int, per_step: int, cache: OrderCache) -> None:
        """size: samples of the whole run; shares: the normalised weights (used with several sets)."""
        self.sets, self.shares, self.size, self.per_step, self.cache = list(sets), list(shares), size, per_step, cache
        text = json.dumps([STREAM_VERSION, [one.digest for one in sets], [repr(share) for share in shares], size, per_step, sets[0].eod])
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()
        self._blend: Arrays | None = None

    def blend(self, check: bool = False) -> Arrays:
        """Arrays source int16 [size] and sample int64 [size]: place in that source's own order."""
        if self._blend is None or check:
            self._blend = self.cache.get(f"{self.fingerprint[:32]}-blend-v{STREAM_VERSION}", self._build_blend, check)
        return self._blend

    def _build_blend(self) -> Arrays:
        source = blend_index(self.shares, self.size)
        sample = np.empty(self.size, np.int64)
        for index, one in enumerate(self.sets):
            mine = np.flatnonzero(source == index)
            sample[mine] = np.arange(len(mine))
            if len(mine) > one.count:
                raise UserError(
                    f"the blend draws {len(mine)} samples of {one.name}, which has {one.count}: give it a larger share or ask for more steps"
                )
        return {"source": source, "sample": sample}

    def step(self, index: int) -> StepDocuments:
        """See DocumentSource.step. Stream mode has an end: the number of steps that it was opened with."""
        begin, end = index * self.per_step, (index + 1) * self.per_step
        if index < 0 or end > self.size:
            raise UserError(f"step {index}: this stream was made for {self.size // self.per_step} steps (stream mode's order depends on run.steps)")
        if len(self.sets) == 1:
            ids = pack_ids(0, self.sets[0].rows(np.arange(begin, end)), 0)
        else:
            arrays = self.blend()
            sources, samples = np.asarray(arrays["source"][begin:end]), np.asarray(arrays["sample"][begin:end])
            ids = np.empty(self.per_step, np.int64)
            for source in np.unique(sources).tolist():
                mine = sources == source
                ids[mine] = pack_ids(source, self.sets[source].rows(samples[mine]), 0)
        length = self.sets[0].length
        return StepDocuments(index, ids, np.full(self.per_step, length, np.int64), begin * length / sum(one.tokens for one in self.sets))

    def fill(self, ids: np.ndarray, starts: np.ndarray, tokens: np.ndarray, labels: np.ndarray) -> None:
        """See step_documents.Documents.fill."""
        sources = unpack_ids(ids)[0]
        for source in np.unique(sources).tolist():
            mine = sources == source
            self.sets[source].fill(ids[mine], np.asarray(starts)[mine], tokens, labels)

    def read(self, document: int) -> tuple[np.ndarray, np.ndarray]:
        """See step_documents.Documents.read."""
        return self.sets[int(unpack_ids(np.array([document]))[0][0])].read(document)

    def build(self) -> None:
        """Make everything now, checking what is on disk already."""
        for one in self.sets:
            one.index(check=True)
        if len(self.sets) > 1:
            self.blend(check=True)

    def describe(self) -> list[str]:
        """See DocumentSource.describe."""
        lines = []
        for one, share in zip(self.sets, self.shares, strict=True):
            apart = "; the last epoch is shuffled apart" if one.before_final else ""
            skipped = f"; {one.empty:,} empty sequences skipped" if one.empty else ""
            size = f"{one.stop - one.first:,} sequences, {one.tokens:,} tokens{skipped}"
            lines.append(f"{one.name}: {size}; {100 * share:.4g}% of the samples, {one.epochs} epochs{apart}")
        places = sorted({one.cache.place for one in self.sets})
        lines.append(f"order: stream, {self.per_step} samples of {self.sets[0].length:,} tokens per step, kept in {', '.join(places)}")
        return lines


def _extent(source: Source, data: DataConfig, split: str) -> tuple[int, int]:
    sequences = len(source.file.sequence_lengths)
    first, stop = (0, sequences) if split == "all" else split_ranges(data.split, sequences)[SPLITS.index(split)]
    if first == stop:
        raise UserError(
            f"{source.name} ({split}) of {source.prefix} is empty: data.split={tuple(data.split)} must leave it some of the {sequences} sequences"
        )
    return first, stop


def eod_to_mask(data: DataConfig) -> int | None:
    """The end-of-document token where data.mask_eod_loss asks for it."""
    if not data.mask_eod_loss:
        return None
    from megadcp.data.tokenizer import open_tokenizer

    return int(open_tokenizer(data.tokenizer.kind, data.tokenizer.path).eod)


def open_stream(sources: Sequence[Source], data: DataConfig, steps: int, choose: Callable[[str, int], OrderCache]) -> StreamSteps:
    """The stream of a run. choose(prefix, entries) gives the cache of a source's index."""
    length = data.max_length
    if data.tokens_per_step % length:
        below = data.tokens_per_step // length * length
        legal = ", ".join(str(value) for value in (below, below + length) if value)
        raise UserError(
            f"data.tokens_per_step={data.tokens_per_step} must be a multiple of data.max_length={length} (stream mode: whole samples); legal: {legal}"
        )
    if steps < 1:
        raise UserError(f"run.steps={steps}: stream mode needs the number of steps, at least 1")
    per_step = data.tokens_per_step // length
    size = steps * per_step
    shares = np.array([source.weight for source in sources])
    if len(sources) == 1:
        wanted = [size]
    else:  # Megatron normalises the weights twice: once for the sources' sizes, once in the blend
        shares = shares / np.sum(shares)
        drawn = [math.ceil(size * share) for share in shares.tolist()]
        wanted = [math.ceil(count * (1 + SURPLUS)) for count in drawn]
        size = sum(drawn)
        shares = shares / np.sum(shares)
    eod = eod_to_mask(data)
    sets = [StreamSet(source, _extent(source, data, "train"), length, count, data.seed, eod) for source, count in zip(sources, wanted, strict=True)]
    for one in sets:
        one.cache = choose(one.source.prefix, len(one.lengths) * one.epochs)
    made = StreamSteps(sets, shares.tolist(), size, per_step, choose(sources[0].prefix, size))
    for one in sets:
        one.index()
    if len(sets) > 1:
        made.blend()
    return made
