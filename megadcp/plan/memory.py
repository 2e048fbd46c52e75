"""Bytes of a stage and of a microbatch: docs/plan.md section 3.

t local tokens of a microbatch, T = tp, R = lanes, n layers of the stage, v chunks. All figures are bytes of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from megadcp.plan.actions import FORWARD, Action, slot_count, used_actions, used_slots
from megadcp.plan.basis import Basis
from megadcp.plan.step_plan import Microbatch, Recompute

FloatArray = npt.NDArray[np.float64]

GROUP_BYTES = 0.5e9  # communicator buffers for each cp group size above 1
LOGIT_BYTES = 6  # a logit in 16 and in 32 bits
LAST_BITS = 1e-9  # of a layer: what rounding may add to a quotient that is a whole number
MOST_TOKENS = 2**31 - 1  # of one microbatch: the kernels' document borders are 32-bit


def group_sizes(microbatches: Iterable[Microbatch]) -> int:
    """Number of cp group sizes above 1 that a plan uses."""
    return len({one.cp for one in microbatches if one.cp > 1})


class MemoryModel:
    """The memory model of one basis (layout, model, profile, precision)."""

    def __init__(self, basis: Basis) -> None:
        self.basis = basis
        model, tp = basis.model, basis.layout.tp
        kv = 4 * model.hidden * model.kv_heads / model.heads
        hidden, ffn = model.hidden, model.ffn
        wide = 1.0 if basis.precision != "fp32" else 2.0
        gate = 0 if model.gated else 2
        layer = {
            "none": 12 * hidden + kv + (6 - gate) * ffn,
            "selective": 8 * hidden + kv + (4 - gate) * ffn,
            "mlp": 10 * hidden + kv,
            "full": 2.0 * hidden,
        }
        self.token_bytes = {level: wide * count / tp for level, count in layer.items()}  # stored per local token and layer
        self.last = basis.layout.pp - 1

    # ----------------------------------------------------------------------------------------------------- what always stays
    def parameters(self, stage: int) -> int:
        """Parameters of a whole stage, before tp: layers with two norms each, embedding on the first, head and norm on the last."""
        model = self.basis.model
        matrices = 3 if model.gated else 2
        layer = model.hidden * model.head_dim * (2 * model.heads + 2 * model.kv_heads) + matrices * model.hidden * model.ffn + 2 * model.hidden
        count = self.basis.stage_layers[stage] * layer
        table = model.vocab * model.hidden
        if stage == 0:
            count += table
        if stage == self.last:
            count += model.hidden + (0 if model.tied and self.last == 0 else table)
        return count

    def static(self, stage: int, sizes: int) -> float:
        """Weights, gradients, this lane's optimizer share, and communicators for `sizes` cp group sizes above 1."""
        weights = self.parameters(stage) / self.basis.layout.tp
        fp8_copy = 1 if self.basis.precision.startswith("fp8") else 0
        return weights * (2 + 4 + fp8_copy) + 12 * weights / self.basis.layout.lanes + GROUP_BYTES * sizes

    def budget(self, stage: int, sizes: int) -> float:
        """What a stage has for activations; not positive when weights and optimizer alone are too much."""
        profile = self.basis.profile
        return profile.usable_fraction * profile.memory_bytes - self.static(stage, sizes)

    # ------------------------------------------------------------------------------------------------------- a microbatch
    def stored(self, stage: int, local: float, recompute: Recompute) -> float:
        """Activations kept from forward to backward: the first layers at the recompute level, the others at none."""
        again = min(recompute.layers, self.basis.stage_layers[stage]) if recompute.level != "none" else 0
        plain = self.basis.stage_layers[stage] - again
        return local * (plain * self.token_bytes["none"] + again * self.token_bytes[recompute.level])

    def passing(self, stage: int, local: float, level: str) -> float:
        """What exists only while the microbatch runs: one layer of none where full is used, and on the last stage a chunk of logits."""
        model, profile = self.basis.model, self.basis.profile
        transient = local * self.token_bytes["none"] if level == "full" else 0.0
        logits = min(local, profile.loss_chunk) * model.vocab * LOGIT_BYTES / self.basis.layout.tp if stage == self.last else 0.0
        return transient + logits

    def need(self, stage: int, local: float, recompute: Recompute) -> float:
        """Bytes of a microbatch that is alone on a stage."""
        return self.stored(stage, local, recompute) + self.passing(stage, local, recompute.level)

    def bytes(self, microbatch: Microbatch) -> float:
        """`bytes` of a microbatch: its own need on its worst stage."""
        local = microbatch.tokens / microbatch.cp
        return max(self.need(stage, local, microbatch.recompute) for stage in range(self.last + 1))

    # ------------------------------------------------------------------------------------------------------ least recompute
    def least_layers(self, local: float, level: str, budgets: Sequence[float]) -> int:
        """The least layer count at which a microbatch of `local` tokens alone fits every stage at `level` (none: 0); -1 if none does."""
        layers = 0 if level == "none" else 1
        for stage, count in enumerate(self.basis.stage_layers):
            over = local * count * self.token_bytes["none"] + self.passing(stage, local, level) - budgets[stage]
            if over > 0 and level == "none":
                return -1
            if over > 0:
                layers = max(layers, math.ceil(over / (local * (self.token_bytes["none"] - self.token_bytes[level])) - LAST_BITS))
        return layers if layers <= self.basis.recomputable else -1

    def least_layers_many(self, local: FloatArray, level: str, budgets: Sequence[float]) -> FloatArray:
        """The same for many microbatches at once: float64 local tokens -> float64 counts."""
        layers = np.full(local.shape, 0.0 if level == "none" else 1.0)
        transient = self.token_bytes["none"] if level == "full" else 0.0
        logits = np.minimum(local, self.basis.profile.loss_chunk) * (self.basis.model.vocab * LOGIT_BYTES / self.basis.layout.tp)
        for stage, count in enumerate(self.basis.stage_layers):
            over = local * (count * self.token_bytes["none"] + transient) + (logits if stage == self.last else 0.0) - budgets[stage]
            if level == "none":
                needed = np.where(over > 0, np.inf, 0.0)
            else:
                needed = np.ceil(over / (local * (self.token_bytes["none"] - self.token_bytes[level])) - LAST_BITS)
            layers = np.maximum(layers, needed)
        return np.where(layers <= self.basis.recomputable, layers, -1.0)

    def most_tokens(self, level: str, layers: int, budgets: Sequence[float]) -> int:
        """Most local tokens that fit every stage alone with this recompute; 0 if not even one does."""
        recompute = Recompute(level, layers)

        def fits(local: int) -> bool:
            return all(self.need(stage, local, recompute) <= budgets[stage] for stage in range(self.last + 1))

        low, high = 0, 1
        while high < MOST_TOKENS and fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    # -------------------------------------------------------------------------------------------------------------- in flight
    def peaks(self, microbatches: Sequence[Microbatch]) -> list[float]:
        """Most activation bytes at one time on each stage, over all lanes, walking each lane's own action list.

        Held at an action: the stored bytes of every microbatch whose forward has begun and whose backward has not ended (a chunk counts
        1/v), and the passing bytes of the microbatch that runs. Without pipelines that is the largest `bytes`.
        """
        stages, chunks = self.basis.layout.pp, self.basis.layout.virtual_stages
        if stages == 1:
            return [float(self.bytes_many(microbatches).max())] if microbatches else [0.0]
        used = used_slots(microbatches)
        rows = {slot: row for row, slot in enumerate(used)}
        columns = {lane: column for column, lane in enumerate(sorted({k for one in microbatches for k in range(one.lane, one.lane + one.cp)}))}
        owner = np.full((len(used), len(columns)), len(microbatches))  # the last row of what follows is nobody's: no bytes
        for number, one in enumerate(microbatches):
            column = columns[one.lane]
            owner[rows[one.slot], column : column + one.cp] = number
        stored, passing = (np.pad(part, ((0, 0), (0, 1)))[:, owner] for part in self._parts(microbatches))  # [p, slots in use, lanes in use]
        lists = used_actions(used, slot_count(self.basis, microbatches), stages, chunks)
        return [self._walk(actions, rows, stored[stage] / chunks, passing[stage]) for stage, actions in enumerate(lists)]

    @staticmethod
    def _walk(actions: Sequence[Action], rows: Mapping[int, int], stored: FloatArray, passing: FloatArray) -> float:
        """Most bytes at one time over all lanes of one stage: what is absent adds and takes away nothing."""
        slots = np.array([rows[slot] for _, slot, _ in actions], dtype=np.intp)
        forward = np.array([kind == FORWARD for kind, _, _ in actions])[:, None]
        part = stored[slots]
        after = np.cumsum(np.where(forward, part, -part), axis=0)
        before = np.concatenate([np.zeros((1, part.shape[1])), after[:-1]])
        return float((np.where(forward, after, before) + passing[slots]).max(initial=0.0))

    def _parts(self, microbatches: Sequence[Microbatch]) -> tuple[FloatArray, FloatArray]:
        """Stored and passing bytes of many microbatches, [p, n] each: `stored` and `passing` on arrays."""
        local = np.array([one.tokens / one.cp for one in microbatches])
        levels = [one.recompute.level for one in microbatches]
        layers = np.array(self.basis.stage_layers, dtype=np.float64)[:, None]  # [p, 1]
        named = np.array([0 if one.recompute.level == "none" else one.recompute.layers for one in microbatches], dtype=np.float64)
        again = np.minimum(named, layers)
        plain, table = self.token_bytes["none"], np.array([self.token_bytes[level] for level in levels])
        passing = np.tile(np.where(np.array([level == "full" for level in levels], dtype=bool), local * plain, 0.0), (self.last + 1, 1))
        passing[-1] += np.minimum(local, self.basis.profile.loss_chunk) * self.basis.model.vocab * LOGIT_BYTES / self.basis.layout.tp
        return local * ((layers - again) * plain + again * table), passing

    def bytes_many(self, microbatches: Sequence[Microbatch]) -> FloatArray:
        """`bytes` of each of many microbatches, float64 [n]."""
        stored, passing = self._parts(microbatches)
        most: FloatArray = (stored + passing).max(axis=0)
        return most
