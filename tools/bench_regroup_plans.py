"""The plans that are compared by tools/bench_regroup.py: what is planned, and the static ones of docs/plan.md section 5 as plans that can run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from megadcp.config.check import UserError
from megadcp.config.schema import Config
from megadcp.plan import presets
from megadcp.plan.baselines import FIRST_STEPS, SMALLEST_BUCKET, bucket, in_arrival_order, static_fixed
from megadcp.plan.basis import Basis
from megadcp.plan.cost import CostModel, Load
from megadcp.plan.limits import everywhere, most_cp
from megadcp.plan.memory import MemoryModel, group_sizes
from megadcp.plan.packing import pad
from megadcp.plan.planner import planner_for
from megadcp.plan.simulate import run
from megadcp.plan.step_plan import Microbatch, Predicted, Recompute, StepPlan, round_bytes, round_seconds
from megadcp.plan.verify import PlanError, verify

POLICIES = ("planned", "static-best", "static-fixed", "bucket")
CLOSE = 1e-9  # two sums of the same seconds in another order
Packs = Sequence[Sequence[int]]  # documents of each


def shrunk(preset: str, tokens: int, max_length: int, seed: int, shrink: int) -> list[list[int]]:
    """Lengths of the first FIRST_STEPS steps of a preset, each length divided by `shrink` (rounded up). tokens, max_length: before that."""
    steps = presets.steps(preset, tokens, max_length, seed, FIRST_STEPS)
    return [[-(-length // shrink) for length in lengths] for lengths in steps]


def arranged(basis: Basis, groups: Sequence[Packs], lengths: Sequence[int], cp: int, recompute: Recompute, kind: str = "") -> list[Microbatch]:
    """Microbatches of a static layout: groups[g] are the packs of lanes g cp .. g cp + cp - 1, in consecutive slots.

    kind: of communication; "" takes the best. lengths may be longer than the documents are: what is more is padding.
    """
    cost, memory = CostModel(basis), MemoryModel(basis)
    made = []
    for group, packs in enumerate(groups):
        for slot, documents in enumerate(packs):
            padded = pad([lengths[document] for document in documents], cp, basis.align)
            load = Load(sum(padded), sum(length * length for length in padded), cp, kind or "none", cost.in_node(0, cp))
            one = Microbatch(slot, group * cp, cp, tuple(documents), padded, recompute, kind or cost.best_kind(load))
            made.append(dataclasses.replace(one, seconds=round_seconds(cost.seconds(one)), bytes=round_bytes(memory.bytes(one))))
    return made


def plan_of(basis: Basis, step: int, lengths: Sequence[int], microbatches: Sequence[Microbatch], policy: str) -> StepPlan:
    """A plan of these microbatches, verified. PlanError if it is not legal."""
    memory, sizes = MemoryModel(basis), group_sizes(microbatches)
    peaks = tuple(round_bytes(memory.static(stage, sizes) + peak) for stage, peak in enumerate(memory.peaks(microbatches)))
    predicted = Predicted(round_seconds(run(CostModel(basis), microbatches).makespan), peaks, policy=policy)
    plan = StepPlan(
        step, basis.layout, basis.schedule, basis.stage_layers, basis.model, basis.precision, basis.unit, basis.profile, tuple(lengths),
        tuple(microbatches), basis.lane_speed, predicted,
    )  # fmt: skip
    verify(plan)
    return plan


def dealt(packs: Packs, groups: int) -> list[list[Sequence[int]]]:
    """Packs dealt round robin."""
    return [list(packs[group::groups]) for group in range(groups)]


def in_buckets(lengths: Sequence[int], capacity: int) -> tuple[Packs, list[int]]:
    """Packs of documents of one padded length (the next power of two), shortest first; and the padded lengths."""
    padded = [max(length, min(capacity, max(SMALLEST_BUCKET, 1 << (length - 1).bit_length()))) for length in lengths]
    packs: list[list[int]] = []
    for size in sorted(set(padded)):
        members, each = [document for document, own in enumerate(padded) if own == size], max(1, capacity // size)
        packs += [members[first : first + each] for first in range(0, len(members), each)]
    return packs, padded


def _layouts(basis: Basis, step: int, lengths: Sequence[int], packs: Packs, padded: Sequence[int], policy: str) -> Iterator[StepPlan | None]:
    """The packs, dealt round robin, in every (P, level on all layers), in a fixed order; None where that does not fit."""
    for power in range(most_cp(basis).bit_length()):
        cp = 1 << power
        for recompute in everywhere(basis):
            groups = dealt(packs, basis.layout.lanes // cp)
            try:
                yield plan_of(basis, step, lengths, arranged(basis, groups, padded, cp, recompute), policy)
            except PlanError:
                yield None


def _is(plan: StepPlan | None, makespan: float) -> bool:
    """Whether a plan has this makespan, to the 6 digits that it carries."""
    return plan is not None and abs(plan.predicted.seconds - makespan) <= 1e-5 * makespan


def bucket_plan(basis: Basis, step: int, lengths: Sequence[int], capacity: int) -> StepPlan | None:
    """The plan whose makespan `baselines.bucket` gives; None where nothing fits."""
    makespan = bucket(basis, lengths, capacity)
    if makespan == math.inf:
        return None
    packs, padded = in_buckets(lengths, capacity)
    return next(plan for plan in _layouts(basis, step, lengths, packs, padded, "bucket") if _is(plan, makespan))


def static_fixed_plans(basis: Basis, steps: Sequence[Sequence[int]], capacity: int) -> list[StepPlan] | None:
    """The plans whose makespans `baselines.static_fixed` gives, of all steps; None where one doesn't fit."""
    makespans = static_fixed(basis, steps, capacity)
    if math.inf in makespans:
        return None
    tried = [_layouts(basis, step, one, in_arrival_order(one, capacity), one, "static-fixed") for step, one in enumerate(steps)]
    for plans in zip(*tried, strict=True):
        if all(_is(plan, makespan) for plan, makespan in zip(plans, makespans, strict=True)):
            return [plan for plan in plans if plan is not None]
    raise AssertionError("no (P, level) gives the makespans of static-fixed")


def contestants(config: Config, steps: Sequence[Sequence[int]], count: int) -> dict[str, list[StepPlan]]:
    """The first `count` steps by each policy. A policy with which a step doesn't fit the memory is left out.

    steps: of a run, from its first on; static-fixed is chosen by all of them. Capacity of the static packs: data.max_length.
    """
    planner = planner_for(config)
    basis, capacity = planner.basis, config.data.max_length
    found: dict[str, list[StepPlan] | None] = {"planned": [planner(step, lengths) for step, lengths in enumerate(steps[:count])]}
    static = planner_for(dataclasses.replace(config, plan=dataclasses.replace(config.plan, policy="static")))
    try:
        found["static-best"] = [static(step, lengths) for step, lengths in enumerate(steps[:count])]
    except UserError:
        found["static-best"] = None
    fixed = static_fixed_plans(basis, steps, capacity)
    found["static-fixed"] = None if fixed is None else fixed[:count]
    buckets = [bucket_plan(basis, step, lengths, capacity) for step, lengths in enumerate(steps[:count])]
    found["bucket"] = None if None in buckets else [plan for plan in buckets if plan is not None]
    for plans in found.values():
        for plan in plans or ():
            verify(plan)
    return {name: plans for name, plans in found.items() if plans is not None}


def predicted_seconds(plans: Sequence[StepPlan]) -> float:
    """Sum of the predicted makespans."""
    return math.fsum(plan.predicted.seconds for plan in plans)


def predicted_bytes(config: Config, plans: Sequence[StepPlan]) -> float:
    """The most activations of a rank in any of the steps, in any stage, by the memory model."""
    memory = MemoryModel(planner_for(config).basis)
    return max(max(memory.peaks(plan.microbatches)) for plan in plans)
