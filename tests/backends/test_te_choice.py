"""Which backend a run takes: what is said where Transformer Engine can't run, and what is made where it can."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import te_fake
import torch

from megadcp.backends import choose as choose_module
from megadcp.backends import te_probe
from megadcp.backends.choose import Choice, choose, group_splits, make_backend, require_alike
from megadcp.backends.te_backend import TeBackend
from megadcp.backends.te_probe import INSTALL, TeUnavailable, installed_problem, load, refuse
from megadcp.config.check import UserError
from megadcp.config.schema import ClusterConfig, Config, HardwareConfig, ModelConfig, ParallelConfig, PrecisionConfig, RunConfig
from megadcp.mesh.coords import Mesh
from megadcp.mesh.groups import Group
from megadcp.nn.gpt import GPT

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def nothing_stays():
    """Modules that a test has imported go with it."""
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "transformer_engine"}
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        del sys.modules[name]
    sys.modules.update(before)


@pytest.fixture
def hopper(monkeypatch):
    """A machine with an H200 and Transformer Engine, as far as anybody asks."""
    recorder = te_fake.Recorder()
    te = te_fake.make(recorder)
    te_fake.install(monkeypatch, te)
    monkeypatch.setattr(te_probe, "version", _version("2.20.2"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    return te


def _version(found: str):
    return lambda package: found


# --------------------------------------------------------------------------------------------------------------- choice
@pytest.mark.parametrize("format", ["bf16", "fp8_current", "fp8_block"])
@pytest.mark.parametrize("backend", ["auto", "te"])
def test_on_hopper_it_is_taken(hopper, format, backend):
    choice = choose(PrecisionConfig(format, backend), CUDA)
    assert choice.name == "te"
    assert choice.why.startswith("Transformer Engine 2.20.2, ")


def test_asking_for_torch_is_enough(hopper):
    assert choose(PrecisionConfig("bf16", "torch"), CUDA) == Choice("as precision.backend says")


REASONS = [
    ("fp32", CUDA, "for bf16 and fp8, not for precision.format=fp32"),
    ("bf16", torch.device("cpu"), "needs a GPU and this run is on a CPU"),
]


@pytest.mark.parametrize(("format", "device", "reason"), REASONS)
def test_what_it_is_not_for(hopper, format, device, reason):
    choice = choose(PrecisionConfig(format, "auto"), device)
    assert choice.name == "torch"
    assert reason in choice.why
    with pytest.raises(UserError, match=rf"precision\.backend=te can't run here: .*{reason}; set precision\.backend=torch"):
        choose(PrecisionConfig(format, "te"), device)


def test_an_older_gpu(hopper, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "this GPU has 8.0" in choose(PrecisionConfig("bf16"), CUDA).why
    with pytest.raises(UserError, match="from Hopper on"):
        choose(PrecisionConfig("bf16", "te"), CUDA)


def test_a_recipe_that_the_device_does_not_have(hopper, monkeypatch):
    name = "is_fp8_block_scaling_available"
    monkeypatch.setattr(sys.modules["transformer_engine.pytorch"], name, lambda return_reason=False: (False, "CUDA 12.9 is needed"), raising=False)
    with pytest.raises(
        UserError, match=r"no precision.format=fp8_block for this device \(CUDA 12.9 is needed\); set precision.format to bf16 or fp8_cur"
    ):
        choose(PrecisionConfig("fp8_block", "te"), CUDA)
    assert choose(PrecisionConfig("fp8_block"), CUDA).name == "torch"
    assert choose(PrecisionConfig("fp8_current"), CUDA).name == "te"


@pytest.mark.parametrize(("found", "works"), [
    ("2.19.9", False), ("2.20.2", True), ("2.20.2+abc123", True), ("2.20.3", False), ("2.21.0", False), ("3.0", False), ("", False),
])  # fmt: skip
def test_versions(hopper, monkeypatch, found, works):
    monkeypatch.setattr(te_probe, "installed_version", lambda: found)
    choice = choose(PrecisionConfig("bf16"), CUDA)
    assert (choice.name == "te") is works
    if not works:
        assert "tested" in choice.why
        with pytest.raises(UserError, match=r"tested: 2\.20\.2; install it by pip install"):
            choose(PrecisionConfig("bf16", "te"), CUDA)


# ---------------------------------------------------------------------------------------------------------------- probe
def _package(tmp_path: Path, monkeypatch, inside: str = "", error: str = "") -> None:
    """A package on the path, as pip leaves it."""
    folder = tmp_path / "transformer_engine"
    (folder / "pytorch").mkdir(parents=True)
    (folder / "common" / "recipe").mkdir(parents=True)
    for part in ("", "common", "common/recipe", "pytorch"):
        (folder / part / "__init__.py").write_text(error if part == "pytorch" else "", encoding="utf-8")
    if inside:
        (tmp_path / inside).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / inside).touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(te_probe, "version", _version("2.20.2"))
    monkeypatch.delenv("NVTE_BATCH_MHA_P2P_COMM", raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)


EXTENSION = "transformer_engine_torch.cpython-311-x86_64-linux-gnu.so"


def test_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    assert installed_problem() == "Transformer Engine is not installed"
    with pytest.raises(TeUnavailable, match="not installed"):
        load()
    with pytest.raises(UserError) as refused:
        refuse("te", "auto")
    assert (
        str(refused.value)
        == f"precision.backend=te can't run here: Transformer Engine is not installed; install it by {INSTALL}, or set precision.backend=torch"
    )
    refuse("auto", "auto")
    refuse("torch", "cpu")
    with pytest.raises(UserError, match=r"cluster\.device=cpu; set cluster\.device=cuda"):
        refuse("te", "cpu")


def test_its_python_part_alone(tmp_path, monkeypatch):
    """pip lists it, but there is nothing to run."""
    _package(tmp_path, monkeypatch)
    assert installed_problem() == "only the Python part of Transformer Engine 2.20.2 is installed, without its extension for torch"


@pytest.mark.parametrize("place", [EXTENSION, f"transformer_engine/{EXTENSION}", f"transformer_engine/wheel_lib/{EXTENSION}"])
def test_the_extension_is_found_where_the_package_looks(tmp_path, monkeypatch, place):
    _package(tmp_path, monkeypatch, place)
    assert installed_problem() == ""
    te = load()
    assert te.pytorch.__name__ == "transformer_engine.pytorch"
    assert te.recipe.__name__ == "transformer_engine.common.recipe"
    assert os.environ["NVTE_BATCH_MHA_P2P_COMM"] == "1"


def test_a_setting_of_the_user_stays(tmp_path, monkeypatch):
    _package(tmp_path, monkeypatch, EXTENSION)
    monkeypatch.setenv("NVTE_BATCH_MHA_P2P_COMM", "0")
    load()
    assert os.environ["NVTE_BATCH_MHA_P2P_COMM"] == "0"


@pytest.mark.parametrize("error", [
    "raise OSError('libcuda.so.1: cannot open shared object file\\nmore lines')", "raise RuntimeError('Found empty meta package')",
    "import a_module_that_nobody_has", "assert False, 'version mismatch'", "raise FileNotFoundError('Could not find shared object file')",
])  # fmt: skip
def test_every_way_to_fail_is_one_reason(tmp_path, monkeypatch, error):
    _package(tmp_path, monkeypatch, EXTENSION, error)
    with pytest.raises(TeUnavailable) as reason:
        load()
    assert str(reason.value).startswith("Transformer Engine 2.20.2 is installed but can't be loaded (")
    assert "\n" not in str(reason.value)
    assert INSTALL in reason.value.refusal


def test_a_module_without_a_version(monkeypatch):
    spec = ModuleSpec("transformer_engine", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(te_probe, "installed_version", lambda: "")
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    assert "no version of it is known" in installed_problem()


# ----------------------------------------------------------------------------------------------------------------- made
def test_make_backend(hopper, monkeypatch):
    """bf16 parameters are for Transformer Engine; the fp32 model that masters start from is the torch backend's, of the same names."""
    monkeypatch.setattr(choose_module, "choose", lambda precision, device: Choice("tested", hopper))
    made = make_backend(PrecisionConfig("fp8_current", "te", 1), torch.bfloat16, "cpu")
    assert isinstance(made, TeBackend)
    assert made.layer(0, 3) is not made
    assert made.layer(1, 3) is made
    exact = make_backend(PrecisionConfig("fp8_current", "te", 1), torch.float32, "cpu")
    assert exact.name == "torch"
    config = ModelConfig(layers=1, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=61)
    names = [[name for name, _ in GPT(config, backend, 1, 16).named_parameters()] for backend in (made, exact)]
    assert names[0] == names[1]


def test_without_it_fp8_runs_on_torch():
    made = make_backend(PrecisionConfig("fp8_current"), torch.bfloat16, "cpu")
    assert made.name == "torch"
    linear = made.linear(32, 64, False, "column")
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.no_grad():
        linear.weight.normal_(generator=torch.Generator().manual_seed(2))
        rounded, exact = linear(x).float(), x.float() @ linear.weight.float().t()
    error = float((rounded - exact).norm() / exact.norm())
    assert 0.01 < error < 0.1  # eight bits, not sixteen


def config_of(lanes: int, tp: int = 1, kv_heads: int = 8, max_cp: int = 0) -> Config:
    hardware = replace(HardwareConfig("test"), gpus_per_node=8)
    model = ModelConfig(heads=8, kv_heads=kv_heads)
    return Config(
        run=RunConfig(name="test"),
        model=model,
        parallel=ParallelConfig(tp, max_cp=max_cp),
        cluster=ClusterConfig(processes=lanes * tp),
        hardware=hardware,
    )


@pytest.mark.parametrize(("lanes", "tp", "kv_heads", "max_cp", "splits"), [
    (16, 1, 8, 0, {16: 8}), (16, 1, 2, 0, {4: 2, 8: 2, 16: 2}), (16, 1, 2, 8, {4: 2, 8: 2}), (8, 1, 8, 0, {}), (8, 2, 4, 0, {4: 2, 8: 2}),
    (8, 1, 1, 0, {}), (16, 8, 8, 0, {}),
])  # fmt: skip
def test_groups_that_kind_2d_needs(lanes, tp, kv_heads, max_cp, splits):
    config, mesh = config_of(lanes, tp, kv_heads, max_cp), Mesh(lanes, tp)
    assert group_splits(config, mesh, Choice("", te_fake.make(te_fake.Recorder()))) == splits
    assert group_splits(config, mesh, Choice("")) == {}


def test_ranks_that_would_run_on_different_backends():
    choice = Choice("Transformer Engine is not installed")
    require_alike(choice, 3, ("torch", "another reason"))
    with pytest.raises(UserError, match=r"rank 3 .* torch \(Transformer Engine is not installed\), but rank 0 on te \(the fastest\); set precision"):
        require_alike(choice, 3, ("te", "the fastest"))


def test_one_rank_is_not_sharded():
    backend = TeBackend(te_fake.make(te_fake.Recorder()), (torch.float64, "cpu"), Group.single(3))
    assert backend.heads(8, 2) == (8, 2)
