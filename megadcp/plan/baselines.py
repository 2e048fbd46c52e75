"""What a plan must beat: static-best, the best layout that treats all documents of a step alike (docs/plan.md section 5)."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megadcp.plan.basis import Basis
from megadcp.plan.cost import CostModel, Load
from megadcp.plan.memory import MemoryModel
from megadcp.plan.packing import first_fit, longest_first, pad
from megadcp.plan.simulate import run
from megadcp.plan.step_plan import LEVELS, Microbatch, Recompute, round_bytes, round_seconds


@dataclass(frozen=True)
class Static:
    """A static layout of one step: every pack to at most `capacity` tokens, on `cp` lanes, recomputed alike."""

    makespan: float
    cp: int
    recompute: Recompute
    capacity: int
    microbatches: tuple[Microbatch, ...]


def everywhere(basis: Basis) -> tuple[Recompute, ...]:
    """Every recompute level on all layers (of the smallest stage, where stages are uneven)."""
    return tuple(Recompute(level, 0 if level == "none" else basis.recomputable) for level in LEVELS)


def static_best(basis: Basis, lengths: Sequence[int], capacity: int, choices: Sequence[Recompute] = ()) -> Static | None:
    """The least makespan over every (P, level on all layers) and capacity c, c/2, c/4; None when none of them fits the memory.

    No capacity below the longest document is tried, except c itself: a document longer than c gets its own pack. `choices` limits
    the recompute values (empty: all levels). Ties, to the nanosecond, go to the smaller cp, then capacity, then to the earlier choice.
    """
    cost, memory = CostModel(basis), MemoryModel(basis)
    packings = list(_packings(lengths, capacity))
    best: tuple[int, float, bool, _Dealer, Recompute, int] | None = None
    cp = 1
    while cp <= basis.layout.lanes:
        budgets = [memory.budget(stage, int(cp > 1)) for stage in range(basis.layout.pp)]
        for tokens, packs in packings:
            dealer = _Dealer(cost, memory, cp, packs, lengths)
            for recompute in choices or everywhere(basis):
                for makespan, middle in dealer.scores(recompute, budgets):
                    if best is None or round(makespan * 1e9) < best[0]:
                        best = round(makespan * 1e9), makespan, middle, dealer, recompute, tokens
        cp *= 2
    if best is None:
        return None
    _, makespan, middle, dealer, recompute, tokens = best
    arranged = dealer.arrange(dealer.deal(recompute)[0], recompute, middle)
    scored = tuple(replace(one, seconds=round_seconds(cost.seconds(one)), bytes=round_bytes(memory.bytes(one))) for one in arranged)
    return Static(makespan, dealer.cp, recompute, tokens, scored)


def _packings(lengths: Sequence[int], capacity: int) -> Iterator[tuple[int, list[list[int]]]]:
    """(capacity, packs) for c/4, c/2 and c, leaving out what packs like the one before."""
    order, before = longest_first(lengths), None
    for tokens in (capacity // 4, capacity // 2, capacity):
        if tokens < lengths[order[0]] and tokens != capacity:
            continue
        packs = first_fit(order, lengths, tokens)
        if packs != before:
            yield tokens, packs
        before = packs


class _Dealer:
    """Deals the packs of one packing, longest time first, to the least loaded of R div P groups (lowest index on ties)."""

    def __init__(self, cost: CostModel, memory: MemoryModel, cp: int, packs: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        self.cost, self.memory, self.cp, self.packs = cost, memory, cp, packs
        self.padded = [pad([lengths[document] for document in pack], cp, cost.basis.align) for pack in packs]
        self.most = max(map(sum, self.padded)) / cp
        self.loads, self.layers = [], []
        for one in self.padded:
            load = Load(sum(one), sum([length * length for length in one]), cp, "none", cost.in_node(0, cp))
            load = load if cp == 1 else load._replace(kind=cost.best_kind(load))
            self.loads.append(load)
            self.layers.append(cost.layer(load))
        layout = cost.basis.layout
        # All groups are alike: then a step takes what the most loaded group takes, and nothing needs simulating.
        nodes_cut_alike = layout.lanes_per_node % cp == 0 or cp % layout.lanes_per_node == 0
        self.alike = layout.pp == 1 and not cost.basis.lane_speed and nodes_cut_alike

    def scores(self, recompute: Recompute, budgets: Sequence[float]) -> Iterator[tuple[float, bool]]:
        """(makespan, middle-peaked?) with one recompute value everywhere, for each order that fits the budgets."""
        if any(self.memory.need(stage, self.most, recompute) > budget for stage, budget in enumerate(budgets)):
            return
        groups, most_loaded = self.deal(recompute)
        if self.alike:
            yield most_loaded, False
            return
        for middle in (False, True)[: 1 if self.cost.basis.layout.pp == 1 else 2]:
            microbatches = self.arrange(groups, recompute, middle)
            if all(peak <= budget for peak, budget in zip(self.memory.peaks(microbatches), budgets, strict=True)):
                yield run(self.cost, microbatches).makespan, middle

    def deal(self, recompute: Recompute) -> tuple[list[list[int]], float]:
        """Packs of each group, and the seconds of the most loaded one."""
        seconds = [
            max(self.cost.stages(layer, load.tokens / self.cp, recompute.level, recompute.layers))
            for load, layer in zip(self.loads, self.layers, strict=True)
        ]
        heap = [(0.0, group) for group in range(self.cost.basis.layout.lanes // self.cp)]
        groups: list[list[int]] = [[] for _ in heap]
        for pack in sorted(range(len(seconds)), key=lambda pack: (-round(seconds[pack] * 1e9), pack)):
            so_far, group = heap[0]
            heapq.heapreplace(heap, (so_far + seconds[pack], group))
            groups[group].append(pack)
        return groups, max(heap)[0]

    def arrange(self, groups: Sequence[Sequence[int]], recompute: Recompute, middle: bool) -> list[Microbatch]:
        """The microbatches, a group's packs in consecutive slots: longest first, or (middle) the longest in the middle."""
        return [
            Microbatch(slot, group * self.cp, self.cp, tuple(self.packs[pack]), self.padded[pack], recompute, self.loads[pack].kind)
            for group, members in enumerate(groups)
            for slot, pack in enumerate(middle_peaked(members) if middle else members)
        ]


def middle_peaked(longest_first: Sequence[int]) -> list[int]:
    """The first in the middle, the others by turns after and before it."""
    return list(longest_first[1::2][::-1]) + list(longest_first[0::2])
