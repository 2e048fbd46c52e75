"""Starting, resuming, showing and refusing runs, with a training that only writes what a real one would leave."""

import dataclasses
import json
import sys
import types
from pathlib import Path

import pytest

from megadcp.backends import gpu_probe, te_probe
from megadcp.config.check import UserError
from megadcp.config.run_file import from_dict, load_run
from megadcp.config.schema import Config
from megadcp.train import entry, resume
from megadcp.train.run_folder import keep_folder

HARDWARE = {
    "name": "test", "gemm_flops": {"fp32": 1e9, "bf16": 1e9, "fp8": 1e9}, "gemm_half_tokens": 1, "attention_flops": 1e9, "attention_half_length": 1,
    "node_bytes": 1e9, "net_bytes": 1e9, "node_latency": 0, "ring_step_seconds": 0, "layer_overhead_seconds": 0, "tp_exposed": 1,
    "memory_bytes": 1e9, "usable_fraction": 0.9, "loss_chunk": 64, "gpus_per_node": 1, "reduce_bytes": 1e9, "reduce_overlap": 0,
    "memory_bandwidth": 1e9,
}  # fmt: skip


def config(name: str = "a", **groups: dict) -> Config:
    data = {"train": [{"prefix": "x"}], "max_length": 64, "tokens_per_step": 64, **groups.pop("data", {})}
    return from_dict({"run": {"name": name, "steps": 10, **groups.pop("run", {})}, "data": data, "hardware": HARDWARE, **groups})


class Trainer:
    """Stands in for megadcp.train.loop and megadcp.data.prepare; remembers what happened in which order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.stop_at = 0
        self.shown: list[Path] = []

    def train(self, config: Config, folder: Path, world: object, stop: object) -> int:
        assert load_run(folder) == config, "run.yaml is what the training gets"
        self.events.append("train")
        done = self.stop_at or config.run.steps
        (folder / "checkpoints" / f"step-{done:08d}").mkdir(parents=True, exist_ok=True)
        if done < config.run.steps:
            return 75
        (folder / "result.json").write_text(json.dumps({"steps": done}), encoding="utf-8")
        return 0

    def prepare(self, data: object, say: object, vocab: int) -> None:
        self.events.append("prepare")

    def show_result(self, folder: Path, say: object) -> None:
        self.events.append("show")


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    monkeypatch.chdir(tmp_path)
    made = Trainer()
    for name, function in (("train.loop", "train"), ("data.prepare", "prepare"), ("train.finish", "show_result")):
        module = types.ModuleType(f"megadcp.{name}")
        setattr(module, function, getattr(made, function))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return made


def snapshot(folder: str = "runs") -> dict[str, bytes]:
    return {str(each): each.read_bytes() for each in sorted(Path(folder).rglob("*")) if each.is_file()}


def refused(asked: Config) -> str:
    before = snapshot()
    with pytest.raises(UserError) as error:
        entry.start(asked)
    assert snapshot() == before, "nothing is touched"
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_new_run(trainer: Trainer) -> None:
    asked = config()
    assert entry.start(asked) == 0
    assert load_run("runs/a") == asked
    assert trainer.events == ["train"]


def test_data_is_prepared_before_anything_is_written(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = config(data={"prepare": {"kind": "python_library"}, "tokenizer": {"path": "t"}})

    def fails(*_: object) -> None:
        raise UserError("no disk space")

    monkeypatch.setattr(sys.modules["megadcp.data.prepare"], "prepare", fails)
    with pytest.raises(UserError, match="no disk space"):
        entry.start(asked)
    assert not Path("runs").exists()
    monkeypatch.setattr(sys.modules["megadcp.data.prepare"], "prepare", trainer.prepare)
    assert entry.start(asked) == 0
    assert trainer.events == ["prepare", "train"]


def test_a_finished_run_is_shown_and_left_alone(trainer: Trainer) -> None:
    entry.start(config())
    before = snapshot()
    assert entry.start(config()) == 0
    assert trainer.events == ["train", "show"]
    assert snapshot() == before


def test_an_unfinished_run_is_resumed(trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    trainer.stop_at = 5
    assert entry.start(config()) == 75
    trainer.stop_at = 0
    assert entry.start(config()) == 0
    assert trainer.events == ["train", "train"]
    assert "going on in runs/a" in capsys.readouterr().out


def test_another_name_is_another_run(trainer: Trainer) -> None:
    entry.start(config("a"))
    entry.start(config("b", optim={"lr": 1e-3}))
    assert trainer.events == ["train", "train"]
    assert load_run("runs/a").optim.lr != load_run("runs/b").optim.lr


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(
    ("groups", "parts"),
    [
        ({"optim": {"lr": 1e-3}}, ["optim.lr: 0.0003 -> 0.001"]),
        ({"model": {"layers": 5}, "run": {"seed": 7}}, ["model.layers: 4 -> 5", "run.seed: 1234 -> 7"]),
        ({"data": {"train": [{"prefix": "x"}, {"prefix": "y"}]}}, ["data.train[1].prefix: None -> y"]),
        ({"precision": {"format": "bf16"}}, ["precision.format: fp32 -> bf16"]),
        ({"run": {"steps": 20}}, ["run.steps: 10 -> 20", "optim.schedule=cosine"]),
        ({"run": {"steps": 3}, "optim": {"schedule": "constant"}}, ["run.steps: 10 -> 3", "optim.schedule: cosine -> constant", "5 steps are done"]),
    ],
)
def test_other_settings_are_refused_with_a_choice(trainer: Trainer, groups: dict, parts: list[str], finished: bool) -> None:
    trainer.stop_at = 5
    entry.start(config())
    if finished:
        Path("runs/a/result.json").write_text("{}", encoding="utf-8")
    message = refused(config(**groups))
    for part in [*parts, "runs/a", "run.name=NAME"]:
        assert part in message
    assert trainer.events == ["train"]


def test_settings_of_how_to_run_may_change(trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    trainer.stop_at = 5
    entry.start(config())
    changed = config(checkpoint={"every": 2}, log={"every": 3}, cluster={"threads": 2}, plan={"recompute": "full"}, run={"validate_every": 4})
    entry.start(changed)
    assert load_run("runs/a") == changed
    assert "checkpoint.every is 2 from here on (was 0)" in capsys.readouterr().out


def test_every_free_prefix_names_settings() -> None:
    from megadcp.config.schema import settings

    names = [name for name, _ in settings()]
    for prefix in resume.FREE:
        assert any(name.startswith(prefix) for name in names), prefix


@pytest.mark.parametrize(
    ("optim", "done", "steps", "reason"),
    [
        ({"schedule": "constant"}, 10, 20, ""),
        ({"schedule": "constant"}, 5, 5, ""),
        ({"schedule": "constant"}, 6, 5, "6 steps are done"),
        ({"schedule": "wsd", "decay_share": 0.2}, 8, 20, ""),
        ({"schedule": "wsd", "decay_share": 0.2}, 9, 20, "decay"),
        ({"schedule": "wsd", "decay_share": 0.5}, 8, 9, "decay"),
        ({"schedule": "linear"}, 1, 20, "optim.schedule=linear"),
    ],
)
def test_the_length_of_a_run(trainer: Trainer, optim: dict, done: int, steps: int, reason: str) -> None:
    trainer.stop_at = done
    entry.start(config(optim=optim))
    trainer.stop_at = 0
    longer = config(optim=optim, run={"steps": steps})
    if reason:
        assert reason in refused(longer)
    else:
        assert entry.start(longer) == 0
        assert load_run("runs/a").run.steps == steps


def test_stream_mode_has_a_fixed_length(trainer: Trainer) -> None:
    settings = {"optim": {"schedule": "constant"}, "data": {"mode": "stream"}}
    entry.start(config(**settings))
    assert "data.mode=stream" in refused(config(**settings, run={"steps": 20}))


def test_an_existing_run_may_be_refused_by_setting(trainer: Trainer) -> None:
    asked = config(checkpoint={"resume": "refuse"})
    assert entry.start(asked) == 0
    assert "checkpoint.resume=refuse" in refused(asked)


def test_somebody_elses_folder_is_left_alone(trainer: Trainer) -> None:
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/thesis.txt").write_text("mine", encoding="utf-8")
    assert "runs/a exists but is no run" in refused(config())
    Path("runs/file").write_text("", encoding="utf-8")
    assert "runs/file exists but is no run" in refused(config("file"))


def test_an_empty_folder_is_taken(trainer: Trainer) -> None:
    Path("runs/a").mkdir(parents=True)
    assert entry.start(config()) == 0


def test_a_damaged_run_yaml_is_named(trainer: Trainer) -> None:
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/run.yaml").write_text("model:\n  hiden: 3\n", encoding="utf-8")
    assert "runs/a/run.yaml: model.hiden is not a setting" in refused(config())


def test_what_can_not_run_here_leaves_nothing(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = config()
    many = dataclasses.replace(asked, cluster=dataclasses.replace(asked.cluster, nodes=2))
    assert "cluster.nodes=2 x cluster.processes=1 = 2 ranks are asked for; start them by srun or torchrun" in refused(many)
    te = dataclasses.replace(asked, precision=dataclasses.replace(asked.precision, format="bf16", backend="te"))
    monkeypatch.setattr(te_probe, "installed_problem", lambda: "Transformer Engine is not installed")
    assert "precision.backend=te can't run here: Transformer Engine is not installed; install it by pip" in refused(te)
    fp8 = dataclasses.replace(
        asked,
        model=dataclasses.replace(asked.model, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=64),
        precision=dataclasses.replace(asked.precision, format="fp8_current"),
        cluster=dataclasses.replace(asked.cluster, device="auto"),
    )
    monkeypatch.setattr(gpu_probe, "capabilities", lambda: [(8, 0)])
    assert "precision.format=fp8_current: this GPU has compute capability 8.0" in refused(fp8)
    assert "attention_dropout" in refused(dataclasses.replace(asked, model=dataclasses.replace(asked.model, attention_dropout=0.1)))
    assert not Path("runs").exists()


def test_only_one_process_trains_in_a_folder(trainer: Trainer) -> None:
    trainer.stop_at = 5
    entry.start(config())
    with keep_folder(Path("runs/a"), print):
        assert "another process is training in runs/a" in refused(config())
    assert entry.start(config()) == 75


def test_a_result_of_fewer_steps_is_no_end(trainer: Trainer) -> None:
    """An extension that failed after run.yaml was rewritten must not be taken for a finished run."""
    rate = {"schedule": "constant"}
    assert entry.start(config(optim=rate)) == 0
    trainer.stop_at = 10
    assert entry.start(config(optim=rate, run={"steps": 20})) == 75
    trainer.stop_at = 0
    assert (load_run(Path("runs/a")).run.steps, json.loads(Path("runs/a/result.json").read_text())["steps"]) == (20, 10)
    assert entry.start(config(optim=rate, run={"steps": 20})) == 0
    assert trainer.events.count("train") == 3
    assert "show" not in trainer.events


def test_a_run_refused_before_its_first_step_does_not_hold_its_name(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: Config, folder: Path, world: object, stop: object) -> int:
        raise UserError("the data can't be opened")

    monkeypatch.setattr(sys.modules["megadcp.train.loop"], "train", refuse)
    with pytest.raises(UserError, match="can't be opened"):
        entry.start(config())
    monkeypatch.setattr(sys.modules["megadcp.train.loop"], "train", trainer.train)
    assert entry.start(config(data={"train": [{"prefix": "right"}]})) == 0
    assert load_run(Path("runs/a")).data.train[0].prefix == "right"
    with pytest.raises(UserError, match="run with other settings"):
        entry.start(config())


def test_a_run_folder_that_can_not_be_written(trainer: Trainer) -> None:
    Path("afile").write_text("")
    with pytest.raises(UserError, match="run folder afile/a can't be written"):
        entry.start(config(run={"folder": "afile"}))
    assert "train" not in trainer.events
