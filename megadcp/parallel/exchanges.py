"""When a pipeline stage passes messages on: its actions and its exchanges in one list, the same on every rank and for any action lists.

The dense lists of all stages are rehearsed once with equal microbatches. A message belongs to the moment at which its action ends there; all
messages of a rank at one moment are one exchange, posted at once. So there is a total order of moments in which every rank does all it does,
and the earliest thing that is not done yet can always be done: no deadlock, whatever the real durations are, also where messages are matched
by their order alone. Leaving out the slots that a lane takes no part in leaves out things, and moves none.

In-order batches cost, over messages of their own, under 1% on average with 1F1B (2.5% at worst) and up to 9% with interleaved lists
(simulated, unequal microbatches, 4 and 8 stages), and nothing where messages of different neighbours don't wait for each other (gloo).

Legend: S slots, p stages, v chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from megadcp.plan.actions import FORWARD, Action, topological_order, used_actions, waits_for

UNITS = {True: 5, False: 11}  # forward and backward in the rehearsal, as 1 : 2.2 (docs/plan.md section 3)


class Message(NamedTuple):
    """The result of the sender's action `made`, that the receiver's action `wanted` waits for; `stage`: of the other end."""

    stage: int
    made: Action
    wanted: Action


class Exchange(NamedTuple):
    """Messages that one rank posts at once. Several for one stage are in the same order at both ends."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


Item = Action | Exchange


def lane_programme(programme: Sequence[Item], slots: Mapping[int, object]) -> list[Item]:
    """What a lane does of it: all that belongs to its own slots, in the same order."""
    own: list[Item] = []
    for item in programme:
        if isinstance(item, Action):
            if item.slot in slots:
                own.append(item)
            continue
        sends, receives = (tuple([one for one in part if one.made.slot in slots]) for part in item)
        if sends or receives:
            own.append(Exchange(sends, receives))
    return own


@lru_cache(maxsize=64)
def programmes(used: tuple[int, ...], slots: int, stages: int, chunks: int) -> tuple[tuple[Item, ...], ...]:
    """Actions and exchanges of every stage for the slots in use, of S = `slots` (docs/plan.md section 6). Raises Deadlock if the lists have one."""
    return with_exchanges(used_actions(used, slots, stages, chunks), chunks)


def with_exchanges(lists: Sequence[Sequence[Action]], chunks: int) -> tuple[tuple[Item, ...], ...]:
    """The lists of all stages with their exchanges put in between. Raises Deadlock if they wait for each other in a circle."""
    stages = len(lists)
    free = [0] * stages
    ends: dict[tuple[int, Action], int] = {}
    # (moment, 1, 0) of an action is its start; (moment, 0, ..) of a message is the end of what made it: it comes before what starts then.
    placed: list[list[tuple[tuple[int, int], Action]]] = [[] for _ in range(stages)]
    sends: list[dict[int, list[Message]]] = [{} for _ in range(stages)]
    receives: list[dict[int, list[Message]]] = [{} for _ in range(stages)]
    for stage, action in topological_order(lists, chunks):
        start, needed = free[stage], waits_for(action, stage, stages, chunks)
        if needed is not None:
            source, made = needed
            moment = ends[needed]
            start = max(start, moment)
            if source != stage:
                sends[source].setdefault(moment, []).append(Message(stage, made, action))
                receives[stage].setdefault(moment, []).append(Message(source, made, action))
        placed[stage].append(((start, 1), action))
        free[stage] = ends[stage, action] = start + UNITS[action.kind == FORWARD]
    return tuple(_merge(placed[stage], sends[stage], receives[stage]) for stage in range(stages))


def _merge(placed: list[tuple[tuple[int, int], Action]], sends: dict[int, list[Message]], receives: dict[int, list[Message]]) -> tuple[Item, ...]:
    items: list[tuple[tuple[int, int], Item]] = [*placed]
    for moment in sends.keys() | receives.keys():
        both = [tuple(sorted(part.get(moment, ()), key=lambda one: (one.stage, one.made))) for part in (sends, receives)]
        items.append(((moment, 0), Exchange(*both)))
    return tuple(item for _, item in sorted(items, key=lambda pair: pair[0]))


def forwards(programme: Sequence[Item]) -> list[Item]:
    """A programme without its backwards: what an evaluation runs."""
    kept: list[Item] = []
    for item in programme:
        if isinstance(item, Action):
            if item.kind == FORWARD:
                kept.append(item)
            continue
        sends, receives = (tuple([one for one in part if one.wanted.kind == FORWARD]) for part in item)
        if sends or receives:
            kept.append(Exchange(sends, receives))
    return kept
