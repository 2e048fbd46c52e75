"""What each freedom of a plan is worth: one after the other is added to the method's own baseline, on the same documents.

Rungs, in order; each is the best that this program finds with what it allows, and may fall back to the rung before it:

bucket      docs/plan.md section 5: documents padded to powers of two, full microbatches of one size, dealt round robin to groups of one size;
            one recompute level on all layers. The size and the level are the best for this step.
batch       the same buckets, but microbatches of at most c, c/2, c/4 ... c/lanes tokens (c: the maximum length), the best for this step; one
            cp for all, which need not hold a document of c tokens if this step has none. Without it cp has nothing to choose: a full
            microbatch keeps many lanes busy.
cp          microbatches as for batch, each with its own cp. Lanes still run equally many: a round gives every lane one microbatch (the last
            round may leave lanes idle). In each round the largest groups come first, so groups are aligned.
unequal     microbatches and cp alike, each on the lanes that are free first: lanes run different numbers of them.
unpadded    the same choices, documents as long as they are: still only documents of one bucket share a microbatch.
packing     documents of any length share a microbatch: the planner, with one recompute level on all layers
            (the best of four for this step). With pipelines without the last rung: the slots of that plan in the order of their longest
            microbatch, longest first.
recompute   the planner as it is, any level on any number of layers for each microbatch; with pipelines slots as for packing.
order       pipelines only: the slots in the planner's order.

batch to unpadded are built here, by list scheduling: for each of several aims (seconds), every microbatch takes the smallest group that ends it
within the aim, else the fastest; the aim of least simulated makespan counts. A plan that exceeds the memory counts as not found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from math import inf

import numpy as np
from bench_planner import settings
from bench_regroup_plans import in_buckets
from evidence_cells import Job
from evidence_steps import Answer, Clock, digits, steps_of

from megadcp.config.check import UserError
from megadcp.config.schema import Config
from megadcp.plan.baselines import bucket, static_best
from megadcp.plan.basis import Basis
from megadcp.plan.cost import CostModel, Load
from megadcp.plan.limits import everywhere, most_cp
from megadcp.plan.memory import MemoryModel, group_sizes
from megadcp.plan.packing import pad
from megadcp.plan.planner import Planner
from megadcp.plan.simulate import run
from megadcp.plan.step_plan import LEVELS, Microbatch, Recompute

RUNGS = ("bucket", "batch", "cp", "unequal", "unpadded", "packing", "recompute", "order")
AIMS = (0.15, 0.25, 0.4, 0.6, 0.8, 1.0)  # of the mean load of a lane; and of a round's
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # rounds


def config_of(job: Job, **plan: object) -> Config:
    """The run of a job, with other settings of the planner."""
    config = settings(job.model)
    return dataclasses.replace(
        config,
        parallel=dataclasses.replace(config.parallel, tp=job.tp, pp=job.pp),
        data=dataclasses.replace(config.data, max_length=job.max_length),
        cluster=dataclasses.replace(config.cluster, nodes=1, processes=job.lanes * job.tp * job.pp),
        plan=dataclasses.replace(config.plan, **plan),  # type: ignore[arg-type]
    )


def ablation(job: Job, clock: Clock) -> Answer:
    """Makespan seconds of every rung, and of static-best; None where nothing fits."""
    return clock.milliseconds(lambda: _rungs(job))[0]  # type: ignore[no-any-return]


def _rungs(job: Job) -> Answer:
    lengths = steps_of(job, 1)[0]
    plan_for = job.planner()
    basis = plan_for.basis
    best: dict[str, float] = {"bucket": bucket(basis, lengths, job.max_length)}
    for name, how, exact in (("batch", "alike", False), ("cp", "rounds", False), ("unequal", "free", False), ("unpadded", "free", True)):
        best[name] = min([*best.values(), *(shop.best(how) for shop in _shops(basis, lengths, job.max_length, exact))])
    best["packing"] = min(best["unpadded"], _one_level(job, lengths))
    plan = plan_for(0, lengths)
    if job.pp == 1:
        best["recompute"] = min(best["packing"], plan.predicted.seconds)
    else:
        best["recompute"] = min(best["packing"], _longest_slots_first(basis, plan.microbatches))
        best["order"] = min(best["recompute"], plan.predicted.seconds)
    static = static_best(basis, lengths, job.max_length)
    best["static-best"] = inf if static is None else static.makespan
    return {"documents": len(lengths), "rungs": {name: digits(value) for name, value in best.items()}}


def _shops(basis: Basis, lengths: Sequence[int], capacity: int, exact: bool) -> Iterator[_Shop]:
    """The buckets of a step in microbatches of at most c, c/2, ... c/lanes tokens, at least one document each; exact: not padded."""
    before = None
    padded = in_buckets(lengths, capacity)[1]
    for power in range(basis.layout.lanes.bit_length()):
        packs: list[list[int]] = []
        for size in sorted(set(padded)):
            members, each = [document for document, own in enumerate(padded) if own == size], max(1, (capacity >> power) // size)
            packs += [members[first : first + each] for first in range(0, len(members), each)]
        if packs != before:
            yield _Shop(basis, packs, lengths if exact else padded)
        before = packs


def _one_level(job: Job, lengths: Sequence[int]) -> float:
    """The planner with each level on all layers; the best. With pipelines its slots in the order longest first."""
    least = inf
    for level in LEVELS:
        try:
            plan = Planner(config_of(job, recompute=level))(0, lengths)
        except UserError:
            continue
        least = min(least, plan.predicted.seconds if job.pp == 1 else _longest_slots_first(job.planner().basis, plan.microbatches))
    return least


def _longest_slots_first(basis: Basis, microbatches: Sequence[Microbatch]) -> float:
    """Makespan of the same microbatches, whole slots in another order; inf where that does not fit the memory."""
    tallest: dict[int, float] = {}
    for one in microbatches:
        tallest[one.slot] = max(tallest.get(one.slot, 0.0), one.seconds)
    places = {slot: place for place, slot in enumerate(sorted(tallest, key=lambda slot: (-tallest[slot], slot)))}
    return scored(basis, [dataclasses.replace(one, slot=places[one.slot]) for one in microbatches])


def scored(basis: Basis, microbatches: Sequence[Microbatch]) -> float:
    """Simulated makespan; inf where a stage's memory is exceeded."""
    memory, sizes = MemoryModel(basis), group_sizes(microbatches)
    if any(peak > memory.budget(stage, sizes) for stage, peak in enumerate(memory.peaks(microbatches))):
        return inf
    return run(CostModel(basis), microbatches).makespan


class _Shop:
    """Arranges given microbatches, each with its own cp."""

    def __init__(self, basis: Basis, packs: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        self.basis, self.packs, self.cost, self.memory = basis, packs, CostModel(basis), MemoryModel(basis)
        self.lanes = basis.layout.lanes
        self.sizes = [1 << power for power in range(most_cp(basis).bit_length())]
        self.padded = {cp: [pad([lengths[document] for document in pack], cp, basis.align) for pack in packs] for cp in self.sizes}

    def best(self, how: str) -> float:
        """Least makespan over levels and choices of cp. how: alike (one cp, equally many), rounds (equally many) or free."""
        least = inf
        for level in everywhere(self.basis):
            made, seconds = self._made(level)
            alone = seconds.min(axis=1)
            if not np.isfinite(alone).all():
                continue
            work = float((seconds * np.array(self.sizes)).min(axis=1).sum()) / self.lanes
            aims = [max(work, float(alone.max())) * scale for scale in ([1 / count for count in COUNTS] if how == "rounds" else AIMS)]
            chosen = {tuple(self._size(row, aim) for row in seconds) for aim in aims}
            if how == "alike":
                chosen = {(size,) * len(self.packs) for size in range(len(self.sizes)) if np.isfinite(seconds[:, size]).all()}
            for sizes in sorted(chosen):
                own = seconds[np.arange(len(sizes)), sizes]
                placed = list(self._where_free(sizes, own) if how == "free" else self._in_rounds(sizes, own))
                loads = np.zeros(self.lanes)
                for at, size, _, lane in placed:
                    loads[lane : lane + self.sizes[size]] += seconds[at, size]
                if loads.max() < least:  # no makespan is below the most loaded lane
                    arranged = [dataclasses.replace(made[at][size], slot=slot, lane=lane) for at, size, slot, lane in placed]
                    least = min(least, scored(self.basis, arranged))
        return least

    def _made(self, level: Recompute) -> tuple[list[list[Microbatch]], np.ndarray]:
        """Every pack on every size, and its seconds on its busiest stage [packs, sizes]; inf where it does not fit alone."""
        made, seconds = [], np.full((len(self.packs), len(self.sizes)), inf)
        budgets = {cp: [self.memory.budget(stage, int(cp > 1)) for stage in range(self.basis.layout.pp)] for cp in self.sizes}
        for at, pack in enumerate(self.packs):
            row = []
            for size, cp in enumerate(self.sizes):
                padded = self.padded[cp][at]
                load = Load(sum(padded), sum(length * length for length in padded), cp, "none", self.cost.in_node(0, cp))
                one = Microbatch(0, 0, cp, tuple(pack), padded, level, self.cost.best_kind(load))
                need = [self.memory.need(stage, one.tokens / cp, level) for stage in range(self.basis.layout.pp)]
                if all(own <= budget for own, budget in zip(need, budgets[cp], strict=True)):
                    seconds[at, size] = self.cost.seconds(one)
                row.append(one)
            made.append(row)
        return made, seconds

    @staticmethod
    def _size(seconds: np.ndarray, aim: float) -> int:
        """The smallest group within the aim, else the fastest."""
        within = np.flatnonzero(seconds <= aim)
        return int(within[0]) if len(within) else int(seconds.argmin())

    def _order(self, chosen: Sequence[int], seconds: np.ndarray) -> list[int]:
        return sorted(range(len(chosen)), key=lambda at: (-chosen[at], -seconds[at], at))

    def _in_rounds(self, chosen: Sequence[int], seconds: np.ndarray) -> Iterator[tuple[int, int, int, int]]:
        """(pack, size, slot, lane): every round fills all lanes, largest groups first, so that groups are aligned."""
        slot, lane = 0, 0
        for at in self._order(chosen, seconds):
            cp = self.sizes[chosen[at]]
            if lane + cp > self.lanes:
                slot, lane = slot + 1, 0
            yield at, chosen[at], slot, lane
            lane += cp

    def _where_free(self, chosen: Sequence[int], seconds: np.ndarray) -> Iterator[tuple[int, int, int, int]]:
        """(pack, size, slot, lane): each microbatch on the aligned lanes that are free first."""
        ready, slots = np.zeros(self.lanes), np.zeros(self.lanes, dtype=np.int64)
        for at in self._order(chosen, seconds):
            cp = self.sizes[chosen[at]]
            count = self.lanes // cp
            free = ready[: count * cp].reshape(count, cp).max(axis=1)
            lane = int(free.argmin()) * cp
            span = slice(lane, lane + cp)
            slot = int(slots[span].max())
            yield at, chosen[at], slot, lane
            ready[span] = free.min() + seconds[at]
            slots[span] = slot + 1
