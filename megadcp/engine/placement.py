"""Placement: the only carrier of where a microbatch runs and how much of it is recomputed."""

from __future__ import annotations

from dataclasses import dataclass, field

from megadcp.plan.step_plan import Microbatch, Recompute


@dataclass(frozen=True)
class Placement:
    """Handed down with each microbatch; captured by the forward and used again by recompute and backward."""

    step: int = 0
    recompute: Recompute = field(default_factory=Recompute)
    cp: int = 1
    cp_comm: str = "none"

    @staticmethod
    def of(step: int, microbatch: Microbatch) -> Placement:
        """The placement of one microbatch of a plan."""
        return Placement(step, microbatch.recompute, microbatch.cp, microbatch.cp_comm)

    @property
    def recompute_level(self) -> str:
        """none, selective, mlp or full."""
        return self.recompute.level

    @property
    def recompute_layers(self) -> int:
        """The first so many layers of this stage are recomputed."""
        return self.recompute.layers
