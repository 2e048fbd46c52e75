"""Pipelined steps (1F1B, interleaved): which documents form which microbatch, in which slot, on which lanes, with what recompute.

What decides: fill and drain of the pipeline (slots grow to a peak and shrink again: pipeline_profile.py), the fixed cost of a
microbatch, whole documents (pipeline_fill.py), memory in flight (pipeline_memory.py). Attempts (pipeline_attempts.py) differ in sizes
and number of slots, in the usual group size and in how long documents are housed. The most promising are priced and simulated
(pipeline_score.py), the best of them get better slot sizes (pipeline_reshape.py), and the least simulated makespan wins. static-best and,
where documents are few, static-any are among those that compete.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megadcp.plan.baselines import Static, static_any
from megadcp.plan.basis import Basis
from megadcp.plan.cost import CostModel
from megadcp.plan.limits import Limits
from megadcp.plan.pipeline_attempts import Attempt, Workshop
from megadcp.plan.pipeline_costs import PipelineCosts
from megadcp.plan.pipeline_fallback import one_by_one
from megadcp.plan.pipeline_fill import Block
from megadcp.plan.pipeline_reshape import reshape
from megadcp.plan.pipeline_score import Plan, Scorer
from megadcp.plan.simulate import run
from megadcp.plan.step_plan import Microbatch

FEW_DOCUMENTS = 300  # up to which static-any is tried: with more, the search was never worse, and the time counts


def search(basis: Basis, lengths: Sequence[int], limits: Limits, static: Static | None, capacity: int) -> list[Microbatch]:
    """Microbatches of the best plan found (seconds and bytes not filled in); never slower, simulated, than `static`, which is static-best.

    With few documents also never slower than static-any. capacity: tokens of the largest packs of static layouts.

    Empty only when a document fits on no group, whatever is recomputed.
    """
    found = _planned(basis, lengths, limits)
    if basis.lane_speed:  # what is planned for equal lanes is at times better on lanes that are not
        found = min([found, _rescored(basis, _planned(replace(basis, lane_speed=()), lengths, limits))], key=lambda one: one[0])
    nanoseconds, microbatches = found
    # Sums in another order than the simulator's may differ by their last bits, which a nanosecond covers.
    seconds = (nanoseconds + 1) / 1e9
    if static is not None and static.makespan <= seconds:
        microbatches, seconds = list(static.microbatches), static.makespan
    few = len(lengths) <= FEW_DOCUMENTS
    smaller_packs = static_any(basis, lengths, capacity, limits.choices, limits.max_cp, seconds) if few else None
    if smaller_packs is not None:
        return list(smaller_packs.microbatches)
    return microbatches or one_by_one(PipelineCosts(basis, limits, max(lengths)), lengths, range(len(lengths)))


def _planned(basis: Basis, lengths: Sequence[int], limits: Limits) -> tuple[float, list[Microbatch]]:
    """(nanoseconds, microbatches) of the best that attempts and reshaping find; (inf, []) when nothing fits."""
    costs = PipelineCosts(basis, limits, max(lengths))
    order = sorted(range(len(lengths)), key=lambda document: -lengths[document])
    longest_first = np.array([lengths[document] for document in order], dtype=np.int64)
    scorer = Scorer(costs, order, longest_first)
    plan = _Search(Workshop(costs, longest_first), scorer).best()
    return (math.inf, []) if plan is None else (plan.nanoseconds, scorer.microbatches(plan))


def _rescored(basis: Basis, found: tuple[float, list[Microbatch]]) -> tuple[float, list[Microbatch]]:
    microbatches = found[1]
    return (run(CostModel(basis), microbatches).makespan * 1e9, microbatches) if microbatches else found


class _Search:
    def __init__(self, workshop: Workshop, scorer: Scorer) -> None:
        self.workshop, self.scorer, self.effort = workshop, scorer, workshop.effort

    def best(self) -> Plan | None:
        """The best plan found; None when nothing fits."""
        plans = [(plan, attempt) for attempt in self.workshop.promising() if (plan := self.scorer.plan(attempt.cells)) is not None]
        if not plans:
            for attempt in self.workshop.roomy():
                plan = self.scorer.plan(attempt.cells)
                if plan is not None:
                    plans.append((plan, attempt))
                    break
        plans.sort(key=lambda one: one[0].nanoseconds)
        found = [plan for plan, _ in plans[:1]]
        found += [self._reshaped(plan, attempt) for plan, attempt in plans[: self.effort.paths]]
        return min(found, key=lambda plan: plan.nanoseconds, default=None)

    def _reshaped(self, plan: Plan, attempt: Attempt) -> Plan:
        """The plan with better slot sizes: long documents stay where they are, the others are placed anew."""
        shop = self.workshop
        best, base, step = plan, attempt.base, attempt.step
        fixed = shop.documents[base].fixed
        for _ in range(self.effort.reshapes):
            blocks, least = [], np.zeros(plan.table.slots)
            for cell in plan.cells:
                if cell.cp > base:
                    document = cell.documents[0]
                    blocks.append(Block(cell.slot, cell.lane, cell.cp, document))
                    least[cell.slot] = max(least[cell.slot], shop.sizes[cell.cp].seconds[document] / 1e9)
            slots = self.scorer.slots(plan, fixed, shop.busiest, least, np.full(plan.table.slots, np.inf))
            content, _ = reshape(slots, self.effort.rounds, shop.costs.chunks)
            again = next(shop.fillings((content * 1e9).tolist(), base, attempt.most, blocks, max(0, step - 1)), None)
            placed = None if again is None else self.scorer.plan(again.cells)
            if again is None or placed is None:
                break
            plan, step = placed, again.step
            if plan.nanoseconds < best.nanoseconds:
                best = plan
        return best
