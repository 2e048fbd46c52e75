"""What a run allows its plans, beyond what memory allows: group sizes, tokens of a microbatch, recompute values."""

from __future__ import annotations

from dataclasses import dataclass

from megadcp.config.check import UserError
from megadcp.config.schema import Config
from megadcp.plan.basis import Basis
from megadcp.plan.memory import MOST_TOKENS
from megadcp.plan.step_plan import LEVELS, Recompute


@dataclass(frozen=True)
class Limits:
    """Largest cp (a power of two, at most the lanes), most tokens of a microbatch, padding aside (one document may exceed them), recompute.

    `free`: any level on any number of layers; then `choices` are all levels on all layers, which is what static layouts try. Else
    `choices` is the one value that plan.recompute names.
    """

    max_cp: int
    pack_tokens: int
    choices: tuple[Recompute, ...]
    free: bool = True


def everywhere(basis: Basis) -> tuple[Recompute, ...]:
    """Every recompute level on all layers (of the smallest stage, where stages are uneven)."""
    return tuple(Recompute(level, 0 if level == "none" else basis.recomputable) for level in LEVELS)


def most_cp(basis: Basis, wanted: int = 0) -> int:
    """The largest power of two that is at most the lanes and, unless that is 0, `wanted`."""
    most = min(basis.layout.lanes, wanted or basis.layout.lanes)
    return 1 << (most.bit_length() - 1)


def limits_from(config: Config, basis: Basis) -> Limits:
    """The limits of a run. UserError, in one line, for a setting that makes no sense."""
    plan, max_cp = config.plan, config.parallel.max_cp
    if max_cp < 0:
        raise UserError(f"parallel.max_cp={max_cp} must be a number of lanes, or 0 for all lanes")
    if plan.pack_tokens < 0:
        raise UserError(f"plan.pack_tokens={plan.pack_tokens} must be a number of tokens, or 0 to let memory decide")
    free = plan.recompute == "auto"
    if free:
        choices = everywhere(basis)
    else:
        if plan.recompute not in LEVELS:
            raise UserError(f"plan.recompute={plan.recompute} is not known; legal here: auto, {', '.join(LEVELS)}")
        most = basis.recomputable
        if not 0 <= plan.recompute_layers <= most:
            raise UserError(f"plan.recompute_layers={plan.recompute_layers} must be between 0 (all) and {most}, the layers of the smallest stage")
        choices = (Recompute(plan.recompute, 0 if plan.recompute == "none" else plan.recompute_layers or most),)
    return Limits(most_cp(basis, max_cp), plan.pack_tokens or MOST_TOKENS, choices, free)
