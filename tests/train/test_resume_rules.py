"""What may differ when a run goes on: settings by name, the order of documents after a change, and data files that changed under a run."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from train_helpers import config, write_corpus

from megadcp.config.check import UserError, check
from megadcp.config.run_file import dump_run, flat
from megadcp.config.schema import Config, SourceConfig, settings
from megadcp.data.fingerprints import changed_files, print_of, prints_of
from megadcp.data.indexed import IndexedReader, IndexedWriter
from megadcp.data.order import open_training
from megadcp.train import checkpoint, entry, loop, resume
from megadcp.train.incidents import read_incidents
from megadcp.train.loop import FINISHED, STOPPED, train
from megadcp.train.metrics import read_metrics
from megadcp.train.run_folder import RunFolder


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("other"), documents=90)


@pytest.fixture(scope="module")
def half(prefix, tmp_path_factory):
    """A run of 8 steps that was stopped after 4."""
    folder = tmp_path_factory.mktemp("half") / "run"
    stop_after(4, setup(prefix), folder)
    return folder


def setup(prefix: str, allow: tuple[str, ...] = (), **changes) -> Config:
    run = {"steps": 8, "validate_every": 0, "sample_prompt": "", **changes.pop("run", {})}
    return config(prefix, run=run, checkpoint={"every": 0, "allow_change": allow}, plan={"worker": "thread"}, **changes)


def stop_after(step: int, made: Config, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_end_of_step", stopping(loop._end_of_step, step))
        assert train(made, folder) == STOPPED


def stopping(real, step: int):
    def end_of_step(run, stop):
        stop.name = "SIGTERM" if run.state.progress.step == step else ""
        return real(run, stop)

    return end_of_step


def resumed(half: Path, folder: Path, made: Config, monkeypatch) -> list[list[int]]:
    """Go on to the end; the documents of each step that ran."""
    shutil.copytree(half, folder)
    seen, real = [], loop._one_step
    monkeypatch.setattr(loop, "_one_step", lambda run, loaded, *rest: (seen.append(loaded.documents.ids.tolist()), real(run, loaded, *rest))[1])
    assert train(made, folder) == FINISHED
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl") if "loss" in row] == list(range(1, made.run.steps + 1))
    return seen


def steps_of(made: Config, numbers) -> list[list[int]]:
    source = open_training(made.data, made.run.steps)
    return [source.step(number).ids.tolist() for number in numbers]


def blended(prefix: str, other: str, allow: tuple[str, ...]) -> Config:
    made = setup(prefix, allow)
    return replace(made, data=replace(made.data, train=(SourceConfig(prefix, 1.0, "words"), SourceConfig(other, 2.0, "more"))))


# -------------------------------------------------------------------------------------------------------------- settings
def test_names_in_allow_change_are_settings(prefix):
    for allowed in ("optim.lr", "data.train", "data.train[0].weight", "optim", "model.rope.theta"):
        check(setup(prefix, (allowed,)))
    with pytest.raises(UserError, match=r"checkpoint\.allow_change names optim\.lrr, which is no setting; nearest: optim\.lr"):
        check(setup(prefix, ("optim.lrr",)))


@pytest.mark.parametrize(
    ("allow", "key", "expected"),
    [
        (("optim.lr",), "optim.lr", True),
        (("optim",), "optim.lr", True),
        (("optim.l",), "optim.lr", False),
        (("data.train",), "data.train[1].prefix", True),
        (("data.train[1]",), "data.train[1].prefix", True),
        (("data.train[1]",), "data.train[0].prefix", False),
        ((), "optim.lr", False),
    ],
)
def test_what_a_name_covers(prefix, allow, key, expected):
    assert resume.is_allowed(setup(prefix, allow), key) is expected


def test_every_name_of_the_rules_is_a_setting():
    names = [name for name, _ in settings()]
    assert set(resume.FIXED) <= set(names)
    for prefix in (*resume.FREE, *resume.ORDER):
        assert any(name.startswith(prefix) for name in names), prefix


def test_whatever_decides_shapes_is_fixed(prefix):
    """Changed one by one: those whose checkpoint another model can't take are refused even by name."""
    made = setup(prefix, tuple({name.split(".")[0] for name in flat(config(prefix))}))
    assert resume.refused(["model.layers", "optim.lr", "model.rope.theta", "log.every"], made) == ["model.layers"]
    assert "can't change in a run" in resume.ways_out(["model.layers", "optim.lr"])
    assert "checkpoint.allow_change=[optim.lr,data.train]" in resume.ways_out(["optim.lr", "data.train[0].prefix", "data.train[0].weight"])


def test_the_entry_refuses_and_allows_by_name(prefix, tmp_path, half):
    folder = tmp_path / "run"
    shutil.copytree(half, folder)
    dump_run(setup(prefix), folder / "run.yaml")
    faster = {"optim": {"lr": 0.5}, "model": {"norm_eps": 1e-4}}
    with pytest.raises(UserError, match=r"model.norm_eps: 1e-05 -> 0.0001, optim.lr: 0.01 -> 0.5; .*allow_change=\[model.norm_eps,optim.lr\]"):
        entry.changes(folder, setup(prefix, **faster))
    with pytest.raises(UserError, match=r"settings: model.norm_eps"):
        entry.changes(folder, setup(prefix, ("optim.lr",), **faster))
    assert set(entry.changes(folder, setup(prefix, ("optim.lr", "model"), **faster))) == {"optim.lr", "model.norm_eps", "checkpoint.allow_change"}
    with pytest.raises(UserError, match=r"model.ffn can't change in a run"):
        entry.changes(folder, setup(prefix, ("model",), model={"ffn": 32}))


# ----------------------------------------------------------------------------------------------------------------- order
def test_the_same_command_reads_on(prefix, half, tmp_path, monkeypatch):
    made = setup(prefix)
    assert resumed(half, tmp_path / "run", made, monkeypatch) == steps_of(made, range(4, 8))


def test_another_blend_is_refused(prefix, other, half, tmp_path):
    shutil.copytree(half, tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"the data order has changed .*checkpoint\.allow_change=\[data\.train\]"):
        train(blended(prefix, other, ()), tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_another_blend_by_name_is_the_new_order_from_the_same_step_on(prefix, other, half, tmp_path, monkeypatch, capsys):
    made = blended(prefix, other, ("data.train",))
    assert resumed(half, tmp_path / "run", made, monkeypatch) == steps_of(made, range(4, 8))
    said = capsys.readouterr().out
    assert "WARNING: the order of the documents has changed since step 4" in said
    assert "from here on it is step 4 of the new order" in said
    kinds = [(one["kind"], one["step"]) for one in read_incidents(tmp_path / "run")]
    assert ("order_changed", 4) in kinds
    assert ("setting_changed", 4) in kinds


@pytest.mark.parametrize(("size", "place"), [(512, 2), (192, 6), (400, 3)])
def test_another_step_size_goes_on_in_the_same_sequence(prefix, half, tmp_path, monkeypatch, size, place):
    """Every document once: those of the old steps, then those that begin at or behind the token that was reached."""
    made = setup(prefix, ("data.tokens_per_step",), data={"tokens_per_step": size})
    assert place == -(-4 * 256 // size)
    assert resumed(half, tmp_path / "run", made, monkeypatch) == steps_of(made, range(place, place + 4))
    kept = checkpoint.newest(RunFolder(tmp_path / "run"), pytest.fail)
    assert (kept.meta["step"], kept.meta["place"]) == (8, place + 4)


def test_the_place_in_the_order_survives_the_next_restart(prefix, half, tmp_path, monkeypatch):
    made = setup(prefix, ("data.tokens_per_step",), data={"tokens_per_step": 512})
    shutil.copytree(half, tmp_path / "first")
    stop_after(6, made, tmp_path / "first")
    later = replace(made, checkpoint=replace(made.checkpoint, allow_change=()))
    assert resumed(tmp_path / "first", tmp_path / "run", later, monkeypatch) == steps_of(made, range(4, 6))


def test_a_changed_rate_by_name(prefix, half, tmp_path, monkeypatch, capsys):
    made = setup(prefix, ("optim.lr",), optim={"lr": 2e-2})
    resumed(half, tmp_path / "run", made, monkeypatch)
    assert "setting changed since step 4: optim.lr 0.01 -> 0.02; the new value holds from here on" in capsys.readouterr().out
    (change,) = [one for one in read_incidents(tmp_path / "run") if one["kind"] == "setting_changed"]
    assert (change["setting"], change["old"], change["new"]) == ("optim.lr", 0.01, 0.02)


# ------------------------------------------------------------------------------------------------------------- data files
def own_copy(prefix: str, folder: Path) -> str:
    folder.mkdir()
    for ending in ("idx", "bin"):
        shutil.copy(f"{prefix}.{ending}", folder / f"corpus.{ending}")
    return str(folder / "corpus")


def rewrite(prefix: str, how: str) -> None:
    reader = IndexedReader(prefix)
    documents = [np.array(reader.read(number)) for number in range(len(reader))]
    if how == "longer":
        documents.append(documents[0])
    else:  # the same lengths, other tokens: another tokenizer, or the text edited
        documents = [(document + 1) % 250 for document in documents]
    with IndexedWriter(f"{prefix}.new", reader.dtype) as writer:
        for document in documents:
            writer.add(document)
        writer.finish()
    for ending in ("idx", "bin"):
        Path(f"{prefix}.new.{ending}").replace(f"{prefix}.{ending}")


@pytest.mark.parametrize(
    ("how", "told"), [("longer", r"corpus\.idx had \d+ bytes and has \d+; .*corpus\.bin had"), ("other", r"corpus\.bin has other")]
)
@pytest.mark.parametrize("part", ["train", "validation"])
def test_data_that_changed_under_a_run_is_refused_by_the_name_of_the_file(prefix, tmp_path, how, told, part):
    mine = own_copy(prefix, tmp_path / "mine")
    data = {"train": (SourceConfig(mine, 1.0, "words"),)} if part == "train" else {"validation": (SourceConfig(mine, 1.0, "held"),)}
    made = setup(prefix, data=data)
    stop_after(2, made, tmp_path / "run")
    rewrite(mine, how)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    other = {"train": "data.validation", "validation": "data.train"}[part]
    for named in ((), (other,)):
        with pytest.raises(UserError, match=rf"{told}.*allow_change=\[data\.{part}\]"):
            train(replace(made, checkpoint=replace(made.checkpoint, allow_change=named)), tmp_path / "run")
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    allowed = replace(made, checkpoint=replace(made.checkpoint, allow_change=(f"data.{part}",)))
    assert train(allowed, tmp_path / "run") == FINISHED
    assert any(one["kind"] == "data_changed" for one in read_incidents(tmp_path / "run"))
    assert train(replace(made, run=replace(made.run, steps=8)), tmp_path / "run") == FINISHED  # the new files are now the run's


def test_before_anything_was_trained_any_files_will_do(prefix, tmp_path):
    mine = own_copy(prefix, tmp_path / "mine")
    made = setup(prefix, data={"train": (SourceConfig(mine, 1.0, "words"),)}, run={"steps": 1})
    resume.check_files(tmp_path, made, False, pytest.fail)
    rewrite(mine, "longer")
    resume.check_files(tmp_path, made, False, pytest.fail)
    resume.check_files(tmp_path, made, True, pytest.fail)


def test_a_damaged_memory_of_the_files_is_told(prefix, tmp_path):
    made, said = setup(prefix), []
    resume.check_files(tmp_path, made, False, pytest.fail)
    (tmp_path / resume.PRINTS).write_text("{")
    resume.check_files(tmp_path, made, True, said.append)
    assert len(said) == 1
    assert "whether the data has changed under the run is not known" in said[0]
    resume.check_files(tmp_path, made, True, pytest.fail)  # remembered anew


def test_large_files_are_sampled(tmp_path, monkeypatch):
    """A file that grew, and one that was written anew, differ; nothing reads all of it."""
    large = tmp_path / "large.bin"
    with open(large, "wb") as file:
        file.truncate(1 << 36)
    first = print_of(large)
    assert first["of"] == "samples"
    with open(large, "r+b") as file:
        file.write(b"x" * 100)
    assert print_of(large)["hash"] != first["hash"]
    assert "has other content" in changed_files({str(large): first}, prints_of([large]))[0]
    monkeypatch.setattr("megadcp.data.fingerprints.WHOLE_BYTES", 10)
    small = tmp_path / "small.idx"
    small.write_bytes(b"0123456789abcdef")
    assert print_of(small)["of"] == "samples"
    with pytest.raises(UserError, match=r"none\.bin can't be read"):
        print_of(tmp_path / "none.bin")
