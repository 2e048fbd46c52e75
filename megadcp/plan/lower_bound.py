"""The least makespan that any plan of a step can have (docs/plan.md section 4). A plan below it is a bug of the bound or the simulator.

Most documents fit their group without recompute whatever its size. Two facts make their part quick, and change no value:
- The least work is the same function of tokens and squares for all of them, so only two sums are needed. (Without communication all
  group sizes and kinds that do not split attention do the same work, recompute only adds to it, and all_gather is always legal.)
- Without recompute, seconds grow with the length for every size and kind (attention and what it hides: the larger of two growing
  times), so the shortest and the longest of them have the least and the largest tau.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megadcp.plan.basis import Basis
from megadcp.plan.cost import CostModel, Load
from megadcp.plan.memory import MemoryModel
from megadcp.plan.step_plan import LEVELS

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


def lower_bound(basis: Basis, lengths: Sequence[int]) -> float:
    """Seconds of makespan below which no plan for these documents can be; inf when a document fits on no group.

    Per stage: what any microbatch costs whatever it holds, plus the larger of the documents' least work spread over all lanes and the
    longest document's least time; plus the least time until something arrives from the stages before.
    """
    # Fixed costs stand apart in F_s: the same model without them.
    ideal = CostModel(dataclasses.replace(basis, profile=dataclasses.replace(basis.profile, gemm_half_tokens=0.0, layer_overhead_seconds=0.0)))
    memory = MemoryModel(basis)
    sizes = np.asarray(lengths, dtype=np.float64)
    work = _work(ideal, memory, sizes)
    shortest, longest = _alone(ideal, memory, sizes)
    speeds = basis.lane_speed or (1.0,) * basis.layout.lanes
    fastest, together = max(speeds), math.fsum(speeds)
    bound, fill = 0.0, 0.0
    for stage, fixed in enumerate(fixed_seconds(basis)):
        bound = max(bound, max(fixed / fastest + work[stage] / together, (fixed + longest[stage]) / fastest) + fill)
        fill += (fixed + shortest[stage]) / fastest / basis.layout.virtual_stages
    return bound


def fixed_seconds(basis: Basis) -> list[float]:
    """F_s: what any microbatch costs on each stage whatever it holds: layer overhead, and the ramp of matrix products."""
    cost, profile = CostModel(basis), basis.profile
    fixed = [count * (profile.layer_overhead_seconds + 3 * cost.linear_second * cost.half) for count in basis.stage_layers]
    fixed[-1] += cost.head_second * cost.half
    return fixed


def _sizes(basis: Basis) -> list[int]:
    """All group sizes: powers of two up to the lanes."""
    return [1 << power for power in range(basis.layout.lanes.bit_length())]


def _budgets(memory: MemoryModel, cp: int) -> list[float]:
    return [memory.budget(stage, int(cp > 1)) for stage in range(memory.last + 1)]


def _fits(memory: MemoryModel, lengths: FloatArray, cp: int) -> BoolArray:
    """Which documents fit alone on a group of `cp` lanes without recompute."""
    fits: BoolArray = memory.least_layers_many(lengths / cp, "none", _budgets(memory, cp)) == 0
    return fits


def _work(ideal: CostModel, memory: MemoryModel, lengths: FloatArray) -> list[float]:
    """Sum over documents, for each stage, of the least lane-seconds without fixed costs and cp communication."""
    sizes = _sizes(ideal.basis)
    # Of the groups with more than one lane the largest leaves the most memory for a document.
    plain = _fits(memory, lengths, 1) | _fits(memory, lengths, sizes[-1])
    kept = lengths[plain]
    tokens = _exact_sum(kept)
    work = ideal.stages(ideal.layer(Load(tokens, _exact_sum(kept * kept))), tokens, "none", 0)
    rest = lengths[~plain]
    if not rest.size:
        return work
    least = [np.full(rest.shape, np.inf) for _ in work]
    for cp in sizes:
        local, budgets = rest / cp, _budgets(memory, cp)
        layer = ideal.layer(Load(rest, rest * rest, cp, "all_gather"))._replace(exposed=0.0)
        for level in LEVELS[1:]:
            count = memory.least_layers_many(local, level, budgets)
            for stage, seconds in enumerate(ideal.stages(layer, local, level, count)):
                np.copyto(least[stage], np.minimum(least[stage], cp * seconds), where=count >= 0)
    return [already + math.fsum(one.tolist()) for already, one in zip(work, least, strict=True)]


def _exact_sum(values: FloatArray) -> float:
    """The sum of whole numbers, in the same bits whatever the order of adding: below 2^53 every partial sum is exact."""
    total = float(values.sum())
    return total if total < 2.0**53 else math.fsum(values.tolist())


def _alone(ideal: CostModel, memory: MemoryModel, lengths: FloatArray) -> tuple[list[float], list[float]]:
    """For each stage the least, and the largest, over the documents of their least seconds without fixed costs.

    A document's least is over P, level with its least layer count, and kind of communication, among those with which it alone fits.
    """
    sizes, stages = _sizes(ideal.basis), range(memory.last + 1)
    plain = _fits(memory, lengths, 1)
    if len(sizes) > 1:
        plain &= _fits(memory, lengths, 2)  # then it fits on any larger group too
    kept, rest = lengths[plain], np.unique(lengths[~plain])
    if kept.size:
        rest = np.concatenate(([kept.min(), kept.max()], rest))
    least = [np.full(rest.shape, np.inf) for _ in stages]
    for cp in sizes:
        local, budgets, inside = rest / cp, _budgets(memory, cp), ideal.in_node(0, cp)
        layers = [ideal.layer(Load(rest, rest * rest, cp, kind, inside)) for kind in ideal.legal_kinds(cp)]
        for level in LEVELS:
            count = memory.least_layers_many(local, level, budgets)
            for layer in layers:
                for stage, seconds in enumerate(ideal.stages(layer, local, level, count)):
                    np.copyto(least[stage], np.minimum(least[stage], seconds), where=count >= 0)
            if level == "none" and bool((count == 0).all()):
                break  # recompute only adds to it
    return [float(one.min()) for one in least], [float(one.max()) for one in least]
