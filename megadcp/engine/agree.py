"""Before a step runs: all ranks hold the same plan, and know how many targets the global batch has. One small collective.

Every rank derives its plan by itself, so plans can differ: another code version, another index file, a broken memory. Ranks that run
different plans hang or, worse, don't.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from megadcp.config.check import UserError
from megadcp.mesh.groups import GroupPool
from megadcp.parallel.collectives import all_gather
from megadcp.plan.step_plan import StepPlan, plan_hash

WORDS = 4  # a sha256 in 64-bit integers


class PlanMismatch(UserError):
    """Ranks are about to run different plans; nothing has run yet. The same on all ranks."""


class Row(NamedTuple):
    """What one rank tells the others. targets: of its own packs; words: its plan's hash."""

    refused: int
    step: int
    targets: int
    words: tuple[int, ...]


def agree(plan: StepPlan, targets: int, problem: Exception | None, pool: GroupPool | None) -> int:
    """Targets of the global batch. `problem` is what this rank has against its own plan or packs: then no rank runs it.

    Raises:
        PlanMismatch: the ranks' plans differ, or some of them refuse theirs.
        Exception: `problem` itself, on the rank that has it.
    """
    if pool is None or pool.world.size == 1:
        if problem is not None:
            raise problem
        return targets
    digest = bytes.fromhex(plan_hash(plan))
    words = tuple(int.from_bytes(digest[at : at + 8], "big", signed=True) for at in range(0, 8 * WORDS, 8))
    # On the host, over the group's gloo: the device need not be waited for, and works on what the last step has left to do.
    own = torch.tensor([[problem is not None, plan.step, targets, *words]], dtype=torch.int64)
    rows = [Row(row[0], row[1], row[2], tuple(row[3:])) for row in all_gather(own, pool.world).tolist()]
    if problem is not None:
        raise problem
    check_rows(rows)
    mesh = pool.mesh
    return sum(rows[mesh.rank(0, lane, 0)].targets for lane in range(mesh.lanes))  # every rank of a lane counts the lane's packs


def check_rows(rows: Sequence[Row]) -> None:
    """Raise PlanMismatch unless all ranks hold the same plan, naming those that differ from most others."""
    refused = [rank for rank, row in enumerate(rows) if row.refused]
    if refused:
        raise PlanMismatch(
            f"{_ranks(refused)} refused the plan of step {rows[refused[0]].step}; nothing was run. What is wrong with it is said there"
        )
    counts = Counter((row.step, row.words) for row in rows)
    if len(counts) == 1:
        return
    common = max(counts, key=lambda one: (counts[one], one == (rows[0].step, rows[0].words)))
    lines = []
    for other in counts:
        if other != common:
            members = [rank for rank, row in enumerate(rows) if (row.step, row.words) == other]
            lines.append(f"{_ranks(members)} {'has' if len(members) == 1 else 'have'} step {other[0]}, hash {_hex(other[1])}")
    raise PlanMismatch(
        f"the ranks' plans differ, nothing was run: {'; '.join(lines)}; the other {counts[common]} have step {common[0]}, hash {_hex(common[1])}. "
        "Each rank makes the plan by itself: code, settings and index files must be the same everywhere"
    )


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", .." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _hex(words: Sequence[int]) -> str:
    return f"{words[0] & (1 << 64) - 1:016x}"[:12]
