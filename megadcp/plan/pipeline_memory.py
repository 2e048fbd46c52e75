"""How much of each pipeline microbatch is recomputed, so that what is in flight fits every stage: the least that memory allows.

A lane's own list (the dense one without its absent slots) says which microbatches a stage holds together. Where they are too large
together, all of them keep the same share of their bytes; each reaches its share by the level that costs it least. What is none of
the documents' business (which slots, which groups) is not changed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from megadcp.plan.actions import BACKWARD, FORWARD, dense_actions
from megadcp.plan.columns import peaks
from megadcp.plan.pipeline_costs import Cells, Floats, Ints, PipelineCosts, Priced
from megadcp.plan.step_plan import Recompute

SLACK = 1 + 1e-10  # of a sum of bytes; verify allows a little more
ROOMS = (1.0, 0.97, 0.9, 0.8)  # shares of the budget to aim at: where a share is rounded up to layers, the first may just miss


class InFlight:
    """Bytes of cells on their lanes, walked at once."""

    def __init__(self, costs: PipelineCosts, cells: Cells) -> None:
        self.costs, self.cells = costs, cells
        self.local = cells.tokens / cells.cp  # [n]
        memory = costs.memory
        self.sizes = len({cp for cp in cells.cp.tolist() if cp > 1})
        self.budgets = np.array([memory.budget(stage, self.sizes) for stage in range(costs.stages)])
        self.plain = memory.token_bytes["none"]
        loss = np.minimum(self.local, costs.basis.profile.loss_chunk) * (costs.basis.model.vocab * 6 / costs.basis.layout.tp)
        self.loss = np.zeros((costs.stages, len(self.local)))
        self.loss[-1] = loss

    @cached_property
    def owner(self) -> Ints:
        """Which cell each lane has at each slot, [S, R]."""
        return self.cells.owner(self.costs.lanes)

    def on_lanes(self, values: Floats) -> Floats:
        """[p, n] -> [S, p, R], 0 where a lane has nothing."""
        padded = np.concatenate([values, np.zeros((values.shape[0], 1))], axis=1)
        return padded[:, self.owner].transpose(1, 0, 2)

    def surely_fits(self) -> bool:
        """Whether even a lane with the largest microbatch of every slot fits without recompute (1F1B: p - s consecutive slots)."""
        costs = self.costs
        most = np.zeros(self.cells.slots)
        np.maximum.at(most, self.cells.slot, self.local)
        sums = np.cumsum(np.concatenate([np.zeros(1), most]))
        for stage in range(costs.stages):
            wide = min(costs.stages - stage, len(most))
            held = float((sums[wide:] - sums[:-wide]).max()) if costs.chunks == 1 else float(most.max()) * costs.held[stage]
            if held * self.plain * float(costs.layers[stage]) * SLACK + float(self.loss[stage].max()) > self.budgets[stage]:
                return False
        return True

    def fits(self, levels: Sequence[str], layers: Sequence[int]) -> bool:
        """Whether every stage of every lane holds what is in flight."""
        stored, passing = (self.on_lanes(part) for part in self.bytes(levels, layers))
        if self.costs.chunks == 1:
            most = np.array([self._peak(stage, stored[:, stage], passing[:, stage]) for stage in range(self.costs.stages)])
        else:
            most = peaks(stored, passing, self.costs.chunks).max(axis=1)
        return bool((most <= self.budgets * SLACK).all())

    def _wide(self, stage: int) -> int:
        """Most consecutive slots that a stage holds together (1F1B)."""
        return min(self.costs.stages - stage, self.cells.slots)

    def _windows(self, stage: int, stored: Floats) -> Floats:
        """Sums over the slots that are in flight when a forward runs: [S + wide - 1, R], the last of them while backwards drain."""
        wide = self._wide(stage)
        none = np.zeros((wide, stored.shape[1]))
        sums = np.cumsum(np.concatenate([none, stored, none[1:]]), axis=0)
        held: Floats = sums[wide:] - sums[: len(sums) - wide]
        return held

    def _peak(self, stage: int, stored: Floats, passing: Floats) -> float:
        """columns.peaks of one stage over all lanes: stored, passing [S, R]. Of a window, its first slot runs backward, its last forward."""
        wide, slots = self._wide(stage), len(stored)
        held = self._windows(stage, stored)
        most = (held[:slots] + passing).max()
        return float(max(most, (held[wide - 1 : wide - 1 + slots] + passing).max()))

    def bytes(self, levels: Sequence[str], layers: Sequence[int]) -> tuple[Floats, Floats]:
        """Stored and passing bytes of each cell on each stage, [p, n] each."""
        table = self.costs.memory.token_bytes
        again = np.array(layers, dtype=np.float64)
        saved = np.array([self.plain - table[level] for level in levels])
        stored = self.local * (self.costs.layers[:, None] * self.plain - again * saved)
        full = np.array([level == "full" for level in levels])
        return stored, self.loss + np.where(full, self.local * self.plain, 0.0)

    def shares(self, room: float, transient: float) -> Floats:
        """Share of its plain bytes that each cell may keep on each stage, [p, n]. transient: bytes to leave free on top."""
        costs = self.costs
        stored = self.on_lanes(self.local * self.plain * costs.layers[:, None]) / costs.chunks
        passing = self.on_lanes(self.loss)
        share = np.ones((self.cells.slots, costs.stages, costs.lanes))
        for stage in range(costs.stages):
            free = self.budgets[stage] * room - transient - passing[:, stage].max()
            if costs.chunks == 1:
                held = self._windows(stage, stored[:, stage])
                allowed = np.minimum(1.0, max(free, 0.0) / np.maximum(held, 1.0))
                for back in range(self._wide(stage)):
                    np.minimum(share[:, stage], allowed[back : back + self.cells.slots], out=share[:, stage])
            else:
                self._walk(stage, stored[:, stage], free, share[:, stage])
        result = np.ones((costs.stages, len(self.local)))
        for rows, lanes in self.cells.by_group():
            result[:, rows] = share[self.cells.slot[rows, None], :, lanes].min(axis=1).T
        return result

    def _walk(self, stage: int, stored: Floats, free: float, share: Floats) -> None:
        """Lower `share` [S, R] to what fits into `free` bytes, along the stage's list."""
        held = np.zeros(self.costs.lanes)
        together: dict[int, int] = {}  # chunks in flight of each slot
        for kind, slot, _ in dense_actions(self.cells.slots, self.costs.stages, self.costs.chunks)[stage]:
            if kind == FORWARD:
                held = held + stored[slot]
                together[slot] = together.get(slot, 0) + 1
                if (held > free).any():
                    allowed = np.minimum(1.0, max(free, 0.0) / np.maximum(held, 1.0))
                    for other in together:
                        np.minimum(share[other], allowed, out=share[other])
            if kind == BACKWARD:
                held = held - stored[slot]
                together[slot] -= 1
                if not together[slot]:
                    del together[slot]


def choose_recompute(costs: PipelineCosts, cells: Cells, priced: Priced) -> list[Recompute] | None:
    """The recompute value of each cell; None when these cells do not fit, whatever is recomputed."""
    flight = InFlight(costs, cells)
    if (flight.budgets <= 0).any():
        return None
    count = len(cells.cp)
    if not costs.limits.free:
        choice = costs.limits.choices[0]
        return [choice] * count if flight.fits([choice.level] * count, [choice.layers] * count) else None
    if flight.surely_fits() or flight.fits(["none"] * count, [0] * count):
        return [Recompute()] * count
    for room in ROOMS:
        for with_full in (False, True):
            transient = float(flight.local.max()) * flight.plain if with_full else 0.0
            shares = flight.shares(room, transient)
            found = _cheapest(costs, priced, shares, with_full)
            if found is not None and flight.fits([one.level for one in found], [one.layers for one in found]):
                return found
    return _everything(costs, flight)


def _cheapest(costs: PipelineCosts, priced: Priced, shares: Floats, with_full: bool) -> list[Recompute] | None:
    """For each cell the level that keeps at most its shares at the least cost."""
    table, most = costs.memory.token_bytes, costs.basis.recomputable
    best = np.full(shares.shape[1], np.inf)
    level_of, layers_of = np.zeros(shares.shape[1], np.int64), np.zeros(shares.shape[1], np.int64)
    names = ("selective", "mlp", "full")[: 3 if with_full else 2]
    over = 1.0 - shares
    for index, name in enumerate(names):
        need = np.ceil(over * costs.layers[:, None] * (table["none"] / (table["none"] - table[name])) - 1e-9).max(axis=0)
        price = np.rint((priced.selective, priced.mlp, priced.full)[index] * need * 1e9)
        better = (need <= most) & (price < best)
        best = np.where(better, price, best)
        level_of, layers_of = np.where(better, index, level_of), np.where(better, need, layers_of).astype(np.int64)
    if not np.isfinite(best).all():
        return None
    return [Recompute(names[level], layers) if layers else Recompute() for level, layers in zip(level_of.tolist(), layers_of.tolist(), strict=True)]


def _everything(costs: PipelineCosts, flight: InFlight) -> list[Recompute] | None:
    """Everything recomputed as far as it goes, where that is enough."""
    count = len(flight.local)
    most = costs.basis.recomputable
    return [Recompute("full", most)] * count if flight.fits(["full"] * count, [most] * count) else None
