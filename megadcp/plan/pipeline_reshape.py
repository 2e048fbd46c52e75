"""Better slot sizes for a plan that is there: content moved between slots while the simulated makespan falls.

The profiles of pipeline_profile.py take all content for alike. In a plan, slots differ: long documents load all stages evenly, short
ones the last stage (LM head) more; groups pay for communication; a long document keeps its slot from being smaller. Here each slot
keeps what it has of that, and only its size changes. S slots, p stages; one lane stands for all.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megadcp.plan.actions import FORWARD, Action, dense_order, waits_for
from megadcp.plan.cost import FORWARD_SHARE
from megadcp.plan.pipeline_costs import Floats

STEPS = (0.3, 0.1, 0.03)  # of a mean slot, moved at a time
WIDTHS = (1, 2, 4, 8)  # slots that give and that take at once


class Slots(NamedTuple):
    """An average lane's slots: content in seconds on the busiest stage, what a second of it takes on each stage, limits."""

    fixed: Floats  # [p] of an empty microbatch
    content: Floats  # [S]
    ratio: Floats  # [S, p]
    least: Floats  # [S] content may not fall below
    most: Floats  # [S] nor rise above


def reshape(slots: Slots, rounds: int, chunks: int) -> tuple[Floats, int]:
    """Content [S] of the same sum after at most `rounds` improvements, and the makespan in nanoseconds."""
    content = slots.content
    best = int(_ends(slots, content[:, None], chunks)[0])
    step = 0
    count = len(content)
    for _ in range(rounds):
        amount = STEPS[step] * float(content.sum()) / count
        give = np.minimum(amount, np.maximum(0.0, content - slots.least))
        take = np.minimum(amount, np.maximum(0.0, slots.most - content))
        single = np.repeat(content[:, None], 2 * count, axis=1)
        single[np.arange(count), np.arange(count)] -= give
        single[np.arange(count), count + np.arange(count)] += take
        ends = _ends(slots, single, chunks).tolist()
        givers = sorted((slot for slot in range(count) if give[slot] > 0), key=lambda slot: (ends[slot], slot))
        takers = sorted((slot for slot in range(count) if take[slot] > 0), key=lambda slot: (ends[count + slot], slot))
        columns = []
        for wide in WIDTHS:
            for narrow in WIDTHS:
                column = _moved(content, give, take, givers[:wide], takers[:narrow])
                if column is not None:
                    columns.append(column)
        if not columns:
            break
        ends = _ends(slots, np.array(columns).T, chunks).tolist()
        chosen = min(range(len(columns)), key=lambda number: (ends[number], number))
        if ends[chosen] < best:
            best, content = ends[chosen], columns[chosen]
        elif step + 1 < len(STEPS):
            step += 1
        else:
            break
    return content, best


def _moved(content: Floats, give: Floats, take: Floats, givers: list[int], takers: list[int]) -> Floats | None:
    """Content after the givers gave what the takers have room for; None when nothing moves."""
    takers = [slot for slot in takers if slot not in givers]
    if not takers:
        return None
    given, taken = sum([float(give[slot]) for slot in givers]), sum([float(take[slot]) for slot in takers])
    total = min(given, taken)
    if total <= 0:
        return None
    column = content.copy()
    for slot in givers:
        column[slot] -= give[slot] * (total / given)
    for slot in takers:
        column[slot] += take[slot] * (total / taken)
    return column


def _ends(slots: Slots, content: Floats, chunks: int) -> npt.NDArray[np.int64]:
    """Makespans in nanoseconds of contents [S, C]; with chunks, S is filled up with slots that take no time."""
    seconds = slots.fixed[:, None] + slots.ratio[:, :, None] * content[:, None, :]
    missing = -len(content) % len(slots.fixed) if chunks > 1 else 0
    if missing:
        seconds = np.concatenate([seconds, np.zeros((missing, *seconds.shape[1:]))])
    return np.rint(one_lane(seconds, chunks) * 1e9).astype(np.int64)


class _Levels(NamedTuple):
    """A lane's actions, those of a level independent of each other: row 0 is the start, action k has row k + 1."""

    bounds: list[tuple[int, int]]  # rows of each level
    before: list[npt.NDArray[np.int64]]  # rows of the actions before them on their stages
    needed: list[npt.NDArray[np.int64]]  # rows of the actions whose results they need
    source: npt.NDArray[np.int64]  # of each action: row of its slot and stage
    share: Floats  # of each action, in forward + backward


@lru_cache(maxsize=64)
def _levels(slots: int, stages: int, chunks: int) -> _Levels:
    depth: dict[tuple[int, Action], int] = {}
    last: list[tuple[int, Action] | None] = [None] * stages
    links: dict[tuple[int, Action], tuple[tuple[int, Action] | None, tuple[int, Action] | None]] = {}
    for stage, action in dense_order(slots, stages, chunks):
        node, previous, needed = (stage, action), last[stage], waits_for(action, stage, stages, chunks)
        links[node] = previous, needed
        depth[node] = 1 + max(-1 if previous is None else depth[previous], -1 if needed is None else depth[needed])
        last[stage] = node
    order = sorted(links, key=lambda node: (depth[node], node[0]))
    row = {node: number + 1 for number, node in enumerate(order)}
    bounds: list[tuple[int, int]] = []
    for number, node in enumerate(order):
        if depth[node] == len(bounds):
            bounds.append((number + 1, number + 2))
        else:
            bounds[-1] = bounds[-1][0], number + 2
    rows = [[0 if one is None else row[one] for one in links[node]] for node in order]
    before = [np.array([rows[k - 1][0] for k in range(low, high)]) for low, high in bounds]
    needs = [np.array([rows[k - 1][1] for k in range(low, high)]) for low, high in bounds]
    source = np.array([action.slot * stages + stage for stage, action in order])
    share = np.array([(FORWARD_SHARE if action.kind == FORWARD else 1 - FORWARD_SHARE) / chunks for _, action in order])
    return _Levels(bounds, before, needs, source, share)


def one_lane(seconds: Floats, chunks: int) -> Floats:
    """columns.makespans of lanes that have all slots: [S, p, C] -> [C], level by level."""
    slots, stages, columns = seconds.shape
    levels = _levels(slots, stages, chunks)
    last = seconds.reshape(slots * stages, columns)[levels.source] * levels.share[:, None]
    ends = np.zeros((len(last) + 1, columns))
    for (low, high), before, needed in zip(levels.bounds, levels.before, levels.needed, strict=True):
        np.maximum(ends[before], ends[needed], out=ends[low:high])
        ends[low:high] += last[low - 1 : high - 1]
    result: Floats = ends.max(axis=0)
    return result
