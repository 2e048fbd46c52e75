"""AdamW over the step's gradients: decay on matrices only, fp32 master weights behind narrow parameters.

Which parameters decay is `nn.gpt.decay_groups`: every matrix, embeddings among them (the LM head reads the same table where it is tied, and
published GPT runs decay it); norms, biases and other vectors don't.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megadcp.config.check import UserError
from megadcp.config.schema import OptimConfig
from megadcp.nn.backend import Backend
from megadcp.nn.gpt import decay_groups
from megadcp.parallel.gradients import GradientBuffers

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class _Pair:
    """One trainable parameter: its name, itself, and what the optimizer updates (itself, or its fp32 master)."""

    name: str
    parameter: nn.Parameter
    master: nn.Parameter


class Optimizer:
    """AdamW of a model. State is named by parameter, never by position: master.NAME, exp_avg.NAME, exp_avg_sq.NAME."""

    def __init__(self, model: nn.Module, gradients: GradientBuffers, backend: Backend, config: OptimConfig, masters: Mapping[str, Tensor]) -> None:
        """`masters` are the exact start values of narrow parameters, fp32; one that is missing starts from the parameter itself."""
        self.gradients = gradients
        self.pairs: list[_Pair] = []
        for name, parameter in zip(gradients.names, gradients.parameters, strict=True):
            master = parameter
            if parameter.element_size() < 4:
                start = masters[name] if name in masters else parameter.detach()
                master = nn.Parameter(start.detach().to(torch.float32, copy=True))
            self.pairs.append(_Pair(name, parameter, master))
        self._narrow = [pair for pair in self.pairs if pair.master is not pair.parameter]
        by_parameter = {id(pair.parameter): pair.master for pair in self.pairs}
        groups = [
            {**group, "params": [by_parameter[id(parameter)] for parameter in group["params"]]}  # type: ignore[attr-defined]
            for group in decay_groups(model, config.weight_decay)
        ]
        self.inner = backend.optimizer([group for group in groups if group["params"]], config.lr, (config.beta1, config.beta2), config.eps)

    def step(self, lr: float) -> None:
        """One update from the summed gradients; narrow parameters are rounded from their masters."""
        for pair, gradient in zip(self.pairs, self.gradients.sums(), strict=True):
            if pair.master is not pair.parameter:
                pair.master.grad = gradient
        for group in self.inner.param_groups:
            group["lr"] = lr
        self.inner.step()
        if self._narrow:
            with torch.no_grad():
                torch._foreach_copy_([pair.parameter for pair in self._narrow], [pair.master for pair in self._narrow])

    @property
    def updates(self) -> int:
        """Updates done so far; skipped steps are not among them."""
        for pair in self.pairs:
            if pair.master in self.inner.state:
                return int(self.inner.state[pair.master]["step"])
        return 0

    def tensors(self) -> dict[str, Tensor]:
        """Everything to keep but `updates`: fp32 masters and both moments, by name. They are the live tensors, not copies."""
        found = {f"master.{pair.name}": pair.master.detach() for pair in self._narrow}
        for pair in self.pairs:
            state: dict[str, Any] = self.inner.state.get(pair.master, {})
            for moment in MOMENTS:
                found[f"{moment}.{pair.name}"] = state[moment] if state else torch.zeros_like(pair.master, requires_grad=False)
        return found

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], updates: int) -> None:
        """Take over what `tensors` gave, of a model with the same parameters."""
        for pair in self._narrow:
            pair.master.copy_(tensors[f"master.{pair.name}"])
        if updates < 0:
            raise UserError(f"the checkpoint says {updates} optimizer updates; expected 0 or more")
        places = {id(master): index for index, master in enumerate(p for group in self.inner.param_groups for p in group["params"])}
        state = {}
        for pair in self.pairs if updates else ():
            moments = {moment: tensors[f"{moment}.{pair.name}"].to(pair.master.device, copy=True) for moment in MOMENTS}
            state[places[id(pair.master)]] = {"step": torch.tensor(float(updates)), **moments}
        self.inner.load_state_dict({"state": state, "param_groups": self.inner.state_dict()["param_groups"]})
