"""Local search without pipelines: documents move between microbatches until the most loaded lane can't be helped any more.

Every move takes work from the most loaded lane: a document goes to another microbatch or to a new one, two documents change places, a
whole microbatch goes to another block or to one of another size. The best move is made if no lane that it touches ends as late as the
most loaded one did. The number of prices asked for is bounded; nothing depends on a clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from math import inf

from megadcp.plan.pricing import Group

LOW = 6  # lanes to which work is moved
SAMPLE = 10  # documents of a microbatch that are tried in exchanges
SATISFIED = 0.7  # of the most loaded lane's excess over the mean: a move that takes so much away is made at once
ENOUGH = 1.0005  # of the mean load: what is left is not worth a search


@dataclass(eq=False)
class Pack:
    """A microbatch under way: documents of the lanes lane .. lane + cp - 1, longest first. seconds at the block's speed."""

    lane: int
    group: Group
    speed: float
    documents: list[int]
    tokens: int = 0
    squares: int = 0
    seconds: float = 0.0

    @property
    def cp(self) -> int:
        """Lanes of the group."""
        return self.group.cp

    @property
    def lanes(self) -> range:
        """Lanes of the group."""
        return range(self.lane, self.lane + self.group.cp)


@dataclass
class Move:
    """Documents that leave one pack and enter another (a new one when it has none), what both are then, and the latest end of a lane."""

    end: float
    source: Pack
    source_after: tuple[int, int, float]
    target: Pack
    target_after: tuple[int, int, float]
    leave: list[int] = field(default_factory=list)
    enter: list[int] = field(default_factory=list)


class Balance:
    """Packs on lanes and the moves between them."""

    def __init__(
        self, packs: list[Pack], lanes: int, lengths: Sequence[int], new: Callable[[int, int], Pack], sizes: Sequence[int], budget: int
    ) -> None:
        self.packs, self.lengths, self.new, self.sizes, self.budget = packs, lengths, new, sizes, budget
        self.loads = [0.0] * lanes
        self.on_lane: list[list[Pack]] = [[] for _ in range(lanes)]
        for pack in packs:
            self._settle(pack)
        one = new(sizes[0], 0).group
        slope, square, half = one.slope * one.cp, one.attention * one.cp, one.kinds[0][0]
        self.alone = [slope * length + square * (length * length + half * length) for length in lengths]  # lane-seconds of each document

    def _settle(self, pack: Pack) -> None:
        for lane in pack.lanes:
            self.loads[lane] += pack.seconds
            self.on_lane[lane].append(pack)

    def run(self) -> list[Pack]:
        """Improve until nothing does or the budget is spent; the packs that are left."""
        lanes = len(self.loads)
        while self.budget > 0:
            worst = max(range(lanes), key=self.loads.__getitem__)
            latest = self.loads[worst]
            if latest <= ENOUGH * sum(self.loads) / lanes:
                break
            best: Move | None = None
            satisfied = latest - SATISFIED * (latest - sum(self.loads) / lanes)
            for move in self._moves(worst, latest):
                if move.end < latest and (best is None or move.end < best.end):
                    best = move
                    if best.end <= satisfied:
                        break
            if best is None or round(best.end * 1e9) >= round(latest * 1e9):
                break
            self._make(best)
        return [pack for pack in self.packs if pack.documents]

    # --------------------------------------------------------------------------------------------------------------- moves
    def _moves(self, worst: int, latest: float) -> Iterator[Move]:
        low = nsmallest(LOW, range(len(self.loads)), key=self.loads.__getitem__)
        for source in self.on_lane[worst]:
            others: list[Pack] = []
            for lane in low:
                others += [pack for pack in self.on_lane[lane] if pack is not source and pack not in others]
            others += self._new_packs(source, low)
            yield from self._resized(source)
            for target in others:
                if self.budget <= 0:
                    return
                yield from self._exchanges(source, target, latest)

    def _new_packs(self, source: Pack, low: Sequence[int]) -> list[Pack]:
        """Empty packs: on the least loaded lane, on the least loaded block of the source's size, on a block around the source."""
        places: list[tuple[int, int]] = []
        for cp in (source.cp, self.sizes[0]):
            places.append((cp, low[0] // cp * cp))
        larger = self._next_size(source.cp, 1)
        if larger:
            places.append((larger, source.lane // larger * larger))
        lanes = len(self.loads)
        return [self.new(cp, lane) for number, (cp, lane) in enumerate(places) if (cp, lane) not in places[:number] and lane + cp <= lanes]

    def _next_size(self, cp: int, step: int) -> int:
        """The size after or before one; 0 if there is none."""
        at = self.sizes.index(cp) + step
        return self.sizes[at] if 0 <= at < len(self.sizes) else 0

    def _resized(self, source: Pack) -> Iterator[Move]:
        """The whole pack on more lanes and on fewer."""
        larger, smaller = self._next_size(source.cp, 1), self._next_size(source.cp, -1)
        if larger and source.lane // larger * larger + larger <= len(self.loads):
            yield from self._move(source, self.new(larger, source.lane // larger * larger), source.documents, [])
        if smaller:
            lane = min(range(source.lane, source.lane + source.cp, smaller), key=lambda lane: self._load(lane, smaller))
            yield from self._move(source, self.new(smaller, lane), source.documents, [])

    def _exchanges(self, source: Pack, target: Pack, latest: float) -> Iterator[Move]:
        """Documents of about the size that would even the two out: one that leaves, or two that change places."""
        difference = latest - self._load(target.lane, target.cp)
        if difference <= 0:
            return
        wanted = difference / (1 / source.cp + 1 / target.cp)
        for document in self._nearest(source.documents, wanted, 2):
            yield from self._move(source, target, [document], [])
        if not target.documents:
            return
        step = max(1, len(source.documents) // SAMPLE)
        for document in source.documents[::step]:
            size = self.alone[document] - wanted
            if size > 0:
                for other in self._nearest(target.documents, size, 1):
                    yield from self._move(source, target, [document], [other])

    def _nearest(self, documents: Sequence[int], seconds: float, count: int) -> Sequence[int]:
        """Documents (longest first) whose time alone is nearest to `seconds`."""
        at = bisect_left(documents, -seconds, key=lambda document: -self.alone[document])
        return documents[max(0, at - count + (count == 1)) : at + count] or documents[-1:]

    def _move(self, source: Pack, target: Pack, leave: Sequence[int], enter: Sequence[int]) -> Iterator[Move]:
        """The move, if both packs fit afterwards."""
        self.budget -= 1
        source_after, target_after = self._after(source, leave, enter), self._after(target, enter, leave)
        less, more = source_after[2] - source.seconds, target_after[2] - target.seconds
        if less == inf or more == inf:
            return
        first, last = max(source.lane, target.lane), min(source.lane + source.cp, target.lane + target.cp)
        if first >= last:  # no lane in common
            end = max(self._load(source.lane, source.cp) + less, self._load(target.lane, target.cp) + more)
        else:
            outer = source if source.cp > target.cp else target
            end = max(self.loads[lane] + less * (lane in source.lanes) + more * (lane in target.lanes) for lane in outer.lanes)
        yield Move(end, source, source_after, target, target_after, list(leave), list(enter))

    def _after(self, pack: Pack, leave: Sequence[int], enter: Sequence[int]) -> tuple[int, int, float]:
        tokens, squares, group = pack.tokens, pack.squares, pack.group
        step, count = group.step, len(pack.documents) - len(leave) + len(enter)
        if count == 0:
            return 0, 0, 0.0
        for document in leave:
            length = -(-self.lengths[document] // step) * step
            tokens, squares = tokens - length, squares - length * length
        for document in enter:
            length = -(-self.lengths[document] // step) * step
            tokens, squares = tokens + length, squares + length * length
        if count > 1 and tokens > group.cap:
            return tokens, squares, inf
        return tokens, squares, group.seconds(tokens, squares) / pack.speed

    def _load(self, lane: int, cp: int) -> float:
        return max(self.loads[lane : lane + cp])

    def _make(self, move: Move) -> None:
        if not move.target.documents:
            self.packs.append(move.target)
            for lane in move.target.lanes:
                self.on_lane[lane].append(move.target)
        for pack, after, leave, enter in (
            (move.source, move.source_after, move.leave, move.enter),
            (move.target, move.target_after, move.enter, move.leave),
        ):
            for lane in pack.lanes:
                self.loads[lane] += after[2] - pack.seconds
            gone = set(leave)
            pack.documents = [document for document in pack.documents if document not in gone]
            for document in enter:
                at = bisect_left(pack.documents, (-self.lengths[document], document), key=lambda one: (-self.lengths[one], one))
                pack.documents.insert(at, document)
            pack.tokens, pack.squares, pack.seconds = after
        if not move.source.documents:
            for lane in move.source.lanes:
                self.on_lane[lane].remove(move.source)
