"""What a plan must beat (docs/plan.md section 5): static-best, static-fixed, bucket; megatron-core's scheduler is in baseline_megatron.py.

static-any, static-best with more sizes of packs, is what pipelined plans of few documents must beat, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import fsum, inf

import numpy as np

from megadcp.plan.baseline_layouts import Layout, middle_peaked
from megadcp.plan.baseline_megatron import megatron_balanced, scheduler
from megadcp.plan.basis import Basis
from megadcp.plan.cost import CostModel
from megadcp.plan.limits import everywhere, most_cp
from megadcp.plan.memory import MemoryModel
from megadcp.plan.packing import LongestFirst, PackSizes, longest_first
from megadcp.plan.step_plan import Microbatch, Recompute

FIRST_STEPS = 8  # of a run: static-fixed is chosen by them
SMALLEST_BUCKET = 64  # tokens
BEST_HALVINGS, ANY_HALVINGS = 2, 6  # of the largest pack: the sizes of static-best, and of static-any


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
    return _best_of(basis, lengths, list(_packings(lengths, capacity)), choices, max_cp, inf)


def static_any(
    basis: Basis, lengths: Sequence[int], capacity: int, choices: Sequence[Recompute] = (), max_cp: int = 0, below: float = inf
) -> Static | None:
    """static_best with packs of at most c, c/2 ... c/64 tokens, longer documents in packs of their own; None unless it takes < `below` seconds.

    Where c is large beside a lane's tokens, static-best can't make enough microbatches for a pipeline; this can.
    """
    return _best_of(basis, lengths, list(_packings(lengths, capacity, ANY_HALVINGS, own_packs=True)), choices, max_cp, below)


def _best_of(
    basis: Basis, lengths: Sequence[int], packings: Sequence[tuple[int, list[list[int]]]], choices: Sequence[Recompute], max_cp: int, below: float
) -> Static | None:
    """The best of these packings (capacity, packs) with every (P, recompute value), if it takes less than `below` seconds."""
    cost, memory = CostModel(basis), MemoryModel(basis)
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
        if bound >= below or (best is not None and round(bound * 1e9) > best[0]):
            break
        limit = below if best is None else (best[0] + 0.5) * 1e-9 / (1 - 1e-9)
        for middle, makespan in enumerate(_scores(layouts[power], packs[packing], choices[choice], limit)):
            score = round(makespan * 1e9) if makespan < inf else -1, power, packing, choice, middle
            if score[0] >= 0 and (best is None or score < best):
                best, least = score, makespan
    if best is None or least >= below:
        return None
    _, power, packing, choice, middle = best
    groups = layouts[power].deal(packs[packing], choices[choice])[0]
    arranged = [middle_peaked(members) for members in groups] if middle else groups
    microbatches = layouts[power].microbatches(arranged, documents, lengths, choices[choice])
    return Static(least, 1 << power, choices[choice], packings[packing][0], microbatches)


def _packings(lengths: Sequence[int], capacity: int, halvings: int = BEST_HALVINGS, own_packs: bool = False) -> Iterator[tuple[int, list[list[int]]]]:
    """(capacity, packs) for c / 2^halvings ... c/2 and c, leaving out what packs like the one before.

    own_packs: also below the longest document, which then gets its own pack.
    """
    order = longest_first(lengths)
    packing, before = LongestFirst(order, lengths), None
    for tokens in (capacity >> halving for halving in range(halvings, -1, -1)):
        if tokens < lengths[order[0]] and tokens != capacity and not own_packs:
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


# ------------------------------------------------------------------------------------------------- the others of section 5
def compare(basis: Basis, steps: Sequence[Sequence[int]], capacity: int, max_cp: int = 0, peers: bool = True) -> dict[str, list[float]]:
    """Makespan seconds of each step under each baseline; inf where nothing fits. steps: lengths of a run's steps, from its first on.

    capacity: data.max_length. max_cp: largest group (0: all lanes). "megatron-balanced" is there when `peers`, megatron-core is installed
    and there are no pipelines, which its scheduler does not support.
    """
    found = [static_best(basis, lengths, capacity, max_cp=max_cp) for lengths in steps]
    makespans = {
        "static-best": [inf if static is None else static.makespan for static in found],
        "static-fixed": static_fixed(basis, steps, capacity, max_cp),
        "bucket": [bucket(basis, lengths, capacity, max_cp) for lengths in steps],
    }
    if peers and basis.layout.pp == 1 and scheduler() is not None:
        makespans["megatron-balanced"] = [megatron_balanced(basis, lengths, max_cp) for lengths in steps]
    return makespans


def static_fixed(basis: Basis, steps: Sequence[Sequence[int]], capacity: int, max_cp: int = 0) -> list[float]:
    """Makespan of each step with one (P, level on all layers) for the whole run; inf for a step that does not fit (or when none is legal).

    Chosen: the least mean over the first 8 steps, all of which must fit, among those with which a document of `capacity` tokens fits
    alone. Packs are filled in arrival order, each closed by the first document that does not fit, and dealt round robin (pack k to group
    k mod groups). Ties, to the nanosecond, go to the smaller P, then to the earlier level.
    """
    runs = [_Dealt(basis, in_arrival_order(lengths, capacity), lengths) for lengths in steps]
    candidates = []
    for choice in _that_hold(basis, capacity, max_cp):
        candidates.append((fsum(run.bound(*choice) for run in runs[:FIRST_STEPS]), choice))
    best: tuple[int, int] | None = None
    chosen: tuple[int, Recompute] | None = None
    for number in sorted(range(len(candidates)), key=lambda number: (candidates[number][0], number)):
        bound, choice = candidates[number]
        if best is not None and round(bound * 1e9) > best[0]:
            break
        total = fsum(run.makespan(*choice) for run in runs[:FIRST_STEPS])
        if total < inf and (best is None or (round(total * 1e9), number) < best):
            best, chosen = (round(total * 1e9), number), choice
    return [inf if chosen is None else run.makespan(*chosen) for run in runs]


def bucket(basis: Basis, lengths: Sequence[int], capacity: int, max_cp: int = 0) -> float:
    """Makespan of one step in buckets; inf when nothing fits.

    Documents, padded to the next power of two (64 .. capacity), in arrival order within their bucket; buckets ascending; max(1, capacity
    div padded) documents per microbatch; microbatch k to group k mod groups. The best (P, level on all layers) for this step, among those
    with which a document of `capacity` tokens fits alone.
    """
    padded = [max(length, min(capacity, max(SMALLEST_BUCKET, 1 << (length - 1).bit_length()))) for length in lengths]
    packs: list[list[int]] = []
    for size in sorted(set(padded)):
        members = [document for document, own in enumerate(padded) if own == size]
        each = max(1, capacity // size)
        packs += [members[first : first + each] for first in range(0, len(members), each)]
    run = _Dealt(basis, packs, padded)
    least = inf
    for bound, _, choice in sorted((run.bound(*choice), number, choice) for number, choice in enumerate(_that_hold(basis, capacity, max_cp))):
        if bound > least:
            break
        least = min(least, run.makespan(*choice))
    return least


def in_arrival_order(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Packs of documents in the order given; a document that does not fit the last pack begins the next."""
    packs: list[list[int]] = []
    room = 0
    for document, length in enumerate(lengths):
        if length > room or not packs:
            packs.append([])
            room = capacity
        packs[-1].append(document)
        room -= length
    return packs


def _that_hold(basis: Basis, length: int, max_cp: int) -> list[tuple[int, Recompute]]:
    """The (P, level on all layers) with which a document of `length` tokens alone fits the memory."""
    cost, memory = CostModel(basis), MemoryModel(basis)
    found = []
    for power in range(most_cp(basis, max_cp).bit_length()):
        tokens, squares = PackSizes([[0]], np.array([length], dtype=np.int64)).padded(1 << power, basis.align)
        layout = Layout(cost, memory, 1 << power, tokens, squares)
        found += [(1 << power, recompute) for recompute in everywhere(basis) if layout.fits_alone(slice(0, 1), recompute)]
    return found


class _Dealt:
    """Packs of one step, dealt round robin to the groups of any size, in consecutive slots."""

    def __init__(self, basis: Basis, packs: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        self.cost, self.memory = CostModel(basis), MemoryModel(basis)
        self.sizes, self.count = PackSizes(packs, np.asarray(lengths, dtype=np.int64)), len(packs)
        self._layouts: dict[int, Layout] = {}

    def _layout(self, cp: int) -> Layout:
        if cp not in self._layouts:
            self._layouts[cp] = Layout(self.cost, self.memory, cp, *self.sizes.padded(cp, self.cost.basis.align))
        return self._layouts[cp]

    def bound(self, cp: int, recompute: Recompute) -> float:
        """Seconds below which the makespan can't be."""
        return self._layout(cp).bounds(recompute, np.array([0]))[0]

    def makespan(self, cp: int, recompute: Recompute) -> float:
        """Seconds; inf where it exceeds the memory."""
        layout = self._layout(cp)
        if not layout.fits_alone(slice(0, self.count), recompute):
            return inf
        groups = [range(group, self.count, layout.count) for group in range(layout.count)]
        return layout.pipelined([groups], recompute)[0] if layout.cost.basis.layout.pp > 1 else layout.makespan(groups, recompute)
