"""What one call of the trainer does before and around training: start, resume, show or refuse a run. Never overwrites one."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megadcp.config.check import UserError, check, check_runnable
from megadcp.config.run_file import differences, dump_run, load_run
from megadcp.config.schema import Config

# Settings that change neither a step's result nor the way to it: an existing run takes the new value, says so and goes on.
# All others are part of what the run is; changing one needs a run of another name. run.steps has its own rule (`_refuses_steps`).
FREE = ("log.", "checkpoint.", "cluster.", "hardware.", "plan.ahead", "data.cache", "data.prepare.", "run.validate_", "run.sample_", "run.folder")


def start(config: Config) -> int:
    """Start or resume the run that `config` names, or show its result when it is finished. Returns the exit code.

    Raises:
        UserError: this version can't train it, or the run folder holds another run.
    """
    check(config)
    check_runnable(config)
    folder = Path(config.run.folder) / config.run.name
    new = _is_new(folder, config)
    if not new:
        changed = _changes(folder, config)
        if finished(folder) and "run.steps" not in changed:
            _show_result(folder)
            return 0
    _prepare(config)
    folder.mkdir(parents=True, exist_ok=True)
    with _only_process(folder):
        if new and (folder / "run.yaml").exists():
            raise UserError(f"{folder} was begun by another process just now; call again to resume it, or choose another run.name")
        _freeze(folder, config, new)
        from megadcp.train.loop import train

        return train(config, folder)


def finished(folder: Path) -> bool:
    """Whether the run in `folder` has come to its end; result.json is written last."""
    return (folder / "result.json").is_file()


def _is_new(folder: Path, config: Config) -> bool:
    """Whether the folder holds no run yet. An existing one may be refused by setting; files of somebody else always are."""
    if (folder / "run.yaml").is_file():
        if config.checkpoint.resume == "refuse":
            raise UserError(
                f"{folder} holds a run already and checkpoint.resume=refuse; choose another run.name, or checkpoint.resume=auto to go on with it"
            )
        return False
    if folder.exists() and (not folder.is_dir() or any(each for each in folder.iterdir() if each.name != LOCK)):
        raise UserError(f"{folder} exists and is not a run (it has no run.yaml); it is left alone, choose another run.name")
    return True


def _changes(folder: Path, config: Config) -> dict[str, tuple[Any, Any]]:
    """What `config` changes in the existing run, all of it legal.

    Raises:
        UserError: a change would make it another run; lists key: old -> new.
    """
    old = load_run(folder)
    changed = differences(old, config)
    refused = {key: pair for key, pair in changed.items() if not key.startswith(FREE) and key != "run.steps"}
    if "run.steps" in changed and (reason := _refuses_steps(folder, old, config)):
        refused["run.steps"] = changed["run.steps"]
        reason = f" (run.steps: {reason})"
    else:
        reason = ""
    if refused:
        listed = ", ".join(f"{key}: {before} -> {after}" for key, (before, after) in refused.items())
        raise UserError(
            f"{folder} holds a run with other settings: {listed}{reason}; "
            "choose run.name=NAME for a new run, or leave these settings as they were to go on with the old one"
        )
    return changed


def _refuses_steps(folder: Path, old: Config, new: Config) -> str:
    """Why the length of an existing run can't change, or nothing: the steps already done must be those of the new length, too."""
    done = _steps_done(folder)
    if new.run.steps < done:
        return f"{done} steps are done"
    if new.data.mode == "stream":
        return "the order of data.mode=stream depends on it"
    if new.optim.schedule == "constant":
        return ""
    if new.optim.schedule == "wsd":
        begin = int(old.run.steps * (1 - old.optim.decay_share))
        return "" if done <= begin else f"the decay of optim.schedule=wsd began at step {begin}"
    return f"optim.schedule={new.optim.schedule} depends on it; constant does not, wsd not before its decay"


def _steps_done(folder: Path) -> int:
    """Steps of the newest checkpoint; 0 without one."""
    names = [each.name for each in (folder / "checkpoints").glob("step-*")]
    return max((int(match[1]) for name in names if (match := re.fullmatch(r"step-([0-9]+)", name))), default=0)


def _prepare(config: Config) -> None:
    if config.data.prepare.kind == "none":
        return
    from megadcp.data.prepare import prepare

    prepare(config.data, _say)


def _freeze(folder: Path, config: Config, new: bool) -> None:
    """Write run.yaml, or rewrite it with the changed settings, each of them named."""
    if new:
        dump_run(config, folder / "run.yaml")
        _say(f"run {config.run.name}: new, in {folder} (settings: {folder / 'run.yaml'})")
        return
    changed = _changes(folder, config)
    for key, (before, after) in changed.items():
        _say(f"run {config.run.name}: {key} changes from {before} to {after} from here on")
    if finished(folder):  # longer than before: the old result stays under the step it belongs to
        os.replace(folder / "result.json", folder / f"result-{_steps_done(folder):08d}.json")
    if changed:
        dump_run(config, folder / "run.yaml")
    _say(f"run {config.run.name}: resuming in {folder}, newest checkpoint at step {_steps_done(folder)}")


def _show_result(folder: Path) -> None:
    _say(f"run {folder.name} is finished; its result ({folder / 'result.json'}):")
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    for key, value in result.items():
        _say(f"  {key}: {f'{value:.6g}' if isinstance(value, float) else value}")
    _say(f"everything else is in {folder}; run.name=NAME starts a new run with the same data")


LOCK = ".lock"


@contextmanager
def _only_process(folder: Path) -> Iterator[None]:
    """Hold the run folder: a second trainer in it would mix two runs. The kernel lets go when this process ends, however it ends."""
    with open(folder / LOCK, "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise UserError(f"another process is training in {folder}; wait for it, or choose another run.name") from None
        yield


def _say(line: str) -> None:
    print(line, flush=True)
