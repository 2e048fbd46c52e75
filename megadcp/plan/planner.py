"""From a step's lengths to its plan: packing, group sizes, microbatches and recompute chosen together (policy joint), or alike (static).

Two searches do the choosing: lanes.py without pipelines, pipelines.py with them. Whatever they find is compared, by the simulator, with
static-best, the best layout that treats all documents alike: no plan is slower than that. Nothing here depends on a clock, on hash order
or on the order of floating-point sums in a library: the same lengths give the same plan everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from operator import index

from megadcp.config.check import UserError
from megadcp.config.schema import Config
from megadcp.plan import lanes, pipelines
from megadcp.plan.baselines import static_best
from megadcp.plan.basis import basis_from
from megadcp.plan.cost import CostModel
from megadcp.plan.limits import limits_from
from megadcp.plan.lower_bound import lower_bound
from megadcp.plan.memory import MOST_TOKENS, MemoryModel, group_sizes
from megadcp.plan.simulate import run
from megadcp.plan.step_plan import Microbatch, Predicted, Recompute, StepPlan, round_bytes, round_down, round_seconds

POLICIES = ("joint", "static")


def planner_for(config: Config) -> Planner:
    """The planner of a run: (step, lengths of its documents in the sampler's order) -> plan. UserError if the run can't be planned."""
    return Planner(config)


class Planner:
    """Plans the steps of one run. plan.pack_tokens caps what is packed together; a single document above it gets a microbatch of its own."""

    def __init__(self, config: Config) -> None:
        if config.plan.policy not in POLICIES:
            raise UserError(f"plan.policy={config.plan.policy} is not known; legal here: {', '.join(POLICIES)}")
        self.policy = config.plan.policy
        self.basis = basis_from(config)
        self.limits = limits_from(config, self.basis)
        self.cost, self.memory = CostModel(self.basis), MemoryModel(self.basis)
        self.static_capacity = min(config.data.max_length, self.limits.pack_tokens)
        self._check_budget()
        self._most = {cp: self._most_tokens(cp) for cp in self._sizes()}

    def __call__(self, step: int, lengths: Sequence[int]) -> StepPlan:
        """The plan of one step. UserError, in one line, for a step that can't be planned."""
        lengths = _integers(step, lengths)
        self._check_lengths(step, lengths)
        limits = self.limits
        static = static_best(self.basis, lengths, self.static_capacity, limits.choices, limits.max_cp)
        bound = lower_bound(self.basis, lengths)
        if self.policy == "static":
            if static is None:
                raise UserError(
                    f"step {step}: no static layout fits the memory with documents of up to {max(lengths)} tokens; "
                    "plan.policy=joint plans it, or data.max_length may be lower"
                )
            microbatches, makespan = list(static.microbatches), run(self.cost, static.microbatches).makespan
        elif self.basis.layout.pp == 1:
            microbatches = lanes.search(self.basis, lengths, limits, bound)
            makespan = run(self.cost, microbatches).makespan
            if static is not None and _nanoseconds(static.makespan) <= _nanoseconds(makespan):
                microbatches, makespan = list(static.microbatches), static.makespan
        else:
            microbatches = self._filled(pipelines.search(self.basis, lengths, limits, static, self.static_capacity))
            makespan = run(self.cost, microbatches).makespan
        static_seconds = 0.0 if static is None else static.makespan
        if abs(static_seconds - makespan) <= 1e-9 * makespan:
            static_seconds = makespan  # sums in another order differ in their last bits
        sizes = group_sizes(microbatches)
        peaks = self.memory.peaks(microbatches)
        predicted = Predicted(
            round_seconds(makespan),
            tuple(round_bytes(self.memory.static(stage, sizes) + peak) for stage, peak in enumerate(peaks)),
            round_down(bound),
            round_seconds(static_seconds),
            self.policy,
        )
        basis = self.basis
        return StepPlan(
            step, basis.layout, basis.schedule, basis.stage_layers, basis.model, basis.precision, basis.unit, basis.profile,
            tuple(lengths), tuple(microbatches), basis.lane_speed, predicted,
        )  # fmt: skip

    def _filled(self, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        """With predicted seconds and bytes."""
        return [
            replace(one, seconds=round_seconds(self.cost.seconds(one)), bytes=round_bytes(self.memory.bytes(one))) if one.seconds == 0.0 else one
            for one in microbatches
        ]

    # -------------------------------------------------------------------------------------------------------------- errors
    def _sizes(self) -> list[int]:
        return [1 << power for power in range(self.limits.max_cp.bit_length())]

    def _budgets(self, cp: int) -> list[float]:
        return [self.memory.budget(stage, int(cp > 1)) for stage in range(self.basis.layout.pp)]

    def _most_tokens(self, cp: int) -> tuple[int, Recompute]:
        """(tokens of the longest document that fits a group of `cp` lanes alone, with which recompute)."""
        grain = math.lcm(cp * self.basis.align, 2 * cp if cp > 1 else 1)
        most = [(self.memory.most_tokens(one.level, one.layers, self._budgets(cp)), number) for number, one in enumerate(self.limits.choices)]
        tokens, number = max(most, key=lambda found: (found[0], -found[1]))
        return tokens * cp // grain * grain, self.limits.choices[number]

    def _check_budget(self) -> None:
        profile = self.basis.profile
        usable = profile.usable_fraction * profile.memory_bytes
        for stage, budget in enumerate(self._budgets(1)):
            if budget <= 0:
                static = self.memory.static(stage, 0)
                where = f" on stage {stage}" if self.basis.layout.pp > 1 else ""
                raise UserError(
                    f"no memory is left for activations{where}: weights, gradients and optimizer take {static / 1e9:.4g} GB of the "
                    f"{usable / 1e9:.4g} GB that hardware.memory_bytes={profile.memory_bytes:.6g} * "
                    f"hardware.usable_fraction={profile.usable_fraction:g} allow; needed: a device with more than "
                    f"{static / profile.usable_fraction / 1e9:.4g} GB, a larger parallel.tp or parallel.pp, or a smaller model"
                )

    def _check_lengths(self, step: int, lengths: Sequence[int]) -> None:
        if not lengths:
            raise UserError(f"step {step} has no documents: a plan needs at least one")
        if min(lengths) < 1:
            document = min(range(len(lengths)), key=lambda one: lengths[one])
            raise UserError(f"step {step}: document {document} has length {lengths[document]}; every document needs at least 1 token")
        longest = max(range(len(lengths)), key=lambda one: lengths[one])
        cp = max(self._most, key=lambda size: (self._most[size][0], -size))
        most, choice = self._most[cp]
        if lengths[longest] <= most:
            return
        raise UserError(self._too_long(step, longest, lengths[longest], cp, choice))

    def _too_long(self, step: int, document: int, length: int, cp: int, choice: Recompute) -> str:
        """What is wrong with a document that fits on no group, and what would help."""
        limits, layout, most = self.limits, self.basis.layout, self._most[cp][0]
        grain = math.lcm(cp * self.basis.align, 2 * cp if cp > 1 else 1)
        tokens = -(-length // grain) * grain
        needs = [self.memory.need(stage, tokens / cp, choice) for stage in range(layout.pp)]
        budgets = self._budgets(cp)
        stage = max(range(layout.pp), key=lambda one: needs[one] - budgets[one])
        helps = [f"data.max_length={most} or less"] if most else []
        if not limits.free:
            helps.append("plan.recompute=auto")
        if limits.max_cp < 1 << (layout.lanes.bit_length() - 1):
            helps.append(f"a parallel.max_cp above {limits.max_cp}")
        static = self.memory.static(stage, int(cp > 1))
        helps.append(f"a device with {math.ceil((needs[stage] + static) / self.basis.profile.usable_fraction / 1e9)} GB")
        helps.append("more ranks, or a larger parallel.tp")
        where = "on the lane" if layout.lanes == 1 else f"on any group of up to {limits.max_cp} of the {layout.lanes} lanes"
        return (
            f"step {step}: document {document} with {length} tokens does not fit {where}: it needs {needs[stage] / 1e9:.4g} GB a rank even with "
            f"recompute={choice.level} on {choice.layers} layers{f' (stage {stage})' if layout.pp > 1 else ''}, {budgets[stage] / 1e9:.4g} GB are "
            "free for activations"
            + (f" and a microbatch holds at most {MOST_TOKENS} tokens a lane" if tokens > cp * MOST_TOKENS else "")
            + f"; what would make it fit: {', '.join(helps)}"
        )


def _integers(step: int, lengths: Sequence[int]) -> list[int]:
    try:
        return [index(length) for length in lengths]
    except TypeError:
        wrong = next(one for one in lengths if not hasattr(one, "__index__"))
        raise UserError(f"step {step}: lengths must be integers, found {wrong!r}") from None


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
