"""The best 1F1B plan of a tiny step, by trying everything: part of exact.py.

All partitions of the documents, cp and lanes of each part, slots, and of each microbatch recompute (every layer count: what is in flight
couples them), communication and the document that padding grows. Of slots only this matters: for every two microbatches that share a
lane, which comes first, and by how many slots, up to p (a lane deletes what it takes no part in, and B(i) goes before F(k) on stage s
when k > i + p-1-s). Placements that agree in that are tried once.

A placement's makespan grows with the seconds of its microbatches. So it is first scored with each microbatch's least seconds on every
stage; placements are then taken from the best such score on, until that score is no better than a plan found.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megadcp.config.check import UserError
from megadcp.plan.basis import Basis
from megadcp.plan.columns import Blocks, makespans, peaks
from megadcp.plan.cost import CostModel, Load
from megadcp.plan.exact_lanes import alike, nothing_fits, orders
from megadcp.plan.memory import MemoryModel
from megadcp.plan.step_plan import LEVELS, Microbatch, Recompute

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

MOST_PLACEMENTS = 2_000_000
MOST_CHOICES = 200_000  # combinations of recompute and communication of one placement
CHUNK = 200_000  # lanes scored at once


class Choice(NamedTuple):
    """One way to run a set of documents on a group, and what it costs on every stage (at lane speed 1)."""

    documents: tuple[int, ...]
    padded: tuple[int, ...]
    recompute: Recompute
    kind: str
    seconds: tuple[float, ...]
    stored: tuple[float, ...]
    passing: tuple[float, ...]


class Placement(NamedTuple):
    """One part of a partition per entry: its documents, cp, first lane, slot; and the score with least seconds."""

    score: float
    parts: tuple[tuple[int, ...], ...]
    places: tuple[tuple[int, int], ...]
    slots: tuple[int, ...]


def search(basis: Basis, lengths: Sequence[int], sizes: Sequence[int]) -> list[Microbatch]:
    """The microbatches of a plan of least makespan with cp among `sizes`. UserError when there is none, or too much to try."""
    _check_size(basis, len(lengths), sizes)
    choices = _Choices(basis, lengths)
    best, least = None, math.inf
    for placement in sorted(_placements(basis, choices, len(lengths), sizes)):
        if placement.score >= least:
            break
        found = _cheapest(basis, choices, placement)
        if found is not None and found[0] < least:
            least, best = found[0], (placement, found[1])
    if best is None:
        raise nothing_fits(basis, lengths)
    placement, chosen = best
    return [
        Microbatch(slot, lane, cp, one.documents, one.padded, one.recompute, one.kind)
        for slot, (cp, lane), one in zip(placement.slots, placement.places, chosen, strict=True)
    ]


def _check_size(basis: Basis, documents: int, sizes: Sequence[int]) -> None:
    """Refuse what has too many placements to try."""
    places = sum(basis.layout.lanes // cp for cp in sizes)
    ways = sum(_partitions_into(documents, parts) * places**parts * _arrangements(parts, basis.layout.pp) for parts in range(1, documents + 1))
    if ways > MOST_PLACEMENTS:
        raise UserError(
            f"exact.solve was asked for {documents} documents on {basis.layout.lanes} lanes with pp={basis.layout.pp}: {ways} placements to try, "
            f"at most {MOST_PLACEMENTS} are; legal here: fewer documents or lanes, a smaller max_cp"
        )


def _partitions_into(documents: int, parts: int) -> int:
    """Stirling numbers of the second kind."""
    if documents == 0 or parts == 0:
        return int(documents == parts)
    return parts * _partitions_into(documents - 1, parts) + _partitions_into(documents - 1, parts - 1)


def _arrangements(parts: int, stages: int) -> int:
    """Slot vectors of _slots."""
    return sum(math.factorial(levels) * _partitions_into(parts, levels) * stages ** (levels - 1) for levels in range(1, parts + 1))


# ---------------------------------------------------------------------------------------------------------- ways to run a pack
class _Choices:
    """Of every set of documents on every group, the choices that no other beats in all respects."""

    def __init__(self, basis: Basis, lengths: Sequence[int]) -> None:
        self.lengths, self.cost, self.memory = lengths, CostModel(basis), MemoryModel(basis)
        self._found: dict[tuple[tuple[int, ...], int, bool], list[Choice]] = {}

    def of(self, documents: tuple[int, ...], cp: int, lane: int) -> list[Choice]:
        """Choices, quickest first; empty when not one fits the memory alone."""
        key = documents, cp, self.cost.in_node(lane, cp)
        if key not in self._found:
            self._found[key] = self._undominated(list(self._all(*key)))
        return self._found[key]

    def least(self, documents: tuple[int, ...], cp: int, lane: int) -> tuple[float, ...]:
        """Least seconds on every stage over all choices."""
        return tuple(map(min, zip(*(one.seconds for one in self.of(documents, cp, lane)), strict=True)))

    def _all(self, documents: tuple[int, ...], cp: int, inside: bool) -> Iterator[Choice]:
        cost, memory, stages = self.cost, self.memory, range(self.cost.basis.layout.pp)
        budgets = [memory.budget(stage, int(cp > 1)) for stage in stages]
        values = [Recompute(level, layers) for level in LEVELS for layers in ([0] if level == "none" else range(1, cost.basis.recomputable + 1))]
        for order, padded in orders(documents, self.lengths, cp, cost.basis.align):
            local = sum(padded) / cp
            for recompute in values:
                stored = tuple(memory.stored(stage, local, recompute) for stage in stages)
                passing = tuple(memory.passing(stage, local, recompute.level) for stage in stages)
                if any(held + more > budget for held, more, budget in zip(stored, passing, budgets, strict=True)):
                    continue
                for kind in cost.legal_kinds(cp):
                    layer = cost.layer(Load(sum(padded), sum(one * one for one in padded), cp, kind, inside))
                    seconds = tuple(cost.stages(layer, local, recompute.level, recompute.layers))
                    yield Choice(order, padded, recompute, kind, seconds, stored, passing)

    @staticmethod
    def _undominated(choices: list[Choice]) -> list[Choice]:
        kept: list[Choice] = []
        for one in sorted(choices, key=lambda one: (math.fsum(one.seconds), one.stored, one.passing)):
            figures = one.seconds + one.stored + one.passing
            if not any(all(a <= b for a, b in zip(other.seconds + other.stored + other.passing, figures, strict=True)) for other in kept):
                kept.append(one)
        return kept


# ------------------------------------------------------------------------------------------------------------------ placements
def _partitions(documents: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All partitions of 0 .. documents - 1; document 0 is in the first part."""

    def grow(parts: list[list[int]], one: int) -> Iterator[tuple[tuple[int, ...], ...]]:
        if one == documents:
            yield tuple(map(tuple, parts))
            return
        for part in parts:
            part.append(one)
            yield from grow(parts, one + 1)
            part.pop()
        yield from grow([*parts, [one]], one + 1)

    return grow([], 0)


def _slots(parts: int, stages: int) -> IntArray:
    """int64 [arrangements, parts]: all orders, ties included, with 1 to `stages` slots from one level to the next."""
    found = []
    for ranks in product(range(parts), repeat=parts):
        levels = max(ranks) + 1
        if len(set(ranks)) == levels:
            for gaps in product(range(1, stages + 1), repeat=levels - 1):
                at = np.cumsum([0, *gaps])
                found.append([int(at[rank]) for rank in ranks])
    return np.array(found, dtype=np.int64)


def _placements(basis: Basis, choices: _Choices, documents: int, sizes: Sequence[int]) -> Iterator[Placement]:
    """Every placement that differs from the others, with its score."""
    lanes, stages = basis.layout.lanes, basis.layout.pp
    places = [(cp, lane) for cp in sizes for lane in range(0, lanes - cp + 1, cp)]
    symmetric = alike(basis, sizes) and lanes & (lanes - 1) == 0
    slots = {parts: _slots(parts, stages) for parts in range(1, documents + 1)}
    for parts in _partitions(documents):
        batch: list[tuple[tuple[tuple[int, int], ...], IntArray]] = []
        for chosen in product(places, repeat=len(parts)):
            if symmetric and chosen[0][1] != 0:
                continue  # lanes can be renumbered so that document 0 is in the first place
            if all(choices.of(part, cp, lane) for part, (cp, lane) in zip(parts, chosen, strict=True)):
                batch.append((chosen, _different(slots[len(parts)], chosen, stages)))
        yield from _scored(basis, choices, parts, batch)


def _different(slots: IntArray, places: Sequence[tuple[int, int]], stages: int) -> IntArray:
    """One slot vector of all that say the same about every two microbatches that share a lane; none that gives a lane two at once."""
    distances = []
    for second in range(len(places)):
        for first in range(second):
            (a, left), (b, right) = places[first], places[second]
            if left < right + b and right < left + a:
                distances.append(slots[:, second] - slots[:, first])
    if not distances:
        return slots[:1] * 0
    apart = np.stack(distances, axis=1)
    legal = (apart != 0).all(axis=1)
    _, index = np.unique(np.clip(apart[legal], -stages, stages), axis=0, return_index=True)
    different: IntArray = slots[legal][np.sort(index)]
    return different


def _scored(
    basis: Basis, choices: _Choices, parts: tuple[tuple[int, ...], ...], batch: Sequence[tuple[tuple[tuple[int, int], ...], IntArray]]
) -> Iterator[Placement]:
    """Placements of one partition, scored with the least seconds of each part on each stage, many at once."""
    flat = [(places, tuple(row)) for places, rows in batch for row in rows.tolist()]
    step = max(1, CHUNK // basis.layout.lanes)
    for begin in range(0, len(flat), step):
        some = flat[begin : begin + step]
        seconds = []
        for places, _ in some:
            least = (choices.least(part, cp, lane) for part, (cp, lane) in zip(parts, places, strict=True))
            seconds.append([[value / basis.speed(lane, cp) for value in one] for one, (cp, lane) in zip(least, places, strict=True)])
        scores = _makespans(basis, [places for places, _ in some], [slots for _, slots in some], np.array(seconds))
        for (places, slots), score in zip(some, scores.tolist(), strict=True):
            yield Placement(score, parts, places, slots)


def _makespans(basis: Basis, places: Sequence[tuple[tuple[int, int], ...]], slots: Sequence[tuple[int, ...]], seconds: FloatArray) -> FloatArray:
    """Makespans of many placements: float64 [n]. seconds: [n, parts, p]."""
    lanes, count, stages = basis.layout.lanes, len(places), basis.layout.pp
    depth = max(max(one) for one in slots) + 1
    table, present = np.zeros((depth, stages, count * lanes)), np.zeros((depth, count * lanes), dtype=bool)
    width = np.ones((depth, count * lanes), dtype=np.int64)  # of the block that begins here; 0 inside one
    for number, (where, when) in enumerate(zip(places, slots, strict=True)):
        for part, ((cp, lane), slot) in enumerate(zip(where, when, strict=True)):
            columns = slice(number * lanes + lane, number * lanes + lane + cp)
            table[slot, :, columns] = seconds[number, part][:, None]
            present[slot, columns] = True
            width[slot, columns] = 0
            width[slot, columns.start] = cp
    blocks = []
    for row in width:
        starts = np.flatnonzero(row)
        blocks.append(None if starts.size == row.size else Blocks(starts, row[starts]))
    largest: FloatArray = makespans(table, present, 1, blocks).reshape(count, lanes).max(axis=1)
    return largest


# ----------------------------------------------------------------------------------------------------- choices of a placement
def _cheapest(basis: Basis, choices: _Choices, placement: Placement) -> tuple[float, tuple[Choice, ...]] | None:
    """(makespan, a choice for each part) of least makespan that fits the memory; None when none does."""
    places, slots = placement.places, placement.slots
    count = len({cp for cp, _ in places if cp > 1})
    budgets = np.array([choices.memory.budget(stage, count) for stage in range(basis.layout.pp)])
    own = [choices.of(part, cp, lane) for part, (cp, lane) in zip(placement.parts, places, strict=True)]
    first = tuple(options[0] for options in own)
    if (
        all(one.seconds == choices.least(part, *place) for one, part, place in zip(first, placement.parts, places, strict=True))
        and _fits(basis, places, slots, [first], budgets).all()
    ):
        return placement.score, first
    ways = math.prod(map(len, own))
    if ways > MOST_CHOICES:
        raise UserError(
            f"exact.solve: {ways} combinations of recompute for one placement, at most {MOST_CHOICES} are tried; fewer documents, or more memory"
        )
    combinations = [one for one in product(*own)]
    fitting = [one for one, fits in zip(combinations, _fits(basis, places, slots, combinations, budgets), strict=True) if fits]
    if not fitting:
        return None
    speeds = np.array([basis.speed(lane, cp) for cp, lane in places])
    seconds = np.array([[choice.seconds for choice in one] for one in fitting]) / speeds[None, :, None]
    scores = _makespans(basis, [places] * len(fitting), [slots] * len(fitting), seconds)
    best = int(np.argmin(scores))
    return float(scores[best]), fitting[best]


def _fits(
    basis: Basis,
    places: Sequence[tuple[int, int]],
    slots: Sequence[int],
    combinations: Sequence[tuple[Choice, ...]],
    budgets: FloatArray,
) -> npt.NDArray[np.bool_]:
    """Which combinations fit the memory on every stage of every lane: bool [n]."""
    stages, depth = basis.layout.pp, max(slots) + 1
    fits = np.ones(len(combinations), dtype=bool)
    stored = np.array([[choice.stored for choice in one] for one in combinations])  # [n, parts, p]
    passing = np.array([[choice.passing for choice in one] for one in combinations])
    for lane in range(basis.layout.lanes):
        held, more = np.zeros((depth, stages, len(combinations))), np.zeros((depth, stages, len(combinations)))
        for part, ((cp, left), slot) in enumerate(zip(places, slots, strict=True)):
            if left <= lane < left + cp:
                held[slot], more[slot] = stored[:, part].T, passing[:, part].T
        fits &= (peaks(held, more) <= budgets[:, None]).all(axis=0)
    return fits
