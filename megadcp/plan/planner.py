"""From a step's lengths to its plan. Policy `pack`: one lane, whole documents packed into microbatches, as little recompute as memory allows.

On one lane a step takes the sum of its microbatches. Every microbatch costs a fixed time whatever it holds, so few large ones are
good; but what exceeds the memory must be recomputed, so too large ones are not. The planner tries a handful of packings between the
two ends, prices each pack with its cheapest recompute, and takes the best. Nothing here depends on a clock or on floating-point
sums over arrays: the same lengths give the same plan everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from operator import index
from typing import NamedTuple

from megadcp.config.check import UserError
from megadcp.config.schema import Config
from megadcp.plan.baselines import everywhere, static_best
from megadcp.plan.basis import basis_from
from megadcp.plan.cost import CostModel, Load
from megadcp.plan.lower_bound import lower_bound
from megadcp.plan.memory import MOST_TOKENS, MemoryModel
from megadcp.plan.packing import balanced, first_fit, longest_first, pad
from megadcp.plan.simulate import run
from megadcp.plan.step_plan import LEVELS, Microbatch, Predicted, Recompute, StepPlan, round_bytes, round_down, round_seconds

BALANCED_TRIES = 6  # packings into a given number of packs, between the fewest possible and those that need no recompute


def planner_for(config: Config) -> Callable[[int, Sequence[int]], StepPlan]:
    """The planner of a run: (step, lengths of its documents in the sampler's order) -> plan. UserError if the run can't be planned."""
    if config.plan.policy not in ("joint", "static"):
        raise UserError(f"plan.policy={config.plan.policy} is not known; legal here: joint, static")
    return PackPlanner(config)


class Pack(NamedTuple):
    """One microbatch before it has a slot."""

    documents: tuple[int, ...]
    padded: tuple[int, ...]
    recompute: Recompute
    seconds: float
    bytes: float


class PackPlanner:
    """Policy `pack`. plan.pack_tokens caps what is packed together; a single document above the cap gets a microbatch of its own."""

    def __init__(self, config: Config) -> None:
        self.basis = basis_from(config)
        layout = self.basis.layout
        if layout.lanes > 1 or layout.pp > 1:
            raise UserError(
                f"plan.policy=joint plans for one lane without pipeline stages, but this job has {layout.lanes} lanes and parallel.pp={layout.pp}; "
                "the planner for more than that is not there yet; legal here: parallel.pp=1 and as many ranks as parallel.tp"
            )
        self.cost, self.memory = CostModel(self.basis), MemoryModel(self.basis)
        self.budgets = [self.memory.budget(0, 0)]
        self._check_budget()
        self.choices = self._choices(config)
        self.cap = config.plan.pack_tokens or MOST_TOKENS
        if self.cap < 0:
            raise UserError(f"plan.pack_tokens={self.cap} must be a number of tokens, or 0 to let memory decide")
        self.static_capacity = min(config.data.max_length, self.cap)
        self.most = {choice: self.memory.most_tokens(choice.level, choice.layers, self.budgets) for choice in self.choices}
        self.free = config.plan.recompute == "auto"

    def __call__(self, step: int, lengths: Sequence[int]) -> StepPlan:
        """The plan of one step. UserError, in one line, for a step that can't be planned."""
        try:
            lengths = [index(length) for length in lengths]
        except TypeError:
            raise UserError(
                f"step {step}: lengths must be integers, found {next(one for one in lengths if not hasattr(one, '__index__'))!r}"
            ) from None
        self._check_lengths(step, lengths)
        static = static_best(self.basis, lengths, self.static_capacity, self.choices)
        # static-best's packing comes first and wins ties, so that no plan is slower than it
        candidates = [] if static is None else [[list(one.documents) for one in static.microbatches]]
        candidates += self._packings(lengths)
        priced = [packs for packs in (self._price_all(candidate, lengths) for candidate in candidates) if packs is not None]
        best = min(priced, key=lambda packs: round(math.fsum(pack.seconds for pack in packs) * 1e9))
        best.sort(key=lambda pack: (-round(pack.seconds * 1e9), -round(pack.bytes), pack.documents))
        microbatches = tuple(self._microbatch(slot, pack) for slot, pack in enumerate(best))
        makespan = run(self.cost, microbatches).makespan
        static_seconds = 0.0 if static is None else static.makespan
        if abs(static_seconds - makespan) <= 1e-9 * makespan:
            static_seconds = makespan  # sums in another order differ in their last bits
        predicted = Predicted(
            round_seconds(makespan),
            (round_bytes(self.memory.static(0, 0) + self.memory.peaks(microbatches)[0]),),
            round_down(lower_bound(self.basis, lengths)),
            round_seconds(static_seconds),
            "joint",
        )
        return self._plan(step, lengths, microbatches, predicted)

    # ----------------------------------------------------------------------------------------------------------- packings
    def _packings(self, lengths: Sequence[int]) -> Iterator[list[list[int]]]:
        """Ways to pack the documents, none above what memory or the user allows."""
        order, align = longest_first(lengths), self.basis.align
        longest, total = lengths[order[0]], sum(lengths)
        limit = min(self.cap, max(self.most.values())) // align * align
        # Above `plain` memory asks for recompute. With a named recompute all tokens pay alike, and the fewest packs are the best.
        plain = min(limit, self.most[Recompute()] // align * align) if self.free else limit
        capacities = {limit, plain, *(min(limit, tokens // align * align) for tokens in self.most.values())}
        capacities |= {min(limit, self.static_capacity // share) for share in (1, 2, 4)}
        fewest = 0
        for capacity in sorted(capacities, reverse=True):
            if capacity < longest and capacity not in (limit, plain):
                continue
            packs = first_fit(order, lengths, capacity)
            fewest = fewest or len(packs)
            yield packs
            if total <= capacity <= plain:
                return  # everything in one pack without recompute: nothing can be faster
            if capacity == plain:
                most = len(packs)
                for count in sorted({round(fewest * (most / fewest) ** (k / BALANCED_TRIES)) for k in range(BALANCED_TRIES + 1)}):
                    yield balanced(order, lengths, count)

    def _price_all(self, packs: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[Pack] | None:
        priced = []
        for documents in packs:
            pack = self._price(documents, lengths)
            if pack is None:
                return None
            priced.append(pack)
        return priced

    def _price(self, documents: Sequence[int], lengths: Sequence[int]) -> Pack | None:
        """A pack with its cheapest recompute, or None when it is above the cap or fits at no level."""
        padded = pad([lengths[document] for document in documents], 1, self.basis.align)
        tokens = sum(padded)
        if tokens > self.cap and len(documents) > 1:
            return None
        layer = self.cost.layer(Load(tokens, sum([length * length for length in padded])))
        best, least = None, (0, 0)
        for choice in self._fitting(tokens):
            seconds, need = self.cost.stages(layer, tokens, choice.level, choice.layers)[0], self.memory.need(0, tokens, choice)
            score = round(seconds * 1e9), round(need)
            if best is None or score < least:
                best, least = Pack(tuple(documents), padded, choice, seconds, need), score
        return best

    def _fitting(self, tokens: int) -> Iterator[Recompute]:
        """The recompute values worth pricing for a pack: the named one, or each level with its least layers; none alone if it fits."""
        if not self.free:
            yield from (choice for choice in self.choices if tokens <= self.most[choice])
            return
        for level in LEVELS:
            layers = self.memory.least_layers(tokens, level, self.budgets)
            if layers >= 0:
                yield Recompute(level, layers)
            if layers == 0:
                return

    def _microbatch(self, slot: int, pack: Pack) -> Microbatch:
        seconds, count = round_seconds(pack.seconds), round_bytes(pack.bytes)
        return Microbatch(slot, 0, 1, pack.documents, pack.padded, pack.recompute, "none", seconds, count)

    def _plan(self, step: int, lengths: Sequence[int], microbatches: tuple[Microbatch, ...], predicted: Predicted) -> StepPlan:
        basis = self.basis
        return StepPlan(
            step, basis.layout, basis.schedule, basis.stage_layers, basis.model, basis.precision, basis.unit, basis.profile,
            tuple(lengths), microbatches, basis.lane_speed, predicted,
        )  # fmt: skip

    # -------------------------------------------------------------------------------------------------------------- errors
    def _choices(self, config: Config) -> tuple[Recompute, ...]:
        """The recompute values that are allowed on whole packs: all levels on all layers, or the one that plan.recompute names."""
        level, layers = config.plan.recompute, config.plan.recompute_layers
        if level == "auto":
            return everywhere(self.basis)
        if level not in LEVELS:
            raise UserError(f"plan.recompute={level} is not known; legal here: auto, {', '.join(LEVELS)}")
        if not 0 <= layers <= self.basis.recomputable:
            raise UserError(f"plan.recompute_layers={layers} must be between 0 (all) and {self.basis.recomputable}, the layers of the smallest stage")
        return (Recompute(level, 0 if level == "none" else layers or self.basis.recomputable),)

    def _check_budget(self) -> None:
        profile = self.basis.profile
        if self.budgets[0] <= 0:
            usable, static = profile.usable_fraction * profile.memory_bytes, self.memory.static(0, 0)
            raise UserError(
                f"no memory is left for activations: weights, gradients and optimizer take {static / 1e9:.4g} GB of the {usable / 1e9:.4g} GB that "
                f"hardware.memory_bytes={profile.memory_bytes:.6g} * hardware.usable_fraction={profile.usable_fraction:g} allow; "
                f"needed: a device with more than {static / profile.usable_fraction / 1e9:.4g} GB, a larger parallel.tp, or a smaller model"
            )

    def _check_lengths(self, step: int, lengths: Sequence[int]) -> None:
        if not lengths:
            raise UserError(f"step {step} has no documents: a plan needs at least one")
        if min(lengths) < 1:
            document = min(range(len(lengths)), key=lambda one: lengths[one])
            raise UserError(f"step {step}: document {document} has length {lengths[document]}; every document needs at least 1 token")
        longest = max(range(len(lengths)), key=lambda one: lengths[one])
        align = self.basis.align
        tokens, most = -(-lengths[longest] // align) * align, max(self.most.values()) // align * align
        if tokens <= most:
            return
        choice = max(self.choices, key=lambda choice: self.most[choice])
        need, static = self.memory.need(0, tokens, choice), self.memory.static(0, 0)
        helps = [f"data.max_length={most} or less"] if most else []
        if not self.free:
            helps.append("plan.recompute=auto")
        helps.append(f"a device with {math.ceil((need + static) / self.basis.profile.usable_fraction / 1e9)} GB, or a larger parallel.tp")
        raise UserError(
            f"step {step}: document {longest} with {lengths[longest]} tokens does not fit on the lane: it needs {need / 1e9:.4g} GB even with "
            f"recompute={choice.level} on {choice.layers} layers, {self.budgets[0] / 1e9:.4g} GB are free for activations"
            + (f" and a microbatch holds at most {MOST_TOKENS} tokens" if tokens > MOST_TOKENS else "")
            + f"; what would make it fit: {', '.join(helps)}"
        )
