"""The planner of a run whose profile is corrected while it runs (plan.refit): each plan is made with, and carries, the profile in force."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megadcp.config.schema import Config
from megadcp.plan.fit import Factors, scaled
from megadcp.plan.planner import Planner, planner_for
from megadcp.plan.step_plan import StepPlan

NEUTRAL = Factors()


def fitted_planner_for(config: Config) -> FittedPlanner:
    """The planner of a run: (step, lengths, factors in force) -> plan. UserError if the run can't be planned."""
    return FittedPlanner(config)


class FittedPlanner:
    """Plans the steps of one run; the factors come with each step, so that whoever plans (process, thread, trainer) plans the same."""

    def __init__(self, config: Config) -> None:
        self.config, self._factors = config, NEUTRAL
        self._planner: Planner = planner_for(config)

    def __call__(self, step: int, lengths: Sequence[int], factors: Factors = NEUTRAL) -> StepPlan:
        """The plan of one step with the profile that `factors` make of the run's."""
        factors = Factors(*factors)
        if factors != self._factors:
            self._planner = planner_for(replace(self.config, hardware=scaled(self.config.hardware, factors)))
            self._factors = factors
        return self._planner(step, lengths)
