"""Which backend a run takes."""

from __future__ import annotations

import torch

from megadcp.backends.torch_sharded import torch_backend
from megadcp.config.schema import PrecisionConfig
from megadcp.mesh.groups import Group
from megadcp.nn.backend import Backend


def make_backend(
    precision: PrecisionConfig, dtype: torch.dtype, device: torch.device | str, tp: Group | None = None, sequence_parallel: bool = True
) -> Backend:
    """The backend that `precision` asks for, for parameters of `dtype`; tp: the ranks that share each matrix (None: nothing is shared)."""
    return torch_backend(dtype, device, tp, sequence_parallel)
