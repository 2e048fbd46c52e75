import importlib
import re
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
SMALL = ["--layers", "1", "--hidden", "64", "--vocab", "256", "--tokens", "64", "--steps", "2", "--repeats", "1"]


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    yield importlib.import_module("bench_checkpoint")
    for name in ("bench_checkpoint", "bench_ranks", "bench_step", "benchmark"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("more", [[], ["--ranks", "2", "--precision", "bf16"]], ids=["one rank", "two ranks"])
def test_everybody_saves_and_loads_the_same_state(bench, tmp_path, capsys, more):
    assert bench.main([*SMALL, *more, "--folder", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    rows = {line.split("|")[1].strip(): line for line in said.splitlines() if re.match(r"\| (this|torch|dcp)", line)}
    assert rows.keys() == {"this", "this, async", "this, unchecked", "torch.save", "torch.load", "dcp"}
    sizes = [float(rows[name].rstrip(" |").split("|")[-1]) for name in ("this, async", "torch.save")]
    assert all(1 <= size < 1.6 for size in sizes)  # of a state this small, the rest is not small beside it
    assert ("A step takes" in said) == (not more)
    assert list(tmp_path.iterdir()) == []


def test_what_can_not_be_run(bench, capsys):
    assert bench.main(["--hidden", "100"]) == 2
    assert "multiple of 64" in capsys.readouterr().err
