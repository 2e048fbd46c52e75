"""Seconds and bytes of pipeline microbatches, many at once, and of documents by the size of their group.

p stages, n cells (a cell is a microbatch in the making), P = cp, L padded tokens of a cell, Q sum of squared padded lengths, t = L / P.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import lcm
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megadcp.plan.basis import Basis
from megadcp.plan.columns import peaks
from megadcp.plan.cost import BACKWARD_ATTENTION, SELECTIVE_SHARE, CostModel, Load
from megadcp.plan.limits import Limits
from megadcp.plan.memory import GROUP_BYTES, MOST_TOKENS, MemoryModel
from megadcp.plan.step_plan import LEVELS, Recompute

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
COMMUNICATORS = 0.25  # of the memory for activations may go to communicators
KIND_NAMES = ("none", "ring", "all_gather", "ulysses", "2d")


class Cells(NamedTuple):
    """Microbatches in the making, one a row: place, group, load."""

    slot: Ints  # [n]
    lane: Ints  # [n]
    cp: Ints  # [n]
    tokens: Ints  # [n] padded L
    squares: Floats  # [n] Q
    slots: int  # S

    def owner(self, lanes: int) -> Ints:
        """Number of the cell that each lane has at each slot, [S, R]; the number of cells where it has none."""
        owner = np.full((self.slots, lanes), len(self.cp))
        for rows, on in self.by_group():
            owner[self.slot[rows, None], on] = rows[:, None]
        return owner

    def by_group(self) -> list[tuple[Ints, Ints]]:
        """(numbers of the cells of one group size, their lanes [., P]) for each size."""
        found = []
        for cp in np.unique(self.cp).tolist():
            rows = np.nonzero(self.cp == cp)[0]
            found.append((rows, self.lane[rows, None] + np.arange(cp)))
        return found


class Priced(NamedTuple):
    """What cells cost without recompute, and what recomputing one layer of each would add."""

    kind: Ints  # [n] index into KIND_NAMES
    seconds: Floats  # [p, n] forward + backward of each stage, lane speed 1
    selective: Floats  # [n] seconds of a layer more at this level
    mlp: Floats
    full: Floats


class PipelineCosts:
    """Costs of one basis under a run's limits."""

    def __init__(self, basis: Basis, limits: Limits, longest: int = 1) -> None:
        self.basis, self.limits = basis, limits
        self.cost, self.memory = CostModel(basis), MemoryModel(basis)
        self.stages, self.chunks, self.lanes = basis.layout.pp, basis.layout.virtual_stages, basis.layout.lanes
        self.layers = np.array(basis.stage_layers, dtype=np.float64)
        self.groups = self._affordable(longest)

    def _affordable(self, longest: int) -> list[int]:
        """Group sizes to use: all, where memory has room for their communicators, else those around the least that the longest document needs."""
        sizes = [1 << k for k in range(self.limits.max_cp.bit_length())]
        free = min(self.memory.budget(stage, 0) for stage in range(self.stages))
        count = max(0, int(COMMUNICATORS * free / GROUP_BYTES))
        if count >= len(sizes) - 1:
            return sizes
        needed = next((cp for cp in sizes if self._holds(longest, cp)), sizes[-1])
        near = sorted(sizes[1:], key=lambda cp: (max(cp, needed) // min(cp, needed), -cp))
        return sorted({1, *near[: max(count, int(needed > 1))]})

    def _holds(self, length: int, cp: int) -> bool:
        """Whether a document fits alone on `cp` lanes, with communicators of one size."""
        local = -(-length // self.grain(cp)) * self.grain(cp) / cp
        budgets = [self.memory.budget(stage, int(cp > 1)) for stage in range(self.stages)]
        if self.limits.free:
            return any(self.memory.least_layers(local, level, budgets) >= 0 for level in LEVELS)
        choice = self.limits.choices[0]
        return all(self.memory.need(stage, local, choice) <= budget for stage, budget in enumerate(budgets))

    def step(self, cp: int) -> int:
        """Documents are padded to a multiple of this."""
        return 2 * cp if cp > 1 else 1

    def grain(self, cp: int) -> int:
        """The tokens of a microbatch are a multiple of this."""
        return lcm(cp * self.basis.align, self.step(cp))

    # ---------------------------------------------------------------------------------------------------------------- cells
    def price(self, cells: Cells) -> Priced:
        """Every cell with its default kind of communication (docs/plan.md section 3)."""
        count = len(cells.cp)
        kind, seconds = np.zeros(count, np.int64), np.zeros((self.stages, count))
        extras = np.zeros((3, count))
        for cp, inside, rows in self._groups(cells):
            tokens, squares = cells.tokens[rows].astype(np.float64), cells.squares[rows]
            best, extra, which = self._best(tokens, squares, cp, inside)
            kind[rows], extras[:, rows] = which, extra
            seconds[:, rows] = self.layers[:, None] * best + self._head(tokens / cp)
        return Priced(kind, seconds, extras[0], extras[1], extras[2])

    def _groups(self, cells: Cells) -> list[tuple[int, bool, npt.NDArray[np.bool_]]]:
        per_node = self.basis.layout.lanes_per_node
        inside = cells.lane // per_node == (cells.lane + cells.cp - 1) // per_node
        found = []
        for cp in np.unique(cells.cp).tolist():
            for within in (True, False):
                rows = (cells.cp == cp) & (inside == within)
                if rows.any():
                    found.append((cp, within, rows))
        return found

    def _best(self, tokens: Floats, squares: Floats, cp: int, inside: bool) -> tuple[Floats, Floats, Ints]:
        """Seconds of a layer [n], what recomputing it adds at the three levels [3, n], index of the kind [n]."""
        least: Floats | None = None
        for name in self.cost.legal_kinds(cp):
            layer = self.cost.layer(Load(tokens, squares, cp, name, inside))
            score = np.rint(((1 + BACKWARD_ATTENTION) * layer.attention + layer.exposed) * 1e9)
            both = layer.both + self.basis.profile.layer_overhead_seconds
            extra = np.stack([SELECTIVE_SHARE * layer.linear, layer.mlp, layer.linear + layer.attention + 0.5 * layer.exposed])
            if least is None:
                least, best, extras, which = score, both, extra, np.full(tokens.shape, KIND_NAMES.index(name))
                continue
            better = score < least
            least, best = np.where(better, score, least), np.where(better, both, best)
            extras, which = np.where(better, extra, extras), np.where(better, KIND_NAMES.index(name), which)
        return best, extras, which

    def kind(self, tokens: int, squares: float, cp: int) -> str:
        """The default kind of communication of one microbatch on the first lanes of a node."""
        return self.cost.best_kind(Load(tokens, squares, cp, "none", self.cost.in_node(0, cp)))

    def _head(self, local: Floats) -> Floats:
        """Seconds of LM head and loss on each stage [p, n]."""
        head = np.zeros((self.stages, len(local)))
        head[-1] = self.cost.head_second * (local + self.cost.half)
        return head

    @cached_property
    def held(self) -> list[float]:
        """Most microbatches in flight at one time on each stage."""
        slots = 3 * self.stages
        ones = np.ones((slots, self.stages, 1))
        counted: list[float] = peaks(ones, np.zeros_like(ones), self.chunks)[:, 0].tolist()
        return counted

    def local_tokens(self, level: str, held: Sequence[float]) -> int:
        """Most local tokens of equal microbatches of which `held` are in flight on each stage, at `level` on all layers."""
        sizes = len(self.groups) - 1
        layers = 0 if level == "none" else self.basis.recomputable
        least = MOST_TOKENS
        for stage in range(self.stages):
            budget = self.memory.budget(stage, sizes)
            stored = self.memory.stored(stage, 1.0, Recompute(level, layers)) * held[stage]
            passing = self.memory.passing(stage, 1.0, level)  # a token's: of the loss chunk this is too much for long microbatches
            chunk = self.memory.passing(stage, float(self.basis.profile.loss_chunk), "none")
            transient = self.memory.passing(stage, 1.0, level) - self.memory.passing(stage, 1.0, "none")
            most = max(budget / (stored + passing), (budget - chunk) / (stored + transient))
            least = min(least, max(0, int(most)))
        return least

    def most_tokens(self, cp: int) -> tuple[int, int]:
        """Most tokens of a group's microbatch that is alone in flight, and of equal ones with the pipeline full."""
        levels = LEVELS if self.limits.free else (self.limits.choices[0].level,)
        alone = max(self.local_tokens(level, [1.0] * self.stages) for level in levels)
        several = max(self.local_tokens(level, self.held) for level in levels)
        grain = self.grain(cp)
        return alone * cp // grain * grain, several * cp // grain * grain

    # ------------------------------------------------------------------------------------------------------------ documents
    def documents(self, lengths: Ints, cp: int, pack: float) -> Documents:
        """Each document's part of a microbatch of `pack` tokens on `cp` lanes that start at lane 0, on every stage."""
        padded = (-(-lengths // self.step(cp)) * self.step(cp)).astype(np.float64)
        inside = self.cost.in_node(0, cp)
        mean = float((padded * padded).sum() / padded.sum())
        alone, typical = [], []
        for name in self.cost.legal_kinds(cp):
            load = Load(np.append(padded, pack), np.append(padded * padded, pack * mean), cp, name, inside)
            layer = self.cost.layer(load)
            typical.append(float((1 + BACKWARD_ATTENTION) * layer.attention[-1] + np.broadcast_to(layer.exposed, padded.shape[0] + 1)[-1]))
            alone.append((layer, load))
        chosen = min(range(len(typical)), key=lambda kind: (round(typical[kind] * 1e9), kind))
        layer, load = alone[chosen]
        exposed = float(np.broadcast_to(layer.exposed, padded.shape[0] + 1)[-1])
        each = 3 * self.cost.linear_second / cp + self.cost.tp_second / cp + exposed / pack  # a token's, attention aside
        content = each * padded + (1 + BACKWARD_ATTENTION) * layer.attention[:-1]
        per_layer = self.basis.profile.layer_overhead_seconds + 3 * self.cost.linear_second * self.cost.half
        fixed, head = self.layers * per_layer, np.zeros((self.stages, len(padded)))
        fixed[-1] += self.cost.head_second * self.cost.half
        head[-1] = self.cost.head_second * padded / cp
        return Documents(cp, padded.astype(np.int64), self.layers[:, None] * content + head, fixed)


class Documents(NamedTuple):
    """Documents on groups of one size."""

    cp: int
    padded: Ints  # [n]
    seconds: Floats  # [p, n] without what any microbatch costs
    fixed: Floats  # [p] what any microbatch costs
