"""Composing: the names outside checks rely on, their shapes, and everything that must be refused."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from megadcp.config.check import UserError
from megadcp.config.load import compose, find_configs
from megadcp.config.schema import Config


def refused(*overrides: str, configs: Path | None = None) -> str:
    with pytest.raises(UserError) as error:
        compose(list(overrides), configs)
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.fixture
def own_configs(tmp_path: Path) -> Path:
    """A copy of configs/ to put faults into."""
    return Path(shutil.copytree(find_configs(), tmp_path / "configs"))


SHAPES = {
    "gpt_tiny": (4, 128, 4, 4, 32, 320, 4096, True),
    "gpt2_small": (12, 768, 12, 12, 64, 3072, 50257, True),
    "gpt_1b": (16, 2048, 32, 8, 64, 8192, 128256, False),
    "gpt_8b": (32, 4096, 32, 8, 128, 14336, 128256, False),
    "gpt_70b": (80, 8192, 64, 8, 128, 28672, 128256, False),
}


@pytest.mark.parametrize("name", SHAPES)
def test_model_shapes(name: str) -> None:
    model = compose([f"model={name}", "run.name=x"]).model
    assert (model.layers, model.hidden, model.heads, model.kv_heads, model.head_dim, model.ffn, model.vocab, model.tied) == SHAPES[name]
    if name == "gpt2_small":
        assert (model.norm, model.position, model.max_position, model.mlp) == ("layernorm", "learned", 1024, "gelu_tanh")
        assert model.qkv_bias
        assert model.out_bias
        assert model.mlp_bias
    if name in ("gpt_1b", "gpt_8b", "gpt_70b"):
        assert (model.norm, model.position, model.mlp, model.rope.theta, model.rope.scaling) == ("rmsnorm", "rope", "swiglu", 500000.0, "llama3")


def test_the_default_is_the_quickstart() -> None:
    config = compose()
    assert config == compose(["experiment=quickstart"])
    assert (config.run.name, config.run.steps, config.data.max_length, config.data.tokens_per_step) == ("quickstart", 800, 512, 1024)
    assert (config.optim.lr, config.optim.schedule, config.cluster.threads) == (2e-3, "cosine", 1)
    assert config.data.prepare.kind == "python_library"
    assert config.data.train[0].prefix == "datasets/python_library/dataset"
    assert config.data.tokenizer.path == "datasets/python_library/tokenizer.model"


def test_the_data_follows_its_folder() -> None:
    data = compose(["data.prepare.folder=elsewhere"]).data
    assert (data.train[0].prefix, data.tokenizer.path) == ("elsewhere/dataset", "elsewhere/tokenizer.model")


@pytest.mark.parametrize(
    ("name", "tp", "pp", "format"), [("gpt_1b", 1, 1, "bf16"), ("gpt_8b", 1, 1, "fp8_current"), ("gpt_70b", 8, 4, "fp8_current")]
)
def test_large_experiments_compose(name: str, tp: int, pp: int, format: str) -> None:
    config = compose([f"experiment={name}"])
    assert (config.parallel.tp, config.parallel.pp, config.precision.format) == (tp, pp, format)
    assert (config.cluster.nodes, config.cluster.processes, config.cluster.world) == (4, 8, 32)
    assert config.model == compose([f"model={name}", "run.name=x"]).model


def test_the_h200_profile() -> None:
    hardware = compose(["hardware=h200"]).hardware
    assert dataclasses.asdict(hardware) == {
        "name": "h200", "gemm_flops": {"fp32": 50e12, "bf16": 480e12, "fp8": 720e12}, "gemm_half_tokens": 512, "attention_flops": 384e12,
        "attention_half_length": 600, "node_bytes": 370e9, "net_bytes": 45e9, "node_latency": 10e-6, "ring_step_seconds": 15e-6,
        "layer_overhead_seconds": 200e-6, "tp_exposed": 0.5, "memory_bytes": 141e9, "usable_fraction": 0.90, "loss_chunk": 4096, "gpus_per_node": 8,
        "reduce_bytes": 300e9, "reduce_overlap": 0.7, "memory_bandwidth": 4e12, "peak_flops": 989e12,
    }  # fmt: skip
    assert compose(["hardware=cpu"]).hardware.peak_flops is None


def test_the_environment_of_the_h200_nodes() -> None:
    file = find_configs() / "cluster" / "h200_4x8.yaml"
    environment = compose(["cluster=h200_4x8"]).cluster.environment
    assert environment["NVTE_BATCH_MHA_P2P_COMM"] == "1", "the ring would make a communicator for every pair of ranks"
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert environment["NCCL_LAUNCH_ORDER_IMPLICIT"] == "1"
    lines = file.read_text(encoding="utf-8").split("environment:\n")[1].splitlines()
    for name in environment:
        assert name.startswith(("NCCL_", "NVTE_", "TORCH_", "PYTORCH_", "CUDA_")), name
        place = next(number for number, line in enumerate(lines) if line.strip().startswith(f"{name}:"))
        assert lines[place - 1].strip().startswith("#"), f"{name}: say why"


def test_one_variable_of_the_environment() -> None:
    environment = compose(["cluster=h200_4x8", "cluster.environment.NCCL_DEBUG=INFO", "++cluster.environment.NCCL_IB_HCA=mlx5_0"]).cluster.environment
    assert (environment["NCCL_DEBUG"], environment["NCCL_IB_HCA"]) == ("INFO", "mlx5_0")
    assert compose(["++cluster.environment.NCCL_MAX_CTAS=16"]).cluster.environment == {"NCCL_MAX_CTAS": "16"}
    assert compose().cluster.environment == {}
    with pytest.raises(UserError, match=r"cluster\.environment\.NCCL_X has no value yet; \+\+cluster\.environment\.NCCL_X=VALUE"):
        compose(["cluster.environment.NCCL_X=1"])


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp8"])
def test_precisions(name: str) -> None:
    assert compose([f"precision={name}"]).precision.format.startswith(name)


def test_every_file_of_every_group_composes() -> None:
    needs = {"data=corpus": ["data.train=[{prefix: x}]", "data.tokenizer.path=t"], "parallel=tp8_pp4": ["cluster=h200_4x8", "model=gpt_70b"]}
    seen = 0
    for file in sorted(find_configs().glob("*/*.yaml")):
        choice = f"{file.parent.name}={file.stem}"
        assert isinstance(compose([choice, *needs.get(choice, [])]), Config)
        assert file.read_text(encoding="utf-8").startswith("#"), f"{file}: say what it is for"
        seen += 1
    assert seen >= 20


def test_nothing_of_omegaconf_gets_inside() -> None:
    def plain(value: object) -> bool:
        if dataclasses.is_dataclass(value):
            return type(value).__module__ == "megadcp.config.schema" and all(plain(getattr(value, f.name)) for f in dataclasses.fields(value))
        if isinstance(value, tuple):
            return all(map(plain, value))
        if type(value) is dict:
            return all(type(key) is str and plain(each) for key, each in value.items())
        return type(value) in (int, float, str, bool, type(None))

    config = compose(["data.split=[1,0,0]"])
    assert plain(config)
    assert config.data.split == (1.0, 0.0, 0.0)
    assert type(config.data.split[0]) is float
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model.layers = 3  # type: ignore[misc]
    assert hash(config) == hash(compose(["data.split=[1,0,0]"]))


def test_overrides_win_over_experiments() -> None:
    config = compose(["experiment=gpt_8b", "model=gpt_1b", "optim.lr=1e-4", "data.train.0.prefix=mine"])
    assert (config.model.layers, config.optim.lr, config.data.train[0].prefix) == (16, 1e-4, "mine")


# ---------------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("model.layrs=8", ["model.layrs", "nearest: model.layers"]),
        ("+model.layrs=8", ["model.layrs", "nearest: model.layers"]),
        ("++model.layrs=8", ["model.layrs", "nearest: model.layers"]),
        ("+model.foo=1", ["model.foo", "legal in model: layers,"]),
        ("+model.rope.thetta=1", ["model.rope.thetta", "nearest: model.rope.theta"]),
        ("+mdoel.layers=8", ["mdoel.layers", "nearest: model.layers"]),
        ("model.lr=1", ["model.lr", "nearest: optim.lr"]),
        ("+foo=1", ["foo", "model"]),
        ("modle=gpt_8b", ["modle", "nearest: model"]),
        ("model=gpt_9b", ["model=gpt_9b", "gpt_8b"]),
        ("hydra.run.dri=x", ["hydra.run.dri", "nearest: hydra.run.dir"]),
        ("+hydra.run.dri=x", ["hydra.run.dri", "nearest: hydra.run.dir"]),
        ("+hydra.foo=1", ["hydra.foo"]),
        ("+hydra.sweeper.prams.x=1", ["hydra.sweeper.prams", "hydra.sweeper.params"]),
        ("model.layers=many", ["model.layers=many", "whole number"]),
        ("model.layers=2.5", ["model.layers=2.5", "whole number"]),
        ("model.tied=perhaps", ["model.tied=perhaps", "true or false"]),
        ("optim.lr=fast", ["optim.lr=fast", "number"]),
        ("data.split=[0.5,x,0]", ["data.split[1]=x", "number"]),
        ("data.split=0.5", ["data.split=0.5", "list"]),
        ("data.train=[{prefix: a, weigth: 2}]", ["data.train[0].weigth", "nearest: data.train[0].weight"]),
        ("data.train.0.prefx=a", ["data.train.0.prefx", "nearest: data.train[0].prefix"]),
        ("model.layers=1,2", ["model.layers", "multirun"]),
        ("model.rope.theta=${nothing.here}", ["nothing.here", "model.rope.theta"]),
        ("run.name=", ["run.name"]),
        ("a b", ["override", "key=value"]),
    ],
)
def test_misspelt_and_mistyped_overrides(override: str, parts: list[str]) -> None:
    """C61, with and without a plus, and under hydra."""
    message = refused(override)
    for part in parts:
        assert part in message, message


def test_values_that_must_be_given() -> None:
    assert refused("~experiment") == "run.name must be given: run.name=VALUE"
    assert "data.train[0].prefix must be given" in refused("data=corpus")


def test_free_form_tables_of_hydra_stay_open() -> None:
    assert compose(["+hydra.job.env_set.A=1", "hydra.verbose=true"]) == compose()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("model:\n  hiden: 64\n", ["experiment/faulty", "model.hiden", "nearest: model.hidden"]),
        ("model:\n  rope:\n    teta: 64\n", ["model.rope.teta", "nearest: model.rope.theta"]),
        ("modle:\n  hidden: 64\n", ["modle", "nearest: model"]),
        ("model:\n  layers: many\n", ["experiment/faulty", "many", "model.layers"]),
        ("data:\n  train:\n    - prefx: a\n", ["experiment/faulty", "prefx"]),
        ("defaults:\n  - overide /model: gpt_8b\n", ["experiment/faulty.yaml", "'overide'", "nearest: override"]),
        ("defaults:\n  - optinal override /model: gpt_8b\n", ["'optinal'", "nearest: optional"]),
        ("defaults:\n  - override /model: gpt_9b\n", ["model=gpt_9b", "gpt_8b"]),
        ("model: [\n", ["faulty"]),
    ],
)
def test_faulty_experiment_files(own_configs: Path, text: str, parts: list[str]) -> None:
    """C61: keys, values, and keywords of a defaults list."""
    (own_configs / "experiment" / "faulty.yaml").write_text(f"# @package _global_\n{text}", encoding="utf-8")
    message = refused("experiment=faulty", configs=own_configs)
    for part in parts:
        assert part in message, message


def test_an_experiment_without_its_first_line(own_configs: Path) -> None:
    (own_configs / "experiment" / "faulty.yaml").write_text("model:\n  layers: 2\n", encoding="utf-8")
    assert "@package _global_" in refused("experiment=faulty", configs=own_configs)


def test_an_own_experiment_works(own_configs: Path) -> None:
    text = "# @package _global_\ndefaults:\n  - override /model: gpt2_small\n  - optional override /log: standard\nrun:\n  name: mine\n"
    (own_configs / "experiment" / "mine.yaml").write_text(text, encoding="utf-8")
    config = compose(["experiment=mine", "data.max_length=512"], own_configs)
    assert (config.run.name, config.model.layers) == ("mine", 12)
