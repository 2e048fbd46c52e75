"""static-fixed-any: one cp, one recompute level and one size of packs for the whole run, all three tuned by its first eight steps.

As docs/plan.md section 5 has static-fixed (packs filled in arrival order, dealt round robin, a document of the maximum length must fit), with packs
of at most c, c/2 ... c/64 tokens to choose from; longer documents have packs of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from evidence_cells import LAYOUTS, MAX_LENGTHS, SMOKE, STUDY_MAX, STUDY_TOKENS, Cell, Job, K
from evidence_steps import Answer, Clock, digits, steps_of

from megadcp.plan import presets
from megadcp.plan.baselines import ANY_HALVINGS, FIRST_STEPS, _Dealt, _that_hold, in_arrival_order

KIND = "packs"
SEEDS = 3


def packs_jobs(scope: str) -> Iterator[Job]:
    """32 GPUs, 32k tokens per lane, three seeds; for the smaller scopes a few."""
    if scope == "smoke":
        yield Job(KIND, *LAYOUTS[2], 8, 4 * K, 32 * K, SMOKE[0], 1)
        return
    full = scope == "full"
    for seed in range(1, (SEEDS if full else 1) + 1):
        for layout in LAYOUTS if full else LAYOUTS[1:3]:
            for most in MAX_LENGTHS if full else (STUDY_MAX,):
                for name in presets.PRESETS:
                    yield Job(KIND, *Cell(*layout, 32, STUDY_TOKENS, most, name), seed)


def packs(job: Job, clock: Clock) -> Answer:
    """Seconds of this step, which is the first of the eight, and the size that was chosen."""
    return clock.milliseconds(lambda: _tuned(job))[0]  # type: ignore[no-any-return]


def _tuned(job: Job) -> Answer:
    basis, steps = job.planner().basis, steps_of(job, FIRST_STEPS)
    candidates = []
    for halving in range(ANY_HALVINGS + 1):
        runs = [_Dealt(basis, in_arrival_order(lengths, job.max_length >> halving), lengths) for lengths in steps]
        for choice in _that_hold(basis, job.max_length, 0):
            candidates.append((math.fsum(run.bound(*choice) for run in runs), len(candidates), halving, choice, runs))
    least, found = math.inf, (math.inf, 0)
    for bound, _, halving, choice, runs in sorted(candidates, key=lambda one: one[:2]):
        if bound >= least:
            break
        total = math.fsum(run.makespan(*choice) for run in runs)
        if total < least:
            least, found = total, (runs[0].makespan(*choice), job.max_length >> halving)
    return {"static-fixed-any": digits(found[0]), "pack": found[1]}
