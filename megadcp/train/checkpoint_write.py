"""One rank's share of a save, as torch.distributed.checkpoint runs it: which boxes (planner), a copy of them (stager), its file (writer).

Every rank calls `dcp.async_save(boxes, no_dist=True)` for itself: what it writes follows from the layout alone, so nothing is negotiated and
no collective runs in the background.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future as TorchFuture

from megadcp.parallel.boxes import Box
from megadcp.train.checkpoint_format import Entry, Index, StoredBox, check_file, file_name, key_of, write_tensors

ALIGN = 64  # bytes: where tensors begin in the host copy
BUFFER = 1 << 28  # bytes of one piece of it, unless a single tensor is larger


@dataclass(frozen=True)
class Part:
    """What one rank has written: a file, what it holds, and the rank's own JSON values."""

    file: str
    bytes: int
    sha256: str
    index: Index
    own: Mapping[str, Any]


def start(draft: Path, rank: int, boxes: Sequence[Box], stager: AsyncStager, own: Mapping[str, Any]) -> Future[Part]:
    """Copy the boxes, then write them in the background into the folder `draft`, and check what was written."""
    quiet()
    writer = _Writer(draft, rank)
    made = cast("Future[Any]", async_save({"boxes": list(boxes)}, storage_writer=writer, planner=_Planner(), async_stager=stager, no_dist=True))
    part: Future[Part] = Future()

    def done(_: Future[Any]) -> None:
        error = made.exception()
        if error is not None:
            part.set_exception(error)
        else:
            part.set_result(Part(file_name(rank), *writer.file, writer.index, own))

    made.add_done_callback(done)
    return part


def quiet() -> None:
    """Ranks that load and save for themselves are no fault, though torch warns of them."""
    warnings.filterwarnings("ignore", message=r"torch\.distributed is disabled")


def cause(error: BaseException) -> BaseException:
    """What really happened: torch wraps what a step of a save or load raises."""
    if isinstance(error, CheckpointException):
        return next((each[0] for each in error.failures.values()), error)
    return error


class Stager(AsyncStager):
    """One copy of the rank's boxes in host memory, which is kept for the next save; pinned where they come from a GPU.

    copies=False: none; training must not go on before the save is done.
    """

    _synchronize_after_execute = False

    def __init__(self, copies: bool = True) -> None:
        self.copies = copies
        self.buffers: list[Tensor] = []

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The same boxes with values of their own."""
        boxes: list[Box] = state_dict["boxes"]
        if not self.copies:
            return state_dict
        places, sizes = _places(boxes)
        devices = {box.values.device for box in boxes if box.values.is_cuda}
        if [buffer.numel() for buffer in self.buffers] != sizes:
            self.buffers = []  # the old ones first: never two copies
            self.buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=bool(devices)) for size in sizes]
        copied = []
        for box, (number, begin) in zip(boxes, places, strict=True):
            values = self.buffers[number][begin : begin + box.nbytes].view(box.values.dtype).view(box.sizes)
            values.copy_(box.values, non_blocking=True)
            copied.append(Box(box.name, box.whole, box.offsets, values))
        for device in devices:
            torch.cuda.synchronize(device)
        return {"boxes": copied}

    def synchronize_staging(self) -> None:
        """Nothing to do: `stage` returns when the copy is made."""

    def close(self) -> None:
        """Give the memory back."""
        self.buffers = []


def _places(boxes: Sequence[Box]) -> tuple[list[tuple[int, int]], list[int]]:
    """Buffer and offset of each box, and the buffers' sizes: small ones, because torch rounds pinned memory up to a power of two."""
    places, sizes = [], [0]
    for box in boxes:
        size = -(-box.nbytes // ALIGN) * ALIGN
        if sizes[-1] and sizes[-1] + size > BUFFER:
            sizes.append(0)
        places.append((len(sizes) - 1, sizes[-1]))
        sizes[-1] += size
    return places, sizes


class _Planner(SavePlanner):
    """All boxes of this rank; nobody else has them."""

    boxes: dict[str, Box]

    def set_up_planner(self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False) -> None:
        self.boxes = {key_of(box.name, box.offsets): box for box in state_dict["boxes"]}

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(box) for box in self.boxes.values()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        tensors: dict[str, Any] = {}
        for box in self.boxes.values():
            found = tensors.setdefault(box.name, TensorStorageMetadata(TensorProperties(dtype=box.values.dtype), torch.Size(box.whole), []))
            found.chunks.append(ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)))
        return all_plans, Metadata(tensors)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        assert write_item.index.offset is not None
        return self.boxes[key_of(write_item.index.fqn, write_item.index.offset)].values


def _write_item(box: Box) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=box.values.dtype), torch.Size(box.whole))
    return WriteItem(MetadataIndex(box.name, box.offsets), WriteItemType.SHARD, tensor_data=data)


class _Writer(StorageWriter):
    """Writes rank-N.safetensors, and reads it once more: its checksum must be that of what was written."""

    def __init__(self, draft: Path, rank: int) -> None:
        self.path = draft / file_name(rank)
        self.file: tuple[int, str] = (0, "")
        self.index: Index = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        items = [(item, item.tensor_data) for item in plan.items if item.tensor_data is not None]
        boxes = [(key_of(item.index.fqn, item.index.offset or ()), data.properties.dtype, tuple(data.chunk.sizes)) for item, data in items]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = write_tensors(self.path, boxes, lambda each: cast(Tensor, planner.resolve_data(items[each][0])))
        check_file(self.path, *self.file)
        done: TorchFuture[list[WriteResult]] = TorchFuture()
        done.set_result([WriteResult(item.index, 0, self.path.name) for item, _ in items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        for name, each in metadata.state_dict_metadata.items():
            assert isinstance(each, TensorStorageMetadata)
            boxes = [StoredBox(tuple(c.offsets), tuple(c.sizes), self.path.name, key_of(name, c.offsets)) for c in each.chunks]
            self.index[name] = Entry(each.properties.dtype, tuple(each.size), boxes)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True
