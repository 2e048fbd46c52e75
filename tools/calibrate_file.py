"""The hardware profile that tools/calibrate.py writes: every coefficient with where it comes from, whole or not at all."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from megadcp.config.check import UserError, check
from megadcp.config.schema import Config, GemmFlops, HardwareConfig

MARK = "# Measured by tools/calibrate.py"
NAMES = r"[A-Za-z0-9][A-Za-z0-9_-]*"


def check_output(name: str, overwrite: bool, mark: str = MARK) -> Path:
    """The file to write. UserError, before anything is measured, for what can't be written or isn't this tool's to replace."""
    path = Path(name)
    if path.suffix != ".yaml" or not re.fullmatch(NAMES, path.stem):
        raise UserError(f"out={name} can't be a hardware profile: name it NAME.yaml (letters, digits, - and _), best in configs/hardware")
    if path.is_dir():
        raise UserError(f"out={name} is a folder; give the name of a file in it")
    if not path.parent.is_dir():
        raise UserError(f"out={name}: the folder {path.parent} does not exist; make it first")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"out={name}: the folder {path.parent} can't be written to")
    if path.exists() and not overwrite and not written_here(path, mark):
        raise UserError(f"out={name} exists and was not written by this tool; choose another name, or overwrite=true to replace it")
    return path


def written_here(path: Path, mark: str = MARK) -> bool:
    """Whether a file begins as this tool's files do."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(len(mark)) == mark
    except OSError:
        return False


def profile_text(hardware: HardwareConfig, head: list[str], comments: Mapping[str, str], mark: str = MARK) -> str:
    """The YAML. `head`: lines about how it was measured; `comments`: by field (gemm_flops.fp32 for the rates); `mark`: how it begins."""

    def line(key: str, field: str, value: object, indent: str = "") -> str:
        said = comments.get(field, "")
        return f"{indent}{key}: {_plain(value)}" + (f" # {said}" if said else "")

    lines = [f"{mark}{'.' if not head else ': ' + head[0]}", *(f"# {each}" for each in head[1:])]
    for item in fields(HardwareConfig):
        value = getattr(hardware, item.name)
        if isinstance(value, GemmFlops):
            lines.append(f"{item.name}:")
            lines += [line(rate.name, f"{item.name}.{rate.name}", getattr(value, rate.name), "  ") for rate in fields(GemmFlops)]
        else:
            lines.append(line(item.name, item.name, value))
    return "\n".join(lines) + "\n"


def _plain(value: object) -> str:
    """A number as YAML reads it as one: a float needs a point, its exponent a sign."""
    if value is None:
        return "null"
    if isinstance(value, float):
        return f"{value:.6g}" if 1e-2 <= abs(value) < 1e6 or value == 0 else f"{value:.5e}"
    return str(value)


def write_profile(path: Path, text: str, config: Config) -> None:
    """Write the file under another name first, then rename it, so that nobody reads half a profile.

    Raises:
        UserError: the settings that it would make are not legal (and nothing is written).
    """
    check(_with_profile(text, config))
    write_whole(path, text)


def write_whole(path: Path, text: str) -> None:
    """Write under another name first, then rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _with_profile(text: str, config: Config) -> Config:
    import yaml

    from megadcp.config.run_file import from_dict, to_dict

    return from_dict({**to_dict(config), "hardware": yaml.safe_load(text)})
