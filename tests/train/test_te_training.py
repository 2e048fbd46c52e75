"""A whole run on the Transformer Engine backend, with the recording stand-in: losses as with torch, fp8's rows fit, a run goes on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from train_helpers import config, write_corpus

from megadcp.backends import choose
from megadcp.train import describe
from megadcp.train.loop import FINISHED, train
from megadcp.train.metrics import read_metrics

sys.path.insert(0, str(Path(__file__).parents[1] / "backends"))
import te_fake


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("data"))


@pytest.fixture
def recorder(monkeypatch):
    """From here on Transformer Engine is here."""
    found = te_fake.Recorder(unit=16)
    choice = choose.Choice("a stand-in", te_fake.make(found))
    for module in (choose, describe):
        monkeypatch.setattr(module, "choose", lambda precision, device: choice)
    return found


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]


def asked(prefix: str, steps: int, format: str, backend: str = "auto"):
    run = {"steps": steps, "validate_every": 0, "validate_tokens": 256, "sample_prompt": "def", "sample_tokens": 3, "name": "test"}
    return config(prefix, precision={"format": format, "backend": backend}, run=run, optim={"schedule": "constant"})


def test_a_run(prefix, tmp_path, recorder, monkeypatch, capsys):
    """bf16 through other modules: stopped and continued it ends with the same bits, and its losses are the torch backend's up to rounding."""
    assert train(asked(prefix, 6, "bf16"), tmp_path / "te") == FINISHED
    assert "backend: te (a stand-in)" in capsys.readouterr().out
    assert recorder.of("attention")
    assert all(one["cp"] == 1 for one in recorder.of("attention"))
    assert train(asked(prefix, 3, "bf16"), tmp_path / "again") == FINISHED
    assert train(asked(prefix, 6, "bf16"), tmp_path / "again") == FINISHED
    found = losses(tmp_path / "te")
    assert losses(tmp_path / "again") == found
    monkeypatch.undo()
    assert train(asked(prefix, 6, "bf16", "torch"), tmp_path / "torch") == FINISHED
    assert "backend: torch (as precision.backend says)" in capsys.readouterr().out
    wanted = losses(tmp_path / "torch")
    assert len(found) == 6
    assert max(abs(one - other) for one, other in zip(found, wanted, strict=True)) < 0.02


def test_fp8_rows_fit(prefix, tmp_path, recorder):
    """The stand-in refuses rows that fp8 could not multiply: in training, and in validation. The sample is written in bf16."""
    assert train(asked(prefix, 3, "fp8_current"), tmp_path / "fp8") == FINISHED
    linears = recorder.of("linear")
    assert linears
    assert all(one["fp8"] for one in linears if one["grad"])
    assert {one["fp8"] for one in linears if not one["grad"]} == {True, False}
    outer = [one for one in recorder.of("enter") if one["depth"] == 1 and not one["again"]]
    assert len({one["module"] for one in recorder.of("attention")}) * len(outer) == len([one for one in recorder.of("attention") if not one["again"]])
    assert torch.is_grad_enabled()
