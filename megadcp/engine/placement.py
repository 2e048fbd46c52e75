"""Placement: the only carrier of where a microbatch runs and how much of it is recomputed."""

from __future__ import annotations

from dataclasses import dataclass, field

from megadcp.mesh.groups import Group, GroupPool
from megadcp.plan.step_plan import Microbatch, Recompute

ALL = 1 << 30  # lanes: no limit


@dataclass(frozen=True)
class Placement:
    """Handed down with each microbatch; captured by the forward and used again by recompute and backward.

    group: the ranks that share the microbatch, one for each of its lanes in order (None: this rank has it alone). lanes_per_node: neighbouring
    lanes with fast links among them (kind 2d stays within them when it exchanges heads). halves: for kind 2d the two groups that this rank
    is in, neighbours and those across, where the pool has them.
    """

    step: int = 0
    recompute: Recompute = field(default_factory=Recompute)
    cp: int = 1
    cp_comm: str = "none"
    group: Group | None = None
    lanes_per_node: int = ALL
    halves: tuple[Group, Group] | None = None

    @staticmethod
    def of(step: int, microbatch: Microbatch, pool: GroupPool | None = None, lanes_per_node: int = ALL) -> Placement:
        """The placement of one microbatch of a plan. ValueError if it needs a group that the pool doesn't have."""
        group = halves = None
        if microbatch.cp > 1:
            if pool is None:
                raise ValueError(f"the microbatch at slot {microbatch.slot} is for {microbatch.cp} lanes, but this process runs alone")
            group = pool.cp(microbatch.lane, microbatch.cp)
            halves = pool.halves(microbatch.lane, microbatch.cp) if microbatch.cp_comm == "2d" else None
        return Placement(step, microbatch.recompute, microbatch.cp, microbatch.cp_comm, group, lanes_per_node, halves)

    @property
    def cp_index(self) -> int:
        """Place of this rank in the cp group."""
        return 0 if self.group is None else self.group.index

    @property
    def recompute_level(self) -> str:
        """none, selective, mlp or full."""
        return self.recompute.level

    @property
    def recompute_layers(self) -> int:
        """The first so many layers of this stage are recomputed."""
        return self.recompute.layers
