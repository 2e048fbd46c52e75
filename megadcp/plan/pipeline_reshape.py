"""Better slot sizes for a plan that is there: content moved between slots while the simulated makespan falls.

The profiles of pipeline_profile.py take all content for alike. In a plan, slots differ: long documents load all stages evenly, short
ones the last stage (LM head) more; groups pay for communication; a long document keeps its slot from being smaller. Here each slot
keeps what it has of that, and only its size changes. S slots, p stages; one lane stands for all.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megadcp.plan.columns import makespans
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


def _ends(slots: Slots, content: Floats, chunks: int) -> np.ndarray:
    """Makespans in nanoseconds of contents [S, C]."""
    seconds = slots.fixed[:, None] + slots.ratio[:, :, None] * content[:, None, :]
    return np.rint(makespans(seconds, np.ones(content.shape, bool), chunks) * 1e9).astype(np.int64)
