"""What static layouts cost: packs that all run on groups of one size with one recompute value, priced and scored many at once.

N packs, p stages, R lanes, P = cp, C columns (a group's microbatches in slot order). The groups of a static layout never wait for each
other, so a step takes what its slowest group takes. Numbers equal those of CostModel, MemoryModel and simulate.run.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import cached_property
from math import inf

import numpy as np
import numpy.typing as npt

from megadcp.plan import columns
from megadcp.plan.cost import BACKWARD_ATTENTION, FORWARD_SHARE, CostModel, Layer, Load
from megadcp.plan.memory import LOGIT_BYTES, MemoryModel
from megadcp.plan.packing import pad
from megadcp.plan.step_plan import Microbatch, Recompute, round_bytes, round_seconds

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

SLACK = 1 - 1e-9  # bounds that only save work are lowered by more than rounding can raise them


class Layout:
    """Packs on groups of `cp` lanes: lanes 0 .. cp - 1, cp .. 2 cp - 1 and so on; lanes left over run nothing.

    tokens, squares: float64 [N], sums over the padded documents of each pack. As everywhere, a pack's kind of communication is the best
    on the group at lane 0.
    """

    def __init__(self, cost: CostModel, memory: MemoryModel, cp: int, tokens: FloatArray, squares: FloatArray) -> None:
        self.cost, self.memory, self.cp = cost, memory, cp
        self.tokens, self.squares, self.local = tokens, squares, tokens / cp
        self.kinds = cost.legal_kinds(cp)
        self.first_inside = cost.in_node(0, cp)
        self.budgets = [memory.budget(stage, int(cp > 1)) for stage in range(memory.last + 1)]
        self._layers: dict[bool, Layer] = {}
        self._seconds: dict[tuple[Recompute, bool], FloatArray] = {}
        self.kind, self._layers[self.first_inside] = self._best_kinds()
        layout = cost.basis.layout
        self.count = layout.lanes // cp
        nodes_cut_alike = layout.lanes_per_node % cp == 0 or cp % layout.lanes_per_node == 0
        self.alike = not cost.basis.lane_speed and nodes_cut_alike  # all groups are: where a pack runs makes no difference

    # ---------------------------------------------------------------------------------------------------------------- prices
    def _priced(self, kind: str, inside: bool) -> Layer:
        return self.cost.layer(Load(self.tokens, self.squares, self.cp, kind, inside))

    def _best_kinds(self) -> tuple[IntArray, Layer]:
        """CostModel.best_kind of every pack (an index into `kinds`), and the layer times that go with it."""
        layers = [self._priced(kind, self.first_inside) for kind in self.kinds]
        best = np.zeros(self.tokens.shape, dtype=np.int64)
        if len(layers) == 1:
            return best, layers[0]
        least = np.rint(((1 + BACKWARD_ATTENTION) * layers[0].attention + layers[0].exposed) * 1e9)
        attention, exposed = layers[0].attention, layers[0].exposed
        for index, layer in enumerate(layers[1:], 1):
            time = np.rint(((1 + BACKWARD_ATTENTION) * layer.attention + layer.exposed) * 1e9)
            better = time < least
            if better.any():
                least = np.where(better, time, least)
                best[better] = index
                attention, exposed = np.where(better, layer.attention, attention), np.where(better, layer.exposed, exposed)
        return best, layers[0]._replace(attention=attention, exposed=exposed)

    def _layer(self, inside: bool) -> Layer:
        if inside not in self._layers:
            layer = self._priced(self.kinds[0], inside)
            for index, kind in enumerate(self.kinds[1:], 1):
                other, chosen = self._priced(kind, inside), self.kind == index
                attention, exposed = np.where(chosen, other.attention, layer.attention), np.where(chosen, other.exposed, layer.exposed)
                layer = layer._replace(attention=attention, exposed=exposed)
            self._layers[inside] = layer
        return self._layers[inside]

    def stages(self, recompute: Recompute, inside: bool | None = None) -> FloatArray:
        """Seconds on every stage, forward + backward, at lane speed 1: [p, N]. inside: the group lies in one node (as that at lane 0)."""
        inside = self.first_inside if inside is None else inside
        key = recompute, inside
        if key not in self._seconds:
            self._seconds[key] = np.array(self.cost.stages(self._layer(inside), self.local, recompute.level, recompute.layers))
        return self._seconds[key]

    @cached_property
    def insides(self) -> list[bool]:
        """Of each group, whether it lies in one node."""
        return [self.cost.in_node(group * self.cp, self.cp) for group in range(self.count)]

    @cached_property
    def speeds(self) -> list[float]:
        """Of each group, the speed of its slowest lane."""
        return [self.cost.basis.speed(group * self.cp, self.cp) for group in range(self.count)]

    # ---------------------------------------------------------------------------------------------------------------- bounds
    def bounds(self, recompute: Recompute, begins: IntArray) -> list[float]:
        """For each packing (its packs begin at begins[k] and end where the next ones do) what no way to deal them can be faster than.

        All work of a stage spread evenly, the longest way of one pack through all stages, and the wait for the first and after the last.
        """
        seconds = self.stages(recompute)
        fastest, together = 1.0, float(self.count)
        if not self.alike:
            seconds = np.minimum(self.stages(recompute, True), self.stages(recompute, False))
            fastest, together = max(self.speeds), sum(self.speeds)
        if len(seconds) == 1:
            total, most = np.add.reduceat(seconds[0], begins), np.maximum.reduceat(seconds[0], begins)
            bounds: list[float] = (np.maximum(total / together, most / fastest) * SLACK).tolist()
            return bounds
        before = np.zeros_like(seconds)
        np.cumsum(seconds[:-1], axis=0, out=before[1:])
        fill = np.minimum.reduceat(before, begins, axis=1) / (fastest * self.cost.basis.layout.virtual_stages)
        work = (np.add.reduceat(seconds, begins, axis=1) / together + fill).max(axis=0)
        through = np.maximum.reduceat(before[-1] + seconds[-1], begins) / fastest
        bounds = (np.maximum(work, through) * SLACK).tolist()
        return bounds

    def fits_alone(self, packs: slice, recompute: Recompute) -> bool:
        """Whether the largest of these packs alone fits every stage."""
        most = float(self.local[packs].max())
        return all(self.memory.need(stage, most, recompute) <= budget for stage, budget in enumerate(self.budgets))

    # --------------------------------------------------------------------------------------------------------------- dealing
    def deal(self, packs: slice, recompute: Recompute) -> tuple[list[list[int]], float]:
        """Packs of each group, and the seconds of the most loaded one: longest time first, to the least loaded (lowest index on ties)."""
        stages = self.stages(recompute)[:, packs]
        times: FloatArray = stages.max(axis=0)
        order = np.argsort(-np.rint(times * 1e9), kind="stable")
        seconds: list[float] = times[order].tolist()
        numbers: list[int] = (order + packs.start).tolist()
        groups = [[number] for number in numbers[: self.count]]
        groups += [[] for _ in range(self.count - len(groups))]
        if len(numbers) <= self.count:
            return groups, max(seconds)
        heap = [(so_far, group) for group, so_far in enumerate(seconds[: self.count])]
        heapq.heapify(heap)
        for number, more in zip(numbers[self.count :], seconds[self.count :], strict=True):
            so_far, group = heap[0]
            heapq.heapreplace(heap, (so_far + more, group))
            groups[group].append(number)
        return groups, max(heap)[0]

    def makespan(self, groups: Sequence[Sequence[int]], recompute: Recompute) -> float:
        """Seconds without pipelines: each group runs its packs one after the other. Memory is not looked at."""
        own = {inside: self.stages(recompute, inside)[0].tolist() for inside in {True, False} & set(self.insides)}
        slowest = 0.0
        for members, inside, speed in zip(groups, self.insides, self.speeds, strict=True):
            ready = 0.0
            for pack in members:
                ready += own[inside][pack] / speed
            slowest = max(slowest, ready)
        return slowest

    # ------------------------------------------------------------------------------------------------------------- pipelines
    def pipelined(self, orders: Sequence[Sequence[Sequence[int]]], recompute: Recompute, limit: float = inf) -> list[float]:
        """With pipelines: for each of several ways to order the groups' packs in consecutive slots, its makespan.

        inf where it exceeds the memory, or where a bound shows that it is not below `limit` seconds.
        """
        layout = self.cost.basis.layout
        rows = [members for groups in orders for members in groups]
        counts = np.array([len(members) for members in rows])
        slots = int(counts.max())
        slots = slots if layout.virtual_stages == 1 else -(-slots // layout.pp) * layout.pp
        packs = np.array([[*members, *[-1] * (slots - len(members))] for members in rows]).T  # [S, C]; -1: empty
        seconds = self._columns(packs, recompute, len(orders))
        bounds = self._column_bounds(seconds, counts).reshape(len(orders), self.count).max(axis=1) * SLACK
        kept = [order for order, bound in enumerate(bounds.tolist()) if bound < limit]
        if not kept:
            return [inf] * len(orders)
        if len(kept) < len(orders):
            chosen = np.concatenate([np.arange(order * self.count, (order + 1) * self.count) for order in kept])
            packs, seconds = packs[:, chosen], np.ascontiguousarray(seconds[:, :, chosen])
        results = [inf] * len(orders)
        fits = [bool(one.all()) for one in np.split(self._fits(packs, recompute), len(kept))]
        if any(fits):
            spans = columns.makespans(seconds, packs >= 0, layout.virtual_stages).reshape(len(kept), self.count).max(axis=1)
            for place, order in enumerate(kept):
                results[order] = float(spans[place]) if fits[place] else inf
        return results

    def _columns(self, packs: IntArray, recompute: Recompute, orders: int) -> FloatArray:
        """Seconds [S, p, C] of the packs in their places; 0 where a column has none."""

        def placed(inside: bool) -> FloatArray:
            stages = self.stages(recompute, inside)
            with_none = np.concatenate([stages, np.zeros((len(stages), 1))], axis=1)  # -1 takes the last
            return np.ascontiguousarray(with_none[:, packs].transpose(1, 0, 2))

        if self.alike:
            return placed(self.first_inside)
        insides, speeds = np.array(self.insides * orders), np.array(self.speeds * orders)
        seconds: FloatArray = np.where(insides, placed(True), placed(False)) / speeds
        return seconds

    def _column_bounds(self, seconds: FloatArray, counts: IntArray) -> FloatArray:
        """What no column is faster than [C]: a stage's work, what the first slot takes to reach it, and the last one to leave from it."""
        chunks = self.cost.basis.layout.virtual_stages
        first = seconds[0]
        last = seconds[np.maximum(counts - 1, 0), :, np.arange(len(counts))].T
        before = np.zeros_like(first)
        np.cumsum((first * FORWARD_SHARE + last * (1 - FORWARD_SHARE))[:-1] / chunks, axis=0, out=before[1:])
        bounds: FloatArray = np.maximum((seconds.sum(axis=0) + before).max(axis=0), seconds.sum(axis=1).max(axis=0))
        return bounds

    def _fits(self, packs: IntArray, recompute: Recompute) -> npt.NDArray[np.bool_]:
        """Which columns keep to the budgets on every stage [C], walking the action lists."""
        basis, stages = self.cost.basis, self.memory.last + 1
        local = np.append(self.local, 0.0)[packs]  # [S, C]
        each = [self.memory.stored(stage, 1.0, recompute) for stage in range(stages)]
        passing = np.stack([self._passing(stage, local, recompute.level) for stage in range(stages)], axis=1)
        if basis.layout.virtual_stages == 1:  # at most p - s in flight: often that tells without a walk
            most, more = float(local.max()), passing.max(axis=(0, 2)).tolist()
            held = [most * each[stage] * min(stages - stage, len(packs)) + more[stage] for stage in range(stages)]
            if all(bytes_ <= budget * SLACK for bytes_, budget in zip(held, self.budgets, strict=True)):
                return np.ones(packs.shape[1], dtype=np.bool_)
        stored = local[:, None, :] * np.array(each)[:, None]
        over = columns.peaks(stored, passing, basis.layout.virtual_stages) > np.array(self.budgets)[:, None]
        fits: npt.NDArray[np.bool_] = ~np.logical_or.reduce(over, axis=0)
        return fits

    def _passing(self, stage: int, local: FloatArray, level: str) -> FloatArray:
        """MemoryModel.passing of many packs at once."""
        basis = self.cost.basis
        transient: FloatArray = local * self.memory.token_bytes["none"] if level == "full" else np.zeros_like(local)
        if stage < self.memory.last:
            return transient
        logits = np.minimum(local, basis.profile.loss_chunk) * basis.model.vocab * LOGIT_BYTES / basis.layout.tp
        return transient + logits

    # --------------------------------------------------------------------------------------------------------- microbatches
    def microbatches(
        self, groups: Sequence[Sequence[int]], documents: Sequence[Sequence[int]], lengths: Sequence[int], recompute: Recompute
    ) -> tuple[Microbatch, ...]:
        """The plan's microbatches: documents[k] are those of pack k, a group's packs stand in consecutive slots."""
        align, kinds = self.cost.basis.align, self.kind.tolist()
        own = {inside: self.stages(recompute, inside).max(axis=0).tolist() for inside in {True, False} & set(self.insides)}
        each = [self.memory.stored(stage, 1.0, recompute) for stage in range(self.memory.last + 1)]
        needs = [self.local * held + self._passing(stage, self.local, recompute.level) for stage, held in enumerate(each)]
        need: list[float] = np.max(needs, axis=0).tolist()
        made = []
        for group, (members, inside) in enumerate(zip(groups, self.insides, strict=True)):
            for slot, pack in enumerate(members):
                padded = pad([lengths[document] for document in documents[pack]], self.cp, align)
                seconds, count, kind = round_seconds(own[inside][pack]), round_bytes(need[pack]), self.kinds[kinds[pack]]
                made.append(Microbatch(slot, group * self.cp, self.cp, tuple(documents[pack]), padded, recompute, kind, seconds, count))
        return tuple(made)


def middle_peaked(longest_first: Sequence[int]) -> list[int]:
    """The first in the middle, the others by turns after and before it."""
    return list(longest_first[1::2][::-1]) + list(longest_first[0::2])
