"""Many pipelines at once: makespans and in-flight bytes of columns, each a lane (or a whole candidate plan as one lane).

S slots, p stages, v chunks, C columns. The action lists are those of actions.py: a column skips the actions of its absent slots and
moves nothing. The numbers equal simulate.run and MemoryModel.peaks, action by action, on arrays instead of one lane at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megadcp.plan.actions import BACKWARD, FORWARD, dense_actions, dense_order, waits_for
from megadcp.plan.cost import FORWARD_SHARE

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]


class Blocks(NamedTuple):
    """How the columns of one slot hang together as cp groups: first column of each block, and its size."""

    starts: IntArray
    sizes: IntArray


def makespans(seconds: FloatArray, present: BoolArray, chunks: int = 1, blocks: Sequence[Blocks | None] = ()) -> FloatArray:
    """Seconds until the last action of each column ends: float64 [C].

    seconds: [S, p, C], forward + backward of a slot on a stage (what is absent may hold anything finite); present: bool [S, C]. S is a
    multiple of p when chunks > 1. blocks: for each slot, None where every column runs alone, else all columns in blocks that begin each
    action together (a column without a microbatch is a block of its own).
    """
    slots, stages, columns = seconds.shape
    forward = seconds * (FORWARD_SHARE / chunks)
    backward = seconds * ((1 - FORWARD_SHARE) / chunks)
    all_there = [bool(row.all()) for row in present]
    ready: FloatArray = np.zeros((stages, columns))
    ended = {FORWARD: np.zeros((slots, chunks, stages, columns)), BACKWARD: np.zeros((slots, chunks, stages, columns))}
    for stage, action in dense_order(slots, stages, chunks):
        kind, slot, chunk = action
        needed = waits_for(action, stage, stages, chunks)
        free, end = ready[stage], ended[kind][slot, chunk, stage]
        if needed is None:
            np.copyto(end, free)
        else:
            np.maximum(free, ended[needed[1].kind][slot, needed[1].chunk, needed[0]], out=end)
        together = blocks[slot] if blocks else None
        if together is not None:
            end[:] = np.repeat(np.maximum.reduceat(end, together.starts), together.sizes)
        end += (forward if kind == FORWARD else backward)[slot, stage]
        if all_there[slot]:
            ready[stage] = end
        else:
            np.copyto(free, end, where=present[slot])
    last: FloatArray = ready.max(axis=0)
    return last


def peaks(stored: FloatArray, passing: FloatArray, chunks: int = 1) -> FloatArray:
    """Most activation bytes at one time: float64 [p, C]. stored, passing: [S, p, C] bytes of each slot, 0 where a column has nothing."""
    slots, stages, columns = stored.shape
    part = stored / chunks
    most = np.zeros((stages, columns))
    for stage, actions in enumerate(dense_actions(slots, stages, chunks)):
        held = np.zeros(columns)
        for kind, slot, _ in actions:
            if kind == FORWARD:
                held += part[slot, stage]
            np.maximum(most[stage], held + passing[slot, stage], out=most[stage])
            if kind == BACKWARD:
                held -= part[slot, stage]
    return most
