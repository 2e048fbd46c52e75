"""Coefficients of the cost model from measured seconds: pure functions, used by tools/calibrate.py and by the refit during a run.

A microbatch's predicted seconds are a sum of parts, each in proportion to the inverse of one rate (docs/plan.md section 3). So coefficients
follow from linear least squares with bounds, in RELATIVE error: sum over samples of (predicted / measured - 1)^2. With two to five unknowns
the bounded problem is solved exactly by trying which of them are at a bound.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megadcp.config.schema import GemmFlops, HardwareConfig
from megadcp.plan.cost import BACKWARD_ATTENTION, BACKWARD_LINEAR, SELECTIVE_SHARE, CostModel
from megadcp.plan.step_plan import Microbatch

Floats = npt.NDArray[np.float64]

MOST_UNKNOWNS = 6  # 3^6 choices of bounds
RIDGE = 1e-12  # of the mean diagonal: decides directions that no sample tells anything about
WITHIN = 1e-9  # of a bound: rounding


# ------------------------------------------------------------------------------------------------------------ parts of seconds
class Parts(NamedTuple):
    """Seconds of one microbatch on one stage, by the coefficient that scales them; `other` is communication."""

    linear: float
    attention: float
    overhead: float
    other: float = 0.0

    @property
    def total(self) -> float:
        """The stage's predicted seconds."""
        return sum(self)


def parts_of(cost: CostModel, microbatch: Microbatch, stage: int = 0) -> Parts:
    """What the cost model predicts for a stage, forward + backward and what is recomputed, at lane speed 1."""
    load = cost.load_of(microbatch)
    layer, local, recompute = cost.layer(load), load.tokens / load.cp, microbatch.recompute
    layers = cost.basis.stage_layers[stage]
    again = {"none": 0.0, "selective": SELECTIVE_SHARE * layer.linear, "mlp": layer.mlp, "full": layer.linear}[recompute.level]
    linear = layers * (1 + BACKWARD_LINEAR) * layer.linear + recompute.layers * again
    if stage == cost.basis.layout.pp - 1:
        linear += cost.head_second * (local + cost.half)
    attention = layers * (1 + BACKWARD_ATTENTION) * layer.attention
    if recompute.level == "full":
        attention += recompute.layers * layer.attention
    overhead = layers * cost.basis.profile.layer_overhead_seconds
    other = layers * (layer.exposed + layer.tp)
    if recompute.level == "full":
        other += recompute.layers * 0.5 * layer.exposed
    return Parts(linear, attention, overhead, other)


# --------------------------------------------------------------------------------------------------------------- least squares
class Moments(NamedTuple):
    """A [k, k], b [k] and c of the mean of (predicted / measured - 1)^2 = x A x - 2 b x + c. Those of several sets of samples may be added."""

    matrix: Floats
    vector: Floats
    constant: float

    def error(self, x: Floats) -> float:
        """Root of the mean squared relative error with coefficients x [k]."""
        return math.sqrt(max(0.0, float(x @ self.matrix @ x - 2 * self.vector @ x) + self.constant))


def relative_moments(terms: Floats, seconds: Floats, rest: Floats | float = 0.0) -> Moments:
    """The moments of predicted = terms @ x + rest. terms: [n, k]; seconds: [n], positive; rest: [n], what the unknowns don't scale."""
    rows = terms / seconds[:, None]
    aim = 1.0 - np.broadcast_to(rest, seconds.shape) / seconds
    return Moments(rows.T @ rows / len(seconds), rows.T @ aim / len(seconds), float(aim @ aim) / len(seconds))


def solve(matrix: Floats, vector: Floats, lower: Sequence[float], upper: Sequence[float]) -> Floats:
    """The x within [lower, upper] of least x A x - 2 b x, A positive semidefinite [k, k], k at most MOST_UNKNOWNS.

    An unknown that no sample has a term for is as near to 0 as its bounds allow. The same input gives the same bits everywhere where the
    library's small solver does.
    """
    size = len(vector)
    if size > MOST_UNKNOWNS:
        raise ValueError(f"{size} unknowns: this method is for at most {MOST_UNKNOWNS}")
    low, high = np.asarray(lower, dtype=np.float64), np.asarray(upper, dtype=np.float64)
    scale = np.sqrt(np.where(np.diag(matrix) > 0, np.diag(matrix), 1.0))  # columns of very different size
    scaled = matrix / np.outer(scale, scale) + RIDGE * np.eye(size)
    aim, low, high = vector / scale, low * scale, high * scale
    best, least = np.clip(np.zeros(size), low, high), np.inf
    for choice in itertools.product((0, 1, 2), repeat=size):  # free, at the lower, at the upper bound
        state = np.array(choice)
        fixed = np.where(state == 1, low, high)
        free = state == 0
        if not np.isfinite(fixed[~free]).all():
            continue
        x = np.where(free, 0.0, fixed)
        if free.any():
            x[free] = np.linalg.solve(scaled[np.ix_(free, free)], aim[free] - scaled[np.ix_(free, ~free)] @ x[~free])
        slack = WITHIN * np.maximum(1.0, np.abs(x))
        if (x < low - slack).any() or (x > high + slack).any():
            continue
        value = float(x @ scaled @ x - 2 * aim @ x)
        if value < least - WITHIN * abs(value):
            best, least = np.clip(x, low, high), value
    return np.clip(best / scale, lower, upper)  # exactly within


def fit(terms: Floats, seconds: Floats, rest: Floats | float = 0.0, lower: Sequence[float] = (), upper: Sequence[float] = ()) -> Floats:
    """Coefficients x [k] of seconds ~ terms [n, k] @ x + rest, least relative squares; bounds default to 0 and infinity."""
    size = terms.shape[1]
    if len(seconds) < 1 or not (seconds > 0).all():
        raise ValueError("measured seconds must be positive, and at least one")
    matrix, vector, _ = relative_moments(terms, seconds, rest)
    return solve(matrix, vector, lower or [0.0] * size, upper or [np.inf] * size)


# ------------------------------------------------------------------------------------------------------------------ what is told
@dataclass(frozen=True)
class FitError:
    """How far predictions are from what they were compared with: |predicted / measured - 1| of the samples."""

    median: float
    worst: float
    samples: int
    bias: float = 0.0  # median of predicted / measured - 1

    @classmethod
    def of(cls, predicted: Floats, seconds: Floats) -> FitError:
        """Compare two arrays [n]."""
        ratio = predicted / seconds - 1
        return cls(float(np.median(np.abs(ratio))), float(np.max(np.abs(ratio))), len(ratio), float(np.median(ratio)))

    def __str__(self) -> str:
        return f"median error {self.median:.1%}, worst {self.worst:.1%}, {self.samples} samples"


@dataclass(frozen=True)
class Saturating:
    """A rate that small sizes don't reach: work per second = rate * size / (size + half). `among`: the error in proportion to what runs beside."""

    rate: float
    half: float
    error: FitError
    among: FitError


def fit_saturating(work: Floats, sizes: Floats, seconds: Floats, beside: Floats | float = 0.0) -> Saturating:
    """Rate and half of seconds = work / rate * (1 + half / size): all arrays [n]; work in FLOPs, sizes in tokens.

    `beside`: seconds of other work that always comes with it. What counts then are errors in proportion to both together: those of a sample
    that is a small part of the whole matter less.
    """
    terms = np.stack([work, work / sizes], axis=1)
    least = 1e-6 * float(np.min(seconds / work))  # a rate is finite
    x = fit(terms, seconds + beside, beside, [least, 0.0])
    predicted = terms @ x
    return Saturating(1 / float(x[0]), float(x[1] / x[0]), FitError.of(predicted, seconds), FitError.of(predicted + beside, seconds + beside))


# ----------------------------------------------------------------------------------------------------------------------- factors
class Factors(NamedTuple):
    """What a profile's predictions are multiplied by: seconds of matrix products, of attention, and the fixed cost of a layer."""

    linear: float = 1.0
    attention: float = 1.0
    overhead: float = 1.0

    def rounded(self) -> Factors:
        """To 4 significant digits: more would only be noise in the profiles that plans carry."""
        return Factors(*(float(f"{value:.4g}") for value in self))


def scaled(hardware: HardwareConfig, factors: Factors) -> HardwareConfig:
    """The profile whose predictions are `factors` times those of `hardware`: a factor of 2 halves a rate and doubles the overhead."""
    rates = hardware.gemm_flops
    return replace(
        hardware,
        gemm_flops=GemmFlops(rates.fp32 / factors.linear, rates.bf16 / factors.linear, rates.fp8 / factors.linear),
        attention_flops=hardware.attention_flops / factors.attention,
        layer_overhead_seconds=hardware.layer_overhead_seconds * factors.overhead,
    )


def fit_factors(
    parts: Sequence[Parts], seconds: Sequence[float], lower: float = 0.0, upper: float = np.inf, anchor: Sequence[float] = (0.0, 0.0, 0.0)
) -> tuple[Factors, FitError]:
    """Factors with which the parts' sums come nearest to the measured seconds of each, and the error that is left.

    `anchor`: weight with which each factor is held near 1, where a weight of 1 is that of samples that tell this factor and nothing else.
    """
    table, measured = np.array(parts, dtype=np.float64), np.array(seconds, dtype=np.float64)
    matrix, vector, _ = relative_moments(table[:, :3], measured, table[:, 3])
    least = max(lower, 1e-6)  # rates are finite, the overhead may be zero
    x = solve(matrix + np.diag(anchor), vector + np.array(anchor), [least, least, lower], [upper] * 3)
    return Factors(*x.tolist()), FitError.of(table[:, :3] @ x + table[:, 3], measured)
