"""Validation loss, and the unigram entropy that a model has to beat."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megadcp.data.batch import lane_packs
from megadcp.data.step_documents import DocumentSource, StepDocuments, ValidationSet
from megadcp.engine.lane import run_lane
from megadcp.engine.measure import Stopwatch
from megadcp.engine.step import Engine, prepare
from megadcp.nn.backend import IGNORE
from megadcp.parallel.collectives import all_reduce
from megadcp.plan.step_plan import StepPlan

PlanFor = Callable[[StepDocuments], StepPlan]
COUNTED_TOKENS = 8_000_000  # training tokens that the unigram counts look at, at most


@dataclass(frozen=True)
class Validation:
    """Mean token loss (nats) of one set over `targets` tokens."""

    name: str
    loss: float
    targets: int
    seconds: float


@torch.no_grad()
def evaluate(engine: Engine, held_out: ValidationSet, plan_for: PlanFor, max_tokens: int) -> Validation:
    """Sum of the token losses / their number, over as many whole documents of the set as `max_tokens` hold.

    The same planner packs them, and the same ranks run them: all of them call it, and get the same.
    """
    begin = time.perf_counter()
    documents = held_out.documents(max_tokens)
    plan = plan_for(documents)
    packs = lane_packs(held_out, documents, plan, engine.coords.lane)
    shares, targets = prepare(engine, plan, packs)
    was_training = engine.model.training
    engine.model.eval()
    try:
        losses = run_lane(engine, plan, shares, Stopwatch(engine.device), backward=False)
    finally:
        engine.model.train(was_training)
    total = torch.zeros((), dtype=torch.float64, device=engine.device)
    if losses and engine.coords.tp == 0:  # every tp rank of the last stage has the same
        total += torch.stack(losses).double().sum()
    if engine.pool is not None:
        all_reduce(total, engine.pool.world)
    loss_sum = float(total)
    return Validation(held_out.name, loss_sum / targets if targets else float("nan"), targets, time.perf_counter() - begin)


def count_targets_of_training(source: DocumentSource, vocab: int, most_tokens: int = COUNTED_TOKENS, most_steps: float = math.inf) -> np.ndarray:
    """How often each token is a target in the training data, int64 [vocab]: one epoch from its start, or its first tokens or steps.

    most_steps: the steps there are (a stream ends with its run; documents go on).
    """
    counts, seen, index = np.zeros(vocab, np.int64), 0, 0
    while seen < most_tokens and index < most_steps:
        documents = source.step(index)
        if documents.epoch >= 1.0:
            break
        labels = labels_of(source, documents)
        counts += np.bincount(labels[labels != IGNORE], minlength=vocab)
        seen += len(labels)
        index += 1
    return counts


def unigram_entropy(counts: np.ndarray, held_out: ValidationSet, max_tokens: int) -> float:
    """Mean -log p(target) in nats of the set's targets, p from `counts` with one added to each: the loss of knowing frequencies only."""
    documents = held_out.documents(max_tokens)
    labels = labels_of(held_out, documents)
    targets = labels[labels != IGNORE]
    if not len(targets):
        return float("nan")
    log_share = np.log(counts + 1.0) - np.log(counts.sum() + float(len(counts)))
    return float(-log_share[targets].mean())


def labels_of(source: DocumentSource | ValidationSet, documents: StepDocuments) -> np.ndarray:
    """Labels of all documents one after the other, int64 [t]."""
    lengths = documents.lengths
    tokens, labels = np.zeros((2, int(lengths.sum())), np.int64)
    source.fill(documents.ids, np.cumsum(lengths) - lengths, tokens, labels)
    return labels


def validation_line(results: Sequence[Validation]) -> str:
    """One line for a person."""
    return "validation: " + " | ".join(f"{one.name} loss {one.loss:.3f} ({one.targets:,} targets, {one.seconds:.1f} s)" for one in results)
