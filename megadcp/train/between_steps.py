"""Between two steps: what all ranks tell each other, slow lanes, and what becomes of steps that were not applied."""

from __future__ import annotations

import numpy as np
import torch

from megadcp.engine.step import StepResult
from megadcp.engine.stragglers import LaneSpeeds
from megadcp.parallel.collectives import all_gather, all_reduce
from megadcp.plan.step_plan import StepPlan
from megadcp.train import checkpoint
from megadcp.train.across import Across, across, own_numbers
from megadcp.train.health import Rollback
from megadcp.train.session import Run, first
from megadcp.train.signals import StopRequest
from megadcp.train.timeline import add_timeline, is_due
from megadcp.train.together import gather

FAILED = 1
SLOW_STEPS = 30  # for which a lane is slow before it is told of: a busy moment is nobody's business


def bad_step(run: Run, problem: str) -> int | Rollback | None:
    """What comes of a step that was not applied: None goes on."""
    config, progress = run.config, run.state.progress
    policy = "skip" if run.state.bad_steps is None else run.state.bad_steps.policy(problem)
    run.incident("bad_step", f"step {progress.step:,} was not applied: {problem}", policy=policy)
    if policy == "rollback":
        return _back(run, problem)
    if policy == "stop":
        return _fail(run, f"step {progress.step:,} was not applied: {problem} (health.nan={config.health.nan}, health.spike={config.health.spike})")
    if progress.skipped_in_a_row >= config.optim.max_skipped:
        return _fail(
            run,
            f"{progress.skipped_in_a_row} steps in a row had NaN or Inf or were refused (optim.max_skipped={config.optim.max_skipped}), up to step "
            f"{progress.step:,}",
        )
    return None


def _back(run: Run, problem: str) -> int | Rollback:
    """Whether, and to where, the run can be sent back. All ranks decide alike."""
    progress, health = run.state.progress, run.config.health
    run.saver.finish()
    aim = progress.step - health.rollback_steps
    kept = first(run.world, lambda: [int(path.name.removeprefix(checkpoint.PREFIX)) for path in checkpoint.saved(run.folder)])
    if progress.rollbacks >= health.max_rollbacks:
        return _fail(run, f"{problem} in step {progress.step:,}, after {progress.rollbacks} rollbacks (health.max_rollbacks={health.max_rollbacks})")
    if not any(step <= aim for step in kept):
        return _fail(run, f"{problem} in step {progress.step:,}, and no checkpoint of step {aim:,} or before is there to go back to")
    to = max(step for step in kept if step <= aim)
    return Rollback(to, progress.step, progress.place, problem, progress.rollbacks)


def _fail(run: Run, why: str) -> int:
    run.saver.finish()
    kept = "nothing was saved" if run.saved_step < 0 else f"the last checkpoint is step {run.saved_step:,}"
    run.console.say(f"FAILED: {why}; {kept}. A lower optim.lr or a longer warmup usually helps; metrics.jsonl shows where it began")
    run.incident("failed", why)
    return FAILED


def exchange(run: Run, plan: StepPlan, result: StepResult, data_seconds: float, stop: StopRequest) -> tuple[Across, list[float]]:
    """The one small exchange between two steps: who wants to stop, what all ranks measured; and measured / predicted by lane."""
    state, mesh = run.state, run.state.engine.mesh
    own = own_numbers(plan, result, state.engine.coords.lane, bool(stop), data_seconds)
    if state.pool is None:
        return across(np.array([own]), mesh), []
    # On the host, over the group's gloo: a GPU is not waited for.
    table = all_gather(torch.tensor([own], dtype=torch.float64), state.pool.world).numpy()
    run.asked = float(table[:, 0].max())
    ratios = [] if state.lanes is None else state.lanes.observe(plan.step, table[:, 1:3])
    if state.lanes is not None:
        _tell_stragglers(run, state.lanes)
    return across(table, mesh), ratios


def keep_timeline(run: Run, plan: StepPlan, result: StepResult) -> None:
    """What all ranks did when, of steps whose picture is kept."""
    step = run.state.progress.step
    if is_due(run.config, step):
        everybody = gather(result.actions, run.state.world)
        if run.leads:
            add_timeline(run.folder.path, step, plan, everybody)


def _tell_stragglers(run: Run, lanes: LaneSpeeds) -> None:
    """One line for a lane that stays slow, and one when it is no longer."""
    factor = run.config.health.straggler_factor
    if not factor:
        return
    slowness = lanes.slowness()
    for lane, value in enumerate(slowness):
        before = run.slow.pop(lane, 0)
        if value > factor or (before >= SLOW_STEPS and value > 1 + 0.5 * (factor - 1)):
            run.slow[lane] = before + 1
        elif before >= SLOW_STEPS:
            run.console.say(f"lane {lane} is no longer slow")
        if run.slow.get(lane) == SLOW_STEPS:
            text = f"lane {lane} is slow: the same work takes {value:.2f} times as long there as on lane {slowness.index(min(slowness))}"
            if not run.config.plan.refit_lane_speed:
                text += "; plan.refit_lane_speed=true gives it less work"
            run.console.say(text)
            run.incident("straggler", text, lane=lane, factor=round(value, 3))


def agreed(run: Run, wanted: bool) -> bool:
    """Whether any rank wants it: a signal may have reached some of them only, or this one a step later."""
    if run.state.pool is None:
        return wanted
    flag = torch.tensor(int(wanted), dtype=torch.int32)  # on the host, as above
    return bool(all_reduce(flag, run.state.pool.world, "max").item())
