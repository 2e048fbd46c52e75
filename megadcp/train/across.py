"""What all ranks measured of one step: a row of numbers each, exchanged once, and what follows from all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megadcp.engine.step import StepResult
from megadcp.engine.stragglers import own_seconds
from megadcp.mesh.coords import Mesh
from megadcp.plan.step_plan import StepPlan

Floats = npt.NDArray[np.float64]


class Own(NamedTuple):
    """One rank's numbers.

    stop: 1 where it wants to stop; alone, predicted: seconds of what its lane ran alone, measured and predicted; span: from its first action's
    begin to its last one's end; busy: of all its actions; data: it waited for data; memory: its peak, bytes.
    """

    stop: float
    alone: float
    predicted: float
    span: float
    busy: float
    data: float
    memory: float


@dataclass(frozen=True)
class Across:
    """Of all ranks. seconds: the longest span; bubble: share of all ranks' time in it in which they ran no action.

    slowest_lane: whose ranks were busy longest, in `slowest_seconds`. data_seconds, memory_bytes: the largest.
    """

    seconds: float
    bubble: float
    slowest_lane: int
    slowest_seconds: float
    data_seconds: float
    memory_bytes: int


def own_numbers(plan: StepPlan, result: StepResult, lane: int, stop: bool, data_seconds: float) -> Own:
    """Of this rank."""
    measured, predicted = own_seconds(plan, result.microbatches, lane)
    busy = sum(one.seconds for one in result.microbatches)
    return Own(float(stop), measured, predicted, result.measured_seconds, busy, data_seconds, float(result.memory_bytes))


def across(table: Floats, mesh: Mesh) -> Across:
    """table: `Own` of every rank, [ranks, 7], in order of ranks."""
    columns = dict(zip(Own._fields, table.T, strict=True))
    seconds = float(columns["span"].max())
    by_lane = columns["busy"].reshape(mesh.pp, mesh.lanes, mesh.tp).max(axis=(0, 2))
    slowest = int(by_lane.argmax())
    bubble = max(0.0, 1 - float(columns["busy"].mean()) / seconds) if seconds > 0 else 0.0
    return Across(seconds, bubble, slowest, float(by_lane[slowest]), float(columns["data"].max()), int(columns["memory"].max()))
