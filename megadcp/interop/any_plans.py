"""Plans for models that are not ours: the project's planner, with recompute of whole layers or none. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megadcp.config.check import UserError
from megadcp.config.schema import Config
from megadcp.plan.memory import group_sizes
from megadcp.plan.planner import Planner, planner_for
from megadcp.plan.simulate import run
from megadcp.plan.step_plan import Microbatch, Recompute, StepPlan, round_bytes, round_seconds


def whole_layer_planner_for(config: Config) -> WholeLayerPlanner:
    """The planner of a run: (step, lengths) -> plan. UserError if the run can't be planned."""
    return WholeLayerPlanner(config)


class WholeLayerPlanner:
    """Takes the planner's choice and says `full` on as few layers as need no more memory, where it says selective or mlp.

    Inside somebody else's layer there is nothing that could be recomputed alone. Should `full` not fit in some rare case, all microbatches of
    that step are planned with full recompute of all layers.
    """

    def __init__(self, config: Config) -> None:
        if config.plan.recompute not in ("auto", "none", "full"):
            raise UserError(
                f"plan.recompute={config.plan.recompute}: layers of a model that is not ours are recomputed whole; legal: auto, none, full"
            )
        self.config, self.planner = config, planner_for(config)
        self._safe: Planner | None = None

    def __call__(self, step: int, lengths: Sequence[int]) -> StepPlan:
        """The plan of one step. UserError, in one line, for a step that can't be planned."""
        plan = self.planner(step, lengths)
        if all(one.recompute.level in ("none", "full") for one in plan.microbatches):
            return plan
        mapped = self._mapped(plan)
        if mapped is not None:
            return mapped
        if self._safe is None:
            self._safe = planner_for(replace(self.config, plan=replace(self.config.plan, recompute="full", recompute_layers=0)))
        return self._safe(step, lengths)

    def _mapped(self, plan: StepPlan) -> StepPlan | None:
        memory, cost = self.planner.memory, self.planner.cost
        microbatches = tuple(self._whole(one) for one in plan.microbatches)
        sizes, peak = group_sizes(microbatches), memory.peaks(microbatches)[0]
        if peak > memory.budget(0, sizes):
            return None
        seconds = round_seconds(run(cost, microbatches).makespan)
        predicted = replace(plan.predicted, seconds=seconds, peak_bytes=(round_bytes(memory.static(0, sizes) + peak),))
        return replace(plan, microbatches=microbatches, predicted=predicted)

    def _whole(self, one: Microbatch) -> Microbatch:
        if one.recompute.level in ("none", "full"):
            return one
        memory, most = self.planner.memory, self.planner.basis.recomputable
        room = memory.bytes(one)
        choices = (replace(one, recompute=Recompute("full", layers)) for layers in range(1, most + 1))
        found = next((each for each in choices if memory.bytes(each) <= room), replace(one, recompute=Recompute("full", most)))
        return replace(found, seconds=round_seconds(self.planner.cost.seconds(found)), bytes=round_bytes(memory.bytes(found)))
