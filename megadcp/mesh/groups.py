"""Process groups of one rank: the only place that makes them, in one order on all ranks.

One torch group for each distinct set of ranks: where the tp group is also a cp group, both are the same object. Groups of one rank have no
torch group. A group is made by all ranks of the world, members or not, because torch wants it so; the set of all ranks is torch's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist

from megadcp.mesh.coords import Mesh

TIMEOUT_SECONDS = 600.0  # of one collective


@dataclass(frozen=True)
class Group:
    """Ranks that work together, in ascending order; `index` is the place of this rank among them. One rank alone has no handle."""

    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        """Members."""
        return len(self.ranks)

    @staticmethod
    def single(rank: int = 0) -> Group:
        """A rank alone."""
        return Group((rank,), 0, None)


def rank_sets(mesh: Mesh, max_cp: int = 0) -> list[tuple[int, ...]]:
    """All distinct sets of two or more ranks that work together anywhere in the mesh, in the order in which they are made.

    cp groups: aligned blocks of 2, 4, .. lanes up to `max_cp` (0: all lanes), those that fit.
    """
    stages, lanes, columns = range(mesh.pp), range(mesh.lanes), range(mesh.tp)
    sets = [tuple(range(mesh.world))]
    sets += [mesh.tp_ranks(pp, lane) for pp in stages for lane in lanes]
    sets += [mesh.lane_ranks(pp, tp) for pp in stages for tp in columns]
    for size in cp_sizes(mesh, max_cp):
        sets += [mesh.lane_ranks(pp, tp, first, size) for pp in stages for first in range(0, mesh.lanes - size + 1, size) for tp in columns]
    sets += [mesh.pipeline_ranks(lane, tp) for lane in lanes for tp in columns]
    sets += [_ends(mesh, lane, tp) for lane in lanes for tp in columns]
    sets += [_model(mesh, lane) for lane in lanes]
    return [ranks for ranks in dict.fromkeys(sets) if len(ranks) > 1]


def cp_sizes(mesh: Mesh, max_cp: int = 0) -> list[int]:
    """Sizes above 1 of the cp groups in the pool."""
    return [size for size in mesh.group_sizes() if size <= (max_cp or mesh.lanes)]


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

    def __init__(self, mesh: Mesh, rank: int, device: torch.device, max_cp: int = 0, timeout_s: float = TIMEOUT_SECONDS) -> None:
        """Make the groups and warm each of them up with one small sum.

        Raises:
            ValueError: the rank or torch's world does not belong to the mesh.
        """
        self.mesh, self.rank, self.coords, self.sizes = mesh, rank, mesh.coords(rank), cp_sizes(mesh, max_cp)
        self._handles: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._groups: dict[tuple[int, ...], Group] = {}
        if mesh.world > 1:
            _check_world(mesh, rank)
            self._make(rank_sets(mesh, max_cp), timedelta(seconds=timeout_s))
            self._warm_up(device)
        pp, lane, tp = self.coords
        self.world = self._group(tuple(range(mesh.world)))
        self.tp = self._group(mesh.tp_ranks(pp, lane))
        self.lanes = self._group(mesh.lane_ranks(pp, tp))
        self.pipeline = self._group(mesh.pipeline_ranks(lane, tp))
        ends = _ends(mesh, lane, tp)
        self.ends = self._group(ends) if rank in ends else Group.single(rank)
        self.model = self._group(_model(mesh, lane))

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
        return self._groups[ranks]

    @property
    def count(self) -> int:
        """Sets of ranks that have a torch group; the same on all ranks."""
        return len(self._handles)

    def close(self, failed: bool = False) -> None:
        """Destroy the groups. After a failure nothing waits: NCCL's are aborted, gloo's are left to the end of the process."""
        handles, self._handles = self._handles, {}
        self._groups.clear()
        if not dist.is_initialized():
            return
        for handle in handles.values():
            if handle is dist.group.WORLD:
                continue
            if not failed:
                dist.destroy_process_group(handle)
            elif "nccl" in str(dist.get_backend(handle)):
                dist.distributed_c10d._abort_process_group(handle)

    def __enter__(self) -> GroupPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(failed=error is not None)

    def _make(self, sets: list[tuple[int, ...]], timeout: timedelta) -> None:
        for ranks in sets:
            if len(ranks) == self.mesh.world:
                handle = dist.group.WORLD
            else:
                handle = dist.new_group(list(ranks), timeout=timeout)  # all ranks, also those outside
            self._handles[ranks] = handle
            if self.rank in ranks:
                self._groups[ranks] = Group(ranks, ranks.index(self.rank), handle)

    def _warm_up(self, device: torch.device) -> None:
        """Connect the members now, in the order of making, and not in the middle of the first step."""
        for group in self._groups.values():
            one = torch.ones(1, device=device)
            dist.all_reduce(one, group=group.handle)
            if int(one) != group.size:
                raise RuntimeError(f"a sum of ones over ranks {group.ranks} gives {float(one)}")

    def _group(self, ranks: tuple[int, ...]) -> Group:
        return self._groups[ranks] if len(ranks) > 1 else Group.single(self.rank)


def _check_world(mesh: Mesh, rank: int) -> None:
    if not dist.is_initialized():
        raise ValueError(f"a mesh of {mesh.world} ranks needs torch.distributed; launch.join starts it")
    if (dist.get_world_size(), dist.get_rank()) != (mesh.world, rank):
        raise ValueError(f"rank {dist.get_rank()} of {dist.get_world_size()} was asked to be rank {rank} of a mesh of {mesh.world} ranks")
