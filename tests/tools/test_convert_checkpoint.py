"""What a person does: train, convert, use with transformers; and the other way."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "train"))
from train_helpers import config, write_corpus  # noqa: E402

from megadcp.config.load import compose  # noqa: E402
from megadcp.config.run_file import dump_run, load_run  # noqa: E402
from megadcp.train.loop import train  # noqa: E402
from megadcp.train.weights import open_weights  # noqa: E402

spec = importlib.util.spec_from_file_location("tool_convert_checkpoint", ROOT / "tools" / "convert_checkpoint.py")
convert = importlib.util.module_from_spec(spec)
spec.loader.exec_module(convert)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    setup = config(write_corpus(folder), run={"steps": 20}, checkpoint={"every": 10})
    (folder / "run").mkdir()
    dump_run(setup, folder / "run" / "run.yaml")
    assert train(setup, folder / "run") == 0
    return folder / "run"


@pytest.fixture
def call(capsys):
    def call(*argv) -> tuple[int, list[str], str]:
        capsys.readouterr()
        code = convert.main([str(each) for each in argv])
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err

    return call


@pytest.mark.peer
def test_train_convert_and_generate_with_transformers(run, call, tmp_path):
    transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
    code, out, err = call("to-hf", run, tmp_path / "out", "--verify")
    assert (code, err) == (0, "")
    assert out[0] == f"{run}/checkpoints/step-00000020 -> {tmp_path / 'out'}"
    assert out[1:3] == ["vocabulary: 260 rows, 3 of them without a token; kept as trained", "llama: 20 tensors of float32 in 1 file"]
    assert out[3] == "tokenizer: tokenizer.json, which gives the same ids"
    assert "the same ids for" in out[4]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = tokenizer("def ", return_tensors="pt")
    made = model.generate(**ids, max_new_tokens=8, do_sample=False)
    greedy = (run / "sample.txt").read_text().split("--- greedy ---\n")[1].split("\n--- temperature")[0]
    assert tokenizer.decode(made[0], skip_special_tokens=True) == greedy
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 256


def test_step_format_shards_and_vocabulary(run, call, tmp_path):
    argv = ("--step", 10, "--dtype", "bf16", "--max-shard-size", "9KB", "--trim-vocab", "--context", 77)
    code, out, _ = call("to-hf", run, tmp_path / "out", *argv)
    assert code == 0
    assert "step-00000010 ->" in out[0]
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (described["vocab_size"], described["dtype"], described["max_position_embeddings"]) == (257, "bfloat16", 77)
    about = json.loads((tmp_path / "out" / "megadcp.json").read_text())
    assert about["source"]["step"] == 10
    files = list((tmp_path / "out").glob("model-*.safetensors"))
    assert len(files) > 2
    old, new = open_weights(run, 10).tensors, open_weights(tmp_path / "out").tensors
    assert torch.equal(new["embedding.weight"], old["embedding.weight"][:257].bfloat16())
    assert os.stat(files[0]).st_mode & 0o777 == os.stat(tmp_path / "out" / "config.json").st_mode & 0o777


@pytest.mark.peer
def test_there_and_back_is_bitwise_and_starts_runs(run, call, tmp_path):
    assert call("to-hf", run, tmp_path / "out")[0] == 0
    code, out, err = call("from-hf", tmp_path / "out", tmp_path / "back", "--verify")
    assert (code, err) == (0, "")
    assert out[0].endswith("14 tensors in 1 file")
    assert out[1] == "tokenizer: bytes, 257 tokens"
    assert any(line.startswith("weights only: optimizer, learning rate") for line in out)
    old, new = open_weights(run), open_weights(tmp_path / "back")
    assert set(old.tensors) == set(new.tensors)
    assert all(torch.equal(old.tensors[name], new.tensors[name]) for name in old.tensors)
    assert (new.context, new.tokenizer.kind) == (128, "bytes")
    assert call("to-hf", tmp_path / "back", tmp_path / "again")[0] == 0
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "again"))
    assert set(one) == set(two)
    assert all(torch.equal(one[name], two[name]) for name in one)
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_text() == (tmp_path / "again" / name).read_text()


def test_the_printed_command_composes(run, call, tmp_path):
    call("to-hf", run, tmp_path / "out")
    last = call("from-hf", tmp_path / "out", tmp_path / "back")[1][-1]
    words = last.removeprefix("next: python pretrain_gpt.py ").replace("'", "").split(" ")
    assert words == [
        "--config-dir", f"{tmp_path}/back/configs", "experiment=back", "data.train=[{prefix:", "PATH}]", "run.name=NAME",
    ]  # fmt: skip
    experiment = yaml.safe_load((tmp_path / "back" / "configs" / "experiment" / "back.yaml").read_text())
    assert experiment["run"] == {"init_from": str(tmp_path / "back")}
    configs = tmp_path / "configs"
    shutil.copytree(ROOT / "configs", configs)
    shutil.copytree(tmp_path / "back" / "configs", configs, dirs_exist_ok=True)
    found = compose(["experiment=back", "data.train=[{prefix: x}]", "run.name=NAME"], configs)
    model = load_run(run).model
    assert (found.model.hidden, found.model.kv_heads, found.model.vocab, found.model.tied) == (model.hidden, model.kv_heads, model.vocab, True)
    assert (found.run.init_from, found.data.tokenizer.kind, found.data.max_length) == (str(tmp_path / "back"), "bytes", 128)


def test_wrong_requests(run, call, tmp_path):
    (tmp_path / "empty").mkdir()
    for argv, message in (
        (("to-hf", tmp_path / "none", tmp_path / "x"), "is not a folder"),
        (("to-hf", tmp_path / "empty", tmp_path / "x"), "holds no weights"),
        (("to-hf", run, tmp_path / "empty"), "exists; choose another folder"),
        (("to-hf", run, tmp_path / "x", "--step", 7), "there are: 10, 20"),
        (("to-hf", run, tmp_path / "x", "--context", 0), "--context 0: at least 1"),
        (("from-hf", run, tmp_path / "x"), "has no config.json"),
        (("from-hf", run, tmp_path / "empty"), "exists; choose another folder"),
    ):
        code, out, err = call(*argv)
        assert (code, out) == (2, [])
        assert err.startswith("error: ")
        assert message in err
        assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
    for wrong in ("5XB", "0", "-1", ""):
        with pytest.raises(SystemExit):
            convert.arguments(["to-hf", "a", "b", "--max-shard-size", wrong])
    assert convert.size("1.5GiB") == 3 << 29


def test_unknown_fields_and_foreign_tokenizers(run, call, tmp_path):
    call("to-hf", run, tmp_path / "out")
    file = tmp_path / "out" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"my_field": 3}))
    assert "does not know, so their effect on the model is unknown: my_field=3" in call("from-hf", tmp_path / "out", tmp_path / "x")[2]
    assert call("from-hf", tmp_path / "out", tmp_path / "ok", "--ignore", "my_field")[0] == 0
    described = json.loads(file.read_text()) | {"vocab_size": 100}
    file.write_text(json.dumps(described))
    code, _, err = call("from-hf", tmp_path / "out", tmp_path / "x", "--ignore", "my_field")
    assert code == 2
    assert "model.embed_tokens.weight is [260, 32], expected [100, 32]" in err


def test_a_checkpoint_folder_is_enough(run, call, tmp_path):
    shutil.copytree(run / "checkpoints" / "step-00000010", tmp_path / "step-00000010")
    assert call("to-hf", tmp_path / "step-00000010", tmp_path / "out")[0] == 0
    assert call("to-hf", run, tmp_path / "other", "--step", 10)[0] == 0
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "other"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_disk_that_fills_up(run, call, tmp_path, monkeypatch):
    def full(*values, **named):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megadcp.interop.hf_files.save_file", full)
    assert call("to-hf", run, tmp_path / "out")[0] == 1
    assert list(tmp_path.iterdir()) == []


def test_pickles_are_never_loaded(run, call, tmp_path):
    call("to-hf", run, tmp_path / "out")
    (tmp_path / "out" / "model.safetensors").unlink()

    class Payload:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "marker",))

    import pickle

    for name in ("pytorch_model.bin", "training_args.bin", "tokenizer.pkl"):
        (tmp_path / "out" / name).write_bytes(pickle.dumps(Payload()))
    code, _, err = call("from-hf", tmp_path / "out", tmp_path / "x")
    assert code == 2
    assert "can't be read: loading pickled weights runs any code" in err
    assert not (tmp_path / "marker").exists()


@pytest.mark.slow
@pytest.mark.peer
def test_as_a_person_does_it(tmp_path):
    """Commands alone: train, take it to Hugging Face, load it there, bring it back, train on, compare losses, generate."""
    transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
    import subprocess

    def command(*words: object) -> str:
        words = tuple(str(word) for word in words)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    tool = ROOT / "tools"
    data = (f"data.train=[{{prefix: {write_corpus(tmp_path)}, name: words}}]", "data.split=[0.9,0.1,0]", "data.max_length=128")
    small = ("data.tokens_per_step=256", "plan.pack_tokens=200", "run.validate_tokens=2000", "cluster.threads=1", "optim.schedule=constant")
    model = ("model.vocab=260", "model.layers=2", "model.hidden=32", "model.heads=4", "model.kv_heads=2", "model.head_dim=8", "model.ffn=64")
    bytes_only = ("data.tokenizer.kind=bytes", "data.tokenizer.path=")
    train_words = (ROOT / "pretrain_gpt.py", "~experiment", "data=corpus", "optim.lr=1e-2", "run.steps=30", "run.name=first")
    command(*train_words, *data, *small, *model, *bytes_only)
    command(tool / "convert_checkpoint.py", "to-hf", "runs/first", "exported", "--verify")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")("return ", return_tensors="pt")
    made = theirs.generate(**ids, max_new_tokens=12, do_sample=False)[0]
    theirs.save_pretrained(tmp_path / "again", max_shard_size="20KB")  # as somebody else would write it
    transformers.AutoTokenizer.from_pretrained(tmp_path / "exported").save_pretrained(tmp_path / "again")
    last = command(tool / "convert_checkpoint.py", "from-hf", "again", "imported", "--verify").splitlines()[-1]
    assert last.startswith("next: python pretrain_gpt.py --config-dir imported/configs experiment=imported ")
    text = command(tool / "generate.py", "imported", "--prompt", "return ", "--tokens", 12, "--greedy")
    assert text.rstrip("\n") == transformers.AutoTokenizer.from_pretrained(tmp_path / "exported").decode(made, skip_special_tokens=True).rstrip("\n")
    for name in ("runs/first", "imported"):
        command(tool / "eval_model.py", name, "--data", "runs/first", "--json", f"{name.split('/')[0]}.json")
    one, two = (json.loads((tmp_path / f"{name}.json").read_text())["validation"]["words"] for name in ("runs", "imported"))
    assert one == pytest.approx(two, rel=1e-6)
    words = ("--config-dir", tmp_path / "imported" / "configs", "experiment=imported", "run.steps=1", "run.name=second", "optim.lr=1e-5")
    said = command(ROOT / "pretrain_gpt.py", *words, *data, *small)
    assert f"starting from the weights of {tmp_path / 'imported'}" in said
    first = json.loads((tmp_path / "runs" / "second" / "metrics.jsonl").read_text().splitlines()[0])["loss"]
    assert first == pytest.approx(one["loss"], abs=0.4)  # other documents, but the same trained model
    shutil.rmtree(tmp_path / "imported")
    assert "is finished" in command(
        ROOT / "pretrain_gpt.py", "~experiment", "run.name=first", *train_words[2:4], "run.steps=30", *data, *small, *model, *bytes_only
    )
