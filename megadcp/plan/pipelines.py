"""Pipelined steps (1F1B, interleaved): which documents form which microbatch, in which slot, on which lanes, with what recompute.

What decides: fill and drain of the pipeline (slots grow to a peak and shrink again: pipeline_profile.py), the fixed cost of a
microbatch, whole documents (pipeline_fill.py), memory in flight (pipeline_memory.py). Candidates differ in the number and sizes of
slots, the usual group size and how tightly slots are filled; the simulated makespan decides between them. static-best is one of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from megadcp.plan.baselines import Static
from megadcp.plan.basis import Basis
from megadcp.plan.columns import Blocks, makespans
from megadcp.plan.limits import Limits
from megadcp.plan.packing import pad
from megadcp.plan.pipeline_costs import KIND_NAMES, Cells, Documents, Floats, Ints, PipelineCosts
from megadcp.plan.pipeline_fallback import one_by_one
from megadcp.plan.pipeline_fill import THOUSAND, Cell, Filling, NoRoom, Sizes
from megadcp.plan.pipeline_memory import choose_recompute
from megadcp.plan.pipeline_profile import targets
from megadcp.plan.step_plan import Microbatch

MOST_SLOTS = 96
SLACKS = (1.01, 1.025, 1.045, 1.08)
SAND = 20  # documents shorter than this part of a mean slot are poured


def search(basis: Basis, lengths: Sequence[int], limits: Limits, static: Static | None) -> list[Microbatch]:
    """Microbatches of the best plan found (seconds and bytes not filled in); never slower, simulated, than `static`."""
    return _Search(basis, lengths, limits, static).best()


class Plan:
    """A candidate: its cells' documents, and what was found for them."""

    def __init__(self, nanoseconds: int, cells: Sequence[Cell], table: Cells, kinds: Sequence[int], recompute: Sequence[object]) -> None:
        self.nanoseconds, self.cells, self.table, self.kinds, self.recompute = nanoseconds, cells, table, kinds, recompute


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

    def best(self) -> list[Microbatch]:
        found: Plan | None = None
        for candidate in self._candidates():
            plan = self.score(candidate)
            if plan is not None and (found is None or plan.nanoseconds < found.nanoseconds):
                found = plan
        if found is not None:
            # Sums in another order than the simulator's may differ by their last bits, which a nanosecond covers.
            if self.static is None or found.nanoseconds + 1 < round(self.static.makespan * 1e9):
                return self._microbatches(found)
        if self.static is not None:
            return list(self.static.microbatches)
        return one_by_one(self.costs, self.lengths, range(len(self.lengths)))

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
    def _candidates(self) -> Iterator[list[Cell]]:
        bases = self._bases()
        work = {base: self._work(base) for base in bases}
        first = work[bases[0]]
        busiest = max(range(len(first)), key=lambda stage: (round(first[stage] * 1e9), stage))
        sizes = self._sizes(busiest)
        for shares, most in self._profiles(self.documents[bases[0]].fixed.tolist(), first, sizes, busiest):
            for base in bases:
                rooms = [share * work[base][busiest] * 1e9 for share in shares.tolist()]
                yield from self._fillings(rooms, base, capped(sizes, most))

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

    def _fillings(self, rooms: list[float], base: int, sizes: dict[int, Sizes]) -> Iterator[list[Cell]]:
        usual = sizes[base]
        coarse = int((usual.nanoseconds > int(math.fsum(rooms)) // (SAND * len(rooms))).sum())
        for slack in SLACKS:
            filling = Filling([int(room * slack) for room in rooms], base, sizes, self.speeds, coarse)
            if filling.place_coarse(0 if slack < SLACKS[-1] else len(self.order)):
                try:
                    yield filling.place_rest()
                except NoRoom:
                    continue
                return

    # -------------------------------------------------------------------------------------------------------------- scoring
    def table(self, cells: Sequence[Cell]) -> Cells:
        """The cells' loads, padded as packing.pad pads them: every document to its multiple, the last one until the sum fits."""
        count = len(cells)
        group = np.array([cell.cp for cell in cells], dtype=np.int64)
        members = np.array([document for cell in cells for document in cell.documents], dtype=np.int64)
        number = np.repeat(np.arange(count), [len(cell.documents) for cell in cells])
        step = np.where(group > 1, 2 * group, 1)
        grain = np.array([self.costs.grain(cp) for cp in group.tolist()], dtype=np.int64)
        each = step[number]
        padded = -(-self.sorted[members] // each) * each
        sums = np.bincount(number, weights=padded, minlength=count).astype(np.int64)
        last = padded[np.cumsum([len(cell.documents) for cell in cells]) - 1]
        grow = -sums % grain
        squares = np.bincount(number, weights=padded * padded, minlength=count) + grow * (grow + 2 * last)
        slots = max(cell.slot for cell in cells) + 1
        if self.costs.chunks > 1:
            slots = -(-slots // self.costs.stages) * self.costs.stages
        return Cells(
            np.array([cell.slot for cell in cells], dtype=np.int64), np.array([cell.lane for cell in cells], dtype=np.int64),
            group, sums + grow, squares.astype(np.float64), slots,
        )  # fmt: skip

    def score(self, cells: list[Cell]) -> Plan | None:
        """The candidate with kinds, recompute and simulated makespan; None when it does not fit the memory."""
        table = self.table(cells)
        priced = self.costs.price(table)
        recompute = choose_recompute(self.costs, table, priced)
        if recompute is None:
            return None
        extra = np.array([self._extra(priced, number, one) for number, one in enumerate(recompute)])
        seconds = priced.seconds + extra
        makespan = self.simulate(table, seconds)
        return Plan(round(makespan * 1e9), cells, table, priced.kind.tolist(), recompute)

    def _extra(self, priced, number, one) -> float:
        if one.level == "none":
            return 0.0
        return float(getattr(priced, one.level)[number]) * one.layers

    def simulate(self, table: Cells, seconds: Floats) -> float:
        """Makespan of all lanes, coupled by their groups."""
        slots, lanes, stages = table.slots, self.costs.lanes, self.costs.stages
        owner = np.full((slots, lanes), len(table.cp))
        blocks: list[Blocks | None] = [None] * slots
        size = np.ones((slots, lanes), dtype=np.int64)
        for number, (slot, lane, cp) in enumerate(zip(table.slot.tolist(), table.lane.tolist(), table.cp.tolist(), strict=True)):
            owner[slot, lane : lane + cp] = number
            size[slot, lane : lane + cp] = cp
        for slot in range(slots):
            if (size[slot] > 1).any():
                starts, lane, row = [], 0, size[slot].tolist()
                while lane < lanes:
                    starts.append(lane)
                    lane += row[lane]
                blocks[slot] = Blocks(np.array(starts), size[slot][starts])
        times = np.concatenate([seconds, np.zeros((stages, 1))], axis=1)[:, owner].transpose(1, 0, 2)
        if self.basis.lane_speed:
            speed = np.array([self.basis.speed(lane, cp) for lane, cp in zip(table.lane.tolist(), table.cp.tolist(), strict=True)] + [1.0])
            times = times / speed[owner][:, None, :]
        return float(makespans(times, owner < len(table.cp), self.costs.chunks, blocks).max())

    def _microbatches(self, plan: Plan) -> list[Microbatch]:
        found = []
        for number, cell in enumerate(plan.cells):
            documents = tuple(self.order[document] for document in cell.documents)
            padded = pad([self.lengths[document] for document in documents], cell.cp, self.basis.align)
            kind = KIND_NAMES[plan.kinds[number]]
            found.append(Microbatch(cell.slot, cell.lane, cell.cp, documents, padded, plan.recompute[number], kind))
        return sorted(found, key=lambda one: (one.slot, one.lane))
