"""One process: what is saved comes back, or the message says what is wrong; whenever it dies a complete checkpoint is there."""

import json
import os
import pickle
import resource
import shutil
import signal
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from megadcp.config.check import UserError
from megadcp.config.schema import CheckpointConfig
from megadcp.parallel.boxes import Box
from megadcp.train import checkpoint_place, checkpoint_save, checkpoint_write
from megadcp.train.checkpoint import CheckpointError, SaveFailed, Saver, newest, open_checkpoint, read_weights, require_match, require_room, saved
from megadcp.train.checkpoint_format import sha256_of
from megadcp.train.incidents import read_incidents
from megadcp.train.run_folder import RunFolder
from megadcp.train.together import ALONE

DATA = "rank-00000.safetensors"


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path)


def quiet(text: str) -> None:
    pass


def whole(name: str, tensor: torch.Tensor) -> Box:
    return Box(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor)


def boxes(value: float, size: int = 64) -> list[Box]:
    return [whole("model.w", torch.full((size,), float(value))), whole("exp_avg.w", torch.full((size,), value + 1.0))]


def saver_of(run: RunFolder, keep_last: int = 0, keep_every: int = 0, async_save: bool = True, say=quiet) -> Saver:
    return Saver(run, CheckpointConfig(keep_last=keep_last, keep_every=keep_every, async_save=async_save), say)


def put(run: RunFolder, step: int, keep_last: int = 0, **more) -> None:
    saver = saver_of(run, keep_last, **more)
    saver.save(step, boxes(step), {"step": step})
    saver.finish()
    saver.close()


# ------------------------------------------------------------------------------------------------------------- save and load
@pytest.mark.parametrize("async_save", [True, False])
def test_what_is_saved_comes_back(run, async_save):
    values = {
        "model.w": torch.randn(3, 4),
        "model.b": torch.randn(5).bfloat16(),
        "exp_avg.w": torch.randn(3, 4),
        "exp_avg.x": torch.randn(2, 3).double(),
    }
    said = []
    saver = saver_of(run, 2, async_save=async_save, say=said.append)
    saver.save(800, [whole(name, tensor) for name, tensor in values.items()], {"step": 800, "tokens": 12, "bad": float("nan")}, {"mine": 1})
    saver.finish()
    path = run.checkpoints / "step-00000800"
    assert saver.complete == 800
    assert len(said) == 1
    assert said[0].startswith(f"saved {path} (")
    assert run.latest.read_text() == "checkpoints/step-00000800\n"
    found = newest(run, quiet)
    assert (found.step, found.meta["tokens"], found.meta["bad"]) == (800, 12, None)
    assert found.meta["ranks"] == {"values": [{"mine": 1}], "of_rank": [0]}
    back = {f"model.{name}": tensor for name, tensor in read_weights(found).items()} | found.tensors("optimizer")
    assert back.keys() == values.keys()
    assert all(torch.equal(back[name], tensor) and back[name].dtype == tensor.dtype for name, tensor in values.items())
    assert {name: tensor.shape for name, tensor in found.shapes("model").items()} == {"w": (3, 4), "b": (5,)}
    assert list(found.tensors("model", ["b"])) == ["b"]
    with pytest.raises(CheckpointError, match="no tensor c"):
        found.tensors("model", ["c"])
    assert sorted(path.name for path in path.iterdir()) == ["manifest.json", "meta.json", DATA, "tensors.json"]


def test_files_are_safetensors_that_others_can_read(run):
    put(run, 3)
    found = load_file(run.checkpoints / "step-00000003" / DATA)
    assert {name: float(tensor[0]) for name, tensor in found.items()} == {"model.w@0": 3.0, "exp_avg.w@0": 4.0}


def split(name: str, tensor: torch.Tensor, cuts: list[int]) -> list[Box]:
    """Rows cut, every other part cut once more along the columns."""
    found = []
    for number, (start, stop) in enumerate(zip([0, *cuts], [*cuts, len(tensor)], strict=True)):
        for low, high in ((0, 1), (1, tensor.shape[1])) if number % 2 else ((0, tensor.shape[1]),):
            found.append(Box(name, tuple(tensor.shape), (start, low), tensor[start:stop, low:high]))
    return found


def test_boxes_are_read_into_other_boxes(run):
    tensor, other = torch.randn(11, 5), torch.randn(7, 3)
    saver = saver_of(run)
    saver.save(1, [*split("model.a", tensor, [2, 3, 8]), *split("model.b", other, [])], {"step": 1})
    saver.finish()
    found = newest(run, quiet)
    back = torch.zeros(11, 5)
    found.read(split("model.a", back, [1, 5, 6]))
    assert torch.equal(back, tensor)
    back.zero_()
    found.read([Box("model.a", (11, 5), (7, 1), back[7:9, 1:4])])
    assert torch.equal(back[7:9, 1:4], tensor[7:9, 1:4])
    assert back.count_nonzero() == 6
    assert torch.equal(read_weights(found)["b"], other)


@pytest.mark.parametrize("cut", [True, False], ids=["hole", "overlap"])
def test_boxes_that_do_not_make_up_the_tensor_are_no_checkpoint(run, cut):
    tensor = torch.randn(6, 2)
    parts = [Box("model.a", (6, 2), (0, 0), tensor[:3]), Box("model.a", (6, 2), (4, 0) if cut else (2, 0), tensor[4:] if cut else tensor[:3])]
    saver = saver_of(run)
    saver.save(1, parts, {"step": 1})
    with pytest.raises(SaveFailed, match=r"the boxes of model\.a don't make up \[6, 2\]"):
        saver.finish()
    assert saved(run) == []


def test_a_dtype_that_no_file_can_hold(run):
    saver = saver_of(run)
    saver.save(1, [whole("model.a", torch.arange(3))], {"step": 1})
    with pytest.raises(SaveFailed, match=r"model\.a@0 is torch\.int64; a checkpoint can hold torch\.float64, torch\.float32"):
        saver.finish()


def test_what_does_not_fit_is_refused_before_anything_is_read(run):
    put(run, 1)
    found = newest(run, quiet)
    target = torch.zeros(64)
    for wrong, message in (
        (whole("model.x", torch.zeros(1)), "has no tensor model.x"),
        (whole("model.w", torch.zeros(63)), r"model.w is float32 \[64\], expected float32 \[63\]"),
        (whole("model.w", torch.zeros(64).double()), r"model.w is float32 \[64\], expected float64 \[64\]"),
    ):
        with pytest.raises(CheckpointError, match=message):
            found.read([whole("exp_avg.w", target), wrong])
        assert not target.any()


def test_format_1_can_still_be_read(run):
    """Two files with whole tensors, as earlier versions wrote them."""
    path = run.checkpoints / "step-00000007"
    path.mkdir(parents=True)
    save_file({"w": torch.arange(6.0).view(2, 3), "b": torch.ones(2).bfloat16()}, path / "model.safetensors")
    save_file({"exp_avg.w": torch.ones(2, 3), "master.b": torch.ones(2)}, path / "optimizer.safetensors")
    (path / "meta.json").write_text(json.dumps({"format": 1, "step": 7}))
    files = {each.name: {"bytes": each.stat().st_size, "sha256": sha256_of(each)} for each in path.iterdir()}
    (path / "manifest.json").write_text(json.dumps({"format": 1, "step": 7, "files": files}))
    found = newest(run, pytest.fail)
    assert found.step == 7
    assert torch.equal(read_weights(found)["w"], torch.arange(6.0).view(2, 3))
    assert found.tensors("optimizer").keys() == {"exp_avg.w", "master.b"}
    part = torch.zeros(1, 2)
    found.read([Box("model.w", (2, 3), (1, 1), part)])
    assert part.tolist() == [[4.0, 5.0]]
    (path / "manifest.json").write_text(json.dumps({"format": 9, "step": 7, "files": files}))
    with pytest.raises(CheckpointError, match="format 9; this version reads formats 1 and 2"):
        open_checkpoint(path)


# ------------------------------------------------------------------------------------------------------------ in the background
def slow_writer(monkeypatch, seconds: float) -> None:
    write = checkpoint_write.write_tensors

    def slow(*arguments):
        time.sleep(seconds)
        return write(*arguments)

    monkeypatch.setattr(checkpoint_write, "write_tensors", slow)


def test_values_are_those_of_the_step_even_if_training_goes_on(run, monkeypatch):
    """C51: CPU tensors, changed while the writer is slow."""
    slow_writer(monkeypatch, 0.2)
    live = boxes(1.0)
    saver = saver_of(run)
    saver.save(1, live, {"step": 1})
    live[0].values.add_(5)
    saver.poll()
    assert newest(run, quiet) is None
    saver.save(2, live, {"step": 2})  # waits for the first, whose copy it takes over
    live[0].values.add_(5)
    saver.finish()
    assert [float(read_weights(open_checkpoint(path))["w"][0]) for path in saved(run)] == [1.0, 6.0]


def test_one_copy_is_kept_and_used_again(run):
    saver = saver_of(run)
    places = set()
    for step in range(3):
        saver.save(step, boxes(step), {"step": step})
        saver.finish()
        places.add(tuple((buffer.data_ptr(), buffer.numel()) for buffer in saver.stager.buffers))
    assert len(places) == 1
    assert sum(size for _, size in places.pop()) == 2 * 64 * 4
    saver.close()
    assert saver.stager.buffers == []


def test_the_copy_is_made_of_pieces(run, monkeypatch):
    monkeypatch.setattr(checkpoint_write, "BUFFER", 300)
    saver = saver_of(run)
    many = [whole(f"model.{number}", torch.full((size,), float(number))) for number, size in enumerate((10, 33, 200, 1, 1))]
    saver.save(1, many, {"step": 1})
    assert [buffer.numel() for buffer in saver.stager.buffers] == [64 + 192, 832, 128]
    saver.finish()
    assert all(torch.equal(tensor, many[int(name)].values) for name, tensor in read_weights(newest(run, pytest.fail)).items())


def test_without_a_copy_it_returns_when_all_is_done(run):
    saver = saver_of(run, async_save=False)
    saver.save(1, boxes(1), {"step": 1})
    assert saver.complete == 1
    assert saver.stager.buffers == []


def poll_for_seconds(saver):
    for _ in range(100):
        saver.poll()
        time.sleep(0.02)


def test_a_failure_is_told_once_and_at_the_next_look(run, monkeypatch):
    put(run, 1)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_write, "write_tensors", full)
    saver = saver_of(run)
    saver.save(2, boxes(2), {"step": 2})
    with pytest.raises(SaveFailed, match=r"the checkpoint of step 2 could not be written: .*No space left on device; free some space"):
        poll_for_seconds(saver)
    saver.poll()
    saver.finish()
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000001"]
    assert run.latest.read_text() == "checkpoints/step-00000001\n"
    monkeypatch.undo()
    saver.save(3, boxes(3), {"step": 3})  # and it can go on
    saver.finish()
    assert newest(run, pytest.fail).step == 3


PHASES = ["write_manifest", "put_in_place", "remove_old", "remove_leftovers"]


@pytest.mark.parametrize("phase", PHASES)
def test_an_error_in_any_phase_is_one_clear_failure(run, monkeypatch, phase):
    put(run, 1)

    def broken(*arguments):
        raise PermissionError(13, "Permission denied", "somewhere")

    monkeypatch.setattr(checkpoint_save, phase, broken)
    saver = saver_of(run, keep_last=1)
    saver.save(2, boxes(2), {"step": 2})
    complete = PHASES.index(phase) > 1
    with pytest.raises(SaveFailed, match="is complete, but older ones could not be removed" if complete else "could not be written"):
        saver.finish()
    monkeypatch.undo()
    assert newest(run, pytest.fail, repair=True).step == (2 if complete else 1)
    put(run, 3, keep_last=1)
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000003"]


def test_a_run_that_leaves_gives_up_a_save_that_hangs(run, monkeypatch):
    monkeypatch.setattr(checkpoint_save, "LEAVE_SECONDS", 0.1)
    slow_writer(monkeypatch, 0.6)
    saver = saver_of(run)
    saver.save(1, boxes(1), {"step": 1})
    begin = time.monotonic()
    saver.close()
    assert time.monotonic() - begin < 0.5
    time.sleep(0.8)  # the thread that wrote
    assert newest(run, pytest.fail) is None


# --------------------------------------------------------------------------------------------------------------- retention
def test_only_the_last_are_kept(run):
    for step in (1, 2, 3, 10):
        put(run, step, keep_last=2)
    assert [path.name for path in saved(run)] == ["step-00000003", "step-00000010"]
    put(run, 11, keep_last=0)
    assert len(saved(run)) == 3
    assert sorted(path.name for path in run.checkpoints.iterdir()) == [path.name for path in saved(run)]


def test_some_are_kept_for_ever(run):
    for step in range(2, 16, 2):
        put(run, step, keep_last=2, keep_every=6)
    assert [checkpoint_place.step_of(path) for path in saved(run)] == [6, 12, 14]


def test_old_ones_go_only_when_the_new_one_is_complete(run, monkeypatch):
    put(run, 1)
    put(run, 2)
    seen = []
    remove = checkpoint_save.remove_old

    def look(*arguments):
        seen.append((run.latest.read_text().strip(), [path.name for path in saved(run)]))
        remove(*arguments)

    monkeypatch.setattr(checkpoint_save, "remove_old", look)
    put(run, 3, keep_last=1)
    assert seen == [("checkpoints/step-00000003", ["step-00000001", "step-00000002", "step-00000003"])]
    assert [path.name for path in saved(run)] == ["step-00000003"]


# ------------------------------------------------------------------------------------------------------------- room, permission
def room(run, own_bytes=1000, steps=(0, 10), say=quiet, **settings):
    require_room(run, own_bytes, CheckpointConfig(**settings), steps, ALONE, say)


def test_room_and_permission_are_looked_at_first(tmp_path):
    run = RunFolder(tmp_path / "run")
    room(run)
    assert list(run.checkpoints.iterdir()) == []
    with pytest.raises(UserError, match=r"need 1e\+06 TB more there .*set run.folder to another disk"):
        room(run, own_bytes=10**18)
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    room(run, own_bytes=free // 3, every=1, keep_last=1)
    with pytest.raises(UserError, match=r"checkpoint\.keep_last=3"):
        room(run, own_bytes=free // 3, every=1, keep_last=3)
    room(run, own_bytes=free // 3, every=10, keep_last=3)  # there will be one only
    said = []
    room(run, own_bytes=free // 6, every=1, keep_every=2, keep_last=1, say=said.append)
    assert len(said) == 1
    assert "WARNING: checkpoint.keep_every=2 keeps about" in said[0]


def test_a_place_that_can_not_be_written(tmp_path):
    """A path below a regular file: permission bits do not bind root."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"can't be written to .*file/run/checkpoints \(Not a directory, rank 0\); set run.folder"):
        room(RunFolder(tmp_path / "file" / "run"))


@pytest.fixture
def small_files():
    """No file above 20 kB, as with a full quota."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_files")
def test_a_file_that_can_not_be_that_large(run):
    with pytest.raises(UserError, match=r"a file of 30 kB of rank 0, but this process may write 20 kB \(ulimit -f\)"):
        room(run, own_bytes=30_000)
    put(run, 1)
    saver = saver_of(run)
    saver.save(2, boxes(2, size=10_000), {"step": 2})
    with pytest.raises(SaveFailed, match=r"step 2 could not be written: .*File too large; free some space"):
        saver.finish()
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000001"]
    assert newest(run, pytest.fail).step == 1


def test_a_folder_that_vanishes_under_the_run(run, tmp_path):
    put(run, 1)
    saver = saver_of(run)
    os.rename(run.checkpoints, tmp_path / "gone")
    run.checkpoints.write_text("no folder")
    saver.save(2, boxes(2), {"step": 2})
    with pytest.raises(SaveFailed, match="step 2 could not be written: "):
        saver.finish()


# ------------------------------------------------------------------------------------------------------------------ damage
def test_nothing_saved(run):
    assert newest(run, quiet) is None


@pytest.mark.parametrize("repair", [False, True])
def test_checkpoints_that_are_gone_are_an_error_and_not_a_fresh_start(run, repair):
    put(run, 1)
    (run.checkpoints / "step-00000001").rename(run.path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"latest says that checkpoints were saved, but .* holds none; put them back"):
        newest(run, quiet, repair)
    (run.path / "elsewhere").rename(run.checkpoints / "step-00000001")
    assert newest(run, pytest.fail, repair).step == 1


DAMAGE = {
    "cut": lambda path: os.truncate(path / DATA, (path / DATA).stat().st_size - 1),
    "empty": lambda path: os.truncate(path / DATA, 0),
    "flipped": lambda path: flip(path / DATA),
    "flipped index": lambda path: flip(path / "tensors.json", 40),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "half a manifest": lambda path: os.truncate(path / "manifest.json", 30),
    "missing file": lambda path: (path / "meta.json").unlink(),
    "missing data": lambda path: (path / DATA).unlink(),
    "changed meta": lambda path: (path / "meta.json").write_text((path / "meta.json").read_text().replace('"step": 2', '"step": 3')),
}


def flip(path, at=-1):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
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
    assert [(one["kind"], one["step"]) for one in read_incidents(run.path)] == [("damaged_checkpoint", 1)]
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
        require_match(expected, found, "step-00000001")
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


@pytest.mark.parametrize("name", [DATA, "tensors.json", "meta.json", "manifest.json"])
def test_no_file_is_unpickled(run, name, tmp_path):
    """C77, with a manifest that fits: a forger writes one."""
    put(run, 1)
    path = run.checkpoints / "step-00000001"
    (path / name).write_bytes(pickle.dumps(Payload(tmp_path / "opened")))
    if name != "manifest.json":
        refit_manifest(path, name)
    with pytest.raises(CheckpointError):
        read_all(run)
    assert not (tmp_path / "opened").exists()


def refit_manifest(path, name):
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": (path / name).stat().st_size, "sha256": sha256_of(path / name)}
    (path / "manifest.json").write_text(json.dumps(manifest))


FORGED = {
    "a file elsewhere": lambda entry: entry["boxes"][0].__setitem__(0, "../../secret.safetensors"),
    "a file that is not listed": lambda entry: entry["boxes"][0].__setitem__(0, "rank-00009.safetensors"),
    "another dtype": lambda entry: entry.__setitem__("dtype", "object"),
    "negative offsets": lambda entry: entry["boxes"][0].__setitem__(1, [-5]),
    "a box of other sizes": lambda entry: entry["boxes"][0].__setitem__(2, [63]),
    "no numbers": lambda entry: entry.__setitem__("shape", "64"),
    "no boxes": lambda entry: entry.pop("boxes"),
    "part of it": lambda entry: entry["boxes"].clear(),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_index_is_refused(run, what):
    put(run, 1)
    path = run.checkpoints / "step-00000001"
    index = json.loads((path / "tensors.json").read_text())
    FORGED[what](index["model.w"])
    (path / "tensors.json").write_text(json.dumps(index))
    refit_manifest(path, "tensors.json")
    with pytest.raises(CheckpointError):
        read_all(run)


def test_a_manifest_names_files_of_a_checkpoint_only(run):
    put(run, 1)
    path = run.checkpoints / "step-00000001"
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["../../x"] = manifest["files"].pop(DATA)
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="which is no file of a checkpoint"):
        open_checkpoint(path)


def test_a_draft_that_a_killed_job_has_left_gets_into_no_checkpoint(run):
    draft = run.checkpoints / ".step-00000002.draft-0123456789abcdef"
    draft.mkdir(parents=True)
    (draft / "rank-00001.safetensors").write_bytes(b"older")
    put(run, 2)
    path = run.checkpoints / "step-00000002"
    assert [each.name for each in run.checkpoints.iterdir()] == [path.name]
    assert sorted(each.name for each in path.iterdir()) == ["manifest.json", "meta.json", DATA, "tensors.json"]


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
def test_killed_at_every_moment_of_a_save(tmp_path, again, monkeypatch):
    """Wherever the process dies, the newest complete checkpoint is found, the pointer names a complete one, and the next save cleans up."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # a killed process leaves what it has written; a lost machine would not
    start = RunFolder(tmp_path / "start")
    put(start, 1)
    put(start, 2)
    for count in range(1, 200):
        run = RunFolder(shutil.copytree(start.path, tmp_path / f"{count}"))
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
