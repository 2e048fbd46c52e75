"""One run in any layout: the same documents, counters and rates, whatever ranks it began on and goes on with; bad steps are everybody's."""

import dataclasses
import math
import os
import random
import signal
import socket
import sys

import pytest
import torch
from ranks import run_ranks
from train_helpers import config, write_corpus

from megadcp.data.order import open_training
from megadcp.train import checkpoint_write, launch, loop, session
from megadcp.train.checkpoint import newest
from megadcp.train.loop import FAILED, FINISHED, STOPPED, train
from megadcp.train.metrics import MetricsFile, read_metrics
from megadcp.train.run_folder import RunFolder

STEPS, HALF = 8, 4
EXACT = ("step", "tokens", "documents", "targets", "lr", "skipped")
ONE, LANES, FOUR, TP, PP, BOTH = (1, 1, 1), (2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2)  # lanes, tp, pp
RESUMED = [(LANES, ONE), (ONE, FOUR), (TP, PP), (BOTH, LANES)]
MORE = [(LANES, FOUR), (FOUR, TP), (PP, BOTH), (FOUR, ONE), (ONE, BOTH)]


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    made = write_corpus(tmp_path_factory.mktemp("data"))
    train(settings(made, ONE, steps=1), tmp_path_factory.mktemp("warm"))  # what is imported late is imported before any rank is forked
    return made


def settings(prefix, layout, steps=STEPS, **changes):
    lanes, tp, pp = layout
    run = {"steps": steps, "validate_every": 0, "sample_prompt": ""}
    made = config(
        prefix, run=run, parallel={"tp": tp, "pp": pp}, cluster={"processes": lanes * tp * pp}, plan={"worker": "thread", "pack_tokens": 100},
        checkpoint={"every": 0}, **changes,
    )  # fmt: skip
    return dataclasses.replace(made, model=dataclasses.replace(made.model, residual_dropout=0.0))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def one_rank(rank, world_size, made, folder, port, stop_after, spoil):
    """A life as torchrun starts it; (exit code, document ids of each step that ran, what else the rank drew at random)."""
    here = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in here.items()})
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    seen, step, write = [], loop._one_step, MetricsFile.write

    def watched(run, loaded, *rest):
        seen.append(loaded.documents.ids.tolist())
        return step(run, loaded, *rest)

    def stopping(self, row):
        write(self, row)
        if row["step"] == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)

    loop._one_step, MetricsFile.write = watched, stopping
    if spoil and rank == spoil.rank:
        spoil.apply()
    with launch.join(made, timeout_s=30) as world:
        return train(made, folder, world), seen


def live(made, folder, stop_after=0, spoil=None):
    """On as many ranks as the settings say; what each returned."""
    return run_ranks(made.cluster.processes, one_rank, made, folder, free_port(), stop_after, spoil, connect=False)


def rows_of(folder):
    return [row for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]


def exact(rows):
    return [{key: row[key] for key in EXACT} for row in rows]


@pytest.fixture(scope="module")
def whole(prefix, tmp_path_factory):
    """The unbroken run of one process, and its documents, step by step."""
    folder = tmp_path_factory.mktemp("whole")
    assert train(settings(prefix, ONE), folder) == FINISHED
    source = open_training(settings(prefix, ONE).data, STEPS)
    return rows_of(folder), [source.step(number).ids.tolist() for number in range(STEPS)]


# ------------------------------------------------------------------------------------------ documents, counters, rates (b, g)
@pytest.mark.parametrize("layout", [LANES, FOUR, TP, PP, BOTH], ids=str)
def test_every_layout_reads_counts_and_anneals_alike(prefix, whole, tmp_path, layout):
    """C17: what tp, pp and cp ranks share is counted once. C47: the norm that clips follows no layout."""
    results = live(settings(prefix, layout), tmp_path)
    assert results == [(FINISHED, whole[1])] * len(results)
    rows = rows_of(tmp_path)
    assert exact(rows) == exact(whole[0])
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in whole[0]], rel=2e-5)
    meta = newest(RunFolder(tmp_path), pytest.fail).meta
    assert (meta["step"], meta["tokens"], meta["documents"]) == tuple(whole[0][-1][key] for key in ("step", "tokens", "documents"))


@pytest.mark.parametrize(("before", "after"), [*RESUMED, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE)], ids=str)
def test_another_layout_goes_on_where_the_first_one_stopped(prefix, whole, tmp_path, before, after):
    """C11: fewer and more ranks see the documents of the unbroken run, in mid-epoch. C49: and its rates; C17: and its counters."""
    first = live(settings(prefix, before), tmp_path, stop_after=HALF)
    assert {code for code, _ in first} == {STOPPED}
    assert all(seen == whole[1][: len(seen)] for _, seen in first)
    done = len(first[0][1])
    assert HALF <= done < STEPS
    second = live(settings(prefix, after), tmp_path)
    assert second == [(FINISHED, whole[1][done:])] * len(second)
    rows = rows_of(tmp_path)
    assert exact(rows) == exact(whole[0])
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in whole[0]], rel=5e-5)


# ------------------------------------------------------------------------------------------------------------- bad steps (g)
@dataclasses.dataclass(frozen=True)
class Spoil:
    """On one rank, the last gradient of the last parameter becomes `value` in the given steps (steps done before each)."""

    rank: int
    value: float
    steps: tuple[int, ...]

    def apply(self):
        new_state = session.new_state

        def made(*arguments):
            state = new_state(*arguments)
            _, parameter = list(state.model.named_parameters())[-1]
            spoiled = lambda gradient: gradient * self.value if state.progress.step in self.steps else gradient  # noqa: E731
            parameter.register_hook(spoiled)
            return state

        session.new_state = made


@pytest.mark.parametrize(("layout", "rank"), [(LANES, 1), (TP, 3), (PP, 3), (BOTH, 2), (FOUR, 0)], ids=str)
def test_a_bad_gradient_on_one_rank_skips_the_step_on_all(prefix, tmp_path, layout, rank):
    """C45: the others skip it, too; nothing of it is applied, it is logged, and the run goes on alike."""
    made = settings(prefix, layout)
    world = made.cluster.processes
    spoil = Spoil(rank, random.Random(str(layout)).choice([math.nan, math.inf]), (3, 6))
    results = live(made, tmp_path, spoil=spoil)
    assert [code for code, _ in results] == [FINISHED] * world
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows if row["skipped"]] == [3, 6]
    assert all("not finite" in row["problem"] for row in rows if row["skipped"])
    kept = newest(RunFolder(tmp_path), pytest.fail)
    assert (kept.meta["updates"], kept.meta["skipped"], kept.meta["step"]) == (STEPS - 2, 2, STEPS)
    assert all(torch.isfinite(tensor).all() for part in ("model", "optimizer") for tensor in kept.tensors(part).values())


def test_too_many_bad_steps_end_all_ranks_alike(prefix, tmp_path):
    made = settings(prefix, LANES, optim={"max_skipped": 3})
    results = live(made, tmp_path, spoil=Spoil(1, math.nan, tuple(range(3, 99))))
    assert [code for code, _ in results] == [FAILED, FAILED]
    assert [row["skipped"] for row in rows_of(tmp_path)] == [False] * 2 + [True] * 3


# ------------------------------------------------------------------------------------------------------- a place that is gone (h)
@dataclasses.dataclass(frozen=True)
class Gone:
    """From a step on, one rank can't write where checkpoints go."""

    rank: int
    step: int

    def apply(self):
        write = checkpoint_write.write_tensors

        def refused(path, *arguments):
            if int(path.parent.name.split("-")[1].split(".")[0]) >= self.step:
                raise PermissionError(13, "Permission denied", str(path))
            return write(path, *arguments)

        checkpoint_write.write_tensors = refused


@pytest.mark.parametrize(("layout", "rank"), [(LANES, 0), (LANES, 1), (PP, 2)], ids=str)
def test_a_place_that_one_rank_loses_in_mid_run_ends_the_run_on_all(prefix, whole, tmp_path, layout, rank):
    """C59: at the next save at the latest; the pointer stays, no rank hangs, and with the place back the same command goes on."""
    made = settings(prefix, layout)
    made = dataclasses.replace(made, checkpoint=dataclasses.replace(made.checkpoint, every=2))
    results = live(made, tmp_path, spoil=Gone(rank, 4))
    assert [code for code, _ in results] == [FAILED] * made.cluster.processes
    assert 4 <= len(rows_of(tmp_path)) <= 6
    assert RunFolder(tmp_path).latest.read_text() == "checkpoints/step-00000002\n"
    assert [path.name for path in RunFolder(tmp_path).checkpoints.iterdir()] == ["step-00000002"]
    assert [code for code, _ in live(made, tmp_path)] == [FINISHED] * made.cluster.processes
    assert exact(rows_of(tmp_path)) == exact(whole[0])
