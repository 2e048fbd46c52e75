"""Faults around a save that come from outside: damaged files, a rank that raises or is killed in it, dates that mean nothing."""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import ranks
import torch
from ranks import RankFailed, run_ranks
from resharding import CPU, Layout

from megadcp.config.schema import CheckpointConfig
from megadcp.mesh.groups import GroupPool
from megadcp.parallel.boxes import Box
from megadcp.train import checkpoint, checkpoint_save, checkpoint_write
from megadcp.train.checkpoint import CheckpointError, SaveFailed, Saver, newest, open_checkpoint, read_weights, saved
from megadcp.train.run_folder import RunFolder

FILES = ("manifest.json", "meta.json", "tensors.json", "rank-00000.safetensors")


def quiet(text: str) -> None:
    pass


def put(run: RunFolder, *steps: int) -> None:
    saver = Saver(run, CheckpointConfig(keep_last=0), quiet)
    for step in steps:
        boxes = [Box(f"{kind}.w", (5, 7), (0, 0), torch.full((5, 7), float(step))) for kind in ("model", "exp_avg", "exp_avg_sq")]
        saver.save(step, boxes, {"step": step, "tokens": 100 * step})
        saver.finish()
    saver.close()


# ------------------------------------------------------------------------------------------------------------- damaged files
def flip(path: Path, at: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def zero(path: Path, at: int, size: int) -> None:
    """A block that never reached the disk."""
    data = bytearray(path.read_bytes())
    data[at : at + size] = bytes(len(data[at : at + size]))
    path.write_bytes(data)


def offsets_of(path: Path, rng: random.Random) -> list[int]:
    """Its borders, the length of a safetensors head, and places drawn; every byte of the manifest, which nothing else vouches for."""
    size = path.stat().st_size
    return list(range(size)) if path.name == "manifest.json" else sorted({0, 7, 8, size - 1, *rng.sample(range(size), 12)})


def says_the_same(path: Path, whole: bytes) -> bool:
    try:
        return json.loads(path.read_bytes()) == json.loads(whole)
    except (OSError, ValueError):
        return False


@pytest.mark.parametrize("name", FILES)
def test_no_damage_is_ever_taken_for_a_checkpoint(tmp_path, name):
    """Each flipped bit, cut, lost block and added byte: the file is named, and the checkpoint before is taken."""
    run, rng = RunFolder(tmp_path), random.Random(name)
    put(run, 1, 2)
    path = run.checkpoints / "step-00000002" / name
    whole = path.read_bytes()
    damages = [lambda at=at: flip(path, at, rng.randrange(8)) for at in offsets_of(path, rng)]
    damages += [lambda at=at: os.truncate(path, at) for at in {0, 1, 8, len(whole) // 2, len(whole) - 1}]
    damages += [lambda: zero(path, len(whole) // 3, 16), lambda: zero(path, 0, 4096), lambda: path.write_bytes(whole + b"\0"), path.unlink]
    for number, damage in enumerate(damages):
        path.write_bytes(whole)
        damage()
        if name == "manifest.json" and says_the_same(path, whole):  # a line end at its end
            continue
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(path.parent)
        assert "\n" not in str(caught.value), number
        assert "step-00000002" in str(caught.value), number
        said = []
        assert newest(run, said.append).step == 1, number
        assert len(said) == 1, number
    path.write_bytes(whole)
    assert newest(run, pytest.fail).step == 2


def test_files_of_two_checkpoints_are_no_checkpoint(tmp_path):
    """Restored by hand from a backup, half of it."""
    run = RunFolder(tmp_path)
    put(run, 1, 2)
    for name in FILES[1:]:
        shutil.copytree(run.checkpoints / "step-00000002", run.checkpoints / "step-00000003")
        shutil.copy(run.checkpoints / "step-00000001" / name, run.checkpoints / "step-00000003" / name)
        if (run.checkpoints / "step-00000001" / name).read_bytes() != (run.checkpoints / "step-00000002" / name).read_bytes():
            with pytest.raises(CheckpointError, match=name):
                open_checkpoint(run.checkpoints / "step-00000003")
        shutil.rmtree(run.checkpoints / "step-00000003")


# ------------------------------------------------------------------------------------------- a rank that fails or dies in a save
class Odd(Exception):
    """Nothing that anybody expects."""


PHASES = {  # of one rank's share, and of what rank 0 does with all of them
    "copying": (checkpoint_write.Stager, "stage", (0, 1)),
    "writing": (checkpoint_write, "write_tensors", (0, 1)),
    "checking": (checkpoint_write, "check_file", (0, 1)),
    "finishing": (checkpoint_write._Writer, "finish", (0, 1)),
    "collecting": (checkpoint_save, "collect", (0, 1)),
    "describing": (checkpoint_save, "write_manifest", (0,)),
    "renaming": (checkpoint_save, "put_in_place", (0,)),
    "removing": (checkpoint_save, "remove_old", (0,)),
}
CASES = [(phase, rank) for phase, (_, _, of) in PHASES.items() for rank in of]
EXCHANGE = "collecting"  # ranks talk: an error of one is no different from its death


def rows(rank: int, value: int) -> list[Box]:
    return [Box("model.w", (4, 3), (2 * rank, 0), torch.full((2, 3), float(value)))]


def two_savers(rank, world, folder, steps, patch_for):
    """Save on two ranks; what each step came to on this one, told in a file, too: a rank that was killed tells nothing."""
    with GroupPool(Layout(lanes=2).mesh, rank, CPU, timeout_s=20) as pool, pytest.MonkeyPatch.context() as patch:
        checkpoint_save.LEAVE_SECONDS = 0.5
        saver, outcomes = Saver(RunFolder(folder), CheckpointConfig(keep_last=1), quiet, pool.world), []
        try:
            for step in steps:
                if step == 2:
                    patch_for(patch, rank)
                else:
                    patch.undo()
                try:
                    saver.save(step, rows(rank, step), {"step": step})
                    saver.finish()
                    outcomes.append("")
                except SaveFailed as error:
                    outcomes.append(str(error))
        except Exception as error:  # what a collective raises when the other rank is gone
            outcomes.append(type(error).__name__)
        saver.close()
        (folder / f"rank-{rank}").write_text(json.dumps(outcomes))
        return outcomes


def check_after(folder: Path, complete: int) -> None:
    """The newest is whole and the right one; the next job goes on and leaves nothing but its own."""
    run = RunFolder(folder)
    assert newest(run, pytest.fail, repair=True).step == complete
    assert read_weights(newest(run, pytest.fail))["w"].unique().tolist() == [complete]
    assert run_ranks(2, two_savers, folder, [3], None) == [[""]] * 2
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000003"]
    assert run.latest.read_text() == "checkpoints/step-00000003\n"


@pytest.mark.parametrize(("phase", "culprit"), [case for case in CASES if case[0] != EXCHANGE])
def test_a_rank_that_raises_in_a_save(tmp_path, phase, culprit):
    """Whatever it raises: one sentence, the same on all ranks; the next save works, and whoever reads finds a whole checkpoint."""
    where, name, _ = PHASES[phase]

    def break_it(patch, rank):
        def raising(*arguments, **named):
            raise Odd("of its own kind")

        if rank == culprit:
            patch.setattr(where, name, raising)

    first, second = run_ranks(2, two_savers, tmp_path, [1, 2], break_it, timeout_s=60)
    assert first == second
    named = "is complete, but older ones could not be removed" if phase == "removing" else "could not be written"
    assert first == ["", f"the checkpoint of step 2 {named} (rank {culprit}): of its own kind"]
    check_after(tmp_path, 2 if phase == "removing" else 1)


@pytest.mark.parametrize(("phase", "culprit"), CASES)
def test_a_rank_that_is_killed_in_a_save(tmp_path, monkeypatch, phase, culprit):
    """The other one learns of it, and leaves; a complete checkpoint is there, and the next job cleans up."""
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 30.0)  # for the survivor to say what it saw
    where, name, _ = PHASES[phase]

    def kill_it(patch, rank):
        if rank == culprit:
            patch.setattr(where, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))

    begin = time.monotonic()
    with pytest.raises(RankFailed, match="ended by SIGKILL"):
        run_ranks(2, two_savers, tmp_path, [1, 2, 3], kill_it, timeout_s=60)
    assert time.monotonic() - begin < 50  # not the group's time-out
    outcomes = json.loads((tmp_path / f"rank-{1 - culprit}").read_text())
    assert outcomes[0] == ""
    assert outcomes[-1] != ""
    check_after(tmp_path, 2 if phase == "removing" else 1)


def test_leftovers_that_can_not_be_removed_are_everybodys_error(tmp_path, monkeypatch):
    """Rank 0 puts the folder in order before all load: what it can't do is no reason for the others to wait."""

    def work(rank, world):
        with GroupPool(Layout(lanes=2).mesh, rank, CPU, timeout_s=20) as pool:

            def refused(run):
                raise PermissionError(13, "Permission denied", "draft")

            checkpoint.remove_leftovers = refused
            with pytest.raises(CheckpointError, match=r"can't be put in order: .*Permission denied"):
                newest(RunFolder(tmp_path), quiet, repair=True, group=pool.world)
            return True

    assert run_ranks(2, work) == [True, True]


def test_a_checkpoint_that_the_clock_calls_older_is_the_newest(tmp_path):
    """Set back by an hour between two saves; and files dated into the future."""
    run = RunFolder(tmp_path)
    put(run, 1, 2)
    for path, age in ((run.checkpoints / "step-00000001", -86400), (run.checkpoints / "step-00000002", 3600)):
        for each in (path, *path.iterdir()):
            os.utime(each, (time.time() - age,) * 2)
    saver = Saver(run, CheckpointConfig(keep_last=2), quiet)
    saver.save(3, [Box("model.w", (1,), (0,), torch.ones(1))], {"step": 3})
    saver.finish()
    assert [path.name for path in saved(run)] == ["step-00000002", "step-00000003"]
    assert newest(run, pytest.fail).step == 3
