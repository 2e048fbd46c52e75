"""Proof that a plan is legal: the nine invariants of docs/plan.md section 2, in order; the first that fails is named."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megadcp.config.check import UserError
from megadcp.plan.actions import Action, Deadlock, lane_actions, lane_slots, slot_count, used_actions, used_order, used_slots, waits_for
from megadcp.plan.basis import UNITS, Basis
from megadcp.plan.cost import CostModel
from megadcp.plan.memory import MemoryModel, group_sizes
from megadcp.plan.step_plan import LEVELS, VERSION, Microbatch, StepPlan

INVARIANTS = {
    0: "well formed",
    1: "every document once",
    2: "aligned groups",
    3: "one microbatch per lane and slot",
    4: "padding",
    5: "memory budget",
    6: "deadlock freedom",
    7: "recompute",
    8: "predicted seconds and bytes",
    9: "legal cp_comm",
}
TOLERANCE = 1e-4  # of predicted seconds and bytes
WHOLE_BYTES = 1.0  # what rounding to whole bytes may take from a microbatch of a few kilobytes
SLACK = 1 + 1e-9  # for the last bits of a sum of bytes


class PlanError(UserError):
    """A plan breaks an invariant: its number (0: the plan makes no sense as a whole) and name."""

    def __init__(self, invariant: int, detail: str, step: int) -> None:
        self.invariant, self.name, self.detail = invariant, INVARIANTS[invariant], detail
        super().__init__(f"plan of step {step} breaks invariant {invariant} ({self.name}): {detail}")


def verify(plan: StepPlan) -> None:
    """Raise PlanError with the first invariant that the plan breaks. Takes nothing but the plan."""
    basis = Basis.of(plan)
    checks = (_well_formed, _documents, _groups, _slots, _padding, _memory, _deadlock, _recompute, _predictions, _communication)
    for invariant, check in enumerate(checks):
        with np.errstate(all="ignore"):  # coefficients near the ends of what a float holds
            detail = check(basis, plan)
        if detail:
            raise PlanError(invariant, detail, plan.step)


def _name(one: Microbatch) -> str:
    return f"the microbatch at slot {one.slot}, lane {one.lane}"


def _well_formed(basis: Basis, plan: StepPlan) -> str:
    if plan.version != VERSION:
        return f"version {plan.version}; this program knows version {VERSION}"
    if plan.step < 0:
        return f"step {plan.step} is negative"
    if not plan.lengths or min(plan.lengths) < 1:
        return "lengths must hold at least one document, none shorter than 1 token"
    return basis.problem()


def _documents(basis: Basis, plan: StepPlan) -> str:
    seen = [0] * len(plan.lengths)
    for one in plan.microbatches:
        if not one.documents:
            return f"{_name(one)} holds no document"
        for document in one.documents:
            if not 0 <= document < len(seen):
                return f"{_name(one)} holds document {document}, but the step has documents 0 to {len(seen) - 1}"
            seen[document] += 1
    for document, times in enumerate(seen):
        if times != 1:
            return f"document {document} is in {times} places"
    return ""


def _groups(basis: Basis, plan: StepPlan) -> str:
    for one in plan.microbatches:
        if one.cp < 1 or one.cp & (one.cp - 1):
            return f"cp={one.cp} of {_name(one)} is not a power of two"
        if one.lane < 0 or one.lane % one.cp or one.lane + one.cp > basis.layout.lanes:
            return f"{_name(one)} with cp={one.cp} must start at a multiple of cp and end within {basis.layout.lanes} lanes"
    return ""


def _slots(basis: Basis, plan: StepPlan) -> str:
    taken: set[tuple[int, int]] = set()
    for one in plan.microbatches:
        if one.slot < 0:
            return f"{_name(one)}: slots count from 0"
        for lane in range(one.lane, one.lane + one.cp):
            if (one.slot, lane) in taken:
                return f"lane {lane} has two microbatches at slot {one.slot}"
            taken.add((one.slot, lane))
    return ""


def _padding(basis: Basis, plan: StepPlan) -> str:
    if plan.unit != UNITS[plan.precision]:
        return f"unit={plan.unit} with precision={plan.precision}; legal here: {UNITS[plan.precision]}"
    for one in plan.microbatches:
        if len(one.padded) != len(one.documents):
            return f"{_name(one)} has {len(one.documents)} documents and {len(one.padded)} padded lengths"
        for document, padded in zip(one.documents, one.padded, strict=True):
            if padded < plan.lengths[document]:
                return f"document {document} has {plan.lengths[document]} tokens, but {padded} padded in {_name(one)}"
            if one.cp > 1 and padded % (2 * one.cp):
                return f"document {document}: {padded} padded tokens are no multiple of 2 cp = {2 * one.cp} in {_name(one)}"
        if one.tokens % (one.cp * basis.align):
            return f"{_name(one)}: {one.tokens} padded tokens over cp={one.cp} lanes are no multiple of {basis.align} each"
    return ""


def _memory(basis: Basis, plan: StepPlan) -> str:
    memory, sizes = MemoryModel(basis), group_sizes(plan.microbatches)
    # A recompute value that names no layers has no bytes: invariant 7 will say so.
    defined = [one for one in plan.microbatches if not _recompute_problem(basis, one)]
    for stage, peak in enumerate(memory.peaks(defined)):
        budget = memory.budget(stage, sizes)
        if peak > budget * SLACK:
            return f"stage {stage} needs {peak / 1e9:.4g} GB for activations and has {budget / 1e9:.4g} GB"
    return ""


def _deadlock(basis: Basis, plan: StepPlan) -> str:
    """Sort the wait-for graph.

    What waits for what in the plan's graph (a lane's next action for the one before it, an action for the result that it needs, the lanes
    of a group for each other) does so too when each action is replaced by its (stage, slot, chunk, kind): a lane's list is the dense one
    with actions left out, and a microbatch has the same lanes on every stage. So an order of the dense lists, one lane's work, is an
    order of all lanes' work, and the plan's own graph needs sorting only to say who waits when there is none.
    """
    stages, chunks = basis.layout.pp, basis.layout.virtual_stages
    if stages == 1:
        return ""  # every lane runs its slots in order, each slot at most once (invariant 3): slot order is a topological order
    used, slots = used_slots(plan.microbatches), slot_count(basis, plan.microbatches)
    try:
        used_order(used, slots, stages, chunks)
    except Deadlock as error:
        waits = _unsorted(basis, plan.microbatches, used_actions(used, slots, stages, chunks))
        return f"the dense action lists are cyclic: {error}" + (f"; {waits}" if waits else "")
    return ""


def _unsorted(basis: Basis, microbatches: Sequence[Microbatch], lists: Sequence[Sequence[Action]]) -> str:
    """What is left of the wait-for graph of all lanes and stages when nothing more can be sorted; empty when all is."""
    stages, chunks = basis.layout.pp, basis.layout.virtual_stages
    index = {id(one): number for number, one in enumerate(microbatches)}
    waiting: dict[tuple[int, int, Action], int] = {}
    followers: dict[tuple[int, int, Action], list[tuple[int, int, Action]]] = {}

    def edge(first: tuple[int, int, Action], then: tuple[int, int, Action]) -> None:
        followers.setdefault(first, []).append(then)
        waiting[then] = waiting.get(then, 0) + 1

    for own in lane_slots(basis, microbatches):
        for stage in range(stages):
            before = None
            for action in lane_actions(lists[stage], own):
                node = (index[id(own[action.slot])], stage, action)
                waiting.setdefault(node, 0)
                if before is not None:
                    edge(before, node)
                before = node
    for number, stage, action in list(waiting):
        needed = waits_for(action, stage, stages, chunks)
        if needed is not None:
            edge((number, *needed), (number, stage, action))
    free = [node for node, count in waiting.items() if count == 0]
    while free:
        node = free.pop()
        del waiting[node]
        for then in followers.get(node, ()):
            waiting[then] -= 1
            if waiting[then] == 0:
                free.append(then)
    if not waiting:
        return ""
    number, stage, action = min(waiting)
    return f"{_name(microbatches[number])} waits for ever on stage {stage} at {action}; {len(waiting)} actions never run"


def _recompute(basis: Basis, plan: StepPlan) -> str:
    return next(filter(None, (_recompute_problem(basis, one) for one in plan.microbatches)), "")


def _recompute_problem(basis: Basis, one: Microbatch) -> str:
    level, layers = one.recompute.level, one.recompute.layers
    if level not in LEVELS:
        return f"level {level!r} of {_name(one)}; legal here: {', '.join(LEVELS)}"
    if level == "none" and layers != 0:
        return f"level none with {layers} layers in {_name(one)}; legal here: 0"
    if level != "none" and not 1 <= layers <= basis.recomputable:
        return f"level {level} with {layers} layers in {_name(one)}; legal here: 1 to {basis.recomputable}, the layers of the smallest stage"
    return ""


def _predictions(basis: Basis, plan: StepPlan) -> str:
    cost, memory = CostModel(basis), MemoryModel(basis)
    # For an illegal kind the model gives no time: invariant 9 says so.
    timed = [one for one in plan.microbatches if cost.legal(one.cp_comm, one.cp)]
    if not timed:
        return ""
    for name, stated, model, slack in (
        ("seconds", [one.seconds for one in timed], cost.seconds_many(timed), 0.0),
        ("bytes", [one.bytes for one in timed], memory.bytes_many(timed), WHOLE_BYTES),
    ):
        wrong = ~((np.abs(np.array(stated, dtype=np.float64) - model) <= TOLERANCE * model + slack) & (model < math.inf))
        if wrong.any():
            index = int(wrong.argmax())
            return f"{name}={stated[index]} of {_name(timed[index])}, but the cost model says {model[index]:.6g}"
    return ""


def _communication(basis: Basis, plan: StepPlan) -> str:
    cost = CostModel(basis)
    for one in plan.microbatches:
        if not cost.legal(one.cp_comm, one.cp):
            return f"cp_comm={one.cp_comm} with cp={one.cp} in {_name(one)}; legal here: {', '.join(cost.legal_kinds(one.cp))}"
    return ""
