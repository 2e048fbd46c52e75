"""Action lists: what each stage does in which order (docs/plan.md section 6). S slots, p stages, v chunks.

One dense list per stage for all slots. A lane's own list is the dense list with the actions of its absent slots deleted and nothing
moved: making each lane its own compact list deadlocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from megadcp.plan.basis import Basis
from megadcp.plan.step_plan import Microbatch

FORWARD, BACKWARD = "F", "B"


class Action(NamedTuple):
    """One forward or backward of one model chunk of one microbatch."""

    kind: str
    slot: int
    chunk: int


class Deadlock(ValueError):
    """Action lists that wait for each other in a circle."""


def slot_count(basis: Basis, microbatches: Sequence[Microbatch]) -> int:
    """S: one more than the highest slot; with chunks rounded up to a multiple of the stages (the added slots are empty)."""
    slots = max((one.slot for one in microbatches), default=-1) + 1
    stages = basis.layout.pp if basis.layout.virtual_stages > 1 else 1
    return -(-slots // stages) * stages


def used_slots(microbatches: Sequence[Microbatch]) -> tuple[int, ...]:
    """The slots that hold a microbatch, in order."""
    return tuple(sorted({one.slot for one in microbatches}))


def lane_slots(basis: Basis, microbatches: Sequence[Microbatch]) -> list[dict[int, Microbatch]]:
    """For each lane, its microbatch at each slot that is not empty."""
    own: list[dict[int, Microbatch]] = [{} for _ in range(basis.layout.lanes)]
    for one in microbatches:
        for lane in range(one.lane, one.lane + one.cp):
            own[lane][one.slot] = one
    return own


def lane_actions(actions: Sequence[Action], slots: Mapping[int, object]) -> list[Action]:
    """A lane's own list: the dense one without the slots it takes no part in."""
    return [action for action in actions if action.slot in slots]


def warm_up(slots: int, stages: int, chunks: int, stage: int) -> int:
    """Forwards before the first backward. Depends on S, p, v and the stage only."""
    if chunks == 1:
        return min(stages - 1 - stage, slots)
    return min(slots * chunks, 2 * (stages - 1 - stage) + (chunks - 1) * stages)


def stage_actions(slots: int, stages: int, chunks: int, stage: int, used: Sequence[int] | None = None) -> tuple[Action, ...]:
    """The dense list of one stage: 1F1B, interleaved with chunks > 1 (then S must be a multiple of p).

    `used`: the slots whose actions are wanted (None: all); the others are left out, and nothing else is moved.
    """
    if chunks > 1 and slots % stages:
        raise ValueError(f"interleaved lists need a multiple of {stages} slots, found {slots}")
    total, warm = slots * chunks, warm_up(slots, stages, chunks, stage)
    placed = []
    for slot in range(slots) if used is None else used:
        for chunk in range(chunks):
            # The k-th forward and the k-th backward. After the warm-up they alternate; when no forward is left, backwards follow each other.
            k = slot if chunks == 1 else slot // stages * stages * chunks + chunk * stages + slot % stages
            placed.append((k if k < warm else 2 * k - warm, Action(FORWARD, slot, chunk)))
            placed.append((warm + 2 * k + 1 if k < total - warm else total + k, Action(BACKWARD, slot, chunks - 1 - chunk)))
    return tuple([action for _, action in sorted(placed)])


@lru_cache(maxsize=64)
def used_actions(used: tuple[int, ...], slots: int, stages: int, chunks: int) -> tuple[tuple[Action, ...], ...]:
    """The dense lists of all stages without the slots that nobody uses: what there is to do does not grow with the holes."""
    return tuple(stage_actions(slots, stages, chunks, stage, used) for stage in range(stages))


@lru_cache(maxsize=64)
def dense_actions(slots: int, stages: int, chunks: int) -> tuple[tuple[Action, ...], ...]:
    """The dense lists of all stages."""
    return tuple(stage_actions(slots, stages, chunks, stage) for stage in range(stages))


def waits_for(action: Action, stage: int, stages: int, chunks: int) -> tuple[int, Action] | None:
    """(stage, action) whose result an action needs; None for the first forward."""
    kind, slot, chunk = action
    if kind == FORWARD:
        if stage > 0:
            return stage - 1, action
        return (stages - 1, Action(FORWARD, slot, chunk - 1)) if chunk > 0 else None
    if stage < stages - 1:
        return stage + 1, action
    if chunk < chunks - 1:
        return 0, Action(BACKWARD, slot, chunk + 1)
    return stage, Action(FORWARD, slot, chunk)


def topological_order(lists: Sequence[Sequence[Action]], chunks: int) -> list[tuple[int, Action]]:
    """(stage, action) of all lists in an order in which every action follows what it waits for. Raises Deadlock if there is none."""
    stages = len(lists)
    done: set[tuple[int, Action]] = set()
    order: list[tuple[int, Action]] = []
    position = [0] * stages
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(lists):
            while position[stage] < len(actions):
                action = actions[position[stage]]
                needed = waits_for(action, stage, stages, chunks)
                if needed is not None and needed not in done:
                    break
                done.add((stage, action))
                order.append((stage, action))
                position[stage] += 1
                moved = True
    for stage, actions in enumerate(lists):
        if position[stage] < len(actions):
            raise Deadlock(f"stage {stage} waits for ever before {actions[position[stage]]}")
    return order


@lru_cache(maxsize=64)
def dense_order(slots: int, stages: int, chunks: int) -> tuple[tuple[int, Action], ...]:
    """A topological order of the dense lists: one for all plans with this S, p and v."""
    return tuple(topological_order(dense_actions(slots, stages, chunks), chunks))


@lru_cache(maxsize=64)
def used_order(used: tuple[int, ...], slots: int, stages: int, chunks: int) -> tuple[tuple[int, Action], ...]:
    """A topological order of used_actions. Raises Deadlock if there is none."""
    return tuple(topological_order(used_actions(used, slots, stages, chunks), chunks))
