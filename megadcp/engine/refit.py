"""The cost model corrected while a run goes on: predicted against measured seconds of each step's microbatches (docs/plan.md section 3).

All ranks hold the same fit: they exchange what they have measured, and compute from the same numbers in the same order. What is fitted is
three factors on predicted seconds (matrix products, attention, fixed cost of a layer), within bounds, from moments that fade from step to
step. The training result does not depend on them, only the plans do, and every plan carries the profile it was made with.

When they change is a rule, not a race: the plan of step s is made with the fit after step s - lag, lag = 2 ahead + 1. While step k runs, the
loader has packs up to step k + ahead, and has handed in lengths up to step k + 2 ahead; so s - lag has been fitted when s is handed in.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megadcp.config.check import UserError
from megadcp.engine.measure import Measured
from megadcp.mesh.coords import Mesh
from megadcp.mesh.groups import Group
from megadcp.parallel.collectives import all_gather
from megadcp.plan.basis import Basis
from megadcp.plan.cost import CostModel
from megadcp.plan.fit import Factors, Moments, parts_of, relative_moments, solve
from megadcp.plan.step_plan import Layout, StepPlan

Floats = npt.NDArray[np.float64]
UNKNOWNS = len(Factors._fields)


@dataclass(frozen=True)
class RefitRules:
    """How far and how fast the fit may move.

    bound: factors lie in [1 / bound, bound]. decay: what the moments before a step weigh in it. anchor: weight of the profile as it is,
    against one step's worth of microbatches that tell a factor and nothing else. change: the factors stay until others predict better by
    this much (root of the mean squared relative error): plans and their profile shall not follow noise.
    skip: first steps of a process (allocations, kernel choices), which aren't looked at.
    """

    bound: float = 2.0
    decay: float = 0.8
    anchor: float = 1e-2
    change: float = 0.01
    skip: int = 2


def exchange_seconds(seconds: Mapping[int, float], slots: int, world: Group, device: torch.device) -> Floats:
    """Everybody's measured seconds by slot (0 where a rank has no microbatch): [ranks, slots], the same on all ranks. One collective."""
    own = torch.zeros(1, slots, dtype=torch.float64)
    for slot, value in seconds.items():
        own[0, slot] = value
    table: Floats = all_gather(own.to(device), world).cpu().numpy()
    return table


class Refit:
    """The fit of one run. `measured` is called once a step by all ranks; `factors` by whoever hands steps in to be planned."""

    def __init__(self, basis: Basis, ahead: int, first: int = 0, rules: RefitRules | None = None) -> None:
        """`basis`: with the profile as configured; `ahead`: plan.ahead; `first`: the step that this process begins with."""
        self.basis, self.lag, self.rules = basis, 2 * ahead + 1, rules or RefitRules()
        self.cost = CostModel(basis)
        layout = basis.layout
        self.mesh = Mesh(layout.lanes, layout.tp, layout.pp)
        self._moments, self._weight = Moments(np.zeros((UNKNOWNS, UNKNOWNS)), np.zeros(UNKNOWNS), 0.0), 0.0  # _weight: of all that has come in
        self._first, self._last, self._seen = first, first - 1, 0
        # (step after which they were fitted, factors), ascending, never empty; replaced as a whole, since another thread reads it
        self._history: tuple[tuple[int, Factors], ...] = ((first - 1, Factors()),)

    @property
    def newest(self) -> Factors:
        """The factors of the newest fit, in force `lag` steps later."""
        return self._history[-1][1]

    def factors(self, step: int) -> Factors:
        """What the plan of `step` must be made with. Any thread may ask.

        Raises:
            ValueError: asked too early: the fit that decides has not been made, so ranks would differ.
        """
        after = step - self.lag
        if after > self._last and after >= self._first:
            raise ValueError(f"the factors of step {step} come from step {after}, but the last fitted step is {self._last}")
        history = self._history
        place = bisect_right([at for at, _ in history], after)
        # Older than the history: a run that goes on with a larger plan.ahead; the oldest fit known is as good as any.
        return history[max(0, place - 1)][1]

    def measured(self, plan: StepPlan, microbatches: Sequence[Measured], world: Group, device: torch.device) -> Factors:
        """After every step, on all ranks: exchange what this rank has measured of its microbatches, and take everybody's in."""
        slots = 1 + max(one.slot for one in plan.microbatches)
        return self.observe(plan, exchange_seconds({one.slot: one.seconds for one in microbatches}, slots, world, device))

    def observe(self, plan: StepPlan, table: Floats) -> Factors:
        """Take in what all ranks measured of one step: [ranks, slots] of `exchange_seconds`, forward + backward without waiting for messages.

        A microbatch's time on a stage is the LEAST of its ranks': those that came first to a collective have waited for the others.
        """
        self._check(plan, table)
        self._last, self._seen = plan.step, self._seen + 1
        if self._seen > self.rules.skip:
            terms, seconds, rest = self._samples(plan, table)
            if len(seconds):
                self._fade(relative_moments(terms, seconds, rest))
        return self.newest

    def _check(self, plan: StepPlan, table: Floats) -> None:
        if plan.layout != self.basis.layout or plan.model != self.basis.model:
            raise ValueError(f"the plan of step {plan.step} is for another layout or model than this fit")
        if plan.step != self._last + 1:
            raise ValueError(f"step {plan.step} is observed after step {self._last}: every step counts, in order")
        if table.shape[0] != self.mesh.world:
            raise ValueError(f"measurements of {table.shape[0]} ranks for a world of {self.mesh.world}")

    def _samples(self, plan: StepPlan, table: Floats) -> tuple[Floats, Floats, Floats]:
        parts, seconds, layout = [], [], plan.layout
        basis = Basis.of(plan)  # its lane speeds may follow the run (stragglers.py)
        for one in plan.microbatches:
            speed = basis.speed(one.lane, one.cp)
            for stage in range(layout.pp):
                ranks = _ranks(self.mesh, layout, stage, one.lane, one.cp)
                measured = table[ranks, one.slot]
                measured = measured[np.isfinite(measured) & (measured > 0)]
                if len(measured):
                    parts.append(parts_of(self.cost, one, stage))
                    seconds.append(float(measured.min()) * speed)
        rows = np.array(parts, dtype=np.float64).reshape(-1, UNKNOWNS + 1)
        return rows[:, :UNKNOWNS], np.array(seconds, dtype=np.float64), rows[:, UNKNOWNS]

    def _fade(self, step: Moments) -> None:
        """Let a step's moments in, fit, and keep the result if it is enough of an improvement."""
        rules, old = self.rules, self._moments
        keep, let = rules.decay, 1 - rules.decay
        self._moments = Moments(
            keep * old.matrix + let * step.matrix, keep * old.vector + let * step.vector, keep * old.constant + let * step.constant
        )
        self._weight = keep * self._weight + let
        mean = Moments(self._moments.matrix / self._weight, self._moments.vector / self._weight, self._moments.constant / self._weight)
        low, high = [1 / rules.bound] * UNKNOWNS, [rules.bound] * UNKNOWNS
        x = solve(mean.matrix + rules.anchor * np.eye(UNKNOWNS), mean.vector + rules.anchor, low, high)
        found = Factors(*x.tolist()).rounded()
        if found != self.newest and mean.error(np.array(self.newest)) - mean.error(np.array(found)) > rules.change:
            kept = [entry for entry in self._history if entry[0] > self._last - self.lag]
            older = [entry for entry in self._history if entry[0] <= self._last - self.lag]
            self._history = (*older[-1:], *kept, (self._last, found))

    # ------------------------------------------------------------------------------------------------------------- checkpoint
    def to_dict(self) -> dict[str, Any]:
        """Everything to keep, as JSON values."""
        return {
            "last": self._last,
            "history": [[step, *factors] for step, factors in self._history],
            "matrix": self._moments.matrix.tolist(),
            "vector": self._moments.vector.tolist(),
            "constant": self._moments.constant,
            "weight": self._weight,
            "profile": asdict(self.basis.profile),
        }

    def load(self, state: Mapping[str, Any]) -> str:
        """Go on with what `to_dict` gave after the step before `first`. What was dropped, in one line; empty when nothing was.

        Raises:
            UserError: the state is damaged, or of another step.
        """
        try:
            last, weight = int(state["last"]), float(state["weight"])
            history = tuple((int(step), Factors(float(one), float(two), float(three))) for step, one, two, three in state["history"])
            matrix, vector = np.array(state["matrix"], dtype=np.float64), np.array(state["vector"], dtype=np.float64)
            moments = Moments(matrix, vector, float(state["constant"]))
            profile = dict(state["profile"])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"the state of the refit can't be read ({error!r})") from None
        shapes = (matrix.shape, vector.shape) == (self._moments.matrix.shape, self._moments.vector.shape)
        if not shapes or not np.isfinite([*matrix.flat, *vector, moments.constant, weight]).all():
            raise UserError("the state of the refit is not the moments of three factors")
        if last != self._first - 1:
            raise UserError(f"the state of the refit is of step {last}, but the run goes on with step {self._first}")
        if _rates(profile) != _rates(asdict(self.basis.profile)):
            return "the refit starts anew: the hardware profile has changed since the checkpoint"
        self._history = history or self._history
        self._moments, self._weight = moments, weight
        return ""


def _rates(profile: Mapping[str, Any]) -> dict[str, Any]:
    """What seconds follow from: memory is no part of it (it shrinks after a rank ran out)."""
    return {name: value for name, value in profile.items() if name not in ("memory_bytes", "usable_fraction")}


def _ranks(mesh: Mesh, layout: Layout, stage: int, lane: int, cp: int) -> list[int]:
    return [mesh.rank(stage, each, tp) for each in range(lane, lane + cp) for tp in range(layout.tp)]
