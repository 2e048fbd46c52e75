"""Formulas that torch.compile makes one kernel of on a GPU; anywhere else they run as they are, or have a hand-written twin."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

Formula = TypeVar("Formula", bound=Callable[..., object])


def compiles(x: Tensor) -> bool:
    """Whether formulas over x are compiled: on a GPU with Triton and a C compiler for its launchers."""
    return x.is_cuda and _can_compile()


@functools.cache
def _can_compile() -> bool:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    return compiler is not None and importlib.util.find_spec("triton") is not None


@functools.cache
def _compiled(formula: Formula) -> Formula:
    return torch.compile(formula, dynamic=True)  # type: ignore[return-value]


def fused(x: Tensor, formula: Formula) -> Formula:
    """The formula, compiled once for all shapes if it is for x on a GPU. It must be a function of its arguments alone."""
    return _compiled(formula) if compiles(x) else formula
