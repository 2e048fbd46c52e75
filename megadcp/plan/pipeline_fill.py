"""Documents into slots and lanes: best fit, longest first, on the least group that has room; the short ones last, evenly.

Times are integers, nanoseconds on one stage (the busiest), without what an empty microbatch costs. A slot's room is what its
microbatches may hold. Documents count from 0, longest first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

THOUSAND = 1000  # lane speeds as integers
BITS = 24  # for the number of a cell or slot beside its room
MASK = (1 << BITS) - 1
NEVER = 1 << 62


@dataclass
class Cell:
    """A microbatch in the making; `room`: what is left of it."""

    slot: int
    lane: int
    cp: int
    room: int
    documents: list[int] = field(default_factory=list)
    tokens: int = 0


class Block(NamedTuple):
    """A document with a group of its own."""

    slot: int
    lane: int
    cp: int
    document: int


class Pace(NamedTuple):
    """Speeds of lanes in thousandths of the mean one's, and nanoseconds of an empty microbatch at that speed."""

    speeds: Sequence[int]
    fixed: int

    def content(self, room: int, lane: int, cp: int) -> int:
        """Content that the slowest of these lanes does in the time in which the mean lane does `room`; below 0: not even an empty one."""
        return (room + self.fixed) * min(self.speeds[lane : lane + cp]) // THOUSAND - self.fixed

    def at_mean(self, content: int, lane: int, cp: int) -> int:
        """The content of the mean lane that takes as long as this on these lanes."""
        return (content + self.fixed) * THOUSAND // min(self.speeds[lane : lane + cp]) - self.fixed


@dataclass(frozen=True)
class Sizes:
    """Documents on groups of one size: nanoseconds, padded tokens (lists and arrays of the same), most tokens of a microbatch of several."""

    cp: int
    seconds: Sequence[int]
    padded: Sequence[int]
    cap: int
    nanoseconds: Ints
    tokens: Ints
    alone: int  # most tokens of a single document


class Filling:
    """One way to fill slots. base: usual group size; coarse: how many documents, the longest, are placed one by one."""

    def __init__(self, rooms: Sequence[int], base: int, sizes: dict[int, Sizes], pace: Pace, coarse: int, blocks: Sequence[Block] = ()) -> None:
        self.rooms, self.base, self.sizes, self.pace, self.coarse = rooms, base, sizes, pace, coarse
        self.lanes, self.count = len(pace.speeds), len(sizes[base].padded)
        self.even = min(pace.speeds) == max(pace.speeds)
        self.groups = [cp for cp in sorted(sizes) if cp >= base]
        self.low, self.high = (
            [0] * len(rooms),
            [self.lanes // base * base] * len(rooms),
        )  # free lanes: groups are taken from below, usual ones from above
        self.cells: list[Cell] = []
        # Of each group size, ascending, rooms and whose they are in one integer: cells that are there, and slots with lanes for a group.
        self.open: dict[int, list[int]] = {cp: [] for cp in self.groups}
        # Cells whose tokens leave no place for the document at hand: heaps of (tokens left, negative, and whose). Documents become shorter.
        self.waiting: dict[int, list[tuple[int, int]]] = {cp: [] for cp in self.groups}
        slots = sorted([(room << BITS) + slot for slot, room in enumerate(rooms) if room >= 0])
        self.free = {cp: list(slots) for cp in self.groups}
        self.homeless: list[int] = []
        self.placed = [False] * coarse
        for block in blocks:
            self._put(block)

    def _room(self, slot: int, lane: int, cp: int) -> int:
        """Content that these lanes do while the mean lane does the slot's."""
        return self.rooms[slot] if self.even else self.pace.content(self.rooms[slot], lane, cp)

    def _put(self, block: Block) -> None:
        """A document that has its place."""
        size, slot = self.sizes[block.cp], block.slot
        self._take(slot, block.lane, block.cp)
        room = self._room(slot, block.lane, block.cp) - size.seconds[block.document]
        self._open(Cell(slot, block.lane, block.cp, room, [block.document], size.padded[block.document]))
        self.placed[block.document] = True

    def _open(self, cell: Cell) -> None:
        self.cells.append(cell)
        if cell.room >= 0:
            insort(self.open[cell.cp], (cell.room << BITS) + len(self.cells) - 1)

    # ------------------------------------------------------------------------------------------------------ one by one
    def place_coarse(self, patience: int = 0) -> bool:
        """The longest documents, each on the least group that has room for it; False when more than `patience` of them found none."""
        groups = [(cp, self.sizes[cp], self.sizes[cp].seconds, self.open[cp], self.free[cp], self.waiting[cp]) for cp in self.groups]
        for document in range(self.coarse):
            if self.placed[document]:
                continue
            for cp, size, seconds, open_, free, waiting in groups:
                if self._place(document, cp, size, seconds[document], open_, free, waiting):
                    break
            else:
                self.homeless.append(document)
                if len(self.homeless) > patience:
                    return False
        return True

    def _place(self, document: int, cp: int, size: Sizes, need: int, open_: list[int], free: list[int], waiting: list[tuple[int, int]]) -> bool:
        """Best fit: the smallest room that holds it, of microbatches that are there or of free lanes."""
        tokens = size.padded[document]
        if tokens > size.alone:
            return False
        key = need << BITS
        cells, cap = self.cells, size.cap
        while waiting and -waiting[0][0] >= tokens:
            number = heappop(waiting)[1]
            insort(open_, (cells[number].room << BITS) + number)
        at = first = bisect_left(open_, key)
        while at < len(open_) and cells[open_[at] & MASK].tokens + tokens > cap and cells[open_[at] & MASK].documents:
            number = open_[at] & MASK
            heappush(waiting, (cells[number].tokens - cap, number))
            at += 1
        if at > first:
            del open_[first:at]
            at = first
        there = len(open_)
        below = open_[at] >> BITS if at < there else NEVER
        place = bisect_left(free, key)
        while place < len(free):
            room, slot = free[place] >> BITS, free[place] & MASK
            if room >= below:
                break
            lane = self._lane(slot, cp)
            if lane is None:
                del free[place]  # lanes are never given back
                continue
            if not self.even:
                room = self._room(slot, lane, cp)
            if room >= need:
                self._take(slot, lane, cp)
                self._open(Cell(slot, lane, cp, room - need, [document], tokens))
                return True
            place += 1
        if at >= there:
            return False
        number = open_.pop(at) & MASK
        cell = cells[number]
        cell.documents.append(document)
        cell.tokens += tokens
        cell.room -= need
        insort(open_, (cell.room << BITS) + number)
        return True

    def _lane(self, slot: int, cp: int) -> int | None:
        low = -(-self.low[slot] // cp) * cp
        high = self.high[slot] // cp * cp
        if high - low < cp:
            return None
        return high - cp if cp == self.base else low

    def _take(self, slot: int, lane: int, cp: int) -> None:
        if cp == self.base:
            self.high[slot] = lane
            return
        for hole in range(self.low[slot], lane, self.base):  # lanes skipped so that the group is aligned
            self._open(Cell(slot, hole, self.base, self._room(slot, hole, self.base)))
        self.low[slot] = lane + cp

    # ---------------------------------------------------------------------------------------------------- all the others
    def place_rest(self) -> list[Cell]:
        """Documents that found no room where they fill it least too much, then the short ones: cells are evened out from below."""
        self._open_the_rest()
        if self.homeless:
            self._overfill(self.homeless)
        if self.coarse < self.count:
            self._pour()
        return [cell for cell in self.cells if cell.documents]

    def fullest(self) -> list[int]:
        """Nanoseconds of content of each slot's fullest cell, at the mean lane's speed; what was poured is counted as evenly spread."""
        most = [0] * len(self.rooms)
        if self.even:
            least = list(self.rooms)
            for cell in self.cells:
                if cell.room < least[cell.slot] and cell.documents:
                    least[cell.slot] = cell.room
            return [room - left for room, left in zip(self.rooms, least, strict=True)]
        for cell in self.cells:
            if cell.documents:
                held = self._room(cell.slot, cell.lane, cell.cp) - cell.room
                most[cell.slot] = max(most[cell.slot], self.pace.at_mean(held, cell.lane, cell.cp))
        return most

    def _open_the_rest(self) -> None:
        """Cells for all lanes that are free: usual groups, smaller ones where lanes are left over."""
        smaller = [cp for cp in sorted(self.sizes, reverse=True) if cp <= self.base]
        for slot in range(len(self.rooms)):
            for lane, end in ((self.low[slot], self.high[slot]), (self.lanes // self.base * self.base, self.lanes)):
                while lane < end:
                    cp = next(cp for cp in smaller if lane % cp == 0 and lane + cp <= end)
                    self.cells.append(Cell(slot, lane, cp, self._room(slot, lane, cp)))
                    lane += cp

    def _overfill(self, documents: Sequence[int]) -> None:
        """Each document in turn into the cell in which most room is left afterwards, the first of several."""
        sizes = list(self.sizes.values())
        number = {size.cp: place for place, size in enumerate(sizes)}
        kind = np.array([number[cell.cp] for cell in self.cells])
        room = np.array([cell.room for cell in self.cells], dtype=np.int64)
        free = np.array(
            [self.sizes[cell.cp].cap - cell.tokens if cell.documents else self.sizes[cell.cp].alone for cell in self.cells], dtype=np.int64
        )
        seconds = np.array([[size.seconds[document] for document in documents] for size in sizes], dtype=np.int64)
        tokens = np.array([[size.padded[document] for document in documents] for size in sizes], dtype=np.int64)
        for place, document in enumerate(documents):
            left = np.where(tokens[kind, place] <= free, room - seconds[kind, place], -NEVER)
            best = int(left.argmax())
            if left[best] == -NEVER:
                raise NoRoom
            cell = self.cells[best]
            cell.documents.append(document)
            cell.tokens += int(tokens[kind[best], place])
            cell.room = room[best] = int(left[best])
            free[best] = self.sizes[cell.cp].cap - cell.tokens

    def _pour(self) -> None:
        """Short documents in one go: every cell is filled up to a common level below its room, as near as whole documents allow."""
        order = sorted(range(len(self.cells)), key=lambda number: (-self.cells[number].room, number))
        cells = [self.cells[number] for number in order]
        room = np.array([cell.room for cell in cells], dtype=np.int64)
        target = np.array([self.rooms[cell.slot] for cell in cells], dtype=np.int64)
        group = np.array([cell.cp for cell in cells], dtype=np.int64)
        cap = np.array([self.sizes[cell.cp].cap - cell.tokens for cell in cells], dtype=np.int64)
        size = self.sizes[self.base]
        times = size.nanoseconds[self.coarse :] * self.base  # lane-nanoseconds
        total = int(times.sum())
        pace = max(1, total // max(1, int(size.tokens[self.coarse :].sum())))  # lane-nanoseconds of a token
        most = np.maximum(0, cap - int(size.tokens[self.coarse])) * pace
        low, high = -4 * THOUSAND, 2 * THOUSAND  # thousandths of the target that stay free
        share = np.zeros_like(room)
        for _ in range(14):
            level = (low + high) // 2
            share = np.minimum(np.maximum(0, room - target * level // THOUSAND) * group, most)
            if int(share.sum()) >= total:
                low = level
            else:
                high = level
        share = np.minimum(np.maximum(0, room - target * low // THOUSAND) * group, most)
        if int(share.sum()) < total:
            raise NoRoom
        ends = np.cumsum(share)
        middles = np.cumsum(times) - times // 2
        where = np.minimum(np.searchsorted(ends, middles), len(cells) - 1).tolist()
        for document, number in enumerate(where, self.coarse):
            cell, size = cells[number], self.sizes[cells[number].cp]
            cell.documents.append(document)
            cell.tokens += size.padded[document]
            cell.room -= size.seconds[document]
        for cell in cells:
            if cell.tokens > self.sizes[cell.cp].cap and len(cell.documents) > 1:
                raise NoRoom


class NoRoom(ValueError):
    """The documents do not fit into this many slots."""
