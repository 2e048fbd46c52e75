"""What lies in a checkpoint's folder, and how its files are written and read. Plain data only: nothing here is ever unpickled or run.

step-00000800/
    rank-00003.safetensors  the boxes that rank 3 has written: tensors named NAME@FIRST,FIRST,.. (where the box begins in the whole tensor)
    tensors.json            of each whole tensor: dtype, shape, and which file holds which box
    meta.json               counters, order, config, random states
    manifest.json           size and sha256 of the files above; written last
NAME is KIND.PARAMETER; kinds: model (the weights), master (fp32 behind narrow weights), exp_avg, exp_avg_sq (the moments).
Format 1 (model.safetensors and optimizer.safetensors with whole tensors, made by earlier versions) can still be read.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megadcp.config.check import UserError
from megadcp.interop.json_files import read_json
from megadcp.parallel.boxes import Shape

FORMAT, OLD_FORMAT = 2, 1
PREFIX = "step-"
MANIFEST, META, TENSORS = "manifest.json", "meta.json", "tensors.json"
OLD_FILES = {"model.safetensors": "model.", "optimizer.safetensors": ""}
FILE_NAME = re.compile(r"rank-[0-9]{5,}\.safetensors")
KINDS = ("model", "master", "exp_avg", "exp_avg_sq")
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
CODES = {dtype: code for code, dtype in DTYPES.items()}
BLOCK = 1 << 18  # bytes hashed and written at a time: they stay in the processor's cache
COVER_PAIRS = 1 << 22  # pairs of boxes compared at a time


class CheckpointError(UserError):
    """A checkpoint that can't be used or made; the message names the file or tensor."""


@dataclass(frozen=True)
class StoredBox:
    """A box of a whole tensor and where it lies."""

    offsets: Shape
    sizes: Shape
    file: str
    key: str


@dataclass
class Entry:
    """One whole tensor."""

    dtype: torch.dtype
    shape: Shape
    boxes: list[StoredBox] = field(default_factory=list)

    @property
    def empty(self) -> Tensor:
        """A meta tensor of its shape and dtype."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


Index = dict[str, Entry]


def folder_name(step: int) -> str:
    """step-00000800."""
    return f"{PREFIX}{step:08d}"


def file_name(rank: int) -> str:
    """rank-00003.safetensors."""
    return f"rank-{rank:05d}.safetensors"


def key_of(name: str, offsets: Sequence[int]) -> str:
    """What a box is called inside its file."""
    return f"{name}@{','.join(map(str, offsets))}"


# ---------------------------------------------------------------------------------------------------------------- index
def index_to_json(index: Index) -> dict[str, Any]:
    """{name: {dtype, shape, boxes: [[file, offsets, sizes], ..]}}."""
    return {
        name: {"dtype": CODES[entry.dtype], "shape": list(entry.shape), "boxes": [[b.file, list(b.offsets), list(b.sizes)] for b in entry.boxes]}
        for name, entry in index.items()
    }


def index_from_json(value: Any, where: Path) -> Index:
    """Undo of `index_to_json`. CheckpointError where it is not what this module writes."""
    found: Index = {}
    try:
        for name, each in value.items():
            entry = Entry(DTYPES[each["dtype"]], _whole_numbers(each["shape"]))
            for file, offsets, sizes in each["boxes"]:
                box = StoredBox(_whole_numbers(offsets), _whole_numbers(sizes), file, key_of(name, offsets))
                if not FILE_NAME.fullmatch(file) or not len(box.offsets) == len(box.sizes) == len(entry.shape):
                    raise ValueError(f"box {file}, {offsets}, {sizes}")
                entry.boxes.append(box)
            found[name] = entry
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where} does not describe tensors as expected ({type(error).__name__}: {error})") from None
    return found


def index_of_format_1(folder: Path) -> Index:
    """The whole tensors of an old checkpoint, each one box."""
    found: Index = {}
    for name, prefix in OLD_FILES.items():
        try:
            with safe_open(folder / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118  not a dict
                    part = file.get_slice(key)
                    shape, dtype = tuple(part.get_shape()), DTYPES[part.get_dtype()]
                    found[prefix + key] = Entry(dtype, shape, [StoredBox((0,) * len(shape), shape, name, key)])
        except (OSError, SafetensorError, KeyError) as error:
            raise CheckpointError(f"{folder / name} can't be read: {error}") from None
    return found


def _whole_numbers(values: Any) -> Shape:
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"{values!r} are no sizes")
    return tuple(values)


def check_cover(index: Index, where: Path) -> None:
    """Each tensor is made up of its boxes, every element once. CheckpointError names the first that is not."""
    for name, entry in index.items():
        low = np.array([box.offsets for box in entry.boxes], dtype=np.int64).reshape(len(entry.boxes), -1)
        high = low + np.array([box.sizes for box in entry.boxes], dtype=np.int64).reshape(low.shape)
        held = sum(math.prod(box.sizes) for box in entry.boxes)
        if (high > np.array(entry.shape, dtype=np.int64)).any() or held != math.prod(entry.shape) or _overlap(low, high):
            raise CheckpointError(f"{where}: the boxes of {name} don't make up {list(entry.shape)} ({held:,} elements in {len(entry.boxes)} boxes)")


def _overlap(low: np.ndarray, high: np.ndarray) -> bool:
    """Whether any two boxes share an element. low, high: [n, d]."""
    count = len(low)
    rows = max(1, COVER_PAIRS // max(1, count))
    for start in range(0, count, rows):
        here = slice(start, start + rows)
        common = (np.minimum(high[here, None], high[None]) > np.maximum(low[here, None], low[None])).all(2)  # [rows, n]
        if np.count_nonzero(common) > len(low[here]):  # each with itself
            return True
    return False


# ---------------------------------------------------------------------------------------------------------------- files
def write_tensors(path: Path, boxes: Sequence[tuple[str, torch.dtype, Shape]], values: Callable[[int], Tensor]) -> tuple[int, str]:
    """Write one safetensors file, box by box, and put it on the disk; gives its bytes and sha256.

    boxes: (key, dtype, sizes). values(i) is asked for in order of falling element size, as readers of the format like it.
    """
    order = sorted(range(len(boxes)), key=lambda each: -boxes[each][1].itemsize)
    head, at = {}, 0
    for each in order:
        key, dtype, sizes = boxes[each]
        if dtype not in CODES:
            raise CheckpointError(f"{key} is {dtype}; a checkpoint can hold {', '.join(map(str, CODES))}")
        end = at + math.prod(sizes) * dtype.itemsize
        head[key] = {"dtype": CODES[dtype], "shape": list(sizes), "data_offsets": [at, end]}
        at = end
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    checksum = hashlib.sha256()
    with open(path, "wb") as file:
        begin = len(text).to_bytes(8, "little") + text
        checksum.update(begin)
        file.write(begin)
        for each in order:
            data = _bytes_of(values(each))
            for start in range(0, len(data), BLOCK):
                checksum.update(data[start : start + BLOCK].data)
                file.write(data[start : start + BLOCK].data)
        file.flush()
        os.fsync(file.fileno())
    return 8 + len(text) + at, checksum.hexdigest()


def _bytes_of(tensor: Tensor) -> np.ndarray:
    plain: np.ndarray = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return plain


def check_file(path: Path, size: Any, sha256: Any) -> None:
    """CheckpointError unless the file has that many bytes and that checksum."""
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        if path.stat().st_size != size:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, its manifest says {size}")
        if sha256_of(path) != sha256:
            raise CheckpointError(f"{path} does not match the sha256 in its manifest")
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error}") from None


def sha256_of(path: Path) -> str:
    """Checksum of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ------------------------------------------------------------------------------------------------------------- manifest
def files_of(folder: Path) -> tuple[int, dict[str, tuple[Any, Any]], int]:
    """What the manifest says: format, file -> (bytes, sha256), step."""
    manifest = read_json(folder / MANIFEST, CheckpointError)
    files, form, step = manifest.get("files"), manifest.get("format"), manifest.get("step")
    if form not in (FORMAT, OLD_FORMAT) or not isinstance(files, dict):
        raise CheckpointError(f"{folder / MANIFEST}: format {form}; this version reads formats {OLD_FORMAT} and {FORMAT}")
    if type(step) is not int:
        raise CheckpointError(f"{folder / MANIFEST}: step {step!r} is no number")
    found = {}
    for name, entry in files.items():
        if name not in (META, TENSORS, *OLD_FILES) and not FILE_NAME.fullmatch(name):
            raise CheckpointError(f"{folder / MANIFEST} lists {name!r}, which is no file of a checkpoint")
        if not isinstance(entry, dict):
            raise CheckpointError(f"{folder / MANIFEST} says nothing of {name}")
        found[name] = entry.get("bytes"), entry.get("sha256")
    for name in (META, TENSORS) if form == FORMAT else (META, *OLD_FILES):
        if name not in found:
            raise CheckpointError(f"{folder / MANIFEST} does not list {name}")
    return form, found, step


def merge(parts: Iterable[Index], where: Path) -> Index:
    """The index of all ranks' files. CheckpointError where two ranks mean different tensors by one name, or together not all of one."""
    whole: Index = {}
    for part in parts:
        for name, entry in part.items():
            known = whole.setdefault(name, Entry(entry.dtype, entry.shape))
            if (known.dtype, known.shape) != (entry.dtype, entry.shape):
                raise CheckpointError(f"{where}: ranks disagree on {name}: {known.dtype} {known.shape} and {entry.dtype} {entry.shape}")
            known.boxes += entry.boxes
    check_cover(whole, where)
    return whole
