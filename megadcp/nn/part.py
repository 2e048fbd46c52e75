"""Which layers of a model one pipeline stage holds, chunk by chunk.

p stages, v chunks of each; model order is chunk 0 of all stages, then chunk 1 of all stages, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """Stage `stage` of `stages`; chunk_layers: indices, in the whole model, of the layers of each of its chunks."""

    stage: int
    stages: int
    chunk_layers: tuple[tuple[int, ...], ...]

    @property
    def chunks(self) -> int:
        """Model chunks of this stage."""
        return len(self.chunk_layers)

    @property
    def first(self) -> bool:
        """Whether the embedding is here (before chunk 0)."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether the final norm and the LM head are here (after the last chunk)."""
        return self.stage == self.stages - 1

    @property
    def layers(self) -> tuple[int, ...]:
        """All layers of the stage."""
        return tuple(layer for chunk in self.chunk_layers for layer in chunk)


def whole(layers: int) -> Part:
    """All of a model in one chunk."""
    return Part(0, 1, (tuple(range(layers)),))


def parts_of(stage_layers: Sequence[int], chunks: int = 1) -> tuple[Part, ...]:
    """The parts of all stages: chunk c of a stage of n layers has n // v, and one more while c < n mod v. ValueError for a chunk without layers."""
    stages = len(stage_layers)
    held: list[list[tuple[int, ...]]] = [[] for _ in range(stages)]
    layer = 0
    for chunk in range(chunks):
        for stage, count in enumerate(stage_layers):
            size = count // chunks + (chunk < count % chunks)
            if size < 1:
                raise ValueError(f"stage {stage} has {count} layers: too few for {chunks} chunks")
            held[stage].append(tuple(range(layer, layer + size)))
            layer += size
    return tuple(Part(stage, stages, tuple(own)) for stage, own in enumerate(held))


def recomputed(layers: int, chunks: int) -> int:
    """Of every chunk, the first so many layers are recomputed when a plan says `layers` of the stage: ceil(layers / v)."""
    return -(-layers // chunks)
