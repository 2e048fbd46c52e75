"""tools/submit.py without SLURM: the script it renders and what that does, requests that are refused, and SLURM's programs played by others."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from megadcp.config.check import UserError
from megadcp.config.load import compose
from megadcp.config.run_file import load_run
from megadcp.train import torchrun
from megadcp.train.signals import SIGNALS, STOPPED

TOOLS = Path(__file__).resolve().parents[2] / "tools"
LARGE = ["experiment=gpt_8b", "cluster=h200_4x8", "precision=bf16"]
SMALL = ["run.name=small", "cluster.slurm.time=1:00:00"]
SINFO = """main*|up|2:00:00|4|gpu:h200:8(S:0-1)
small|up|30:00|2|(null)
closed|drain|infinite|9|gpu:8
mixed|up|infinite|2|gpu:4
mixed|up|infinite|1|gpu:a:8,nic:1
"""


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    monkeypatch.syspath_prepend(str(TOOLS))
    names = ("submit_script", "submit_slurm", "submit")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        sys.modules.pop(name, None)


@dataclass
class Bench:
    """An empty folder with a bin/ in front of PATH, whose programs tell how they were called."""

    folder: Path
    main: Callable[[list[str]], int]

    def program(self, name: str, body: str) -> None:
        """Put a program there; "$0" and its arguments go to calls.jsonl, then `body` runs."""
        file = self.folder / "bin" / name
        note = (
            f"'{sys.executable}' -c 'import json, sys; print(json.dumps(sys.argv[1:]))' \"$(basename \"$0\")\" \"$@\" >> '{self.folder}/calls.jsonl'"
        )
        file.write_text(f"#!/bin/bash\n{note}\n{body}\n", encoding="utf-8")
        file.chmod(0o755)

    def calls(self, name: str) -> list[list[str]]:
        """The arguments of every call of a program."""
        file = self.folder / "calls.jsonl"
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
        return [row[1:] for row in rows if row[0] == name]

    def written(self) -> list[str]:
        """Every file of a run."""
        return sorted(str(each.relative_to(self.folder)) for each in self.folder.glob("runs/**/*") if each.is_file())


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tools: dict[str, ModuleType]) -> Bench:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin")
    for name in [name for name in os.environ if name.startswith(("SLURM", "SBATCH", "NCCL", "MEGADCP"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(tools["submit_slurm"], "POLL_SECONDS", 0.02)
    made = Bench(tmp_path, tools["submit"].main)
    for name in ("sinfo", "squeue", "scontrol", "sbatch"):  # hides those of this machine
        made.program(name, "exit 1")
    return made


@pytest.fixture
def slurm(bench: Bench) -> Bench:
    """SLURM as it is seen from a login node: four nodes, one job that ends at once."""
    bench.program("sinfo", f"printf '%s' '{SINFO}'")
    bench.program("squeue", "exit 0")
    bench.program("sbatch", 'log=$(sed -n "s/^#SBATCH --output=//p" "$2"); echo first > "${log/\\%x-%j/small-7}"; echo 7')
    bench.program("scontrol", "echo 'JobId=7 JobState=COMPLETED Reason=None Restarts=0 ExitCode=0:0'")
    return bench


def rendered(tools: dict[str, ModuleType], *overrides: str) -> str:
    return tools["submit_script"].render(compose(list(overrides)), "python tools/submit.py ...")


# -------------------------------------------------------------------------------------------------------------- the script
def check_shell(script: str, folder: Path) -> None:
    """The shell can read it, and shellcheck has nothing to say where it is installed."""
    (folder / "checked.sh").write_text(script, encoding="utf-8")
    subprocess.run(["bash", "-n", str(folder / "checked.sh")], check=True)
    checker = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if checker:
        done = subprocess.run([checker, str(folder / "checked.sh")], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_four_nodes_of_h200(tools: dict[str, ModuleType], tmp_path: Path) -> None:
    script = rendered(tools, *LARGE)
    for line in (
        "#!/bin/bash", "#SBATCH --job-name=gpt_8b", "#SBATCH --nodes=4", "#SBATCH --ntasks-per-node=1", "#SBATCH --gres=gpu:8", "#SBATCH --exclusive",
        "#SBATCH --mem=0", "#SBATCH --time=1-00:00:00", "#SBATCH --signal=USR1@600", "#SBATCH --requeue", "#SBATCH --dependency=singleton",
        f"#SBATCH --chdir={Path.cwd()}", "#SBATCH --output=runs/gpt_8b/slurm/%x-%j.log", "#SBATCH --open-mode=append", "run=runs/gpt_8b",
        'head=${MEGADCP_HEAD:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}', 'export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"',
        "    srun --kill-on-bad-exit=1 --cpu-bind=none \\",
        '        --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node=8 --master-addr="$head" --master-port="$port" \\',
        '    scontrol requeue "$SLURM_JOB_ID" || echo "not queued again; to go on: sbatch runs/gpt_8b/slurm/job.sh"',
    ):  # fmt: skip
        assert line in [each.split("  #")[0].rstrip() for each in script.splitlines()], line
    assert "partition" not in script
    assert "container" not in script
    assert max(map(len, script.splitlines())) <= 150
    check_shell(script, tmp_path)


def test_what_can_be_asked_of_a_job(tools: dict[str, ModuleType], tmp_path: Path) -> None:
    script = rendered(
        tools, *LARGE, "cluster.slurm.partition=gpu", "cluster.slurm.account=lab", "cluster.slurm.time=2:00:00", "cluster.slurm.stop_before=120",
        "cluster.slurm.exclusive=false", "cluster.slurm.gres=gpu:h200:4", "cluster.slurm.cores=96",
        "cluster.slurm.options=['--qos=high','--comment=\"a b\"']",
        "cluster.slurm.head=10.0.0.7", "cluster.slurm.setup=[module load cuda]", "cluster.slurm.python=/opt/python", "cluster.slurm.requeue=false",
        "cluster.slurm.container='registry#image:1'", "cluster.slurm.mounts=['/data:/data']",
    )  # fmt: skip
    lines = [each.split("  #")[0].rstrip() for each in script.splitlines()]
    for line in (
        "#SBATCH --partition=gpu", "#SBATCH --account=lab", "#SBATCH --time=2:00:00", "#SBATCH --signal=USR1@120", "#SBATCH --gres=gpu:h200:4",
        "#SBATCH --cpus-per-task=96", "#SBATCH --qos=high", '#SBATCH --comment="a b"', "#SBATCH --no-requeue", "head=${MEGADCP_HEAD:-10.0.0.7}",
        "module load cuda", "python=/opt/python", "        --cpus-per-task=96 \\", "        --container-image='registry#image:1' \\",
        f"        --container-mounts={TOOLS.parent}:{TOOLS.parent},{Path.cwd()}:{Path.cwd()},/data:/data \\" if Path.cwd() != TOOLS.parent
        else f"        --container-mounts={TOOLS.parent}:{TOOLS.parent},/data:/data \\", '        --container-workdir="$PWD" \\',
    ):  # fmt: skip
        assert line in lines, line
    assert "scontrol requeue" not in script
    assert "--exclusive" not in script
    assert "--mem" not in script
    check_shell(script, tmp_path)


def test_no_devices_without_a_gpu(tools: dict[str, ModuleType], tmp_path: Path) -> None:
    script = rendered(tools, *SMALL)
    assert "--gres" not in script
    assert "export" not in script
    check_shell(script, tmp_path)


def test_the_signal_is_one_that_the_trainer_and_its_launcher_hear(tools: dict[str, ModuleType]) -> None:
    """C65."""
    number = signal.Signals[f"SIG{tools['submit_script'].SIGNAL}"]
    assert number in SIGNALS
    assert number in torchrun.PASSED_ON


def run_script(bench: Bench, script: str, code: int | str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What SLURM does with a script: run it, in the folder that it names. `code`: how srun ends, or what it does."""
    bench.program("srun", f'env > "{bench.folder}/srun.env"; {code if isinstance(code, str) else f"exit {code}"}')
    bench.program("scontrol", 'case "$1" in show) printf "n7\\nn8\\n";; esac')
    (bench.folder / "job.sh").write_text(script, encoding="utf-8")
    environment = {**os.environ, "SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "n[7-8]", "SLURM_JOB_NUM_NODES": "2", **environment}
    return subprocess.run(["bash", str(bench.folder / "job.sh")], cwd=bench.folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("code", "requeues"), [(0, 0), (STOPPED, 1), (1, 0), (137, 0)])
def test_a_job_is_queued_again_only_when_it_was_stopped(bench: Bench, tools: dict[str, ModuleType], code: int, requeues: int) -> None:
    """C65."""
    done = run_script(bench, rendered(tools, *SMALL), code)
    assert done.returncode == code
    assert [call for call in bench.calls("scontrol") if call[0] == "requeue"] == [["requeue", "123456"]] * requeues
    assert len(bench.calls("srun")) == 1
    assert f"the ranks ended with exit code {code}" in done.stdout
    assert done.stderr == ""


def test_a_rank_that_ran_out_of_memory_starts_the_ranks_again(bench: Bench, tools: dict[str, ModuleType]) -> None:
    """The note decides, not the code: ranks that hang after it are killed with others. Whoever starts next removes it."""
    script, notes = rendered(tools, *SMALL, "health.oom_restarts=2"), "runs/small/ranks"
    once = f"if [ -d {notes} ]; then rm -r {notes}; exit 0; fi; mkdir -p {notes}; touch {notes}/oom-3.json; exit 137"
    assert run_script(bench, script, once).returncode == 0
    assert len(bench.calls("srun")) == 2
    assert run_script(bench, script, f"mkdir -p {notes}; touch {notes}/oom-3.json; exit 71").returncode == 71
    assert len(bench.calls("srun")) == 2 + 3, "never for ever"


def test_a_job_that_is_not_to_be_queued_again(bench: Bench, tools: dict[str, ModuleType]) -> None:
    done = run_script(bench, rendered(tools, *SMALL, "cluster.slurm.requeue=false"), STOPPED)
    assert "to go on: sbatch runs/small/slurm/job.sh" in done.stdout
    assert all(call[0] == "show" for call in bench.calls("scontrol"))


def test_where_ranks_meet(bench: Bench, tools: dict[str, ModuleType]) -> None:
    script = rendered(tools, *SMALL, "cluster.processes=2")
    run_script(bench, script, 0)
    run_script(bench, script, 0, MEGADCP_HEAD="10.1.1.1", SLURM_JOB_ID="123457")
    first, second = bench.calls("srun")
    assert {"--master-addr=n7", "--master-port=23456", "--nproc-per-node=2", "--nnodes=2"} <= set(first)
    assert {"--master-addr=10.1.1.1", "--master-port=23457"} <= set(second)
    assert first[-3:] == ["-m", "megadcp.train.job", "runs/small"]


def test_the_environment_reaches_the_ranks(bench: Bench, tools: dict[str, ModuleType]) -> None:
    odd, config = "a 'b' \"c\" $d `e` \\f {g}", compose(SMALL)
    cluster = dataclasses.replace(config.cluster, environment={"ODD": odd, "NCCL_DEBUG": "WARN"})
    script = tools["submit_script"].render(dataclasses.replace(config, cluster=cluster), "")
    check_shell(script, bench.folder)
    run_script(bench, script, 0, NCCL_DEBUG="INFO")
    lines = (bench.folder / "srun.env").read_text(encoding="utf-8").splitlines()
    assert f"ODD={odd}" in lines
    assert "NCCL_DEBUG=INFO" in lines, "what is set where sbatch is called stays"


def test_paths_with_spaces(bench: Bench, tools: dict[str, ModuleType]) -> None:
    script = rendered(tools, *SMALL, "run.folder='my runs'")
    assert '#SBATCH --output="my runs/small/slurm/%x-%j.log"' in script
    check_shell(script, bench.folder)
    run_script(bench, script, 0)
    assert bench.calls("srun")[0][-1] == "my runs/small"


def test_a_setting_of_two_lines_runs_nothing(bench: Bench, tools: dict[str, ModuleType]) -> None:
    """The command that made the script stands in it as a comment."""
    script = tools["submit_script"].render(compose(SMALL), "python tools/submit.py 'log.wandb_tags=[a\ntouch made\u2028]'")
    run_script(bench, script, 0)
    assert not (bench.folder / "made").exists()
    assert "# Made by: python tools/submit.py 'log.wandb_tags=[a touch made ]'" in script.splitlines()


# ----------------------------------------------------------------------------------------------------------------- refused
@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["experiment=gpt_8b", "cluster=h200_4x8", "parallel.tp=3"], "parallel.tp=3 does not divide model.heads=32"),
        ([*LARGE, "parallel.tp=4", "parallel.pp=16", "model.layers=32"], "parallel.tp=4 x parallel.pp=16 = 64 does not divide cluster.nodes=4"),
        (["cluster.nodes=8", *SMALL], "cluster.nodes=8 is more than the 4 nodes of partition main; legal here: 1 to 4"),
        (["cluster.slurm.partition=mian", *SMALL], "cluster.slurm.partition=mian does not exist; nearest: main"),
        (["cluster.slurm.partition=closed", *SMALL], "partition closed takes no jobs now (it is drain)"),
        (["cluster.slurm.gres=gpu:16", *SMALL], "partition main has 0 such nodes (its nodes have gpu:h200:8)"),
        (
            ["cluster.slurm.partition=mixed", "cluster.slurm.gres=gpu:8", "cluster.nodes=2", *SMALL],
            "partition mixed has 1 such nodes",
        ),
        (["cluster.slurm.time=3:00:00", "run.name=x"], "cluster.slurm.time=3:00:00 is longer than partition main allows; legal here: up to 2:00:00"),
        (["cluster.slurm.time=90", "run.name=x"], "cluster.slurm.time=90 is no time limit; legal: hours:minutes:seconds"),
        (["cluster.slurm.time=tomorrow", "run.name=x"], "is no time limit"),
        (["cluster.slurm.stop_before=3600", *SMALL], "cluster.slurm.stop_before=3600 seconds does not fit into cluster.slurm.time=1:00:00"),
        (["cluster.slurm.stop_before=0", *SMALL], "legal here: 1 to 3539"),
        (["cluster.slurm.account='a; rm b'", *SMALL], "cluster.slurm.account='a; rm b' can't be written into a batch script"),
        (["run.folder='a\ntouch b'", *SMALL], "run.folder='a\\ntouch b' can't be written into a batch script; legal here: one line of text"),
        (["cluster.slurm.container='a\ntouch b'", *SMALL], "cluster.slurm.container='a\\ntouch b' can't be written into a batch script"),
        (["cluster.slurm.setup=['a\ntouch b']", *SMALL], "cluster.slurm.setup[0]='a\\ntouch b' is not one line"),
        (["cluster.slurm.options=['qos=high']", *SMALL], "cluster.slurm.options[0]='qos=high' is not an option, as --qos=high"),
        (["cluster.slurm.partion=x", *SMALL], "cluster.slurm.partion is not a setting; nearest: cluster.slurm.partition"),
        (
            ["data=corpus", "data.train=[{prefix: nowhere}]", "data.tokenizer.kind=bytes", "data.tokenizer.path=''", *SMALL],
            "there is no nowhere.idx; make it",
        ),
        (["hardware.memory_bytes=1e7", *SMALL], "memory"),
    ],
)
def test_bad_requests_are_refused_before_anything_is_queued(
    slurm: Bench, capsys: pytest.CaptureFixture[str], overrides: list[str], told: str
) -> None:
    assert slurm.main(overrides) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert told in error
    assert slurm.calls("sbatch") == []
    assert slurm.written() == []


def test_missing_sbatch(slurm: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(slurm.folder / "bin"))
    (slurm.folder / "bin/sbatch").unlink()
    assert slurm.main(SMALL) == 2
    assert "sbatch is not on PATH, so nothing can be queued here" in capsys.readouterr().err
    assert slurm.written() == []
    assert slurm.main([*SMALL, "--print"]) == 0


def test_sbatch_refuses(slurm: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    slurm.program("sbatch", "echo 'sbatch: error: Batch job submission failed: Invalid account' >&2; exit 1")
    assert slurm.main(SMALL) == 2
    assert (
        "error: SLURM does not take the job: Batch job submission failed: Invalid account (the script is runs/small/slurm/job.sh)"
        in capsys.readouterr().err
    )


def test_a_second_job_of_the_run_is_refused(slurm: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    slurm.program("squeue", "echo '5 PENDING'")
    assert slurm.main(SMALL) == 2
    assert "run small has a job already: 5 (PENDING); end it with scancel 5" in capsys.readouterr().err
    assert slurm.calls("squeue") == [["--noheader", "--me", "--name=small", "--format=%i %T"]]
    assert slurm.written() == []


def test_a_slurm_that_does_not_answer_is_no_reason(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([*LARGE, "cluster.nodes=8", "--print"]) == 0
    assert "#SBATCH --nodes=8" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------------------ queued
def test_print_changes_nothing(slurm: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert slurm.main([*SMALL, "--print", "optim.lr=1e-3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("#!/bin/bash\n")
    assert "# Made by: python tools/submit.py run.name=small cluster.slurm.time=1:00:00 optim.lr=1e-3" in out
    assert slurm.written() == []
    assert slurm.calls("sbatch") == []


def test_write_leaves_it_to_be_edited(slurm: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert slurm.main([*SMALL, "--write", "optim.lr=1e-3"]) == 0
    assert slurm.calls("sbatch") == []
    assert load_run("runs/small").optim.lr == 1e-3
    assert "to queue it: sbatch runs/small/slurm/job.sh" in capsys.readouterr().err
    script = Path("runs/small/slurm/job.sh").read_text(encoding="utf-8")
    assert slurm.main([*SMALL, "--print", "optim.lr=1e-3"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if "Made by" not in line] == [
        line for line in script.splitlines() if "Made by" not in line
    ]


def test_queued_and_followed(slurm: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert slurm.main(SMALL) == 0
    said = capsys.readouterr()
    assert said.out.endswith("first\n"), "the job's log"
    assert "job 7 is queued; its log: runs/small/slurm/small-7.log; to end it: scancel 7" in said.err
    assert "job 7 is COMPLETED" in said.err
    assert slurm.calls("sbatch") == [["--parsable", "runs/small/slurm/job.sh"]]
    assert load_run("runs/small").run.name == "small"


@pytest.mark.parametrize(
    ("last", "code"),
    [
        ("JobState=FAILED Reason=NonZeroExitCode Restarts=1 ExitCode=3:0", 3),
        ("JobState=TIMEOUT Reason=TimeLimit Restarts=1 ExitCode=0:15", 143),
        ("JobState=CANCELLED Reason=None Restarts=1 ExitCode=0:0", 1),
        ("JobState=COMPLETED Reason=None Restarts=1 ExitCode=0:0", 0),
    ],
)
def test_a_job_that_is_queued_again_is_followed_further(slurm: Bench, capsys: pytest.CaptureFixture[str], last: str, code: int) -> None:
    log = "runs/small/slurm/small-7.log"
    states = ["JobState=PENDING Reason=Resources Restarts=0 ExitCode=0:0", "JobState=RUNNING Reason=None Restarts=0 ExitCode=0:0",
              "JobState=PENDING Reason=BeginTime Restarts=1 ExitCode=0:0", "JobState=RUNNING Reason=None Restarts=1 ExitCode=0:0", last]  # fmt: skip
    (slurm.folder / "states").write_text("".join(f"JobId=7 {state}\n" for state in states), encoding="utf-8")
    slurm.program("scontrol", f"head -n 1 states; [ $(wc -l < states) -gt 1 ] && sed -i 1d states; echo line >> {log}")
    assert slurm.main(SMALL) == code
    said = capsys.readouterr()
    told = [line for line in said.err.splitlines() if line.startswith("job 7 is") and "queued" not in line]
    assert told == ["job 7 is PENDING (Resources)", "job 7 is RUNNING", "job 7 is PENDING (BeginTime) again", "job 7 is RUNNING again",
                    f"job 7 is {last.split()[0].split('=')[1]} again"]  # fmt: skip
    assert said.out.splitlines()[-6:] == ["first", *["line"] * 5], "each line of the log once"


def test_detach(slurm: Bench) -> None:
    assert slurm.main([*SMALL, "--detach"]) == 0
    assert len(slurm.calls("sbatch")) == 1
    assert slurm.calls("scontrol") == []


def test_a_forgotten_job(slurm: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    slurm.program("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert slurm.main(SMALL) == 1
    assert "SLURM knows nothing of job 7 any more; its log is runs/small/slurm/small-7.log" in capsys.readouterr().err


def test_another_run_of_this_name_is_left_alone(slurm: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert slurm.main(SMALL) == 0
    Path("runs/small/metrics.jsonl").write_text('{"step": 1}\n', encoding="utf-8")
    assert slurm.main([*SMALL, "model.layers=8"]) == 2
    assert "holds a run with other settings: model.layers: 4 -> 8" in capsys.readouterr().err
    assert load_run("runs/small").model.layers == 4
    assert slurm.main([*SMALL, "log.every=7"]) == 0, "what may change changes"
    assert load_run("runs/small").log.every == 7
    assert len(slurm.calls("sbatch")) == 2


def test_a_finished_run_is_shown_and_not_queued(slurm: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert slurm.main(SMALL) == 0
    result = {"name": "small", "steps": load_run("runs/small").run.steps, "tokens": 1, "documents": 1, "seconds": 1, "validation_loss": {},
              "checkpoint": "checkpoints/step-1"}  # fmt: skip
    Path("runs/small/result.json").write_text(json.dumps(result), encoding="utf-8")
    assert slurm.main(SMALL) == 0
    assert "Run small is finished" in capsys.readouterr().out
    assert len(slurm.calls("sbatch")) == 1


def test_resume_refuse_is_judged_when_it_is_queued(slurm: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert slurm.main([*SMALL, "checkpoint.resume=refuse"]) == 0
    assert load_run("runs/small").checkpoint.resume == "auto", "or the job, when it is queued again, would refuse its own run"
    assert slurm.main([*SMALL, "checkpoint.resume=refuse"]) == 2
    assert "runs/small holds a run already and checkpoint.resume=refuse" in capsys.readouterr().err
    assert len(slurm.calls("sbatch")) == 1


# ------------------------------------------------------------------------------------------------------------------- parts
@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1:30", 90), ("0:00:30", 30), ("24:00:00", 86400), ("1-00:00:00", 86400), ("2-12", 216000), ("1-1:30", 91800), ("infinite", float("inf"))],
)
def test_time_limits(tools: dict[str, ModuleType], text: str, seconds: float) -> None:
    assert tools["submit_slurm"].limit_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "90", "1:2:3:4", "-1:00", "1h", "1-"])
def test_what_is_no_time_limit(tools: dict[str, ModuleType], text: str) -> None:
    with pytest.raises(UserError, match="is no time limit"):
        tools["submit_slurm"].limit_seconds(text)


@pytest.mark.parametrize(
    ("devices", "wanted", "enough"),
    [
        ("gpu:h200:8(S:0-1)", "gpu:8", True), ("gpu:h200:8(S:0-1)", "gpu:h200:8", True), ("gpu:h200:8", "gpu:h100:8", False),
        ("gpu:8", "gpu:9", False),
        ("gpu:h200:4,gpu:h100:4", "gpu:8", True), ("(null)", "gpu:1", False), ("nic:1,gpu:8(IDX:0-7)", "gpu:8", True), ("gpu:8", "gpu:8,nic:1", True),
    ],
)  # fmt: skip
def test_devices_of_nodes(tools: dict[str, ModuleType], devices: str, wanted: str, enough: bool) -> None:
    assert tools["submit_slurm"]._has(devices, wanted) is enough
