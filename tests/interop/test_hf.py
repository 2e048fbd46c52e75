"""Folders written here load in transformers with the same logits, and folders of transformers load here with the same logits."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from hf_helpers import GPT2, MODELS, SMALL, export, weights
from safetensors.torch import load_file, save_file

from megadcp.config.check import UserError
from megadcp.config.schema import ModelConfig, RopeConfig, TokenizerConfig
from megadcp.interop.hf import Export, Options, open_folder, write_folder
from megadcp.interop.hf_config import write_config
from megadcp.interop.hf_verify import their_logits
from megadcp.interop.tensors import lazy
from megadcp.train.weights import logits_of as our_logits

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
IDS = torch.randint(0, SMALL["vocab"], (64,), generator=torch.Generator().manual_seed(3))


def distance(ours, theirs):
    return float((ours - theirs).abs().max() / theirs.abs().max())


# ------------------------------------------------------------------------------------------------------- equal both ways
@pytest.mark.peer
@pytest.mark.parametrize("name", MODELS)
def test_written_folders_give_the_same_logits_in_transformers(name, tmp_path):
    """C73: at each of 64 positions."""
    made = export(MODELS[name])
    write_folder(made, tmp_path / "out", Options())
    ours = our_logits(made.model, made.tensors, IDS)
    assert distance(ours, their_logits(transformers, tmp_path / "out", IDS)) < 1e-5  # also: no missing and no unexpected tensor


@pytest.mark.peer
def test_rows_in_the_other_rotary_order_would_be_seen(tmp_path):
    """C73: neighbours turn together instead of halves. The first token does not turn, so only later ones tell."""
    made = export(MODELS["llama grouped, tied"])
    write_folder(made, tmp_path / "out", Options())
    tensors, half = load_file(tmp_path / "out" / "model.safetensors"), SMALL["head_dim"] // 2
    for name in [name for name in tensors if ".q_proj." in name or ".k_proj." in name]:
        heads = tensors[name].view(-1, 2, half, tensors[name].shape[-1])
        tensors[name] = heads.transpose(1, 2).reshape(tensors[name].shape).contiguous()
    save_file(tensors, tmp_path / "out" / "model.safetensors")
    ours, theirs = our_logits(made.model, made.tensors, IDS), their_logits(transformers, tmp_path / "out", IDS)
    assert distance(ours[:1], theirs[:1]) < 1e-5
    assert distance(ours[-1:], theirs[-1:]) > 1e-2


@pytest.mark.peer
@pytest.mark.parametrize("spelling", ["old", "new"])
@pytest.mark.parametrize("name", ["llama theta", "llama linear", "llama llama3", "llama yarn, own ramp"])
def test_either_spelling_of_the_rotary_settings_is_enough(name, spelling, tmp_path):
    made = export(MODELS[name])
    write_folder(made, tmp_path / "out", Options())
    for field in ("rope_parameters",) if spelling == "old" else ("rope_theta", "rope_scaling"):
        change(tmp_path / "out", **{field: "absent"})
    assert open_folder(tmp_path / "out").model == made.model
    ours = our_logits(made.model, made.tensors, IDS)
    assert distance(ours, their_logits(transformers, tmp_path / "out", IDS)) < 1e-5
    plain = our_logits(dataclasses.replace(made.model, rope=RopeConfig()), made.tensors, IDS)
    assert distance(plain, ours) > 1e-3  # so the comparison can fail


@pytest.mark.parametrize("name", MODELS)
def test_round_trip_is_bitwise(name, tmp_path):
    made = export(MODELS[name])
    write_folder(made, tmp_path / "out", Options(max_shard_bytes=40_000))
    back = open_folder(tmp_path / "out")
    assert back.model == dataclasses.replace(made.model, depth_scaled_init=True)
    assert set(back.tensors) == set(made.tensors)
    for tensor in made.tensors:
        assert torch.equal(back.tensors[tensor], made.tensors[tensor]), tensor


COMMON = {"vocab_size": 131, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
COMMON |= {"bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.08}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
THEIRS = {
    "llama": ("Llama", COMMON),
    "llama tied, llama3": ("Llama", COMMON | {"tie_word_embeddings": True, "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 32}}),
    "llama head_dim": ("Llama", COMMON | {"head_dim": 20, "attention_bias": True, "mlp_bias": True}),
    "llama linear": ("Llama", COMMON | {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}}),
    "llama yarn": (
        "Llama",
        COMMON
        | {
            "max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "yarn", "factor": 8.0, "rope_theta": 1e4, "original_max_position_embeddings": 32, "beta_fast": 20.0},
        },
    ),
    "mistral": ("Mistral", COMMON | {"sliding_window": None, "head_dim": 20}),
    "qwen2": ("Qwen2", COMMON),
    "qwen3": ("Qwen3", COMMON | {"head_dim": 20}),
    "gpt2": ("GPT2", {"vocab_size": 131, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 70, "initializer_range": 0.08}),
}


def make_theirs(name):
    family, values = THEIRS[name]
    values = values | {"bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**values)
    model = getattr(transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.mark.peer
@pytest.mark.parametrize("name", THEIRS)
def test_folders_of_transformers_give_the_same_logits_here(name, tmp_path):
    theirs = make_theirs(name)
    theirs.save_pretrained(tmp_path / "in", max_shard_size="40KB" if name == "qwen3" else "1GB")
    found = open_folder(tmp_path / "in")
    with torch.no_grad():
        expected = theirs(input_ids=IDS[None]).logits[0]
    assert distance(our_logits(found.model, found.tensors, IDS), expected) < 1e-5


@pytest.mark.peer
def test_verify_sees_a_wrong_model(tmp_path, monkeypatch):
    made = export(MODELS["llama grouped, tied"])
    said = write_folder(made, tmp_path / "out", Options(verify=our_logits))
    assert said[-1].startswith("verified: transformers")
    monkeypatch.setattr("megadcp.interop.hf.write_config", lambda *values: write_config(*values) | {"rms_norm_eps": 0.1})
    with pytest.raises(UserError, match=r"--verify: logits differ by .*; nothing was written"):
        write_folder(made, tmp_path / "wrong", Options(verify=our_logits))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_verify_without_transformers_is_one_clear_error(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(UserError, match=r'pip install "megadcp\[hf\]"'):
        write_folder(export(MODELS["llama"]), tmp_path / "out", Options(verify=our_logits))
    assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------------------------------------------------------- written
def test_shards_have_an_index_and_stay_below_the_size(tmp_path):
    write_folder(export(MODELS["llama"]), tmp_path / "out", Options(max_shard_bytes=30_000))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    held = {name: path.name for path in files for name in load_file(path)}
    assert held == index["weight_map"]
    sizes = [sum(t.numel() * t.element_size() for t in load_file(path).values()) for path in files]
    assert max(sizes) <= 30_000
    assert sum(sizes) == index["metadata"]["total_size"]


@pytest.mark.parametrize(("dtype", "name"), [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16"), ("", "bfloat16")])
def test_format_in_file_and_config_are_the_one_asked_for(tmp_path, dtype, name):
    """C71."""
    write_folder(export(MODELS["qwen2"], torch.bfloat16), tmp_path / "out", Options(dtype=dtype))
    assert {str(t.dtype) for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {f"torch.{name}"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == name


def test_tied_and_untied_files(tmp_path):
    """C75."""
    for tied in (False, True):
        write_folder(export(dataclasses.replace(MODELS["llama"], tied=tied)), tmp_path / str(tied), Options())
        assert ("lm_head.weight" in load_file(tmp_path / str(tied) / "model.safetensors")) is not tied
        assert json.loads((tmp_path / str(tied) / "config.json").read_text())["tie_word_embeddings"] is tied


def test_a_tied_flag_with_two_matrices_is_refused_both_ways(tmp_path):
    """C75."""
    made = export(MODELS["llama grouped, tied"])
    extra = dict(made.tensors) | {"head.weight": torch.zeros(131, 48)}
    with pytest.raises(UserError, match=r"head.weight and embedding.weight differ"):
        write_folder(dataclasses.replace(made, tensors=lazy(extra)), tmp_path / "out", Options())
    assert not (tmp_path / "out").exists()
    write_folder(made, tmp_path / "in", Options())
    file = tmp_path / "in" / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    assert "head.weight" not in open_folder(tmp_path / "in").tensors  # the same matrix twice does no harm
    save_file(tensors | {"lm_head.weight": torch.zeros(131, 48)}, file)
    with pytest.raises(UserError, match="says that the head is tied"):
        open_folder(tmp_path / "in")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"missing: lm_head.weight"):
        open_folder(tmp_path / "in")


def test_vocabulary_without_tokens_is_kept_or_trimmed(tmp_path):
    made = dataclasses.replace(export(dataclasses.replace(MODELS["llama"], vocab=264)), tokenizer=TokenizerConfig("bytes", ""))
    kept = write_folder(made, tmp_path / "kept", Options())
    assert kept[0] == "vocabulary: 264 rows, 7 of them without a token; kept as trained"
    write_folder(made, tmp_path / "trimmed", Options(trim=True, verify=our_logits))
    assert open_folder(tmp_path / "trimmed").model.vocab == 257
    both = [their_logits(transformers, tmp_path / name, IDS) for name in ("kept", "trimmed")]
    assert distance(both[1], both[0][:, :257]) < 1e-6
    with pytest.raises(UserError, match="needs the run's tokenizer"):
        write_folder(export(MODELS["llama"]), tmp_path / "none", Options(trim=True))


def test_nothing_is_overwritten_and_nothing_left_behind(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="exists; choose another folder"):
        write_folder(export(MODELS["llama"]), tmp_path / "out", Options())

    def full(*values, **named):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megadcp.interop.hf_files.save_file", full)
    with pytest.raises(OSError, match="No space"):
        write_folder(export(MODELS["llama"]), tmp_path / "other", Options())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_wrong_weights_are_named(tmp_path):
    tensors = weights(MODELS["llama"])
    del tensors["layers.1.mlp.up.weight"]
    tensors |= {"norm.bias": torch.zeros(48), "norm.weight": torch.zeros(47)}
    expected = r"missing: layers.1.mlp.up.weight; not of this model: norm.bias; of another shape: norm.weight is \[47\], expected \[48\]"
    with pytest.raises(UserError, match=expected):
        write_folder(Export(MODELS["llama"], lazy(tensors), 64), tmp_path / "out", Options())


UNWRITABLE = {
    "squared_relu": (ModelConfig(**SMALL, mlp="squared_relu"), "model.mlp=squared_relu"),
    "layernorm": (ModelConfig(**SMALL, norm="layernorm"), "model.norm=layernorm"),
    "out bias alone": (ModelConfig(**SMALL, out_bias=True), "model.out_bias=True without model.qkv_bias"),
    "norms and mlp bias": (ModelConfig(**SMALL, qk_norm=True, mlp_bias=True), "model.mlp_bias=True"),
    "gpt2 grouped": (dataclasses.replace(GPT2, kv_heads=2), r"model.kv_heads=2 \(it has 4\)"),
    "gpt2 without biases": (dataclasses.replace(GPT2, mlp_bias=False), "model.mlp_bias=False"),
    "odd width": (ModelConfig(**SMALL | {"hidden": 50}), "model.hidden=50 is no multiple of model.heads=4"),
}


@pytest.mark.parametrize("name", UNWRITABLE)
def test_models_that_no_family_computes_are_refused(name, tmp_path):
    model, message = UNWRITABLE[name]
    with pytest.raises(UserError, match=message):
        write_folder(export(model), tmp_path / "out", Options())


# -------------------------------------------------------------------------------------------------------------------- read
@pytest.fixture
def folder(tmp_path):
    write_folder(export(MODELS["llama theta"]), tmp_path / "in", Options(max_shard_bytes=60_000))
    return tmp_path / "in"


def change(folder, name="config.json", **values):
    described = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({key: value for key, value in (described | values).items() if value != "absent"}))


@pytest.mark.parametrize("wrong", ["../model.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "", 5, "model.bin", "x\0.safetensors"])
def test_an_index_does_not_lead_out_of_its_folder(folder, wrong):
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    change(folder, "model.safetensors.index.json", weight_map=index | {"lm_head.weight": wrong})
    with pytest.raises(UserError, match=r"only names of \.safetensors files in its own folder"):
        open_folder(folder)


def test_an_index_and_files_that_disagree(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    change(folder, "model.safetensors.index.json", weight_map=index | {"model.extra": index["lm_head.weight"]})
    with pytest.raises(UserError, match=r"disagree about model\.extra"):
        open_folder(folder)
    change(folder, "model.safetensors.index.json", weight_map=index | {"model.extra": "model-00009-of-00009.safetensors"})
    with pytest.raises(UserError, match="lacks model-00009-of-00009"):
        open_folder(folder)


def test_a_damaged_file_is_named(folder):
    file = next(folder.glob("model-00002*"))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match=f"{file.name} is no whole safetensors file"):
        open_folder(folder)


def test_pickles_are_refused_with_the_reason(folder):
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"never read")
    with pytest.raises(UserError, match=r"pytorch_model.bin can't be read: loading pickled weights runs any code"):
        open_folder(folder)


def test_quantised_tensors_are_refused(tmp_path):
    made = export(MODELS["llama"])
    write_folder(made, tmp_path / "in", Options())
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"].to(torch.int8)}, tmp_path / "in" / "model.safetensors")
    with pytest.raises(UserError, match=r"model.norm.weight is stored as I8"):
        open_folder(tmp_path / "in")


@pytest.mark.peer
def test_short_names_and_old_buffers(tmp_path):
    theirs = make_theirs("gpt2")
    theirs.save_pretrained(tmp_path)
    found = open_folder(tmp_path)
    expected = {name: found.tensors[name].clone() for name in found.tensors}
    short = {name.removeprefix("transformer."): tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    short |= {"h.0.attn.bias": torch.ones(1, 1, 70, 70, dtype=torch.bool), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    save_file(short, tmp_path / "model.safetensors")
    again = open_folder(tmp_path)
    assert set(again.tensors) == set(expected)
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in expected.items())
