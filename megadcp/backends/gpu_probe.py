"""Which GPUs this machine has, asked of the driver before ranks are started: CUDA is left alone, so no memory of a device is taken."""

from __future__ import annotations

import re
import subprocess

from megadcp.backends.te_probe import TeUnavailable
from megadcp.config.check import UserError
from megadcp.config.schema import PrecisionConfig

Capability = tuple[int, int]
HOPPER: Capability = (9, 0)  # the first compute capability whose fp8 products and packed attention are as fast as Transformer Engine is taken for
FP8_FROM: Capability = (8, 9)  # the first that torch._scaled_mm runs on
QUERY = ("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")


def capabilities() -> list[Capability]:
    """Of the GPUs that the driver names, visible to this process or not; [] without a driver, or if it doesn't answer."""
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    found = (re.fullmatch(r"(\d+)\.(\d+)", line.strip()) for line in done.stdout.splitlines())
    return [(int(each[1]), int(each[2])) for each in found if each]


def too_old_for_te(found: Capability) -> str:
    """Why Transformer Engine is not taken on a GPU; nothing where it may be."""
    if found >= HOPPER:
        return ""
    return f"Transformer Engine is taken from Hopper on (compute capability 9.0), and this GPU has {_text(found)}"


def too_old_for_fp8(format: str, found: Capability) -> str:
    """Why the torch backend has no such linears on a GPU; nothing where it has."""
    if format != "fp8_current" or found >= FP8_FROM:
        return ""
    return f"precision.format={format}: this GPU has compute capability {_text(found)}, fp8 products need 8.9 or newer; legal here: bf16, fp32"


def refuse(precision: PrecisionConfig, device: str) -> None:
    """UserError for a backend or format that none of this machine's GPUs runs, before ranks are started. Each rank asks its own device again."""
    if device == "cpu" or not (precision.backend == "te" or precision.format == "fp8_current"):
        return
    best = max(capabilities(), default=HOPPER)  # unknown: the ranks will see
    reason = too_old_for_te(best)
    if reason and precision.backend == "te":
        raise UserError(TeUnavailable(reason).refusal)
    reason = too_old_for_fp8(precision.format, best)
    if reason:
        raise UserError(reason)


def _text(found: Capability) -> str:
    return ".".join(map(str, found))
