"""Weight gradients that a module's backward adds to the fp32 sums itself, without a bf16 tensor in between.

The convention is Transformer Engine's and Megatron's: the sums are at `parameter.main_grad`; who has added to them sets
`parameter.grad_added_to_main_grad` and returns a gradient that nobody reads, so that the parameter's hooks fire as always. The sums are zero
when a step starts and are only ever added to. A module that overwrites them in what it takes for the first microbatch
(Transformer Engine's is_first_microbatch=True) must not be told so: the first forward need not be the first backward.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def adds_itself(parameter: nn.Parameter) -> nn.Parameter:
    """Note, when a module is made, that its backward adds to `main_grad` where there is one; returns the parameter."""
    parameter.adds_to_main_grad = True  # type: ignore[attr-defined]
    return parameter


def offer(parameter: nn.Parameter, total: Tensor) -> bool:
    """Give a parameter its sums; False, and nothing done, for one that hasn't asked or whose sums are of its own format."""
    if not getattr(parameter, "adds_to_main_grad", False) or total.dtype == parameter.dtype:
        return False
    parameter.main_grad = total  # type: ignore[attr-defined]
    parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    return True


def withdraw(parameter: nn.Parameter, total: Tensor) -> None:
    """Undo of `offer`, unless others have been offered since: gradients come in `grad` again."""
    if total_of(parameter) is not total:
        return
    for name in ("main_grad", "grad_added_to_main_grad"):
        if hasattr(parameter, name):
            delattr(parameter, name)


def total_of(parameter: Tensor) -> Tensor | None:
    """The sums that a backward may add to: fp32, of the parameter's shape."""
    total: Tensor | None = getattr(parameter, "main_grad", None)
    return total


def added(parameter: Tensor) -> Tensor:
    """Say that this backward has added to the sums; returns what to give autograd instead: no values, but the parameter's shape."""
    parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.empty_like(parameter)


def was_added(parameter: Tensor) -> bool:
    """Whether the gradient that has just arrived is already in the sums. Asked once for each gradient."""
    if not getattr(parameter, "grad_added_to_main_grad", False):
        return False
    parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    return True
