"""One member's share of a pack, as the kinds of context parallelism see it.

Legend: t rows of this member.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megadcp.mesh.groups import Group


@dataclass(frozen=True)
class Share:
    """cu_seqlens [n + 1] and borders: of the member's t rows; lengths: real tokens of the whole documents."""

    group: Group
    cu_seqlens: Tensor
    borders: tuple[int, ...]
    lengths: tuple[int, ...]
