import importlib
import sys
from pathlib import Path

import pytest
import torch

TOOLS = Path(__file__).parents[2] / "tools"
SMALL = ["--tokens", "96", "--max-length", "48", "--steps", "1", "--repeats", "1"]


@pytest.fixture
def bench(monkeypatch):
    pytest.importorskip("transformers", reason='pip install -e ".[hf]"')
    monkeypatch.syspath_prepend(str(TOOLS))
    threads = torch.get_num_threads()
    yield importlib.import_module("bench_step")
    torch.set_num_threads(threads)
    sys.modules.pop("bench_step")


@pytest.mark.peer
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_both_sides_agree_and_a_ratio_is_printed(bench, capsys, precision):
    assert bench.main([*SMALL, "--dtype", precision]) == 0
    said = capsys.readouterr().out
    for name in ("packed", "padded", "loop"):
        assert f"first step, {name}: loss" in said
        assert f"this / transformers {name}" in said
    assert said.count("(its fastest)") == 1


@pytest.mark.peer
def test_a_difference_ends_it(bench, monkeypatch):
    renamed = bench.renamed

    def wrong(tensors, model):
        found = renamed(tensors, model)
        found["model.layers.0.self_attn.q_proj.weight"] *= 2
        return found

    monkeypatch.setattr(bench, "renamed", wrong)
    with pytest.raises(SystemExit, match="of the first step differ"):
        bench.main([*SMALL, "--dtype", "fp32"])
