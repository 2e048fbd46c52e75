"""The life of a run: open the data, go on where its folder stops, train, validate, save, finish.

With several ranks all of them run it; rank 0 alone speaks and writes, and what it decides from files the others are told.

Exit codes: 0 finished; 1 failed (too many bad steps, a checkpoint that can't be written); 2 the request is wrong (UserError, raised to the
caller); 70 hung (health.py); 71 out of memory (out_of_memory.py): the same command goes on and plans with less; 75 stopped by SIGINT, SIGTERM
or SIGUSR1 after saving: the same command goes on.
"""

from __future__ import annotations

import gc
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from megadcp.backends.choose import choose, group_splits, require_alike
from megadcp.config.check import UserError
from megadcp.config.schema import Config
from megadcp.data.batch import LoadedStep, StepLoader
from megadcp.data.manifest import refuse_other_tokenizers
from megadcp.data.order import open_training, open_validation
from megadcp.data.step_documents import DocumentSource, StepDocuments, ValidationSet
from megadcp.data.tokenizer import Tokenizer, open_tokenizer
from megadcp.engine.refit import Refit
from megadcp.engine.step import StepResult, run_step
from megadcp.engine.stragglers import LaneSpeeds, own_seconds
from megadcp.mesh.groups import Group, GroupPool
from megadcp.nn.flops import flops
from megadcp.parallel.collectives import all_gather, all_reduce
from megadcp.plan.ahead import PlanWorker, PlanWorkerDied
from megadcp.plan.basis import Basis
from megadcp.plan.fit import Factors
from megadcp.plan.plan_file import PLAIN_DOES, PlanWriter, need_zstandard, plans_file
from megadcp.plan.planner import planner_for
from megadcp.plan.step_plan import StepPlan
from megadcp.train import checkpoint
from megadcp.train.adaptive_planner import adaptive_planner_for
from megadcp.train.describe import describe
from megadcp.train.evaluate import count_targets_of_training, evaluate, unigram_entropy, validation_line
from megadcp.train.export import Exporter
from megadcp.train.finish import draw, show_result, whole_model, write_result, write_sample
from megadcp.train.health import BadSteps, Heart, Rollback
from megadcp.train.incidents import add_incident
from megadcp.train.launch import SUPERVISOR, World
from megadcp.train.log import Console, SilentConsole, StepLog, Timing, open_console
from megadcp.train.metrics import Metrics, MetricsFile, NoMetrics
from megadcp.train.out_of_memory import OUT_OF_MEMORY, is_out_of_memory, leave_note, with_less_memory
from megadcp.train.resume import ShiftedSource, check_files, say_changes
from megadcp.train.run_folder import RunFolder
from megadcp.train.schedule import learning_rate
from megadcp.train.signals import STOPPED, StopRequest
from megadcp.train.state import TrainState, choose_device, new_state, seed_random
from megadcp.train.weights import start_from

FINISHED, FAILED = 0, 1
Value = TypeVar("Value")


@dataclass
class _Run:
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
    slow: set[int] = field(default_factory=set)  # lanes that were told of
    asked: float = 0.0  # whether any rank wants to stop, as the ranks last agreed

    @property
    def leads(self) -> bool:
        """Whether this is the rank that speaks and writes."""
        return self.world is None or self.world.rank == 0

    def incident(self, kind: str, text: str, **more: object) -> None:
        """Keep what happened, once."""
        if self.leads:
            add_incident(self.folder.path, kind, self.state.progress.step, text, **more)


def train(config: Config, folder: Path | str, world: World | None = None, stop: StopRequest | None = None) -> int:
    """Train until run.steps are done, from wherever the run folder stops; returns the exit code. No other run may train in it.

    With a world all its ranks call it, and rank 0 alone speaks and writes. stop: the caller's request, if there is one already.
    """
    run_folder = RunFolder(folder)
    leads = world is None or world.rank == 0
    _first(world, lambda: run_folder.path.mkdir(parents=True, exist_ok=True))
    config = _first(world, lambda: with_less_memory(run_folder.path, config))
    with (
        nullcontext(stop) if stop is not None else StopRequest() as stop,
        _console(config, leads) as console,
        _threads(config.cluster.threads),
        _heart(config, run_folder.path, world) as heart,
        _pool(config, world) as pool,
    ):
        session = _Session(config, run_folder, console, world, pool, heart, stop)
        outcome: int | Rollback = _live(session, None)
        while isinstance(outcome, Rollback):  # the life before has ended and let go of its memory
            gc.collect()
            outcome = _live(session, outcome)
    if outcome == FINISHED and leads:
        show_result(run_folder.path, print)
    return outcome


@dataclass(frozen=True)
class _Session:
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


def _live(session: _Session, back: Rollback | None) -> int | Rollback:
    """From a checkpoint to the end of training, or to the step that sends the run back."""
    config, console, world = session.config, session.console, session.world
    run: _Run | None = None
    adapts = config.plan.refit or config.plan.refit_lane_speed
    try:
        with PlanWorker(config, console.say, adaptive_planner_for if adapts else planner_for) as worker, ExitStack() as held:
            with session.stop.at_once(world is None or world.world_size == 1):
                run = _open(session, worker if config.plan.worker == "process" and config.plan.ahead else None, back)
            held.callback(run.metrics.close)
            held.callback(run.saver.close)
            held.callback(run.exporter.close)
            outcome = _steps(run, session.stop)
            run.saver.finish()
            if outcome == FINISHED:
                session.heart.beat("finishing", run.state.progress.step)
                _finish(run)
                run.exporter.finish(partial(session.heart.beat, "exporting", run.state.progress.step))
            return outcome
    except checkpoint.SaveFailed as error:  # on all ranks
        console.say(f"FAILED after step {0 if run is None else run.state.progress.step}: {error}")
        return FAILED
    except (OSError, checkpoint.CheckpointError, PlanWorkerDied) as error:
        if (world is not None and world.world_size > 1) or run is None:
            raise  # the other ranks wait for this one: it has to go
        console.say(f"FAILED after step {run.state.progress.step}: {error}")
        return FAILED
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        leave_note(session.folder.path, session.rank, 0 if run is None else run.state.progress.step - 1, error)
        if world is not None and world.world_size > 1:
            raise  # its exit code tells the launcher
        return OUT_OF_MEMORY


def _first(world: World | None, action: Callable[[], Value]) -> Value:
    """action() on rank 0; all ranks get what it returns."""
    return action() if world is None else world.first(action)


@contextmanager
def _pool(config: Config, world: World | None) -> Iterator[GroupPool | None]:
    """All process groups of the run; None for a process that runs alone."""
    if world is None or world.world_size == 1:
        yield None
        return
    choice = choose(config.precision, world.device)
    require_alike(choice, world.rank, world.first(lambda: (choice.name, choice.why)))
    splits = group_splits(config, world.mesh, choice)
    with GroupPool(world.mesh, world.rank, world.device, config.parallel.max_cp, overlap=True, splits=splits) as pool:
        yield pool


def _interruptible(session: _Session, action: Callable[[], None]) -> None:
    """By rank 0, for the others that wait: what may take long, and loses nothing when a signal ends it."""
    with session.stop.at_once():
        action()


@contextmanager
def _heart(config: Config, folder: Path, world: World | None) -> Iterator[Heart]:
    """The signs of life of this rank."""
    life = _first(world, lambda: secrets.token_hex(4))
    rank, size = (0, 1) if world is None else (world.rank, world.world_size)
    with Heart(config.health, folder, rank, size, life, bool(os.environ.get(SUPERVISOR))) as heart:
        yield heart


# ----------------------------------------------------------------------------------------------------------------- open
def _open(session: _Session, worker: PlanWorker | None, back: Rollback | None) -> _Run:
    config, folder, console, world, pool = session.config, session.folder, session.console, session.world, session.pool
    session.heart.beat("starting" if back is None else "going back", 0)
    if config.plan.compress:
        need_zstandard(PLAIN_DOES)  # refused before anything is done
    device = choose_device(config) if world is None else world.device
    tokenizer = open_tokenizer(config.data.tokenizer.kind, config.data.tokenizer.path) if _names_tokenizer(config) else None
    if tokenizer is not None and tokenizer.vocab_size > config.model.vocab:
        raise UserError(
            f"model.vocab={config.model.vocab} is below the tokenizer's {tokenizer.vocab_size} tokens; legal: {tokenizer.vocab_size} or more"
        )
    refuse_other_tokenizers(config.data, None if tokenizer is None else tokenizer.fingerprint)
    source = open_training(config.data, config.run.steps)
    _first(world, lambda: check_files(folder.path, config, bool(checkpoint.saved(folder)), console.say))
    _first(world, lambda: _interruptible(session, source.build))  # now, not in the middle of a step
    held_out = open_validation(config.data)
    planner = planner_for(config)
    adaptive = adaptive_planner_for(config) if config.plan.refit or config.plan.refit_lane_speed else None

    def in_force(step: int) -> tuple[Any, ...]:
        """What the plan of a step depends on besides its lengths."""
        factors = Factors() if state.refit is None else state.refit.factors(step)
        return factors, None if state.lanes is None or not config.plan.refit_lane_speed else state.lanes.speeds(step)

    def plan_for(documents: StepDocuments) -> StepPlan:
        if adaptive is not None:
            return adaptive(documents.step, documents.lengths.tolist(), *in_force(documents.step))
        return planner(documents.step, documents.lengths.tolist())

    def plan_as_configured(documents: StepDocuments) -> StepPlan:
        return planner(documents.step, documents.lengths.tolist())

    if worker is not None:
        worker.start()  # it is ready by the time the model is
    state = new_state(config, device, source.fingerprint, tokenizer.fingerprint if tokenizer else "", pool)
    if back is None:
        for line in describe(config, device, source, held_out, tokenizer, planner.basis.layout):
            console.say(line)
    else:
        _first(world, lambda: _set_aside(folder, back, console))
    found = checkpoint.newest(folder, console.say, repair=True, group=state.world)
    last_step = 0 if found is None else found.step
    plans = _first(world, lambda: plans_file(folder.path, config.plan.compress, last_step, console.say))
    metrics: Metrics
    if world is None or world.rank == 0:
        metrics = MetricsFile(folder.metrics, last_step, console.say)
        _first(world, lambda: metrics.validated)
    else:
        metrics = NoMetrics(_first(world, lambda: set()))
    saver = checkpoint.Saver(folder, config.checkpoint, console.say, state.world)
    heart = session.heart
    exporter = Exporter(folder, config, console.say, world is None or world.rank == 0)
    plans_for = plan_for, plan_as_configured
    run = _Run(config, folder, console, source, held_out, *plans_for, worker, tokenizer, state, metrics, plans, world, saver, heart, exporter)
    _open_adaptive(run, planner.basis, found)
    if worker is not None and adaptive is not None:
        worker.more = in_force
    if found is not None:
        state.load(found)
        run.saved_step = found.step
        console.say(f"going on after step {found.step:,} of {config.run.steps:,}, from {found.path}")
        state.progress.place = say_changes(found.meta, config, state.order, state.progress.place, console.say, run.incident)
        if back is not None:
            _go_on_differently(run, back)
    else:
        seed_random(config.run.seed)
        start_from(state, console.say)
        console.say(f"starting at step 0 of {config.run.steps:,}")
    if last_step < config.run.steps:
        share = sum(box.nbytes for box in state.boxes())
        checkpoint.require_room(folder, share, config.checkpoint, (last_step, config.run.steps), state.world, console.say)
    return run


def _names_tokenizer(config: Config) -> bool:
    return bool(config.data.tokenizer.path) or config.data.tokenizer.kind == "bytes"


def _open_adaptive(run: _Run, basis: Basis, found: checkpoint.Checkpoint | None) -> None:
    """What follows the steps of a run: the fit of its profile, what is known of its lanes, and the losses that spikes are judged by."""
    config, state, meta = run.config, run.state, {} if found is None else found.meta
    first, mesh = 0 if found is None else found.step, state.engine.mesh
    state.bad_steps = BadSteps(config.health)
    if "bad_steps" in meta:
        state.bad_steps.load(meta["bad_steps"])
    notes = []
    if config.plan.refit:
        state.refit = Refit(basis, config.plan.ahead, first=first)
        notes.append(state.refit.load(meta["refit"]) if "refit" in meta else "")
    if mesh.lanes > 1:
        state.lanes = LaneSpeeds(mesh, config.plan.ahead, first, config.plan.lane_speed)
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


def _go_on_differently(run: _Run, back: Rollback) -> None:
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
    _save(run)
    run.saver.finish()  # a restart before the next save must not repeat what was left out


@contextmanager
def _console(config: Config, leads: bool) -> Iterator[Console]:
    console = open_console(config.log, config.run.steps) if leads else SilentConsole()
    try:
        yield console
    finally:
        console.close()


@contextmanager
def _threads(wanted: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if wanted:
        torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---------------------------------------------------------------------------------------------------------------- steps
def _steps(run: _Run, stop: StopRequest) -> int | Rollback:
    """Train up to the last step, or until stopped or sent back."""
    config, state = run.config, run.state
    _validate_if_due(run)
    if state.progress.step >= config.run.steps:
        return FINISHED
    if _agreed(run, bool(stop)):  # it came while the run was opened
        run.console.say(f"stopped by {stop.name or 'a signal to another rank'} before step {state.progress.step + 1:,}; the same command goes on")
        return STOPPED
    run.folder.result.unlink(missing_ok=True)  # it told of fewer steps
    log = StepLog(config, partial(flops, config.model), None if state.device.type == "cpu" else config.hardware.peak_flops)
    engine, progress = state.engine, state.progress
    source = ShiftedSource(run.source, progress.place - progress.step) if progress.place != progress.step else run.source
    loader = StepLoader(
        source, run.worker or run.plan_for, progress.step, config.run.steps, config.plan.ahead, engine.coords.lane, engine.mesh.lanes
    )  # fmt: skip
    with loader, PlanWriter(run.plans, progress.step, run.console.say) if run.leads else nullcontext() as plans:
        begin = time.perf_counter()
        run.heart.step(progress.step, 0.0)
        for loaded in loader:
            data_seconds = time.perf_counter() - begin
            run.heart.step(progress.step, loaded.plan.predicted.seconds)
            if plans is not None:
                plans.append(loaded.plan, loaded.record)
            row = _one_step(run, loaded, log, begin, data_seconds, stop)
            run.heart.took(time.perf_counter() - begin)
            run.metrics.write(row)
            run.console.progress(progress.step, f"loss {row['loss']:.3f}")
            if progress.step == 1 or progress.step % config.log.every == 0 or progress.step == config.run.steps or row["skipped"]:
                run.console.say(log.line(row))
            if row["skipped"] and (outcome := _bad_step(run, str(row["problem"]))) is not None:
                return outcome
            if _end_of_step(run, stop):
                return STOPPED
            begin = time.perf_counter()
            run.heart.step(progress.step, 0.0)
    return FINISHED


def _end_of_step(run: _Run, stop: StopRequest) -> bool:
    """Save and validate where that is due, or save because somebody wants the run to stop; whether it does."""
    config, step = run.config, run.state.progress.step
    run.saver.poll()
    run.exporter.poll()
    stopping = bool(stop) if run.state.pool is None else bool(run.asked)
    last = step == config.run.steps
    saves = stopping or last or (config.checkpoint.every and step % config.checkpoint.every == 0)
    if saves:
        _save(run)
    validated = not stopping and _validate_if_due(run)
    if not last and (saves or validated) and not stopping:  # a signal that came meanwhile needn't wait for one more step
        stopping = _agreed(run, bool(stop))
        if stopping:
            _save(run)
    if stopping:
        run.saver.finish()
        run.console.say(f"stopped by {stop.name or 'a signal to another rank'} after step {step:,}, saved; the same command goes on from here")
    return stopping


def _bad_step(run: _Run, problem: str) -> int | Rollback | None:
    """What comes of a step that was not applied: None goes on."""
    config, progress = run.config, run.state.progress
    policy = "skip" if run.state.bad_steps is None else run.state.bad_steps.policy(problem)
    run.incident("bad_step", f"step {progress.step:,} was not applied: {problem}", policy=policy)
    if policy == "rollback":
        return _back(run, problem)
    if policy == "stop":
        return _fail(run, f"step {progress.step:,} was not applied: {problem} (health.nan={config.health.nan}, health.spike={config.health.spike})")
    if progress.skipped_in_a_row >= config.optim.max_skipped:
        return _fail(
            run,
            f"{progress.skipped_in_a_row} steps in a row had NaN or Inf or were refused (optim.max_skipped={config.optim.max_skipped}), up to step "
            f"{progress.step:,}",
        )
    return None


def _back(run: _Run, problem: str) -> int | Rollback:
    """Whether, and to where, the run can be sent back. All ranks decide alike."""
    progress, health = run.state.progress, run.config.health
    run.saver.finish()
    aim = progress.step - health.rollback_steps
    kept = _first(run.world, lambda: [int(path.name.removeprefix(checkpoint.PREFIX)) for path in checkpoint.saved(run.folder)])
    if progress.rollbacks >= health.max_rollbacks:
        return _fail(run, f"{problem} in step {progress.step:,}, after {progress.rollbacks} rollbacks (health.max_rollbacks={health.max_rollbacks})")
    if not any(step <= aim for step in kept):
        return _fail(run, f"{problem} in step {progress.step:,}, and no checkpoint of step {aim:,} or before is there to go back to")
    to = max(step for step in kept if step <= aim)
    return Rollback(to, progress.step, progress.place, problem, progress.rollbacks)


def _fail(run: _Run, why: str) -> int:
    run.saver.finish()
    kept = "nothing was saved" if run.saved_step < 0 else f"the last checkpoint is step {run.saved_step:,}"
    run.console.say(f"FAILED: {why}; {kept}. A lower optim.lr or a longer warmup usually helps; metrics.jsonl shows where it began")
    run.incident("failed", why)
    return FAILED


def _one_step(run: _Run, loaded: LoadedStep, log: StepLog, begin: float, data_seconds: float, stop: StopRequest) -> dict[str, object]:
    """Run one loaded step, count it, and give its row."""
    config, state, progress = run.config, run.state, run.state.progress
    _check_tokens(loaded, config.model.vocab)
    progress.step += 1
    progress.place += 1
    progress.tokens += int(loaded.documents.lengths.sum())
    progress.documents += len(loaded.documents.ids)
    total_tokens = config.run.steps * config.data.tokens_per_step
    lr = learning_rate(config.optim, progress.step, progress.tokens, config.run.steps, total_tokens)
    refuse = None if state.bad_steps is None or config.health.spike == "none" else state.bad_steps.refuse
    result = run_step(state.engine, loaded.plan, loaded.packs, lr, refuse)
    if state.refit is not None:
        world = Group.single() if state.pool is None else state.pool.world
        state.refit.measured(loaded.plan, result.microbatches, world, state.device)
    if result.updated and state.bad_steps is not None:
        state.bad_steps.applied(result.loss)
    progress.skipped += not result.updated
    progress.skipped_in_a_row = 0 if result.updated else progress.skipped_in_a_row + 1
    ratios = _exchange(run, loaded.plan, result, stop)
    row = log.row(progress, loaded, result, lr, Timing(time.perf_counter() - begin, data_seconds))
    if ratios:
        row["lane_ratios"] = [round(one, 4) or None for one in ratios]
    return row


def _exchange(run: _Run, plan: StepPlan, result: StepResult, stop: StopRequest) -> list[float]:
    """The one small exchange between two steps: who wants to stop, and what the microbatches of each lane took; measured / predicted by lane."""
    state = run.state
    if state.pool is None:
        return []
    measured, predicted = own_seconds(plan, result.microbatches, state.pool.coords.lane)
    own = torch.tensor([[float(bool(stop)), measured, predicted]], dtype=torch.float64, device=state.device)
    table = all_gather(own, state.pool.world).cpu().numpy()
    run.asked = float(table[:, 0].max())
    if state.lanes is None:
        return []
    ratios = state.lanes.observe(plan.step, table[:, 1:])
    _tell_stragglers(run, state.lanes)
    return ratios


def _tell_stragglers(run: _Run, lanes: LaneSpeeds) -> None:
    """One line for each lane that is slow, and one when it is no longer."""
    factor = run.config.health.straggler_factor
    if not factor:
        return
    slowness = lanes.slowness()
    for lane, value in enumerate(slowness):
        if value > factor and lane not in run.slow:
            run.slow.add(lane)
            text = f"lane {lane} is slow: the same work takes {value:.2f} times as long there as on lane {slowness.index(1.0)}"
            if not run.config.plan.refit_lane_speed:
                text += "; plan.refit_lane_speed=true gives it less work"
            run.console.say(text)
            run.incident("straggler", text, lane=lane, factor=round(value, 3))
        elif value < 1 + 0.5 * (factor - 1) and lane in run.slow:
            run.slow.discard(lane)
            run.console.say(f"lane {lane} is no longer slow")


def _agreed(run: _Run, wanted: bool) -> bool:
    """Whether any rank wants it: a signal may have reached some of them only, or this one a step later."""
    if run.state.pool is None:
        return wanted
    flag = torch.tensor(int(wanted), dtype=torch.int32, device=run.state.device)
    return bool(all_reduce(flag, run.state.pool.world, "max").item())


def _check_tokens(loaded: LoadedStep, vocab: int) -> None:
    """A token that the model has no row for: on a GPU it would be a crash without a name."""
    largest = max((int(pack.tokens.max()) for pack in loaded.packs), default=0)
    if largest >= vocab:
        raise UserError(f"the data has token {largest}, but model.vocab={vocab}; take the vocabulary of the tokenizer that made the data")


def _save(run: _Run) -> None:
    """Begin to save this step. The one before is waited for, and what became of it is everybody's."""
    step = run.state.progress.step
    if step == run.saved_step:
        return
    run.heart.beat("saving", step)
    run.metrics.sync()
    run.saver.save(step, run.state.boxes(), run.state.meta(), run.state.own_meta())
    run.saved_step = step
    run.exporter.saving(step)


def _validate_if_due(run: _Run) -> bool:
    """Validate every set that is due at this step and has no row yet; whether there were any."""
    config, step = run.config, run.state.progress.step
    every = config.run.validate_every
    due = step == config.run.steps or (every and step and step % every == 0)
    if not due:
        return False
    run.heart.beat("validating", step)
    results = []
    for held_out in run.held_out:
        if (step, held_out.name) not in run.metrics.validated:
            one = evaluate(run.state.engine, held_out, run.validation_plan_for, config.run.validate_tokens)
            row = {"step": step, "validation_loss": one.loss, "name": one.name, "targets": one.targets, "seconds": one.seconds}
            run.metrics.write(row)
            results.append(one)
    if results:
        run.console.say(validation_line(results))
    return bool(results)


# --------------------------------------------------------------------------------------------------------------- finish
def _finish(run: _Run) -> None:
    """Everything after the last step. A run that dies in here does it again when it is called again."""
    _first(run.world, lambda: _leave_results(run))


def _leave_results(run: _Run) -> None:
    config = run.config
    entropy: dict[str, float] = {}
    if run.held_out:
        last = config.run.steps if config.data.mode == "stream" else math.inf
        counts = count_targets_of_training(run.source, config.model.vocab, most_steps=last)
        entropy = {one.name: unigram_entropy(counts, one, config.run.validate_tokens) for one in run.held_out}
    draw(run.folder, config)
    sample = ""
    if config.run.sample_prompt and run.tokenizer is not None:
        model = whole_model(run.state, lambda: checkpoint.newest(run.folder, run.console.say))
        if model is None:
            run.console.say("the sample is left out: the model is spread over ranks and too large for one; tools/generate.py writes one")
        else:
            sample = write_sample(run.folder, config, model, run.tokenizer)
    write_result(run.folder, run.state, entropy, sample)
