"""Which backend a run takes, and why."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megadcp.backends.gpu_probe import too_old_for_te
from megadcp.backends.te_backend import RECIPES, TeBackend
from megadcp.backends.te_probe import FAILURES, Te, TeUnavailable, installed_version, load
from megadcp.backends.torch_sharded import torch_backend
from megadcp.config.check import UserError
from megadcp.config.schema import Config, PrecisionConfig
from megadcp.mesh.coords import Mesh
from megadcp.mesh.groups import Group, cp_sizes
from megadcp.nn.backend import Backend
from megadcp.parallel.context import head_split
from megadcp.parallel.tensor import local_heads


@dataclass(frozen=True)
class Choice:
    """A backend, and why it is this one, in one line. te: what it runs on; None for the torch backend."""

    why: str
    te: Te | None = None

    @property
    def name(self) -> str:
        """As in precision.backend."""
        return "torch" if self.te is None else "te"


def choose(precision: PrecisionConfig, device: torch.device | str) -> Choice:
    """Transformer Engine where it is asked for, or with `auto` where it works and is the faster one.

    Raises:
        UserError: it is asked for and can't run here; the message says why, and what would work.
    """
    if precision.backend == "torch":
        return Choice("as precision.backend says")
    try:
        te = _usable(precision, torch.device(device))
    except TeUnavailable as reason:
        if precision.backend == "te":
            raise UserError(reason.refusal) from None
        return Choice(str(reason))
    how = "as precision.backend says" if precision.backend == "te" else "the fastest on this GPU"
    return Choice(f"Transformer Engine {installed_version()}, {how}", te)


def require_alike(choice: Choice, rank: int, first: tuple[str, str]) -> None:
    """UserError on a rank whose backend is not rank 0's, of which `first` are name and why: their results, and their groups, would differ."""
    if choice.name != first[0]:
        raise UserError(
            f"rank {rank} would run on backend {choice.name} ({choice.why}), but rank 0 on {first[0]} ({first[1]}); "
            "set precision.backend=torch, or make the nodes alike"
        )


def _usable(precision: PrecisionConfig, device: torch.device) -> Te:
    """Transformer Engine, loaded. TeUnavailable: the first reason why not."""
    if precision.format not in ("bf16", *RECIPES):
        raise TeUnavailable(f"Transformer Engine is for bf16 and fp8, not for precision.format={precision.format}")
    if device.type != "cuda":
        raise TeUnavailable(f"Transformer Engine needs a GPU and this run is on a {device.type.upper()}")
    reason = too_old_for_te(torch.cuda.get_device_capability(device))
    if reason:
        raise TeUnavailable(reason)
    te = load()
    if precision.format in RECIPES:
        check = te.pytorch.is_fp8_block_scaling_available if precision.format == "fp8_block" else te.pytorch.is_fp8_available
        try:
            works, reason = check(return_reason=True)
        except FAILURES as error:
            works, reason = False, str(error)
        if not works:
            others = [each for each in ("bf16", *RECIPES) if each != precision.format]
            way = f"set precision.format to {' or '.join(others)}"
            raise TeUnavailable(f"Transformer Engine has no precision.format={precision.format} for this device ({reason})", way)
    return te


def make_backend(
    precision: PrecisionConfig, dtype: torch.dtype, device: torch.device | str, tp: Group | None = None, sequence_parallel: bool = True
) -> Backend:
    """The backend that `precision` asks for, for parameters of `dtype`; tp: the ranks that share each matrix (None: nothing is shared).

    Models of other formats than bf16 (the one that fp32 masters start from) are the torch backend's: their parameters are the same.
    """
    if dtype != torch.bfloat16:
        return torch_backend(dtype, device, tp, sequence_parallel)
    fp8 = precision.format if precision.format in RECIPES else ""
    choice = choose(precision, device)
    if choice.te is None:
        return torch_backend(dtype, device, tp, sequence_parallel, fp8, precision.bf16_ends)
    return TeBackend(choice.te, (dtype, device), tp, sequence_parallel, fp8, precision.bf16_ends)


def group_splits(config: Config, mesh: Mesh, choice: Choice) -> dict[int, int]:
    """Sizes of cp groups that kind 2d cuts in two, and how many neighbours exchange heads: Transformer Engine wants a group for each part."""
    if choice.te is None:
        return {}
    _, kv_heads = local_heads(config.model.heads, config.model.kv_heads, config.parallel.tp)
    near = max(1, int(config.hardware.gpus_per_node) // config.parallel.tp)
    splits = {size: head_split(kv_heads, size, near) for size in cp_sizes(mesh, config.parallel.max_cp)}
    return {size: split for size, split in splits.items() if 1 < split < size}
