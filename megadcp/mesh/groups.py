"""Process groups of one rank: the only place that makes them, in one order on all ranks.

One torch group for each distinct set of ranks: where the tp group is also a cp group, both are the same object. Groups of one rank have no
torch group. A group is made by all ranks of the world, members or not, because torch wants it so; the set of all ranks is torch's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import TracebackType
from typing import Any, cast

import torch
import torch.distributed as dist

from megadcp.mesh.coords import Mesh
from megadcp.mesh.streams import HERE, Channel, Streams

TIMEOUT_SECONDS = 600.0  # of one collective
Splits = Mapping[int, int]
NO_SPLITS: Splits = {}


@dataclass(frozen=True)
class Group:
    """Ranks that work together, in ascending order; `index` is the place of this rank among them. One rank alone has no handle.

    channel: what its operations are started through; groups of equal ranks that serve several purposes differ in it alone.
    """

    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup | None
    channel: Channel = field(default=HERE, compare=False, repr=False)

    @property
    def size(self) -> int:
        """Members."""
        return len(self.ranks)

    @staticmethod
    def single(rank: int = 0) -> Group:
        """A rank alone."""
        return Group((rank,), 0, None)


def rank_sets(mesh: Mesh, max_cp: int = 0, splits: Splits = NO_SPLITS) -> list[tuple[int, ...]]:
    """All distinct sets of two or more ranks that work together anywhere in the mesh, in the order in which they are made.

    cp groups: aligned blocks of 2, 4, .. lanes up to `max_cp` (0: all lanes), those that fit. `splits`: of a group size, how many neighbours
    exchange heads; those at the same place of all blocks of neighbours get a group, too.
    """
    stages, lanes, columns = range(mesh.pp), range(mesh.lanes), range(mesh.tp)
    sets = [tuple(range(mesh.world))]
    sets += [mesh.tp_ranks(pp, lane) for pp in stages for lane in lanes]
    sets += [mesh.lane_ranks(pp, tp) for pp in stages for tp in columns]
    for size in cp_sizes(mesh, max_cp):
        sets += [mesh.lane_ranks(pp, tp, first, size) for pp in stages for first in range(0, mesh.lanes - size + 1, size) for tp in columns]
    for size, split in sorted(splits.items()):
        firsts = range(0, mesh.lanes - size + 1, size)
        sets += [
            _strided(mesh, pp, tp, range(first + place, first + size, split))
            for pp in stages
            for first in firsts
            for place in range(split)
            for tp in columns
        ]
    sets += [mesh.pipeline_ranks(lane, tp) for lane in lanes for tp in columns]
    sets += [_ends(mesh, lane, tp) for lane in lanes for tp in columns]
    sets += [_model(mesh, lane) for lane in lanes]
    return [ranks for ranks in dict.fromkeys(sets) if len(ranks) > 1]


def cp_sizes(mesh: Mesh, max_cp: int = 0) -> list[int]:
    """Sizes above 1 of the cp groups in the pool."""
    return [size for size in mesh.group_sizes() if size <= (max_cp or mesh.lanes)]


def _strided(mesh: Mesh, pp: int, tp: int, lanes: Iterable[int]) -> tuple[int, ...]:
    return tuple(mesh.rank(pp, lane, tp) for lane in lanes)


def _ends(mesh: Mesh, lane: int, tp: int) -> tuple[int, ...]:
    ranks = mesh.pipeline_ranks(lane, tp)
    return tuple(dict.fromkeys((ranks[0], ranks[-1])))


def _model(mesh: Mesh, lane: int) -> tuple[int, ...]:
    return tuple(mesh.rank(pp, lane, tp) for pp in range(mesh.pp) for tp in range(mesh.tp))


class GroupPool:
    """Every group that this rank will ever need, made at the start: no step makes one.

    All ranks construct it at the same time, after torch.distributed is up (a world of one rank needs none). Used as a context it destroys
    its groups at the end; after an error it leaves them to the end of the process, because an unfinished operation could hold it here.
    """

    def __init__(
        self, mesh: Mesh, rank: int, device: torch.device, max_cp: int = 0, timeout_s: float = TIMEOUT_SECONDS, overlap: bool = False,
        streams: Streams | None = None, splits: Splits = NO_SPLITS,
    ) -> None:  # fmt: skip
        """Make the groups and warm each of them up with one small sum.

        `overlap`: `lanes` gets a torch group to itself where other groups have the same ranks. Operations of one torch group must start in
        the same order on all members; gradient buckets that start in each lane's own last backward do not keep one with the cp group.
        `streams`: where operations of each purpose run; None makes those of the device. `splits`: group sizes that also need `halves`.

        Raises:
            ValueError: the rank or torch's world does not belong to the mesh, or a split isn't a smaller group size.
        """
        self.splits = {size: split for size, split in splits.items() if size in cp_sizes(mesh, max_cp)}
        if any(not 1 < split < size or size % split or split not in mesh.group_sizes() for size, split in self.splits.items()):
            raise ValueError(f"groups can't be cut as {dict(self.splits)} says: each size into powers of two above 1 and below it")
        self.mesh, self.rank, self.coords, self.sizes = mesh, rank, mesh.coords(rank), cp_sizes(mesh, max_cp)
        self._handles: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._groups: dict[tuple[int, ...], Group] = {}
        self._own: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self.streams = streams or Streams(device)
        if mesh.world > 1:
            _check_world(mesh, rank)
            self._handles = _make(rank_sets(mesh, max_cp, self.splits), mesh.world, timedelta(seconds=timeout_s))
            self._own = _make(_shared_lanes(mesh, max_cp), 0, timedelta(seconds=timeout_s)) if overlap else {}
            self._groups = {ranks: Group(ranks, ranks.index(rank), handle) for ranks, handle in self._handles.items() if rank in ranks}
        pp, lane, tp = self.coords
        self.world = self._group(tuple(range(mesh.world)), "dp")
        self.tp = self._group(mesh.tp_ranks(pp, lane), "tp")
        self.lanes = self._lanes(mesh.lane_ranks(pp, tp))
        self.pipeline = self._group(mesh.pipeline_ranks(lane, tp), "pp")
        ends = _ends(mesh, lane, tp)
        self.ends = self._group(ends, "dp") if rank in ends else Group.single(rank)
        self.model = self._group(_model(mesh, lane), "dp")
        _warm_up([*self._groups.values(), self.lanes], device)

    def cp(self, lane: int, size: int) -> Group:
        """The group of `size` lanes that runs a microbatch of first lane `lane`; this rank's lane must be one of them.

        Raises:
            ValueError: no aligned block of the pool holds both lanes.
        """
        mine = self.coords.lane
        first = lane // size * size if size > 0 else -1
        if not first <= mine < first + size:
            raise ValueError(f"rank {self.rank} (lane {mine}) takes no part in the cp group of {size} lanes that holds lane {lane}")
        if size == 1:
            return Group.single(self.rank)
        ranks = self.mesh.lane_ranks(self.coords.pp, self.coords.tp, first, size)
        if size not in self.sizes or ranks not in self._groups:
            fits = [1] + [each for each in self.sizes if mine // each * each + each <= self.mesh.lanes]
            raise ValueError(f"no cp group of {size} lanes holds lane {mine}; sizes with a group here: {', '.join(map(str, fits))}")
        return self._group(ranks, "cp")

    def halves(self, lane: int, size: int) -> tuple[Group, Group] | None:
        """Of the group of `cp`, the neighbours of this rank and those at its place of other blocks of neighbours; None where none was asked for."""
        split = self.splits.get(size)
        if split is None:
            return None
        mine, first = self.coords.lane, lane // size * size
        across = _strided(self.mesh, self.coords.pp, self.coords.tp, range(first + (mine - first) % split, first + size, split))
        return self.cp(mine, split), self._group(across, "cp")

    @property
    def count(self) -> int:
        """Torch groups of the pool; the same on all ranks."""
        return len(self._handles) + len(self._own)

    def close(self, failed: bool = False) -> None:
        """Destroy the groups. After a failure nothing waits: NCCL's are aborted, gloo's are left to the end of the process."""
        handles = [*self._own.values(), *self._handles.values()]
        self._own, self._handles, self._groups = {}, {}, {}
        if not dist.is_initialized():
            return
        for handle in handles:
            if handle is dist.group.WORLD or handle == cast(Any, dist.GroupMember.NON_GROUP_MEMBER):  # no rank of it
                continue
            if not failed:
                dist.destroy_process_group(handle)
            elif "nccl" in str(dist.get_backend(handle)):
                dist.distributed_c10d._abort_process_group(handle)

    def __enter__(self) -> GroupPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(failed=error is not None)

    def _group(self, ranks: tuple[int, ...], purpose: str) -> Group:
        if len(ranks) == 1:
            return Group.single(self.rank)
        group, channel = self._groups[ranks], self.streams.channel(purpose)
        return group if group.channel is channel else replace(group, channel=channel)

    def _lanes(self, ranks: tuple[int, ...]) -> Group:
        shared = self._group(ranks, "dp")
        return replace(shared, handle=self._own[ranks]) if ranks in self._own else shared


def _make(sets: list[tuple[int, ...]], world: int, timeout: timedelta) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """One torch group for each set, made by all ranks, also those outside; torch's own for one of `world` ranks."""
    made = {ranks: dist.group.WORLD if len(ranks) == world else dist.new_group(list(ranks), timeout=timeout) for ranks in sets}
    return cast(dict[tuple[int, ...], dist.ProcessGroup], made)


def _shared_lanes(mesh: Mesh, max_cp: int) -> list[tuple[int, ...]]:
    """Sets of all lanes that a cp group has, too."""
    whole = mesh.lanes > 1 and mesh.lanes in cp_sizes(mesh, max_cp)
    return [mesh.lane_ranks(pp, tp) for pp in range(mesh.pp) for tp in range(mesh.tp)] if whole else []


def _warm_up(groups: Iterable[Group], device: torch.device) -> None:
    """Connect the members now, in the order of making, and not in the middle of the first step."""
    for group in groups:
        if group.handle is not None:
            one = torch.ones(1, device=device)
            dist.all_reduce(one, group=group.handle)
            if int(one) != group.size:
                raise RuntimeError(f"a sum of ones over ranks {group.ranks} gives {float(one)}")


def _check_world(mesh: Mesh, rank: int) -> None:
    if not dist.is_initialized():
        raise ValueError(f"a mesh of {mesh.world} ranks needs torch.distributed; launch.join starts it")
    if (dist.get_world_size(), dist.get_rank()) != (mesh.world, rank):
        raise ValueError(f"rank {dist.get_rank()} of {dist.get_world_size()} was asked to be rank {rank} of a mesh of {mesh.world} ranks")
