"""run.yaml: every value survives, nothing needs Hydra, and faults are named."""

import dataclasses
import math
import os
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from megadcp.config.check import UserError
from megadcp.config.load import compose
from megadcp.config.run_file import differences, dump_run, flat, from_dict, load_run, to_dict, unknown_setting
from megadcp.config.schema import Config, settings


def values(hint: object) -> st.SearchStrategy:
    """Any value of a setting's type."""
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return st.builds(hint, **{field.name: values(hints[field.name]) for field in dataclasses.fields(hint)})
    if typing.get_origin(hint) is tuple:
        return st.lists(values(typing.get_args(hint)[0]), max_size=3).map(tuple)
    if typing.get_origin(hint) is dict:
        return st.dictionaries(values(str), values(typing.get_args(hint)[1]), max_size=3)
    if typing.get_origin(hint) is typing.Union:
        return st.none() | values(typing.get_args(hint)[0])
    return {
        bool: st.booleans(),
        int: st.integers(-(2**70), 2**70),
        float: st.floats(allow_nan=False),
        str: st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: text != "???"),
    }[hint]


@limits(deadline=None, max_examples=40)
@given(values(Config))
def test_any_config_survives_exactly(config: Config) -> None:
    text = yaml.safe_dump(to_dict(config), sort_keys=False)
    back = from_dict(yaml.safe_load(text))
    assert back == config
    assert [type(value) for value in flat(back).values()] == [type(value) for value in flat(config).values()]


@pytest.mark.parametrize("number", [1e-4, 3e-05, 6e-3, 1e-8, 480e12, 1e16, 0.1, 5e-324, 1.7976931348623157e308, 1 / 3, 1e22])
def test_floats_survive_a_file(tmp_path: Path, number: float) -> None:
    config = compose()
    config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=number))
    dump_run(config, tmp_path / "run.yaml")
    assert load_run(tmp_path / "run.yaml").optim.lr == number
    assert load_run(tmp_path) == config, "a folder stands for its run.yaml"


@pytest.mark.parametrize("experiment", ["quickstart", "gpt_1b", "gpt_8b", "gpt_70b"])
def test_experiments_survive_a_file(tmp_path: Path, experiment: str) -> None:
    config = compose([f"experiment={experiment}"])
    dump_run(config, tmp_path / "deep" / "er" / "run.yaml")
    assert load_run(tmp_path / "deep" / "er" / "run.yaml") == config


def test_a_number_written_by_hand(tmp_path: Path) -> None:
    dump_run(compose(), tmp_path / "run.yaml")
    text = (tmp_path / "run.yaml").read_text(encoding="utf-8").replace("lr: 0.002", "lr: 2e-3")
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    assert load_run(tmp_path / "run.yaml").optim.lr == 2e-3


def test_a_failing_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dump_run(compose(), tmp_path / "run.yaml")
    before = (tmp_path / "run.yaml").read_bytes()

    def full(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        dump_run(compose(["run.seed=7"]), tmp_path / "run.yaml")
    assert (tmp_path / "run.yaml").read_bytes() == before


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("model:\n  hiden: 3\nrun:\n  name: x\n", ["run.yaml", "model.hiden", "nearest: model.hidden"]),
        ("model:\n  hidden: wide\n", ["model.hidden=wide", "whole number"]),
        ("model:\n  hidden: true\n", ["model.hidden=True", "whole number"]),
        ("model:\n  hidden: 1.5\n", ["model.hidden=1.5", "whole number"]),
        ("model:\n  tied: 1\n", ["model.tied=1", "true or false"]),
        ("optim:\n  lr: [1]\n", ["optim.lr=[1]", "number"]),
        ("optim:\n  lr: null\n", ["optim.lr=None", "number"]),
        ("run:\n  name: 5\n", ["run.name=5", "text"]),
        ("model: 3\n", ["model=3", "group"]),
        ("cluster:\n  environment: [A]\n", ["cluster.environment=['A']", "names to values"]),
        ("cluster:\n  environment: {NCCL_DEBUG: 1}\n", ["cluster.environment.NCCL_DEBUG=1", "text"]),
        ("- 1\n", ["no settings"]),
        ("a: [\n", ["YAML"]),
        ("run:\n  steps: 3\n", ["run.name", "must be given"]),
    ],
)
def test_faulty_files_are_named(tmp_path: Path, text: str, parts: list[str]) -> None:
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as error:
        load_run(tmp_path / "run.yaml")
    assert "\n" not in str(error.value)
    for part in parts:
        assert part in str(error.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run\.yaml does not exist"):
        load_run(tmp_path)


def test_differences_by_full_name() -> None:
    old, new = compose(), compose(["optim.lr=1e-3", "data.train=[{prefix: a}, {prefix: b}]", "model.rope.theta=5"])
    assert differences(old, old) == {}
    found = differences(old, new)
    assert found["optim.lr"] == (0.002, 0.001)
    assert found["model.rope.theta"] == (10000.0, 5.0)
    assert found["data.train[1].prefix"] == (None, "b")
    assert set(found) == {
        "optim.lr", "model.rope.theta", "data.train[0].prefix", "data.train[0].name",
        "data.train[1].prefix", "data.train[1].weight", "data.train[1].name",
    }  # fmt: skip


def test_names_of_settings() -> None:
    for name, _ in settings():
        assert unknown_setting(name) is None
    assert unknown_setting("data.train[3].prefix") is None
    assert unknown_setting("model.rope") is None
    assert unknown_setting("cluster.environment.NCCL_DEBUG") is None
    for wrong in ("model.rope.theta.x", "data.train.prefix", "modelx", "model.", ""):
        assert unknown_setting(wrong), wrong


def test_infinity_is_kept_for_check_to_refuse() -> None:
    data = to_dict(compose())
    data["optim"]["lr"] = math.inf
    assert from_dict(data).optim.lr == math.inf


def test_loading_needs_no_hydra(tmp_path: Path) -> None:
    dump_run(compose(), tmp_path / "run.yaml")
    code = (
        "import sys; sys.modules.update(hydra=None, omegaconf=None, torch=None)\n"
        "from megadcp.config.run_file import load_run\n"
        f"print(load_run({str(tmp_path)!r}).run.name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "quickstart"
