"""Placement: the only carrier of where a microbatch runs and how much of it is recomputed."""

from __future__ import annotations

from dataclasses import dataclass, field

from megadcp.mesh.groups import Group
from megadcp.plan.step_plan import Microbatch, Recompute


@dataclass(frozen=True)
class Placement:
    """Handed down with each microbatch; captured by the forward and used again by recompute and backward."""

    step: int = 0
    recompute: Recompute = field(default_factory=Recompute)
    cp: int = 1
    cp_comm: str = "none"
    group: Group = field(default_factory=Group.single)
    lanes_per_node: int = 1

    @staticmethod
    def of(step: int, microbatch: Microbatch, group: Group | None = None, lanes_per_node: int = 1) -> Placement:
        """The placement of one microbatch of a plan; `group` is its cp group as this rank sees it (None: the rank alone)."""
        found = group or Group.single()
        if found.size != microbatch.cp:
            raise ValueError(f"the microbatch at slot {microbatch.slot} wants a group of {microbatch.cp}, but got one of {found.size} ranks")
        return Placement(step, microbatch.recompute, microbatch.cp, microbatch.cp_comm, found, lanes_per_node)

    @property
    def cp_index(self) -> int:
        """Position of this rank in the group."""
        return self.group.index

    @property
    def recompute_level(self) -> str:
        """none, selective, mlp or full."""
        return self.recompute.level

    @property
    def recompute_layers(self) -> int:
        """The first so many layers of this stage are recomputed."""
        return self.recompute.layers
