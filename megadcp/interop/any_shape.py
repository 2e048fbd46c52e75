"""What the planner must know of a model that is not ours: its figures from a transformers config, a device's profile, bytes that always stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from megadcp.config.check import UserError, nearest
from megadcp.config.run_file import from_dict
from megadcp.config.schema import (
    ClusterConfig,
    Config,
    DataConfig,
    HardwareConfig,
    ModelConfig,
    ParallelConfig,
    PlanConfig,
    PrecisionConfig,
    RunConfig,
)
from megadcp.plan.basis import basis_from
from megadcp.plan.memory import MOST_TOKENS, MemoryModel

PROFILES = Path(__file__).resolve().parents[2] / "configs" / "hardware"
GATES = ("gate_proj", "gate_up_proj", "w3")  # matrices that only a gated MLP has
FFN = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
LAYER_CLASS = "GradientCheckpointingLayer"  # transformers' base of everything that can be recomputed


def is_transformers(model: nn.Module) -> bool:
    """Whether it is a transformers model; transformers need not be installed to ask."""
    return any(each.__name__ == "PreTrainedModel" for each in type(model).__mro__)


def shape_of(model: nn.Module) -> ModelConfig:
    """The figures that costs follow from. UserError names what the config lacks."""
    config: Any = getattr(model, "config", None)
    if config is None or not is_transformers(model):
        raise UserError("this model has no transformers config to read its figures from; give Options(shape=ModelConfig(layers=.., hidden=.., ..))")
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()

    def figure(name: str) -> Any:
        try:
            return getattr(config, name, None)
        except Exception as error:  # configs whose layers differ refuse to name one figure for all
            text = str(error).split("\n")[0]
            raise UserError(f"config.{name} of {type(model).__name__}: {text}; give Options(shape=ModelConfig(..)) by hand") from None

    needed = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    missing = [name for name in needed if not isinstance(figure(name), int)]
    if missing:
        raise UserError(f"the config of {type(model).__name__} has no {', '.join(missing)}; give Options(shape=ModelConfig(..)) by hand")
    layers, hidden, heads, vocab = (figure(name) for name in needed)
    head_dim = figure("head_dim") or hidden // heads
    ffn = next((value for name in FFN if isinstance(value := figure(name), int)), 4 * hidden)
    gated = any(name.rsplit(".", 1)[-1] in GATES for name, _ in model.named_modules())
    return ModelConfig(
        layers=layers, hidden=hidden, heads=heads, kv_heads=figure("num_key_value_heads") or heads, head_dim=head_dim, ffn=ffn,
        vocab=vocab, mlp="swiglu" if gated else "gelu", tied=bool(getattr(config, "tie_word_embeddings", False)),
    )  # fmt: skip


def position_limit(model: nn.Module) -> int:
    """Rows of a learned table of positions; 0 for rotary ones, which go on for ever."""
    config: Any = getattr(model, "config", None)
    rotary = any("rotary" in type(each).__name__.lower() for each in model.modules())
    return 0 if rotary or config is None else int(getattr(config, "max_position_embeddings", 0) or 0)


def decoder_layers(model: nn.Module, count: int) -> list[nn.Module]:
    """The layers that transformers can recompute, in order; none where they aren't as many as the model has layers."""
    found = [each for each in model.modules() if any(base.__name__ == LAYER_CLASS for base in type(each).__mro__)]
    return found if len(found) == count else []


def hardware_of(wanted: HardwareConfig | str | None, device: torch.device) -> HardwareConfig:
    """A profile: as given, by its name in configs/hardware, by the path of such a file, or (None) cpu or h200 by the device."""
    if isinstance(wanted, HardwareConfig):
        return wanted
    name = wanted or ("h200" if device.type == "cuda" else "cpu")
    path = Path(name) if name.endswith((".yaml", ".yml")) else PROFILES / f"{name}.yaml"
    if not path.is_file():
        names = sorted(each.stem for each in PROFILES.glob("*.yaml"))
        raise UserError(f"there is no hardware profile {path}; give Options(hardware=HardwareConfig(..)), a file, or a name; {nearest(name, names)}")
    return from_dict({"run": {"name": "any"}, "hardware": yaml.safe_load(path.read_text(encoding="utf-8"))}).hardware


def config_of(
    shape: ModelConfig, plan: PlanConfig, hardware: HardwareConfig, world: int, dtype: torch.dtype, limits: tuple[int, int], always: float
) -> Config:  # fmt: skip
    """The config that the planner takes. limits: (largest cp or 0, longest document); always: bytes a rank that stay (0: as for our own models).

    All logits of a microbatch exist at one time, so the profile's loss_chunk is no limit here.
    """
    formats = {torch.float32: "fp32", torch.float64: "fp32", torch.bfloat16: "bf16", torch.float16: "bf16"}
    if dtype not in formats:
        raise UserError(f"the model's parameters are {dtype}; the planner knows costs of fp32, fp64, bf16 and fp16")
    hardware = replace(hardware, loss_chunk=MOST_TOKENS)
    config = Config(
        run=RunConfig(name="any"), model=shape, data=DataConfig(max_length=limits[1]), parallel=ParallelConfig(max_cp=limits[0]), plan=plan,
        precision=PrecisionConfig(formats[dtype]), cluster=ClusterConfig(processes=world), hardware=hardware,
    )  # fmt: skip
    if always:
        more = always - MemoryModel(basis_from(config)).static(0, 0)
        left = max(1.0, hardware.memory_bytes - more / hardware.usable_fraction)
        config = replace(config, hardware=replace(hardware, memory_bytes=left))
    return config


def always_bytes(parameters: Sequence[nn.Parameter], sharded: int) -> float:
    """Weights, gradients and two moments of one rank, all in their own format; `sharded`: ranks that share the moments."""
    whole = sum(each.numel() * each.element_size() for each in parameters)
    trained = sum(each.numel() * each.element_size() for each in parameters if each.requires_grad)
    return whole + trained + 2 * trained / sharded
