"""Ways to fill the slots of a pipelined step: which profiles, which usual group sizes, how tightly.

Documents count from 0, longest first. Times are nanoseconds on the busiest stage, without what an empty microbatch costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from megadcp.plan.columns import makespans
from megadcp.plan.pipeline_costs import Documents, Floats, Ints, PipelineCosts
from megadcp.plan.pipeline_fill import THOUSAND, Block, Cell, Filling, NoRoom, Pace, Sizes
from megadcp.plan.pipeline_profile import Lane, Tall, target

LEAST_MOST_SLOTS, MOST_SLOTS = 96, 1024  # slots of a plan: so many may be tried, more where memory holds little
SLACKS = (1.01, 1.025, 1.045, 1.08)  # slots are filled up to so much more than their room, as little as works
MUCH = 0.3  # of the work: what empty microbatches may cost before fewer, recomputed ones are tried
MOST_BASE = 8  # largest usual group size
SAND = 20  # documents shorter than this part of a mean slot are poured
HOUSED = (1.02, 0.5, 0.3)  # a document that needs more than this part of the peak on every group has a slot made for it
# (of HOUSED, of the usual group sizes) in the order in which they are tried, and where long documents found no room at first
ORDER = ((0, 0), (0, 1), (1, 0), (2, 0), (0, 2), (1, 1), (2, 1), (1, 2), (2, 2))
CROWDED = ((2, 0), (1, 0), (2, 1), (2, 2), (1, 1), (1, 2), (0, 1), (0, 2))


class Effort(NamedTuple):
    """How much is tried: attempts filled, attempts priced, plans reshaped, how often each, with how many improvements; and of profiles."""

    attempts: int
    exact: int
    paths: int
    reshapes: int
    rounds: int
    refinements: int


def effort_of(documents: int) -> Effort:
    """Many small steps are cheap, and large ones have time: a fixed budget for each number of documents."""
    if documents <= 300:
        return Effort(9, 4, 2, 3, 6, 8)
    if documents <= 700:
        return Effort(6, 3, 1, 3, 6, 6)
    if documents <= 1500:
        return Effort(3, 2, 1, 2, 5, 3)
    return Effort(5, 3, 1, 3, 8, 8) if documents <= 6000 else Effort(6, 3, 2, 4, 8, 8)


class Attempt(NamedTuple):
    """A filling, and what its slots will take: nanoseconds of content of the fullest microbatch of each."""

    cells: list[Cell]
    base: int
    slots: list[int]
    most: float  # local tokens of a microbatch of several documents
    step: int  # of SLACKS
    crowded: bool  # a long document found no room


class Workshop:
    """Makes attempts for documents of these lengths, longest first."""

    def __init__(self, costs: PipelineCosts, lengths: Ints) -> None:
        self.costs, self.basis, self.limits, self.lengths = costs, costs.basis, costs.limits, lengths
        self.groups, lanes = costs.groups, costs.lanes
        self.tokens = int(lengths.sum()) / lanes  # of an average lane
        self.documents: dict[int, Documents] = {cp: costs.documents(lengths, cp, max(1.0, self.tokens * cp / 12)) for cp in self.groups}
        speeds = self.basis.lane_speed or (1.0,) * lanes
        mean = math.fsum(speeds) / len(speeds)
        self.speeds = [max(1, round(speed / mean * THOUSAND)) for speed in speeds]
        self.effort = effort_of(len(lengths))
        self.work = {cp: self._work(cp) for cp in self.groups if cp <= MOST_BASE}
        self.busiest = max(range(costs.stages), key=lambda stage: (round(self.work[1][stage] * 1e9), stage))
        self.sizes = self._sizes()
        full = max(1, min(self.sizes[cp].cap // cp for cp in self.groups))
        most = min(MOST_SLOTS, max(LEAST_MOST_SLOTS, math.ceil(1.4 * self.tokens / full) + costs.stages))
        fixed = tuple(self.documents[1].fixed.tolist())
        self.lane = Lane(fixed, tuple(self.work[1]), costs.chunks, most, refinements=self.effort.refinements)

    def _work(self, base: int) -> list[float]:
        """Seconds of content of an average lane on each stage, with groups of this size."""
        return [math.fsum(stage.tolist()) / self.costs.lanes * base for stage in self.documents[base].seconds]

    def _sizes(self) -> dict[int, Sizes]:
        sizes = {}
        for cp, one in self.documents.items():
            nanoseconds = np.rint(one.seconds[self.busiest] * 1e9).astype(np.int64)
            alone, several = self.costs.most_tokens(cp)
            grain = self.costs.grain(cp)
            cap = max(1, min(self.limits.pack_tokens // grain * grain, several))
            sizes[cp] = Sizes(cp, nanoseconds.tolist(), one.padded.tolist(), cap, nanoseconds, one.padded, alone)
        return sizes

    def _capped(self, most: float) -> dict[int, Sizes]:
        """The documents, microbatches of several limited to `most` local tokens."""
        if most == math.inf:
            return self.sizes
        return {cp: replace(size, cap=max(1, min(size.cap, int(most * cp)))) for cp, size in self.sizes.items()}

    # -------------------------------------------------------------------------------------------------------------- attempts
    def promising(self) -> list[Attempt]:
        """The attempts worth an exact score: those with the least makespan of one lane that has the fullest microbatch of each slot."""
        attempts = list(self._attempts())
        if len(attempts) <= self.effort.exact:
            return attempts
        stages, chunks = self.costs.stages, self.costs.chunks
        slots = max(len(attempt.slots) for attempt in attempts)
        slots = -(-slots // stages) * stages if chunks > 1 else slots
        content = np.zeros((slots, len(attempts)))
        seconds = np.zeros((slots, stages, len(attempts)))
        for number, attempt in enumerate(attempts):
            content[: len(attempt.slots), number] = np.array(attempt.slots) / 1e9
            work = self.work[attempt.base]
            ratio = np.array(work) / work[self.busiest]
            seconds[:, :, number] = self.documents[attempt.base].fixed + content[:, number, None] * ratio
        ends = np.rint(makespans(seconds, content > 0, chunks) * 1e9).astype(np.int64).tolist()
        best = sorted(range(len(attempts)), key=lambda number: (ends[number], number))
        return [attempts[number] for number in best[: self.effort.exact]]

    def _attempts(self) -> Iterator[Attempt]:
        """As many as the effort allows, the usual first."""
        tops = self._tops()
        known: dict[tuple[int, int], Floats] = {}
        left, step, order = self.effort.attempts, 1, [ORDER[0]]
        while order and left > 0:
            housed, size = order.pop(0)
            for number, (shares, most) in enumerate(tops):
                if (number, housed) not in known:
                    known[number, housed] = self._with_peaks(shares, HOUSED[housed])
                profile = known[number, housed]
                bases = self._bases(len(profile))
                if left <= 0 or size >= len(bases) or any(_equal(profile, known.get((number, other))) for other in range(housed)):
                    continue
                left -= 1
                base = bases[size]
                rooms = [share * self.work[base][self.busiest] * 1e9 for share in profile.tolist()]
                for attempt in self.fillings(rooms, base, most, first=max(0, step - 1)):
                    step = attempt.step
                    yield attempt
                    if (housed, size, number) == (0, 0, 0):
                        order = list(CROWDED if attempt.crowded else ORDER[1:])
            if (housed, size) == ORDER[0] and not order:
                order = list(CROWDED)

    def roomy(self) -> Iterator[Attempt]:
        """Ever more equal slots, for what fits no other way: packs that may hold little, or little memory."""
        full = min(self.sizes[cp].cap // cp for cp in self.groups)
        slots = max(self.costs.stages, math.ceil(self.tokens / max(1, full)))
        tallest = max(self._fastest(0)[0], 1)
        while slots <= MOST_SLOTS:
            room = max(self.work[1][self.busiest] * 1e9 / slots, float(tallest))
            yield from self.fillings([room] * slots, 1, math.inf)
            slots += max(2, slots // 3)

    def _bases(self, slots: int) -> list[int]:
        """Usual group sizes to try: the fewer documents there are for a lane's slots, the larger."""
        per_slot = len(self.lengths) / (self.costs.lanes * slots)
        sizes = (1, 2, 4) if per_slot >= 2 else (2, 1, 4) if per_slot >= 0.7 else (4, 2, 8)
        if self.limits.pack_tokens * slots < 2 * self.tokens:
            return [1]  # larger groups would hold even less a lane
        count = 2 if self.effort.attempts <= 3 else 3
        return [cp for cp in sizes if cp in self.work][:count] or [1]

    # -------------------------------------------------------------------------------------------------------------- profiles
    def _tops(self) -> list[tuple[Floats, float]]:
        """(shares of the slots, most local tokens of a microbatch of several documents): without recompute, or the ways around it."""
        plain = self._cap("none")
        free = target(self.lane)
        if free is not None and float(free.max()) * self.tokens <= plain:
            return [(free, math.inf)]
        tops: list[tuple[Floats, float]] = []
        for level in ("none", "selective", "full"):
            cap = self._cap(level)
            # Where empty microbatches cost much beside the work, few that recompute are better than many that don't.
            if cap > (plain if tops else 0) and (level != "full" or not tops or len(tops[0][0]) * self.lane.unit > MUCH):
                found = target(replace(self.lane, cap=cap / self.tokens))
                tops += [] if found is None else [(found, 1.1 * cap)]
        return tops

    def _with_peaks(self, shares: Floats, housed: float) -> Floats:
        """The profile, or one with slots for documents that need more than `housed` of its peak on every group."""
        scale = self.work[1][self.busiest] * 1e9
        for _ in range(2):
            heights = self._heights(float(shares.max()) * scale * housed)
            if not heights:
                break
            longest = self.documents[self._fastest(0)[1]].seconds[:, 0]
            tall = Tall(tuple(height / scale for height in heights), tuple((longest / longest[self.busiest]).tolist()))
            higher = target(replace(self.lane, cap=self.limits.pack_tokens / self.tokens), tall)
            if higher is None:
                break
            if housed < 1 or higher.max() <= shares.max():
                return higher
            shares = higher
        return shares

    def _cap(self, level: str) -> int:
        """Most local tokens of equal microbatches at this level on all layers (at the one that is named, if one is)."""
        level = level if self.limits.free else self.limits.choices[0].level
        return min(self.limits.pack_tokens, self.costs.local_tokens(level, self.costs.held))

    def _fastest(self, document: int) -> tuple[int, int]:
        """Nanoseconds and group size with which a document is done first; (0, 1) when it fits on no group."""
        times = [(size.seconds[document], cp) for cp, size in self.sizes.items() if size.padded[document] <= size.alone]
        return min(times, default=(0, 1))

    def _heights(self, peak: float) -> list[int]:
        """Nanoseconds of the slots that documents need which are longer than `peak` on every group, largest first."""
        heights: list[int] = []
        used = 0
        for document in range(len(self.lengths)):
            time, fastest = self._fastest(document)
            if time <= peak or len(heights) >= self.lane.most // 2:
                break
            small = [
                cp for cp, size in self.sizes.items() if heights and size.seconds[document] <= heights[-1] and size.padded[document] <= size.alone
            ]
            if small and -(-used // small[0]) * small[0] + small[0] <= self.costs.lanes:
                used = -(-used // small[0]) * small[0] + small[0]
            else:
                heights.append(time)
                used = fastest
        return heights

    def fillings(self, rooms: list[float], base: int, most: float, blocks: Sequence[Block] = (), first: int = 0) -> Iterator[Attempt]:
        """The tightest filling of these rooms (nanoseconds), if any; `first`: of the slacks."""
        sizes = self._capped(most)
        least = int(math.fsum(rooms)) // (SAND * len(rooms))
        usual = sizes[base]
        poured = (usual.nanoseconds <= least) & (usual.tokens * SAND <= 2 * usual.cap)
        coarse = max([len(poured) - int(poured.sum()), *(block.document + 1 for block in blocks)])
        for step in range(first, len(SLACKS)):
            filling = Filling([int(room * SLACKS[step]) for room in rooms], base, sizes, self._pace(base), coarse, blocks)
            if filling.place_coarse(0 if step + 1 < len(SLACKS) else len(self.lengths)):
                try:
                    cells = filling.place_rest()
                except NoRoom:
                    continue
                yield Attempt(cells, base, filling.fullest(), most, step, bool(filling.homeless))
                return

    def _pace(self, base: int) -> Pace:
        return Pace(self.speeds, round(float(self.documents[base].fixed[self.busiest]) * 1e9))


def _equal(shares: Floats, others: Floats | None) -> bool:
    return others is not None and shares.shape == others.shape and bool((shares == others).all())
