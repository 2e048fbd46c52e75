"""Gradients of one step: summed over microbatches in fp32 at least, divided once by the global number of targets, clipped, judged.

Every microbatch contributes the gradient of the SUM of its token losses, so the sum over microbatches (later: over lanes) divided by
the step's targets is the gradient of the global batch, whatever the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True)
class Verdict:
    """What the step's gradients are worth: one decision for all parameters.

    loss_sum: sum of the token losses; norm: global norm of the mean gradient before clipping; finite: neither holds NaN or Inf.
    """

    loss_sum: float
    norm: float
    finite: bool


class GradientBuffers:
    """Where the gradients of a model's trainable parameters are summed.

    Parameters of 4 bytes and more sum in their own `.grad` (no copy is made). For narrower ones (bf16) each microbatch's gradient is added
    to an fp32 buffer as soon as the backward has it and is then dropped, so no second set of gradients exists at any time.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Frozen parameters are left out. Registers hooks on the narrow ones; `close` takes them off."""
        chosen = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
        self.names = [name for name, _ in chosen]
        self.parameters = [parameter for _, parameter in chosen]
        self._wide: dict[int, Tensor] = {}
        self._touched: set[int] = set()
        self._hooks: list[RemovableHandle] = []
        for index, parameter in enumerate(self.parameters):
            if parameter.element_size() < 4:
                self._wide[index] = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
                self._hooks.append(self._on_gradient(parameter, partial(self._widen, index)))

    @staticmethod
    def _on_gradient(parameter: nn.Parameter, act: Callable[[Tensor], None]) -> RemovableHandle:
        register: Callable[[Callable[[Tensor], None]], RemovableHandle] = parameter.register_post_accumulate_grad_hook  # untyped in torch
        return register(act)

    def _widen(self, index: int, parameter: Tensor) -> None:
        assert parameter.grad is not None
        if index in self._touched:
            self._wide[index].add_(parameter.grad)
        else:  # the first microbatch overwrites what the step before has left
            self._wide[index].copy_(parameter.grad)
            self._touched.add(index)
        parameter.grad = None

    def zero(self) -> None:
        """Start a step. Costs no pass over memory: the first microbatch writes instead of adding."""
        self._touched.clear()
        for parameter in self.parameters:
            parameter.grad = None

    def sums(self) -> list[Tensor]:
        """The summed gradient of each parameter, in the order of `names`; zeros where no microbatch reached it."""
        found = []
        for index, parameter in enumerate(self.parameters):
            if index in self._wide:
                if index not in self._touched:
                    self._wide[index].zero_()
                    self._touched.add(index)
                found.append(self._wide[index])
            else:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                found.append(parameter.grad)
        return found

    @torch.no_grad()
    def finish(self, losses: list[Tensor], targets: int, clip_norm: float) -> Verdict:
        """Divide by `targets`, clip to a global norm of `clip_norm` (0: don't), and judge: two passes and one wait for the device.

        losses: the microbatches' sums, scalars. With NaN or Inf anywhere, or finite gradients whose squares overflow, the norm is not finite.
        """
        sums = self.sums()
        # Norms of the sums, joined in fp64: the squares of many large tensors must not lose the small ones.
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(sums)).double()) / targets
        scale = norm.new_tensor(1.0 / targets)
        if clip_norm > 0:
            scale = scale * (clip_norm / norm.clamp(min=clip_norm))
        loss_sum = torch.stack(losses).double().sum()
        torch._foreach_mul_(sums, scale.to(sums[0].dtype))
        values = torch.stack([loss_sum, norm]).tolist()
        return Verdict(values[0], values[1], all(abs(value) < float("inf") for value in values))

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
