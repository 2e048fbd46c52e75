"""From a step's documents and its plan to packed arrays, one or more steps ahead in a background thread; planned further ahead by a process.

Padding is known by position, never by token value: a genuine end-of-document token is a target like any other. Document borders come
from the plan's padded lengths, never from tokens.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import TracebackType

import numpy as np

from megadcp.config.check import UserError
from megadcp.data.step_documents import IGNORE, Documents, DocumentSource, StepDocuments
from megadcp.mesh.coords import zigzag_spans
from megadcp.plan.ahead import PlanWorker
from megadcp.plan.plan_file import Record
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
    """The whole pack of one microbatch, whatever its cp: its documents in the plan's order, each followed by its padding.

    ValueError if the plan doesn't fit the documents (it was made for another step).
    """
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
    """The share of each of `cp` lanes, in lane order."""
    return [lane_share(pack, cp, index) for index in range(cp)]


def lane_share(pack: Pack, cp: int, index: int) -> Pack:
    """What lane `index` of `cp` has of a pack: its rows in zigzag order, and their borders.

    Labels were shifted before, so each row brings its own target, and its position in the document; real_lengths stay those of the whole
    documents. cp=1 gives the pack itself. ValueError if a document's rows can't be cut into 2 cp chunks.
    """
    if cp == 1:
        return pack
    spans = zigzag_spans(np.diff(pack.cu_seqlens_list).tolist(), cp, index)

    def rows(values: np.ndarray) -> np.ndarray:
        return np.concatenate([values[start:stop] for start, stop in spans])

    borders = tuple(border // cp for border in pack.cu_seqlens_list)
    return replace(
        pack, tokens=rows(pack.tokens), labels=rows(pack.labels), positions=rows(pack.positions), max_length=pack.max_length // cp,
        cu_seqlens=np.asarray(borders, np.int32), cu_seqlens_list=borders,
    )  # fmt: skip


@dataclass(frozen=True)
class LoadedStep:
    """One step, ready to run: its documents, plan, and one lane's packs in slot order.

    plan_seconds: its planning took, wherever that was. build_seconds: looking its documents up and building its packs. wait_seconds: whoever
    took this step stood still because its plan was not ready. record: the plan's lines for plans.jsonl, if they are made already.
    """

    documents: StepDocuments
    plan: StepPlan
    packs: list[Pack]
    plan_seconds: float
    build_seconds: float
    wait_seconds: float = 0.0
    record: Record | None = None


PlanFor = Callable[[StepDocuments], StepPlan]


@dataclass(frozen=True)
class _Made:
    """A loaded step, and when its plan was waited for."""

    step: LoadedStep
    asked: float
    planned: float

    def taken(self, begin: float, end: float) -> LoadedStep:
        """The step for somebody who waited for it from `begin` to `end`."""
        return replace(self.step, wait_seconds=max(0.0, min(end, self.planned) - max(begin, self.asked)))


def lane_packs(source: Documents, documents: StepDocuments, plan: StepPlan, lane: int) -> list[Pack]:
    """What one lane runs of a plan, in slot order: its share of each microbatch that it takes part in. Others' documents are not read."""
    own = [one for one in plan.microbatches if one.lane <= lane < one.lane + one.cp]
    own.sort(key=lambda one: one.slot)
    return [lane_share(build_pack(source, documents, one), one.cp, lane - one.lane) for one in own]


class _Steps:
    """Makes the steps of a range, one after the other. With a PlanWorker, the lengths of `ahead` more steps are on their way to it.

    What goes wrong with a step is raised at its turn, never earlier.
    """

    def __init__(self, source: DocumentSource, plans: PlanFor | PlanWorker, steps: range, ahead: int, lane: tuple[int, int]) -> None:
        self.source, self.plans, self.ahead = source, plans, ahead if isinstance(plans, PlanWorker) else 0
        self.lane, self.lanes = lane
        self._to_ask = iter(steps)
        self._asked: deque[tuple[StepDocuments | Exception, float]] = deque()

    def make(self) -> _Made | None:
        """The next step; None after the last one."""
        while len(self._asked) <= self.ahead and (index := next(self._to_ask, None)) is not None:
            self._ask(index)
        if not self._asked:
            return None
        documents, found_seconds = self._asked.popleft()
        if isinstance(documents, Exception):
            raise documents
        asked = time.perf_counter()
        if isinstance(self.plans, PlanWorker):
            made = self.plans.take(documents.step)
            plan, record, plan_seconds = made.plan, made.record, made.plan_seconds
            planned = time.perf_counter()
        else:
            plan, record = self.plans(documents), None
            planned = time.perf_counter()
            plan_seconds = planned - asked
        if plan.layout.lanes != self.lanes:
            raise ValueError(f"the plan of step {plan.step} is for {plan.layout.lanes} lanes, but this loader is for one of {self.lanes}")
        packs = lane_packs(self.source, documents, plan, self.lane)
        build_seconds = found_seconds + time.perf_counter() - planned
        return _Made(LoadedStep(documents, plan, packs, plan_seconds, build_seconds, record=record), asked, planned)

    def _ask(self, index: int) -> None:
        begin = time.perf_counter()
        try:
            documents: StepDocuments | Exception = self.source.step(index)
        except Exception as error:
            documents, self._to_ask = error, iter(())
        self._asked.append((documents, time.perf_counter() - begin))
        if isinstance(self.plans, PlanWorker) and isinstance(documents, StepDocuments):
            self.plans.submit(documents.step, documents.lengths.tolist())


@dataclass
class _Shared:
    """What thread and consumer both touch, under `change`'s lock. It doesn't know the loader, so that a forgotten one is collected."""

    ahead: int
    plans: PlanWorker | None
    change: threading.Condition = field(default_factory=threading.Condition)
    ready: deque[_Made] = field(default_factory=deque)
    stopped: bool = False
    finished: bool = False
    failure: BaseException | None = None

    def stop(self) -> None:
        with self.change:
            self.stopped = True
            self.ready.clear()
            self.change.notify_all()
        if self.plans is not None:
            self.plans.close()  # wakes the thread if it waits for a plan


def _work(shared: _Shared, steps: _Steps) -> None:
    try:
        while True:
            with shared.change:
                shared.change.wait_for(lambda: shared.stopped or len(shared.ready) < shared.ahead)
                if shared.stopped:
                    return
            made = steps.make()
            if made is None:
                return
            with shared.change:
                if not shared.stopped:
                    shared.ready.append(made)
                    shared.change.notify_all()
    except BaseException as error:
        shared.failure = error
    finally:
        with shared.change:
            shared.finished = True
            shared.change.notify_all()


class StepLoader:
    """Iterates the LoadedSteps first, first + 1, .. last - 1 of one lane, with up to `ahead` of them made before they are asked for.

    `plans` is a function, called by the thread that builds the packs, or a PlanWorker, whose process gets the lengths of `ahead` more steps:
    planning holds nobody up unless it is `ahead` steps late. The loader closes it.

    An exception of thread or planner is raised to the consumer, with its traceback, after the steps before it. ahead=0 uses no thread.
    close() (or leaving the with block) can be called at any time and returns within CLOSE_SECONDS even if a read hangs.
    """

    def __init__(
        self, source: DocumentSource, plans: PlanFor | PlanWorker, first: int, last: int, ahead: int, lane: int = 0, lanes: int = 1
    ) -> None:  # fmt: skip
        if ahead < 0:
            raise UserError(f"plan.ahead={ahead}: give 0 (make each step when it is needed) or more")
        if not 0 <= lane < lanes:
            raise ValueError(f"there is no lane {lane} among {lanes}")
        self._steps, self._left = _Steps(source, plans, range(first, last), ahead, (lane, lanes)), max(0, last - first)
        self._shared = _Shared(ahead, plans if isinstance(plans, PlanWorker) else None)
        self._thread: threading.Thread | None = None
        if ahead:
            self._thread = threading.Thread(target=_work, args=(self._shared, self._steps), name="step-loader", daemon=True)
            self._thread.start()
        self._finalizer = weakref.finalize(self, self._shared.stop)

    def __iter__(self) -> Iterator[LoadedStep]:
        return self

    def __next__(self) -> LoadedStep:
        begin = time.perf_counter()
        made = self._now() if self._thread is None else self._from_thread()
        if made is None:
            raise StopIteration
        self._left -= 1
        return made.taken(begin, time.perf_counter())

    def _now(self) -> _Made | None:
        shared = self._shared
        if shared.stopped or not self._left:
            return None
        if shared.failure is not None:
            raise shared.failure
        try:
            return self._steps.make()
        except Exception as error:
            shared.failure = error
            raise

    def _from_thread(self) -> _Made | None:
        shared = self._shared
        if shared.stopped or not self._left:
            return None
        with shared.change:
            shared.change.wait_for(lambda: shared.ready or shared.finished or shared.stopped)
            if not shared.ready:
                if shared.failure is not None and not shared.stopped:
                    raise shared.failure
                return None
            made = shared.ready.popleft()
            shared.change.notify_all()
            return made

    def close(self) -> None:
        """Stop the thread and forget what it has made."""
        self._shared.stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)

    def __enter__(self) -> StepLoader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
