"""Out of memory: the rank leaves a note, whoever starts the run next takes less memory for its plans, and the results stay the same."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from train_helpers import config, write_corpus

from megadcp.config.check import UserError
from megadcp.config.run_file import dump_run
from megadcp.plan.plan_file import read_plans
from megadcp.train import entry, launch, loop
from megadcp.train.incidents import read_incidents
from megadcp.train.loop import FINISHED, train
from megadcp.train.metrics import read_metrics
from megadcp.train.out_of_memory import OUT_OF_MEMORY, is_out_of_memory, leave_note, take_notes, with_less_memory

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = (
    "import sys; from pathlib import Path; from megadcp.config.run_file import load_run; from megadcp.config.load import reported; "
    "from megadcp.train import entry; sys.exit(reported(lambda: entry.start(load_run(Path(sys.argv[1])))))"
)
# The model takes 0.48 MB alone and 0.16 MB a rank of tp 2: a step of 256 tokens needs several microbatches, smaller ones after a restart.
TIGHT = {"memory_bytes": 1.0e8, "usable_fraction": 9.0e-3}
TIGHT_RANK = {"memory_bytes": 1.0e8, "usable_fraction": 3.8e-3}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("data"))


def setup(prefix, folder, name="run", **named):
    run = {"name": name, "folder": str(folder), "steps": 6, "validate_every": 0, "sample_prompt": "", "validate_tokens": 256}
    plan, hardware = {"pack_tokens": 0, **named.pop("plan", {})}, named.pop("hardware", TIGHT)
    return config(prefix, run=run, checkpoint={"every": 2}, hardware=hardware, plan=plan, **named)


def losses(folder: Path) -> list[float]:
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


def assert_other_plans(folder: Path, before: Path) -> None:
    """Less memory has changed what is packed together from the third step on, or a test of equal losses shows nothing."""
    new, old = ([[one.documents for one in plan.microbatches] for plan in read_plans(each)] for each in (folder, before))
    assert new[:2] == old[:2]
    assert all(len(one) >= len(two) for one, two in zip(new[2:], old[2:], strict=True))
    assert new[2:] != old[2:]


# -------------------------------------------------------------------------------------------------------------- the parts
def test_what_counts_as_out_of_memory():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(torch.cuda.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(RuntimeError) as real:
        torch.empty(1 << 60)
    assert is_out_of_memory(real.value)
    assert launch._code_of(real.value) == OUT_OF_MEMORY
    for other in (RuntimeError("shapes differ"), MemoryError(), None, KeyError("OutOfMemoryError")):
        assert not is_out_of_memory(other)


def test_a_note_becomes_less_memory_a_bounded_number_of_times(prefix, tmp_path):
    made, said = setup(prefix, tmp_path, health={"oom_restarts": 2, "oom_factor": 0.5}), []
    assert not take_notes(tmp_path, made, said.append)
    assert with_less_memory(tmp_path, made) == made
    for times, share in ((1, 0.5), (2, 0.25)):
        leave_note(tmp_path, 3, 6, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
        assert take_notes(tmp_path, made, said.append)
        assert not take_notes(tmp_path, made, said.append)  # taken once
        assert with_less_memory(tmp_path, made).hardware.usable_fraction == pytest.approx(share * TIGHT["usable_fraction"])
        assert "rank 3 ran out of memory in step 7 (CUDA out of memory. Tried to allocate 2.00 GiB): from the last checkpoint on" in said[-1]
        assert said[-1].endswith(f"(restart {times} of 2)")
    leave_note(tmp_path, 0, 6, torch.OutOfMemoryError("again"))
    with pytest.raises(UserError, match=r"after 2 restarts .*health\.oom_restarts=2.*set hardware|Set hardware"):
        take_notes(tmp_path, made, said.append)
    assert [one["kind"] for one in read_incidents(tmp_path)] == ["out_of_memory"] * 3
    other = config(prefix, hardware={**TIGHT, "usable_fraction": 0.5})
    assert with_less_memory(tmp_path, other) == other  # somebody has set the memory anew


def test_ranks_that_ran_out_together_count_once_and_damage_counts_for_nothing(prefix, tmp_path):
    made, said = setup(prefix, tmp_path), []
    for rank in (1, 2):
        leave_note(tmp_path, rank, 6, torch.OutOfMemoryError("no"))
    assert take_notes(tmp_path, made, said.append)
    assert "rank 1, 2 ran out of memory" in said[0]
    assert json.loads((tmp_path / "memory.json").read_text())["restarts"] == 1
    (tmp_path / "memory.json").write_text("{")
    assert with_less_memory(tmp_path, made) == made
    (tmp_path / "ranks" / "oom-0.json").write_text("")
    assert take_notes(tmp_path, made, said.append)


# ------------------------------------------------------------------------------------------------------------ one process
def failing_once(monkeypatch, step: int) -> None:
    real, left = loop.run_step, [1]

    def fails(engine, plan, *rest):
        if plan.step == step and left.pop() if left else False:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(engine, plan, *rest)

    monkeypatch.setattr(loop, "run_step", fails)


def test_one_process_starts_again_by_itself(prefix, tmp_path, monkeypatch, capsys):
    assert entry.start(setup(prefix, tmp_path, "whole")) == FINISHED
    failing_once(monkeypatch, 3)
    assert entry.start(setup(prefix, tmp_path)) == FINISHED
    said = capsys.readouterr().out
    assert "ran out of memory in step 4" in said
    assert "going on after step 2 of 6" in said
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=2e-6)
    shares = [plan.profile.usable_fraction for plan in read_plans(tmp_path / "run")]
    assert shares == pytest.approx([TIGHT["usable_fraction"]] * 2 + [0.9 * TIGHT["usable_fraction"]] * 4)
    assert_other_plans(tmp_path / "run", tmp_path / "whole")


def test_without_a_supervisor_the_next_start_takes_less(prefix, tmp_path, monkeypatch):
    """As under torchrun or srun: the process ends with a code of its own, and leaves a note in the run folder."""
    made, folder = setup(prefix, tmp_path), tmp_path / "run"
    with monkeypatch.context() as patch:
        failing_once(patch, 3)
        assert train(made, folder) == OUT_OF_MEMORY
    assert (folder / "ranks" / "oom-0.json").is_file()
    dump_run(made, folder / "run.yaml")
    assert entry.start(made) == FINISHED
    assert [plan.profile.usable_fraction for plan in read_plans(folder)][-1] == pytest.approx(0.9 * TIGHT["usable_fraction"])


def test_a_fraction_that_holds_nothing_is_one_clear_error(prefix, tmp_path, monkeypatch):
    made = setup(prefix, tmp_path, health={"oom_factor": 0.01})
    failing_once(monkeypatch, 3)
    with pytest.raises(UserError, match="no memory is left for activations"):
        entry.start(made)


# ------------------------------------------------------------------------------------------------------------- four ranks
INJECT = """
import os
if os.environ.get("RANK") == "2" and not os.path.exists({mark!r}):
    import torch
    import megadcp.train.session as session
    real = session.new_state

    def new_state(*arguments):
        state = real(*arguments)
        layer = next(iter(state.model.layers.values()))
        calls = [0]

        def out_of_memory(*_):
            if state.progress.step == 4 and {when}:
                open({mark!r}, "w").close()
                raise torch.OutOfMemoryError("CUDA out of memory (injected)")

        {hook}
        return state

    session.new_state = new_state
"""
WHERE = {
    "forward": ("True", "layer.register_forward_pre_hook(out_of_memory)"),
    "backward": ("True", "layer.mlp.down.weight.register_hook(out_of_memory)"),
    "recompute": ("torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1", "layer.mlp_norm.register_forward_pre_hook(out_of_memory)"),
}


def start(made, tmp_path, environment):
    asked = tmp_path / f"asked-{made.run.name}"
    asked.mkdir()
    dump_run(made, asked / "run.yaml")
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(asked)], cwd=ROOT, capture_output=True, text=True, timeout=170,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr, time.monotonic() - begin


@pytest.fixture(scope="module")
def undisturbed(prefix, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    code, _, errors, _ = start(four(prefix, folder), folder, {})
    assert code == 0, errors
    return folder / "run"


def four(prefix, folder):
    """Two lanes of two tensor-parallel ranks, all layers recomputed: a collective is under way wherever the rank fails."""
    layout = {"cluster": {"processes": 4}, "parallel": {"tp": 2}}
    return setup(prefix, folder, plan={"recompute": "full"}, hardware=TIGHT_RANK, **layout)


@pytest.mark.slow
@pytest.mark.parametrize("where", WHERE)
def test_one_of_four_ranks_runs_out_and_the_results_stay(prefix, undisturbed, tmp_path, where):
    when, hook = WHERE[where]
    (tmp_path / "sitecustomize.py").write_text(INJECT.format(mark=str(tmp_path / "failed"), when=when, hook=hook))
    code, out, errors, _ = start(four(prefix, tmp_path), tmp_path, {"PYTHONPATH": str(tmp_path)})
    assert code == 0, (out, errors)
    assert (tmp_path / "failed").exists()
    assert "CUDA out of memory (injected)" in errors
    assert "rank 2 of 4 failed with exit code 71" in errors
    assert "rank 2 ran out of memory in step 4" in out
    assert "(restart 1 of 5)" in out
    assert "going on after step 2 of 6" in out
    found = losses(tmp_path / "run")
    assert found == pytest.approx(losses(undisturbed), rel=2e-6)
    assert_other_plans(tmp_path / "run", undisturbed)
    assert not any(math.isnan(loss) for loss in found)
    incident, resumed = [one for one in read_incidents(tmp_path / "run") if one["kind"] != "straggler"]  # a lane may be slow by chance
    assert (incident["kind"], incident["ranks"], incident["restart"]) == ("out_of_memory", [2], 1)
    assert (resumed["kind"], resumed["step"]) == ("resumed", 2)
    assert incident["usable_fraction"] == pytest.approx(0.9 * TIGHT_RANK["usable_fraction"])
