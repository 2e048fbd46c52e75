"""Documents into packs: first fit and balanced, padding. Integers only, so the result is the same everywhere."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import lcm


def pad(lengths: Sequence[int], cp: int, align: int) -> tuple[int, ...]:
    """Padded lengths of a pack (invariant 4): each document to a multiple of 2 cp (cp > 1), then the last one grown until the sum fits.

    `align`: the local tokens of the pack, sum / cp, become a multiple of it.
    """
    step = 2 * cp if cp > 1 else 1
    padded = [-(-length // step) * step for length in lengths]
    padded[-1] += -sum(padded) % lcm(cp * align, step)
    return tuple(padded)


def longest_first(lengths: Sequence[int]) -> list[int]:
    """Document ids, longest first, equal lengths by id."""
    return sorted(range(len(lengths)), key=lambda document: -lengths[document])


def first_fit(order: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Documents in the given order, each into the lowest-numbered pack with room. One that is longer than the capacity gets its own.

    The packs' rooms are leaves of a binary tree of maxima, so that a document is placed in log(packs) steps.
    """
    total = sum([lengths[document] for document in order])
    if total <= capacity:
        return [list(order)]
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
