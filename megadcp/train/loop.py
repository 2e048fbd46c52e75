"""The life of a run: open the data, go on where its folder stops, train, validate, save, finish.

With several ranks all of them run it; rank 0 alone speaks and writes, and what it decides from files the others are told.

Exit codes: 0 finished; 1 failed (too many bad steps, a checkpoint that can't be written, a full disk); 2 the request is wrong (UserError,
raised to the caller); 70 hung (health.py); 71 out of memory (out_of_memory.py): the same command goes on and plans with less; 75 stopped by
SIGINT, SIGTERM or SIGUSR1 after saving: the same command goes on.
"""

from __future__ import annotations

import errno
import gc
import math
import time
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path

from megadcp.config.check import UserError
from megadcp.config.schema import Config
from megadcp.data.batch import LoadedStep, StepLoader
from megadcp.engine.step import run_step
from megadcp.mesh.groups import Group
from megadcp.nn.flops import flops
from megadcp.plan.ahead import PlanWorker, PlanWorkerDied
from megadcp.plan.plan_file import PlanWriter
from megadcp.plan.planner import planner_for
from megadcp.train import checkpoint
from megadcp.train.adaptive_planner import adaptive_planner_for
from megadcp.train.between_steps import FAILED, agreed, bad_step, exchange, keep_timeline
from megadcp.train.evaluate import count_targets_of_training, evaluate, unigram_entropy, validation_line
from megadcp.train.finish import draw, show_result, whole_model, write_result, write_sample
from megadcp.train.health import Rollback
from megadcp.train.launch import World
from megadcp.train.log import StepLog, Timing
from megadcp.train.out_of_memory import OUT_OF_MEMORY, is_out_of_memory, leave_note, with_less_memory
from megadcp.train.profiling import StepProfile
from megadcp.train.resume import ShiftedSource
from megadcp.train.run_folder import RunFolder
from megadcp.train.schedule import learning_rate
from megadcp.train.session import Run, Session, console_of, first, heart_of, open_pool, open_run, save, threads
from megadcp.train.signals import STOPPED, StopRequest

FINISHED = 0
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what systems say of a full disk, quota or file


def train(config: Config, folder: Path | str, world: World | None = None, stop: StopRequest | None = None) -> int:
    """Train until run.steps are done, from wherever the run folder stops; returns the exit code. No other run may train in it.

    With a world all its ranks call it, and rank 0 alone speaks and writes. stop: the caller's request, if there is one already.
    """
    run_folder = RunFolder(folder)
    leads = world is None or world.rank == 0
    first(world, lambda: run_folder.path.mkdir(parents=True, exist_ok=True))
    config = first(world, lambda: with_less_memory(run_folder.path, config))
    with (
        nullcontext(stop) if stop is not None else StopRequest() as stop,
        console_of(config, leads) as console,
        threads(config.cluster.threads),
        heart_of(config, run_folder.path, world) as heart,
        open_pool(config, world) as pool,
    ):
        session = Session(config, run_folder, console, world, pool, heart, stop)
        outcome: int | Rollback = _live(session, None)
        while isinstance(outcome, Rollback):  # the life before has ended and let go of its memory
            gc.collect()
            outcome = _live(session, outcome)
    if outcome == FINISHED and leads:
        show_result(run_folder.path, print)
    return outcome


class DiskFull(UserError):
    """On one of several ranks: it ends with one line, as a run of one rank does."""

    code = FAILED


def _live(session: Session, back: Rollback | None) -> int | Rollback:
    """From a checkpoint to the end of training, or to the step that sends the run back."""
    config, console, world = session.config, session.console, session.world
    run: Run | None = None
    adapts = config.plan.refit or config.plan.refit_lane_speed
    try:
        with PlanWorker(config, console.say, adaptive_planner_for if adapts else planner_for) as worker, ExitStack() as held:
            with session.stop.at_once(world is None or world.world_size == 1):
                run = open_run(session, worker if config.plan.worker == "process" and config.plan.ahead else None, back)
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
        alone = world is None or world.world_size == 1
        if run is not None and not alone and isinstance(error, OSError) and error.errno in FULL:
            raise DiskFull(f"after step {run.state.progress.step}: {error}; make room, then the same command goes on") from error
        if run is None or not alone:
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


def _steps(run: Run, stop: StopRequest) -> int | Rollback:
    """Train up to the last step, or until stopped or sent back."""
    config, state = run.config, run.state
    _validate_if_due(run)
    if state.progress.step >= config.run.steps:
        return FINISHED
    if agreed(run, bool(stop)):  # it came while the run was opened
        run.stopped(stop.name, f"before step {state.progress.step + 1:,}; the same command goes on")
        return STOPPED
    run.folder.result.unlink(missing_ok=True)  # it told of fewer steps
    log = StepLog(config, partial(flops, config.model), None if state.device.type == "cpu" else config.hardware.peak_flops)
    engine, progress = state.engine, state.progress
    source = ShiftedSource(run.source, progress.place - progress.step) if progress.place != progress.step else run.source
    loader = StepLoader(
        source, run.worker or run.plan_for, progress.step, config.run.steps, config.plan.ahead, engine.coords.lane, engine.mesh.lanes
    )  # fmt: skip
    profile = StepProfile(config.log, run.folder.path, 0 if run.world is None else run.world.rank, state.device, run.console.say)
    with loader, profile, PlanWriter(run.plans, progress.step, run.console.say) if run.leads else nullcontext() as plans:
        begin = time.perf_counter()
        run.heart.step(progress.step, 0.0)
        for loaded in loader:
            data_seconds = time.perf_counter() - begin
            run.heart.step(progress.step, loaded.plan.predicted.seconds)
            if plans is not None:
                plans.append(loaded.plan, loaded.record)
            profile.begin(progress.step + 1)
            row = _one_step(run, loaded, log, begin, data_seconds, stop)
            profile.end(progress.step)
            run.heart.took(time.perf_counter() - begin)
            run.metrics.write(row)
            run.console.progress(progress.step, f"loss {row['loss']:.3f}")
            if progress.step == 1 or progress.step % config.log.every == 0 or progress.step == config.run.steps or row["skipped"]:
                run.console.say(log.line(row))
            if row["skipped"] and (outcome := bad_step(run, str(row["problem"]))) is not None:
                return outcome
            if _end_of_step(run, stop):
                return STOPPED
            begin = time.perf_counter()
            run.heart.step(progress.step, 0.0)
    return FINISHED


def _end_of_step(run: Run, stop: StopRequest) -> bool:
    """Save and validate where that is due, or save because somebody wants the run to stop; whether it does."""
    config, step = run.config, run.state.progress.step
    run.saver.poll()
    run.exporter.poll()
    stopping = bool(stop) if run.state.pool is None else bool(run.asked)
    last = step == config.run.steps
    saves = stopping or last or (config.checkpoint.every and step % config.checkpoint.every == 0)
    if saves:
        save(run)
    validated = not stopping and _validate_if_due(run)
    if not last and (saves or validated) and not stopping:  # a signal that came meanwhile needn't wait for one more step
        stopping = agreed(run, bool(stop))
        if stopping:
            save(run)
    if stopping:
        run.saver.finish()
        run.stopped(stop.name, f"after step {step:,}, saved; the same command goes on from here")
    return stopping


def _one_step(run: Run, loaded: LoadedStep, log: StepLog, begin: float, data_seconds: float, stop: StopRequest) -> dict[str, object]:
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
    everywhere, ratios = exchange(run, loaded.plan, result, data_seconds, stop)
    row = log.row(progress, loaded, result, lr, Timing(time.perf_counter() - begin, everywhere))
    if ratios:
        row["lane_ratios"] = [round(one, 4) or None for one in ratios]
    keep_timeline(run, loaded.plan, result)
    return row


def _check_tokens(loaded: LoadedStep, vocab: int) -> None:
    """A token that the model has no row for: on a GPU it would be a crash without a name."""
    largest = max((int(pack.tokens.max()) for pack in loaded.packs), default=0)
    if largest >= vocab:
        raise UserError(f"the data has token {largest}, but model.vocab={vocab}; take the vocabulary of the tokenizer that made the data")


def _validate_if_due(run: Run) -> bool:
    """Validate every set that is due at this step and has no row yet; whether there were any."""
    config, step = run.config, run.state.progress.step
    every = config.run.validate_every
    due = step == config.run.steps or (every and step and step % every == 0)
    if not due:
        return False
    run.saver.finish()  # ranks complete a save between steps, and what follows may take long
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


def _finish(run: Run) -> None:
    """Everything after the last step. A run that dies in here does it again when it is called again."""
    first(run.world, lambda: _leave_results(run))


def _leave_results(run: Run) -> None:
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
