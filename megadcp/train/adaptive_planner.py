"""The planner of a run whose profile or lane speeds follow what its steps take. Imported by the planning process: needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megadcp.config.schema import Config
from megadcp.plan.fit import Factors
from megadcp.plan.fitted_planner import NEUTRAL, FittedPlanner
from megadcp.plan.step_plan import StepPlan


def adaptive_planner_for(config: Config) -> AdaptivePlanner:
    """The planner of a run: (step, lengths, factors, lane speeds in force) -> plan. UserError if the run can't be planned."""
    return AdaptivePlanner(config)


class AdaptivePlanner:
    """Factors and speeds come with each step, so that whoever plans (process, thread, trainer) plans the same."""

    def __init__(self, config: Config) -> None:
        self.config, self._speeds = config, tuple(config.plan.lane_speed)
        self._planner = FittedPlanner(config)

    def __call__(self, step: int, lengths: Sequence[int], factors: Factors = NEUTRAL, speeds: Sequence[float] | None = None) -> StepPlan:
        """The plan of one step. speeds: of each lane, () for all alike; None: plan.lane_speed."""
        speeds = tuple(self.config.plan.lane_speed) if speeds is None else tuple(speeds)
        if speeds != self._speeds:
            self._planner = FittedPlanner(replace(self.config, plan=replace(self.config.plan, lane_speed=speeds)))
            self._speeds = speeds
        return self._planner(step, lengths, factors)
