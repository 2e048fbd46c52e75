"""From a step's documents and its plan to packed arrays, one or more steps ahead in a background thread.

Padding is known by position, never by token value: a genuine end-of-document token is a target like any other. Document borders come
from the plan's padded lengths, never from tokens.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType

import numpy as np

from megadcp.config.check import UserError
from megadcp.data.step_documents import IGNORE, Documents, DocumentSource, StepDocuments
from megadcp.plan.step_plan import Microbatch, StepPlan

LARGEST_PACK = 2**31 - 1  # borders are int32
CLOSE_SECONDS = 10.0


@dataclass(frozen=True)
class Pack:
    """The tokens of one microbatch as numpy arrays; fields and meaning as in nn.backend.PackedTokens.

    tokens, labels, positions: int64 [t]; cu_seqlens: int32 [n + 1]; max_length: longest padded document; document_ids, real_lengths: int64 [n];
    cu_seqlens_list: the borders as Python ints. Padding has token 0, label IGNORE, and positions that go on counting.
    """

    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    cu_seqlens: np.ndarray
    max_length: int
    document_ids: np.ndarray
    real_lengths: np.ndarray
    cu_seqlens_list: tuple[int, ...]


def build_pack(source: Documents, documents: StepDocuments, microbatch: Microbatch) -> Pack:
    """The pack of one microbatch: its documents in the plan's order, each followed by its padding.

    ValueError if the plan doesn't fit the documents (it was made for another step).
    """
    if microbatch.cp != 1:
        raise UserError(f"step {documents.step}, slot {microbatch.slot}: cp={microbatch.cp}, but this version builds batches for cp=1 only")
    chosen = np.asarray(microbatch.documents, dtype=np.int64)
    padded = np.asarray(microbatch.padded, dtype=np.int64)
    if len(chosen) == 0 or len(chosen) != len(padded) or chosen.min() < 0 or chosen.max() >= len(documents.ids):
        raise ValueError(f"slot {microbatch.slot}: the plan names documents {chosen.tolist()}, step {documents.step} has {len(documents.ids)}")
    lengths = documents.lengths[chosen]
    if (padded < lengths).any():
        worst = int(np.argmax(padded < lengths))
        raise ValueError(f"slot {microbatch.slot}: document {chosen[worst]} has {lengths[worst]} tokens, the plan gives it {padded[worst]}")
    borders = np.zeros(len(chosen) + 1, np.int64)
    np.cumsum(padded, out=borders[1:])
    total = int(borders[-1])
    if total > LARGEST_PACK:
        raise UserError(f"slot {microbatch.slot} holds {total} tokens: a microbatch can have at most {LARGEST_PACK}; lower plan.pack_tokens")
    starts = borders[:-1]
    tokens, labels = np.zeros(total, np.int64), np.full(total, IGNORE, np.int64)
    ids = documents.ids[chosen]
    _fill(source, ids, starts, tokens, labels)
    positions = np.arange(total)
    positions -= np.repeat(starts, padded)
    return Pack(tokens, labels, positions, borders.astype(np.int32), int(padded.max()), ids, lengths, tuple(borders.tolist()))


def _fill(source: Documents, ids: np.ndarray, starts: np.ndarray, tokens: np.ndarray, labels: np.ndarray) -> None:
    if hasattr(source, "fill"):
        source.fill(ids, starts, tokens, labels)
        return
    for document, start in zip(ids.tolist(), starts.tolist(), strict=True):  # a source of somebody else that can only read
        text, targets = source.read(document)
        tokens[start : start + len(text)] = text
        labels[start : start + len(text)] = targets


def split_for_lanes(pack: Pack, cp: int) -> list[Pack]:
    """The share of each of `cp` lanes. Only cp=1 is there yet."""
    if cp != 1:
        raise UserError(f"cp={cp}: this version keeps every document on one lane; legal here: 1 (parallel.max_cp=1)")
    return [pack]


@dataclass(frozen=True)
class LoadedStep:
    """One step, ready to run: its documents, plan, and packs in slot order, with the seconds that planning and building took."""

    documents: StepDocuments
    plan: StepPlan
    packs: list[Pack]
    plan_seconds: float
    build_seconds: float


PlanFor = Callable[[StepDocuments], StepPlan]


def load_step(source: DocumentSource, plan_for: PlanFor, index: int) -> LoadedStep:
    """Look up, plan and build one step. build_seconds includes looking the documents up."""
    begin = time.perf_counter()
    documents = source.step(index)
    found = time.perf_counter()
    plan = plan_for(documents)
    planned = time.perf_counter()
    packs = [build_pack(source, documents, microbatch) for microbatch in sorted(plan.microbatches, key=lambda one: (one.slot, one.lane))]
    built = time.perf_counter()
    return LoadedStep(documents, plan, packs, planned - found, found - begin + built - planned)


@dataclass
class _Shared:
    """What thread and consumer both touch, under `change`'s lock. It doesn't know the loader, so that a forgotten one is collected."""

    ahead: int
    change: threading.Condition = field(default_factory=threading.Condition)
    ready: deque[LoadedStep] = field(default_factory=deque)
    stopped: bool = False
    finished: bool = False
    failure: BaseException | None = None

    def stop(self) -> None:
        with self.change:
            self.stopped = True
            self.ready.clear()
            self.change.notify_all()


def _work(shared: _Shared, source: DocumentSource, plan_for: PlanFor, steps: range) -> None:
    try:
        for index in steps:
            with shared.change:
                shared.change.wait_for(lambda: shared.stopped or len(shared.ready) < shared.ahead)
                if shared.stopped:
                    return
            loaded = load_step(source, plan_for, index)
            with shared.change:
                if not shared.stopped:
                    shared.ready.append(loaded)
                    shared.change.notify_all()
    except BaseException as error:
        shared.failure = error
    finally:
        with shared.change:
            shared.finished = True
            shared.change.notify_all()


class StepLoader:
    """Iterates the LoadedSteps first, first + 1, .. last - 1, with up to `ahead` of them made before they are asked for.

    An exception of the thread is raised to the consumer, with the thread's traceback, after the steps before it. ahead=0 uses no thread.
    close() (or leaving the with block) can be called at any time and returns within CLOSE_SECONDS even if a read hangs.
    """

    def __init__(self, source: DocumentSource, plan_for: PlanFor, first: int, last: int, ahead: int) -> None:
        if ahead < 0:
            raise UserError(f"plan.ahead={ahead}: give 0 (make each step when it is needed) or more")
        self._source, self._plan_for, self._next, self._last = source, plan_for, first, last
        self._shared = _Shared(ahead)
        self._thread: threading.Thread | None = None
        if ahead:
            work = (self._shared, source, plan_for, range(first, last))
            self._thread = threading.Thread(target=_work, args=work, name="step-loader", daemon=True)
            self._thread.start()
        self._finalizer = weakref.finalize(self, self._shared.stop)

    def __iter__(self) -> Iterator[LoadedStep]:
        return self

    def __next__(self) -> LoadedStep:
        shared = self._shared
        if shared.stopped or self._next >= self._last:
            raise StopIteration
        if self._thread is None:
            loaded = load_step(self._source, self._plan_for, self._next)
        else:
            with shared.change:
                shared.change.wait_for(lambda: shared.ready or shared.finished or shared.stopped)
                if not shared.ready:
                    if shared.failure is not None:
                        raise shared.failure
                    raise StopIteration
                loaded = shared.ready.popleft()
                shared.change.notify_all()
        self._next += 1
        return loaded

    def close(self) -> None:
        """Stop the thread and forget what it has made."""
        self._shared.stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)

    def __enter__(self) -> StepLoader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
