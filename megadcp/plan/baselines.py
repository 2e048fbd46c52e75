"""What a plan must beat: static-best, the best layout that treats all documents of a step alike (docs/plan.md section 5)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from megadcp.plan.baseline_layouts import Layout, middle_peaked
from megadcp.plan.basis import Basis
from megadcp.plan.cost import CostModel
from megadcp.plan.limits import everywhere, most_cp
from megadcp.plan.memory import MemoryModel
from megadcp.plan.packing import LongestFirst, PackSizes, longest_first
from megadcp.plan.step_plan import Microbatch, Recompute


@dataclass(frozen=True)
class Static:
    """A static layout of one step: every pack to at most `capacity` tokens, on `cp` lanes, recomputed alike."""

    makespan: float
    cp: int
    recompute: Recompute
    capacity: int
    microbatches: tuple[Microbatch, ...]


def static_best(basis: Basis, lengths: Sequence[int], capacity: int, choices: Sequence[Recompute] = (), max_cp: int = 0) -> Static | None:
    """The least makespan over every (P, level on all layers) and capacity c, c/2, c/4; None when none of them fits the memory.

    No capacity below the longest document is tried, except c itself: a document longer than c gets its own pack. `choices` limits
    the recompute values (empty: all levels), `max_cp` P (0: all lanes). Ties, to the nanosecond, go to the smaller cp, then capacity, then
    to the earlier choice, then to longest-first order. Candidates are tried in the order of a bound on their makespan, until the next
    one's is above the best found.
    """
    cost, memory = CostModel(basis), MemoryModel(basis)
    packings = list(_packings(lengths, capacity))
    ends = list(accumulate(len(packs) for _, packs in packings))
    packs = [slice(end - len(one), end) for end, (_, one) in zip(ends, packings, strict=True)]
    documents = [pack for _, one in packings for pack in one]
    sizes = PackSizes(documents, np.asarray(lengths, dtype=np.int64))
    layouts = []
    candidates: list[tuple[float, tuple[int, int, int]]] = []
    choices = choices or everywhere(basis)
    begins = np.array([one.start for one in packs])
    for power in range(most_cp(basis, max_cp).bit_length()):
        layout = Layout(cost, memory, 1 << power, *sizes.padded(1 << power, basis.align))
        layouts.append(layout)
        for choice, recompute in enumerate(choices):
            for packing, bound in enumerate(layout.bounds(recompute, begins)):
                candidates.append((bound, (power, packing, choice)))
    best: tuple[int, int, int, int, int] | None = None  # nanoseconds, then what decides ties
    least = 0.0
    for bound, (power, packing, choice) in sorted(candidates):
        if best is not None and round(bound * 1e9) > best[0]:
            break
        limit = float("inf") if best is None else (best[0] + 0.5) * 1e-9 / (1 - 1e-9)
        for middle, makespan in enumerate(_scores(layouts[power], packs[packing], choices[choice], limit)):
            score = round(makespan * 1e9) if makespan < float("inf") else -1, power, packing, choice, middle
            if score[0] >= 0 and (best is None or score < best):
                best, least = score, makespan
    if best is None:
        return None
    _, power, packing, choice, middle = best
    groups = layouts[power].deal(packs[packing], choices[choice])[0]
    arranged = [middle_peaked(members) for members in groups] if middle else groups
    microbatches = layouts[power].microbatches(arranged, documents, lengths, choices[choice])
    return Static(least, 1 << power, choices[choice], packings[packing][0], microbatches)


def _packings(lengths: Sequence[int], capacity: int) -> Iterator[tuple[int, list[list[int]]]]:
    """(capacity, packs) for c/4, c/2 and c, leaving out what packs like the one before."""
    order = longest_first(lengths)
    packing, before = LongestFirst(order, lengths), None
    for tokens in (capacity // 4, capacity // 2, capacity):
        if tokens < lengths[order[0]] and tokens != capacity:
            continue
        packs = packing.packs(tokens)
        if packs != before:
            yield tokens, packs
        before = packs


def _scores(layout: Layout, packs: slice, recompute: Recompute, limit: float) -> list[float]:
    """Makespan with one recompute value everywhere, for each order that the schedule makes a difference for; inf if it can't be or isn't worth it."""
    if not layout.fits_alone(packs, recompute):
        return []
    groups, most_loaded = layout.deal(packs, recompute)
    if layout.cost.basis.layout.pp > 1:
        return layout.pipelined([groups, [middle_peaked(members) for members in groups]], recompute, limit)
    return [most_loaded if layout.alike else layout.makespan(groups, recompute)]
