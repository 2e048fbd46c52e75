"""NVIDIA apex, where it is installed: its fused AdamW, and weight gradients that its kernel adds to fp32 sums.

It is recognised by its extension modules, which no other package ships; apex itself is not imported for that, because a package of the same
name is on PyPI, and because a build without extensions imports well and then lacks everything used here.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ADAM, WGRAD = "amp_C", "fused_weight_gradient_mlp_cuda"
INSTALL = (
    "build NVIDIA's from a clone of github.com/NVIDIA/apex: APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install -v --no-build-isolation ."
    " (pip install apex brings the other one)"
)


@dataclass(frozen=True)
class Apex:
    """What there is of apex. message: one line for whoever wants to know why."""

    adam: bool
    wgrad: bool
    message: str


def probe() -> Apex:
    """Look for apex's extension modules without importing anything."""
    adam, wgrad = (importlib.util.find_spec(name) is not None for name in (ADAM, WGRAD))
    if adam and wgrad:
        return Apex(True, True, "NVIDIA apex: fused AdamW, fused weight-gradient sums")
    found = _distribution()
    if adam or wgrad:
        lacking, kept = (WGRAD, "fused AdamW") if adam else (ADAM, "fused weight-gradient sums")
        return Apex(adam, wgrad, f"NVIDIA apex: {kept}; built without {lacking}")
    if found is None:
        return Apex(False, False, "NVIDIA apex is not installed; it is optional")
    name = f"apex {found.version}"
    if _is_nvidias(found):
        return Apex(False, False, f"{name} was built without its CUDA extensions and is not used; {INSTALL}")
    summary = found.metadata["Summary"] or "no summary"
    return Apex(False, False, f"{name} is not NVIDIA's but another package of that name ({summary}) and is not used; {INSTALL}")


def _distribution() -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution("apex")
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_nvidias(found: importlib.metadata.Distribution) -> bool:
    files = found.files or []
    return any(str(file).startswith(("apex/optimizers/", "apex/multi_tensor_apply/")) for file in files)


def add_product() -> Callable[[Tensor, Tensor, Tensor], None]:
    """The kernel that adds slope^T x to fp32 sums: x [t, in], slope [t, out], sums [out, in]; half formats on a GPU."""
    kernel = importlib.import_module(WGRAD).wgrad_gemm_accum_fp32

    def add(x: Tensor, slope: Tensor, total: Tensor) -> None:
        kernel(x.contiguous(), slope.contiguous(), total)

    return add


def takes(groups: list[dict[str, Any]]) -> bool:
    """Whether apex's AdamW can update these: it knows fp32 on a GPU (masters are), not fp64."""
    return all(one.is_cuda and one.dtype == torch.float32 for group in groups for one in group["params"])


def fused_adamw(groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> torch.optim.Optimizer:
    """Apex's FusedAdam as AdamW: decoupled decay, bias correction, eps added outside the root, as torch's."""
    base: Any = importlib.import_module("apex.optimizers").FusedAdam

    class FusedAdamW(base):  # type: ignore[misc]
        """Counts updates by group, not by parameter: state that torch's AdamW has written is understood."""

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            for group in self.param_groups:
                counts = {int(self.state[one]["step"]) for one in group["params"] if "step" in self.state.get(one, {})}
                if len(counts) > 1:
                    raise ValueError(f"apex's FusedAdam counts updates by group, but this state has counts {sorted(counts)} in one group")
                if counts:
                    group["step"] = counts.pop()

    made: torch.optim.Optimizer = FusedAdamW(groups, lr=lr, betas=betas, eps=eps, bias_correction=True, adam_w_mode=True)
    return made
