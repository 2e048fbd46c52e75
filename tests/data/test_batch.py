"""Packs (public cases C21, C25) and the step loader."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from order_helpers import data_config, write_lengths, write_pair

from megadcp.config.check import UserError
from megadcp.config.schema import ClusterConfig, Config, DataConfig, GemmFlops, HardwareConfig, ModelConfig, RunConfig
from megadcp.data.batch import LoadedStep, StepLoader, build_pack, split_for_lanes
from megadcp.data.order import DocumentSource, StepDocuments, open_training
from megadcp.data.step_documents import IGNORE
from megadcp.plan.ahead import PlanWorker, PlanWorkerDied
from megadcp.plan.plan_file import record_of
from megadcp.plan.planner import planner_for
from megadcp.plan.step_plan import Layout, Microbatch, ModelShape, Profile, StepPlan

MODEL = ModelShape(1, 8, 1, 1, 8, 8, 16, False, False)
PROFILE = Profile(*(1.0,) * 12, loss_chunk=1, gpus_per_node=1, reduce_bytes=1.0, reduce_overlap=1.0, memory_bandwidth=1.0)


def one_by_one(documents: StepDocuments) -> StepPlan:
    """A plan of one document per microbatch, the last document in the first slot, without padding."""
    lengths = tuple(documents.lengths.tolist())
    count = len(lengths)
    packs = tuple(Microbatch(slot=count - 1 - index, lane=0, cp=1, documents=(index,), padded=(lengths[index],)) for index in range(count))
    return StepPlan(documents.step, Layout(1, 1), "none", (1,), MODEL, "fp32", 1, PROFILE, lengths, packs)


def microbatch(documents: tuple[int, ...], padded: tuple[int, ...], cp: int = 1) -> Microbatch:
    return Microbatch(slot=0, lane=0, cp=cp, documents=documents, padded=padded)


def step_of(ids: list[int], lengths: list[int]) -> StepDocuments:
    return StepDocuments(0, np.array(ids, dtype=np.int64) << 16, np.array(lengths, dtype=np.int64), 0.0)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    padding=st.lists(st.integers(0, 5), min_size=8, max_size=8),
    order=st.randoms(use_true_random=False),
)
def test_a_pack_is_what_a_plain_loop_makes(tmp_path_factory: pytest.TempPathFactory, lengths: list[int], padding: list[int], order: object) -> None:
    prefix = write_lengths(tmp_path_factory.mktemp("pack") / "c", lengths, first_token=1)
    source = open_training(data_config(prefix), 1)
    chosen = list(range(len(lengths)))
    order.shuffle(chosen)  # type: ignore[attr-defined]
    padded = tuple(lengths[document] + padding[document] for document in chosen)
    pack = build_pack(source, step_of(list(range(len(lengths))), lengths), microbatch(tuple(chosen), padded))
    tokens: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    for document, size in zip(chosen, padded, strict=True):
        first = 1 + sum(lengths[:document])
        text = list(range(first, first + lengths[document]))
        tokens += text + [0] * (size - len(text))
        labels += text[1:] + [IGNORE] * (size - len(text) + 1)
        positions += range(size)
    assert pack.tokens.tolist() == tokens
    assert pack.labels.tolist() == labels
    assert pack.positions.tolist() == positions
    assert pack.cu_seqlens_list == (0, *np.cumsum(padded).tolist())
    assert pack.cu_seqlens.tolist() == list(pack.cu_seqlens_list)
    assert pack.max_length == max(padded)
    assert pack.document_ids.tolist() == [document << 16 for document in chosen]
    assert pack.real_lengths.tolist() == [lengths[document] for document in chosen]
    kinds = [pack.tokens, pack.labels, pack.positions, pack.document_ids, pack.real_lengths]
    assert [array.dtype for array in kinds] == [np.int64] * 5
    assert pack.cu_seqlens.dtype == np.int32


def test_a_genuine_end_token_keeps_its_loss(tmp_path: Path) -> None:
    """C21: the tokenizer's pad falls back to its end token (0 here), which is also the text's last token and stands in its middle."""
    source = open_training(data_config(write_pair(tmp_path / "c", [[[5, 0, 6, 0]], [[7]]])), 1)
    pack = build_pack(source, step_of([0, 1], [4, 1]), microbatch((0, 1), (6, 2)))
    assert pack.tokens.tolist() == [5, 0, 6, 0, 0, 0, 7, 0]
    assert pack.labels.tolist() == [0, 6, 0, IGNORE, IGNORE, IGNORE, IGNORE, IGNORE]  # both ends are targets, padding and lone tokens are not


def test_borders_come_from_lengths(tmp_path: Path) -> None:
    """C25: documents without an end token, with several, and nothing but end tokens."""
    source = open_training(data_config(write_pair(tmp_path / "c", [[[1, 2, 3]], [[0, 4, 0, 5]], [[0, 0]]])), 1)
    pack = build_pack(source, step_of([0, 1, 2], [3, 4, 2]), microbatch((0, 1, 2), (3, 4, 2)))
    assert pack.cu_seqlens.tolist() == [0, 3, 7, 9]
    assert pack.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1]
    assert pack.labels.tolist() == [2, 3, IGNORE, 4, 0, 5, IGNORE, 0, IGNORE]


def test_stream_samples_fill_packs_too(tmp_path: Path) -> None:
    prefixes = [write_lengths(tmp_path / name, [9] * 20, first_token=1000 * at) for at, name in enumerate("ab")]
    source = open_training(data_config(*prefixes, mode="stream", max_length=8, tokens_per_step=32), 3)
    documents = source.step(2)
    pack = build_pack(source, documents, microbatch((3, 0), (8, 10)))
    for index, start in ((3, 0), (0, 8)):
        tokens, labels = source.read(int(documents.ids[index]))
        assert pack.tokens[start : start + 8].tolist() == tokens.tolist()
        assert pack.labels[start : start + 8].tolist() == labels.tolist()
        assert (labels != IGNORE).all()
    assert pack.labels[16:].tolist() == [IGNORE, IGNORE]


def test_a_source_that_can_only_read_fills_packs_too(tmp_path: Path) -> None:
    source = open_training(data_config(write_lengths(tmp_path / "c", [4, 5], first_token=1)), 1)

    class Reader:
        read = staticmethod(source.read)

    documents, wanted = step_of([0, 1], [4, 5]), microbatch((1, 0), (6, 4))
    ours, expected = build_pack(Reader(), documents, wanted), build_pack(source, documents, wanted)  # type: ignore[arg-type]
    assert ours.tokens.tolist() == expected.tokens.tolist()
    assert ours.labels.tolist() == expected.labels.tolist()


def test_plans_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    source = open_training(data_config(write_lengths(tmp_path / "c", [4, 5])), 1)
    documents = step_of([0, 1], [4, 5])
    with pytest.raises(ValueError, match="document 1 has 5 tokens, the plan gives it 4"):
        build_pack(source, documents, microbatch((0, 1), (4, 4)))
    for chosen, padded in (((2,), (4,)), ((-1,), (5,)), ((), ()), ((0, 1), (4,))):
        with pytest.raises(ValueError, match="the plan names documents"):
            build_pack(source, documents, microbatch(chosen, padded))
    with pytest.raises(UserError, match="at most 2147483647"):
        build_pack(source, documents, microbatch((0, 1), (4, 2**31)))
    with pytest.raises(ValueError, match=r"6 padded tokens can't be cut into 2 \* 2 equal chunks"):
        split_for_lanes(build_pack(source, documents, microbatch((0, 1), (4, 6), cp=2)), 2)


# ------------------------------------------------------------------------------------------------------------ StepLoader
@pytest.fixture
def source(tmp_path: Path) -> DocumentSource:
    return open_training(data_config(write_lengths(tmp_path / "c", list(range(1, 30))), tokens_per_step=40), 100)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 10
    while any(thread.name == "step-loader" for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not [thread for thread in threading.enumerate() if thread.name == "step-loader"]


def assert_equal_steps(ours: LoadedStep, expected: LoadedStep) -> None:
    assert ours.documents.step == expected.documents.step
    assert ours.plan == expected.plan
    assert [pack.tokens.tolist() for pack in ours.packs] == [pack.tokens.tolist() for pack in expected.packs]
    assert [pack.labels.tolist() for pack in ours.packs] == [pack.labels.tolist() for pack in expected.packs]


@pytest.mark.parametrize("ahead", [0, 1, 3, 50])
def test_steps_come_in_order_and_resume_anywhere(source: DocumentSource, ahead: int) -> None:
    """C11: what a loader that starts at step 6 gives is what one from step 0 gives from there on."""
    with StepLoader(source, one_by_one, 0, 10, 0) as loader:
        whole = list(loader)
    assert [step.documents.step for step in whole] == list(range(10))
    with StepLoader(source, one_by_one, 6, 10, ahead) as loader:
        resumed = list(loader)
        assert list(loader) == []
    for ours, expected in zip(resumed, whole[6:], strict=True):
        assert_equal_steps(ours, expected)


@pytest.mark.parametrize("ahead", [0, 2])
def test_packs_stand_in_slot_order(source: DocumentSource, ahead: int) -> None:
    with StepLoader(source, one_by_one, 3, 4, ahead) as loader:
        (step,) = loader
    assert [pack.document_ids.tolist() for pack in step.packs] == [[one] for one in reversed(step.documents.ids.tolist())]
    assert step.plan_seconds >= 0
    assert step.build_seconds > 0


def test_no_steps_are_fine(source: DocumentSource) -> None:
    for ahead in (0, 2):
        with StepLoader(source, one_by_one, 5, 5, ahead) as loader:
            assert list(loader) == []


def test_never_more_than_ahead_are_made(source: DocumentSource) -> None:
    """With ahead=2 and nothing taken, the thread stops after two steps; each one taken lets it make one more."""
    made: list[int] = []
    change = threading.Condition()

    def plan(documents: StepDocuments) -> StepPlan:
        with change:
            made.append(documents.step)
            change.notify_all()
        return one_by_one(documents)

    def wait_for(count: int) -> None:
        with change:
            assert change.wait_for(lambda: len(made) >= count, 10)
        time.sleep(0.05)
        assert made == list(range(count))

    with StepLoader(source, plan, 0, 10, 2) as loader:
        wait_for(2)
        next(loader)
        wait_for(3)


def _plan_fails_at_three(documents: StepDocuments) -> StepPlan:
    if documents.step == 3:
        raise KeyError("no plan for step 3")
    return one_by_one(documents)


@pytest.mark.parametrize("ahead", [0, 1, 8])
def test_an_exception_comes_after_the_steps_before_it_with_its_traceback(source: DocumentSource, ahead: int) -> None:
    with StepLoader(source, _plan_fails_at_three, 0, 10, ahead) as loader:
        steps = [next(loader) for _ in range(3)]
        with pytest.raises(KeyError, match="no plan for step 3") as caught:
            next(loader)
        assert [step.documents.step for step in steps] == [0, 1, 2]
        assert "_plan_fails_at_three" in "".join(traceback.format_exception(caught.value))
        with pytest.raises(KeyError):
            next(loader)  # it stays broken


def test_close_does_not_hang_while_the_thread_waits_or_works(source: DocumentSource) -> None:
    started, go_on = threading.Event(), threading.Event()

    def slow(documents: StepDocuments) -> StepPlan:
        if documents.step == 2:
            started.set()
            assert go_on.wait(10)
        return one_by_one(documents)

    full = StepLoader(source, one_by_one, 0, 10, 1)
    next(full)
    full.close()
    full.close()
    assert list(full) == []
    busy = StepLoader(source, slow, 0, 10, 5)
    assert started.wait(10)
    threading.Timer(0.1, go_on.set).start()
    busy.close()
    assert list(busy) == []


def test_close_gives_up_on_a_read_that_never_returns(source: DocumentSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megadcp.data.batch.CLOSE_SECONDS", 0.1)
    release = threading.Event()

    def stuck(documents: StepDocuments) -> StepPlan:
        release.wait(30)
        return one_by_one(documents)

    loader = StepLoader(source, stuck, 0, 3, 1)
    loader.close()
    assert loader._thread is not None
    assert loader._thread.is_alive()  # close() came back before the thread did
    assert list(loader) == []
    release.set()


def test_a_consumer_that_waits_is_woken_by_close(source: DocumentSource) -> None:
    release = threading.Event()

    def stuck(documents: StepDocuments) -> StepPlan:
        release.wait(30)
        return one_by_one(documents)

    loader = StepLoader(source, stuck, 0, 3, 1)
    got: list[list[LoadedStep]] = []
    consumer = threading.Thread(target=lambda: got.append(list(loader)))
    consumer.start()
    threading.Timer(0.1, release.set).start()
    loader.close()
    consumer.join(10)
    assert got == [[]]


def test_a_forgotten_loader_ends_its_thread(source: DocumentSource) -> None:
    loader = StepLoader(source, one_by_one, 0, 10, 1)
    next(loader)
    thread = loader._thread
    del loader
    gc.collect()
    assert thread is not None
    thread.join(10)
    assert not thread.is_alive()


def test_a_negative_lookahead_is_refused(source: DocumentSource) -> None:
    with pytest.raises(UserError, match=r"plan\.ahead=-1"):
        StepLoader(source, one_by_one, 0, 1, -1)


# ------------------------------------------------------------------------------------------ StepLoader with a planning process
HARDWARE = HardwareConfig(
    name="test", gemm_flops=GemmFlops(60e9, 120e9, 60e9), gemm_half_tokens=16, attention_flops=40e9, attention_half_length=300,
    node_bytes=4e9, net_bytes=1e9, node_latency=1e-3, ring_step_seconds=1e-3, layer_overhead_seconds=2e-3, tp_exposed=1.0, memory_bytes=8e9,
    usable_fraction=0.8, loss_chunk=64, gpus_per_node=8, reduce_bytes=2e9, reduce_overlap=0.0, memory_bandwidth=20e9,
)  # fmt: skip


@pytest.fixture
def setup() -> Config:
    model = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=64, vocab=260)
    data, cluster = DataConfig(max_length=64, tokens_per_step=40), ClusterConfig(device="cpu", threads=1)
    return Config(run=RunConfig(name="test"), model=model, data=data, cluster=cluster, hardware=HARDWARE)


def here(setup: Config) -> Callable[[StepDocuments], StepPlan]:
    planner = planner_for(setup)
    return lambda documents: planner(documents.step, documents.lengths.tolist())


@pytest.mark.usefixtures("time_limit")
@pytest.mark.parametrize("ahead", [0, 1, 3, 50])
def test_a_process_makes_the_same_steps(source: DocumentSource, setup: Config, ahead: int) -> None:
    with StepLoader(source, here(setup), 2, 12, 0) as loader:
        expected = list(loader)
    worker = PlanWorker(setup)
    with StepLoader(source, worker, 2, 12, ahead) as loader:
        steps = list(loader)
    for ours, wanted in zip(steps, expected, strict=True):
        assert_equal_steps(ours, wanted)
        assert ours.record == record_of(wanted.plan)
        assert wanted.record is None
        assert ours.plan_seconds > 0
        assert ours.wait_seconds >= 0
        assert wanted.wait_seconds == pytest.approx(wanted.plan_seconds, abs=1e-6)  # nobody else has planned it
    with pytest.raises(RuntimeError):
        worker.start()  # closed by the loader


@pytest.mark.usefixtures("time_limit")
def test_no_step_waits_for_planning_until_the_plans_ahead_are_used_up(source: DocumentSource, setup: Config) -> None:
    """With ahead=2 two steps are loaded and two more plans are there: four steps come while the process stands still, and not one more."""
    worker = PlanWorker(setup)
    with StepLoader(source, worker, 0, 10, 2) as loader:
        process = worker._process
        while process is None or process.answers.qsize() < 2 or len(loader._shared.ready) < 2:
            time.sleep(0.01)
            process = worker._process
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGSTOP)
        steps = [next(loader) for _ in range(4)]
        assert [step.documents.step for step in steps] == [0, 1, 2, 3]
        threading.Timer(0.3, os.kill, (worker.pid, signal.SIGCONT)).start()
        late = next(loader)
        assert late.documents.step == 4
        assert late.wait_seconds > max(step.wait_seconds for step in steps)


@pytest.mark.usefixtures("time_limit")
def test_a_process_that_dies_ends_the_loading_at_its_step(source: DocumentSource, setup: Config) -> None:
    worker = PlanWorker(setup)
    with StepLoader(source, worker, 0, 100, 1) as loader:
        next(loader)
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(PlanWorkerDied, match=r"killed by SIGKILL \(9\).* before it had the plan of step [1-4]"):
            list(loader)
        with pytest.raises(PlanWorkerDied):
            next(loader)


@pytest.mark.usefixtures("time_limit")
def test_a_process_that_dies_is_replaced(source: DocumentSource, setup: Config) -> None:
    said: list[str] = []
    setup = replace(setup, plan=replace(setup.plan, worker_death="replace"))
    worker = PlanWorker(setup, said.append)
    with StepLoader(source, worker, 0, 20, 2) as loader:
        steps = [next(loader)]
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        steps += loader
    with StepLoader(source, here(setup), 0, 20, 0) as loader:
        for ours, wanted in zip(steps, loader, strict=True):
            assert_equal_steps(ours, wanted)
    assert len(said) == 1
    assert said[0].startswith("WARNING: the planning process")


@pytest.mark.usefixtures("time_limit")
@pytest.mark.parametrize("ahead", [0, 3])
def test_what_is_wrong_with_a_step_comes_at_its_turn(source: DocumentSource, setup: Config, ahead: int) -> None:
    """Its documents are looked up, and its lengths planned, long before; both kinds of errors wait."""

    class Failing:
        fill = staticmethod(source.fill)

        def step(self, index: int) -> StepDocuments:
            if index == 6:
                raise OSError("the disk is gone")
            documents = source.step(index)
            return replace(documents, lengths=documents.lengths * 10**9) if index == self.long else documents

    failing = Failing()
    for failing.long, kind, message in ((4, UserError, "^step 4: "), (99, OSError, "the disk is gone")):  # type: ignore[attr-defined]
        with StepLoader(failing, PlanWorker(setup), 0, 10, ahead) as loader:  # type: ignore[arg-type]
            good = min(6, failing.long)  # type: ignore[attr-defined]
            assert [next(loader).documents.step for _ in range(good)] == list(range(good))
            with pytest.raises(kind, match=message):
                next(loader)


@pytest.mark.usefixtures("time_limit")
def test_close_ends_the_process_and_a_thread_that_waits_for_it(source: DocumentSource, setup: Config) -> None:
    worker = PlanWorker(setup)
    worker.start()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)
    loader = StepLoader(source, worker, 0, 10, 1)
    while not worker._pending:
        time.sleep(0.01)
    loader.close()
    assert list(loader) == []
    assert loader._thread is not None
    assert not loader._thread.is_alive()
    assert not Path(f"/proc/{worker.pid}").exists()
