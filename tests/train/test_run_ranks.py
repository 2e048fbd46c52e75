"""Whole runs on several ranks of this machine, started as a user starts them: the same losses in every layout, resume, signals, failures."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from train_helpers import config, write_corpus

from megadcp.config.run_file import dump_run
from megadcp.config.schema import TokenizerConfig
from megadcp.plan.plan_file import read_plans

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = (
    "import sys; from pathlib import Path; from megadcp.config.run_file import load_run; from megadcp.config.load import reported; "
    "from megadcp.train import entry; sys.exit(reported(lambda: entry.start(load_run(Path(sys.argv[1])))))"
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("data"))


def settings(corpus, folder, name="run", **changes):
    run = {"name": name, "folder": str(folder), "steps": 6, "validate_every": 3, "validate_tokens": 300, **changes.pop("run", {})}
    return config(corpus, run=run, **changes)


def start(made, tmp_path, wait=True):
    """The trainer on these settings; (exit code, stdout, stderr), or the running process."""
    asked = tmp_path / f"{made.run.name}-{time.monotonic_ns()}"
    asked.mkdir()
    dump_run(made, asked / "run.yaml")
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(asked)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if not wait:
        return process
    out, errors = process.communicate(timeout=120)
    return process.returncode, out, errors


def rows(folder, name):
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def losses(folder, name):
    return [row["loss"] for row in rows(folder, name) if "loss" in row], [row["validation_loss"] for row in rows(folder, name) if "loss" not in row]


LAYOUTS = {
    "lanes": {"cluster": {"processes": 2}},
    "tp": {"cluster": {"processes": 2}, "parallel": {"tp": 2}},
    "pp": {"cluster": {"processes": 2}, "parallel": {"pp": 2}},
}


@pytest.fixture(scope="module")
def alone(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    code, _, errors = start(settings(corpus, folder), folder)
    assert (code, errors) == (0, "")
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_losses_of_one_rank(corpus, alone, tmp_path, layout):
    code, out, errors = start(settings(corpus, tmp_path, **LAYOUTS[layout]), tmp_path)
    assert code == 0, errors
    for found, expected in zip(losses(tmp_path, "run"), losses(alone, "run"), strict=True):
        assert found == pytest.approx(expected, rel=2e-6)
    assert out.count("starting at step 0 of 6") == 1  # rank 0 alone speaks
    assert "layout: 2 ranks" in out
    assert (tmp_path / "run" / "result.json").is_file()


@pytest.mark.slow
def test_a_run_goes_on_in_another_layout(corpus, tmp_path):
    """Three steps on 2 x 2 ranks, then the rest alone, on two lanes, and on a pipeline: the unbroken run to rounding."""
    whole = settings(corpus, tmp_path, "whole", optim={"schedule": "constant"})
    assert start(whole, tmp_path)[0] == 0
    four = {"cluster": {"processes": 4}, "parallel": {"tp": 2}}
    for name, layout in {"one": {}, "lanes": LAYOUTS["lanes"], "pp": LAYOUTS["pp"]}.items():
        first = settings(corpus, tmp_path, name, optim={"schedule": "constant"}, **four, run={"steps": 3})
        assert start(first, tmp_path)[0] == 0
        code, out, errors = start(settings(corpus, tmp_path, name, optim={"schedule": "constant"}, **layout), tmp_path)
        assert code == 0, errors
        assert "going on after step 3" in out
        assert losses(tmp_path, name)[0] == pytest.approx(losses(tmp_path, "whole")[0], rel=5e-6)


def test_a_signal_saves_and_stops_all_ranks(corpus, tmp_path):
    process = start(settings(corpus, tmp_path, run={"steps": 4000}, cluster={"processes": 2}), tmp_path, wait=False)
    metrics = tmp_path / "run" / "metrics.jsonl"
    end = time.monotonic() + 90
    while time.monotonic() < end and not (metrics.is_file() and metrics.stat().st_size > 2000):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 75, (out, errors)
    done = rows(tmp_path, "run")[-1]["step"]
    assert f"after step {done}, saved" in out.replace(",", "") or f"after step {done:,}, saved" in out
    assert (tmp_path / "run" / "checkpoints" / f"step-{done:08d}").is_dir()


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_and_lanes_that_are_slow_get_less_work(corpus, tmp_path, monkeypatch):
    """C63. Rank 1 takes (says that it takes) twice as long: all ranks plan with its speed, also after a restart."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_RANK.format(folder=str(tmp_path)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    adapting = settings(corpus, tmp_path, run={"steps": 24}, cluster={"processes": 2}, plan={"refit_lane_speed": True})
    code, out, errors = start(adapting, tmp_path)
    assert code == 75, (out, errors)
    assert "stopped by a signal to another rank after step 18" in out
    code, out, errors = start(adapting, tmp_path)
    assert code == 0, (out, errors)
    assert [row["step"] for row in rows(tmp_path, "run") if "loss" in row] == list(range(1, 25))
    speeds = [plan.lane_speed for plan in read_plans(tmp_path / "run")]
    assert set(speeds[:14]) == {()}
    assert all(one[0] == 1.0 and 0.4 < one[1] < 0.65 for one in speeds[18:])
    assert all(row["lane_ratios"][0] > 0 for row in rows(tmp_path, "run") if "loss" in row and row["lane_ratios"][0])


SLOW_RANK = """
import os
if os.environ.get("RANK") in ("0", "1"):
    import signal, pathlib
    import megadcp.train.across as across

    def own(plan, microbatches, lane):
        mark = pathlib.Path({folder!r}, "asked")
        if plan.step == 16 and lane == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGUSR1)
        return (2.0 if lane else 1.0), 1.0

    across.own_seconds = own
"""


def test_what_can_not_be_planned_is_refused_before_any_rank(corpus, tmp_path):
    made = settings(corpus, tmp_path, cluster={"processes": 3}, parallel={"tp": 2})
    code, out, errors = start(made, tmp_path)
    assert code == 2
    assert errors.count("\n") == 1
    assert "does not divide cluster.nodes=1 x cluster.processes=3" in errors
    assert out == ""
    assert not (tmp_path / "run").exists()


def test_a_rank_that_fails_ends_all_and_its_traceback_is_what_is_seen(corpus, tmp_path):
    """Token ids above the vocabulary: the step raises on the ranks."""
    small = config(corpus).model.vocab // 2
    unknown = {"tokenizer": TokenizerConfig("sentencepiece", "")}
    made = settings(corpus, tmp_path, cluster={"processes": 2}, model={"vocab": small}, data=unknown, run={"sample_prompt": ""})
    code, _, errors = start(made, tmp_path)
    assert code == 2
    assert errors.count("error: ") == 1
    assert f"but model.vocab={small}" in errors


BREAKS = {
    "data": "import megadcp.data.batch as m; old = m.lane_packs\n"
    "def broken(source, documents, plan, lane):\n"
    "    if documents.step == 2: raise OSError('the disk of this rank is gone')\n"
    "    return old(source, documents, plan, lane)\n"
    "m.lane_packs = broken\n",
    "planner": "import megadcp.plan.planner as m; old = m.Planner.__call__\n"
    "def broken(self, step, lengths):\n"
    "    if step == 2: raise OSError('the disk of this rank is gone')\n"
    "    return old(self, step, lengths)\n"
    "m.Planner.__call__ = broken\n",
}


@pytest.mark.parametrize("where", BREAKS)
def test_one_rank_that_fails_ends_all_with_its_traceback(corpus, tmp_path, where, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import os\nif os.environ.get('RANK') == '1':\n    " + BREAKS[where].replace("\n", "\n    "))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    begin = time.monotonic()
    code, out, errors = start(settings(corpus, tmp_path, cluster={"processes": 2}), tmp_path)
    assert code == 1, (out, errors)
    assert "OSError: the disk of this rank is gone" in errors
    assert "starting at step 0" in out
    assert not (tmp_path / "run" / "result.json").exists()
    assert time.monotonic() - begin < 100


def test_a_full_disk_is_told_in_one_line(corpus, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nif os.environ.get('RANK') == '0':\n"
        "    import errno, megadcp.train.metrics as m; old = m.MetricsFile.write\n"
        "    def full(self, row):\n"
        "        if row['step'] == 2: raise OSError(errno.ENOSPC, 'No space left on device', str(self.path))\n"
        "        old(self, row)\n"
        "    m.MetricsFile.write = full\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, out, errors = start(settings(corpus, tmp_path, cluster={"processes": 2}), tmp_path)
    assert code == 1, (out, errors)
    assert "error: after step 2: [Errno 28] No space left on device: " in errors
    assert "make room, then the same command goes on" in errors
    assert "Traceback" not in errors
