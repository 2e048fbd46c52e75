"""The learning rate as a pure function of how far the run is: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from megadcp.config.check import UserError
from megadcp.config.schema import OptimConfig

SCHEDULES = ("cosine", "linear", "wsd", "constant")


def learning_rate(optim: OptimConfig, step: int, tokens: int, total_steps: int, total_tokens: int) -> float:
    """The rate of one step.

    step: 1 for the first of the run's `total_steps`; tokens: real tokens of all steps up to and with this one, of about `total_tokens`.
    The whole schedule runs on tokens when the warmup is given in tokens, else on steps. Skipped steps count like others.
    """
    if optim.warmup_tokens:
        done, warmup, total = tokens, optim.warmup_tokens, total_tokens
    else:
        done, warmup, total = step, optim.warmup_steps, total_steps
    if done < warmup:
        return optim.lr * done / warmup
    floor = optim.lr * optim.min_lr_share
    return floor + (optim.lr - floor) * _height(optim, done, warmup, total)


def _height(optim: OptimConfig, done: int, warmup: int, total: int) -> float:
    """Between 1 (peak) and 0 (end of the run)."""
    if optim.schedule == "constant":
        return 1.0
    if optim.schedule == "wsd":
        decay = max(1.0, optim.decay_share * total)
        return min(1.0, max(0.0, (total - done) / decay))
    share = min(1.0, max(0.0, (done - warmup) / max(1, total - warmup)))
    if optim.schedule == "linear":
        return 1.0 - share
    if optim.schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * share))
    raise UserError(f"optim.schedule={optim.schedule} is not known; legal here: {', '.join(SCHEDULES)}")


def describe_schedule(optim: OptimConfig, total_steps: int, total_tokens: int) -> str:
    """One line for a person."""
    unit, warmup, total = ("tokens", optim.warmup_tokens, total_tokens) if optim.warmup_tokens else ("steps", optim.warmup_steps, total_steps)
    fall = "" if optim.schedule == "constant" else f", falling to {optim.lr * optim.min_lr_share:.3g}"
    if optim.schedule == "wsd":
        fall += f" over the last {100 * optim.decay_share:g}%"
    return f"learning rate: {optim.schedule}, warmup {warmup:,} of {total:,} {unit}, peak {optim.lr:.3g}{fall}"
