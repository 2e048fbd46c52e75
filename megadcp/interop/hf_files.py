"""Folders of safetensors files, in one file or in several with an index: read lazily, written in parts.

Only safetensors is read. What an index names are file names of its own folder, never paths, and a pickled .bin is refused: reading one runs
whatever code it holds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from itertools import filterfalse
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megadcp.config.check import UserError
from megadcp.interop.json_files import read_json, write_json
from megadcp.interop.tensors import LazyTensors

STEM = "model"
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]*\.safetensors")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack")
FORMATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


# ------------------------------------------------------------------------------------------------------------------- read
def read_tensors(folder: Path, stem: str = STEM, skip: Callable[[str], bool] = lambda _: False) -> LazyTensors:
    """The tensors of STEM.safetensors, or of the files that STEM.safetensors.index.json names. Names that `skip` knows are left out.

    Raises:
        UserError: none of the two, pickles only, an index that leads out of the folder or does not say what its files hold, a damaged file,
            or a number format that is no floating point one.
    """
    single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    if index.is_file():
        files = _from_index(folder, index)
    elif single.is_file():
        files = {single.name: None}
    else:
        others = sorted(path.name for path in folder.glob("*") if path.suffix in PICKLES)
        if others:
            raise UserError(
                f"{folder} has no {single.name}; {', '.join(others[:3])} can't be read: loading pickled weights runs any code in them. Convert "
                "them where you trust them (transformers: model.save_pretrained(FOLDER) writes safetensors)"
            )
        raise UserError(f"{folder} has neither {single.name} nor {index.name}")
    metas: dict[str, Tensor] = {}
    handles: dict[str, Any] = {}
    owner: dict[str, str] = {}
    for name, listed in files.items():
        handle = _open(folder / name)
        found = set(handle.keys())
        if listed is not None and found != listed:
            wrong = sorted(found ^ listed)
            raise UserError(f"{index} and {name} disagree about {', '.join(wrong[:5])}{' and more' if len(wrong) > 5 else ''}; fetch both again")
        for key in filterfalse(skip, found):
            part = handle.get_slice(key)
            kind = part.get_dtype()
            if kind not in FORMATS:
                raise UserError(f"{folder / name}: {key} is stored as {kind}; legal here: {', '.join(FORMATS)} (quantised weights can't be read)")
            metas[key] = torch.empty(part.get_shape(), dtype=FORMATS[kind], device="meta")
            owner[key], handles[name] = name, handle

    def read(key: str) -> Tensor:
        try:
            tensor: Tensor = handles[owner[key]].get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{folder / owner[key]} can't be read: {error}") from None
        return tensor

    return LazyTensors(metas, read)


def _from_index(folder: Path, index: Path) -> dict[str, set[str] | None]:
    """File name -> the tensors that the index puts there."""
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise UserError(f"{index} has no weight_map")
    files: dict[str, set[str] | None] = {}
    for tensor, name in table.items():
        if not isinstance(name, str) or not PLAIN_NAME.fullmatch(name):
            raise UserError(f"{index} puts {tensor} into {name!r}; only names of .safetensors files in its own folder are followed")
        held = files.setdefault(name, set())
        assert held is not None
        held.add(tensor)
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{folder} lacks {', '.join(missing[:5])}, which {index.name} names ({len(missing)} of {len(files)} files)")
    return files


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is no whole safetensors file: {error}") from None


# ------------------------------------------------------------------------------------------------------------------ write
def write_tensors(folder: Path, tensors: LazyTensors, max_shard_bytes: int, stem: str = STEM) -> list[str]:
    """Write all tensors, in several files where one would be larger than asked for; returns the file names.

    A tensor larger than that has a file of its own. At most one file's tensors are in memory. OSError: disk full or not writable.
    """
    shards = cut(tensors.metas, max_shard_bytes)
    names = [f"{stem}.safetensors" if len(shards) == 1 else f"{stem}-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    for name, keys in zip(names, shards, strict=True):
        path = folder / name
        path.touch()
        mode = path.stat().st_mode
        try:
            save_file({key: tensors[key].contiguous() for key in keys}, path, metadata={"format": "pt"})
        except SafetensorError as error:  # a full disk among others
            raise OSError(f"{path} can't be written: {error}") from error
        os.chmod(path, mode)  # safetensors makes files that nobody else may read
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
    if len(shards) > 1:
        placed = {key: name for name, keys in zip(names, shards, strict=True) for key in keys}
        total = sum(_bytes(meta) for meta in tensors.metas.values())
        write_json(folder / f"{stem}.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": placed})
    return names


def cut(metas: Mapping[str, Tensor], max_bytes: int) -> list[list[str]]:
    """Names in their order, cut where a file would grow above `max_bytes`."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, meta in metas.items():
        more = _bytes(meta)
        if shards[-1] and size + more > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += more
    return shards


def _bytes(meta: Tensor) -> int:
    return meta.numel() * meta.element_size()
