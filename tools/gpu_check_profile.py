"""A hardware profile from what tools/gpu_check.py measured: a function of the JSON alone.

Everything comes from bf16, as tools/calibrate.py fits it (calibrate_fit.py). The rate of fp8 products is then the one with which fp8
microbatches come nearest, all else as in bf16: a profile has one overhead and one rate of attention for all formats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from calibrate_file import check_output, profile_text, write_whole
from calibrate_fit import Profile, fit_profile
from calibrate_measure import Compute, Sample, microbatch_of

from megadcp.config.check import UserError, check
from megadcp.config.schema import (
    ClusterConfig,
    Config,
    DataConfig,
    GemmFlops,
    HardwareConfig,
    ModelConfig,
    PrecisionConfig,
    RopeConfig,
    RunConfig,
    SourceConfig,
)
from megadcp.plan.basis import basis_from
from megadcp.plan.cost import CostModel
from megadcp.plan.fit import FitError, fit, parts_of
from megadcp.plan.step_plan import Recompute

MARK = "# Measured by tools/gpu_check.py"


def profile_of(data: dict[str, Any]) -> Profile:
    """The profile of the fit section's `data`.

    Raises:
        UserError: bf16 was not measured, or not all of it.
    """
    compute = _compute(data.get("bf16") or {})
    config = _config(data, "bf16")
    profile = fit_profile(config, compute, None)
    fitted = replace(config, hardware=profile.hardware)
    lines = [*profile.lines, f"held-out packs   {_error(fitted, compute.held_out)}"]
    lines += [f"recomputed packs {_error(fitted, compute.recomputed)}"] if compute.recomputed else []
    narrow = (data.get("fp8_current") or {}).get("fitted")
    if not narrow:
        return replace(profile, lines=lines)
    samples = _samples(narrow)
    rate, error = fp8_rate(replace(_config(data, "fp8_current"), hardware=profile.hardware), samples)
    hardware = replace(profile.hardware, gemm_flops=replace(profile.hardware.gemm_flops, fp8=rate))
    comments = {**profile.comments, "gemm_flops.fp8": f"fits whole microbatches in fp8_current, all else as in bf16: {error}"}
    return Profile(hardware, comments, [*lines, f"fp8 microbatches {error}"])


def fp8_rate(config: Config, samples: Sequence[Sample]) -> tuple[float, FitError]:
    """The rate of fp8 products with which these samples come nearest, everything else as in config.hardware."""
    cost = CostModel(basis_from(config))
    parts = [parts_of(cost, microbatch_of(one.lengths, one.recompute)) for one in samples]
    seconds = np.array([one.seconds for one in samples])
    linear = np.array([[part.linear] for part in parts])
    rest = np.array([part.total - part.linear for part in parts])
    factor = fit(linear, seconds, rest, [1e-6], [math.inf])
    return config.hardware.gemm_flops.fp8 / float(factor[0]), FitError.of(linear @ factor + rest, seconds)


def _error(config: Config, samples: Sequence[Sample]) -> FitError:
    cost = CostModel(basis_from(config))
    predicted = np.array([cost.seconds(microbatch_of(one.lengths, one.recompute)) for one in samples])
    return FitError.of(predicted, np.array([one.seconds for one in samples]))


def _compute(found: dict[str, Any]) -> Compute:
    missing = [name for name in ("linear", "attention", "fitted", "held_out", "optimizer_seconds") if not found.get(name)]
    if missing:
        raise UserError(
            f"a profile needs the fit section of a bf16 run; {', '.join(missing)} of it was not measured; run gpu_check again with --only fit"
        )
    return Compute(
        linear={int(tokens): (forward, backward) for tokens, forward, backward in found["linear"]},
        attention={tuple(lengths): (forward, backward) for lengths, forward, backward in found["attention"]},
        fitted=_samples(found["fitted"]),
        held_out=_samples(found["held_out"]),
        recomputed=_samples(found.get("recomputed") or []),
        optimizer_seconds=found["optimizer_seconds"],
    )


def _samples(rows: Sequence[Sequence[Any]]) -> list[Sample]:
    return [Sample(tuple(lengths), Recompute(level, layers), seconds, seconds) for lengths, level, layers, seconds in rows]


def _config(data: dict[str, Any], format: str) -> Config:
    model, hardware = data["model"], data["hardware"]
    longest = int(data["max_length"])
    return Config(
        run=RunConfig(name="gpu_check"),
        model=ModelConfig(**{**model, "rope": RopeConfig(**model["rope"])}),
        data=DataConfig(max_length=longest, tokens_per_step=longest),
        precision=PrecisionConfig(format=format),
        cluster=ClusterConfig(device=data["device"]),
        hardware=HardwareConfig(**{**hardware, "gemm_flops": GemmFlops(**hardware["gemm_flops"])}),
    )


# -------------------------------------------------------------------------------------------------------------------------- file
def check_profile_file(name: str, overwrite: bool) -> Path:
    """The file to write. UserError, before anything is measured, for what can't be written or isn't this tool's to replace."""
    return check_output(name, overwrite, MARK)


def write_hardware(path: Path, report: dict[str, Any]) -> list[str]:
    """Write the profile of a report, whole or not at all; lines that say how well it fits.

    Raises:
        UserError: it has no measurements to fit, or they give a profile that the settings refuse.
    """
    data = ((report.get("sections") or {}).get("fit") or {}).get("data")
    if not data:
        raise UserError("the report has no fit section; run gpu_check again with --only fit")
    profile = profile_of(data)
    hardware = replace(profile.hardware, name=path.stem)
    config = replace(_config(data, "bf16"), hardware=hardware)
    check(replace(config, data=replace(config.data, train=(SourceConfig(prefix="any"),))))  # the settings ask for a corpus
    machine = report.get("device") or {}
    where = f"{machine.get('name', '?')}, torch {machine.get('torch', '?')}, Transformer Engine {machine.get('te', 'not installed')}"
    note = [] if machine.get("cuda") else ["A CPU was measured: this is no profile of a GPU."]
    write_whole(path, profile_text(hardware, [f"{where}.", *note, *profile.lines], profile.comments, MARK))
    return profile.lines
