"""Reading a checkpoint into any layout: torch.distributed.checkpoint finds which stored boxes a rank's boxes need, this module reads those.

Files are read as data only (checkpoint_format.py). Every rank reads for itself.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from megadcp.parallel.boxes import Box, Shape
from megadcp.train.checkpoint_format import CheckpointError, Index, StoredBox
from megadcp.train.checkpoint_write import cause, quiet

NAMED_IN_ERRORS = 5  # tensors; the rest are counted


def read_boxes(folder: Path, index: Index, boxes: Sequence[Box]) -> None:
    """Fill the boxes' values.

    Raises:
        CheckpointError: a tensor is missing, not whole, or of another shape or dtype: then nothing was filled; or a file can't be read.
    """
    if not boxes:
        return
    quiet()
    try:
        load(cast(Any, {"boxes": boxes}), storage_reader=_Reader(folder, index), planner=_Planner(), no_dist=True)
    except CheckpointException as error:
        raise cause(error) from None


def whole_boxes(index: Index, names: Iterable[str]) -> list[Box]:
    """Empty whole tensors on the CPU to be filled."""
    return [Box(name, index[name].shape, (0,) * len(index[name].shape), torch.empty(index[name].shape, dtype=index[name].dtype)) for name in names]


class _Planner(LoadPlanner):
    """For each of the rank's boxes, the parts of stored ones that fill it."""

    boxes: dict[tuple[str, Shape], Box]
    metadata: Metadata

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        self.boxes = {(box.name, box.offsets): box for box in state_dict["boxes"]}
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        by_name: dict[str, list[Box]] = {}
        for box in self.boxes.values():
            by_name.setdefault(box.name, []).append(box)
        items: list[ReadItem] = []
        for name, boxes in by_name.items():
            stored = self.metadata.state_dict_metadata.get(name)
            if not isinstance(stored, TensorStorageMetadata):
                raise CheckpointError(f"the checkpoint has no tensor {name}")
            for box in boxes:
                if tuple(stored.size) != box.whole or stored.properties.dtype != box.values.dtype:
                    found = torch.empty(tuple(stored.size), dtype=stored.properties.dtype, device="meta")
                    wanted = torch.empty(box.whole, dtype=box.values.dtype, device="meta")
                    raise CheckpointError(f"{name} is {kind(found)}, expected {kind(wanted)}")
            chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes]
            found_items = create_read_items_for_chunk_list(name, stored, chunks)
            if sum(math.prod(item.lengths) for item in found_items) != sum(math.prod(box.sizes) for box in boxes):
                raise CheckpointError(f"the checkpoint holds only a part of {name}")
            items += found_items
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise CheckpointError(f"{read_item.storage_index.fqn} is no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        assert read_item.dest_index.offset is not None
        values = self.boxes[read_item.dest_index.fqn, tuple(read_item.dest_index.offset)].values.detach()
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            values = values.narrow(dim, start, length)
        return values

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None: ...


class _Reader(StorageReader):
    """Boxes of safetensors files, of which an index says what lies where."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder, self.index = folder, index
        self.places: dict[MetadataIndex, StoredBox] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors: dict[str, Any] = {}
        for name, entry in self.index.items():
            chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in entry.boxes]
            tensors[name] = TensorStorageMetadata(TensorProperties(dtype=entry.dtype), torch.Size(entry.shape), chunks)
        return Metadata(tensors)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.places = {MetadataIndex(name, box.offsets): box for name, entry in self.index.items() for box in entry.boxes}

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[StoredBox, ReadItem]]] = {}
        for item in plan.items:
            box = self.places[item.storage_index]
            by_file.setdefault(box.file, []).append((box, item))
        for name, wanted in by_file.items():
            try:
                with safe_open(self.folder / name, framework="pt") as file:
                    for box, item in wanted:
                        part = file.get_slice(box.key)
                        if tuple(part.get_shape()) != box.sizes:
                            raise CheckpointError(f"{self.folder / name}: {box.key} is {part.get_shape()}, {self.folder.name} says {list(box.sizes)}")
                        values = planner.resolve_tensor(item)
                        where = tuple(slice(start, start + length) for start, length in zip(item.storage_offsets, item.lengths, strict=True))
                        values.copy_(part[where] if where else file.get_tensor(box.key))
                        planner.commit_tensor(item, values)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{self.folder / name} can't be read: {error}") from None
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


# --------------------------------------------------------------------------------------------------------------- does it fit
def require_match(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], where: Path) -> None:
    """CheckpointError that names every missing, extra and misshapen tensor (the first few of each, and their number)."""
    problems = []
    missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing:
        problems.append(f"missing: {_some(missing)}")
    if extra:
        problems.append(f"not in this model: {_some(extra)}")
    wrong = []
    for name in sorted(set(expected) & set(found)):
        here, there = expected[name], found[name]
        if here.shape != there.shape or here.dtype != there.dtype:
            wrong.append(f"{name} is {kind(there)}, expected {kind(here)}")
    if wrong:
        problems.append(f"of another shape or format: {_some(wrong)}")
    if problems:
        raise CheckpointError(f"{where} does not fit this run's model. " + "; ".join(problems))


def _some(names: list[str]) -> str:
    more = len(names) - NAMED_IN_ERRORS
    return ", ".join(names[:NAMED_IN_ERRORS]) + (f" and {more} more" if more > 0 else "")


def kind(tensor: Tensor) -> str:
    """float32 [3, 4]."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
