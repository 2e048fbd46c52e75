"""tools/build_order.py as a person calls it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from megadcp.data.indexed import IndexedWriter

ROOT = Path(__file__).resolve().parents[2]


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "tools/build_order.py", *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


def test_the_order_of_a_run_is_on_disk_afterwards(tmp_path: Path) -> None:
    prefix = tmp_path / "corpus"
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_many(np.ones(300, np.uint16), [10] * 30)
    result = call(f"data.train=[{{prefix: {prefix}}}]", f"data.cache={tmp_path / 'cache'}", "run.steps=70")
    assert result.returncode == 0, result.stderr
    assert "corpus (train): 29 documents" in result.stdout
    assert f"kept in {tmp_path / 'cache'}" in result.stdout
    assert len(list((tmp_path / "cache").glob("*.order.npy"))) == 1


def test_a_request_that_can_not_be_met_is_one_line(tmp_path: Path) -> None:
    result = call(f"data.train=[{{prefix: {tmp_path / 'nothing'}}}]")
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert str(tmp_path / "nothing") in result.stderr
