"""Linears and norms that run on Transformer Engine and hold their parameters under this project's names.

Transformer Engine's modules name parameters their own way and are not part of the model's tree of modules: what the model sees are the
wrappers below, whose parameters its modules share. They are made on the meta device, so they never own memory or draw numbers.

Legend: t tokens of the microbatch on this lane, h hidden, T tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megadcp.backends.te_probe import Te
from megadcp.backends.te_remake import Remaking
from megadcp.mesh.groups import Group
from megadcp.parallel.main_grad import adds_itself, total_of

NORMALIZATION = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}


@dataclass(frozen=True)
class Tools:
    """What all parts of one model share. tp None: nothing is sharded.

    unit: what the rows of a quantised product are a multiple of. unquantised: entered around linears that stay in the model's format.
    """

    te: Te
    tp: Group | None
    sequence_parallel: bool
    remaking: Remaking
    unit: int
    unquantised: Callable[[], AbstractContextManager[Any]]

    def parallel(self, kind: str) -> dict[str, Any]:
        """What a linear of Transformer Engine is told of the ranks that share it."""
        if self.tp is None:
            return {"parallel_mode": None, "tp_group": None, "tp_size": 1, "sequence_parallel": False}
        return {"parallel_mode": kind, "tp_group": self.tp.handle, "tp_size": self.tp.size, "sequence_parallel": self.sequence_parallel}


class TeNorm(nn.Module):
    """x [.., h] -> same shape; or x itself, once a linear has taken the norm into its own kernel (outside of pieces that are made again)."""

    def __init__(self, kind: str, plain: nn.Module, eps: float, tools: Tools) -> None:
        """plain: the norm that another backend made, for its parameters."""
        super().__init__()
        self.kind, self.eps, self.fused, self._tools = kind, eps, False, tools
        for name, parameter in plain.named_parameters():
            self.register_parameter(name, parameter)
        self._apart = (self._make(),)

    def _make(self) -> Any:
        te, weight = self._tools.te.pytorch, self.get_parameter("weight")
        make = te.RMSNorm if self.kind == "rmsnorm" else te.LayerNorm
        return share(make(weight.shape[0], eps=self.eps, device="meta", dtype=weight.dtype), dict(self.named_parameters()))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [.., h], unless the linear behind does."""
        if self.fused and not self._tools.remaking.active:
            return x
        out: Tensor = self._apart[0](x)
        return out


class TeLinear(nn.Module):
    """x [t, in] -> [t, out], or this rank's share of it as parallel/tensor.py has it; with the norm before it, where one is given.

    quantised: in the format that surrounds the call, else in the model's own.
    """

    def __init__(self, kind: str, plain: nn.Module, tools: Tools, norm: TeNorm | None = None, quantised: bool = True) -> None:
        """plain: the linear that another backend made, for its parameters: local tensors with their shards noted on them."""
        super().__init__()
        self._tools, self._quantised = tools, quantised
        for name, parameter in plain.named_parameters():
            self.register_parameter(name, parameter)
        adds_itself(self.get_parameter("weight"))
        if norm is None:
            self._modules_of_te = (self._apart(kind, False), self._apart(kind, True))
        else:
            norm.fused = True
            self._modules_of_te = (self._with_norm(kind, norm), self._apart(kind, True))

    def _sizes(self, kind: str) -> tuple[int, int]:
        """Features in and out, of all ranks together: Transformer Engine divides the sharded side by T, which gives what is held here."""
        out, features = self.get_parameter("weight").shape
        ranks = 1 if self._tools.tp is None else self._tools.tp.size
        return (features, out * ranks) if kind == "column" else (features * ranks, out)

    def _apart(self, kind: str, save_original_input: bool) -> Any:
        parameters, (features, out) = dict(self.named_parameters()), self._sizes(kind)
        module = self._tools.te.pytorch.Linear(
            features, out, bias="bias" in parameters, params_dtype=parameters["weight"].dtype, device="meta",
            save_original_input=save_original_input, **self._tools.parallel(kind),
        )  # fmt: skip
        return share(module, parameters)

    def _with_norm(self, kind: str, norm: TeNorm) -> Any:
        parameters, (features, out) = dict(self.named_parameters()), self._sizes(kind)
        module = self._tools.te.pytorch.LayerNormLinear(
            features, out, eps=norm.eps, bias="bias" in parameters, normalization=NORMALIZATION[norm.kind], params_dtype=parameters["weight"].dtype,
            device="meta", **self._tools.parallel(kind),
        )  # fmt: skip
        return share(module, parameters | {f"layer_norm_{name}": parameter for name, parameter in norm.named_parameters()})

    def forward(self, x: Tensor) -> Tensor:
        """Map x; inside a piece that is made again without the norm, which has run."""
        remaking = self._tools.remaking
        if remaking.active:
            return remaking.linear(lambda x: self._call(self._modules_of_te[1], x), x)
        return self._call(self._modules_of_te[0], x)

    def _call(self, module: Any, x: Tensor) -> Tensor:
        # Decided by each call: the sums to add to are offered after the model is made, and not to every model.
        module.fuse_wgrad_accumulation = total_of(self.get_parameter("weight")) is not None
        # Plans pad for training and validation; generated text has any length.
        fits = torch.is_grad_enabled() or x.shape[0] % self._tools.unit == 0
        if self._quantised and fits:
            out: Tensor = module(x, is_first_microbatch=None)  # None: weights are cast anew, and no sum is ever overwritten
            return out
        with self._tools.unquantised():
            out = module(x, is_first_microbatch=None)
        return out


def share(module: Any, parameters: dict[str, nn.Parameter]) -> Any:
    """The module with these parameters in place of its own. ValueError unless it has the same ones, of the same shapes."""
    own = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    given = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    if own != given:
        raise ValueError(f"{type(module).__name__} of Transformer Engine has parameters {own}, this model {given}")
    for name, parameter in parameters.items():
        module.register_parameter(name, parameter)
    return module


def wants_gradient(inputs: tuple[Tensor, ...]) -> bool:
    """Whether any of them does."""
    return any(isinstance(one, torch.Tensor) and one.requires_grad for one in inputs)
