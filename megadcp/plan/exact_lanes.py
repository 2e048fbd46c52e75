"""The best plan of a small step without pipelines, as a mixed-integer program: part of exact.py.

The order of microbatches costs nothing. Let lanes run theirs in order of falling cp: a block of P lanes has then run nothing but
microbatches that cover all of it (aligned blocks are nested), so its lanes are ready together and none waits. Any order takes at least
the largest sum of a lane. So the least makespan is that of an assignment: of all columns (set of documents, cp, first lane), each with its
cheapest recompute and communication, choose some that hold every document once, so that the largest lane's sum is least. Memory
depends on the columns chosen only through the number of cp sizes in use: one program for every set of sizes. A recompute level never
needs more than its least layer count here: more cost time and save memory that nobody uses.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from megadcp.config.check import UserError
from megadcp.plan.basis import Basis
from megadcp.plan.cost import CostModel, Load
from megadcp.plan.lower_bound import lower_bound
from megadcp.plan.memory import MemoryModel
from megadcp.plan.packing import pad
from megadcp.plan.step_plan import LEVELS, Microbatch, Recompute

MOST_COLUMNS = 60_000  # of a program: 10 documents on 16 lanes have 32,000
NEAR = 2e-6  # what the solver's tolerances leave open, as a share of the makespan


class Pack(NamedTuple):
    """A set of documents as one microbatch, before it has lanes: order, padding, recompute, communication, seconds at lane speed 1."""

    documents: tuple[int, ...]
    padded: tuple[int, ...]
    recompute: Recompute
    kind: str
    seconds: float


def nothing_fits(basis: Basis, lengths: Sequence[int]) -> UserError:
    """What to raise when no plan fits the memory."""
    usable = basis.profile.usable_fraction * basis.profile.memory_bytes
    return UserError(
        f"no plan for documents of {', '.join(map(str, sorted(lengths, reverse=True)))} tokens on {basis.layout.lanes} lanes fits the "
        f"{usable / 1e9:.4g} GB of a device; shorter documents, more lanes or more memory would"
    )


def alike(basis: Basis, sizes: Sequence[int]) -> bool:
    """Whether lanes may be renumbered freely within their tree of aligned blocks: equal speeds, and nodes cut all blocks of a size alike."""
    cost, lanes = CostModel(basis), basis.layout.lanes
    homes = [{cost.in_node(lane, cp) for lane in range(0, lanes - cp + 1, cp)} for cp in sizes]
    return len(set(basis.lane_speed)) <= 1 and all(len(home) == 1 for home in homes)


def orders(documents: Sequence[int], lengths: Sequence[int], cp: int, align: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(documents, padded lengths) for each length that may be last; the others by falling length."""
    seen = set()
    for last in documents:
        if lengths[last] not in seen:
            seen.add(lengths[last])
            order = (*sorted((one for one in documents if one != last), key=lambda one: (-lengths[one], one)), last)
            yield order, pad([lengths[one] for one in order], cp, align)


# ---------------------------------------------------------------------------------------------------------- without pipelines
class _Pricer:
    """Cheapest packs by set of documents, group size, kind of place, and number of cp sizes above 1 in use."""

    def __init__(self, basis: Basis, lengths: Sequence[int]) -> None:
        self.basis, self.lengths = basis, lengths
        self.cost, self.memory = CostModel(basis), MemoryModel(basis)
        every = range(len(lengths))
        self.sets = [tuple(one for one in every if mask >> one & 1) for mask in range(1, 1 << len(lengths))]
        self._found: dict[tuple[tuple[int, ...], int, bool, int], Pack | None] = {}

    def cheapest(self, documents: tuple[int, ...], cp: int, inside: bool, sizes: int) -> Pack | None:
        """Least seconds over last document, kind, level with its least layer count; None when it fits at no level."""
        key = documents, cp, inside, sizes
        if key not in self._found:
            self._found[key] = self._price(*key)
        return self._found[key]

    def same(self, cp: int, sizes: int, other: int) -> bool:
        """Whether packs on groups of cp cost the same with both numbers of sizes in use."""
        return all(
            self.cheapest(documents, cp, inside, sizes) == self.cheapest(documents, cp, inside, other)
            for documents in self.sets
            for inside in (True, False)
        )

    def _price(self, documents: tuple[int, ...], cp: int, inside: bool, sizes: int) -> Pack | None:
        best: Pack | None = None
        budgets = [self.memory.budget(0, sizes)]
        for order, padded in orders(documents, self.lengths, cp, self.basis.align):
            tokens = sum(padded)
            layers = {level: self.memory.least_layers(tokens / cp, level, budgets) for level in LEVELS}
            for kind in self.cost.legal_kinds(cp):
                layer = self.cost.layer(Load(tokens, sum(one * one for one in padded), cp, kind, inside))
                for level, count in layers.items():
                    if count < 0:
                        continue
                    seconds = self.cost.stages(layer, tokens / cp, level, count)[0]
                    if best is None or seconds < best.seconds:
                        best = Pack(order, padded, Recompute(level, count), kind, seconds)
                    if level == "none":
                        break  # recompute only adds to it
        return best


class _Column(NamedTuple):
    pack: Pack
    cp: int
    lane: int
    seconds: float  # at the speed of its lanes


def assign(basis: Basis, lengths: Sequence[int], sizes: Sequence[int], seconds_limit: float) -> tuple[list[Microbatch], float, bool]:
    """(microbatches, lower bound, proved) of least largest lane sum."""
    lanes, documents = basis.layout.lanes, len(lengths)
    places = sum(lanes // cp for cp in sizes)
    if documents > 20 or (2**documents - 1) * places > MOST_COLUMNS:
        most = max(1, int(math.log2(MOST_COLUMNS / places + 1)))
        raise UserError(
            f"exact.solve was asked for {documents} documents on {lanes} lanes, which is too large; on these lanes at most {most} documents"
        )
    pricer, end = _Pricer(basis, lengths), time.monotonic() + seconds_limit
    best: list[_Column] | None = None
    least, unit, bounds, proved = math.inf, lower_bound(basis, lengths), [], True
    if math.isinf(unit):
        raise nothing_fits(basis, lengths)
    for chosen in _sets_of_sizes(pricer, sizes):
        columns = [column for column in _columns(pricer, chosen) if column.seconds < least]
        columns, lower, done = _program(basis, columns, documents, unit, least, max(1.0, end - time.monotonic()))
        bounds.append(lower)
        proved &= done
        if columns:
            total = _largest_sum(basis, columns)
            if total < least:
                best, least = columns, total
    if best is None:
        if proved:
            raise nothing_fits(basis, lengths)
        raise UserError(f"exact.solve found no plan in {seconds_limit:g} s; give it more with seconds_limit, or fewer documents")
    return _in_falling_order(basis, best), max(unit, min([least, *bounds])), proved


def _sets_of_sizes(pricer: _Pricer, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The sets of cp sizes that have to be tried, larger ones first: one with more memory but no cheaper pack is part of a larger one."""
    larger = [cp for cp in sizes if cp > 1]
    tried: list[tuple[int, ...]] = []
    for count in range(len(larger), -1, -1):
        for others in combinations(larger, count):
            chosen = (1, *others)
            if not any(set(chosen) <= set(one) and all(pricer.same(cp, count, len(one) - 1) for cp in chosen) for one in tried):
                yield chosen
            tried.append(chosen)


def _columns(pricer: _Pricer, chosen: Sequence[int]) -> list[_Column]:
    """All columns with these cp sizes, under the memory that they leave."""
    basis, count, found = pricer.basis, len(chosen) - 1, []
    for documents in pricer.sets:
        for cp in chosen:
            for lane in range(0, basis.layout.lanes - cp + 1, cp):
                pack = pricer.cheapest(documents, cp, pricer.cost.in_node(lane, cp), count)
                if pack is not None:
                    found.append(_Column(pack, cp, lane, pack.seconds / basis.speed(lane, cp)))
    return found


def _program(
    basis: Basis, columns: Sequence[_Column], documents: int, unit: float, most: float, seconds_limit: float
) -> tuple[list[_Column], float, bool]:
    """(chosen columns, lower bound, proved): least largest lane sum below `most`; no columns where there is none. Times in units of `unit`."""
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError:
        raise UserError("exact.solve needs scipy, which is not installed; pip install scipy") from None
    if {one for column in columns for one in column.pack.documents} != set(range(documents)):
        return [], math.inf, True
    number = len(columns)
    rows, upper = _rows(basis, columns, documents, unit)
    matrix, low, high = _sparse(rows, number + 1)
    costs, integrality = np.zeros(number + 1), np.ones(number + 1)
    costs[-1], integrality[-1] = 1.0, 0.0
    result = milp(
        costs,
        integrality=integrality,
        bounds=Bounds(np.zeros(number + 1), np.array([*upper, min(most / unit, 1e6)])),
        constraints=LinearConstraint(matrix, low, high),
        options={"time_limit": seconds_limit, "mip_rel_gap": 0.0},
    )
    if result.status == 2:  # infeasible: nothing below `most`
        return [], math.inf, True
    lower = float(result.mip_dual_bound) * unit * (1 - NEAR) if result.mip_dual_bound is not None else 0.0
    if result.x is None:
        return [], lower, False
    return [column for column, value in zip(columns, result.x[:-1], strict=True) if value > 0.5], lower, result.status == 0


Row = tuple[dict[int, float], float, float]  # coefficient of each column (and of the makespan, the last variable), least, most


def _rows(basis: Basis, columns: Sequence[_Column], documents: int, unit: float) -> tuple[list[Row], list[float]]:
    """The program's rows, and the upper limit of each column."""
    lanes, makespan = basis.layout.lanes, len(columns)
    rows: list[Row] = [({k: 1.0 for k, column in enumerate(columns) if one in column.pack.documents}, 1.0, 1.0) for one in range(documents)]
    for lane in range(lanes):
        row = {k: column.seconds / unit for k, column in enumerate(columns) if column.lane <= lane < column.lane + column.cp}
        rows.append(({**row, makespan: -1.0}, -math.inf, 0.0))
    area = {k: column.seconds / unit * column.cp for k, column in enumerate(columns)}
    rows.append(({**area, makespan: -float(lanes)}, -math.inf, 0.0))  # follows from the others, and helps the solver
    upper = [1.0] * len(columns)
    if alike(basis, [1 << power for power in range(lanes.bit_length())]):
        first_fixed = lanes & (lanes - 1) == 0
        if first_fixed:
            upper = [float(column.lane == 0 or 0 not in column.pack.documents) for column in columns]  # document 0 in the first place
        rows += _ordered(columns, unit, lanes, first_fixed)
    return rows, upper


def _ordered(columns: Sequence[_Column], unit: float, lanes: int, first_fixed: bool) -> list[Row]:
    """Of two sibling blocks the left one has the larger sum: swapping them changes nothing. Where document 0 is fixed, not on lane 0's path."""
    rows = []
    size = 1
    while 2 * size <= lanes:
        for left in range(0, lanes - 2 * size + 1, 2 * size):
            if left == 0 and first_fixed:
                continue
            row: dict[int, float] = {}
            for index, column in enumerate(columns):
                if column.cp <= size and left <= column.lane < left + 2 * size:
                    row[index] = column.seconds / unit * column.cp * (1.0 if column.lane < left + size else -1.0)
            rows.append((row, 0.0, math.inf))
        size *= 2
    return rows


def _sparse(rows: Sequence[Row], width: int) -> tuple[Any, list[float], list[float]]:
    from scipy.sparse import csr_matrix

    ends = np.cumsum([0, *(len(row) for row, _, _ in rows)])
    indices = [index for row, _, _ in rows for index in row]
    values = [value for row, _, _ in rows for value in row.values()]
    return csr_matrix((values, indices, ends), shape=(len(rows), width)), [low for _, low, _ in rows], [high for _, _, high in rows]


def _largest_sum(basis: Basis, columns: Sequence[_Column]) -> float:
    sums = [math.fsum(column.seconds for column in columns if column.lane <= lane < column.lane + column.cp) for lane in range(basis.layout.lanes)]
    return max(sums)


def _in_falling_order(basis: Basis, columns: Sequence[_Column]) -> list[Microbatch]:
    """Microbatches in the order that never waits: each at the first slot that its lanes have free, largest cp first."""
    free = [0] * basis.layout.lanes
    found = []
    for column in sorted(columns, key=lambda one: (-one.cp, one.lane, -one.seconds, one.pack.documents)):
        slot, pack = free[column.lane], column.pack
        free[column.lane : column.lane + column.cp] = [slot + 1] * column.cp
        found.append(Microbatch(slot, column.lane, column.cp, pack.documents, pack.padded, pack.recompute, pack.kind))
    return found
