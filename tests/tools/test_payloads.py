"""C77: no file that a command reads can make it run code, whatever is written into it: a pickle, or YAML that names a call."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "train"))
from train_helpers import config, write_corpus  # noqa: E402

from megadcp.config.run_file import dump_run  # noqa: E402
from megadcp.train.loop import train  # noqa: E402

NAMES = ("report", "timeline", "inspect_data", "convert_checkpoint", "generate", "eval_model")
BESIDE = ("report_page", "report_pictures", "report_records", "plan_files")
FOR_PEOPLE = {"loss.svg", "lengths.svg", "sample.txt", ".lock"}  # read by nobody
NEEDED = {"corpus.idx", "corpus.bin", "hf/config.json", "hf/model.safetensors", "run/run.yaml"}


class Payload:
    """What a pickle of it does: make a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.marker),)


@pytest.fixture(scope="module")
def tools() -> Iterator[dict[str, ModuleType]]:
    sys.path.insert(0, str(ROOT / "tools"))
    for name in (*NAMES, *BESIDE):
        sys.modules.pop(name, None)
    yield {name: importlib.import_module(name) for name in NAMES}
    sys.path.remove(str(ROOT / "tools"))
    for name in (*NAMES, *BESIDE):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tools: dict[str, ModuleType]) -> Path:
    """A folder with a corpus, a run with one checkpoint, and its export."""
    folder = tmp_path_factory.mktemp("made")
    setup = config(write_corpus(folder), run={"folder": str(folder), "name": "run", "steps": 2}, checkpoint={"every": 2}, log={"timeline_every": 1})
    dump_run(setup, folder / "run" / "run.yaml")
    assert train(setup, folder / "run") == 0
    assert tools["convert_checkpoint"].main(["to-hf", str(folder / "run"), str(folder / "hf")]) == 0
    return folder


def every_command(tools: dict[str, ModuleType], folder: Path) -> dict[str, int]:
    """Name -> exit code of each, as a user calls it."""
    run, model, out = str(folder / "run"), str(folder / "hf"), str(folder / "out")
    calls = {
        "report": [run], "timeline": [run], "inspect_data": [str(folder / "corpus")], "to-hf": ["to-hf", run, out + "1"],
        "from-hf": ["from-hf", model, out + "2"], "generate": [run, "--prompt", "a", "--tokens", "1"],
        "generate from hf": [model, "--prompt", "a", "--tokens", "1"], "eval_model": [run, "--tokens", "200"],
    }  # fmt: skip
    of = {"to-hf": "convert_checkpoint", "from-hf": "convert_checkpoint", "generate from hf": "generate"}
    return {name: tools[of.get(name, name)].main(arguments) for name, arguments in calls.items()}


def files_of(folder: Path) -> list[str]:
    found = [path for path in folder.rglob("*") if path.is_file() and path.name not in FOR_PEOPLE and path.parent.name != "ranks"]
    return sorted(str(path.relative_to(folder)) for path in found)


def test_pickles_in_every_file_run_nothing(made: Path, tools: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = files_of(made)
    assert {*NEEDED, "run/latest"} <= set(names)
    assert sum(name.startswith("run/checkpoints/") for name in names) >= 4
    for number, name in enumerate(names):
        folder, marker = tmp_path / f"{number}", tmp_path / "marker"
        shutil.copytree(made, folder)
        text = (folder / "run/run.yaml").read_text(encoding="utf-8").replace(str(made), str(folder))
        (folder / "run/run.yaml").write_text(text, encoding="utf-8")
        (folder / name).write_bytes(pickle.dumps(Payload(marker)))
        capsys.readouterr()
        codes = every_command(tools, folder)
        assert not marker.exists(), name
        error = capsys.readouterr().err
        assert "Traceback" not in error
        assert set(codes.values()) <= {0, 1, 2}, (name, codes)
        if name in NEEDED or name.startswith("run/checkpoints/"):
            assert any(codes.values()), f"{name} is broken, and nobody has said so"
        shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["run.yaml", "experiment"])
def test_yaml_that_names_a_call(made: Path, tools: dict[str, ModuleType], tmp_path: Path, name: str) -> None:
    from megadcp.config.check import UserError
    from megadcp.config.load import compose

    text = f"!!python/object/apply:os.mkdir ['{tmp_path / 'marker'}']"
    if name == "experiment":
        shutil.copytree(ROOT / "configs", tmp_path / "configs")
        (tmp_path / "configs/experiment/evil.yaml").write_text(f"# @package _global_\nrun:\n  name: {text}\n", encoding="utf-8")
        with pytest.raises(UserError, match="evil"):
            compose(["experiment=evil"], tmp_path / "configs")
    else:
        shutil.copytree(made, tmp_path / "all")
        (tmp_path / "all/run/run.yaml").write_text(f"run:\n  name: {text}\n", encoding="utf-8")
        codes = every_command(tools, tmp_path / "all")
        assert all(codes[each] == 2 for each in ("report", "to-hf", "generate", "eval_model")), codes
    assert not (tmp_path / "marker").exists()


def test_a_run_that_goes_on_runs_nothing(made: Path, tmp_path: Path) -> None:
    """The trainer's own reading: all of a checkpoint's files at once, and what lies beside them."""
    folder, marker = tmp_path / "run", tmp_path / "marker"
    shutil.copytree(made / "run", folder)
    for path in folder.rglob("*"):
        if path.is_file() and path.name != "run.yaml":
            path.write_bytes(pickle.dumps(Payload(marker)))
    setup = config(str(made / "corpus"), run={"folder": str(tmp_path), "name": "run", "steps": 4}, checkpoint={"every": 2})
    with contextlib.suppress(Exception):
        train(setup, folder)
    assert not marker.exists()
