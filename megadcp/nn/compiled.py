"""Formulas that torch.compile makes one kernel of on a GPU; anywhere else they run as they are, or have a hand-written twin."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

Formula = TypeVar("Formula", bound=Callable[..., object])


def compiles(x: Tensor) -> bool:
    """Whether formulas over x are compiled: on a GPU with Triton and a C compiler for its launchers."""
    return x.is_cuda and not missing()


@functools.cache
def missing() -> str:
    """What the compiler lacks on this machine; nothing is an empty string."""
    if importlib.util.find_spec("triton") is None:
        return "Triton"
    if not (os.environ.get("CC") or any(shutil.which(name) for name in ("cc", "gcc", "clang"))):
        return "a C compiler (cc, gcc or clang)"
    return ""


def fused(x: Tensor, formula: Formula) -> Formula:
    """The formula, compiled if it is for x on a GPU. It must be a function of its arguments alone.

    Only the first size of each tensor is left open. So one kernel serves all token counts, and a recompute runs the very one that the
    forward ran: had the first count seen a kernel of its own, which of the two runs would depend on what ran before.
    """
    made: Formula = _compiled(formula) if compiles(x) else formula
    return made


@functools.cache
def _compiled(formula: Callable[..., object]) -> Any:
    return open_rows(torch.compile(formula))


def open_rows(compiled: Formula) -> Formula:
    """A compiled function that takes the first size of its tensors of two and more dims as it comes."""

    def run(*arguments: object) -> object:
        for one in arguments:
            if isinstance(one, Tensor) and one.ndim >= 2:
                torch._dynamo.maybe_mark_dynamic(one, 0)
        return compiled(*arguments)

    return cast(Formula, run)


def wide(x: Tensor) -> Tensor:
    """Half formats as fp32; fp32 and fp64 as they are."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
