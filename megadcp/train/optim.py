"""AdamW over the step's gradients: decay on matrices only, fp32 master weights behind narrow parameters.

Which parameters decay is `nn.gpt.decay_groups`: every matrix, embeddings among them (the LM head reads the same table where it is tied, and
published GPT runs decay it); norms, biases and other vectors don't.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megadcp.config.check import UserError
from megadcp.config.schema import OptimConfig
from megadcp.nn.backend import Backend
from megadcp.nn.gpt import decay_groups
from megadcp.parallel.gradients import GradientBuffers
from megadcp.parallel.replicas import Piece, pieces_of
from megadcp.parallel.sharded_optimizer import ShardedParameters

MOMENTS = ("exp_avg", "exp_avg_sq")
Groups = list[dict[str, Any]]


class Optimizer:
    """AdamW of a model. Its state belongs to parameters by name, never by position.

    With several lanes each updates its slice of every bucket and gathers the others' (parallel/sharded_optimizer.py).
    """

    def __init__(self, model: nn.Module, gradients: GradientBuffers, backend: Backend, config: OptimConfig, masters: Mapping[str, Tensor]) -> None:
        """`masters` are the exact start values of narrow parameters, fp32; one that is missing starts from the parameter itself.

        With several ranks they are those of this rank's tensors. With several lanes the parameters move into flat tensors here.
        """
        self.gradients = gradients
        self.sharded: ShardedParameters | None = None
        groups: Groups = decay_groups(model, config.weight_decay)
        if gradients.buckets is None:
            self.masters = [_master(name, parameter, masters) for name, parameter in zip(gradients.names, gradients.parameters, strict=True)]
            by_parameter = {id(parameter): master for parameter, master in zip(gradients.parameters, self.masters, strict=True)}
            groups = [{**group, "params": [by_parameter[id(parameter)] for parameter in group["params"]]} for group in groups]
        else:
            self.sharded = ShardedParameters(gradients.buckets, gradients.names, masters)
            self.sharded.attach(model)
            self.masters = self.sharded.masters
            groups = _slices(groups, self.sharded)
        groups = [group for group in groups if group["params"]]
        self.inner = backend.optimizer(groups, config.lr, (config.beta1, config.beta2), config.eps) if groups else None
        self.updates = 0
        """Updates done so far; skipped steps are not among them."""

    def step(self, lr: float) -> None:
        """One update from the summed gradients; narrow parameters are rounded from their masters. All lanes call it."""
        self._launch(lr, None)

    def step_unless(self, lr: float, bad: Tensor) -> bool:
        """An update that changes nothing where `bad`, a scalar on the device, is 1: the host need not wait before it. False: not with this AdamW.

        `settle` must follow.
        """
        if self.inner is not None and not (type(self.inner) is torch.optim.AdamW and self.inner.defaults["fused"]):
            return False
        self._launch(lr, bad)
        return True

    def settle(self, updated: bool) -> None:
        """Say what has become of the update that was launched last."""
        self.updates -= not updated

    def _launch(self, lr: float, bad: Tensor | None) -> None:
        sums = self.gradients.sums() if self.sharded is None else self.gradients.slices()
        for master, gradient in zip(self.masters, sums, strict=True):
            if master.grad is not gradient:
                master.grad = gradient
        if self.inner is not None:  # a pipeline stage can be frozen altogether
            for group in self.inner.param_groups:
                group["lr"] = lr
            if bad is not None:
                self.inner.found_inf = bad  # type: ignore[attr-defined]  # torch's fused optimizers look at it on the device
            try:
                self.inner.step()
            finally:
                if bad is not None:
                    del self.inner.found_inf  # type: ignore[attr-defined]
        self.updates += 1
        if self.sharded is not None:
            self.sharded.publish()
            return
        narrow = [(p, master) for p, master in zip(self.gradients.parameters, self.masters, strict=True) if master is not p]
        if narrow:
            with torch.no_grad():
                torch._foreach_copy_([parameter for parameter, _ in narrow], [master for _, master in narrow])

    def wait(self) -> None:
        """Wait for the parameters of the last update. Modules do so by themselves; who reads parameters in another way calls this first."""
        if self.sharded is not None:
            self.sharded.wait()

    # ------------------------------------------------------------------------------------------------------------- state
    def state(self) -> dict[str, list[Piece]]:
        """Everything to keep but `updates`, as live tensors: what this rank holds of the fp32 masters and of both moments, by kind."""
        return {"master": self._narrow()} | {moment: self._pieces([self._moment(one, moment) for one in self.masters]) for moment in MOMENTS}

    def weights(self) -> list[Piece]:
        """The trained parameters, each element on one of the lanes only."""
        if self.sharded is None:
            return pieces_of(zip(self.gradients.names, self.gradients.parameters, strict=True), self.gradients.parameters)
        buckets = self.sharded.buckets
        return buckets.pieces(self.gradients.names, [buckets.slice(flat) for flat in self.sharded.flats])

    @torch.no_grad()
    def make_room(self, updates: int) -> None:
        """Have moments, all zero, as after `updates` updates: what `state` gives may then be overwritten with those of a checkpoint."""
        if updates < 0:
            raise UserError(f"the checkpoint says {updates} optimizer updates; expected 0 or more")
        self.updates = updates
        if self.inner is None:
            return
        places = {id(master): index for index, master in enumerate(p for group in self.inner.param_groups for p in group["params"])}
        state = {
            places[id(master)]: {
                "step": torch.tensor(float(updates)),
                **{moment: torch.zeros_like(master, requires_grad=False) for moment in MOMENTS},
            }
            for master in (self.masters if updates else ())
        }
        self.inner.load_state_dict({"state": state, "param_groups": self.inner.state_dict()["param_groups"]})

    def _moment(self, master: nn.Parameter, moment: str) -> Tensor:
        state: dict[str, Any] = self.inner.state.get(master, {}) if self.inner is not None else {}
        found: Tensor = state[moment] if state else torch.zeros_like(master, requires_grad=False)
        return found

    def _pieces(self, values: Sequence[Tensor]) -> list[Piece]:
        """Tensors laid out like the masters, by parameter."""
        if self.sharded is not None:
            return self.sharded.buckets.pieces(self.gradients.names, values)
        return pieces_of(zip(self.gradients.names, self.gradients.parameters, strict=True), values)

    def _narrow(self) -> list[Piece]:
        return [piece for piece in self._pieces([master.detach() for master in self.masters]) if piece.parameter.element_size() < 4]


def _master(name: str, parameter: nn.Parameter, masters: Mapping[str, Tensor]) -> nn.Parameter:
    """What the optimizer updates: the parameter itself, or its fp32 master."""
    if parameter.element_size() >= 4:
        return parameter
    start = masters[name] if name in masters else parameter.detach()
    return nn.Parameter(start.detach().to(torch.float32, copy=True))


def _slices(groups: Groups, sharded: ShardedParameters) -> Groups:
    """The groups with this lane's slices in place of parameters. ValueError where a bucket would belong to several groups."""
    group_of = {id(parameter): number for number, group in enumerate(groups) for parameter in group["params"]}
    chosen: list[list[nn.Parameter]] = [[] for _ in groups]
    for bucket, master in zip(sharded.buckets.buckets, sharded.masters, strict=True):
        numbers = {group_of[id(sharded.buckets.parameters[index])] for index in bucket.indices}
        if len(numbers) > 1:
            raise ValueError("parameters of one bucket belong to different optimizer groups")
        chosen[numbers.pop()].append(master)
    return [{**group, "params": params} for group, params in zip(groups, chosen, strict=True)]
