"""How large the slots of a pipelined step should be: target profiles, from the work of an average lane.

S slots, p stages. F_s: seconds of an empty microbatch on stage s; W_s: seconds of an average lane's content on stage s. A profile gives
each slot its share x_j of the content (sum 1), so that slot j takes F_s + W_s x_j. Equal slots pay the fill and the drain with full
microbatches. The best ones start small and grow as fast as the busiest stage can be kept busy while the others feed it, and shrink again
as fast as it can stay busy while the others drain: with the last stage as the busiest, each step's largest growth has a closed form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from megadcp.plan.columns import makespans
from megadcp.plan.cost import FORWARD_SHARE
from megadcp.plan.pipeline_costs import Floats
from megadcp.plan.pipeline_reshape import Slots, reshape

ENOUGH = 2.5  # sum of shares after which a sequence need not be known
FIRSTS = (0.6, 1.3)  # content of the first slot, in empty microbatches
LASTS = (1.5, 2.8, 5.0, 9.0, 15.0)
HIGH_LASTS = (*LASTS, 25.0, 40.0, 65.0, 100.0)  # of slots that shrink from a high peak
FEW = 3  # refinements, and fewer: then half as many slopes are tried
LEAST_SUM, MOST_SUM = 0.93, 1.2  # of shares before they are scaled to 1


@dataclass(frozen=True)
class Lane:
    """An average lane: F_s and W_s in seconds, chunks of a stage; a profile has at most `most` slots of at most `cap` of the content."""

    fixed: tuple[float, ...]
    work: tuple[float, ...]
    chunks: int
    most: int
    cap: float = math.inf
    refinements: int = 8  # of profiles that have no closed form

    @property
    def busiest(self) -> int:
        """The stage with the most work."""
        return max(range(len(self.work)), key=lambda stage: (round(self.work[stage] * 1e9), stage))

    @property
    def unit(self) -> float:
        """An empty microbatch's time as a share of the content."""
        return self.fixed[0] / self.work[0]


class Tall(NamedTuple):
    """Slots that single documents need: shares, largest first, and what a second of theirs on the busiest stage takes on each stage."""

    heights: tuple[float, ...] = ()
    ratio: tuple[float, ...] = ()

    @property
    def middle(self) -> list[float]:
        """The heights in the order in which they stand: the largest in the middle."""
        return [*reversed(self.heights[1::2]), *self.heights[0::2]]


class Column(NamedTuple):
    """A profile; its slots `start` .. `start` + number of heights - 1 are the tall ones."""

    shares: list[float]
    start: int = 0


NONE = Tall()


def target(lane: Lane, tall: Tall = NONE) -> Floats | None:
    """Shares [S] of the slots of the best profile found; None when there is none."""
    columns = _grouped(lane, tall) if lane.chunks > 1 else _peaks(lane, tall) if tall.heights else _tents(lane)
    if not columns:
        return None
    best = _best(columns, lane, tall)
    if lane.chunks == 1 and lane.busiest == len(lane.work) - 1 and not tall.heights:
        return np.array(best.shares)
    busiest = lane.work[lane.busiest]
    shares = np.array(best.shares)
    least = np.zeros(len(shares))
    least[best.start : best.start + len(tall.heights)] = tall.middle
    slots = Slots(np.array(lane.fixed), shares * busiest, _ratios(best, lane, tall), least * busiest, np.maximum(lane.cap, shares) * busiest)
    content, _ = reshape(slots, lane.refinements, lane.chunks)
    refined: Floats = content / busiest
    return refined


def _ratios(column: Column, lane: Lane, tall: Tall) -> Floats:
    """What a second of each slot's content on the busiest stage takes on each stage: [S, p]."""
    ratios = np.repeat((np.array(lane.work) / lane.work[lane.busiest])[None, :], len(column.shares), axis=0)
    if tall.heights:
        ratios[column.start : column.start + len(tall.heights)] = tall.ratio
    return ratios


def _best(columns: Sequence[Column], lane: Lane, tall: Tall) -> Column:
    """The column with the least makespan of one lane that holds just these shares."""
    stages, slots = len(lane.fixed), max(len(column.shares) for column in columns)
    if lane.chunks > 1:
        slots = -(-slots // stages) * stages
    present = np.zeros((slots, len(columns)), bool)
    seconds = np.zeros((slots, stages, len(columns)))
    for number, column in enumerate(columns):
        count = len(column.shares)
        present[:count, number] = True
        content = np.array(column.shares)[:, None] * lane.work[lane.busiest]
        seconds[:count, :, number] = np.array(lane.fixed) + content * _ratios(column, lane, tall)
    ends = np.rint(makespans(seconds, present, lane.chunks) * 1e9).astype(np.int64).tolist()
    return columns[min(range(len(columns)), key=lambda number: (ends[number], len(columns[number].shares), number))]


# ------------------------------------------------------------------------------------------------------------------ 1F1B
def growth(fixed: Sequence[float], work: Sequence[float], first: float, slots: int, share: float, busy: int) -> list[float]:
    """Shares of slots that grow from `first` as fast as stage `busy` never waits for a forward (1F1B order), not falling.

    From where they hold more than everything together they stay level. share: of forward in forward + backward; with that of backward
    instead, the sequence read backwards is how slots may shrink.
    """
    stages = len(fixed)
    ends = [[0.0] * slots for _ in range(stages)]  # of backwards, by stage and slot
    ready = [0.0] * stages  # end of the last action of each stage
    shares: list[float] = []
    total = 0.0
    for slot in range(slots):
        # Stage s runs backward slot - (p - s) before forward `slot`: all of them are known by now.
        for stage in range(stages - 1, -1, -1):
            done = slot - (stages - stage)
            if done < 0:
                continue
            begin = ready[stage] if stage == stages - 1 else max(ready[stage], ends[stage + 1][done])
            ready[stage] = ends[stage][done] = begin + (1 - share) * (fixed[stage] + work[stage] * shares[done])
        if slot == 0:
            shares.append(first)
        else:
            constant = slope = 0.0
            most = 1e9
            for stage in range(busy - 1, -1, -1):
                constant += share * fixed[stage]
                slope += share * work[stage]
                most = min(most, (ready[busy] - ready[stage] - constant) / slope)
            shares.append(max(0.0, most) if busy else 1.7 * shares[-1])
        arrived = 0.0
        for stage in range(stages):
            arrived = max(arrived, ready[stage]) + share * (fixed[stage] + work[stage] * shares[slot])
            ready[stage] = arrived
        total += shares[slot]
        if total > ENOUGH:
            break
    shares = list(accumulate(shares, max))
    return shares + shares[-1:] * (slots - len(shares))


def _slopes(lane: Lane, lasts: Sequence[float] = LASTS) -> tuple[list[list[float]], list[list[float]]]:
    """Growth sequences from the front and from the back, none of them falling."""
    fixed, work, most, unit, last = lane.fixed, lane.work, lane.most, lane.unit, len(lane.work) - 1
    ups = [growth(fixed, work, first * unit, most, FORWARD_SHARE, last) for first in FIRSTS]
    downs = [growth(fixed, work, one * unit, most, 1 - FORWARD_SHARE, last) for one in lasts]
    if lane.busiest != last:
        downs += [growth(fixed, work, one * unit, most, 1 - FORWARD_SHARE, lane.busiest) for one in (*lasts, 20.0, 30.0)]
        ups += [_constant(first * unit, 1.4, most) for first in FIRSTS]
        downs += [_constant(one * unit, 1.05, most) for one in (9.0, 20.0)]
    return ups, downs


def _constant(first: float, factor: float, most: int) -> list[float]:
    """Shares a constant factor apart, up to all there is. Products, not powers, which libraries round differently."""
    shares = [min(first, ENOUGH)]
    while len(shares) < most:
        shares.append(min(shares[-1] * factor, ENOUGH))
    return shares


def _tents(lane: Lane) -> list[Column]:
    """Growth from the front, from the back, and the cap, cut where the content is used up."""
    ups, downs = _slopes(lane)
    columns = []
    for up in ups:
        for down in downs:
            up_, down_ = [min(one, lane.cap) for one in up], [min(one, lane.cap) for one in down]
            for count in _counts(up_, down_, lane.most):
                shape = [min(one, other) for one, other in zip(up_[:count], reversed(down_[:count]), strict=True)]
                sum_ = math.fsum(shape)
                columns.append(Column([share / sum_ for share in shape]))
    return columns


def _counts(up: Sequence[float], down: Sequence[float], most: int) -> list[int]:
    """Slot counts at which the smaller of growth and shrinking sums to about 1."""

    def total(count: int) -> float:
        return math.fsum([min(one, other) for one, other in zip(up[:count], reversed(down[:count]), strict=True)])

    low, high = 1, most
    while low < high:  # the sum grows with the count
        middle = (low + high) // 2
        if total(middle) < LEAST_SUM:
            low = middle + 1
        else:
            high = middle
    found = [low]
    while len(found) < 4 and found[-1] < most and total(found[-1] + 1) <= MOST_SUM:
        found.append(found[-1] + 1)
    return found


def _peaks(lane: Lane, tall: Tall) -> list[Column]:
    """The tall slots at the peak, and on both sides slopes that hold what is left."""
    top, middle = tall.heights[0], tall.middle
    left = max(0.02, 1 - math.fsum(tall.heights))
    ups, downs = _slopes(lane, HIGH_LASTS[1::2] if lane.refinements <= FEW else HIGH_LASTS)
    fronts = [[min(one, lane.cap) for one in up if one < top / 1.1] for up in ups]
    for part in (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)[
        :: 2 if lane.refinements <= FEW else 1
    ]:  # of what is left, in front of the peak: geometric, so that it adds up
        fronts.append([min(one, lane.cap) for one in _geometric(top, part * left, lane.unit)])
    columns = []
    for front in fronts:
        rest = left - math.fsum(front)
        if rest < -0.1 * left:
            continue
        backs = [[min(one, lane.cap) for one in reversed(_geometric(top, max(0.0, rest), lane.unit))]]
        for down in downs:
            back: list[float] = []
            so_far = 0.0
            while so_far < rest and len(back) < lane.most:
                back.append(min(down[len(back)], top, lane.cap))
                so_far += back[-1]
            backs.append(back[::-1])
        for back in backs:
            sum_ = math.fsum(front) + math.fsum(back)
            if front + back and LEAST_SUM * left <= sum_ <= MOST_SUM * left and len(front) + len(back) + len(middle) <= lane.most:
                scale = left / sum_
                columns.append(Column([*[one * scale for one in front], *middle, *[one * scale for one in back]], len(front)))
    return columns or [Column(middle)]


def _geometric(top: float, total: float, unit: float) -> list[float]:
    """Rising shares below `top` with about this sum, a constant factor apart."""
    if total <= 0.5 * unit:
        return []
    factor = 1 + top / total
    shares = []
    share = top / factor
    while share > 0.7 * unit:
        shares.append(share)
        share /= factor
    return shares[::-1]


# ----------------------------------------------------------------------------------------------------------- interleaved
def _grouped(lane: Lane, tall: Tall) -> list[Column]:
    """Slots go in groups of p: equal in a group, groups grow and shrink by constant factors; the tall ones are put in at the peak."""
    stages, unit = len(lane.fixed), lane.unit
    left = max(0.02, 1 - math.fsum(tall.heights))
    columns = []
    rises = [_constant(start * unit, rise, lane.most) for start in (4.5, 12.0) for rise in (2.5, 5.0)]
    falls = [_constant(end * unit, fall, lane.most) for end in (3.0, 8.0) for fall in (1.0, 1.2, 1.6, 2.4)]
    groups = 1
    while groups * stages <= lane.most:
        for rising in rises:
            for falling in falls:
                shape = [min(one, other, lane.cap) for one, other in zip(rising[:groups], falling[groups - 1 :: -1], strict=True)]
                sum_ = stages * math.fsum(shape)
                if 0.8 * left < sum_ < 1.25 * left:
                    columns.append([share * (left / sum_) for share in shape for _ in range(stages)])
        groups += max(1, groups // 8)
    if not columns:
        columns.append([left / stages] * stages)
    if not tall.heights:
        return [Column(column) for column in columns]
    peaks = [max(range(len(column)), key=lambda slot: (column[slot], -slot)) for column in columns]
    return [Column([*column[:peak], *tall.middle, *column[peak:]], peak) for column, peak in zip(columns, peaks, strict=True)]
