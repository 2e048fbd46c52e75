"""Sweeps whose jobs other processes run: the launcher's settings compose, and a job that fails is not reported as done."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megadcp.config.load import find_configs

PROGRAM = Path(find_configs()).parent / "pretrain_gpt.py"
pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="hydra-submitit-launcher is not installed")


def call(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: text for name, text in os.environ.items() if not name.startswith("SLURM")}
    return subprocess.run([sys.executable, str(PROGRAM), *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_slurm_jobs_are_as_large_as_their_runs(tmp_path: Path) -> None:
    asked = ["cluster.nodes=2", "cluster.processes=4", "hydra.launcher.partition=gpu"]
    done = call(tmp_path, "hydra/launcher=slurm", *asked, "--cfg", "all", "--resolve")
    assert done.returncode == 0, done.stderr
    launcher = yaml.safe_load(done.stdout)["hydra"]["launcher"]
    assert launcher["_target_"].endswith("SlurmLauncher")
    assert (launcher["nodes"], launcher["tasks_per_node"], launcher["name"], launcher["partition"]) == (2, 4, "quickstart", "gpu")
    assert launcher["submitit_folder"] == "runs/.sweep/slurm/%j"


@pytest.mark.parametrize(("seconds", "code"), [("1", 1), ("x", 2)])
def test_a_job_that_fails_elsewhere_fails_the_sweep(tmp_path: Path, seconds: str, code: int) -> None:
    """The job's process has no such corpus; what is wrong with the request itself is refused before any job is started."""
    run = ["data=corpus", "data.train=[{prefix: nowhere}]", "data.tokenizer.kind=bytes", "data.tokenizer.path=''", "run.sample_prompt=''"]
    done = call(tmp_path, "-m", "hydra/launcher=submitit_local", *run, "run.name=a,b", f"run.steps={seconds}", "optim.warmup_steps=0")
    assert done.returncode == code, done.stdout + done.stderr
    assert ("nowhere" in done.stderr + done.stdout) == (code == 1)
    assert (tmp_path / "runs/.sweep").exists() == (code == 1)
