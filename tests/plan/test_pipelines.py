import math
import random
from dataclasses import replace

import plan_reference as ref
import pytest

from megadcp.plan.baselines import static_best
from megadcp.plan.cost import CostModel
from megadcp.plan.limits import Limits, everywhere, most_cp
from megadcp.plan.memory import MOST_TOKENS, MemoryModel
from megadcp.plan.pipelines import search
from megadcp.plan.presets import draw
from megadcp.plan.simulate import run
from megadcp.plan.step_plan import Recompute, StepPlan, round_bytes, round_seconds
from megadcp.plan.verify import verify

TIGHT = replace(ref.H200, memory_bytes=0.35e9)
DEEP = replace(ref.SMALL, layers=12)


def limits_of(b, max_cp=0, pack_tokens=MOST_TOKENS, choice=None):
    return Limits(most_cp(b, max_cp), pack_tokens, everywhere(b) if choice is None else (choice,), choice is None)


def plan_of(b, lengths, microbatches):
    cost, memory = CostModel(b), MemoryModel(b)
    filled = tuple(replace(one, seconds=round_seconds(cost.seconds(one)), bytes=round_bytes(memory.bytes(one))) for one in microbatches)
    return StepPlan(
        0, b.layout, b.schedule, b.stage_layers, b.model, b.precision, b.unit, b.profile, tuple(lengths), filled, b.lane_speed
    )  # fmt: skip


def searched(b, lengths, limits=None, capacity=131072):
    """The search's microbatches, proved legal and no slower than static-best; and their makespan."""
    limits = limits or limits_of(b)
    static = static_best(b, lengths, min(capacity, limits.pack_tokens), limits.choices, limits.max_cp)
    found = search(b, lengths, limits, static)
    verify(plan_of(b, lengths, found))
    makespan = run(CostModel(b), found).makespan
    assert static is None or round(makespan * 1e9) <= round(static.makespan * 1e9)
    assert all(one.cp <= limits.max_cp for one in found)
    assert all(len(one.documents) == 1 or sum(lengths[k] for k in one.documents) <= limits.pack_tokens for one in found)
    return found, makespan
