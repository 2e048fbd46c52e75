"""One life of a run: everything that is open while it trains, made from its settings and from where its folder stops."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from megadcp.backends.choose import choose, group_splits, require_alike
from megadcp.config.check import UserError
from megadcp.config.schema import Config
from megadcp.data.manifest import refuse_other_tokenizers
from megadcp.data.order import open_training, open_validation
from megadcp.data.step_documents import DocumentSource, StepDocuments, ValidationSet
from megadcp.data.tokenizer import Tokenizer, open_tokenizer
from megadcp.engine.refit import Refit
from megadcp.engine.stragglers import LaneSpeeds
from megadcp.mesh.groups import GroupPool
from megadcp.plan.ahead import PlanWorker
from megadcp.plan.basis import Basis
from megadcp.plan.fit import Factors
from megadcp.plan.plan_file import PLAIN_DOES, need_zstandard, plans_file
from megadcp.plan.planner import planner_for
from megadcp.plan.step_plan import StepPlan
from megadcp.train import checkpoint
from megadcp.train.adaptive_planner import adaptive_planner_for
from megadcp.train.describe import describe
from megadcp.train.export import Exporter
from megadcp.train.health import BadSteps, Heart, Rollback
from megadcp.train.incidents import add_incident
from megadcp.train.launch import SUPERVISOR, World
from megadcp.train.log import Console, SilentConsole, open_console
from megadcp.train.metrics import Metrics, MetricsFile, NoMetrics
from megadcp.train.resume import check_files, say_changes
from megadcp.train.run_folder import RunFolder
from megadcp.train.signals import StopRequest
from megadcp.train.state import TrainState, choose_device, new_state, seed_random
from megadcp.train.trackers import TrackedMetrics, open_trackers
from megadcp.train.weights import start_from

Value = TypeVar("Value")


@dataclass
class Run:
    """What the functions below share."""

    config: Config
    folder: RunFolder
    console: Console
    source: DocumentSource
    held_out: list[ValidationSet]
    plan_for: Callable[[StepDocuments], StepPlan]
    validation_plan_for: Callable[[StepDocuments], StepPlan]
    worker: PlanWorker | None
    tokenizer: Tokenizer | None
    state: TrainState
    metrics: Metrics
    plans: Path
    world: World | None
    saver: checkpoint.Saver
    heart: Heart
    exporter: Exporter
    saved_step: int = -1
    slow: dict[int, int] = field(default_factory=dict)  # lane -> steps for which it has been slow without a break
    asked: float = 0.0  # whether any rank wants to stop, as the ranks last agreed

    @property
    def leads(self) -> bool:
        """Whether this is the rank that speaks and writes."""
        return self.world is None or self.world.rank == 0

    def stopped(self, signal: str, where: str) -> None:
        """Say and keep that the run leaves in order."""
        text = f"stopped by {signal or 'a signal to another rank'} {where}"
        self.console.say(text)
        self.incident("stopped", text)

    def incident(self, kind: str, text: str, **more: object) -> None:
        """Keep what happened, once."""
        if self.leads:
            add_incident(self.folder.path, kind, self.state.progress.step, text, **more)


@dataclass(frozen=True)
class Session:
    """What stays when a run is sent back to an older checkpoint."""

    config: Config
    folder: RunFolder
    console: Console
    world: World | None
    pool: GroupPool | None
    heart: Heart
    stop: StopRequest

    @property
    def rank(self) -> int:
        """Of this process."""
        return 0 if self.world is None else self.world.rank


def first(world: World | None, action: Callable[[], Value]) -> Value:
    """action() on rank 0; all ranks get what it returns."""
    return action() if world is None else world.first(action)


@contextmanager
def open_pool(config: Config, world: World | None) -> Iterator[GroupPool | None]:
    """All process groups of the run; None for a process that runs alone."""
    if world is None or world.world_size == 1:
        yield None
        return
    choice = choose(config.precision, world.device)
    require_alike(choice, world.rank, world.first(lambda: (choice.name, choice.why)))
    splits = group_splits(config, world.mesh, choice)
    with GroupPool(world.mesh, world.rank, world.device, config.parallel.max_cp, overlap=True, splits=splits) as pool:
        yield pool


@contextmanager
def console_of(config: Config, leads: bool) -> Iterator[Console]:
    """Where the lines of this rank go."""
    console = open_console(config.log, config.run.steps) if leads else SilentConsole()
    try:
        yield console
    finally:
        console.close()


@contextmanager
def threads(wanted: int) -> Iterator[None]:
    """Torch's threads inside; 0 leaves them as they are."""
    before = torch.get_num_threads()
    if wanted:
        torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def heart_of(config: Config, folder: Path, world: World | None) -> Iterator[Heart]:
    """The signs of life of this rank."""
    life = first(world, lambda: secrets.token_hex(4))
    rank, size = (0, 1) if world is None else (world.rank, world.world_size)
    with Heart(config.health, folder, rank, size, life, bool(os.environ.get(SUPERVISOR))) as heart:
        yield heart


def _interruptible(session: Session, action: Callable[[], None]) -> None:
    """By rank 0, for the others that wait: what may take long, and loses nothing when a signal ends it."""
    with session.stop.at_once():
        action()


class _Planning:
    """Who plans the steps of a run, and with what besides their lengths."""

    def __init__(self, config: Config) -> None:
        self.config, self.planner = config, planner_for(config)
        self.adaptive = adaptive_planner_for(config) if config.plan.refit or config.plan.refit_lane_speed else None
        self.state: TrainState | None = None

    def in_force(self, step: int) -> tuple[Any, ...]:
        """What the plan of a step depends on besides its lengths."""
        state = self.state
        assert state is not None
        factors = Factors() if state.refit is None else state.refit.factors(step)
        return factors, None if state.lanes is None or not self.config.plan.refit_lane_speed else state.lanes.speeds(step)

    def step(self, documents: StepDocuments) -> StepPlan:
        """The plan of a step of training."""
        if self.adaptive is not None:
            return self.adaptive(documents.step, documents.lengths.tolist(), *self.in_force(documents.step))
        return self.planner(documents.step, documents.lengths.tolist())

    def as_configured(self, documents: StepDocuments) -> StepPlan:
        """The plan of a validation."""
        return self.planner(documents.step, documents.lengths.tolist())


def open_run(session: Session, worker: PlanWorker | None, back: Rollback | None) -> Run:
    """Open data, model and files, and go on from the newest checkpoint. back: what the run is sent back for, if it is. All ranks call it.

    Raises:
        UserError: what was asked for can't be trained, or doesn't go with what the folder holds.
    """
    config, folder, console, world = session.config, session.folder, session.console, session.world
    session.heart.beat("starting" if back is None else "going back", 0)
    if config.plan.compress:
        need_zstandard(PLAIN_DOES)  # refused before anything is done
    device = choose_device(config) if world is None else world.device
    tokenizer = _open_tokenizer(config)
    source = open_training(config.data, config.run.steps)
    first(world, lambda: check_files(folder.path, config, checkpoint.began(folder), console.say))
    first(world, lambda: _interruptible(session, source.build))  # now, not in the middle of a step
    held_out = open_validation(config.data)
    planning = _Planning(config)
    if worker is not None:
        worker.start()  # it is ready by the time the model is
    state = planning.state = new_state(config, device, source.fingerprint, tokenizer.fingerprint if tokenizer else "", session.pool)
    if back is None:
        for line in describe(config, device, source, held_out, tokenizer, planning.planner.basis.layout):
            console.say(line)
    else:
        first(world, lambda: _set_aside(folder, back, console))
    found = checkpoint.newest(folder, console.say, repair=True, group=state.world)
    last_step = 0 if found is None else found.step
    plans = first(world, lambda: plans_file(folder.path, config.plan.compress, last_step, console.say))
    metrics = _open_metrics(session, last_step)
    saver = checkpoint.Saver(folder, config.checkpoint, console.say, state.world)
    exporter = Exporter(folder, config, console.say, session.rank == 0)
    run = Run(
        config, folder, console, source, held_out, planning.step, planning.as_configured, worker, tokenizer, state, metrics, plans, world, saver,
        session.heart, exporter,
    )  # fmt: skip
    _open_adaptive(run, planning.planner.basis, found)
    if worker is not None and planning.adaptive is not None:
        worker.more = planning.in_force
    _place(run, found, back)
    if found is not None:
        first(world, lambda: _remove_old(run))
    if last_step < config.run.steps:
        share = sum(box.nbytes for box in state.boxes())
        checkpoint.require_room(folder, share, config.checkpoint, (last_step, config.run.steps), state.world, console.say)
    if run.leads:
        run.metrics = TrackedMetrics(metrics, open_trackers(config, folder.path, last_step, console.say))
    return run


def _remove_old(run: Run) -> None:
    """What a save would have removed that was killed after its checkpoint was complete: it may have been the last one."""
    with suppress(OSError):  # which the next save will tell
        checkpoint.remove_old(run.folder, run.config.checkpoint.keep_last, run.config.checkpoint.keep_every)


def _open_tokenizer(config: Config) -> Tokenizer | None:
    """The tokenizer that made the data, if it is named; UserError if it doesn't go with model or data."""
    names_one = bool(config.data.tokenizer.path) or config.data.tokenizer.kind == "bytes"
    tokenizer = open_tokenizer(config.data.tokenizer.kind, config.data.tokenizer.path) if names_one else None
    if tokenizer is not None and tokenizer.vocab_size > config.model.vocab:
        raise UserError(
            f"model.vocab={config.model.vocab} is below the tokenizer's {tokenizer.vocab_size} tokens; legal: {tokenizer.vocab_size} or more"
        )
    refuse_other_tokenizers(config.data, None if tokenizer is None else tokenizer.fingerprint)
    return tokenizer


def _open_metrics(session: Session, last_step: int) -> Metrics:
    metrics: Metrics
    if session.rank == 0:
        metrics = MetricsFile(session.folder.metrics, last_step, session.console.say)
        first(session.world, lambda: metrics.validated)
    else:
        metrics = NoMetrics(first(session.world, lambda: set()))
    return metrics


def _place(run: Run, found: checkpoint.Checkpoint | None, back: Rollback | None) -> None:
    """Go on where the checkpoint stood, or begin."""
    config, state, console = run.config, run.state, run.console
    if found is None:
        seed_random(config.run.seed)
        start_from(state, console.say)
        console.say(f"starting at step 0 of {config.run.steps:,}")
        return
    state.load(found)
    run.saved_step = found.step
    told = f"going on after step {found.step:,} of {config.run.steps:,}, from {found.path}"
    console.say(told)
    if back is None and found.step < config.run.steps:
        run.incident("resumed", told)
    state.progress.place = say_changes(found.meta, config, state.order, state.progress.place, console.say, run.incident)
    if back is not None:
        _go_on_differently(run, back)


def _open_adaptive(run: Run, basis: Basis, found: checkpoint.Checkpoint | None) -> None:
    """What follows the steps of a run: the fit of its profile, what is known of its lanes, and the losses that spikes are judged by."""
    config, state, meta = run.config, run.state, {} if found is None else found.meta
    begin, mesh = 0 if found is None else found.step, state.engine.mesh
    state.bad_steps = BadSteps(config.health)
    if "bad_steps" in meta:
        state.bad_steps.load(meta["bad_steps"])
    notes = []
    if config.plan.refit:
        state.refit = Refit(basis, config.plan.ahead, first=begin)
        notes.append(state.refit.load(meta["refit"]) if "refit" in meta else "")
    if mesh.lanes > 1:
        state.lanes = LaneSpeeds(mesh, config.plan.ahead, begin, config.plan.lane_speed)
        notes.append(state.lanes.load(meta["lane_speeds"]) if "lane_speeds" in meta else "")
    for note in filter(None, notes):
        run.console.say(note)


def _set_aside(folder: RunFolder, back: Rollback, console: Console) -> None:
    """Before going back: checkpoints of later steps don't count any more (they are kept as rolled-back-step-*)."""
    for path in checkpoint.saved(folder):
        step = int(path.name.removeprefix(checkpoint.PREFIX))
        if step > back.step:
            number = len(list(folder.checkpoints.glob(f"rolled-back-*{path.name}")))
            os.rename(path, path.with_name(f"rolled-back-{number}-{path.name}" if number else f"rolled-back-{path.name}"))
            console.say(f"{path.name} is set aside: its steps are taken back")


def _go_on_differently(run: Run, back: Rollback) -> None:
    """After going back: leave out the documents of the steps that were taken back, if that is asked for, and make it last."""
    progress, health = run.state.progress, run.config.health
    progress.rollbacks = back.rollbacks + 1
    told = "their documents come again"
    if health.rollback_documents == "skip":
        progress.place = back.place
        told = f"their documents are left out (step {progress.step + 1:,} has those of step {back.place + 1:,} of the order)"
    text = f"rolled back from step {back.failed:,} to step {progress.step:,} ({back.problem}); {told}; rollback {progress.rollbacks}"
    text += f" of {health.max_rollbacks}"
    run.console.say(text)
    run.incident("rollback", text, failed_step=back.failed, place=progress.place)
    run.saved_step = -1
    save(run)
    run.saver.finish()  # a restart before the next save must not repeat what was left out


def save(run: Run) -> None:
    """Begin to save this step. The one before is waited for, and what became of it is everybody's."""
    step = run.state.progress.step
    if step == run.saved_step:
        return
    run.heart.beat("saving", step)
    run.metrics.sync()
    run.saver.finish()
    run.exporter.poll()  # holds on to what the next save may remove
    run.saver.save(step, run.state.boxes(), run.state.meta(), run.state.own_meta())
    run.saved_step = step
    run.exporter.saving(step)
