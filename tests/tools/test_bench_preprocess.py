"""The preprocessing benchmark runs and writes its table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "benchmark.py"


@pytest.mark.slow
def test_a_small_run(tmp_path: Path) -> None:
    table = tmp_path / "table.md"
    small = ["--megabytes", "2", "--repeats", "1", "--kinds", "bpe", "--vocab", "2000", "--lines", "4000"]
    done = subprocess.run([sys.executable, str(TOOL), "preprocess", *small, "--out", str(table)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for name in ("encode", "encode + conversion", "this tool"):
        assert f"| bpe | {name} |" in table.read_text()
    refused = subprocess.run([sys.executable, str(TOOL), "preprocess", *small, "--vocab", "900000"], capture_output=True, text=True, timeout=300)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: vocab=900000")
