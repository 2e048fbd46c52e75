"""Pipelined steps (1F1B, interleaved): which documents form which microbatch, in which slot, on which lanes, with what recompute.

What decides: fill and drain of the pipeline (slots grow to a peak and shrink again: pipeline_profile.py), the fixed cost of a
microbatch, whole documents (pipeline_fill.py), memory in flight (pipeline_memory.py). Attempts differ in sizes and number of slots, in
the usual group size and in how long documents are housed. The most promising are priced and simulated (pipeline_score.py), the best of
them get better slot sizes (pipeline_reshape.py), and the least simulated makespan wins. static-best is one of those that compete.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from megadcp.plan.baselines import Static
from megadcp.plan.basis import Basis
from megadcp.plan.columns import makespans
from megadcp.plan.limits import Limits
from megadcp.plan.pipeline_costs import Documents, Floats, PipelineCosts
from megadcp.plan.pipeline_fallback import one_by_one
from megadcp.plan.pipeline_fill import THOUSAND, Block, Cell, Filling, NoRoom, Pace, Sizes
from megadcp.plan.pipeline_profile import Lane, Tall, target
from megadcp.plan.pipeline_reshape import reshape
from megadcp.plan.pipeline_score import Plan, Scorer
from megadcp.plan.step_plan import Microbatch

LEAST_MOST_SLOTS, MOST_SLOTS = 96, 1024  # slots of a plan: so many may be tried, more where memory holds little
SLACKS = (1.01, 1.025, 1.045, 1.08)  # slots are filled up to so much more than their room, as little as works
MOST_BASE = 8  # largest usual group size
MUCH = 0.3
SAND = 20  # documents shorter than this part of a mean slot are poured
HOUSED = (1.02, 0.5, 0.3)  # a document that needs more than this part of the peak on every group has a slot made for it


class Effort(NamedTuple):
    """How much is tried: attempts filled, attempts priced, plans reshaped, how often each, with how many improvements."""

    attempts: int
    exact: int
    paths: int
    reshapes: int
    rounds: int


def effort_of(documents: int) -> Effort:
    """Many small steps are cheap, and large ones have time: a fixed budget for each number of documents."""
    if documents <= 300:
        return Effort(9, 4, 2, 4, 6)
    if documents <= 700:
        return Effort(6, 3, 1, 3, 6)
    if documents <= 1500:
        return Effort(3, 2, 1, 2, 5)
    return Effort(5, 3, 1, 3, 8)


def search(basis: Basis, lengths: Sequence[int], limits: Limits, static: Static | None) -> list[Microbatch]:
    """Microbatches of the best plan found (seconds and bytes not filled in); never slower, simulated, than `static`.

    Empty only when a document fits on no group, whatever is recomputed.
    """
    return _Search(basis, lengths, limits, static).best()


class Attempt(NamedTuple):
    """A filling, and what its slots will take: nanoseconds of content of the fullest microbatch of each."""

    cells: list[Cell]
    base: int
    slots: list[int]
    most: float  # local tokens of a microbatch of several documents
    step: int  # of SLACKS


class _Search:
    def __init__(self, basis: Basis, lengths: Sequence[int], limits: Limits, static: Static | None) -> None:
        self.basis, self.lengths, self.limits, self.static = basis, lengths, limits, static
        self.costs = PipelineCosts(basis, limits, max(lengths))
        self.order = sorted(range(len(lengths)), key=lambda document: -lengths[document])
        self.sorted = np.array([lengths[document] for document in self.order], dtype=np.int64)
        self.groups = self.costs.groups
        self.tokens = int(self.sorted.sum()) / basis.layout.lanes  # of an average lane
        self.documents: dict[int, Documents] = {cp: self.costs.documents(self.sorted, cp, max(1.0, self.tokens * cp / 12)) for cp in self.groups}
        speeds = basis.lane_speed or (1.0,) * basis.layout.lanes
        mean = math.fsum(speeds) / len(speeds)
        self.speeds = [max(1, round(speed / mean * THOUSAND)) for speed in speeds]
        self.scorer = Scorer(self.costs, self.order, self.sorted)
        self.effort = effort_of(len(lengths))
        self.work = {cp: self._work(cp) for cp in self.groups if cp <= MOST_BASE}
        self.busiest = max(range(basis.layout.pp), key=lambda stage: (round(self.work[1][stage] * 1e9), stage))
        self.sizes = self._sizes()
        full = max(1, min(self.sizes[cp].cap // cp for cp in self.groups))
        most = min(MOST_SLOTS, max(LEAST_MOST_SLOTS, math.ceil(1.4 * self.tokens / full) + basis.layout.pp))
        self.lane = Lane(tuple(self.documents[1].fixed.tolist()), tuple(self.work[1]), self.costs.chunks, most)

    def best(self) -> list[Microbatch]:
        """The search itself."""
        plans = [(plan, attempt) for attempt in self._promising() if (plan := self.scorer.plan(attempt.cells)) is not None]
        if not plans:
            plans = [(plan, attempt) for attempt in self._roomy() if (plan := self.scorer.plan(attempt.cells)) is not None][:1]
        plans.sort(key=lambda one: one[0].nanoseconds)
        found = [plan for plan, _ in plans[:1]]
        found += [self._reshaped(plan, attempt) for plan, attempt in plans[: self.effort.paths]]
        if found:
            plan = min(found, key=lambda plan: plan.nanoseconds)
            # Sums in another order than the simulator's may differ by their last bits, which a nanosecond covers.
            if self.static is None or plan.nanoseconds + 1 < round(self.static.makespan * 1e9):
                return self.scorer.microbatches(plan)
        if self.static is not None:
            return list(self.static.microbatches)
        return one_by_one(self.costs, self.lengths, range(len(self.lengths)))

    # ------------------------------------------------------------------------------------------------------------- documents
    def _work(self, base: int) -> list[float]:
        """Seconds of content of an average lane on each stage, with groups of this size."""
        return [math.fsum(stage.tolist()) / self.basis.layout.lanes * base for stage in self.documents[base].seconds]

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
    def _promising(self) -> list[Attempt]:
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
        left = self.effort.attempts
        profiles: list[tuple[Floats, float]] = []
        for shares, most in self._profiles():
            if any(shares.shape == other.shape and bool((shares == other).all()) for other, _ in profiles):
                continue
            profiles.append((shares, most))
            for base in self._bases(len(shares)):
                if left <= 0:
                    return
                left -= 1
                rooms = [share * self.work[base][self.busiest] * 1e9 for share in shares.tolist()]
                yield from self._fillings(rooms, base, most)

    def _roomy(self) -> Iterator[Attempt]:
        """Ever more equal slots, for what fits no other way: packs that may hold little, or little memory."""
        full = min(self.sizes[cp].cap // cp for cp in self.groups)
        slots = max(self.basis.layout.pp, math.ceil(self.tokens / max(1, full)))
        tallest = max(self._fastest(0)[0], 1)
        while slots <= MOST_SLOTS:
            room = max(self.work[1][self.busiest] * 1e9 / slots, float(tallest))
            yield from self._fillings([room] * slots, 1, math.inf)
            slots += max(2, slots // 3)

    def _bases(self, slots: int) -> list[int]:
        """Usual group sizes to try: the fewer documents there are for a lane's slots, the larger."""
        per_slot = len(self.order) / (self.basis.layout.lanes * slots)
        sizes = (1, 2, 4) if per_slot >= 2 else (2, 1, 4) if per_slot >= 0.7 else (4, 2, 8)
        if self.limits.pack_tokens * slots < 2 * self.tokens:
            return [1]  # larger groups would hold even less a lane
        count = 2 if self.effort.attempts <= 3 else 3
        return [cp for cp in sizes if cp in self.work][:count] or [1]

    def _profiles(self) -> Iterator[tuple[Floats, float]]:
        """(shares of the slots, most local tokens of a microbatch of several documents)."""
        plain = self._cap("none")
        tops = [(target(self.lane), math.inf)]
        if tops[0][0] is None or float(tops[0][0].max()) * self.tokens > plain:
            tops = [(target(replace(self.lane, cap=plain / self.tokens)), 1.1 * plain)] if plain else []
            selective, full = self._cap("selective"), self._cap("full")
            if selective > plain:
                tops.append((target(replace(self.lane, cap=selective / self.tokens)), 1.1 * selective))
            # Where empty microbatches cost much beside the work, few that recompute are better than many that don't.
            if full > selective and (tops[0][0] is None or len(tops[0][0]) * self.lane.unit > MUCH):
                tops.append((target(replace(self.lane, cap=full / self.tokens)), 1.1 * full))
        for housed in HOUSED:
            for shares, most in tops:
                if shares is not None:
                    yield self._with_peaks(shares, housed), most

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
        for document in range(len(self.order)):
            time, fastest = self._fastest(document)
            if time <= peak or len(heights) >= self.lane.most // 2:
                break
            small = [
                cp for cp, size in self.sizes.items() if heights and size.seconds[document] <= heights[-1] and size.padded[document] <= size.alone
            ]
            if small and -(-used // small[0]) * small[0] + small[0] <= self.basis.layout.lanes:
                used = -(-used // small[0]) * small[0] + small[0]
            else:
                heights.append(time)
                used = fastest
        return heights

    def _fillings(self, rooms: list[float], base: int, most: float, blocks: Sequence[Block] = (), first: int = 0) -> Iterator[Attempt]:
        """The tightest filling of these rooms (nanoseconds), if any; `first`: of the slacks."""
        sizes = self._capped(most)
        least = int(math.fsum(rooms)) // (SAND * len(rooms))
        usual = sizes[base]
        poured = (usual.nanoseconds <= least) & (usual.tokens * SAND <= 2 * usual.cap)
        coarse = max([len(poured) - int(poured.sum()), *(block.document + 1 for block in blocks)])
        for step in range(first, len(SLACKS)):
            filling = Filling([int(room * SLACKS[step]) for room in rooms], base, sizes, self._pace(base), coarse, blocks)
            if filling.place_coarse(0 if step + 1 < len(SLACKS) else len(self.order)):
                try:
                    cells = filling.place_rest()
                except NoRoom:
                    continue
                yield Attempt(cells, base, filling.fullest(), most, step)
                return

    def _pace(self, base: int) -> Pace:
        return Pace(self.speeds, round(float(self.documents[base].fixed[self.busiest]) * 1e9))

    # ------------------------------------------------------------------------------------------------------------- reshaping
    def _reshaped(self, plan: Plan, attempt: Attempt) -> Plan:
        """The plan with better slot sizes: long documents stay where they are, the others are placed anew."""
        best, base, step = plan, attempt.base, attempt.step
        fixed = self.documents[base].fixed
        for _ in range(self.effort.reshapes):
            blocks, least = [], np.zeros(plan.table.slots)
            for cell in plan.cells:
                if cell.cp > base:
                    document = cell.documents[0]
                    blocks.append(Block(cell.slot, cell.lane, cell.cp, document))
                    least[cell.slot] = max(least[cell.slot], self.sizes[cell.cp].seconds[document] / 1e9)
            slots = self.scorer.slots(plan, fixed, self.busiest, least, np.full(plan.table.slots, np.inf))
            content, _ = reshape(slots, self.effort.rounds, self.costs.chunks)
            again = next(self._fillings((content * 1e9).tolist(), base, attempt.most, blocks, max(0, step - 1)), None)
            placed = None if again is None else self.scorer.plan(again.cells)
            if again is None or placed is None:
                break
            plan, step = placed, again.step
            if plan.nanoseconds < best.nanoseconds:
                best = plan
        return best
