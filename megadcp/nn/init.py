"""Initial weights as a pure function of (seed, parameter name, shape): no matter which rank, device or order makes them."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from megadcp.config.schema import ModelConfig
from megadcp.nn.shard import shard_of, take, whole_shape

RESIDUAL = ("attention.out.weight", "mlp.down.weight")  # matrices that write to the residual stream


def initial(name: str, shape: torch.Size | tuple[int, ...], config: ModelConfig, seed: int) -> Tensor:
    """The fp32 start value of one whole parameter, on the CPU. A rank that holds a shard takes its slice of this."""
    if len(shape) == 1:
        return torch.ones(shape) if name.endswith("weight") else torch.zeros(shape)
    std = config.init_std
    if config.depth_scaled_init and name.endswith(RESIDUAL):
        std /= math.sqrt(2 * config.layers)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape, device="cpu").normal_(0.0, std, generator=generator)


@torch.no_grad()
def initialise(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Fill every parameter of the model in place. Parameters on the meta device are left alone.

    A tied LM head of its own (on the last of several stages) starts as the embedding does.
    """
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            source = "embedding.weight" if config.tied and name == "head.weight" else name
            parameter.copy_(take(initial(source, whole_shape(parameter), config, seed), shard_of(parameter)))
