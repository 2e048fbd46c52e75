"""The least makespan that any plan of a step can have (docs/plan.md section 4). A plan below it is a bug of the bound or the simulator."""

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


def lower_bound(basis: Basis, lengths: Sequence[int]) -> float:
    """Seconds of makespan below which no plan for these documents can be; inf when a document fits on no group.

    Per stage: what any microbatch costs whatever it holds, plus the larger of the documents' least work spread over all lanes and the
    longest document's least time; plus the least time until something arrives from the stages before.
    """
    counts: dict[int, int] = {}
    for length in lengths:
        counts[length] = counts.get(length, 0) + 1
    distinct = sorted(counts)
    work, alone = _least(basis, np.array(distinct, dtype=np.float64))
    speeds = basis.lane_speed or (1.0,) * basis.layout.lanes
    fastest, together = max(speeds), math.fsum(speeds)
    bound, fill = 0.0, 0.0
    for stage, fixed in enumerate(fixed_seconds(basis)):
        total = math.fsum(value * counts[length] for value, length in zip(work[stage].tolist(), distinct, strict=True))
        taus = ((fixed + alone[stage]) / fastest).tolist()
        bound = max(bound, max(fixed / fastest + total / together, max(taus)) + fill)
        fill += min(taus) / basis.layout.virtual_stages
    return bound


def fixed_seconds(basis: Basis) -> list[float]:
    """F_s: what any microbatch costs on each stage whatever it holds: layer overhead, and the ramp of matrix products."""
    cost, profile = CostModel(basis), basis.profile
    fixed = [count * (profile.layer_overhead_seconds + 3 * cost.linear_second * cost.half) for count in basis.stage_layers]
    fixed[-1] += cost.head_second * cost.half
    return fixed


def _least(basis: Basis, lengths: FloatArray) -> tuple[list[FloatArray], list[FloatArray]]:
    """For each stage and document, without fixed costs: least lane-seconds (no cp communication), and least seconds (with it).

    The least is over P, level with its least layer count, and kind of communication, among those with which the document alone fits.
    """
    # Fixed costs stand apart in F_s: the same model without them.
    ideal = CostModel(dataclasses.replace(basis, profile=dataclasses.replace(basis.profile, gemm_half_tokens=0.0, layer_overhead_seconds=0.0)))
    memory = MemoryModel(basis)
    stages = basis.layout.pp
    work = [np.full(lengths.shape, np.inf) for _ in range(stages)]
    alone = [np.full(lengths.shape, np.inf) for _ in range(stages)]
    cp = 1
    while cp <= basis.layout.lanes:
        local = lengths / cp
        budgets = [memory.budget(stage, int(cp > 1)) for stage in range(stages)]
        inside = ideal.in_node(0, cp)
        layers = {kind: ideal.layer(Load(lengths, lengths * lengths, cp, kind, inside)) for kind in ideal.legal_kinds(cp)}
        for level in LEVELS:
            count = memory.least_layers_many(local, level, budgets)
            for layer in layers.values():
                silent = ideal.stages(layer._replace(exposed=0.0), local, level, count)
                heard = ideal.stages(layer, local, level, count)
                for stage in range(stages):
                    work[stage] = np.where(count < 0, work[stage], np.minimum(work[stage], cp * silent[stage]))
                    alone[stage] = np.where(count < 0, alone[stage], np.minimum(alone[stage], heard[stage]))
        cp *= 2
    return work, alone
