"""The nine length distributions that reports use (docs/plan.md, appendix): documents of one step, drawn until a number of tokens is reached.

The same request gives the same lengths on every machine and numpy version. The uniforms come from a counter through integer mixing, not
from a library's generator; logarithm and exponential are made of + - * / and sqrt, which IEEE 754 rounds alike everywhere, because
libraries differ in the last bits of theirs, and such a bit can decide which integer a length is rounded to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from megadcp.config.check import UserError

Floats = npt.NDArray[np.float64]

SHORTEST = 16  # tokens; every draw is clipped to SHORTEST .. max_length
BLOCK = 4096  # documents drawn at a time; no effect on the result
K = 1024


def draw(name: str, tokens: int, max_length: int, seed: int, step: int = 0) -> list[int]:
    """Lengths of one step: documents of preset `name` until their sum is at least `tokens`. Every (seed, step) is a stream of its own."""
    if name not in _QUANTILES:
        raise UserError(f"preset={name} is not known; legal here: {', '.join(PRESETS)}")
    if tokens < 1:
        raise UserError(f"preset={name} with {tokens} tokens a step: a step needs at least 1")
    if max_length < SHORTEST:
        raise UserError(f"preset={name} with documents of at most {max_length} tokens: the presets' shortest document has {SHORTEST}")
    stream = int.from_bytes(hashlib.sha256(f"{name}/{seed}/{step}".encode()).digest()[:8], "little")
    lengths: list[int] = []
    total = 0
    while total < tokens:
        block = np.clip(quantile(name, _uniforms(stream, len(lengths), BLOCK)), SHORTEST, max_length)
        sums = total + np.cumsum(block)
        kept = min(BLOCK, int(np.searchsorted(sums, tokens)) + 1)
        lengths += block[:kept].tolist()
        total = int(sums[kept - 1])
    return lengths


def steps(name: str, tokens: int, max_length: int, seed: int, count: int) -> list[list[int]]:
    """Lengths of `count` steps; the first is draw's, and the others don't depend on `count`."""
    return [draw(name, tokens, max_length, seed, step) for step in range(count)]


def quantile(name: str, shares: Floats) -> npt.NDArray[np.int64]:
    """Lengths below which these shares (in (0, 1)) of a preset's documents are, as whole tokens, not yet clipped."""
    return np.rint(_QUANTILES[name](shares)).astype(np.int64)


# ------------------------------------------------------------------------------------------------------------ uniforms
def _uniforms(stream: int, first: int, count: int) -> Floats:
    """Numbers first .. first + count - 1 of a stream, strictly between 0 and 1: the finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    with np.errstate(over="ignore"):
        z = np.uint64(stream) + np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return ((z >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


# ------------------------------------------------------------------------------------------ functions rounded alike everywhere
LN2_HIGH = float.fromhex("0x1.62e42feep-1")  # its last bits are 0: a small integer times it is exact
LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")


def _horner(coefficients: Sequence[float], x: Floats) -> Floats:
    """The polynomial with these coefficients, the constant one first."""
    value: Any = coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + coefficient
    return np.asarray(value, dtype=np.float64)


def _log(x: Floats) -> Floats:
    """Natural logarithm of positive numbers, to about 1e-15: 2 atanh(s) of the mantissa, s = (m - 1) / (m + 1), as its series."""
    mantissa, exponent = np.frexp(x)
    small = mantissa < 0.7071067811865476
    mantissa, exponent = np.where(small, 2 * mantissa, mantissa), (exponent - small).astype(np.float64)
    s = (mantissa - 1) / (mantissa + 1)
    series = 2 * s * _horner([1 / (2 * k + 1) for k in range(12)], s * s)
    return np.asarray(exponent * LN2_HIGH + (series + exponent * LN2_LOW), dtype=np.float64)


def _exp(x: Floats) -> Floats:
    """Exponential, to about 1e-15 of its value: a power of two times the series of what is left."""
    power = np.rint(x / (LN2_HIGH + LN2_LOW))
    rest = (x - power * LN2_HIGH) - power * LN2_LOW
    series = _horner([1 / factorial for factorial in accumulate(range(1, 15), lambda product, k: product * k, initial=1)], rest)
    return np.ldexp(series, power.astype(np.int32))


# Rational approximations of the normal quantile, Wichura's AS 241 (PPND16, 1988), to about 1e-16: numerator and denominator each.
_CENTRE = (
    (3.3871328727963666080, 133.14166789178437745, 1971.5909503065514427, 13731.693765509461125,
     45921.953931549871457, 67265.770927008700853, 33430.575583588128105, 2509.0809287301226727),
    (1.0, 42.313330701600911252, 687.18700749205790830, 5394.1960214247511077,
     21213.794301586595867, 39307.895800092710610, 28729.085735721942674, 5226.4952788528545610),
)  # fmt: skip
_TAIL = (
    (1.42343711074968357734, 4.63033784615654529590, 5.76949722146069140550, 3.64784832476320460504,
     1.27045825245236838258, 0.241780725177450611770, 0.0227238449892691845833, 7.74545014278341407640e-4),
    (1.0, 2.05319162663775882187, 1.67638483018380384940, 0.689767334985100004550,
     0.148103976427480074590, 0.0151986665636164571966, 5.47593808499534494600e-4, 1.05075007164441684324e-9),
)  # fmt: skip
_FAR_TAIL = (
    (6.65790464350110377720, 5.46378491116411436990, 1.78482653991729133580, 0.296560571828504891230,
     0.0265321895265761230930, 0.00124266094738807843860, 2.71155556874348757815e-5, 2.01033439929228813265e-7),
    (1.0, 0.599832206555887937690, 0.136929880922735805310, 0.0148753612908506148525,
     7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7, 2.04426310338993978564e-15),
)  # fmt: skip


def _normal(share: Floats) -> Floats:
    """Quantile of the standard normal distribution."""
    q = share - 0.5
    r = np.sqrt(-_log(np.where(q < 0, share, 1 - share)))

    def ratio(pair: tuple[Sequence[float], Sequence[float]], x: Floats) -> Floats:
        return _horner(pair[0], x) / _horner(pair[1], x)

    tail = np.where(r <= 5, ratio(_TAIL, r - 1.6), ratio(_FAR_TAIL, r - 5))
    return np.where(np.abs(q) <= 0.425, q * ratio(_CENTRE, 0.180625 - q * q), np.where(q < 0, -tail, tail))


# ---------------------------------------------------------------------------------------------------------- kinds of preset
def _log_linear(*points: tuple[float, float]) -> Callable[[Floats], Floats]:
    """Through the points (share, length), piecewise linear in the logarithm of the length."""
    shares = np.array([share for share, _ in points])
    logs = _log(np.array([float(length) for _, length in points]))
    slopes = (logs[1:] - logs[:-1]) / (shares[1:] - shares[:-1])

    def length(share: Floats) -> Floats:
        piece = np.clip(np.searchsorted(shares, share, side="right") - 1, 0, len(slopes) - 1)
        return _exp(logs[piece] + (share - shares[piece]) * slopes[piece])

    return length


def _buckets(edges: Sequence[float], percent: Sequence[float]) -> Callable[[Floats], Floats]:
    """Log-uniform inside each bucket; `percent` of the documents are in it (normalised to their sum)."""
    sums = list(accumulate(percent, initial=0.0))
    return _log_linear(*((share / sums[-1], edge) for share, edge in zip(sums, edges, strict=True)))


def _lognormal(mean: float, minus: float, sigma: float) -> Callable[[Floats], Floats]:
    """exp(ln(mean) - minus + sigma z)."""
    centre = _log(np.array([float(mean)])) - minus
    return lambda share: _exp(centre + sigma * _normal(share))


def _mixture(part: float, first: Callable[[Floats], Floats], second: Callable[[Floats], Floats]) -> Callable[[Floats], Floats]:
    """With probability `part` a draw of `first`, else one of `second`: one uniform decides which, and what is left of it the draw."""

    def length(share: Floats) -> Floats:
        inside = share < part
        within = np.where(inside, share / part, (share - part) / (1 - part))
        within = np.clip(within, 2.0**-53, 1 - 2.0**-53)  # rounding must not reach the ends, where the normal has no quantile
        return np.where(inside, first(within), second(within))

    return length


_MCORE = _lognormal(1024, 1.125, 1.5)

_QUANTILES: dict[str, Callable[[Floats], Floats]] = {
    "wikipedia": _log_linear(
        (0, 20), (0.01, 39), (0.05, 67), (0.10, 87), (0.25, 146), (0.50, 347), (0.75, 862), (0.90, 2112), (0.95, 3721), (0.99, 10921),
        (0.999, 37367), (0.9999, 101537), (1, 1823777),
    ),
    "web": _buckets(
        (32, K, 2 * K, 4 * K, 8 * K, 16 * K, 32 * K, 64 * K, 128 * K, 192 * K), (71.38, 15.65, 7.34, 3.05, 1.29, 0.85, 0.14, 0.17, 0.14)
    ),
    "midtrain": _buckets((128, K, 2 * K, 4 * K, 8 * K, 16 * K, 32 * K, 64 * K, 125 * K), (15.96, 15.79, 31.95, 33.93, 1.04, 0.45, 0.36, 0.53)),
    "prolong": _buckets(
        (128, K, 2 * K, 4 * K, 8 * K, 16 * K, 32 * K, 64 * K, 128 * K, 340 * K), (14.97, 38.41, 26.95, 14.41, 4.27, 0.78, 0.146, 0.038, 0.022)
    ),
    "longsft": _mixture(0.0011, _lognormal(37000, 0.32, 0.8), _lognormal(1000, 0.5, 1.0)),
    "byted": _log_linear((0, 64), (0.5, 1200), (0.8, 4096), (0.95, 24000), (0.99, 131072), (0.9995, 2097152), (1, 4000000)),
    "mcore": lambda share: np.clip(_MCORE(share), 128, 8192),
    "uniform": lambda share: 64 + np.floor(share * (32767 - 64 + 1)),
    "constant": lambda share: np.full(share.shape, 8192.0),
}  # fmt: skip

PRESETS: tuple[str, ...] = tuple(_QUANTILES)
