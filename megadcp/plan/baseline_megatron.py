"""megatron-core's BalancedCPScheduler as a baseline: groups of samples made by the real package, scored with this cost model.

That scheduler gives every sample the least power of two of ranks that keeps a rank at or below a cap of tokens (then gives samples of
a group more ranks until none is idle), one sample per microbatch, with a barrier after each group. It knows no pipelines.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Any

from megadcp.plan.basis import Basis
from megadcp.plan.cost import CostModel, Load
from megadcp.plan.limits import everywhere, most_cp
from megadcp.plan.memory import MemoryModel
from megadcp.plan.packing import pad

Groups = list[list[list[int]]]  # for each group, for each lane, the document ids that it runs

CAPS_PER_OCTAVE = 2  # caps tried between one and the next power of two of ranks for the longest document
_WHERE = "megatron.core.pipeline_parallel.hybrid_cp_schedule"


class _Lanes:
    """What the scheduler asks of a process group."""

    def __init__(self, count: int) -> None:
        self.count = count

    def size(self) -> int:
        """Ranks over which samples are spread: our lanes."""
        return self.count


def scheduler() -> Callable[[int, _Lanes], Any] | None:
    """The class from the installed package; None where it (or torch, which it imports) is missing."""
    try:
        if importlib.util.find_spec("megatron.core") is None:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about kernels that it would use in training
            found: Callable[[int, _Lanes], Any] = importlib.import_module(_WHERE).BalancedCPScheduler
    except (ImportError, AttributeError):
        return None
    return found


def balanced_groups(make: Callable[[int, _Lanes], Any], lengths: Sequence[int], cap: int, lanes: int) -> Groups | None:
    """The groups for one cap (tokens a rank); None where the scheduler fails on it."""
    try:
        return list(make(cap, _Lanes(lanes)).get_groups_and_subsamples(list(enumerate(lengths)), None)[1])
    except (AssertionError, IndexError, TypeError):
        return None  # its own checks ("empty GPUs, but not enough to expand"), and what follows where it has none


def caps(longest: int, most: int) -> Iterator[int]:
    """Caps from the longest document on one rank to on `most` ranks, falling."""
    power = 0
    while 2 ** (power / CAPS_PER_OCTAVE) <= most:
        yield -int(-longest // 2 ** (power / CAPS_PER_OCTAVE))
        power += 1


def megatron_balanced(basis: Basis, lengths: Sequence[int], max_cp: int = 0) -> float:
    """The least makespan over caps and recompute levels (the same for all samples); inf when nothing fits, or it isn't installed."""
    make = scheduler()
    if make is None or basis.layout.pp > 1:
        return inf
    least, scorer = inf, _Scorer(basis, lengths, max_cp or basis.layout.lanes)  # all lanes may share a sample, a power of two or not
    for cap in caps(max(lengths), most_cp(basis, max_cp)):
        groups = balanced_groups(make, lengths, cap, basis.layout.lanes)
        if groups is not None:
            least = min(least, scorer.makespan(groups))
    return least


class _Scorer:
    """Seconds of one step's groups. Samples alone in their microbatch, padded as everywhere, with the best cp communication."""

    def __init__(self, basis: Basis, lengths: Sequence[int], most: int) -> None:
        self.basis, self.lengths, self.most = basis, lengths, most
        self.cost, self.memory = CostModel(basis), MemoryModel(basis)
        self.levels = everywhere(basis)
        self._priced: dict[tuple[int, int, bool], tuple[int, list[float]]] = {}

    def makespan(self, groups: Groups) -> float:
        """Least seconds over the recompute levels; each group takes as long as its slowest lane. inf where a sample doesn't fit."""
        samples = [self._samples(group) for group in groups]
        every = [sample for group in samples for sample in group.items()]
        cps = {len(lanes) for _, lanes in every}
        if max(cps) > self.most:
            return inf
        budget = self.memory.budget(0, len(cps - {1}))
        local = max(self._price(document, lanes)[0] / len(lanes) for document, lanes in every)
        best = inf
        for index, level in enumerate(self.levels):
            if self.memory.need(0, local, level) > budget:
                continue
            total = 0.0
            for group in samples:
                ready = [0.0] * self.basis.layout.lanes
                for document, lanes in group.items():
                    seconds = self._price(document, lanes)[1][index] / self.basis.speed(lanes[0], len(lanes))
                    for lane in lanes:
                        ready[lane] += seconds  # lanes that share one sample share all of this group: nobody waits
                total += max(ready)
            best = min(best, total)
        return best

    def _samples(self, group: list[list[int]]) -> dict[int, list[int]]:
        """The lanes of each document."""
        lanes: dict[int, list[int]] = {}
        for lane, documents in enumerate(group):
            for document in documents:
                lanes.setdefault(document, []).append(lane)
        return lanes

    def _price(self, document: int, lanes: list[int]) -> tuple[int, list[float]]:
        """(padded tokens, seconds with each recompute level)."""
        length, cp, inside = self.lengths[document], len(lanes), self.cost.in_node(lanes[0], len(lanes))
        found = self._priced.get((length, cp, inside))
        if found is None:
            tokens = pad([length], cp, self.basis.align)[0]
            load = Load(tokens, tokens * tokens, cp, "none", inside)
            layer = self.cost.layer(load._replace(kind=self.cost.best_kind(load)))
            seconds = [self.cost.stages(layer, tokens / cp, level.level, level.layers)[0] for level in self.levels]
            found = self._priced[length, cp, inside] = tokens, seconds
        return found
