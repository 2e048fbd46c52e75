"""Documents into packs: first fit and balanced, padding. Integers only, so the result is the same everywhere."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from itertools import chain
from math import lcm
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


def pad(lengths: Sequence[int], cp: int, align: int) -> tuple[int, ...]:
    """Padded lengths of a pack (invariant 4): each document to a multiple of 2 cp (cp > 1), then the last one grown until the sum fits.

    `align`: the local tokens of the pack, sum / cp, become a multiple of it.
    """
    step = 2 * cp if cp > 1 else 1
    padded = [-(-length // step) * step for length in lengths]
    padded[-1] += -sum(padded) % lcm(cp * align, step)
    return tuple(padded)


class PackSizes:
    """The lengths of many packs' documents, pack after pack, to be padded for one group size after another."""

    def __init__(self, packs: Sequence[Sequence[int]], lengths: IntArray) -> None:
        counts = np.fromiter(map(len, packs), dtype=np.int64, count=len(packs))
        sizes: Any = lengths[np.fromiter(chain.from_iterable(packs), dtype=np.int64, count=int(counts.sum()))]
        # Squares of a pack below 2^31 tokens fit 64 bits; where a sum may be larger, exact Python integers do it.
        self.sizes = sizes if int(sizes.sum()) < 1 << 30 else sizes.astype(object)
        self.ends = np.cumsum(counts)
        self.begins = self.ends - counts

    def padded(self, cp: int, align: int) -> tuple[FloatArray, FloatArray]:
        """Sums, and sums of squares, of the padded lengths of every pack on groups of `cp` lanes: float64 [packs] each."""
        step = 2 * cp if cp > 1 else 1
        sizes = (self.sizes + (step - 1)) & -step if step > 1 else self.sizes
        tokens = np.add.reduceat(sizes, self.begins)
        squares = np.add.reduceat(sizes * sizes, self.begins)
        grain = lcm(cp * align, step)
        if grain > step:
            last, grown = sizes[self.ends - 1], -tokens % grain
            tokens = tokens + grown
            squares = squares + grown * (2 * last + grown)
        return tokens.astype(np.float64), squares.astype(np.float64)


def longest_first(lengths: Sequence[int]) -> list[int]:
    """Document ids, longest first, equal lengths by id."""
    order: list[int] = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist()
    return order


class LongestFirst:
    """First fit of documents that come longest first, to one capacity after another."""

    def __init__(self, order: Sequence[int], lengths: Sequence[int]) -> None:
        """order: document ids, longest first."""
        self.order = list(order)
        sizes = np.asarray([lengths[document] for document in order], dtype=np.int64)
        begins = np.flatnonzero(np.diff(sizes, prepend=-1))
        self.begins: list[int] = begins.tolist()
        self.sizes: list[int] = sizes[begins].tolist()  # distinct lengths, falling
        self.total = int(sizes.sum())

    def packs(self, capacity: int) -> list[list[int]]:
        """Each document in the lowest-numbered pack with room; one that is longer than the capacity gets its own.

        The same packs come of filling them one after the other, each with every document in turn that is left and fits. So the next
        document of a pack is found by bisection among the distinct lengths, and as many of that length as fit are taken at once.
        """
        order, sizes = self.order, self.sizes
        if self.total <= capacity:
            return [order.copy()] if order else []
        distinct = len(sizes)
        rising = [-size for size in sizes]
        at = self.begins.copy()  # of each distinct length, the first document that is left, and behind the last one
        ends = [*at[1:], len(order)]
        after = list(range(distinct + 1))  # the first distinct length from here on that has documents left, or a place before it
        packs: list[list[int]] = []
        first = 0
        while first < distinct and sizes[first] > capacity:
            packs += [[document] for document in order[at[first] : ends[first]]]
            first += 1
        while True:
            while after[first] != first:
                first = after[first]
            if first == distinct:
                return packs
            pack: list[int] = []
            room, here = capacity, first
            while here < distinct:
                size, begin = sizes[here], at[here]
                end = min(begin + room // size, ends[here])
                pack += order[begin:end]
                room -= (end - begin) * size
                at[here] = end
                if end == ends[here]:
                    after[here] = here + 1
                here += 1
                if here < distinct and sizes[here] > room:
                    here = bisect_left(rising, -room, here)
                while after[here] != here:
                    after[here] = here = after[after[here]]
            packs.append(pack)


def first_fit(order: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Documents in the given order, each into the lowest-numbered pack with room. One that is longer than the capacity gets its own."""
    sizes = [lengths[document] for document in order]
    total = sum(sizes)
    if total <= capacity:
        return [list(order)]
    if sizes == sorted(sizes, reverse=True):
        return LongestFirst(order, lengths).packs(capacity)
    return _first_fit(order, lengths, capacity, total)


def _first_fit(order: Sequence[int], lengths: Sequence[int], capacity: int, total: int) -> list[list[int]]:
    """In any order. The packs' rooms are leaves of a binary tree of maxima, so that a document is placed in log(packs) steps."""
    # Of two packs that follow each other, the second began because the first was too full: together they exceed the capacity.
    most = min(len(order), 2 * total // max(1, capacity) + 2 + sum([lengths[document] > capacity for document in order]))
    size = 1 << (most - 1).bit_length()
    room = [capacity] * (2 * size)
    packs: list[list[int]] = []
    for document in order:
        length = lengths[document]
        leaf = 1
        if length > capacity:
            leaf = size + len(packs)  # all later packs are empty: the next one is the lowest
            room[leaf] = -1
        else:
            while leaf < size:
                leaf *= 2
                if room[leaf] < length:
                    leaf += 1
            room[leaf] -= length
        if leaf - size == len(packs):
            packs.append([])
        packs[leaf - size].append(document)
        while leaf > 1:
            larger = room[leaf] if room[leaf] >= room[leaf ^ 1] else room[leaf ^ 1]
            leaf //= 2
            if room[leaf] == larger:
                break
            room[leaf] = larger
    return packs


def balanced(order: Sequence[int], lengths: Sequence[int], count: int) -> list[list[int]]:
    """Documents, longest first, each into the pack with the fewest tokens (lowest number on ties). No pack is empty."""
    packs: list[list[int]] = [[] for _ in range(min(count, len(order)))]
    heap = [(0, number) for number in range(len(packs))]
    for document in order:
        tokens, number = heap[0]
        heapq.heapreplace(heap, (tokens + lengths[document], number))
        packs[number].append(document)
    return packs
