"""The folder of one run: what lies where in it, and how files are written so that nobody ever sees half of one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class RunFolder:
    """Paths below `runs/NAME/`."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.latest = self.path / "latest"
        self.loss_curve = self.path / "loss.svg"
        self.lengths = self.path / "lengths.svg"
        self.sample = self.path / "sample.txt"
        self.result = self.path / "result.json"

    @property
    def plans(self) -> Path:
        """plans.jsonl, or plans.jsonl.zst where only that is there."""
        plain, packed = self.path / "plans.jsonl", self.path / "plans.jsonl.zst"
        return packed if packed.exists() and not plain.exists() else plain


def write_text(path: Path, text: str) -> None:
    """Write a whole file under another name, on the disk, and then give it its own."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """`write_text` of indented JSON; NaN and Inf become null."""
    write_text(path, json.dumps(finite(value), indent=2, allow_nan=False) + "\n")


def sync_folder(path: Path) -> None:
    """Put a folder's list of names on the disk (a rename is not safe before that)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def finite(value: Any) -> Any:
    """The value with every NaN and Inf replaced by None, which JSON can hold."""
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    return value
