"""Losses of validation sets, of a run and of what was exported from it; lm-eval through a stand-in."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "train"))
from train_helpers import config, write_corpus  # noqa: E402

from megadcp.config.run_file import dump_run  # noqa: E402
from megadcp.data.indexed import IndexedWriter  # noqa: E402
from megadcp.interop import hf  # noqa: E402
from megadcp.train.loop import train  # noqa: E402
from megadcp.train.metrics import read_metrics  # noqa: E402
from megadcp.train.weights import export_of, open_weights  # noqa: E402

spec = importlib.util.spec_from_file_location("tool_eval_model", ROOT / "tools" / "eval_model.py")
eval_model = importlib.util.module_from_spec(spec)
spec.loader.exec_module(eval_model)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    setup = config(write_corpus(folder), run={"steps": 20}, checkpoint={"every": 10})
    (folder / "run").mkdir()
    dump_run(setup, folder / "run" / "run.yaml")
    assert train(setup, folder / "run") == 0
    return folder / "run"


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "model"
    hf.write_folder(export_of(open_weights(run)), folder, hf.Options())
    return folder


@pytest.fixture
def call(capsys):
    def call(*argv) -> tuple[int, list[str], str]:
        capsys.readouterr()
        code = eval_model.main([str(each) for each in argv])
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err

    return call


def losses(run) -> dict[int, float]:
    return {row["step"]: row["validation_loss"] for row in read_metrics(run / "metrics.jsonl") if "validation_loss" in row}


@pytest.mark.parametrize("step", [10, 20])
def test_the_loss_is_the_one_that_training_reported(run, call, tmp_path, step):
    code, out, err = call(run, "--step", step, "--json", tmp_path / "found.json")
    assert (code, err) == (0, "")
    assert out[1].startswith("words: loss ")
    found = json.loads((tmp_path / "found.json").read_text())["validation"]["words"]
    assert found["loss"] == pytest.approx(losses(run)[step], rel=1e-5)
    assert found["perplexity"] == pytest.approx(np.exp(found["loss"]))


def test_an_export_has_the_same_loss(run, exported, call, tmp_path):
    for name, argv in (("a", (run,)), ("b", (exported, "--data", run))):
        assert call(*argv, "--tokens", 0, "--json", tmp_path / name)[0] == 0
    a, b = (json.loads((tmp_path / name).read_text())["validation"]["words"] for name in ("a", "b"))
    assert a == b
    assert a["targets"] > 600  # the whole set, more than run.validate_tokens


def test_packs_do_not_change_the_loss(run, call, monkeypatch, tmp_path):
    for size in (1, 200, 1 << 20):
        monkeypatch.setattr(eval_model, "PACK_TOKENS", size)
        call(run, "--json", tmp_path / str(size))
    found = [json.loads((tmp_path / str(size)).read_text())["validation"]["words"]["loss"] for size in (1, 200, 1 << 20)]
    assert found == pytest.approx([found[0]] * 3, rel=1e-6)
    assert list(eval_model.packs_of(np.array([5, 3, 9, 1, 1]), 8)) == [[0, 1], [2], [3, 4]]
    assert list(eval_model.packs_of(np.array([], dtype=np.int64), 8)) == []


def test_wrong_requests(run, exported, call, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    for argv, message in (
        ((exported,), "is no run, so it has no validation sets; name a run that has: --data"),
        ((run, "--step", 7), "there are: 10, 20"),
        ((run, "--skip-loss"), "name tasks"),
        ((run, "--tokens", -1), "--tokens -1"),
        ((run, "--lm-eval", "piqa"), 'pip install "lm-eval[hf]"'),
        ((tmp_path / "none",), "is not a folder"),
    ):
        code, out, err = call(*argv)
        assert (code, out) == (2, [])
        assert message in err
        assert err.count("\n") == 1


def test_data_of_another_tokenizer_is_refused(run, exported, call, tmp_path):
    with IndexedWriter(str(tmp_path / "other"), np.dtype(np.uint16)) as writer:
        for _ in range(20):
            writer.add(np.array([1000, 1001, 5]))
        writer.finish()
    setup = config(str(tmp_path / "other"))
    dump_run(setup, tmp_path / "run" / "run.yaml")
    code, _, err = call(exported, "--data", tmp_path / "run")
    assert code == 2
    assert "has token 1001, but the model knows 260" in err


@pytest.mark.parametrize("which", ["run", "exported"])
def test_lm_eval_gets_the_exported_model(run, exported, call, monkeypatch, tmp_path, which):
    seen = {}

    def simple_evaluate(**asked):
        seen.update(asked)
        folder = Path(asked["model_args"]["pretrained"])
        seen["files"] = sorted(path.name for path in folder.iterdir())
        return {"results": {"piqa": {"alias": "piqa", "acc,none": 0.5, "acc_stderr,none": 0.01}}}

    monkeypatch.setitem(sys.modules, "lm_eval", types.SimpleNamespace(simple_evaluate=simple_evaluate))
    argv = ("--lm-eval", "piqa, hellaswag", "--limit", 4, "--num-fewshot", 2, "--skip-loss", "--json", tmp_path / "found.json")
    code, out, err = call(run if which == "run" else exported, "--device", "cpu", *argv)
    assert (code, err) == (0, "")
    assert out == ["piqa: acc 0.5000 | acc_stderr 0.0100"]
    assert json.loads((tmp_path / "found.json").read_text())["lm_eval"] == {"piqa": {"acc": 0.5, "acc_stderr": 0.01}}
    assert (seen["model"], seen["tasks"], seen["num_fewshot"], seen["limit"], seen["device"]) == ("hf", ["piqa", "hellaswag"], 2, 4.0, "cpu")
    assert seen["model_args"]["dtype"] == "float32"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(seen["files"])
    folder = Path(seen["model_args"]["pretrained"])
    assert folder.exists() is (which == "exported")  # a temporary export is removed again
