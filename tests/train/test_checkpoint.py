import json
import os
import pickle
import signal
import sys

import pytest
import torch

from megadcp.train import checkpoint
from megadcp.train.checkpoint import CheckpointError, newest, open_checkpoint, require_match, save, saved
from megadcp.train.run_folder import RunFolder


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path)


def tensors(value: float, size: int = 64) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": torch.full((size,), value)}, "optimizer": {"exp_avg.w": torch.full((size,), value + 1)}}


def put(run: RunFolder, step: int, keep_last: int = 0) -> None:
    save(run, step, tensors(step), {"step": step}, keep_last)


def quiet(text: str) -> None:
    pass


def test_what_is_saved_comes_back(run):
    value = {"model": {"w": torch.randn(3, 4), "b": torch.randn(5).bfloat16()}, "optimizer": {"exp_avg.w": torch.randn(3, 4)}}
    path = save(run, 800, value, {"step": 800, "tokens": 12, "bad": float("nan")}, 2)
    assert path == run.checkpoints / "step-00000800"
    assert run.latest.read_text() == "checkpoints/step-00000800\n"
    found = newest(run, quiet)
    assert (found.step, found.meta["tokens"], found.meta["bad"]) == (800, 12, None)
    for name in value:
        back = found.tensors(name)
        assert back.keys() == value[name].keys()
        assert all(torch.equal(back[key], tensor) and back[key].dtype == tensor.dtype for key, tensor in value[name].items())
    assert sorted(path.name for path in path.iterdir()) == ["manifest.json", "meta.json", "model.safetensors", "optimizer.safetensors"]


def test_values_are_those_of_the_step_even_if_training_goes_on(run):
    live = tensors(1.0)
    save(run, 1, live, {"step": 1}, 0)
    live["model"]["w"].add_(5)
    assert float(newest(run, quiet).tensors("model")["w"][0]) == 1.0


def test_only_the_last_are_kept(run):
    for step in (1, 2, 3, 10):
        put(run, step, keep_last=2)
    assert [path.name for path in saved(run)] == ["step-00000003", "step-00000010"]
    put(run, 11, keep_last=0)
    assert len(saved(run)) == 3
    assert sorted(path.name for path in run.checkpoints.iterdir()) == [path.name for path in saved(run)]


def test_nothing_saved(run):
    assert newest(run, quiet) is None


DAMAGE = {
    "cut": lambda path: os.truncate(path / "model.safetensors", (path / "model.safetensors").stat().st_size - 1),
    "empty": lambda path: os.truncate(path / "optimizer.safetensors", 0),
    "flipped": lambda path: flip(path / "model.safetensors"),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "half a manifest": lambda path: os.truncate(path / "manifest.json", 30),
    "missing file": lambda path: (path / "meta.json").unlink(),
    "changed meta": lambda path: (path / "meta.json").write_text((path / "meta.json").read_text().replace('"step": 2', '"step": 3')),
}


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_told_and_the_one_before_is_taken(run, kind):
    put(run, 1)
    put(run, 2)
    path = run.checkpoints / "step-00000002"
    DAMAGE[kind](path)
    with pytest.raises(CheckpointError, match="step-00000002"):
        open_checkpoint(path)
    said = []
    assert newest(run, said.append, repair=True).step == 1
    assert len(said) == 1
    assert "WARNING" in said[0]
    assert "step-00000002" in said[0]
    assert run.latest.read_text() == "checkpoints/step-00000001\n"
    assert [path.name for path in saved(run)] == ["step-00000001"]
    assert (run.checkpoints / "damaged-step-00000002").is_dir()
    put(run, 2)  # the step comes again
    assert newest(run, quiet).step == 2


def test_looking_does_not_repair(run):
    put(run, 1)
    put(run, 2)
    DAMAGE["cut"](run.checkpoints / "step-00000002")
    before = sorted(run.checkpoints.iterdir())
    assert newest(run, quiet).step == 1
    assert sorted(run.checkpoints.iterdir()) == before
    assert run.latest.read_text() == "checkpoints/step-00000002\n"


def test_all_damaged_is_an_error_and_not_a_fresh_start(run):
    put(run, 1)
    DAMAGE["cut"](run.checkpoints / "step-00000001")
    with pytest.raises(CheckpointError, match="no checkpoint is usable"):
        newest(run, quiet)


def test_newest_counts_by_number_and_not_by_pointer(run):
    put(run, 2)
    put(run, 10)
    run.latest.write_text("checkpoints/step-00000002\n")
    (run.checkpoints / "step-foreign").mkdir()
    assert newest(run, quiet, repair=True).step == 10
    assert run.latest.read_text() == "checkpoints/step-00000010\n"


def test_misfits_are_named():
    expected = {"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(4), **{f"x{index}": torch.zeros(1) for index in range(7)}}
    found = {"b": torch.zeros(3, 1), "c": torch.zeros(4).bfloat16(), "d": torch.zeros(1)}
    with pytest.raises(CheckpointError) as caught:
        require_match(expected, found, "model.safetensors")
    text = str(caught.value)
    assert "missing: a, x0, x1, x2, x3 and 3 more" in text
    assert "not in this model: d" in text
    assert "b is float32 [3, 1], expected float32 [3], c is bfloat16 [4], expected float32 [4]" in text
    assert "\n" not in text


class Payload:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def read_all(run):
    found = newest(run, quiet)
    return found.tensors("model"), found.tensors("optimizer")


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "meta.json", "manifest.json"])
def test_no_file_is_unpickled(run, name, tmp_path):
    put(run, 1)
    path = run.checkpoints / "step-00000001"
    (path / name).write_bytes(pickle.dumps(Payload(tmp_path / "opened")))
    if name not in ("manifest.json",):  # a forger writes a manifest that fits
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["files"][name] = {"bytes": (path / name).stat().st_size, "sha256": checkpoint._sha256(path / name)}
        (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError):
        read_all(run)
    assert not (tmp_path / "opened").exists()


def test_a_full_disk_leaves_what_was_there(run, monkeypatch):
    put(run, 1)

    def full(tensors, path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        put(run, 2)
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000001"]
    assert run.latest.read_text() == "checkpoints/step-00000001\n"


def die_at(count: int, run: RunFolder, steps: list[int], keep_last: int) -> int:
    """Save `steps` in a child that kills itself before its count-th change of the disk. Returns its exit status."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    try:
        changes = 0

        def hook(event, args):
            nonlocal changes
            writes = event == "open" and isinstance(args[1], str) and args[1] not in ("r", "rb")
            if writes or event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"):
                changes += 1
                if changes == count:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)  # also sees what libraries written in Python do; it can't be removed, but the child ends here
        for step in steps:
            put(run, step, keep_last)
        os._exit(0)
    except BaseException:
        os._exit(1)


@pytest.mark.parametrize("again", [False, True], ids=["new step", "same step again"])
def test_killed_at_every_moment_of_a_save(tmp_path, again):
    """Wherever the process dies, the newest complete checkpoint is found, the pointer names a complete one, and the next save cleans up."""
    for count in range(1, 200):
        run = RunFolder(tmp_path / f"{count}")
        run.path.mkdir()
        put(run, 1)
        put(run, 2)
        status = die_at(count, run, [2 if again else 3], keep_last=1)
        assert status in (0, signal.SIGKILL)
        said = []
        for path in saved(run):
            open_checkpoint(path)  # whatever has a good name is complete
        pointer = run.path / run.latest.read_text().strip()
        assert again or open_checkpoint(pointer)
        found = newest(run, said.append, repair=True)
        assert said == []
        assert found.step in (2, 3)
        assert float(found.tensors("model")["w"][0]) == found.step
        put(run, 4, keep_last=1)
        assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000004"]
        if status == 0:
            break
    assert status == 0
    assert count > 12
