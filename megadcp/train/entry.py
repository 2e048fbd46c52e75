"""What one call of the trainer does before training: start, resume, show or refuse a run. It never overwrites one.

The rule for an existing run: settings that only say where and how steps run, what is saved and what is shown may change from call to
call; the new value is written to run.yaml and holds from then on. All others are what the run is: they need a run of another name, or to be
named in checkpoint.allow_change (resume.py). run.steps may change while that leaves the steps already done as they are (`_refuses_steps`).
"""

from __future__ import annotations

import errno
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from megadcp.backends import gpu_probe, te_probe
from megadcp.config.check import UserError, check
from megadcp.config.run_file import differences, dump_run, load_run
from megadcp.config.schema import Config
from megadcp.plan.planner import planner_for
from megadcp.train import launch
from megadcp.train.exchange import check_exchange
from megadcp.train.out_of_memory import OUT_OF_MEMORY, take_notes
from megadcp.train.resume import refused, ways_out
from megadcp.train.run_folder import LOCK, is_unfinished, keep_folder
from megadcp.train.signals import StopRequest
from megadcp.train.trackers import check_trackers

FULL = (errno.ENOSPC, errno.EDQUOT)


def start(config: Config) -> int:
    """Start or resume the run that `config` names, or show its result when it is finished. Returns the exit code.

    As one of the ranks that torchrun or srun started, take part in it; alone, start as many ranks on this machine as the config asks for.

    Raises:
        UserError: this machine can't train it, the run folder holds another run, or the ranks are not those that the config asks for.
    """
    check(config)
    te_probe.refuse(config.precision.backend, config.cluster.device)
    planner_for(config)  # what can't be planned is refused here, not by every rank
    check_trackers(config)
    folder = Path(config.run.folder) / config.run.name
    check_exchange(config, begun=_steps_done(folder) > 0)
    if launch.place().by:
        return _as_rank(config, folder)
    gpu_probe.refuse(config.precision, config.cluster.device)
    if config.cluster.world > 1 and config.cluster.nodes > 1:
        launch.join(config)  # says how several nodes are started
    with ExitStack() as held:
        with StopRequest() as stop:
            with stop.at_once():
                if not _open(folder, config, held):
                    return 0
                if config.cluster.world > 1:
                    from megadcp.train.supervise import supervise  # torch: a second in which a signal is heard, too
            if config.cluster.world == 1:
                return _train(config, folder, None, stop)
        return _supervise(config, folder, supervise)


def _as_rank(config: Config, folder: Path) -> int:
    """One of several ranks that somebody else started; rank 0 opens the run, the others wait for it."""
    with StopRequest() as stop, launch.join(config) as world, ExitStack() as held:

        def open_run() -> bool:
            with stop.at_once():
                return _open(folder, config, held)

        if not world.first(open_run):
            return 0
        return _train(config, folder, world, stop)


def _train(config: Config, folder: Path, world: launch.World | None, stop: StopRequest) -> int:
    """Train in this process; alone, it also starts again with less memory for the plans after it ran out of it."""
    from megadcp.train.loop import train  # torch: a second late, so only when there is something to train

    while True:
        code = train(config, folder, world, stop)
        alone = world is None or world.world_size == 1
        if code != OUT_OF_MEMORY or stop or not (alone and take_notes(folder, config, _say)):
            return code


def _supervise(config: Config, folder: Path, supervise: Callable[..., int]) -> int:
    """Train on ranks of this machine, and start them again with less memory for the plans after one ran out of it."""
    command = [sys.executable, "-m", "megadcp.train.rank", str(folder)]
    while True:
        code: int = supervise(command, config.cluster.processes, config.cluster.threads, folder / "ranks")
        if code != OUT_OF_MEMORY or not take_notes(folder, config, _say):
            return code


def register(config: Config) -> bool:
    """What start() does with the run folder, for whoever queues the run as a job; False: the run is finished, and was shown.

    Raises:
        UserError: the run folder holds another run, or a process is training in it.
    """
    with ExitStack() as held:
        return _open(Path(config.run.folder) / config.run.name, config, held, prepare=False)


def _open(folder: Path, config: Config, held: ExitStack, prepare: bool = True) -> bool:
    """Prepare data and folder, which is kept for this process until `held` is closed; False: the run is finished, and was shown."""
    if _exists(folder, config):
        changed = changes(folder, config)
        if finished(folder, config) and "run.steps" not in changed:
            _show(folder)
            return False
    if prepare:
        _prepare(config)
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LOCK).touch()
        held.enter_context(keep_folder(folder, _say))
        _freeze(folder, config)
        if prepare:
            take_notes(folder, config, _say)
    return True


def finished(folder: Path, config: Config) -> bool:
    """Whether the run in `folder` has come to its end; result.json is written last. One of fewer steps than asked for is no end."""
    try:
        steps = json.loads((folder / "result.json").read_text(encoding="utf-8")).get("steps")
    except FileNotFoundError:
        return False
    except (OSError, ValueError, AttributeError):
        return True  # showing it says what is wrong with it
    return not isinstance(steps, int) or steps >= config.run.steps


def _began(folder: Path) -> bool:
    """Whether anything was trained here; a run that was refused before its first step may be started with other settings."""
    metrics = folder / "metrics.jsonl"
    return bool(_steps_done(folder)) or (folder / "result.json").exists() or (metrics.is_file() and metrics.stat().st_size > 0)


def changes(folder: Path, config: Config) -> dict[str, tuple[Any, Any]]:
    """Full name -> (old, new) of what `config` changes in the existing run, all of it legal.

    Raises:
        UserError: a change would make it another run; lists key: old -> new.
    """
    old = load_run(folder)
    changed = differences(old, config)
    reason = _refuses_steps(folder, old, config) if "run.steps" in changed else ""
    wrong = [key for key in refused(changed, config) if key != "run.steps" or reason]
    if wrong and _began(folder):
        listed = ", ".join(f"{key}: {changed[key][0]} -> {changed[key][1]}" for key in wrong)
        because = f" (run.steps can't change: {reason})" if "run.steps" in wrong else ""
        raise UserError(f"{folder} holds a run with other settings: {listed}{because}; {ways_out(wrong)}")
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
        begin = int(min(old.run.steps, new.run.steps) * (1 - old.optim.decay_share))
        return "" if done <= begin else f"{done} steps are done and the decay of optim.schedule=wsd begins at step {begin}"
    return f"the learning rate of optim.schedule={new.optim.schedule} depends on it; constant does not, wsd not before its decay"


def _steps_done(folder: Path) -> int:
    """Steps of the newest checkpoint; 0 without one."""
    matches = (re.fullmatch(r"step-([0-9]+)", each.name) for each in (folder / "checkpoints").glob("step-*"))
    return max((int(match[1]) for match in matches if match), default=0)


def _exists(folder: Path, config: Config) -> bool:
    """Whether the folder holds a run. checkpoint.resume may refuse one; what is no run is always left alone."""
    if (folder / "run.yaml").is_file():
        if config.checkpoint.resume == "refuse":
            raise UserError(
                f"{folder} holds a run already and checkpoint.resume=refuse; choose another run.name, or checkpoint.resume=auto to go on with it"
            )
        return True
    if folder.exists() and (not folder.is_dir() or any(each.name != LOCK and not is_unfinished(each.name) for each in folder.iterdir())):
        raise UserError(f"{folder} exists but is no run (it has no run.yaml); it is left alone, choose another run.name")
    return False


def _prepare(config: Config) -> None:
    if config.data.prepare.kind == "none":
        return
    from megadcp.data.prepare import prepare

    prepare(config.data, _say, config.model.vocab)


def _freeze(folder: Path, config: Config) -> None:
    """Write run.yaml, or rewrite it with what changed. Called by the only process in the folder."""
    file, name = folder / "run.yaml", config.run.name
    if not _exists(folder, config):
        dump_run(config, file)
        _say(f"run {name}: new; its settings are in {file}")
        return
    for key, (before, after) in changes(folder, config).items():
        _say(f"run {name}: {key} is {after} from here on (was {before})")
    dump_run(config, file)
    _say(f"run {name}: going on in {folder}")


def _show(folder: Path) -> None:
    from megadcp.train.finish import show_result

    show_result(folder, _say)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """What the system refuses while the run folder is made or written is one clear line."""
    try:
        yield
    except OSError as error:
        ways = "free some space, or set run.folder to another disk" if error.errno in FULL else "set run.folder to a folder you may write to"
        where = f": {error.filename}" if error.filename else ""
        raise UserError(f"the run folder {folder} can't be written ({error.strerror or error}{where}); {ways}") from None


def _say(line: str) -> None:
    print(line, flush=True)
