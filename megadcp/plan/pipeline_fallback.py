"""Plans that fit when memory is short: what nothing else found room for runs alone, with enough empty slots around it.

A lane's list lets few slots go ahead of the oldest one that is still in flight. Microbatches that stand further apart than that are
never in flight together, so that a document that fits alone fits here.
"""

from __future__ import annotations

from collections.abc import Sequence

from megadcp.plan.memory import MemoryModel
from megadcp.plan.packing import pad
from megadcp.plan.pipeline_costs import PipelineCosts
from megadcp.plan.step_plan import LEVELS, Microbatch, Recompute


def one_by_one(costs: PipelineCosts, lengths: Sequence[int], documents: Sequence[int], first: int = 0) -> list[Microbatch]:
    """Every one of `documents` in its own microbatch on the least group on which it fits alone, from slot `first` on.

    Where room for the communicators of several group sizes is what is missing, all take the size that the longest needs. Empty when
    a document fits on no group.
    """
    sizes = [1 << k for k in range(costs.limits.max_cp.bit_length())]
    placed = _on(costs, lengths, documents, first, sizes, len(sizes) - 1)
    for cp in sizes:
        placed = placed or _on(costs, lengths, documents, first, [cp], int(cp > 1))
    return placed


def _on(costs: PipelineCosts, lengths: Sequence[int], documents: Sequence[int], first: int, sizes: Sequence[int], used: int) -> list[Microbatch]:
    """The same with groups of `sizes`, with memory for `used` sizes above 1; empty when a document does not fit."""
    budgets = [costs.memory.budget(stage, used) for stage in range(costs.stages)]
    chosen: dict[int, list[Microbatch]] = {}
    for document in sorted(documents, key=lambda document: (-lengths[document], document)):
        for cp in sizes:
            padded = pad([lengths[document]], cp, costs.basis.align)
            recompute = _least(costs, costs.memory, padded[0] / cp, budgets)
            if recompute is not None:
                kind = costs.kind(padded[0], float(padded[0]) ** 2, cp)
                chosen.setdefault(cp, []).append(Microbatch(0, 0, cp, (document,), padded, recompute, kind))
                break
        else:
            return []
    apart = costs.stages if costs.chunks == 1 else 3 * costs.stages
    placed, slot = [], first
    for cp in sorted(chosen, reverse=True):
        lane = 0
        for one in chosen[cp]:
            if lane + cp > costs.lanes:
                slot, lane = slot + apart, 0
            placed.append(Microbatch(slot, lane, cp, one.documents, one.padded, one.recompute, one.cp_comm))
            lane += cp
        slot += apart
    return placed


def _least(costs: PipelineCosts, memory: MemoryModel, local: float, budgets: Sequence[float]) -> Recompute | None:
    """The cheapest recompute with which a microbatch of `local` tokens fits alone (levels in order of what they cost), None if none."""
    if not costs.limits.free:
        choice = costs.limits.choices[0]
        fits = all(memory.need(stage, local, choice) <= budget for stage, budget in enumerate(budgets))
        return choice if fits else None
    for level in LEVELS:
        layers = memory.least_layers(local, level, budgets)
        if layers >= 0:
            return Recompute(level, layers)
    return None
