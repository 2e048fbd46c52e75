"""Which lanes are slow: what their microbatches took against what was predicted, the same figures on all ranks.

Only microbatches of one lane alone tell lanes apart: in a larger group all wait for the slowest. Of a lane's ranks, those of one stage wait
for each other, too, so the stage's figure is the LEAST of its tensor-parallel ranks', and the lane's is that of its slowest stage.

On request (plan.refit_lane_speed) the figures become the lane_speed that plans are made with. The rule when they change is the refit's: the
plan of step s is made with what was known after step s - lag, lag = 2 ahead + 1, so ranks never differ (engine/refit.py says why).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megadcp.config.check import UserError
from megadcp.engine.measure import Measured
from megadcp.mesh.coords import Mesh
from megadcp.plan.step_plan import StepPlan

Floats = npt.NDArray[np.float64]
Speeds = tuple[float, ...]


@dataclass(frozen=True)
class SpeedRules:
    """decay: what the sums before a step weigh in it. least: steps before speeds are believed. change: they stay until a lane's differs by this.

    bound: speeds lie in [1 / bound, bound]; digits: decimals that are kept. Plans shall follow slow devices, not noise.
    """

    decay: float = 0.9
    least: int = 10
    change: float = 0.05
    bound: float = 2.0
    digits: int = 2


def own_seconds(plan: StepPlan, microbatches: Sequence[Measured], lane: int) -> tuple[float, float]:
    """(measured, predicted) seconds of this rank's microbatches that its lane ran alone. A microbatch's prediction is at lane speed 1."""
    alone = {one.slot for one in plan.microbatches if one.lane == lane and one.cp == 1}
    chosen = [one for one in microbatches if one.slot in alone and one.seconds > 0 and one.predicted_seconds > 0]
    return sum(one.seconds for one in chosen), sum(one.predicted_seconds for one in chosen)


class LaneSpeeds:
    """The figures of one run. `observe` is called once a step with the same table by all ranks; `speeds` by whoever hands steps in."""

    def __init__(self, mesh: Mesh, ahead: int, first: int = 0, configured: Speeds = (), rules: SpeedRules | None = None) -> None:
        """`first`: the step that this process begins with; `configured`: plan.lane_speed, in force until something else is known."""
        self.mesh, self.lag, self.rules = mesh, 2 * ahead + 1, rules or SpeedRules()
        self._sums = np.zeros((mesh.lanes, 2))  # measured, predicted
        self._steps, self._first, self._last = 0, first, first - 1
        self._history: tuple[tuple[int, Speeds], ...] = ((first - 1, configured),)

    def observe(self, step: int, table: Floats) -> list[float]:
        """Take in [ranks, 2] of `own_seconds`; measured / predicted of each lane in this step, 0 where none was seen."""
        measured, predicted = (table[:, column].reshape(self.mesh.pp, self.mesh.lanes, self.mesh.tp) for column in (0, 1))
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = np.where(predicted > 0, measured / predicted, 0.0)  # [pp, lane, tp]
        by_stage = ratios.min(axis=2)
        slowest = by_stage.argmax(axis=0)  # stage of each lane
        lanes = np.arange(self.mesh.lanes)
        column = ratios[slowest, lanes].argmin(axis=1)
        step_sums = np.stack([measured[slowest, lanes, column], predicted[slowest, lanes, column]], axis=1)
        seen = (step_sums > 0).all(axis=1) & np.isfinite(step_sums).all(axis=1)
        self._sums[seen] = self.rules.decay * self._sums[seen] + step_sums[seen]
        self._steps, self._last = self._steps + 1, step
        self._adapt()
        return [float(one) for one in np.where(seen, by_stage[slowest, lanes], 0.0)]

    @property
    def ratios(self) -> list[float]:
        """Measured / predicted of each lane over the last steps; 0 where nothing is known."""
        return [float(measured / predicted) if predicted > 0 else 0.0 for measured, predicted in self._sums]

    def slowness(self) -> list[float]:
        """How much longer than the fastest lane's each lane's work takes: 1.0 for the fastest, and where nothing is known (yet)."""
        known = [one for one in self.ratios if one > 0]
        if self._steps < self.rules.least or not known:
            return [1.0] * self.mesh.lanes
        return [one / min(known) if one > 0 else 1.0 for one in self.ratios]

    def _adapt(self) -> None:
        rules, known = self.rules, sorted(one for one in self.ratios if one > 0)
        if self._steps < rules.least or not known:
            return
        middle = known[(len(known) - 1) // 2]
        speeds = tuple(round(min(rules.bound, max(1 / rules.bound, middle / one)), rules.digits) if one > 0 else 1.0 for one in self.ratios)
        before = self._history[-1][1] or (1.0,) * self.mesh.lanes
        if max(abs(new - old) for new, old in zip(speeds, before, strict=True)) <= rules.change:
            return
        speeds = () if set(speeds) == {1.0} else speeds
        kept = [entry for entry in self._history if entry[0] > self._last - self.lag]
        older = [entry for entry in self._history if entry[0] <= self._last - self.lag]
        self._history = (*older[-1:], *kept, (self._last, speeds))

    def speeds(self, step: int) -> Speeds:
        """What the plan of `step` must be made with. Any thread may ask. ValueError when asked too early: ranks would differ."""
        after = step - self.lag
        if after > self._last and after >= self._first:
            raise ValueError(f"the lane speeds of step {step} come from step {after}, but the last observed step is {self._last}")
        history = self._history
        return history[max(0, bisect_right([at for at, _ in history], after) - 1)][1]

    # ------------------------------------------------------------------------------------------------------------- checkpoint
    def to_dict(self) -> dict[str, Any]:
        """Everything to keep, as JSON values."""
        return {"last": self._last, "steps": self._steps, "sums": self._sums.tolist(), "history": [[step, list(one)] for step, one in self._history]}

    def load(self, state: Mapping[str, Any]) -> str:
        """Go on with what `to_dict` gave after the step before `first`. What was dropped, in one line; empty when nothing was.

        Raises:
            UserError: the state is damaged.
        """
        try:
            sums, steps, last = np.array(state["sums"], dtype=np.float64), int(state["steps"]), int(state["last"])
            history = tuple((int(step), tuple(float(each) for each in one)) for step, one in state["history"])
            lanes = len(sums)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"the state of the lane speeds can't be read ({error!r})") from None
        if lanes != self.mesh.lanes or last != self._first - 1:
            return f"what was known of the speed of {lanes} lanes is dropped: there are {self.mesh.lanes} now"
        if sums.shape != (lanes, 2) or not np.isfinite(sums).all() or any(len(one) not in (0, lanes) for _, one in history):
            raise UserError("the state of the lane speeds is not that of lanes")
        self._sums, self._steps, self._history = sums, steps, history or self._history
        return ""
