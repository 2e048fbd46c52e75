"""Rank arithmetic and the zigzag order of context parallelism. Standard library only.

Coordinates (pp, lane, tp): tp varies fastest, then lane, then pp. A cp group is an aligned block of 2^k lanes at one (pp, tp).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Coords(NamedTuple):
    """Of one rank."""

    pp: int
    lane: int
    tp: int


@dataclass(frozen=True)
class Mesh:
    """Lanes times the tp * pp ranks that each of them owns."""

    lanes: int
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        if min(self.lanes, self.tp, self.pp) < 1:
            raise ValueError(f"lanes={self.lanes}, tp={self.tp}, pp={self.pp} must all be at least 1")

    @property
    def world(self) -> int:
        """Ranks."""
        return self.lanes * self.tp * self.pp

    def coords(self, rank: int) -> Coords:
        """Where a rank stands. ValueError outside the world."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is outside the world of {self.world} ranks")
        rest, tp = divmod(rank, self.tp)
        pp, lane = divmod(rest, self.lanes)
        return Coords(pp, lane, tp)

    def rank(self, pp: int, lane: int, tp: int) -> int:
        """Which rank stands there."""
        return (pp * self.lanes + lane) * self.tp + tp

    def tp_ranks(self, pp: int, lane: int) -> tuple[int, ...]:
        """Ranks that share the matrices of one stage of one lane."""
        return tuple(self.rank(pp, lane, tp) for tp in range(self.tp))

    def lane_ranks(self, pp: int, tp: int, first: int = 0, count: int = 0) -> tuple[int, ...]:
        """Ranks of `count` lanes from `first` on (0: all lanes) at one (pp, tp)."""
        return tuple(self.rank(pp, lane, tp) for lane in range(first, first + (count or self.lanes)))

    def pipeline_ranks(self, lane: int, tp: int) -> tuple[int, ...]:
        """Ranks that pass microbatches on, first stage first."""
        return tuple(self.rank(pp, lane, tp) for pp in range(self.pp))

    def group_sizes(self) -> list[int]:
        """Sizes above 1 that cp groups can have: 2, 4, .. up to the lanes."""
        return [1 << power for power in range(1, self.lanes.bit_length())]


def zigzag_spans(padded: Sequence[int], cp: int, index: int) -> list[tuple[int, int]]:
    """Rows of a pack that member `index` of a group of `cp` holds, in its own order: two (start, stop) for each document.

    Each document is cut into 2 cp chunks; a member has chunk `index` and chunk 2 cp - 1 - index, so causal work is even. With cp = 1 the
    spans are the documents. `padded` lengths are multiples of 2 cp (cp > 1).
    """
    spans: list[tuple[int, int]] = []
    start = 0
    for length in padded:
        if cp == 1:
            spans.append((start, start + length))
        else:
            chunk, rest = divmod(length, 2 * cp)
            if rest:
                raise ValueError(f"a document of {length} padded tokens can't be cut into 2 * {cp} equal chunks")
            late = 2 * cp - 1 - index
            spans += ((start + index * chunk, start + (index + 1) * chunk), (start + late * chunk, start + (late + 1) * chunk))
        start += length
    return spans


def zigzag_real(length: int, padded: int, cp: int, index: int) -> tuple[int, int]:
    """Real tokens in a member's early and in its late chunk of a document with `length` real and `padded` padded tokens (cp > 1)."""
    chunk = padded // (2 * cp)
    late = 2 * cp - 1 - index
    return min(max(length - index * chunk, 0), chunk), min(max(length - late * chunk, 0), chunk)
