"""Runs that start from given weights, and folders exported while a run trains."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from train_helpers import MODEL, config, write_corpus

from megadcp.config.check import UserError
from megadcp.config.run_file import dump_run
from megadcp.config.schema import RopeConfig
from megadcp.interop import hf
from megadcp.interop.tensors import lazy
from megadcp.mesh.coords import Mesh
from megadcp.mesh.groups import GroupPool
from megadcp.parallel.assemble import whole_tensors
from megadcp.parallel.boxes import weight_pieces
from megadcp.train import checkpoint, entry, export
from megadcp.train.exchange import check_exchange
from megadcp.train.export import Exporter
from megadcp.train.loop import train
from megadcp.train.metrics import read_metrics
from megadcp.train.run_folder import RunFolder
from megadcp.train.state import new_state
from megadcp.train.weights import export_of, open_weights, start_from

CPU = torch.device("cpu")
UNTIED = dataclasses.asdict(dataclasses.replace(MODEL, tied=False, layers=2))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def old(corpus, tmp_path_factory):
    """A trained run."""
    folder = tmp_path_factory.mktemp("runs") / "old"
    setup = config(corpus, run={"name": "old", "steps": 10, "sample_prompt": ""}, checkpoint={"every": 5})
    dump_run(setup, folder / "run.yaml")
    assert train(setup, folder) == 0
    return folder


@pytest.fixture(scope="module")
def exported(old, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "model"
    hf.write_folder(export_of(open_weights(old)), folder, hf.Options())
    return folder


def test_any_kind_of_source_gives_the_same_weights(corpus, old, exported):
    expected = open_weights(old).tensors
    for source in (old, old / "checkpoints" / "step-00000010", exported):
        said = []
        state = new_state(config(corpus, run={"init_from": str(source)}), CPU)
        start_from(state, said.append)
        found = dict(state.model.named_parameters())
        assert set(found) == set(expected)
        assert all(torch.equal(found[name], expected[name]) for name in found)
        assert said[0].startswith(f"starting from the weights of {old if source == old else source}")
        assert "optimizer, learning rate, data and counters start anew" in said[0]
        assert (state.optimizer.updates, state.progress.step) == (0, 0)


def test_masters_of_narrow_weights_keep_what_the_source_has(corpus, old):
    state = new_state(config(corpus, run={"init_from": str(old)}, precision={"format": "bf16"}), CPU)
    start_from(state, lambda line: None)
    expected = open_weights(old).tensors
    masters = {piece.name: piece.values.view(piece.parameter.shape) for piece in state.optimizer.state()["master"]}
    assert set(masters) == set(expected)
    for name, parameter in state.model.named_parameters():
        assert torch.equal(masters[name], expected[name])
        assert torch.equal(parameter, expected[name].bfloat16())


LAYOUTS = {"tp": {"tp": 2}, "pp": {"pp": 2}, "lanes": {}}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_starts_from_them(corpus, tmp_path, layout, tied):
    model = {**UNTIED, "tied": tied, "rope": RopeConfig()}
    source = new_state(config(corpus, model=model, run={"seed": 7}), CPU)
    tensors = {name: parameter.detach().clone() for name, parameter in source.model.named_parameters()}
    hf.write_folder(hf.Export(source.config.model, lazy(tensors), 128), tmp_path / "in", hf.Options())
    settings = config(corpus, model=model, run={"init_from": str(tmp_path / "in")}, parallel=LAYOUTS[layout], precision={"format": "bf16"})

    def work(rank, world):
        parallel = settings.parallel
        with GroupPool(Mesh(world // (parallel.tp * parallel.pp), parallel.tp, parallel.pp), rank, CPU, 1) as pool:
            state = new_state(settings, CPU, pool=pool)
            start_from(state, lambda line: None)
            masters = whole_tensors(state.optimizer.state()["master"], pool, tied)
            return whole_tensors(weight_pieces(state.model), pool, tied), masters

    found, masters = run_ranks(2, work)[0]
    assert set(found) == set(masters) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor.bfloat16()), name
        assert torch.equal(masters[name], tensor), name


SAVED_LAYOUTS = {
    "uneven stages": ({"pp": 2, "stage_layers": (1, 2)}, 2),
    "uneven stages in chunks": ({"pp": 2, "stage_layers": (3, 4), "virtual_stages": 2}, 2),
    "tp, odd vocabulary": ({"tp": 2}, 2),
    "four stages": ({"pp": 4, "stage_layers": (2, 3, 1, 1)}, 4),
}


@pytest.mark.parametrize("layout", SAVED_LAYOUTS)
def test_an_export_does_not_show_the_layout_that_trained_it(corpus, tmp_path, layout):
    """C71: layer i of the export is layer i of the model, byte for byte, and no padding is in it."""
    parallel, ranks = SAVED_LAYOUTS[layout]
    model = {**UNTIED, "vocab": 261, "layers": sum(parallel.get("stage_layers", (2,))), "rope": RopeConfig()}
    source = new_state(config(corpus, model=model, run={"seed": 7}), CPU)
    tensors = {name: parameter.detach().clone() for name, parameter in source.model.named_parameters()}
    hf.write_folder(hf.Export(source.config.model, lazy(tensors), 128), tmp_path / "in", hf.Options())
    settings = config(corpus, model=model, run={"init_from": str(tmp_path / "in")}, parallel=parallel)
    run = RunFolder(tmp_path / "run")
    dump_run(settings, run.path / "run.yaml")

    def work(rank, world):
        mesh = Mesh(world // (settings.parallel.tp * settings.parallel.pp), settings.parallel.tp, settings.parallel.pp)
        with GroupPool(mesh, rank, CPU, 1) as pool:
            state = new_state(settings, CPU, pool=pool)
            start_from(state, lambda line: None)
            state.progress.step = 1
            saver = checkpoint.Saver(run, settings.checkpoint, lambda line: None, state.world)
            saver.save(1, state.boxes(), state.meta(), state.own_meta())
            saver.finish()
            saver.close()

    run_ranks(ranks, work)
    hf.write_folder(export_of(open_weights(run.path)), tmp_path / "out", hf.Options())
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tmp_path / "in" / "model.safetensors").read_bytes()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 261


def test_another_model_is_refused_before_anything_is_made(corpus, old, exported, tmp_path):
    for source in (old, exported):
        run = {"init_from": str(source), "folder": str(tmp_path)}
        with pytest.raises(UserError, match=r"is another model: model.layers=3 \(there 2\), model.ffn=48 \(there 64\); set these"):
            entry.start(config(corpus, run=run, model={"layers": 3, "ffn": 48}))
        with pytest.raises(UserError, match=r"model.tied=False \(there True\)"):
            entry.start(config(corpus, run=run, model={"tied": False}))
    with pytest.raises(UserError, match="is not a folder"):
        entry.start(config(corpus, run={"init_from": str(tmp_path / "none"), "folder": str(tmp_path)}))
    assert list(tmp_path.iterdir()) == []
    check_exchange(config(corpus, run={"init_from": str(old)}, model={"residual_dropout": 0.3, "init_std": 0.1}))
    check_exchange(config(corpus, run={"init_from": str(tmp_path / "none")}), begun=True)


def test_another_rope_is_told_and_allowed(corpus, old):
    said = []
    longer = config(corpus, run={"init_from": str(old)}, model={"rope": RopeConfig(scaling="linear", factor=2.0)})
    check_exchange(longer)
    start_from(new_state(longer, CPU), said.append)
    assert [line for line in said if "WARNING" in line] == [
        "WARNING: model.rope.scaling=linear (there none): meant only where the context is to change",
        "WARNING: model.rope.factor=2.0 (there 1.0): meant only where the context is to change",
    ]


def test_another_tokenizer_is_told(corpus, old):
    said = []
    state = new_state(config(corpus, run={"init_from": str(old)}), CPU, tokenizer="another")
    start_from(state, said.append)
    assert any("trained with another tokenizer" in line for line in said)


def test_a_run_goes_on_from_the_loss_that_the_weights_have(corpus, old, exported, tmp_path, capsys):
    """And when it is stopped and called again, from its own checkpoint."""
    for name, source in (("of_run", old), ("of_folder", exported)):
        setup = config(corpus, run={"name": name, "init_from": str(source), "steps": 3, "sample_prompt": ""}, optim={"lr": 1e-5, "warmup_steps": 0})
        dump_run(setup, tmp_path / name / "run.yaml")
        assert train(setup, tmp_path / name) == 0
    out = capsys.readouterr().out
    assert out.count("starting from the weights of") == 2
    first = [[row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl") if "loss" in row] for name in ("of_run", "of_folder")]
    assert first[0] == first[1]
    trained = [row["loss"] for row in read_metrics(old / "metrics.jsonl") if "loss" in row]
    assert first[0][0] < trained[0] - 0.5  # not random any more
    more = dataclasses.replace(setup, run=dataclasses.replace(setup.run, steps=4), optim=dataclasses.replace(setup.optim, schedule="constant"))
    assert train(more, tmp_path / "of_folder") == 0
    out = capsys.readouterr().out
    assert "going on after step 3" in out
    assert "starting from the weights" not in out


# ------------------------------------------------------------------------------------------------------- export on the way
def test_a_run_exports_its_last_checkpoint(corpus, tmp_path, capsys):
    setup = config(corpus, run={"steps": 4, "sample_prompt": ""}, checkpoint={"every": 2, "export_every": 4})
    dump_run(setup, tmp_path / "run.yaml")
    assert train(setup, tmp_path) == 0
    assert f"exported {tmp_path}/hf/step-00000004" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["step-00000004"]
    last, found = open_weights(tmp_path).tensors, open_weights(tmp_path / "hf" / "step-00000004").tensors
    assert all(torch.equal(found[name], last[name]) for name in last)


@pytest.mark.slow
def test_a_run_exports_on_its_way(corpus, tmp_path, capsys):
    setup = config(
        corpus, run={"steps": 10, "sample_prompt": ""}, checkpoint={"every": 2, "keep_last": 1, "export_every": 4, "export_format": "bf16"}
    )  # fmt: skip
    dump_run(setup, tmp_path / "run.yaml")
    assert train(setup, tmp_path) == 0
    out = capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["step-00000004", "step-00000008", "step-00000010"]
    assert all(f"exported {tmp_path}/hf/step-{step:08d}" in out for step in (4, 8, 10))
    last, found = open_weights(tmp_path).tensors, open_weights(tmp_path / "hf" / "step-00000010")
    assert found.source["step"] == 10
    assert all(torch.equal(found.tensors[name], last[name].bfloat16()) for name in last)
    described = json.loads((tmp_path / "hf" / "step-00000004" / "config.json").read_text())
    assert described["dtype"] == "bfloat16"


@pytest.mark.slow
def test_a_run_of_two_ranks_exports(corpus, tmp_path):
    """As a user starts it: the second rank is done while the first one waits for its last export."""
    run = {"steps": 4, "folder": str(tmp_path), "name": "run", "sample_prompt": ""}
    setup = config(corpus, run=run, cluster={"processes": 2}, checkpoint={"every": 2, "export_every": 2})
    dump_run(setup, tmp_path / "run.yaml")
    program = (
        f"from megadcp.config.run_file import load_run; from megadcp.train import entry; raise SystemExit(entry.start(load_run({str(tmp_path)!r})))"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout
    assert sorted(path.name for path in (tmp_path / "run" / "hf").iterdir()) == ["step-00000002", "step-00000004"]
    last, found = open_weights(tmp_path / "run").tensors, open_weights(tmp_path / "run" / "hf" / "step-00000004").tensors
    assert all(torch.equal(found[name], last[name]) for name in last)


class Fake:
    """A process that ends when it is told to."""

    def __init__(self, command, **options):
        self.command, self.returncode, self.killed = command, None, False

    def poll(self):
        return self.returncode

    def wait(self, seconds):
        self.returncode = 0 if self.returncode is None else self.returncode

    def communicate(self):
        assert self.returncode is not None
        return ("error: no room\n" if self.returncode else "done\n"), None

    def kill(self):
        self.killed, self.returncode = True, -9


@pytest.fixture
def exporter(corpus, tmp_path, monkeypatch):
    started, said = [], []

    def start(command, **options):
        started.append(Fake(command, **options))
        return started[-1]

    monkeypatch.setattr("megadcp.train.export.subprocess.Popen", start)
    setup = config(corpus, run={"steps": 11}, checkpoint={"every": 1, "export_every": 4})
    made = Exporter(RunFolder(tmp_path), setup, said.append)
    return made, started, said, tmp_path / "checkpoints"


def save(folder, step):
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "file").write_text("weights")
    return path


def test_exports_wait_for_their_checkpoint_and_for_each_other(exporter):
    made, started, said, folder = exporter
    for step in (1, 4, 8, 11):
        made.saving(step)
    made.poll()
    assert started == []  # nothing is saved yet
    import shutil

    for step in (4, 8):
        save(folder, step)
        made.poll()
        shutil.rmtree(folder / f"step-{step:08d}")  # as keep_last does; the links stay
    assert len(started) == 1
    assert (Path(started[0].command[3]) / "file").read_text() == "weights"
    assert Path(started[0].command[3]).name == "step-00000004"
    made.poll()
    assert len(started) == 1
    started[0].returncode = 1
    made.poll()
    assert said == ["WARNING: step 4 was not exported: error: no room"]
    assert len(started) == 2
    made.finish()
    assert said[1].startswith("exported ")
    assert list((made.folder / ".source").iterdir()) == []


def test_a_stopped_run_gives_up_and_makes_up_for_it(exporter, corpus):
    made, started, said, folder = exporter
    save(folder, 8)
    made.saving(8)
    made.poll()
    made.close()
    assert started[0].killed
    assert not (made.folder / ".source").exists()
    again = Exporter(RunFolder(folder.parent), made._config, said.append)
    again.poll()
    assert [Path(each.command[3]).name for each in started] == ["step-00000008"] * 2
    again.finish()


def test_ranks_that_do_not_export_leave_alone_what_the_first_one_reads(exporter):
    """They are done earlier: the first rank waits for its last export."""
    made, started, said, folder = exporter
    save(folder, 8)
    made.saving(8)
    made.poll()
    other = Exporter(RunFolder(folder.parent), made._config, said.append, leads=False)
    other.saving(8)
    other.poll()
    other.finish()
    other.close()
    assert len(started) == 1
    assert (Path(started[0].command[3]) / "file").read_text() == "weights"
    made.finish()


def test_models_that_no_family_computes_are_refused_at_the_start(corpus):
    with pytest.raises(UserError, match=r"no Hugging Face family computes what this model does; for llama: model.mlp=squared_relu"):
        check_exchange(config(corpus, model={"mlp": "squared_relu"}, checkpoint={"every": 2, "export_every": 2}))
    with pytest.raises(UserError, match=r"checkpoint.export_every=3 is no multiple of checkpoint.every=2; legal here: 2, 4"):
        check_exchange(config(corpus, checkpoint={"every": 2, "export_every": 3}))


def test_the_writing_process_tells_what_is_wrong(old, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("megadcp.train.export.os.nice", lambda more: 0)
    assert export.main([str(old / "checkpoints" / "step-00000010"), str(tmp_path), ""]) == 1
    assert capsys.readouterr().out == f"error: {tmp_path} exists; choose another folder, or remove it\n"
    assert export.main([str(tmp_path / "none"), str(tmp_path / "out"), ""]) == 1
    assert "is not a folder" in capsys.readouterr().out
