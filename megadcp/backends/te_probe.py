"""Whether Transformer Engine can run here: what can be said without importing it, and the only place that does import it.

Importing it loads cuDNN, NVRTC and libcuda, and fails in many ways where one is missing; here all of them become one reason. Its Python part
can be installed without the compiled extension: then it imports nowhere, although pip lists it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megadcp.config.check import UserError

# What this project's calls were checked against. 2.18 is the first with gathered keys of packed documents, 2.20 with a2a+p2p.
OLDEST, NEWEST = (2, 20, 2), (2, 20, 2)
INSTALL = 'pip install --no-build-isolation "transformer-engine[pytorch]==2.20.2"'
TO_INSTALL = f"install it by {INSTALL}"
PACKAGE = "transformer_engine"
FAILURES = (ImportError, OSError, RuntimeError, AssertionError)  # libraries that can't be loaded, versions that don't fit


class TeUnavailable(RuntimeError):
    """Transformer Engine can't run here; the message is the reason, in one line. way: what would help, besides another backend."""

    def __init__(self, reason: str, way: str = "") -> None:
        super().__init__(reason)
        self.way = way

    @property
    def refusal(self) -> str:
        """For somebody who has asked for it."""
        return f"precision.backend=te can't run here: {self}; {f'{self.way}, or ' if self.way else ''}set precision.backend=torch"


@dataclass(frozen=True)
class Te:
    """The two modules of it that this project uses."""

    pytorch: Any
    recipe: Any


def load() -> Te:
    """Import it.

    Raises:
        TeUnavailable: why it can't be.
    """
    reason = installed_problem()
    if reason:
        raise TeUnavailable(reason, TO_INSTALL)
    # A ring of more than two ranks would otherwise get a hidden two-rank communicator for each pair of neighbours of each group size.
    os.environ.setdefault("NVTE_BATCH_MHA_P2P_COMM", "1")
    try:
        return Te(importlib.import_module(f"{PACKAGE}.pytorch"), importlib.import_module(f"{PACKAGE}.common.recipe"))
    except FAILURES as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        known = f"Transformer Engine {installed_version()} is installed but can't be loaded ({type(error).__name__}: {first})"
        raise TeUnavailable(known, TO_INSTALL) from None


def installed_version() -> str:
    """As pip has it, else as the module says; empty without one."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return str(getattr(sys.modules.get(PACKAGE), "__version__", ""))


def installed_problem() -> str:
    """Why what is installed can't work, without importing it; empty when it may."""
    if PACKAGE not in sys.modules and importlib.util.find_spec(PACKAGE) is None:
        return "Transformer Engine is not installed"
    found = installed_version()
    numbers = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", found)
    tested = " to ".join(dict.fromkeys(".".join(map(str, each)) for each in (OLDEST, NEWEST)))
    if numbers is None:
        return f"a module {PACKAGE} is here, but no version of it is known; tested: {tested}"
    if not OLDEST <= tuple(int(part or 0) for part in numbers.groups()) <= NEWEST:
        return f"Transformer Engine {found} is here, tested: {tested}"
    return "" if _has_extension() else f"only the Python part of Transformer Engine {found} is installed, without its extension for torch"


def _has_extension() -> bool:
    """Whether the compiled module is where the package looks for it: beside it or inside it."""
    if PACKAGE in sys.modules:
        return True  # somebody has loaded it
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return False
    inside = Path(spec.origin).parent
    return any(place.is_dir() and any(place.glob("transformer_engine_torch*.so")) for place in (inside.parent, inside, inside / "wheel_lib"))


def refuse(backend: str, device: str) -> None:
    """UserError if a run asks for Transformer Engine where it can't work, as far as can be said without torch: before ranks are started."""
    if backend != "te":
        return
    if device == "cpu":
        raise UserError(TeUnavailable("Transformer Engine needs a GPU and cluster.device=cpu", "set cluster.device=cuda").refusal)
    reason = installed_problem()
    if reason:
        raise UserError(TeUnavailable(reason, TO_INSTALL).refusal)
