"""What a plan says in figures: mixes, whole step, throughput, MFU, memory, idle time. report.py makes lines of them.

Model FLOPs, that MFU is stated in: 2 per weight and token forward (norms, embedding and rope count nothing), causal attention
2 d H l^2 a document and layer forward, backward twice the forward; of real tokens, without recompute (the same as nn/flops.py counts).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megadcp.plan.basis import Basis
from megadcp.plan.simulate import Timeline, overhead_seconds, simulate
from megadcp.plan.step_plan import ModelShape, StepPlan


class Part(NamedTuple):
    """What one cp size, or one recompute value, has of a step."""

    microbatches: int = 0
    documents: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Figures:
    """One step. Seconds: `makespan` alone, `whole` with gradient reduction and optimizer. idle: share of all lanes' and stages' time."""

    step: int
    documents: int
    tokens: int
    padded: int
    longest: int
    alike: bool  # all documents are equally long
    cp: dict[int, Part]
    recompute: dict[tuple[str, int], Part]
    per_lane: tuple[int, ...]
    makespan: float
    whole: float
    bound: float
    static: float
    peak_bytes: tuple[int, ...]
    idle: float
    flops: int


def model_flops(model: ModelShape, lengths: Sequence[int]) -> int:
    """Forward and backward over documents of these real lengths."""
    tokens, squares = sum(lengths), sum([length * length for length in lengths])
    h, d, heads = model.hidden, model.head_dim, model.heads
    weights = h * d * (2 * heads + 2 * model.kv_heads) + (3 if model.gated else 2) * h * model.ffn
    return 3 * (model.layers * (2 * tokens * weights + 2 * d * heads * squares) + 2 * tokens * h * model.vocab)


def figures(plan: StepPlan, timeline: Timeline | None = None) -> Figures:
    """The figures of a legal plan; `timeline` where it is known already."""
    timeline = timeline or simulate(plan)
    layout, lengths = plan.layout, plan.lengths
    cp: dict[int, Part] = {}
    recompute: dict[tuple[str, int], Part] = {}
    per_lane = [0] * layout.lanes
    for one in plan.microbatches:
        tokens = sum([lengths[document] for document in one.documents])
        _add(cp, one.cp, len(one.documents), tokens)
        _add(recompute, (one.recompute.level, one.recompute.layers), len(one.documents), tokens)
        for lane in range(one.lane, one.lane + one.cp):
            per_lane[lane] += 1
    busy = math.fsum((event.end - event.begin) * plan.microbatches[event.microbatch].cp for event in timeline.events)
    return Figures(
        step=plan.step,
        documents=len(lengths),
        tokens=sum(lengths),
        padded=sum(one.tokens for one in plan.microbatches),
        longest=max(lengths),
        alike=min(lengths) == max(lengths),
        cp=dict(sorted(cp.items())),
        recompute=dict(sorted(recompute.items(), key=lambda item: -item[1].tokens)),
        per_lane=tuple(per_lane),
        makespan=plan.predicted.seconds,
        whole=plan.predicted.seconds + overhead_seconds(Basis.of(plan)),
        bound=plan.predicted.lower_bound_seconds,
        static=plan.predicted.static_seconds,
        peak_bytes=plan.predicted.peak_bytes,
        idle=max(0.0, 1 - busy / (layout.lanes * layout.pp * timeline.makespan)),
        flops=model_flops(plan.model, lengths),
    )


def _add(parts: dict[Any, Part], key: object, documents: int, tokens: int) -> None:
    so_far = parts.get(key, Part())
    parts[key] = Part(so_far.microbatches + 1, so_far.documents + documents, so_far.tokens + tokens)


def ranks(basis: Basis) -> int:
    """Devices of the whole job."""
    return basis.layout.lanes * basis.layout.tp * basis.layout.pp


def tokens_per_second(steps: Sequence[Figures]) -> float:
    """Real tokens over whole steps, of all devices together."""
    return sum(one.tokens for one in steps) / math.fsum(one.whole for one in steps)


def flops_per_device(basis: Basis, steps: Sequence[Figures]) -> float:
    """Model FLOP/s of one device; MFU is this over its peak."""
    return sum(one.flops for one in steps) / math.fsum(one.whole for one in steps) / ranks(basis)
