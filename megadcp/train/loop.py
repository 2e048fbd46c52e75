"""The life of a run: open the data, go on where its folder stops, train, validate, save, finish.

Exit codes: 0 finished; 1 failed (too many bad steps in a row, a checkpoint that can't be written); 2 the request is wrong (UserError, raised
to the caller); 75 stopped by SIGINT or SIGTERM after saving: the same command goes on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from megadcp.config.check import UserError
from megadcp.config.run_file import differences, from_dict
from megadcp.config.schema import Config
from megadcp.data.batch import LoadedStep, StepLoader
from megadcp.data.manifest import refuse_other_tokenizers
from megadcp.data.order import open_training, open_validation
from megadcp.data.step_documents import DocumentSource, StepDocuments, ValidationSet
from megadcp.data.tokenizer import Tokenizer, open_tokenizer
from megadcp.engine.step import run_step
from megadcp.nn.flops import flops
from megadcp.plan.ahead import PlanWorker, PlanWorkerDied
from megadcp.plan.plan_file import PLAIN_DOES, PlanWriter, need_zstandard, plans_file
from megadcp.plan.planner import planner_for
from megadcp.plan.step_plan import StepPlan
from megadcp.train import checkpoint
from megadcp.train.describe import describe
from megadcp.train.evaluate import count_targets_of_training, evaluate, unigram_entropy, validation_line
from megadcp.train.finish import draw, show_result, write_result, write_sample
from megadcp.train.log import Console, StepLog, Timing, open_console
from megadcp.train.metrics import MetricsFile
from megadcp.train.run_folder import RunFolder
from megadcp.train.schedule import learning_rate
from megadcp.train.signals import StopRequest
from megadcp.train.state import TrainState, choose_device, new_state, seed_random

FINISHED, FAILED, STOPPED = 0, 1, 75


@dataclass
class _Run:
    """What the functions below share."""

    config: Config
    folder: RunFolder
    console: Console
    source: DocumentSource
    held_out: list[ValidationSet]
    plan_for: Callable[[StepDocuments], StepPlan]
    worker: PlanWorker | None
    tokenizer: Tokenizer | None
    state: TrainState
    metrics: MetricsFile
    plans: Path
    saved_step: int = -1


def train(config: Config, folder: Path | str) -> int:
    """Train until run.steps are done, from wherever the run folder stops; returns the exit code. No other process may train in it."""
    run_folder = RunFolder(folder)
    run_folder.path.mkdir(parents=True, exist_ok=True)
    with _console(config) as console, _threads(config.cluster.threads), StopRequest() as stop, PlanWorker(config, console.say) as worker:
        run = _open(config, run_folder, console, worker if config.plan.worker == "process" and config.plan.ahead else None)
        try:
            code = _steps(run, stop)
            if code == FINISHED:
                _finish(run)
        except (OSError, checkpoint.CheckpointError, PlanWorkerDied) as error:
            console.say(f"FAILED after step {run.state.progress.step}: {error}")
            return FAILED
        finally:
            run.metrics.close()
    if code == FINISHED:
        show_result(run_folder.path, print)
    return code


# ----------------------------------------------------------------------------------------------------------------- open
def _open(config: Config, folder: RunFolder, console: Console, worker: PlanWorker | None) -> _Run:
    if config.plan.compress:
        need_zstandard(PLAIN_DOES)  # refused before anything is done
    device = choose_device(config)
    tokenizer = open_tokenizer(config.data.tokenizer.kind, config.data.tokenizer.path) if _names_tokenizer(config) else None
    if tokenizer is not None and tokenizer.vocab_size > config.model.vocab:
        raise UserError(
            f"model.vocab={config.model.vocab} is below the tokenizer's {tokenizer.vocab_size} tokens; legal: {tokenizer.vocab_size} or more"
        )
    refuse_other_tokenizers(config.data, None if tokenizer is None else tokenizer.fingerprint)
    source = open_training(config.data, config.run.steps)
    source.build()  # now, not in the middle of a step
    held_out = open_validation(config.data)
    planner = planner_for(config)

    def plan_for(documents: StepDocuments) -> StepPlan:
        return planner(documents.step, documents.lengths.tolist())

    if worker is not None:
        worker.start()  # it is ready by the time the model is
    state = new_state(config, device, source.fingerprint, tokenizer.fingerprint if tokenizer else "")
    for line in describe(config, device, source, held_out, tokenizer):
        console.say(line)
    found = checkpoint.newest(folder, console.say, repair=True)
    last_step = 0 if found is None else found.step
    plans = plans_file(folder.path, config.plan.compress, last_step, console.say)
    metrics = MetricsFile(folder.metrics, last_step, console.say)
    run = _Run(config, folder, console, source, held_out, plan_for, worker, tokenizer, state, metrics, plans)
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
def _console(config: Config) -> Iterator[Console]:
    console = open_console(config.log, config.run.steps)
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
    loader = StepLoader(run.source, run.worker or run.plan_for, state.progress.step, config.run.steps, config.plan.ahead)
    with loader, PlanWriter(run.plans, state.progress.step, run.console.say) as plans:
        begin = time.perf_counter()
        for loaded in loader:
            data_seconds = time.perf_counter() - begin
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
            if stop or step == config.run.steps or (config.checkpoint.every and step % config.checkpoint.every == 0):
                _save(run)
            _validate_if_due(run, stop)
            if stop:
                run.console.say(f"stopped by {stop.name} after step {step:,}, saved; the same command goes on from here")
                return STOPPED
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
    progress.skipped += not result.updated
    progress.skipped_in_a_row = 0 if result.updated else progress.skipped_in_a_row + 1
    return log.row(progress, loaded, result, lr, Timing(time.perf_counter() - begin, data_seconds))


def _check_tokens(loaded: LoadedStep, vocab: int) -> None:
    """A token that the model has no row for: on a GPU it would be a crash without a name."""
    largest = max(int(pack.tokens.max()) for pack in loaded.packs)
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
    path = checkpoint.save(run.folder, step, run.state.tensors(), run.state.meta(), run.config.checkpoint.keep_last)
    run.saved_step = step
    run.console.say(f"saved {path} ({time.perf_counter() - begin:.1f} s)")


def _validate_if_due(run: _Run, stop: StopRequest | None = None) -> None:
    """Validate every set that is due at this step and has no row yet. Not when asked to stop: the run does it when it goes on."""
    config, step = run.config, run.state.progress.step
    every = config.run.validate_every
    due = step == config.run.steps or (every and step and step % every == 0)
    if not due or stop:
        return
    results = []
    for held_out in run.held_out:
        if (step, held_out.name) not in run.metrics.validated:
            one = evaluate(run.state.model, held_out, run.plan_for, config.run.validate_tokens, run.state.device)
            row = {"step": step, "validation_loss": one.loss, "name": one.name, "targets": one.targets, "seconds": one.seconds}
            run.metrics.write(row)
            results.append(one)
    if results:
        run.console.say(validation_line(results))


# --------------------------------------------------------------------------------------------------------------- finish
def _finish(run: _Run) -> None:
    """Everything after the last step. A run that dies in here does it again when it is called again."""
    config = run.config
    entropy: dict[str, float] = {}
    if run.held_out:
        last = config.run.steps if config.data.mode == "stream" else math.inf
        counts = count_targets_of_training(run.source, config.model.vocab, most_steps=last)
        entropy = {one.name: unigram_entropy(counts, one, config.run.validate_tokens) for one in run.held_out}
    draw(run.folder, config)
    sample = ""
    if config.run.sample_prompt and run.tokenizer is not None:
        sample = write_sample(run.folder, run.state, run.tokenizer)
    write_result(run.folder, run.state, entropy, sample)
