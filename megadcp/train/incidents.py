"""incidents.jsonl: what happened to a run besides its steps, one JSON object a line: restarts, skipped and rolled back steps, hangs, changes.

Keys of a line: time (UTC, for people), step (steps done), kind, text; some kinds have more. Lines are only ever added, by any rank and by the
supervisor, so they also tell of steps that a rollback has removed from metrics.jsonl.
"""

from __future__ import annotations

import contextlib
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

NAME = "incidents.jsonl"


def add_incident(folder: Path, kind: str, step: int | None, text: str, **more: Any) -> None:
    """Append a line. What can't be written is not worth ending a run for: nothing is raised."""
    line = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "step": step, "kind": kind, "text": text, **more}
    with contextlib.suppress(OSError, ValueError):
        handle = os.open(folder / NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(handle, json.dumps(line).encode() + b"\n")  # one write: lines of several processes don't mix
        finally:
            os.close(handle)


def read_incidents(folder: Path) -> list[dict[str, Any]]:
    """All lines, oldest first; lines that are no JSON objects are left out."""
    found = []
    with contextlib.suppress(OSError):
        for line in (folder / NAME).read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict):
                    found.append(row)
    return found
