"""What a candidate plan of a pipelined step costs: loads, kinds, recompute, simulated makespan.

A candidate is a list of cells (pipeline_fill.py) whose documents count from 0, longest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megadcp.plan.columns import Blocks, makespans
from megadcp.plan.packing import pad
from megadcp.plan.pipeline_costs import KIND_NAMES, Cells, Floats, Ints, PipelineCosts, Priced
from megadcp.plan.pipeline_fill import Cell
from megadcp.plan.pipeline_memory import choose_recompute
from megadcp.plan.pipeline_reshape import Slots
from megadcp.plan.step_plan import Microbatch, Recompute


@dataclass(frozen=True)
class Plan:
    """A candidate and what was found for it: simulated makespan, kind of communication (index) and recompute of each cell."""

    nanoseconds: int
    cells: Sequence[Cell]
    kinds: Sequence[int]
    recompute: Sequence[Recompute]
    table: Cells
    seconds: Floats  # [p, n] with recompute, at lane speed 1


class Scorer:
    """Scores candidates for these documents (longest first: `order` holds their ids, `lengths` their tokens)."""

    def __init__(self, costs: PipelineCosts, order: Sequence[int], lengths: Ints) -> None:
        self.costs, self.order, self.lengths = costs, order, lengths

    def plan(self, cells: Sequence[Cell]) -> Plan | None:
        """The candidate with kinds, recompute and makespan; None when it does not fit the memory."""
        table = self.table(cells)
        priced = self.costs.price(table)
        recompute = choose_recompute(self.costs, table, priced)
        if recompute is None:
            return None
        seconds = priced.seconds + extra_seconds(priced, recompute)
        return Plan(round(self.makespan(table, seconds) * 1e9), cells, priced.kind.tolist(), recompute, table, seconds)

    def table(self, cells: Sequence[Cell]) -> Cells:
        """The cells' loads, padded as packing.pad pads them: every document to its multiple, the last one until the sum fits."""
        count = len(cells)
        group = np.array([cell.cp for cell in cells], dtype=np.int64)
        held = np.array([len(cell.documents) for cell in cells], dtype=np.int64)
        members = np.array([document for cell in cells for document in cell.documents], dtype=np.int64)
        number = np.repeat(np.arange(count), held)
        each = np.where(group > 1, 2 * group, 1)[number]
        grains = {cp: self.costs.grain(cp) for cp in np.unique(group).tolist()}
        grain = np.array([grains[cp] for cp in group.tolist()], dtype=np.int64)
        padded = -(-self.lengths[members] // each) * each
        first = np.cumsum(held) - held
        sums = np.add.reduceat(padded, first)
        grow = -sums % grain
        squares = np.add.reduceat(padded * padded, first) + grow * (grow + 2 * padded[first + held - 1])
        slots = max(cell.slot for cell in cells) + 1
        if self.costs.chunks > 1:
            slots = -(-slots // self.costs.stages) * self.costs.stages
        slot = np.array([cell.slot for cell in cells], dtype=np.int64)
        lane = np.array([cell.lane for cell in cells], dtype=np.int64)
        return Cells(slot, lane, group, sums + grow, squares.astype(np.float64), slots)

    def makespan(self, table: Cells, seconds: Floats) -> float:
        """Seconds of the whole step, lanes coupled by their groups. seconds: [p, n] at lane speed 1."""
        lanes, stages, count = self.costs.lanes, self.costs.stages, len(table.cp)
        owner = table.owner(lanes)
        size = np.append(table.cp, 1)[owner]
        blocks: list[Blocks | None] = []
        for row in size.tolist():
            if max(row) == 1:
                blocks.append(None)
                continue
            starts, lane = [], 0
            while lane < lanes:
                starts.append(lane)
                lane += row[lane]
            blocks.append(Blocks(np.array(starts), np.array([row[lane] for lane in starts])))
        times = np.concatenate([seconds, np.zeros((stages, 1))], axis=1)[:, owner].transpose(1, 0, 2)
        if self.costs.basis.lane_speed:
            speed = [self.costs.basis.speed(lane, cp) for lane, cp in zip(table.lane.tolist(), table.cp.tolist(), strict=True)]
            times = times / np.array([*speed, 1.0])[owner][:, None, :]
        return float(makespans(times, owner < count, self.costs.chunks, blocks).max())

    def slots(self, plan: Plan, fixed: Floats, busiest: int, least: Floats, most: Floats) -> Slots:
        """The plan's slots as an average lane has them; fixed: [p] seconds of an empty microbatch."""
        table, lanes = plan.table, self.costs.lanes
        share = table.cp / lanes
        content = (plan.seconds - fixed[:, None]) * share
        sums = np.stack([np.bincount(table.slot, weights=row, minlength=table.slots) for row in content], axis=1)
        own = np.maximum(sums[:, busiest], 1e-9)
        ratio = np.where(sums[:, [busiest]] > 1e-9, sums / own[:, None], 1.0)
        return Slots(fixed, own, ratio, np.minimum(least, own), np.maximum(most, own))

    def microbatches(self, plan: Plan) -> list[Microbatch]:
        """The plan's microbatches, by slot and lane."""
        found = []
        lengths = self.lengths.tolist()
        for cell, kind, recompute in zip(plan.cells, plan.kinds, plan.recompute, strict=True):
            padded = pad([lengths[document] for document in cell.documents], cell.cp, self.costs.basis.align)
            documents = tuple(self.order[document] for document in cell.documents)
            found.append(Microbatch(cell.slot, cell.lane, cell.cp, documents, padded, recompute, KIND_NAMES[kind]))
        return sorted(found, key=lambda one: (one.slot, one.lane))


def extra_seconds(priced: Priced, recompute: Sequence[Recompute]) -> Floats:
    """Seconds that recompute adds to each stage of each cell: [n]."""
    extra = np.zeros(len(recompute))
    for number, one in enumerate(recompute):
        if one.layers:
            extra[number] = float({"selective": priced.selective, "mlp": priced.mlp, "full": priced.full}[one.level][number]) * one.layers
    return extra
