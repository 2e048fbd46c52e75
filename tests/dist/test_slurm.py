"""Jobs on a real SLURM of four emulated nodes: stopped at the time limit, queued again, gone on; preempted; side by side; a node that dies."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import INSTALL, MiniSlurm, missing

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/train"))

from train_helpers import write_corpus  # noqa: E402

from megadcp.data.indexed import IndexedReader  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=f"no SLURM here ({', '.join(missing())} not found); as root: {INSTALL}"),
]
START_SECONDS = 120.0  # in which ranks start and make their first steps on a busy machine
MODEL = ["layers=4", "hidden=32", "heads=4", "kv_heads=2", "head_dim=8", "ffn=64", "vocab=260"]
RUN = [
    *(f"model.{each}" for each in MODEL), "data=corpus", "data.train=[{prefix: corpus}]", "data.tokenizer.kind=bytes", "data.tokenizer.path=''",
    "data.max_length=256", "data.tokens_per_step=2048", "optim.schedule=constant", "optim.warmup_steps=0", "run.validate_every=0",
    "run.sample_prompt=''", "log.every=1", "cluster.device=cpu", "cluster.threads=1", "cluster.slurm.head=127.0.0.1",
    "cluster.slurm.exclusive=false", "cluster.slurm.cores=2", "cluster.slurm.time=1:00:00",
]  # fmt: skip
FOUR_NODES = ["cluster.nodes=4", "cluster.processes=2", "parallel.tp=2", "parallel.pp=2"]  # 2 lanes
TWO_NODES = ["cluster.nodes=2", "cluster.processes=2", "parallel.tp=2"]
ENDLESS = "run.steps=100000"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("slurm")
    write_corpus(made, 400)
    return made


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MiniSlurm]:
    with MiniSlurm(tmp_path_factory.mktemp("mini")) as started:
        yield started


class Job:
    """A run queued by tools/submit.py."""

    def __init__(self, slurm: MiniSlurm, folder: Path, name: str, *overrides: str) -> None:
        self.slurm, self.run = slurm, folder / "runs" / name
        command = [sys.executable, str(ROOT / "tools/submit.py"), *RUN, f"run.name={name}", *overrides, "--detach"]
        environment = {**slurm.environment, "PYTHONPATH": os.pathsep.join([str(ROOT), slurm.environment.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        self.number = done.stderr.split("job ")[1].split()[0]

    def log(self) -> str:
        path = self.run / "slurm" / f"{self.run.name}-{self.number}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def state(self) -> dict[str, str]:
        return self.slurm.job(self.number)

    def is_in(self, *states: str) -> bool:
        return self.state()["JobState"] in states

    def wait_for_log(self, text: str, seconds: float = START_SECONDS) -> None:
        """Wait until the log says it."""

        def there() -> bool:
            assert not self.is_in("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL") or text in self.log(), self.log()[-6000:]
            return text in self.log()

        try:
            self.slurm.wait_for(there, f"{text!r} in the log", seconds)
        except TimeoutError:
            raise AssertionError(f"{text!r} never came:\n{self.log()[-6000:]}") from None

    def wait_for_state(self, *states: str, seconds: float = START_SECONDS) -> None:
        self.slurm.wait_for(lambda: self.is_in(*states), f"job {self.number} in {states}, it is in {self.state()}\n{self.log()[-3000:]}", seconds)

    def end(self) -> None:
        """End it as a user does."""
        self.slurm.run("scancel", self.number)
        self.wait_for_state("CANCELLED", "FAILED", "COMPLETED", seconds=60)

    def losses(self) -> dict[int, float]:
        """Loss of every step; two rows of a step must be the same."""
        found: dict[int, float] = {}
        for row in self.rows():
            if "loss" in row:
                assert row["step"] not in found, f"step {row['step']} is there twice"
                found[row["step"]] = row["loss"]
        return found

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]

    def checkpoints(self) -> list[int]:
        return sorted(int(each.name.removeprefix("step-")) for each in (self.run / "checkpoints").glob("step-*"))


def test_a_run_on_four_nodes_is_stopped_at_its_time_limit_and_goes_on(slurm: MiniSlurm, folder: Path) -> None:
    """C65. SLURM itself sends the signal before the limit; the curve of the two jobs is that of a run that nobody stopped."""
    limit = ["cluster.slurm.time=0:02:00", "cluster.slurm.stop_before=40"]  # SLURM looks twice a minute: the signal comes 50 to 80 s after the start
    job = Job(slurm, folder, "stopped", *FOUR_NODES, ENDLESS, *limit)
    job.wait_for_log("ended with exit code 75")
    log = job.log()
    # The name of the signal, or "a signal to another rank" when that one saw it a step sooner.
    stopped = int(re.findall(r"stopped by (?:SIGUSR1|a signal to another rank) after step ([\d,]+)", log)[0].replace(",", ""))
    assert "layout: 8 ranks: 2 lanes, tp 2" in log
    assert f"saved {job.run.relative_to(folder)}/checkpoints/step-{stopped:08d}" in log
    assert job.checkpoints() == [stopped]
    slurm.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=60")  # a busy machine may need more than a minute for its start
    job.wait_for_log(f"step {stopped + 3}/")
    job.end()
    assert job.state()["Restarts"] == "1", "queued again once, and not after it was cancelled"
    log = job.log()
    assert log.count("ended with exit code 75") == 1
    assert ", start 2, on n[1-4]" in log
    assert f"going on after step {stopped} of 100,000" in log
    losses = job.losses()
    last = max(losses)
    assert last > stopped
    assert sorted(losses) == list(range(1, last + 1))

    whole = Job(slurm, folder, "whole", *FOUR_NODES, f"run.steps={last}")
    whole.wait_for_state("COMPLETED", "FAILED", seconds=300)
    assert whole.is_in("COMPLETED"), whole.log()[-6000:]
    assert "Run whole is finished" in whole.log()
    assert json.loads((whole.run / "result.json").read_text(encoding="utf-8"))["steps"] == last
    assert whole.checkpoints() == [last]
    assert whole.state()["Restarts"] == "0"
    unbroken = whole.losses()
    assert unbroken[last] < unbroken[1] / 1.5, "it learns"
    assert losses == unbroken


def test_a_preempted_run_saves_and_is_queued_again(slurm: MiniSlurm, folder: Path) -> None:
    job = Job(slurm, folder, "preempted", *TWO_NODES, ENDLESS)
    job.wait_for_log("step 2/")
    urgent = slurm.run("sbatch", "--parsable", "--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap", "sleep 1").strip()
    job.wait_for_log("ended with exit code 75", 60)
    slurm.wait_for(lambda: slurm.job(urgent)["JobState"] == "COMPLETED", "the urgent job", 60)
    assert job.state()["Restarts"] == "1"
    (saved,) = job.checkpoints()
    job.wait_for_log(f"going on after step {saved} of 100,000")
    job.end()
    assert job.state()["Restarts"] == "1"


def test_two_runs_side_by_side_on_one_node(slurm: MiniSlurm, folder: Path) -> None:
    """Each finds its own ranks: the same run alone gives the same losses."""
    one_node = ["cluster.nodes=1", "cluster.processes=2", "run.steps=30", "cluster.slurm.options=['--nodelist=n1']"]
    jobs = [Job(slurm, folder, name, *one_node, f"run.seed={seed}") for name, seed in (("left", 1), ("right", 2), ("alone", 1))]
    for job in jobs:
        job.wait_for_state("COMPLETED", "FAILED", seconds=200)
        assert job.is_in("COMPLETED"), job.log()[-6000:]
        assert job.state()["NodeList"] == "n1"
    spans = [(job.state()["StartTime"], job.state()["EndTime"]) for job in jobs[:2]]
    assert max(start for start, _ in spans) < min(end for _, end in spans), "at the same time"
    left, right, alone = (job.losses() for job in jobs)
    assert left == alone
    assert left != right


def test_a_node_that_dies_ends_the_job_which_goes_on_elsewhere(slurm: MiniSlurm, folder: Path) -> None:
    job = Job(slurm, folder, "dying", *TWO_NODES, ENDLESS, "checkpoint.every=2", "cluster.slurm.options=['--exclude=n1']")
    job.wait_for_log("checkpoints/step-00000002")
    assert job.state()["NodeList"] == "n[2-3]"
    assert slurm.processes_of("n2")
    assert slurm.processes_of("n3")
    slurm.kill_node("n3")
    try:
        slurm.wait_for(lambda: job.state()["Restarts"] == "1", "the end of the job", 90)
        slurm.wait_for(lambda: not slurm.processes_of("n2") or job.is_in("RUNNING"), "the end of all ranks", 30)
        assert "Node failure on n3" in job.log()
        job.wait_for_log("going on after step ")
        assert job.state()["NodeList"] == "n[2,4]"
        job.end()
    finally:
        slurm.start_node("n3")


def test_preprocessing_as_an_array_of_jobs(slurm: MiniSlurm, folder: Path) -> None:
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": f"{number} " + "word " * (number % 37)}) + "\n" for number in range(500)))
    given = ["--input", "text.jsonl", "--tokenizer-kind", "bytes", "--append-eod"]
    tools, env = ROOT / "tools", {**slurm.environment, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, tools / "preprocess_data.py", *given, "--output-prefix", "alone"], cwd=folder, check=True, capture_output=True)
    command = [sys.executable, tools / "preprocess_array.py", *given, "--output-prefix", "array", "--shards", "3", "--time", "0:10:00"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "array: 500 documents" in done.stdout
    for ending in (".bin", ".idx", ".json"):
        assert (folder / f"array{ending}").read_bytes() == (folder / f"alone{ending}").read_bytes()
    assert IndexedReader(folder / "array").documents == 500
    assert not list((folder / "array.shards").glob("*.bin")), "the pieces are removed"


def test_bad_preprocessing_ends_with_the_reason(slurm: MiniSlurm, folder: Path) -> None:
    (folder / "bad.jsonl").write_text(json.dumps({"text": "good"}) + "\n{bad\n", encoding="utf-8")
    command = [sys.executable, ROOT / "tools/preprocess_array.py", "--input", "bad.jsonl", "--tokenizer-kind", "bytes", "--output-prefix", "none"]
    command += ["--shards", "2", "--time", "0:10:00"]
    env = {**slurm.environment, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=180)
    assert done.returncode == 1
    assert "bad.jsonl:2" in done.stdout
    assert "jobs failed; the same command goes on" in done.stdout
    assert not (folder / "none.bin").exists()


def test_a_sweep_is_one_job_for_each_run(slurm: MiniSlurm, folder: Path) -> None:
    """By hydra-submitit-launcher, on two nodes each: srun starts the ranks, without torchrun."""
    run = [each for each in RUN if not each.startswith("cluster.slurm.")] + ["cluster.nodes=2", "cluster.processes=1", "run.steps=2"]
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), "-m", "hydra/launcher=slurm", "hydra.launcher.cpus_per_task=1", *run]
    command += ["hydra.launcher.timeout_min=10", "run.name=high,low", "run.seed=3"]
    environment = {**slurm.environment, "PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1"}  # the nodes' names lead nowhere
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    for name in ("high", "low"):
        assert json.loads((folder / "runs" / name / "result.json").read_text(encoding="utf-8"))["steps"] == 2
    said = [path.read_text(encoding="utf-8") for path in folder.glob("runs/.sweep/slurm/*/*_log.out")]
    assert sum("layout: 2 ranks: 2 lanes" in each for each in said) == 2


def test_more_than_the_partition_has(slurm: MiniSlurm, folder: Path) -> None:
    command = [sys.executable, str(ROOT / "tools/submit.py"), *RUN, "run.name=refused", "cluster.nodes=3", "cluster.slurm.partition=small"]
    command += ["cluster.slurm.time=0:20:00", "cluster.slurm.stop_before=60"]
    done = subprocess.run(command, cwd=folder, env=slurm.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: cluster.nodes=3 is more than the 2 nodes of partition small; legal here: 1 to 2\n"
    assert "refused" not in slurm.run("squeue", "--noheader", "--format=%j")
    assert not (folder / "runs/refused").exists()


def test_the_script_of_four_h200_nodes_can_be_queued(slurm: MiniSlurm, folder: Path) -> None:
    """Sbatch reads every line of it, remarks and all; these nodes claim to have eight H200."""
    command = [sys.executable, str(ROOT / "tools/submit.py"), "experiment=gpt_8b", "cluster=h200_4x8", "precision=bf16", "cluster.slurm.time=2:00:00"]
    done = subprocess.run([*command, "--print"], cwd=folder, env=slurm.environment, capture_output=True, text=True, check=True)
    (folder / "runs/gpt_8b/slurm").mkdir(parents=True, exist_ok=True)
    (folder / "job.sh").write_text(done.stdout, encoding="utf-8")
    number = slurm.run("sbatch", "--parsable", "--hold", str(folder / "job.sh")).strip()
    found = slurm.job(number)
    slurm.run("scancel", number)
    assert (found["JobName"], found["NumNodes"], found["NumTasks"], found["TimeLimit"], found["Requeue"]) == ("gpt_8b", "4-4", "4", "02:00:00", "1")
    assert found["TresPerNode"] == "gres:gpu:8"
    assert found["WorkDir"] == str(folder)
    assert found["StdOut"] == f"{folder}/runs/gpt_8b/slurm/gpt_8b-{number}.log"
