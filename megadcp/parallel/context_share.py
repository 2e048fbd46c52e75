"""One member's share of a pack, as the kinds of context parallelism see it.

Legend: t rows of this member.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megadcp.mesh.groups import Group
from megadcp.parallel.context_tiles import joined_rows


@dataclass(frozen=True)
class Share:
    """cu_seqlens [n + 1] and borders: of the member's t rows; lengths: real tokens of the whole documents; memo: the microbatch's."""

    group: Group
    cu_seqlens: Tensor
    borders: tuple[int, ...]
    lengths: tuple[int, ...]
    memo: dict[Any, Any] = field(default_factory=dict)

    def order(self, size: int) -> Tensor:
        """int64 [size t]: where the rows of `size` neighbouring members stand when put together."""
        if ("order", size) not in self.memo:
            self.memo["order", size] = joined_rows(self.cu_seqlens, self.borders[-1], size).flatten()
        found: Tensor = self.memo["order", size]
        return found
