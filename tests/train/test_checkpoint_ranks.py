"""Several ranks save, fail and fall back together: one outcome, told to all, and never a hang."""

import json
import random
import re
import time

import numpy as np
import pytest
import torch
from ranks import run_ranks
from resharding import CPU, Layout, settings
from test_checkpoint import flip
from train_helpers import write_corpus

from megadcp.config.check import UserError
from megadcp.config.schema import CheckpointConfig
from megadcp.mesh.groups import GroupPool
from megadcp.parallel.boxes import Box
from megadcp.train import checkpoint_save, checkpoint_write
from megadcp.train.checkpoint import CheckpointError, SaveFailed, Saver, newest, read_weights, require_room, saved
from megadcp.train.run_folder import RunFolder
from megadcp.train.state import new_state

RANKS = Layout(lanes=3)


def with_pool(rank, world, work, *arguments):
    with GroupPool(RANKS.mesh, rank, CPU, timeout_s=30) as pool:
        return work(pool.world, *arguments)


def rows(rank: int, value: float) -> list[Box]:
    """Two rows of each rank, as one box; the last rank also has the last row, as part of a box of its own."""
    found = [Box("model.w", (7, 3), (2 * rank, 0), torch.full((2, 3), float(value + rank)))]
    return found + ([Box("model.w", (7, 3), (6, 0), torch.full((1, 3), float(value + rank)))] if rank == 2 else [])


def saver_of(run, group, said):
    return Saver(run, CheckpointConfig(keep_last=2), said.append, group)


def save(saver, step):
    saver.save(step, rows(saver.group.index, step), {"step": step}, {"rank": saver.group.index})
    saver.finish()


def outcome(action):
    """What the call raised, as text."""
    try:
        action()
    except (SaveFailed, CheckpointError, UserError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


# ------------------------------------------------------------------------------------------------------------------- saving
def test_every_rank_writes_its_own_and_all_of_it_is_one_checkpoint(tmp_path):
    def work(group):
        said = []
        saver = saver_of(RunFolder(tmp_path), group, said)
        for step in (1, 2, 3):
            save(saver, step)
        return saver.complete, len(said)

    assert run_ranks(3, with_pool, work) == [(3, 3)] * 3  # everybody is told; only rank 0's console shows it
    run = RunFolder(tmp_path)
    assert [path.name for path in saved(run)] == ["step-00000002", "step-00000003"]
    found = newest(run, pytest.fail)
    assert read_weights(found)["w"][:, 0].tolist() == [3, 3, 4, 4, 5, 5, 5]
    assert found.meta["ranks"] == {"values": [{"rank": 0}, {"rank": 1}, {"rank": 2}], "of_rank": [0, 1, 2]}
    files = sorted(path.name for path in found.path.iterdir())
    assert files == ["manifest.json", "meta.json", *(f"rank-0000{rank}.safetensors" for rank in range(3)), "tensors.json"]


def broken(*arguments):
    raise OSError(28, "No space left on device")


FAULTS = {
    "its disk is full": (checkpoint_write, "write_tensors", "No space left on device"),
    "it can't copy": (checkpoint_write.Stager, "stage", "No space left on device"),
    "its file is not what it wrote": (checkpoint_write, "check_file", "No space left on device"),
}


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_one_rank_that_fails_is_everybodys_failure(tmp_path, fault, rank):
    """C59: all learn of it, in the same words; the pointer is not moved; the next save works."""
    where, name, message = FAULTS[fault]

    def work(group):
        saver = saver_of(RunFolder(tmp_path), group, [])
        save(saver, 1)
        with pytest.MonkeyPatch.context() as patch:
            if group.index == rank:
                patch.setattr(where, name, broken)
            first = outcome(lambda: save(saver, 2))
            left = [path.name for path in RunFolder(tmp_path).checkpoints.iterdir() if "00000003" not in path.name]  # others may be ahead
        second = outcome(lambda: save(saver, 3))
        return first, left if group.index == 0 else [], second

    results = run_ranks(3, with_pool, work)
    assert results[0][0].startswith(f"SaveFailed: the checkpoint of step 2 could not be written (rank {rank}): ")
    assert message in results[0][0]
    assert [each[0] for each in results] == [results[0][0]] * 3
    assert results[0][1] == ["step-00000001"]
    assert [each[2] for each in results] == [""] * 3
    run = RunFolder(tmp_path)
    assert run.latest.read_text() == "checkpoints/step-00000003\n"
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-00000001", "step-00000003"]


def test_all_ranks_see_the_end_of_a_save_in_the_same_step(tmp_path):
    """One of them writes slowly; others go on, and none runs ahead with a save that is not complete."""

    def work(group):
        said = []
        saver = saver_of(RunFolder(tmp_path), group, said)
        if group.index == 1:
            write = checkpoint_write.write_tensors
            checkpoint_write.write_tensors = lambda *arguments: (time.sleep(0.4), write(*arguments))[1]
        saver.save(1, rows(group.index, 1), {"step": 1})
        steps = 0
        while saver.complete != 1:
            saver.poll()
            steps += 1
            time.sleep(0.02)
        return steps

    steps = run_ranks(3, with_pool, work)
    assert len(set(steps)) == 1
    assert steps[0] > 2


# ------------------------------------------------------------------------------------------------------------------ falling back
@pytest.mark.parametrize("damaged", ["rank-00000.safetensors", "rank-00001.safetensors", "rank-00002.safetensors", "meta.json"])
def test_damage_that_any_rank_finds_sends_all_to_the_one_before(tmp_path, damaged):
    def work(group):
        run, said = RunFolder(tmp_path), []
        saver = saver_of(run, group, [])
        save(saver, 1)
        save(saver, 2)
        if group.index == 0:
            flip(run.checkpoints / "step-00000002" / damaged)
        found = newest(run, said.append, repair=True, group=group)
        return found.step, said

    results = run_ranks(3, with_pool, work)
    assert [step for step, _ in results] == [1] * 3
    assert all(said == results[0][1] and len(said) == 1 and damaged in said[0] and "WARNING" in said[0] for _, said in results)
    assert sorted(path.name for path in RunFolder(tmp_path).checkpoints.iterdir()) == ["damaged-step-00000002", "step-00000001"]


def test_no_usable_checkpoint_is_the_same_error_on_all(tmp_path):
    def work(group):
        run = RunFolder(tmp_path)
        save(saver_of(run, group, []), 1)
        if group.index == 0:
            flip(run.checkpoints / "step-00000001" / "rank-00002.safetensors")
        return outcome(lambda: newest(run, lambda text: None, group=group))

    results = run_ranks(3, with_pool, work)
    assert "no checkpoint is usable (step-00000001: damaged)" in results[0]
    assert results == [results[0]] * 3


# ------------------------------------------------------------------------------------------------------------- before training
def test_a_place_that_one_rank_can_not_write(tmp_path):
    (tmp_path / "file").write_text("")

    def work(group):
        run = RunFolder(tmp_path / ("file" if group.index == 1 else "run"))
        return outcome(lambda: require_room(run, 10, CheckpointConfig(), (0, 5), group, lambda text: None))

    results = run_ranks(3, with_pool, work)
    assert re.match(r"UserError: checkpoints can't be written to .*file/checkpoints \(Not a directory, rank 1\)", results[0])
    assert results == [results[0]] * 3


def test_a_folder_that_ranks_do_not_share(tmp_path, monkeypatch):
    monkeypatch.setattr("megadcp.train.checkpoint_place.SEEN_SECONDS", 0.1)

    def work(group):
        run = RunFolder(tmp_path / str(min(group.index, 1)))
        return outcome(lambda: require_room(run, 10, CheckpointConfig(), (0, 5), group, lambda text: None))

    results = run_ranks(3, with_pool, work)
    assert "rank 0 doesn't see what rank 1 writes to" in results[0]
    assert "set run.folder to a folder that all nodes share" in results[0]
    assert results == [results[0]] * 3
    assert not any((tmp_path / "0" / "checkpoints").iterdir())


# ---------------------------------------------------------------------------------------------------------------- random states
def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    made = write_corpus(tmp_path_factory.mktemp("data"))
    new_state(settings(made, Layout()), CPU).optimizer.make_room(1)  # what torch imports late is imported before any rank is forked
    return made


def test_random_states_are_each_ranks_own_and_rank_0s_in_another_layout(prefix, tmp_path):
    """C55."""
    two = Layout(lanes=2)

    def work(rank, world, layout):
        with GroupPool(layout.mesh, rank, CPU, timeout_s=30) as pool:
            state = new_state(settings(prefix, layout), CPU, pool=pool)
            state.progress.step, run = 1, RunFolder(tmp_path)
            if layout == two and not saved(run):
                random.seed(rank)
                np.random.seed(rank)
                torch.manual_seed(rank)
                draw()
                saver = Saver(run, CheckpointConfig(), lambda text: None, pool.world)
                saver.save(1, state.boxes(), state.meta(), state.own_meta())
                saver.finish()
                return draw()
            state.load(newest(run, pytest.fail, group=pool.world))
            return draw()

    unbroken = run_ranks(2, work, two)
    assert unbroken[0] != unbroken[1]
    assert run_ranks(2, work, two) == unbroken
    assert run_ranks(2, work, Layout(tp=2)) == [unbroken[0]] * 2


def test_a_save_does_not_touch_random_states_or_values(prefix, tmp_path):
    """C51, C55: training that goes on beside a save does what it does without one."""

    def work(rank, world):
        with GroupPool(Layout(lanes=2).mesh, rank, CPU, timeout_s=30) as pool:
            state = new_state(settings(prefix, Layout(lanes=2)), CPU, pool=pool)
            state.progress.step = 1
            torch.manual_seed(5)
            before = torch.get_rng_state()
            saver = Saver(RunFolder(tmp_path), CheckpointConfig(), lambda text: None, pool.world)
            expected = [(box.name, box.offsets, box.values.clone()) for box in state.boxes()]
            saver.save(1, state.boxes(), state.meta())
            for box in state.boxes():
                box.values.add_(1.0)
            saver.finish()
            return torch.equal(before, torch.get_rng_state()), expected

    results = run_ranks(2, work)
    assert all(same for same, _ in results)
    found = newest(RunFolder(tmp_path), pytest.fail)
    whole = {f"model.{name}": tensor for name, tensor in read_weights(found).items()} | found.tensors("optimizer")
    for _, boxes in results:
        for name, offsets, values in boxes:
            place = tuple(slice(low, low + size) for low, size in zip(offsets, values.shape, strict=True))
            assert torch.equal(whole[name][place], values)


def test_misfits_are_named_by_all_ranks(prefix, tmp_path):
    """Missing, extra and misshapen tensors of any stage, in the words of one process."""

    def work(rank, world, model):
        with GroupPool(Layout(1, 2).mesh, rank, CPU, timeout_s=30) as pool:
            state, run = new_state(settings(prefix, Layout(1, 2), model), CPU, pool=pool), RunFolder(tmp_path)
            if not saved(run):
                state.progress.step = 1
                saver = Saver(run, CheckpointConfig(), lambda text: None, pool.world)
                saver.save(1, state.boxes(), state.meta(), state.own_meta())
                saver.finish()
                return ""
            return outcome(lambda: state.load(newest(run, pytest.fail, group=pool.world)))

    assert run_ranks(2, work, "tied") == ["", ""]
    results = run_ranks(2, work, "untied")
    assert results == [results[0]] * 2
    assert "missing: head.weight, layers.0.attention.qkv.bias," in results[0]
    assert "not in this model: layers.0.attention.k_norm.weight," in results[0]
    assert "embedding.weight is float32 [261, 32], expected float32 [259, 32]" in results[0]


def test_the_log_says_what_a_save_cost(tmp_path):
    said = []
    saver = Saver(RunFolder(tmp_path), CheckpointConfig(), said.append)
    saver.save(1, [Box("model.w", (2,), (0,), torch.zeros(2))], {"step": 1})
    saver.finish()
    assert re.fullmatch(rf"saved {tmp_path}/checkpoints/step-00000001 \([0-9.]+ s; training stood still for [0-9.]+ s\)", said[0])
    assert json.loads((tmp_path / "checkpoints/step-00000001/manifest.json").read_text())["format"] == checkpoint_save.FORMAT
