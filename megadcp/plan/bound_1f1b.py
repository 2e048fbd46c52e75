"""A lower bound of a step under 1F1B that knows of fill and drain: docs/plan.md section 4. Larger than lower_bound on short pipelines.

p stages, R lanes, N documents; stage s has n_s layers and lets w_s = p-1-s forwards go ahead. A microbatch lasts T_s = F_s + n_s x (+ h
on the last stage): F_s what any microbatch costs, x its work per layer (cp communication and what recompute costs above its share of
the largest stage left out), h the LM head's; h <= kappa x, because a token that passes the head passes the layers too.

1. A lane. Its list is the dense list without its absent slots. Number the M microbatches that it has. Whatever is absent, on each stage
   forwards and backwards go in order, F(j) before B(j), and B(j) before F(k) for k > j + w_s; across stages F(j, s-1) before F(j, s) and
   B(j, s+1) before B(j, s); and a stage does one action at a time. (That F(j + w_s) goes before B(j) holds in the dense list only, and is
   not used: gaps may turn it round.) So where action X comes before every action of a set, X included, and all of them before Y, then
   begin(Y) >= begin(X) + their durations. These inequalities, linear in x, h and the times, make a linear program V_M(sum x, sum h).
   It is that of the dense list to 0.5% where stages are even, and up to 5% below it where an inner stage is the largest.
2. Any number of microbatches. Microbatches of no duration in front of the others break none of the inequalities. So the program for M2
   microbatches of which M2 - M1 have F = 0 is a bound for all M from M1 to M2: whole ranges are excluded at once, and all M from where
   M F_s and the work alone exceed the best.
3. The average lane. Documents bring at least work X and head H in lane-seconds. Let (a, b) be any non-negative weights. Some lane has
   a sum x + b sum h >= (a X + b H) / R, so the least of V_M under this one constraint, over M from 1 to N, is a bound. The weights are
   the dual values of the two constraints sum x = X / R, sum h = H / R at the best M, where nothing is lost.
4. Lanes of different speed. A lane at speed u that ends at time C does what one at speed 1 does by u C. Work done per time only grows
   with time (fixed costs weigh less), so no lane does more per speed than the fastest: the average becomes X max(u) / sum(u), the bound
   V / max(u).
5. The longest trip. A document passes all stages forward and backward, so the longest one's least seconds on all stages together are a bound.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from megadcp.config.check import UserError
from megadcp.plan.basis import Basis
from megadcp.plan.cost import BACKWARD_ATTENTION, BACKWARD_LINEAR, FORWARD_SHARE, CostModel
from megadcp.plan.lower_bound import _alone, _work, fixed_seconds, lower_bound
from megadcp.plan.memory import MemoryModel

CLOSE = 1e-3  # a range of M is not split further when its bound is this near to the best M's
MOST_MICROBATCHES = 128  # of one linear program; above, the simple bound of a stage's own work
EFFORT = 4000  # microbatches times stages over the linear programs that narrow M down: about a second
MARGIN = 1e-6  # what the solver's tolerances may add
LAST_BITS = 1e-12  # sums in another order

Terms = list[tuple[int, float]]  # (variable, coefficient)


def lower_bound_1f1b(basis: Basis, lengths: Sequence[int]) -> float:
    """Seconds of makespan below which no 1F1B plan for these documents can be; never below lower_bound, inf where that is.

    Without pipelines it is lower_bound. Raises UserError for interleaved schedules, and when scipy is missing.
    """
    if basis.layout.virtual_stages > 1:
        raise UserError(
            f"the 1F1B bound was asked for with virtual_stages={basis.layout.virtual_stages}, but interleaved schedules can go below it; "
            "use the universal bound (lower_bound), or virtual_stages=1"
        )
    simple = lower_bound(basis, lengths)
    if basis.layout.pp == 1 or math.isinf(simple):
        return simple
    ideal = CostModel(dataclasses.replace(basis, profile=dataclasses.replace(basis.profile, gemm_half_tokens=0.0, layer_overhead_seconds=0.0)))
    memory, fastest = MemoryModel(basis), max(basis.lane_speed or (1.0,))
    longest = _alone(ideal, memory, np.array([max(lengths)], dtype=np.float64))[1]
    trip = math.fsum(longest) + math.fsum(fixed_seconds(basis))
    lane = _lane(basis, lengths, _work(ideal, memory, np.array(lengths, dtype=np.float64)), simple * fastest)
    bound = max(simple, trip / fastest * (1 - LAST_BITS))
    try:
        return max(bound, _least_over_counts(lane, len(lengths)) * simple * (1 - MARGIN))
    except _Unsolved:
        return bound


class _Lane(NamedTuple):
    """The average lane, in units of `unit` seconds (the universal bound), so that the makespan is about 1."""

    layers: tuple[int, ...]
    fixed: tuple[float, ...]  # F_s
    kappa: float
    work: float  # X: per layer, of the average lane
    head: float  # H

    def stage_work(self, weights: tuple[float, float]) -> list[float]:
        """Least work of each stage, F_s apart, that the weighted constraint allows."""
        a, b = weights
        target = a * self.work + b * self.head
        all_heads = target / (a + b * self.kappa)  # sum of x when every microbatch has all the head it can
        least = [count * all_heads for count in self.layers]
        no_heads = self.layers[-1] * target / a if a > 0 else math.inf
        least[-1] = min(least[-1] + self.kappa * all_heads, no_heads)
        return least


def _lane(basis: Basis, lengths: Sequence[int], work: Sequence[float], unit: float) -> _Lane:
    """The average lane of documents whose least lane-seconds on each stage, fixed costs left out, are `work` together."""
    cost, layers = CostModel(basis), basis.stage_layers
    stage = max(range(basis.layout.pp), key=lambda one: layers[one])
    head = sum(lengths) * cost.head_second
    total = work[stage] - (head if stage == basis.layout.pp - 1 else 0.0)
    speeds = basis.lane_speed or (1.0,) * basis.layout.lanes
    share = max(speeds) / math.fsum(speeds)
    # the least work of a token: its matrix products, tp and the part of attention that does not grow with the document
    token = (1 + BACKWARD_LINEAR) * cost.linear_second + cost.tp_second
    token += (1 + BACKWARD_ATTENTION) * cost.attention_second * basis.profile.attention_half_length
    fixed = tuple(value / unit for value in fixed_seconds(basis))
    return _Lane(layers, fixed, cost.head_second / token, total / layers[stage] * share / unit, head * share / unit)


# ---------------------------------------------------------------------------------------------- over all numbers of microbatches
def _least_over_counts(lane: _Lane, documents: int) -> float:
    """A lower bound of the least V_M over M = 1 .. documents, in units: within CLOSE of it unless that takes more than EFFORT."""
    count, value, weights = _good_count(lane, documents)
    base = lane.stage_work(weights)

    def simple(microbatches: int) -> float:
        return max(microbatches * fixed + work for fixed, work in zip(lane.fixed, base, strict=True))

    most = min(documents, MOST_MICROBATCHES)
    while most > count and simple(most) >= value:
        most -= 1  # from most + 1 on the stage's own work alone is too much
    effort = 0

    def bounded(low: int, high: int) -> tuple[float, int, int]:
        nonlocal effort
        effort += high * len(lane.layers)
        return max(_solve(lane, high, high - low, weights)[0], simple(low)), low, high

    waiting = [bounded(low, high) for low, high in ((1, count - 1), (count, count), (count + 1, most)) if low <= high]
    if most < documents:
        waiting.append((simple(most + 1), most + 1, documents))
    heapq.heapify(waiting)
    while effort < EFFORT:
        bound, low, high = waiting[0]
        if low == high or high > most or bound >= (1 - CLOSE) * value:
            break
        middle = (low + high) // 2
        heapq.heapreplace(waiting, bounded(low, middle))
        heapq.heappush(waiting, bounded(middle + 1, high))
    return waiting[0][0]


def _good_count(lane: _Lane, documents: int) -> tuple[int, float, tuple[float, float]]:
    """A number of microbatches near the best, the program's value there, and the dual values of its work and head.

    Any number gives a valid bound; the better it is, the tighter.
    """
    most = min(documents, MOST_MICROBATCHES)
    best = 1, *_solve(lane, 1)
    while 2 * best[0] <= most:
        twice = 2 * best[0], *_solve(lane, 2 * best[0])
        if twice[1] >= best[1]:
            break
        best = twice
    for count in (best[0] * 3 // 4, best[0] * 3 // 2):
        if 1 <= count <= most and count != best[0]:
            best = min(best, (count, *_solve(lane, count)), key=lambda found: found[1])
    return best


# ------------------------------------------------------------------------------------------------------------ the linear program
class _Unsolved(RuntimeError):
    """The solver gave up on a linear program."""


class _Program:
    """Least `goal` variable under linear inequalities, solved by HiGHS."""

    def __init__(self) -> None:
        self.names: dict[tuple[str, int, int], int] = {}
        self.rows: list[Terms] = []
        self.right: list[float] = []
        self.equal: list[Terms] = []
        self.equal_right: list[float] = []

    def variable(self, name: str, microbatch: int = 0, stage: int = 0) -> int:
        """Number of a variable."""
        return self.names.setdefault((name, microbatch, stage), len(self.names))

    def at_least(self, terms: Terms, right: float = 0.0) -> int:
        """The sum of terms is at least `right`. Returns the number of the inequality."""
        self.rows.append(terms)
        self.right.append(right)
        return len(self.rows) - 1

    def exactly(self, terms: Terms, right: float) -> None:
        """The sum of terms is `right`."""
        self.equal.append(terms)
        self.equal_right.append(right)

    def solve(self, goal: int, unbounded: str) -> tuple[float, Any]:
        """Least value of `goal`, and how much it grows with the right side of each inequality. Variables named `unbounded` may be negative."""
        try:
            from scipy.optimize import linprog
        except ImportError:
            raise UserError("the 1F1B bound needs scipy, which is not installed; pip install scipy") from None
        costs = np.zeros(len(self.names))
        costs[goal] = 1.0
        bounds = [(None if name.startswith(unbounded) else 0.0, None) for name, _, _ in self.names]
        rows, right, equal, equal_right = -self._matrix(self.rows), -np.array(self.right), self._matrix(self.equal), np.array(self.equal_right)
        for method in ("highs-ipm", "highs-ds"):  # the first is quicker, and sometimes gives up
            result = linprog(costs, rows, right, equal, equal_right, bounds, method=method)
            if result.status == 0:
                return float(result.fun), -result.ineqlin.marginals
        raise _Unsolved(result.message)

    def _matrix(self, rows: Sequence[Terms]) -> Any:
        from scipy.sparse import csr_matrix

        counts = np.cumsum([0, *map(len, rows)])
        columns = np.array([column for row in rows for column, _ in row], dtype=np.int32)
        values = np.array([value for row in rows for _, value in row])
        return csr_matrix((values, columns, counts), shape=(len(rows), len(self.names)))


def _solve(lane: _Lane, count: int, free: int = 0, weights: tuple[float, float] | None = None) -> tuple[float, tuple[float, float]]:
    """V of `count` microbatches of which the first `free` have no fixed cost; its growth with the lane's work and head.

    With weights, only the weighted sum of work and head is given.
    """
    program = _Program()
    work = [program.variable("work", one) for one in range(count)]
    head = [program.variable("head", one) for one in range(count)]
    for stage in range(len(lane.layers)):
        _stage(program, lane, stage, count, free)
    end = program.variable("end")
    program.at_least([(end, 1.0), (program.variable("B", count - 1), -1.0), *_duration("B", count - 1, 0, -1.0, program)])
    for one in range(count):
        program.at_least([(work[one], lane.kappa), (head[one], -1.0)])
    if weights is None:
        first = program.at_least([(one, 1.0) for one in work], lane.work)
        second = program.at_least([(one, 1.0) for one in head], lane.head)
    else:
        first = second = program.at_least(
            [(one, weights[0]) for one in work] + [(one, weights[1]) for one in head], weights[0] * lane.work + weights[1] * lane.head
        )
    value, growth = program.solve(end, unbounded="after")
    return value, (max(0.0, float(growth[first])), max(0.0, float(growth[second])))


SHARES = {"F": FORWARD_SHARE, "B": 1 - FORWARD_SHARE}


def _sum(kind: str, microbatch: int, stage: int, sign: float, program: _Program) -> Terms:
    """Seconds of all actions of a kind on a stage up to this microbatch's."""
    return [(program.variable("sum", microbatch, stage), sign * SHARES[kind])] if microbatch >= 0 else []


def _duration(kind: str, microbatch: int, stage: int, sign: float, program: _Program) -> Terms:
    return _sum(kind, microbatch, stage, sign, program) + _sum(kind, microbatch - 1, stage, -sign, program)


def _stage(program: _Program, lane: _Lane, stage: int, count: int, free: int) -> None:
    """Inequalities of one stage. Variables: F, B: begins of actions; sum: seconds of all microbatches up to one, both directions.

    Sets between two actions. From B(i): all backwards from i on, all forwards from i + w + 1 on. From F(i): everything from i on.
    Up to B(k): everything up to k. Up to F(k): forwards up to k, backwards up to k - w - 1. begin(X) less the seconds of all that needn't
    come after X is X's `after`: afterB(k), afterF(k) are the largest over i <= k.
    """
    last = len(lane.layers) - 1
    ahead = last - stage

    def begin(kind: str, one: int, sign: float = 1.0, at: int = stage) -> Terms:
        return [(program.variable(kind, one, at), sign)]

    def total(kind: str, one: int, sign: float) -> Terms:
        return _sum(kind, min(one, count - 1), stage, sign, program)

    for one in range(count):
        terms = [(program.variable("sum", one, stage), 1.0), (program.variable("work", one), -float(lane.layers[stage]))]
        terms += [(program.variable("sum", one - 1, stage), -1.0)] if one else []
        terms += [(program.variable("head", one), -1.0)] if stage == last else []
        program.exactly(terms, lane.fixed[stage] if one >= free else 0.0)
    for one in range(count):
        if stage > 0:
            program.at_least(begin("F", one) + begin("F", one, -1.0, stage - 1) + _duration("F", one, stage - 1, -1.0, program))
        before = ("B", stage + 1) if stage < last else ("F", stage)
        program.at_least(begin("B", one) + begin(before[0], one, -1.0, before[1]) + _duration(before[0], one, before[1], -1.0, program))
        after = {"F": program.variable("afterF", one, stage), "B": program.variable("afterB", one, stage)}
        program.at_least([(after["F"], 1.0), *begin("F", one, -1.0), *total("F", one - 1, 1.0), *total("B", one - 1, 1.0)])
        program.at_least([(after["B"], 1.0), *begin("B", one, -1.0), *total("F", one + ahead, 1.0), *total("B", one - 1, 1.0)])
        program.at_least(begin("B", one) + total("F", one, -1.0) + total("B", one - 1, -1.0) + [(after["F"], -1.0)])
        if one:
            for kind in ("F", "B"):
                program.at_least(begin(kind, one) + begin(kind, one - 1, -1.0) + _duration(kind, one - 1, stage, -1.0, program))
                program.at_least([(after[kind], 1.0), (program.variable("after" + kind, one - 1, stage), -1.0)])
        if one >= ahead:
            since = program.variable("afterB", one - ahead, stage)
            program.at_least(begin("B", one) + total("F", one, -1.0) + total("B", one - 1, -1.0) + [(since, -1.0)])
        if one > ahead:
            since = program.variable("afterB", one - ahead - 1, stage)
            program.at_least(begin("F", one) + total("F", one - 1, -1.0) + total("B", one - ahead - 1, -1.0) + [(since, -1.0)])
