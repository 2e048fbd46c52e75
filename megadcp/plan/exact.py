"""The best plan there is, for small steps: the oracle that tests hold the planner against.

Without pipelines a mixed-integer program (exact_lanes.py: some 8 documents on 8 lanes in seconds), with them everything is tried
(exact_pipelines.py: 4 documents on 2 lanes). Within a microbatch only the document that is last matters, which is the one that padding
grows: each is tried. Padding itself is as little as invariant 4 allows (packing.pad).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megadcp.config.check import UserError
from megadcp.plan.basis import Basis
from megadcp.plan.cost import CostModel
from megadcp.plan.exact_lanes import assign
from megadcp.plan.exact_pipelines import search
from megadcp.plan.limits import most_cp
from megadcp.plan.memory import MemoryModel
from megadcp.plan.simulate import run
from megadcp.plan.step_plan import Microbatch, round_bytes, round_seconds


@dataclass(frozen=True)
class Exact:
    """The best plan found for a step. `lower`: seconds that no plan can be below; where proved it is the makespan, up to NEAR."""

    makespan: float
    microbatches: tuple[Microbatch, ...]
    proved: bool
    lower: float


def solve(basis: Basis, lengths: Sequence[int], max_cp: int = 0, seconds_limit: float = 120.0) -> Exact:
    """A plan of least makespan, with cp at most `max_cp` (0: all lanes). It keeps all invariants.

    seconds_limit: without pipelines the search stops then with the best plan so far (proved False). Raises UserError when no plan exists,
    when the step is too large to be solved, for interleaved schedules, and when scipy is missing.
    """
    if not lengths or min(lengths) < 1:
        raise UserError("an exact plan was asked for no documents, or for one of length below 1; every document needs at least 1 token")
    if basis.layout.virtual_stages > 1:
        raise UserError(f"no exact plans for interleaved schedules (virtual_stages={basis.layout.virtual_stages}); legal here: virtual_stages=1")
    sizes = [1 << power for power in range(most_cp(basis, max_cp).bit_length())]
    if basis.layout.pp > 1:
        microbatches = search(basis, lengths, sizes)
        makespan = lower = run(CostModel(basis), microbatches).makespan
        proved = True
    else:
        microbatches, lower, proved = assign(basis, lengths, sizes, seconds_limit)
        makespan = run(CostModel(basis), microbatches).makespan
    cost, memory = CostModel(basis), MemoryModel(basis)
    scored = [replace(one, seconds=round_seconds(cost.seconds(one)), bytes=round_bytes(memory.bytes(one))) for one in microbatches]
    return Exact(makespan, tuple(scored), proved, min(lower, makespan))
