"""A rank that runs out of memory: it leaves a note and exits with OUT_OF_MEMORY; the next start of the run plans with less memory.

ranks/oom-RANK.json   the note: step and what the allocator said. Whoever starts the run next reads and removes it: the supervisor of
                      cluster=local does so at once, under torchrun and SLURM the next job does
memory.json           what came of it: how often, and the share of hardware.usable_fraction that plans may use since. Removing it, or another
                      hardware.usable_fraction, begins anew

Plans decide how documents are packed and recomputed, not what is computed: the repeated steps give the same results up to rounding.
"""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megadcp.config.check import UserError
from megadcp.config.schema import Config
from megadcp.train.incidents import add_incident
from megadcp.train.run_folder import write_json

OUT_OF_MEMORY = 71  # exit code (EX_OSERR): start the run again and it will take less memory
RANKS, MEMORY = "ranks", "memory.json"
HOST_ALLOCATOR = "DefaultCPUAllocator: "  # torch has no class of its own for it
DIGITS = 6


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an allocation of torch failed, on a device or on the host. Needs no torch."""
    if not isinstance(error, RuntimeError):
        return False
    kinds = [kind for kind in type(error).__mro__ if kind.__name__ == "OutOfMemoryError" and kind.__module__.split(".")[0] == "torch"]
    return bool(kinds) or HOST_ALLOCATOR in str(error)


def leave_note(folder: Path, rank: int, step: int, error: BaseException) -> None:
    """By the rank that ran out, on its way out. step: steps done. Never raises: the error itself is what counts."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    where = f"{Path(last.filename).name}:{last.lineno}" if last else ""
    note = {"rank": rank, "step": step, "text": str(error).splitlines()[0][:500] if str(error) else type(error).__name__, "where": where}
    with contextlib.suppress(OSError):
        (folder / RANKS).mkdir(exist_ok=True)
        write_json(folder / RANKS / f"oom-{rank}.json", note)


def take_notes(folder: Path, config: Config, say: Callable[[str], None]) -> bool:
    """Before a start, by one process: turn notes into less memory for the plans. Whether there were any.

    Raises:
        UserError: this has happened health.oom_restarts times already. The notes are gone then: asking again tries once more.
    """
    notes = []
    for path in sorted((folder / RANKS).glob("oom-*.json")):
        notes.append(_read(path))
        path.unlink(missing_ok=True)
    if not notes:
        return False
    before = _memory(folder, config)
    health, first = config.health, notes[0]
    who = ", ".join(str(one.get("rank", "?")) for one in notes)
    what = f"rank {who} ran out of memory in step {int(first.get('step', 0)) + 1} ({first.get('text', '')})"
    times, share = int(before["restarts"]) + 1, round(before["share"] * health.oom_factor, DIGITS)
    old, new = (config.hardware.usable_fraction * one for one in (before["share"], share))
    if times > health.oom_restarts:
        add_incident(folder, "out_of_memory", first.get("step"), f"{what}; no restart is left", restarts=before["restarts"])
        raise UserError(
            f"{what}, after {before['restarts']} restarts with less memory each (health.oom_restarts={health.oom_restarts}); plans may fill "
            f"{old:.3g} of the memory now. Set hardware.memory_bytes or hardware.usable_fraction to what is really free, or allow more restarts"
        )
    write_json(folder / MEMORY, {"usable_fraction": config.hardware.usable_fraction, "share": share, "restarts": times})
    text = (
        f"{what}: from the last checkpoint on plans may fill {new:.3g} of the memory instead of {old:.3g} (restart {times} of {health.oom_restarts})"
    )
    add_incident(folder, "out_of_memory", first.get("step"), text, ranks=[one.get("rank") for one in notes], usable_fraction=new, restart=times)
    say(text)
    return True


def with_less_memory(folder: Path, config: Config) -> Config:
    """The config with which plans are made: its usable_fraction times what memory.json says."""
    share = float(_memory(folder, config)["share"])
    if share == 1.0:
        return config
    return replace(config, hardware=replace(config.hardware, usable_fraction=config.hardware.usable_fraction * share))


def _memory(folder: Path, config: Config) -> dict[str, Any]:
    found = _read(folder / MEMORY)
    share, restarts = found.get("share"), found.get("restarts")
    same = found.get("usable_fraction") == config.hardware.usable_fraction
    if same and isinstance(share, float) and 0 < share <= 1 and isinstance(restarts, int):
        return found
    return {"share": 1.0, "restarts": 0}


def _read(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        value = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(value, dict):
            return value
    return {}
