"""Seconds of a microbatch: docs/plan.md section 3.

L tokens of the group (padded), Q the sum of squared padded document lengths, P = cp, t = L / P local tokens, T = tp, e = 2 bytes.
With achieved rates of the form rate * x / (x + half), a matrix product over t tokens takes time in proportion to t + half, and
attention over documents l_i, with x = l_i / q, time in proportion to Q + half * q * L: two integers say all about a pack.
Every function takes Python numbers, or float64 arrays in place of tokens and squares (many packs at once).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megadcp.plan.basis import Basis
from megadcp.plan.step_plan import Microbatch

Number = Any  # a float, or a float64 array to compute many at once

ELEMENT_BYTES = 2  # e: activations travel in 16 bits
BACKWARD_LINEAR = 2.0  # backward / forward of matrix products
BACKWARD_ATTENTION = 2.5
FORWARD_SHARE = 1 / 3.2  # forward : backward = 1 : 2.2 in the simulator
SELECTIVE_SHARE = 0.02 * 3  # norms and gated product again, as a share of one linear forward
WORTH_AN_ARRAY = 16  # numbers; fewer are quicker one by one
KINDS = ("ring", "all_gather", "ulysses", "2d")  # of cp communication; also the order in which ties are decided


class Load(NamedTuple):
    """What the cost of a microbatch depends on, recompute aside. `inside`: the group lies within one node."""

    tokens: Number
    squares: Number
    cp: int = 1
    kind: str = "none"
    inside: bool = True


class Layer(NamedTuple):
    """Seconds of one layer on one rank: `mlp` is part of `linear`; forward only, but exposed and tp are forward + backward."""

    linear: Number
    mlp: Number
    attention: Number
    exposed: Number
    tp: float

    @property
    def both(self) -> Number:
        """Forward + backward without recompute and fixed overhead."""
        return (1 + BACKWARD_LINEAR) * self.linear + (1 + BACKWARD_ATTENTION) * self.attention + self.exposed + self.tp

    def extra(self, level: str) -> Number:
        """Seconds that recomputing this layer at `level` adds."""
        if level == "none":
            return 0.0
        if level == "selective":
            return SELECTIVE_SHARE * self.linear
        if level == "mlp":
            return self.mlp
        return self.linear + self.attention + 0.5 * self.exposed


class CostModel:
    """The cost model of one basis (layout, model, profile, precision)."""

    def __init__(self, basis: Basis) -> None:
        self.basis = basis
        model, profile, tp = basis.model, basis.profile, basis.layout.tp
        matrices = 3 if model.gated else 2
        attention_projections = model.hidden * model.head_dim * (2 * model.heads + 2 * model.kv_heads)
        mlp = matrices * model.hidden * model.ffn
        self.flops_per_token = 2 * (attention_projections + mlp) / tp  # linear forward of one layer on one rank
        self.linear_second = self.flops_per_token / profile.gemm_flops  # per local token, at full rate
        self.mlp_second = 2 * mlp / tp / profile.gemm_flops
        self.head_second = 6 * model.hidden * model.vocab / tp / profile.gemm_flops  # LM head and loss, forward + backward
        self.half = profile.gemm_half_tokens
        self.attention_second = 2 * model.head_dim * (model.heads / tp) / profile.attention_flops  # per pair of tokens
        self.kv_heads = max(1, model.kv_heads // tp)  # G', on one rank
        self.heads = model.heads // tp  # H'
        # 8 t h e (T-1)/T bytes of a layer's four all-gathers and reduce-scatters, forward and backward; zero without tp
        self.tp_second = profile.tp_exposed * 8 * model.hidden * ELEMENT_BYTES * (tp - 1) / tp / profile.node_bytes

    # ------------------------------------------------------------------------------------- context-parallel communication
    def in_node(self, lane: int, cp: int) -> bool:
        """Whether lanes lane .. lane + cp - 1 belong to one node."""
        per_node = self.basis.layout.lanes_per_node
        return lane // per_node == (lane + cp - 1) // per_node

    def head_split(self, cp: int) -> int:
        """A of kind 2d: the largest power of two that divides G', at most min(P, lanes_per_node)."""
        split, most = 1, min(cp, self.basis.layout.lanes_per_node)
        while 2 * split <= most and self.kv_heads % (2 * split) == 0:
            split *= 2
        return split

    def legal(self, kind: str, cp: int) -> bool:
        """Whether a group of `cp` lanes may communicate like this (invariant 9)."""
        if cp == 1 or kind == "none":
            return cp == 1 and kind == "none"
        if kind == "ulysses":
            return self.kv_heads % cp == 0 and self.heads % cp == 0
        if kind == "2d":
            return 1 < self.head_split(cp) < cp
        return kind in ("ring", "all_gather")

    def legal_kinds(self, cp: int) -> tuple[str, ...]:
        """All legal kinds for a group of `cp` lanes, in the order in which ties are decided."""
        return ("none",) if cp == 1 else tuple(kind for kind in KINDS if self.legal(kind, cp))

    def best_kind(self, load: Load) -> str:
        """The default cp_comm: least attention forward + backward + exposed communication, to the nanosecond; ties go by KINDS."""
        best, best_time = "none", -1
        for kind in self.legal_kinds(load.cp):
            layer = self.layer(load._replace(kind=kind))
            time = round(((1 + BACKWARD_ATTENTION) * layer.attention + layer.exposed) * 1e9)
            if best_time < 0 or time < best_time:
                best, best_time = kind, time
        return best

    def exposed(self, load: Load, attention: Number) -> Number:
        """Seconds of a layer's cp communication, forward + backward, that attention does not hide."""
        model, profile = self.basis.model, self.basis.profile
        tokens, cp, kind = load.tokens, load.cp, load.kind
        if kind == "none":
            return 0.0
        token_bytes = model.head_dim * ELEMENT_BYTES
        bandwidth = profile.node_bytes if load.inside else profile.net_bytes
        hidden = (1 + BACKWARD_ATTENTION) * attention
        if kind == "ulysses":
            return 4 * (tokens / cp) * (self.heads + self.kv_heads) * token_bytes * (cp - 1) / cp / bandwidth + 8 * profile.node_latency
        if kind == "2d":
            split = self.head_split(cp)
            rings = cp // split
            exchange = 4 * (tokens / cp) * (self.heads + self.kv_heads) * token_bytes * (split - 1) / split / profile.node_bytes
            ring = 6 * tokens * (self.kv_heads / split) * token_bytes * (rings - 1) / rings / bandwidth
            return exchange + 8 * profile.node_latency + _positive(ring + 2 * rings * profile.ring_step_seconds - hidden)
        moved = 6 * tokens * self.kv_heads * token_bytes * (cp - 1) / cp / bandwidth
        if kind == "ring":
            return _positive(moved + 2 * cp * profile.ring_step_seconds - hidden)
        return moved + 8 * profile.node_latency  # all_gather

    # --------------------------------------------------------------------------------------------------- layers and stages
    def attention(self, load: Load) -> Number:
        """Causal attention forward of a layer: sum of 2 d (H/T) l^2/P FLOPs at the rate for x = l / q."""
        q = load.cp if load.kind == "ring" else load.cp // self.head_split(load.cp) if load.kind == "2d" else 1
        return self.attention_second / load.cp * (load.squares + self.basis.profile.attention_half_length * q * load.tokens)

    def layer(self, load: Load) -> Layer:
        """The parts of one layer's time."""
        local = load.tokens / load.cp
        attention = self.attention(load)
        return Layer(
            self.linear_second * (local + self.half),
            self.mlp_second * (local + self.half),
            attention,
            self.exposed(load, attention),
            self.tp_second * local,
        )

    def stages(self, layer: Layer, local: Number, level: str, layers: Number) -> list[Number]:
        """Seconds of every stage, forward + backward, for `local` tokens a rank with `layers` layers of each recomputed at `level`."""
        each = layer.both + self.basis.profile.layer_overhead_seconds
        extra = layer.extra(level) * layers
        seconds = [count * each + extra for count in self.basis.stage_layers]
        seconds[-1] = seconds[-1] + self.head_second * (local + self.half)
        return seconds

    # --------------------------------------------------------------------------------------------------------- microbatches
    def load_of(self, microbatch: Microbatch) -> Load:
        """The load that a microbatch of a plan puts on its lanes."""
        padded = microbatch.padded
        squares = sum([length * length for length in padded])
        return Load(sum(padded), squares, microbatch.cp, microbatch.cp_comm, self.in_node(microbatch.lane, microbatch.cp))

    def stage_seconds(self, microbatch: Microbatch) -> list[float]:
        """Seconds of every stage, forward + backward, at lane speed 1."""
        load = self.load_of(microbatch)
        recompute = microbatch.recompute
        return self.stages(self.layer(load), load.tokens / load.cp, recompute.level, recompute.layers)

    def seconds(self, microbatch: Microbatch) -> float:
        """`seconds` of a microbatch: the largest stage's, at lane speed 1."""
        return max(self.stage_seconds(microbatch))

    def seconds_many(self, microbatches: Sequence[Microbatch]) -> npt.NDArray[np.float64]:
        """`seconds` of each of many microbatches, float64 [n]: those of one size, place, kind and level together."""
        alike: dict[tuple[int, str, bool, str], list[int]] = {}
        for index, one in enumerate(microbatches):
            alike.setdefault((one.cp, one.cp_comm, self.in_node(one.lane, one.cp), one.recompute.level), []).append(index)
        seconds = np.empty(len(microbatches))
        for (cp, kind, inside, level), members in alike.items():
            own = [microbatches[index] for index in members]
            if len(own) < WORTH_AN_ARRAY:
                seconds[members] = [self.seconds(one) for one in own]
                continue
            tokens = np.array([sum(one.padded) for one in own], dtype=np.float64)
            squares = np.array([sum([length * length for length in one.padded]) for one in own], dtype=np.float64)
            layer = self.layer(Load(tokens, squares, cp, kind, inside))
            layers = np.array([one.recompute.layers for one in own], dtype=np.float64)
            seconds[members] = np.max(self.stages(layer, tokens / cp, level, layers), axis=0)
        return seconds


def _positive(value: Number) -> Number:
    """max(0, value), for floats and arrays."""
    return np.maximum(0.0, value) if isinstance(value, np.ndarray) else max(0.0, value)
