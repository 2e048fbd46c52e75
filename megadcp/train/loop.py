"""The life of a run: open the data, go on where its folder stops, train, validate, save, finish.

With several ranks all of them run it; rank 0 alone speaks and writes, and what it decides from files the others are told.

Exit codes: 0 finished; 1 failed (too many bad steps in a row, a checkpoint that can't be written); 2 the request is wrong (UserError, raised
to the caller); 75 stopped by SIGINT or SIGTERM after saving: the same command goes on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from megadcp.config.check import UserError
from megadcp.config.run_file import differences, from_dict
from megadcp.config.schema import Config
from megadcp.data.batch import LoadedStep, StepLoader
from megadcp.data.manifest import refuse_other_tokenizers
from megadcp.data.order import open_training, open_validation
from megadcp.data.step_documents import DocumentSource, StepDocuments, ValidationSet
from megadcp.data.tokenizer import Tokenizer, open_tokenizer
from megadcp.engine.refit import Refit
from megadcp.engine.step import run_step
from megadcp.mesh.groups import Group, GroupPool
from megadcp.nn.flops import flops
from megadcp.parallel.collectives import all_reduce
from megadcp.plan.ahead import PlanWorker, PlanWorkerDied
from megadcp.plan.fitted_planner import fitted_planner_for
from megadcp.plan.plan_file import PLAIN_DOES, PlanWriter, need_zstandard, plans_file
from megadcp.plan.planner import planner_for
from megadcp.plan.step_plan import StepPlan
from megadcp.train import checkpoint
from megadcp.train.describe import describe
from megadcp.train.evaluate import count_targets_of_training, evaluate, unigram_entropy, validation_line
from megadcp.train.finish import draw, show_result, whole_model, write_result, write_sample
from megadcp.train.launch import World
from megadcp.train.log import Console, SilentConsole, StepLog, Timing, open_console
from megadcp.train.metrics import Metrics, MetricsFile, NoMetrics
from megadcp.train.run_folder import RunFolder
from megadcp.train.schedule import learning_rate
from megadcp.train.signals import StopRequest
from megadcp.train.state import TrainState, choose_device, new_state, seed_random

FINISHED, FAILED, STOPPED = 0, 1, 75
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
    saved_step: int = -1

    @property
    def leads(self) -> bool:
        """Whether this is the rank that speaks and writes."""
        return self.world is None or self.world.rank == 0


def train(config: Config, folder: Path | str, world: World | None = None) -> int:
    """Train until run.steps are done, from wherever the run folder stops; returns the exit code. No other run may train in it.

    With a world all its ranks call it, and rank 0 alone speaks and writes.
    """
    run_folder = RunFolder(folder)
    leads = world is None or world.rank == 0
    _first(world, lambda: run_folder.path.mkdir(parents=True, exist_ok=True))
    with (
        _console(config, leads) as console,
        _threads(config.cluster.threads),
        StopRequest() as stop,
        PlanWorker(config, console.say, fitted_planner_for if config.plan.refit else planner_for) as worker,
        _pool(config, world) as pool,
    ):
        run = _open(config, run_folder, console, worker if config.plan.worker == "process" and config.plan.ahead else None, world, pool)
        try:
            code = _steps(run, stop)
            if code == FINISHED:
                _finish(run)
        except (OSError, checkpoint.CheckpointError, PlanWorkerDied) as error:
            if world is not None and world.world_size > 1:
                raise  # the other ranks wait for this one: it has to go
            console.say(f"FAILED after step {run.state.progress.step}: {error}")
            return FAILED
        finally:
            run.metrics.close()
    if code == FINISHED and leads:
        show_result(run_folder.path, print)
    return code


def _first(world: World | None, action: Callable[[], Value]) -> Value:
    """action() on rank 0; all ranks get what it returns."""
    return action() if world is None else world.first(action)


@contextmanager
def _pool(config: Config, world: World | None) -> Iterator[GroupPool | None]:
    """All process groups of the run; None for a process that runs alone."""
    if world is None or world.world_size == 1:
        yield None
        return
    with GroupPool(world.mesh, world.rank, world.device, config.parallel.max_cp, overlap=True) as pool:
        yield pool


# ----------------------------------------------------------------------------------------------------------------- open
def _open(config: Config, folder: RunFolder, console: Console, worker: PlanWorker | None, world: World | None, pool: GroupPool | None) -> _Run:
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
    _first(world, source.build)  # now, not in the middle of a step
    held_out = open_validation(config.data)
    planner = planner_for(config)

    fitted = fitted_planner_for(config) if config.plan.refit else None

    def plan_for(documents: StepDocuments) -> StepPlan:
        if fitted is not None and state.refit is not None:
            return fitted(documents.step, documents.lengths.tolist(), state.refit.factors(documents.step))
        return planner(documents.step, documents.lengths.tolist())

    def plan_as_configured(documents: StepDocuments) -> StepPlan:
        return planner(documents.step, documents.lengths.tolist())

    if worker is not None:
        worker.start()  # it is ready by the time the model is
    state = new_state(config, device, source.fingerprint, tokenizer.fingerprint if tokenizer else "", pool)
    for line in describe(config, device, source, held_out, tokenizer, planner.basis.layout):
        console.say(line)
    found = _first(world, lambda: checkpoint.newest(folder, console.say, repair=True))
    last_step = 0 if found is None else found.step
    plans = _first(world, lambda: plans_file(folder.path, config.plan.compress, last_step, console.say))
    metrics: Metrics
    if world is None or world.rank == 0:
        metrics = MetricsFile(folder.metrics, last_step, console.say)
        _first(world, lambda: metrics.validated)
    else:
        metrics = NoMetrics(_first(world, lambda: set()))
    run = _Run(config, folder, console, source, held_out, plan_for, plan_as_configured, worker, tokenizer, state, metrics, plans, world)
    if config.plan.refit:
        state.refit = refit = Refit(planner.basis, config.plan.ahead, first=last_step)
        if found is not None and "refit" in found.meta and (note := refit.load(found.meta["refit"])):
            console.say(note)
        if worker is not None:
            worker.more = lambda step: (refit.factors(step),)
    if found is not None:
        state.load(found)
        run.saved_step = found.step
        _say_resumed(run, found)
    else:
        seed_random(config.run.seed)
        console.say(f"starting at step 0 of {config.run.steps:,}")
    return run


def _names_tokenizer(config: Config) -> bool:
    return bool(config.data.tokenizer.path) or config.data.tokenizer.kind == "bytes"


def _say_resumed(run: _Run, found: checkpoint.Checkpoint) -> None:
    """Say where the run goes on, and each setting that is not as it was: the new value holds from here on."""
    run.console.say(f"going on after step {found.step:,} of {run.config.run.steps:,}, from {found.path}")
    try:
        changed = differences(from_dict(found.meta["config"]), run.config)
    except (KeyError, UserError) as error:
        run.console.say(f"the checkpoint's settings can't be compared with today's: {error}")
        return
    for name, (old, new) in changed.items():
        run.console.say(f"setting changed since step {found.step:,}: {name} {old} -> {new}; the new value holds from here on")


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
def _steps(run: _Run, stop: StopRequest) -> int:
    """Train up to the last step, or until stopped."""
    config, state = run.config, run.state
    _validate_if_due(run)
    if state.progress.step >= config.run.steps:
        return FINISHED
    run.folder.result.unlink(missing_ok=True)  # it told of fewer steps
    log = StepLog(config, partial(flops, config.model), None if state.device.type == "cpu" else config.hardware.peak_flops)
    engine = state.engine
    lane, lanes = engine.coords.lane, engine.mesh.lanes
    loader = StepLoader(run.source, run.worker or run.plan_for, state.progress.step, config.run.steps, config.plan.ahead, lane, lanes)
    with loader, PlanWriter(run.plans, state.progress.step, run.console.say) if run.leads else nullcontext() as plans:
        begin = time.perf_counter()
        for loaded in loader:
            data_seconds = time.perf_counter() - begin
            if plans is not None:
                plans.append(loaded.plan, loaded.record)
            row = _one_step(run, loaded, log, begin, data_seconds)
            run.metrics.write(row)
            step = state.progress.step
            run.console.progress(step, f"loss {row['loss']:.3f}")
            if step == 1 or step % config.log.every == 0 or step == config.run.steps or row["skipped"]:
                run.console.say(log.line(row))
            if state.progress.skipped_in_a_row >= config.optim.max_skipped:
                run.console.say(_too_many_skipped(run))
                return FAILED
            stopping = _agreed(run, bool(stop))
            if stopping or step == config.run.steps or (config.checkpoint.every and step % config.checkpoint.every == 0):
                _save(run)
            if stopping:
                run.console.say(
                    f"stopped by {stop.name or 'a signal to another rank'} after step {step:,}, saved; the same command goes on from here"
                )
                return STOPPED
            _validate_if_due(run)
            begin = time.perf_counter()
    return FINISHED


def _one_step(run: _Run, loaded: LoadedStep, log: StepLog, begin: float, data_seconds: float) -> dict[str, object]:
    """Run one loaded step, count it, and give its row."""
    config, progress = run.config, run.state.progress
    _check_tokens(loaded, config.model.vocab)
    progress.step += 1
    progress.tokens += int(loaded.documents.lengths.sum())
    progress.documents += len(loaded.documents.ids)
    total_tokens = config.run.steps * config.data.tokens_per_step
    lr = learning_rate(config.optim, progress.step, progress.tokens, config.run.steps, total_tokens)
    result = run_step(run.state.engine, loaded.plan, loaded.packs, lr)
    if run.state.refit is not None:
        world = Group.single() if run.state.pool is None else run.state.pool.world
        run.state.refit.measured(loaded.plan, result.microbatches, world, run.state.device)
    progress.skipped += not result.updated
    progress.skipped_in_a_row = 0 if result.updated else progress.skipped_in_a_row + 1
    return log.row(progress, loaded, result, lr, Timing(time.perf_counter() - begin, data_seconds))


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


def _too_many_skipped(run: _Run) -> str:
    progress, kept = run.state.progress, "nothing was saved" if run.saved_step < 0 else f"the last checkpoint is step {run.saved_step:,}"
    return (
        f"FAILED: {progress.skipped_in_a_row} steps in a row had NaN or Inf (optim.max_skipped={run.config.optim.max_skipped}), up to step "
        f"{progress.step:,}; {kept}. A lower optim.lr or a longer warmup usually helps; metrics.jsonl shows where it began"
    )


def _save(run: _Run) -> None:
    step = run.state.progress.step
    if step == run.saved_step:
        return
    begin = time.perf_counter()
    run.metrics.sync()
    tensors, meta = run.state.tensors(), run.state.meta()
    path = _first(run.world, lambda: checkpoint.save(run.folder, step, tensors, meta, run.config.checkpoint.keep_last))
    run.saved_step = step
    run.console.say(f"saved {path} ({time.perf_counter() - begin:.1f} s)")


def _validate_if_due(run: _Run) -> None:
    """Validate every set that is due at this step and has no row yet."""
    config, step = run.config, run.state.progress.step
    every = config.run.validate_every
    due = step == config.run.steps or (every and step and step % every == 0)
    if not due:
        return
    results = []
    for held_out in run.held_out:
        if (step, held_out.name) not in run.metrics.validated:
            one = evaluate(run.state.engine, held_out, run.validation_plan_for, config.run.validate_tokens)
            row = {"step": step, "validation_loss": one.loss, "name": one.name, "targets": one.targets, "seconds": one.seconds}
            run.metrics.write(row)
            results.append(one)
    if results:
        run.console.say(validation_line(results))


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
        model = whole_model(run.state, checkpoint.newest(run.folder, run.console.say))
        if model is None:
            run.console.say("the sample is left out: the model is spread over ranks and too large for one; tools/generate.py writes one")
        else:
            sample = write_sample(run.folder, config, model, run.tokenizer)
    write_result(run.folder, run.state, entropy, sample)
