"""The search without pipelines: which documents share a block of lanes, how large the blocks are, how many microbatches each runs.

Groups are aligned blocks of lanes, so they form trees. Run in order of falling cp, the lanes of a block have always done the same
before, and nothing waits: a step takes what its most loaded lane takes, the sum over the blocks that hold it. So a plan is a set of
blocks with documents, and the search balances lanes. A document goes to a larger block when it would not fit or would take too long;
the others fill the blocks, longest first, each where there is most room. What a microbatch costs whatever it holds is paid once for
each block and lane: therefore ordinary documents also join the blocks of long ones. Several recipes are tried; balance.py improves each.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import fsum, inf
from typing import NamedTuple

from megadcp.plan.balance import Balance, Pack
from megadcp.plan.basis import Basis
from megadcp.plan.limits import Limits
from megadcp.plan.packing import balanced, first_fit, longest_first
from megadcp.plan.pricing import Group, Prices
from megadcp.plan.step_plan import Microbatch

LARGE = 0.02  # of a step: documents that take less fill gaps, and are not worth more lanes
FAR = 24  # full microbatches
GRAINS = 16  # steps of the table of SingleLane, in a full microbatch
GOOD = 1.004  # of the lower bound: no further recipe is tried
EVEN = 1.001  # of the mean load
FEW = 16  # documents a lane
HOPELESS = 1.01  # of the best end so far: what starts above is not balanced
PLACEMENTS = 3000  # documents placed by all recipes together, but at least FEWEST recipes
FEWEST = 2


class Recipe(NamedTuple):
    """One construction.

    base: cp of the blocks that take ordinary documents. aim: the end that lanes aim at, as a multiple of the lower bound. bundle: long
    documents share blocks as far as that end allows, instead of spreading.
    """

    base: int
    aim: float
    bundle: bool


RECIPES = (
    Recipe(1, 1.01, False),
    Recipe(1, 1.04, False),
    Recipe(1, 1.02, True),
    Recipe(2, 1.04, True),
    Recipe(8, 1.04, True),
    Recipe(4, 1.02, False),
    Recipe(2, 1.01, False),
    Recipe(8, 1.01, False),
    Recipe(4, 1.04, True),
    Recipe(1, 1.1, False),  # from here on for steps of few documents
    Recipe(1, 1.2, False),
    Recipe(1, 1.1, True),
    Recipe(2, 1.15, False),
)


def search(basis: Basis, lengths: Sequence[int], limits: Limits, bound: float) -> list[Microbatch]:
    """Microbatches of the best plan found (without pipelines), legal by every invariant, their predictions filled in; `bound` in seconds.

    Every document must fit some group alone. The result is the same on every machine: ties are broken on nanoseconds and numbers.
    """
    sizes = [1 << power for power in range(limits.max_cp.bit_length())]
    longest = max(lengths)
    prices = Prices(basis, limits, sizes)
    if not any(longest <= prices.group(cp).most for cp in sizes):
        # Too little memory for communicators of every size: then one size for all, the least that holds the longest document.
        for cp in sizes:
            prices = Prices(basis, limits, [cp])
            if longest <= prices.group(cp).most:
                break
    lanes = Lanes(prices, lengths)
    best: list[Pack] = []
    least = inf
    seen: list[list[float]] = []
    for number, recipe in enumerate(_recipes(lanes)):
        if number >= FEWEST and (number + 1) * len(lengths) > PLACEMENTS:
            break
        blocks = lanes.build(recipe, bound * recipe.aim)
        ends = [block.seconds for block in blocks]
        if ends in seen:
            continue
        seen.append(ends)
        packs = lanes.packs(blocks)
        used = max(pack.cp for pack in packs)
        if number == 0 and used < limits.max_cp and any(pack.tokens > pack.group.plain for pack in packs):
            lanes = Lanes(Prices(basis, limits, [cp for cp in prices.sizes if cp <= used]), lengths)  # more memory for everything else
        loads = lanes.loads(packs)
        if max(loads) <= HOPELESS * least:
            packs = lanes.balance(packs)
            loads = lanes.loads(packs)
        end = max(loads)
        if end < least:
            best, least = packs, end
        if end <= GOOD * bound or (used == prices.sizes[0] and end <= EVEN * fsum(loads) / len(loads)):
            break  # a recipe can change group sizes and balance, and here there is nothing to gain from either
    return lanes.microbatches(best)


def _recipes(lanes: Lanes) -> Iterator[Recipe]:
    """The recipes whose block size is allowed; a run that has one size has its own."""
    sizes = lanes.prices.sizes
    if 1 not in sizes:
        yield from (Recipe(sizes[0], aim, bundle) for aim, bundle in ((1.01, False), (1.04, True)))
        return
    yield from (recipe for recipe in RECIPES if recipe.base in sizes)


@dataclass(eq=False)
class Block:
    """Documents that the lanes lane .. lane + cp - 1 share. seconds: of all its microbatches, at the block's speed."""

    lane: int
    group: Group
    speed: float = 1.0
    documents: list[int] = field(default_factory=list)
    tokens: int = 0
    squares: int = 0
    seconds: float = 0.0

    @property
    def cp(self) -> int:
        """Lanes of the block."""
        return self.group.cp

    def price(self, tokens: int, squares: int) -> float:
        """Seconds of the block with other contents."""
        return self.group.divided(tokens, squares)[1] / self.speed

    def add(self, document: int, tokens: int, squares: int, seconds: float) -> None:
        """Take a document in; the new totals and seconds are known."""
        self.documents.append(document)
        self.tokens, self.squares, self.seconds = tokens, squares, seconds


class Lanes:
    """The documents of one step on the lanes of a run: what the recipes share."""

    def __init__(self, prices: Prices, lengths: Sequence[int]) -> None:
        self.prices, self.lengths = prices, lengths
        self.order = longest_first(lengths)
        self.count = prices.basis.layout.lanes
        self.speeds = prices.basis.lane_speed
        self._alone: dict[tuple[int, int], float] = {}

    def speed(self, cp: int, lane: int) -> float:
        """Of the slowest lane of a block."""
        return min(self.speeds[lane : lane + cp]) if self.speeds else 1.0

    def block(self, cp: int, lane: int) -> Block:
        """An empty block."""
        return Block(lane, self.prices.group(cp, lane), self.speed(cp, lane))

    def new(self, cp: int, lane: int) -> Pack:
        """An empty pack."""
        return Pack(lane, self.prices.group(cp, lane), self.speed(cp, lane), [])

    # ------------------------------------------------------------------------------------------------------ construction
    def build(self, recipe: Recipe, target: float) -> list[Block]:
        """Blocks with all documents, by one recipe, for a step of about `target` seconds; largest cp first."""
        special, ordinary = self._divide(recipe.base, target)
        site = Site(self, target, recipe.bundle)
        for cp in sorted(special, reverse=True):
            for document in special[cp]:
                site.place(document, cp)
        site.fill(self._columns(recipe.base, site), ordinary)
        return site.blocks()

    def _divide(self, base: int, target: float) -> tuple[dict[int, list[int]], list[int]]:
        """Documents that need more lanes than `base`, by cp, and the others; each longest first."""
        special: dict[int, list[int]] = {}
        ordinary: list[int] = []
        plain = self.prices.group(base).plain
        for position, document in enumerate(self.order):
            length = self.lengths[document]
            cp = self._size_for(length, base, target)
            if cp > base:
                special.setdefault(cp, []).append(document)
            elif length <= plain:
                return special, ordinary + self.order[position:]
            else:
                ordinary.append(document)
        return special, ordinary

    def _size_for(self, length: int, base: int, target: float) -> int:
        """The cp of least lane-seconds among those that end by the target; else the fastest."""
        best, least, fastest, quickest = 0, inf, base, inf
        for cp in self.prices.sizes:
            if cp < base:
                continue
            seconds = self._seconds_alone(length, cp)
            if seconds < quickest:
                fastest, quickest = cp, seconds
            if seconds <= target:
                if cp * seconds < least:
                    best, least = cp, cp * seconds
                if length <= self.prices.group(cp).plain:
                    break  # more lanes only cost more
        return best or fastest

    def _seconds_alone(self, length: int, cp: int) -> float:
        key = length, cp
        if key not in self._alone:
            group = self.prices.group(cp)
            tokens = -(-length // group.step) * group.step
            self._alone[key] = group.seconds(tokens, tokens * tokens)
        return self._alone[key]

    def _columns(self, base: int, site: Site) -> list[Block]:
        """Blocks that take the ordinary documents: every lane in at most one. A block of long documents is one where that is cheaper."""
        finest: list[Block | None] = [None] * self.count
        for block in site.blocks():  # falling cp
            finest[block.lane : block.lane + block.cp] = [block] * block.cp
        columns: list[Block] = []
        lane = 0
        while lane < self.count:
            here = finest[lane]
            whole = here is not None and here.lane == lane and all(one is here for one in finest[lane : lane + here.cp])
            if here is not None and whole and self._joining(here, site.target - site.loads[lane]) <= here.group.fixed:
                columns.append(here)
                lane += here.cp
                continue
            fitting = [cp for cp in self.prices.sizes if cp <= base and lane % cp == 0 and lane + cp <= self.count]
            if fitting:
                columns.append(site.block(fitting[-1], lane))
            lane += fitting[-1] if fitting else 1
        return columns

    def _joining(self, block: Block, room: float) -> float:
        """Seconds that it costs to fill `room` seconds of a block with ordinary documents rather than each of its lanes by itself."""
        middle = self.lengths[self.order[len(self.order) // 2]]
        one = self.prices.group(self.prices.sizes[0], block.lane)
        tokens = int(room / ((one.slope + one.attention * (one.kinds[0][0] + middle)) * one.cp)) * block.cp if room > 0 else 0
        return block.price(block.tokens + tokens, block.squares + tokens * middle) - block.seconds - room if tokens else 0.0

    # -------------------------------------------------------------------------------------------------------------- packs
    def packs(self, blocks: Sequence[Block]) -> list[Pack]:
        """The microbatches of blocks."""
        return [pack for block in blocks for pack in self._packs(block)]

    def _packs(self, block: Block) -> list[Pack]:
        lengths, group = self.lengths, block.group
        documents = sorted(block.documents, key=lambda document: (-lengths[document], document))
        if block.tokens <= group.full:
            return [self._pack(block, documents)]
        count, equal = group.divided(block.tokens, block.squares)
        best: list[Pack] = []
        least = inf
        for divide in (count, count + 1, 0):
            if divide:
                candidate = balanced(documents, lengths, divide)
            else:
                spare = group.grain + (len(documents) * group.step if group.cp > 1 else 0)
                candidate = first_fit(documents, lengths, group.full - spare)
            packs = [self._pack(block, members) for members in candidate]
            seconds = fsum(pack.seconds for pack in packs)
            if seconds < least:
                best, least = packs, seconds
            if least * block.speed <= EVEN * equal:
                break
        return best or [self._pack(block, [document]) for document in documents]

    def _pack(self, block: Block, documents: list[int]) -> Pack:
        step = block.group.step
        padded = [-(-self.lengths[document] // step) * step for document in documents]
        tokens, squares = sum(padded), sum([length * length for length in padded])
        fits = tokens <= block.group.cap or len(documents) == 1
        seconds = block.group.seconds(tokens, squares) / block.speed if fits else inf
        return Pack(block.lane, block.group, block.speed, documents, tokens, squares, seconds)

    def balance(self, packs: list[Pack]) -> list[Pack]:
        """The packs after a local search with a number of moves that follows from documents and lanes."""
        few = len(self.lengths) < FEW * self.count  # then lanes are hard to even out
        budget = 100 + 4 * self.count if few else 60 + 2 * self.count
        return Balance(packs, self.count, self.lengths, self.new, self.prices.sizes, budget).run()

    def loads(self, packs: Sequence[Pack]) -> list[float]:
        """Seconds of every lane."""
        loads = [0.0] * self.count
        for pack in packs:
            for lane in pack.lanes:
                loads[lane] += pack.seconds
        return loads

    def microbatches(self, packs: Sequence[Pack]) -> list[Microbatch]:
        """The microbatches of packs with their exact predictions: largest cp first, then longest first, so that too little memory shows at once."""
        slots = [0] * self.count
        done: list[Microbatch] = []
        prices = Prices(self.prices.basis, self.prices.limits, sorted({pack.cp for pack in packs}))  # sizes that are not used need no memory
        for pack in sorted(packs, key=lambda pack: (-pack.cp, pack.lane, -round(pack.seconds * 1e9), pack.documents)):
            slot = slots[pack.lane]
            found = prices.microbatch(pack.documents, self.lengths, pack.cp, pack.lane, slot)
            assert found is not None, "a pack that was priced fits"
            slots[pack.lane : pack.lane + pack.cp] = [slot + 1] * pack.cp
            done.append(found[0])
        return done


class SingleLane:
    """Seconds of a block of one lane, fast: what microbatches and recompute add is read from a table, for documents of the usual mix."""

    def __init__(self, group: Group, documents: Sequence[int], lengths: Sequence[int]) -> None:
        self.group = group
        self.half = group.kinds[0][0]
        self.grain = max(1, group.full // GRAINS)
        self.far = self.grain * GRAINS * FAR  # microbatches that many are far from any border: their costs are in proportion
        total = sum([lengths[document] for document in documents])
        self.mean = sum([lengths[document] ** 2 for document in documents]) / total if total else 1.0  # token-weighted length
        self.table: list[float] = [group.fixed]

    def seconds(self, tokens: int, squares: int) -> float:
        """Of this many tokens, divided into microbatches."""
        group, at = self.group, tokens // self.grain
        if tokens >= self.far:
            own = group.slope * tokens + group.attention * (squares + self.half * tokens)
            return own + self.table_at(self.far // self.grain - 1) * tokens / self.far
        return group.slope * tokens + group.attention * (squares + self.half * tokens) + self.table_at(at)

    def table_at(self, at: int) -> float:
        """What microbatches and recompute add to `at` grains."""
        group = self.group
        while at >= len(self.table):
            known = len(self.table) * self.grain
            own = group.slope * known + group.attention * (known * self.mean + self.half * known)
            self.table.append(group.divided(known, known * self.mean)[1] - own)
        return self.table[at]


class Site:
    """Blocks under construction: the load of every lane, and where the next document goes."""

    def __init__(self, lanes: Lanes, target: float, bundle: bool) -> None:
        self.lanes, self.target, self.bundle = lanes, target, bundle
        self.loads = [0.0] * lanes.count
        self._blocks: dict[tuple[int, int], Block] = {}

    def blocks(self) -> list[Block]:
        """All blocks with documents, largest cp first."""
        return sorted((block for block in self._blocks.values() if block.documents), key=lambda block: (-block.cp, block.lane))

    def block(self, cp: int, lane: int) -> Block:
        """The block of `cp` lanes at `lane`, empty if it is new."""
        found = self._blocks.get((cp, lane))
        if found is None:
            found = self._blocks[cp, lane] = self.lanes.block(cp, lane)
        return found

    def place(self, document: int, cp: int) -> None:
        """Put a document into a block of `cp` lanes, or of more where it would end after the target."""
        end, lane, size = self._best(document, cp)
        for larger in self.lanes.prices.sizes:
            if larger > cp and end > self.target:
                end, lane, size = min((end, lane, size), self._best(document, larger), key=lambda found: found[0])
        block = self.block(size, lane)
        tokens = -(-self.lanes.lengths[document] // block.group.step) * block.group.step
        total, squares = block.tokens + tokens, block.squares + tokens * tokens
        seconds = block.price(total, squares)
        for member in range(lane, lane + size):
            self.loads[member] += seconds - block.seconds
        block.add(document, total, squares, seconds)

    def _best(self, document: int, cp: int) -> tuple[float, int, int]:
        """(end, lane, cp) for a document at one cp: the block that ends first, or (bundle) the fullest that ends by the target."""
        step = 2 * cp if cp > 1 else 1
        tokens = -(-self.lanes.lengths[document] // step) * step
        squares = tokens * tokens
        best, where, fits = inf, 0, False
        new, new_lane = inf, -1
        loads = self.loads
        for lane in range(0, self.lanes.count - cp + 1, cp):
            load = loads[lane] if cp == 1 else max(loads[lane : lane + cp])
            block = self._blocks.get((cp, lane))
            if block is None or not block.documents:
                if load < new:
                    new, new_lane = load, lane
            elif load < best or self.bundle:
                end = load - block.seconds + block.price(block.tokens + tokens, block.squares + squares)
                if self.bundle and end <= self.target:
                    if not fits or end > best:
                        best, where, fits = end, lane, True
                elif not fits and end < best:
                    best, where = end, lane
        if new_lane >= 0 and not fits:
            end = new + self.lanes.block(cp, new_lane).price(tokens, squares)
            if end < best:
                best, where = end, new_lane
        return best, where, cp

    def _mean(self, columns: Sequence[Block], documents: Sequence[int]) -> float:
        """About the mean load when the documents are spread over the columns: no lane can be asked to end before that."""
        lengths, count = self.lanes.lengths, sum(column.cp for column in columns)
        cp = min(column.cp for column in columns)
        tokens = sum([lengths[document] for document in documents]) * cp // count
        squares = sum([lengths[document] ** 2 for document in documents]) * cp // count
        return fsum(self.loads) / len(self.loads) + self.lanes.block(cp, 0).price(tokens, squares)

    def fill(self, columns: list[Block], documents: Sequence[int]) -> None:
        """Each document, longest first, into the column that ends first; a long one into a larger block if it would end too late there."""
        loads, lengths = self.loads, self.lanes.lengths
        largest, worthwhile = self.lanes.prices.sizes[-1], LARGE * self.target
        single = SingleLane(self.lanes.prices.group(1), documents, lengths)
        target = max(self.target, EVEN * self._mean(columns, documents))
        heap = [(max(loads[column.lane : column.lane + column.cp]), number) for number, column in enumerate(columns)]
        heapq.heapify(heap)
        for document in documents:
            while True:
                load, number = heap[0]
                column = columns[number]
                cp, lane = column.group.cp, column.lane
                now = loads[lane] if cp == 1 else max(loads[lane : lane + cp])
                if now == load:
                    break
                heapq.heapreplace(heap, (now, number))  # it has become part of a larger block
            length = lengths[document]
            if cp == 1:
                total, squares = column.tokens + length, column.squares + length * length
                seconds = single.seconds(total, squares) / column.speed
            else:
                tokens = -(-length // column.group.step) * column.group.step
                total, squares = column.tokens + tokens, column.squares + tokens * tokens
                seconds = column.price(total, squares)
            end = load + seconds - column.seconds
            if end > target and seconds - column.seconds > worthwhile and cp < largest:
                self.place(document, cp)
                continue
            heapq.heapreplace(heap, (end, number))
            if cp == 1:
                loads[lane] = end
            else:
                loads[lane : lane + cp] = [end] * cp
            column.documents.append(document)
            column.tokens, column.squares, column.seconds = total, squares, seconds
