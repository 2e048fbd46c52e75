"""What the driver says of this machine's GPUs, and what is refused for it before ranks are started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megadcp.backends import gpu_probe
from megadcp.config.check import UserError
from megadcp.config.schema import PrecisionConfig


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Puts a program in front of all others that answers for the driver."""

    def put(script: str) -> None:
        program = Path(tmp_path) / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return put


@pytest.mark.parametrize(("script", "found"), [
    ('[ "$1 $2" = "--query-gpu=compute_cap --format=csv,noheader" ] && printf "9.0\\n9.0\\n"', [(9, 0), (9, 0)]),
    ("printf '8.9\\n12.0\\n'", [(8, 9), (12, 0)]),
    ("echo 'No devices were found'", []),
    ("echo '[N/A]'", []),
    ("echo 9.0; exit 9", []),
])  # fmt: skip
def test_what_the_driver_says(driver, script, found):
    driver(script)
    assert gpu_probe.capabilities() == found


def test_no_driver(monkeypatch):
    monkeypatch.setattr(gpu_probe, "QUERY", ("there-is-no-such-program",))
    assert gpu_probe.capabilities() == []
    gpu_probe.refuse(PrecisionConfig("fp8_current", "te"), "cuda")


@pytest.mark.parametrize(("format", "backend", "there", "told"), [
    ("fp8_current", "auto", [(8, 0), (8, 6)], "precision.format=fp8_current: this GPU has compute capability 8.6, .* legal here: bf16, fp32"),
    ("fp8_current", "torch", [(8, 0)], "has compute capability 8.0"),
    ("bf16", "te", [(8, 9)], r"precision.backend=te can't run here: .* this GPU has 8.9; set precision.backend=torch"),
    ("fp8_block", "te", [(8, 0)], "from Hopper on"),
    ("fp8_current", "te", [(7, 0), (9, 0)], ""),
    ("fp8_current", "auto", [(8, 9)], ""),
    ("fp8_block", "auto", [(8, 0)], ""),
    ("bf16", "auto", [(7, 0)], ""),
    ("fp8_current", "te", [], ""),
])  # fmt: skip
def test_what_is_refused(monkeypatch, format, backend, there, told):
    """A GPU that isn't visible may be the old one: only what none of them runs is refused here."""
    monkeypatch.setattr(gpu_probe, "capabilities", lambda: there)
    precision = PrecisionConfig(format, backend)
    for device in ("auto", "cuda"):
        if told:
            with pytest.raises(UserError, match=told):
                gpu_probe.refuse(precision, device)
        else:
            gpu_probe.refuse(precision, device)
    gpu_probe.refuse(precision, "cpu")


def test_nobody_is_asked_without_need(monkeypatch):
    monkeypatch.setattr(gpu_probe, "capabilities", lambda: pytest.fail("the driver was asked"))
    gpu_probe.refuse(PrecisionConfig("bf16", "auto"), "cuda")
    gpu_probe.refuse(PrecisionConfig("fp32", "torch"), "auto")
