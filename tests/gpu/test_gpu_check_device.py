"""tools/gpu_check.py with tiny sizes on a GPU: every section measures something. Skips without a device."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_tiny_sizes_on_a_gpu(tmp_path):
    command = [sys.executable, str(ROOT / "tools" / "gpu_check.py"), "--quick", "--seconds", "240", "--out", str(tmp_path / "report.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["device"]["cuda"]
    for name, section in report["sections"].items():
        assert [row for row in section["rows"] if "status" not in row], name
    assert all(row["ok"] for row in report["sections"]["correct"]["rows"] if "status" not in row)
    assert all(row["peak_ratio"] > 0 for row in report["sections"]["memory"]["rows"] if "status" not in row)
