"""Small values that ranks tell each other outside the steps, over the CPU. All ranks of the group call the same function in the same order."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist

from megadcp.mesh.groups import Group
from megadcp.parallel.collectives import all_reduce

ALONE = Group.single()
Value = TypeVar("Value")


def gather(value: Value, group: Group) -> list[Value]:
    """Everybody's value (pickled among the ranks of this job), in group order."""
    found: list[Value] = [value] * group.size
    if group.handle is not None:
        dist.all_gather_object(found, value, group=group.handle)
    return found


def collect(value: Value, group: Group) -> list[Value]:
    """Everybody's value on the first rank, in group order; [] on the others."""
    if group.handle is None:
        return [value]
    found: list[Value] | None = [value] * group.size if group.index == 0 else None
    dist.gather_object(value, found, group.ranks[0], group=group.handle)
    return found or []


def largest(number: int, group: Group) -> int:
    """The largest of everybody's numbers."""
    return int(all_reduce(torch.tensor(number), group, "max"))
