"""Pipelined steps (1F1B, interleaved): which documents form which microbatch, in which slot, on which lanes, with what recompute.

What decides: fill and drain of the pipeline (slots grow to a peak and shrink again: pipeline_profile.py), the fixed cost of a
microbatch, whole documents (pipeline_fill.py), memory in flight (pipeline_memory.py). Candidates differ in the number and sizes of
slots, the usual group size and how tightly slots are filled; the simulated makespan decides between them. static-best is one of them.
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
from megadcp.plan.pipeline_fill import THOUSAND, Block, Cell, Filling, NoRoom, Sizes
from megadcp.plan.pipeline_profile import targets
from megadcp.plan.pipeline_reshape import reshape
from megadcp.plan.pipeline_score import Plan, Scorer
from megadcp.plan.step_plan import Microbatch

MOST_SLOTS = 96
SLACKS = (1.01, 1.025, 1.045, 1.08)
RESHAPES = 3
ROUNDS = 6
EXACT = 3  # attempts that are priced and simulated
SAND = 20  # documents shorter than this part of a mean slot are poured


def search(basis: Basis, lengths: Sequence[int], limits: Limits, static: Static | None) -> list[Microbatch]:
    """Microbatches of the best plan found (seconds and bytes not filled in); never slower, simulated, than `static`."""
    return _Search(basis, lengths, limits, static).best()


class Attempt(NamedTuple):
    """A filling, and what its slots will take: nanoseconds of content of the fullest microbatch of each."""

    cells: list[Cell]
    base: int
    slots: list[int]
    most: float  # local tokens of a microbatch of several documents


def distinct(found: Sequence[tuple[float, Floats]], count: int) -> list[Floats]:
    """The first profiles of `count` different numbers of slots."""
    kept: list[Floats] = []
    for _, shares in found:
        if all(len(shares) != len(other) for other in kept):
            kept.append(shares)
            if len(kept) == count:
                break
    return kept


def capped(sizes: dict[int, Sizes], most: float) -> dict[int, Sizes]:
    """The same documents, microbatches of several limited to `most` local tokens."""
    if most == math.inf:
        return sizes
    return {cp: replace(size, cap=max(1, min(size.cap, int(most * cp)))) for cp, size in sizes.items()}


class _Search:
    def __init__(self, basis: Basis, lengths: Sequence[int], limits: Limits, static: Static | None) -> None:
        self.basis, self.lengths, self.limits, self.static = basis, lengths, limits, static
        self.costs = PipelineCosts(basis, limits)
        self.order = sorted(range(len(lengths)), key=lambda document: -lengths[document])
        self.sorted = np.array([lengths[document] for document in self.order], dtype=np.int64)
        self.groups = [1 << k for k in range(limits.max_cp.bit_length())]
        self.documents = self._documents()
        speeds = basis.lane_speed or (1.0,) * basis.layout.lanes
        mean = math.fsum(speeds) / len(speeds)
        self.speeds = [max(1, round(speed / mean * THOUSAND)) for speed in speeds]
        self.scorer = Scorer(self.costs, self.order, self.sorted)
        self.work: dict[int, list[float]] = {}
        self.busiest = 0

    def best(self) -> list[Microbatch]:
        found: Plan | None = None
        for attempt in self._promising():
            plan = self.scorer.plan(attempt.cells)
            if plan is not None and (found is None or plan.nanoseconds < found.nanoseconds):
                found, chosen = plan, attempt
        if found is not None:
            found = self._reshaped(found, chosen)
        # Sums in another order than the simulator's may differ by their last bits, which a nanosecond covers.
        if found is not None and (self.static is None or found.nanoseconds + 1 < round(self.static.makespan * 1e9)):
            return self.scorer.microbatches(found)
        if self.static is not None:
            return list(self.static.microbatches)
        return one_by_one(self.costs, self.lengths, range(len(self.lengths)))

    def _reshaped(self, plan: Plan, attempt: Attempt) -> Plan:
        """The plan with better slot sizes: long documents stay where they are, the others are placed anew."""
        best, base = plan, attempt.base
        sizes = capped(self._sizes(self.busiest), attempt.most)
        fixed = self.documents[base].fixed
        for _ in range(RESHAPES):
            blocks, least = [], np.zeros(plan.table.slots)
            for number, cell in enumerate(plan.cells):
                if cell.cp > base:
                    document = cell.documents[0]
                    blocks.append(Block(cell.slot, cell.lane, cell.cp, document))
                    least[cell.slot] = max(least[cell.slot], sizes[cell.cp].seconds[document] / 1e9)
            slots = self.scorer.slots(plan, fixed, self.busiest, least, np.full(plan.table.slots, np.inf))
            content, _ = reshape(slots, ROUNDS, self.costs.chunks)
            again: Plan | None = None
            for attempt in self._fillings((content * 1e9).tolist(), base, sizes, attempt.most, blocks):
                again = self.scorer.plan(attempt.cells)
            if again is None:
                break
            plan = again
            if plan.nanoseconds < best.nanoseconds:
                best = plan
        return best

    def _promising(self) -> list[Attempt]:
        """The attempts worth an exact score: those with the least makespan of one lane that has the fullest microbatch of each slot."""
        attempts = list(self._attempts())
        if len(attempts) <= EXACT:
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
        return [attempts[number] for number in sorted(range(len(attempts)), key=lambda number: (ends[number], number))[:EXACT]]

    # ------------------------------------------------------------------------------------------------------------- documents
    def _documents(self) -> dict[int, Documents]:
        tokens = int(self.sorted.sum()) / self.basis.layout.lanes
        return {cp: self.costs.documents(self.sorted, cp, max(1.0, tokens * cp / 12)) for cp in self.groups}

    def _sizes(self, stage: int) -> dict[int, Sizes]:
        sizes = {}
        for cp, one in self.documents.items():
            nanoseconds = np.rint(one.seconds[stage] * 1e9).astype(np.int64)
            alone, several = self.costs.most_tokens(cp)
            grain = self.costs.grain(cp)
            cap = max(1, min(self.limits.pack_tokens // grain * grain, several))
            sizes[cp] = Sizes(cp, nanoseconds.tolist(), one.padded.tolist(), cap, nanoseconds, one.padded, alone)
        return sizes

    # ------------------------------------------------------------------------------------------------------------ candidates
    def _attempts(self) -> Iterator[Attempt]:
        bases = self._bases()
        self.work = {base: self._work(base) for base in bases}
        first = self.work[bases[0]]
        self.busiest = max(range(len(first)), key=lambda stage: (round(first[stage] * 1e9), stage))
        sizes = self._sizes(self.busiest)
        for shares, most in self._profiles(self.documents[bases[0]].fixed.tolist(), first, sizes, self.busiest):
            for base in bases:
                rooms = [share * self.work[base][self.busiest] * 1e9 for share in shares.tolist()]
                yield from self._fillings(rooms, base, capped(sizes, most), most)

    def _work(self, base: int) -> list[float]:
        """Seconds of content of an average lane on each stage, with groups of this size."""
        return [math.fsum(stage.tolist()) / self.basis.layout.lanes * base for stage in self.documents[base].seconds]

    def _bases(self) -> list[int]:
        return [cp for cp in (1, 2) if cp <= self.limits.max_cp]

    def _profiles(self, fixed: list[float], work: list[float], sizes: dict[int, Sizes], busiest: int) -> Iterator[tuple[Floats, float]]:
        """(shares of the slots, most local tokens of a microbatch of several documents)."""
        tokens = int(self.sorted.sum()) / self.basis.layout.lanes
        plain, selective = self._caps()
        tops = [(shares, math.inf) for shares in distinct(targets(fixed, work, math.inf, self.costs.chunks, MOST_SLOTS), 2)]
        if tops and float(tops[0][0].max()) * tokens > plain:
            tops = []
            for cap in (plain, selective):
                if cap > 0:
                    found = targets(fixed, work, cap / tokens, self.costs.chunks, MOST_SLOTS)
                    tops += [(shares, 1.1 * cap) for shares in distinct(found, 1)]
        for shares, most in tops:
            scale = work[busiest] * 1e9
            for _ in range(3):
                heights = self._heights(float(shares.max()) * scale * 1.02, sizes)
                if not heights:
                    break
                higher = targets(fixed, work, math.inf, self.costs.chunks, MOST_SLOTS, [height / scale for height in heights])
                if higher[0][1].max() <= shares.max():
                    break
                shares = higher[0][1]
            yield shares, most

    def _caps(self) -> tuple[int, int]:
        """Most local tokens of equal microbatches without recompute and with level selective (0: not allowed)."""
        if not self.limits.free:
            choice = self.limits.choices[0]
            return self.costs.local_tokens(choice.level, self.costs.held), 0
        return self.costs.local_tokens("none", self.costs.held), self.costs.local_tokens("selective", self.costs.held)

    def _heights(self, peak: float, sizes: dict[int, Sizes]) -> list[int]:
        """Nanoseconds of the slots that documents need which are longer than `peak` on every group, largest first."""
        heights: list[int] = []
        used = 0
        for document in range(len(self.order)):
            times = [(sizes[cp].seconds[document], cp) for cp in self.groups if sizes[cp].padded[document] <= sizes[cp].alone]
            if not times or min(times)[0] <= peak:
                break
            small = [cp for time, cp in times if heights and time <= heights[-1]]
            if small and -(-used // small[0]) * small[0] + small[0] <= self.basis.layout.lanes:
                used = -(-used // small[0]) * small[0] + small[0]
            else:
                time, cp = min(times)
                heights.append(time)
                used = cp
        return heights

    def _fillings(
        self, rooms: list[float], base: int, sizes: dict[int, Sizes], most: float, blocks: Sequence[Block] = ()
    ) -> Iterator[Attempt]:
        """The tightest filling of these rooms (nanoseconds), if any."""
        least = int(math.fsum(rooms)) // (SAND * len(rooms))
        coarse = max([int((sizes[base].nanoseconds > least).sum()), *(block.document + 1 for block in blocks)])
        for slack in SLACKS:
            filling = Filling([int(room * slack) for room in rooms], base, sizes, self.speeds, coarse, blocks)
            if filling.place_coarse(0 if slack < SLACKS[-1] else len(self.order)):
                try:
                    cells = filling.place_rest()
                except NoRoom:
                    continue
                yield Attempt(cells, base, filling.fullest(), most)
                return
