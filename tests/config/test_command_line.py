"""The command line: what Hydra users expect, one line for what is wrong, and nothing written by the clock."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megadcp.config.check import UserError
from megadcp.config.load import command_line, compose, find_configs
from megadcp.config.schema import Config

PROGRAM = Path(find_configs()).parent / "pretrain_gpt.py"
Call = Callable[..., tuple[int, list[Config]]]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run the command line in an empty folder with a training that only remembers its config."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, code: int | Exception = 0) -> tuple[int, list[Config]]:
        seen: list[Config] = []

        def train(config: Config) -> int:
            seen.append(config)
            if isinstance(code, Exception):
                raise code
            return code

        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *arguments])
        return command_line(train, find_configs()), seen

    return run


def files() -> list[str]:
    return sorted(str(each) for each in Path().rglob("*") if each.is_file())


def test_overrides(call: Call) -> None:
    code, seen = call("optim.lr=1e-3", "run.name=mine", "experiment=quickstart")
    assert code == 0
    assert seen == [compose(["optim.lr=1e-3", "run.name=mine"])]
    assert files() == [], "Hydra writes nothing"
    assert not Path("outputs").exists()


def test_the_current_folder_stays(call: Call, tmp_path: Path) -> None:
    call()
    assert Path.cwd() == tmp_path


@pytest.mark.parametrize("code", [0, 1, 75])
def test_exit_codes_come_through(call: Call, code: int) -> None:
    assert call(code=code)[0] == code


def test_user_errors_are_one_line(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(code=UserError("that is wrong"))[0] == 2
    assert capsys.readouterr().err == "error: that is wrong\n"


def test_a_failure_inside_is_no_user_error(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        call(code=RuntimeError("broken"))
    assert exit.value.code == 1
    assert "RuntimeError: broken" in capsys.readouterr().err


def test_hydra_full_error_shows_the_traceback(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(UserError, match=r"model\.layrs"):
        call("model.layrs=3")


@pytest.mark.parametrize(
    "arguments",
    [
        ["model.layrs=3"],
        ["+model.layrs=3"],
        ["model.layers=many"],
        ["+hydra.run.dri=x"],
        ["hydra.run.dri=x"],
        ["parallel.tp=3"],
        ["model=gpt_9b"],
        ["--cfg", "job", "+model.layrs=3"],
        ["-m", "model.layers=2,many"],
        ["-m", "model.layers=2,3", "+model.layrs=3"],
        ["-m", "model.layrs=2,3"],
        ["-m", "model.heads=4,7"],
        ["-m", "optim.lr=interval(0,1)"],
        ["--config-path", "elsewhere"],
    ],
)
def test_nothing_starts_when_something_is_wrong(call: Call, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    """C61: no process, no file."""
    code, seen = call(*arguments)
    out = capsys.readouterr()
    assert (code, seen) == (2, [])
    assert out.err.startswith("error: ")
    assert out.err.count("\n") == 1
    assert out.out == ""
    assert not any(Path().iterdir())


def test_a_run_folder_below_a_file_is_left_to_the_trainer(call: Call) -> None:
    """Which tells it in one line; Hydra makes no folder before."""
    Path("file").touch()
    code, seen = call("run.folder=file/runs")
    assert (code, [one.run.folder for one in seen]) == (0, ["file/runs"])
    assert not Path("runs").exists()


def test_a_sweep_below_a_file_is_one_line(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").touch()
    assert call("-m", "run.folder=file/runs", "optim.lr=1e-3,2e-3") == (2, [])
    assert capsys.readouterr().err == "error: file/runs/.sweep can't be made (Not a directory); set run.folder to a folder you may write to\n"


def test_cfg_job(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    code, seen = call("experiment=gpt_8b", "optim.lr=1e-4", "--cfg", "job")
    text = capsys.readouterr().out
    assert (code, seen) == (0, [])
    assert "lr: 0.0001" in text
    assert "hidden: 4096" in text


def test_cfg_job_resolve(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    call("--cfg", "job")
    assert "prefix: ${data.prepare.folder}/dataset" in capsys.readouterr().out
    call("--cfg", "job", "--resolve")
    assert "prefix: datasets/python_library/dataset" in capsys.readouterr().out


def test_cfg_job_shows_what_must_still_be_given(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = call("data=corpus", "--cfg", "job")
    assert code == 0
    assert "prefix: ???" in capsys.readouterr().out


def test_info_defaults(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    code, seen = call("--info", "defaults")
    assert (code, seen) == (0, [])
    assert "experiment/quickstart" in capsys.readouterr().out


def test_help(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        call("--help")
    assert exit.value.code == 0
    assert "experiment: gpt_1b, gpt_70b, gpt_8b, quickstart" in capsys.readouterr().out


def test_a_config_dir_of_ones_own(call: Call, tmp_path: Path) -> None:
    own = tmp_path / "own" / "experiment"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text("# @package _global_\nrun:\n  name: mine\noptim:\n  lr: 0.5\n", encoding="utf-8")
    code, seen = call("--config-dir", str(tmp_path / "own"), "experiment=mine")
    assert code == 0
    assert (seen[0].run.name, seen[0].optim.lr) == ("mine", 0.5)
    (own / "mine.yaml").write_text("# @package _global_\nrun:\n  nmae: mine\n", encoding="utf-8")
    assert call("--config-dir", str(tmp_path / "own"), "experiment=mine") == (2, [])


# ------------------------------------------------------------------------------------------------------------------ sweeps
def test_each_job_of_a_sweep_has_a_folder_of_its_own(call: Call) -> None:
    code, seen = call("-m", "optim.lr=1e-3,2e-3", "model.layers=2,3", "run.steps=50")
    assert code == 0
    assert [(each.optim.lr, each.model.layers) for each in seen] == [(1e-3, 2), (1e-3, 3), (2e-3, 2), (2e-3, 3)]
    assert len({each.run.name for each in seen}) == 4
    assert seen[0].run.name == "quickstart,model.layers=2,optim.lr=0.001,run.steps=50"
    assert files() == ["runs/.sweep/multirun.yaml"]


def test_the_same_job_finds_its_folder_again(call: Call) -> None:
    name = call("-m", "optim.lr=1e-3,2e-3", "run.steps=50")[1][1].run.name
    assert call("-m", "run.steps=50", "optim.lr=2e-3,3e-3")[1][0].run.name == name


def test_a_swept_run_name_is_taken_as_it_is(call: Call) -> None:
    assert [each.run.name for each in call("-m", "run.name=a,b")[1]] == ["a", "b"]


def test_jobs_that_would_share_a_folder_are_refused(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    code, seen = call("-m", "optim.lr=1e-3,2e-3", "run.name=same")
    assert (code, seen) == (2, [])
    message = capsys.readouterr().err
    assert "runs/same" in message
    assert "leave run.name out" in message


def test_long_and_strange_overrides_make_legal_names(call: Call) -> None:
    code, seen = call("-m", "data.train=[{prefix: a/b c}],[{prefix: a/b_c}]", "run.sample_prompt=" + "x" * 150)
    assert code == 0
    assert len({each.run.name for each in seen}) == 2
    assert all(len(each.run.name) < 140 and "/" not in each.run.name for each in seen)


def test_a_sweep_ends_with_a_signal_but_not_with_a_failure(call: Call) -> None:
    code, seen = call("-m", "run.seed=1,2", code=75)
    assert (code, len(seen)) == (75, 1)
    code, seen = call("-m", "run.seed=1,2", code=1)
    assert (code, len(seen)) == (1, 2)


def test_sweeps_from_an_experiment(call: Call, tmp_path: Path) -> None:
    own = tmp_path / "own" / "experiment"
    own.mkdir(parents=True)
    text = "# @package _global_\nrun:\n  name: mine\nhydra:\n  sweeper:\n    params:\n      run.seed: 1,2\n"
    (own / "mine.yaml").write_text(text, encoding="utf-8")
    code, seen = call("--config-dir", str(tmp_path / "own"), "-m", "experiment=mine")
    assert code == 0
    assert [each.run.seed for each in seen] == [1, 2]
    assert len({each.run.name for each in seen}) == 2


# ------------------------------------------------------------------------------------------------------------- the program
@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["+model.foo=1"], "model.foo is not a setting"),
        (["precision=bf16", "precision.backend=te"], "precision.backend=te needs a GPU, but cluster.device=cpu"),
        (["optim.warmup_steps=900"], "optim.warmup_steps=900"),
    ],
)
def test_the_program_refuses_in_one_line(tmp_path: Path, arguments: list[str], part: str) -> None:
    done = subprocess.run([sys.executable, str(PROGRAM), *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert part in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == []


def test_the_program_shows_a_large_experiment_from_any_folder(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(PROGRAM.parent)}
    command = [sys.executable, str(PROGRAM), "experiment=gpt_70b", "--cfg", "job", "--resolve"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, check=True)
    assert "layers: 80" in done.stdout
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_leaves_early_gets_no_traceback() -> None:
    program = "import sys; from megadcp.config.load import reported; sys.exit(reported(lambda: print('line', flush=True) or 0))"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", program], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")
