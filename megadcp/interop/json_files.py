"""JSON objects in files. No torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from megadcp.config.check import UserError


def read_json(path: Path, wrong: type[UserError] = UserError) -> dict[str, Any]:
    """A JSON object; an error of the class `wrong` for anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise wrong(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise wrong(f"{path} can't be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise wrong(f"{path} holds no JSON object")
    return value


def write_json(path: Path, value: Any) -> None:
    """Indented JSON, on the disk."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=2, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
