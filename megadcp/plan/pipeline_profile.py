"""How large the slots of a pipelined step should be: target profiles, from the work of an average lane.

S slots, p stages. F_s: seconds of an empty microbatch on stage s; W_s: seconds of an average lane's content on stage s. A profile gives
each slot its share x_j of the content (sum 1), so that slot j takes F_s + W_s x_j. Equal slots pay the fill and the drain with full
microbatches. The best ones start small and grow as fast as the busiest stage can be kept busy while the others feed it, and shrink again
as fast as it can stay busy while the others drain: with the last stage as the busiest, each step's largest growth has a closed form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from megadcp.plan.columns import makespans
from megadcp.plan.cost import FORWARD_SHARE

Floats = npt.NDArray[np.float64]

ENOUGH = 2.5  # sum of shares after which a sequence need not be known


def growth(fixed: Sequence[float], work: Sequence[float], first: float, slots: int, share: float, busy: int) -> list[float]:
    """Shares of slots that grow from `first` as fast as stage `busy` never waits for a forward (1F1B order), not falling.

    From where they hold more than everything together they stay level. share: of forward in forward + backward; with that of backward instead, the sequence read backwards is how slots may shrink.
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


Profiles = list[tuple[float, Floats]]  # (fluid makespan, shares [S]), best first


def targets(fixed: Sequence[float], work: Sequence[float], cap: float, chunks: int, most: int, heights: Sequence[float] = ()) -> Profiles:
    """Profiles to try. cap: largest share of a slot; most: largest S; heights: shares that slots at the peak must have, largest first."""
    if chunks > 1:
        columns = _grouped(fixed, work, cap, most) if not heights else _grouped_peak(fixed, work, heights, most)
    else:
        columns = _tents(fixed, work, cap, most) if not heights else _peaks(fixed, work, heights, most)
    return _scored(columns, fixed, work, chunks)


def _scored(columns: Sequence[Sequence[float]], fixed: Sequence[float], work: Sequence[float], chunks: int) -> Profiles:
    """The columns with the makespan of one lane that holds just these shares."""
    if not columns:
        return []
    stages, slots = len(fixed), max(map(len, columns))
    if chunks > 1:
        slots = -(-slots // stages) * stages
    shares = np.zeros((slots, len(columns)))
    for number, column in enumerate(columns):
        shares[: len(column), number] = column
    seconds = np.array(fixed)[:, None] + np.array(work)[:, None] * shares[:, None, :]
    ends = makespans(seconds, shares > 0, chunks).tolist()
    order = sorted(range(len(columns)), key=lambda number: (round(ends[number] * 1e9), len(columns[number]), number))
    return [(ends[number], np.array(columns[number])) for number in order]


FIRSTS = (0.5, 1.0, 2.0)  # content of the first slot, in empty microbatches
LASTS = (1.5, 2.5, 4.0, 6.0, 9.0, 14.0)
HIGH_LASTS = (20.0, 30.0, 45.0, 70.0, 100.0)
LEAST_SUM, MOST_SUM = 0.93, 1.2  # of shares before they are scaled to 1


def _tents(fixed: Sequence[float], work: Sequence[float], cap: float, most: int) -> list[list[float]]:
    """Growth from the front, from the back, and a cap, cut where the content is used up."""
    ups, downs = _slopes(fixed, work, most)
    columns = []
    for up in ups:
        for down in downs:
            up_, down_ = [min(one, cap) for one in up], [min(one, cap) for one in down]
            for count in _counts(up_, down_, most):
                shape = [min(one, other) for one, other in zip(up_[:count], reversed(down_[:count]), strict=True)]
                sum_ = math.fsum(shape)
                columns.append([share / sum_ for share in shape])
    return columns


def _slopes(fixed: Sequence[float], work: Sequence[float], most: int, lasts: Sequence[float] = LASTS) -> tuple[list[list[float]], list[list[float]]]:
    """Growth sequences from the front and from the back, none of them falling."""
    unit, last = fixed[0] / work[0], len(work) - 1
    busiest = max(range(len(work)), key=lambda stage: (round(work[stage] * 1e9), stage))
    ups = [growth(fixed, work, first * unit, most, FORWARD_SHARE, last) for first in FIRSTS]
    downs = [growth(fixed, work, one * unit, most, 1 - FORWARD_SHARE, last) for one in lasts]
    if busiest != last:
        downs += [growth(fixed, work, one * unit, most, 1 - FORWARD_SHARE, busiest) for one in (*lasts, 20.0, 30.0)]
    return ups, downs


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


def _peaks(fixed: Sequence[float], work: Sequence[float], heights: Sequence[float], most: int) -> list[list[float]]:
    """Slots of these heights at the peak, and on both sides slopes that hold what is left."""
    unit, top = fixed[0] / work[0], heights[0]
    middle = [*reversed(heights[1::2]), *heights[0::2]]
    left = max(0.02, 1 - math.fsum(heights))
    ups, downs = _slopes(fixed, work, most, (*LASTS, *HIGH_LASTS))
    rising = [[one for one in up if one < top / 1.1] for up in ups]
    columns = []
    for part in (1.0, 0.8, 0.6, 0.4, 0.2, 0.0):  # of what is left, in front of the peak: geometric, so that it adds up
        rising.append(_geometric(top, part * left, unit))
    for front in rising:
        rest = left - math.fsum(front)
        if rest < -0.1 * left:
            continue
        backs = [_geometric(top, max(0.0, rest), unit)]
        for down in downs:
            back, so_far = [], 0.0
            while so_far < rest and len(back) < most:
                back.append(min(down[len(back)], top))
                so_far += back[-1]
            backs.append(back[::-1])
        for back in backs:
            sum_ = math.fsum(front) + math.fsum(back)
            if front + back and LEAST_SUM * left <= sum_ <= MOST_SUM * left and len(front) + len(back) + len(heights) <= most:
                scale = left / sum_
                columns.append([*[one * scale for one in front], *middle, *[one * scale for one in back]])
    return columns or [middle]


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


def _grouped(fixed: Sequence[float], work: Sequence[float], cap: float, most: int) -> list[list[float]]:
    """The same for interleaved lists, whose slots go in groups of p: equal in a group, groups grow and shrink by constant factors."""
    stages = len(fixed)
    unit = fixed[0] / work[0]
    columns = []
    for groups in range(1, most // stages + 1):
        for start in (2.0, 4.5, 9.0, 20.0):
            for rise in (2.0, 4.0, 7.0):
                for end in (2.0, 4.0, 8.0, 16.0):
                    for fall in (1.0, 1.3, 1.7, 2.4):
                        shape = [min(start * unit * rise**place, end * unit * fall ** (groups - 1 - place), cap) for place in range(groups)]
                        sum_ = stages * math.fsum(shape)
                        if 0.7 < sum_ < 1.4:
                            columns.append([share / sum_ for share in shape for _ in range(stages)])
    return columns


def _grouped_peak(fixed: Sequence[float], work: Sequence[float], heights: Sequence[float], most: int) -> list[list[float]]:
    """Interleaved, with slots of these heights: put in at the peak of what is left."""
    left = max(0.02, 1 - math.fsum(heights))
    middle = [*reversed(heights[1::2]), *heights[0::2]]
    columns = []
    for _, shares in _scored(_grouped(fixed, [value * left for value in work], 10.0, most), fixed, [value * left for value in work], 2)[:4]:
        rest = [share * left for share in shares.tolist()]
        peak = max(range(len(rest)), key=lambda slot: (rest[slot], -slot))
        columns.append([*rest[:peak], *middle, *rest[peak:]])
    return columns or [middle]
