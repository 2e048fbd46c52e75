"""Where checkpoints lie: which are there, what interrupted saves have left, which old ones go, and whether there is room for new ones.

Complete ones are named step-*; whatever is hidden is unfinished or left over; damaged-step-* were set aside.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from megadcp.config.check import UserError
from megadcp.config.schema import CheckpointConfig
from megadcp.mesh.groups import Group
from megadcp.train.checkpoint_format import PREFIX
from megadcp.train.run_folder import RunFolder, sync_folder, write_text
from megadcp.train.together import gather

REPLACED = ".replaced"
PROBE = ".probe"
SEEN_SECONDS = 60.0  # a network file system may show a new file that late
Say = Callable[[str], None]


def saved(run: RunFolder) -> list[Path]:
    """Checkpoint folders, oldest first."""
    found = [path for path in run.checkpoints.glob(f"{PREFIX}*") if path.is_dir() and path.name[len(PREFIX) :].isdigit()]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """The step that a checkpoint's folder is named after."""
    return int(path.name[len(PREFIX) :])


def began(run: RunFolder) -> bool:
    """Whether a checkpoint of this run was ever complete, even if none is in sight now."""
    return run.latest.exists() or bool(saved(run))


# ---------------------------------------------------------------------------------------------------------------- change
def put_in_place(run: RunFolder, draft: Path, final: Path) -> None:
    """Give a complete draft its name and move the pointer to it. Whenever this process dies, a complete checkpoint is there."""
    if final.exists():  # the same step once more
        os.rename(final, final.with_name(f".{final.name}{REPLACED}"))
    os.rename(draft, final)
    sync_folder(run.checkpoints)
    point_to(run, final)


def point_to(run: RunFolder, path: Path) -> None:
    """The file `latest` names this checkpoint. Where it does already nothing is written: a full disk must not matter then."""
    text = f"{run.checkpoints.name}/{path.name}\n"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if run.latest.read_text(encoding="utf-8") == text:
            return
    write_text(run.latest, text)


def remove_old(run: RunFolder, keep_last: int, keep_every: int) -> None:
    """Keep the last `keep_last` (0: all), and those of steps divisible by `keep_every` (0: none) for ever."""
    for path in saved(run)[:-keep_last] if keep_last > 0 else []:
        if not keep_every or step_of(path) % keep_every:
            hidden = path.with_name(f".{path.name}.removed")  # so that half a checkpoint never stands under a good name
            os.rename(path, hidden)
            shutil.rmtree(hidden)


def remove_leftovers(run: RunFolder) -> None:
    """Remove what interrupted saves and removals have left: everything hidden in the checkpoints' folder.

    Except a checkpoint that was to be replaced by one of the same step that never came: it gets its name back.
    """
    for path in run.checkpoints.glob(f".{PREFIX}*{REPLACED}"):
        final = path.with_name(path.name[1 : -len(REPLACED)])
        if not final.exists():
            os.rename(path, final)
    for path in run.checkpoints.glob(".*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def set_aside(path: Path) -> None:
    """Rename a checkpoint to damaged-step-*: it doesn't count as saved any more."""
    target = path.with_name(f"damaged-{path.name}")
    if target.exists():
        shutil.rmtree(target)
    os.rename(path, target)


# ------------------------------------------------------------------------------------------------------------ before it starts
def require_room(run: RunFolder, own_bytes: int, settings: CheckpointConfig, steps: tuple[int, int], group: Group, say: Say) -> None:
    """Before training: every rank can write where checkpoints go, and what the run is going to keep fits. All ranks call it.

    own_bytes: of this rank's share of one checkpoint; steps: (done, of the whole run).

    Raises:
        UserError: the same on all ranks; says what is missing where.
    """
    problems = gather(_can_write(run, own_bytes, group.index), group)
    sizes = gather(own_bytes, group)
    if not any(problems) and group.index == 0:
        problems[0] = _all_see_one_folder(run, group) or _has_room(run, sum(sizes), settings, steps, say)
    problems = gather(problems[group.index], group)
    with contextlib.suppress(OSError):
        (run.checkpoints / f"{PROBE}-{group.index}").unlink()
    for problem in problems:
        if problem:
            raise UserError(problem)


def _can_write(run: RunFolder, own_bytes: int, rank: int) -> str:
    """Why this rank can't write a checkpoint, or nothing; leaves its probe."""
    probe = run.checkpoints / f"{PROBE}-{rank}"
    try:
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        with open(probe, "wb") as file:
            file.write(b"probe")
            os.fsync(file.fileno())
        os.rename(probe, f"{probe}.new")
        os.rename(f"{probe}.new", probe)
    except OSError as error:
        reason = error.strerror or str(error)
        return f"checkpoints can't be written to {run.checkpoints} ({reason}, rank {rank}); set run.folder to a folder that every rank may write to"
    most = _largest_file()
    if most is not None and own_bytes > most:
        return f"a checkpoint needs a file of {_size(own_bytes)} of rank {rank}, but this process may write {_size(most)} (ulimit -f); raise it"
    return ""


def _largest_file() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if soft == resource.RLIM_INFINITY else soft


def _all_see_one_folder(run: RunFolder, group: Group) -> str:
    """Rank 0 looks for everybody's probe: parts that it never sees would never become a checkpoint."""
    end = time.monotonic() + SEEN_SECONDS
    while True:
        here = set(os.listdir(run.checkpoints))
        unseen = [rank for rank in range(group.size) if f"{PROBE}-{rank}" not in here]
        if not unseen:
            return ""
        if time.monotonic() > end:
            break
        time.sleep(0.1)
    return f"rank 0 doesn't see what rank {unseen[0]} writes to {run.checkpoints}; set run.folder to a folder that all nodes share"


def _has_room(run: RunFolder, size: int, settings: CheckpointConfig, steps: tuple[int, int], say: Say) -> str:
    """Why the disk is too small for what the run keeps, or nothing; a warning where only what it keeps for ever is too much."""
    done, last = steps
    every, keep = settings.every, settings.keep_every
    coming = {step for step in (*range(0, last + 1, every or last + 1), last) if step > done}
    beside = max(1, min(len(coming), settings.keep_last + 1 - len(saved(run))))  # a new one is complete before an old one goes
    free = shutil.disk_usage(run.checkpoints).free
    if free < beside * size:
        return (
            f"{run.checkpoints} has {_size(free)} free, but checkpoints of {_size(size)} need {_size(beside * size)} more there "
            f"(checkpoint.keep_last={settings.keep_last}); free some, lower keep_last, or set run.folder to another disk"
        )
    stay = len([step for step in coming if keep and step % keep == 0])
    if free < (beside + stay) * size:
        say(
            f"WARNING: checkpoint.keep_every={keep} keeps about {_size(stay * size)} until step {last:,}, but {run.checkpoints} has "
            f"{_size(free)} free"
        )
    return ""


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.3g} {unit}"


def reason_of(error: BaseException) -> str:
    """One line on a failed save, with what would help where that is known."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        text += "; free some space (checkpoint.keep_last keeps fewer) and start the same command again"
    return text
