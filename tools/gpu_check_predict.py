"""Sections of tools/gpu_check.py: seconds against tokens and document length, what fits them, and how well planned steps are predicted.

What is measured goes into the file as it is (`data`), so that gpu_check_profile.py can fit it again anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from calibrate_measure import Bench, Clock, Effort, RandomDocuments, Sample, geometric, mixed, near
from gpu_check_profile import profile_of
from gpu_check_setup import LEVELS, Case, Row, Rows, Setup, Unavailable, at
from gpu_check_speed import attention_seconds, linear_seconds
from torch import nn

from megadcp.config.schema import HardwareConfig, ModelConfig, OptimConfig, PlanConfig
from megadcp.data.batch import lane_packs
from megadcp.data.step_documents import StepDocuments
from megadcp.engine.step import Engine, run_step
from megadcp.parallel.gradients import GradientBuffers
from megadcp.plan.planner import planner_for
from megadcp.train.optim import Optimizer

UNIT = 128  # packs are multiples of it, so that no format pads them
FORMATS = ("bf16", "fp8_current")
BEST = ("te", "torch")  # the first that runs here, as precision.backend=auto has it


@dataclass
class State:
    """What measuring needs of a run: tools/calibrate_measure.py's Bench takes it in place of the trainer's."""

    model: nn.Module
    gradients: GradientBuffers
    optimizer: Optimizer
    engine: Engine


def state_of(setup: Setup, case: Case, config: ModelConfig) -> State:
    """A model with its gradients and optimizer, on this rank alone."""
    backend, model = setup.backend(case), setup.model(case, config)
    gradients = GradientBuffers(model.named_parameters())
    optimizer = Optimizer(model, gradients, backend, OptimConfig(), {})
    return State(model, gradients, optimizer, Engine(model, gradients, optimizer, setup.device))


def best(setup: Setup, format: str) -> Case:
    """The backend that a run in this format would take.

    Raises:
        Unavailable: there is none.
    """
    reason = "no backend"
    for backend in BEST:
        try:
            setup.backend(Case(backend, format))
        except Unavailable as error:
            reason = str(error)
        else:
            return Case(backend, format)
    raise Unavailable(reason)


def model_to_fit(setup: Setup) -> ModelConfig:
    """A few layers of the 8b model with a smaller vocabulary: beside so few layers its own LM head would hide what attention takes."""
    eight = setup.sizes.models["gpt_8b"]
    return replace(eight, layers=setup.sizes.fit_layers, vocab=min(eight.vocab, 16384))


# --------------------------------------------------------------------------------------------------------------------------- fit
def fit(setup: Setup, end: float) -> dict[str, Any]:
    """Measure linears by tokens, attention by document length, whole microbatches by both, the optimizer; then fit the cost model to them."""
    rows, sizes, config = Rows(setup, end), setup.sizes, model_to_fit(setup)
    data: dict[str, Any] = {"model": asdict(config), "hardware": asdict(setup.hardware), "device": setup.device.type, "max_length": sizes.fit_tokens}
    for format in FORMATS:
        found: dict[str, Any] = {}
        key = {"format": format}
        rows.add({**key, "measured": "linears"}, lambda f=format, into=found: _linears(setup, f, config, into))  # type: ignore[misc]
        if format == "bf16":
            rows.add({**key, "measured": "attention"}, lambda f=format, into=found: _attention(setup, f, config, into))  # type: ignore[misc]
        rows.add({**key, "measured": "microbatches"}, lambda f=format, into=found: _microbatches(setup, f, config, into))  # type: ignore[misc]
        data[format] = found
    more: dict[str, Any] = {"data": data}
    row = rows.add({"format": "all", "measured": "coefficients"}, lambda: _coefficients(data, more))
    if row is None:
        more["profile"] = None
    return rows.result(**more)


def _linears(setup: Setup, format: str, config: ModelConfig, into: dict[str, Any]) -> Row:
    case = best(setup, format)
    tokens = [UNIT * max(1, each // UNIT) for each in geometric(UNIT, setup.sizes.fit_tokens, setup.sizes.fit_sizes)]
    into["linear"] = [[each, *linear_seconds(setup, case, config, each)] for each in dict.fromkeys(tokens)]
    return {"backend": case.backend, "samples": len(into["linear"])}


def _attention(setup: Setup, format: str, config: ModelConfig, into: dict[str, Any]) -> Row:
    case, most = best(setup, format), setup.sizes.fit_tokens
    packs = [near(length, most) for length in geometric(min(64, most // 8), most, setup.sizes.fit_sizes)]
    into["attention"] = [[list(pack), *attention_seconds(setup, case, config, pack)] for pack in packs]
    return {"backend": case.backend, "samples": len(packs)}


def _microbatches(setup: Setup, format: str, config: ModelConfig, into: dict[str, Any]) -> Row:
    """Packs of short, middling and long documents; every third one is kept from the fit, and some are recomputed."""
    case, sizes = best(setup, format), setup.sizes
    random = np.random.default_rng(1)
    totals = [UNIT * max(1, each // UNIT) for each in geometric(2 * UNIT, sizes.fit_tokens, sizes.fit_sizes)]
    scales = (sizes.fit_tokens / 64, sizes.fit_tokens / 8, sizes.fit_tokens * 2)
    packs = [mixed(total, scale, sizes.fit_tokens, random) for total in dict.fromkeys(totals) for scale in scales]
    again = packs[-3::2]
    values = [at("none", 0)] * len(packs) + [at(level, config.layers) for level in LEVELS[1:] for _ in again]
    bench = Bench(
        setup.config(config, format, sizes.fit_tokens, sizes.fit_tokens), setup.device, Clock(setup.device, 2), None, state_of(setup, case, config)
    )  # type: ignore[arg-type]
    effort = Effort(rounds=5, seconds=0.0 if setup.quick else 25.0)
    samples = bench.samples([*packs, *(again * 3)], values, effort)
    plain = samples[: len(packs)]
    into["fitted"] = _lists([one for number, one in enumerate(plain) if number % 3 != 1])
    into["held_out"] = _lists(plain[1::3])
    into["recomputed"] = _lists(samples[len(packs) :])
    into["optimizer_seconds"] = bench.optimizer_seconds(effort)
    return {"backend": case.backend, "samples": len(samples)}


def _lists(samples: Sequence[Sample]) -> list[list[Any]]:
    return [[list(one.lengths), one.recompute.level, one.recompute.layers, one.seconds] for one in samples]


def _coefficients(data: dict[str, Any], more: dict[str, Any]) -> Row:
    profile = profile_of(data)
    more["profile"] = {"hardware": asdict(profile.hardware), "comments": profile.comments, "lines": profile.lines}
    return {"samples": sum(len(data[format].get("fitted", [])) for format in FORMATS)}


# ------------------------------------------------------------------------------------------------------------------------- steps
def steps(setup: Setup, end: float, earlier: dict[str, Any]) -> dict[str, Any]:
    """Whole steps, planned by the planner and run by the engine: predicted and measured seconds and bytes.

    With the coefficients that were just fitted, else with the profile of the device. Some steps are planned at a forced recompute level.
    """
    rows, config = Rows(setup, end), model_to_fit(setup)
    found = (earlier.get("fit") or {}).get("profile")
    hardware = _hardware(found["hardware"]) if found else setup.hardware
    for format in FORMATS:
        for level in ("auto", *LEVELS[1:]):
            for number in range(setup.sizes.steps if level == "auto" else 1):
                key = {"format": format, "profile": "fitted" if found else hardware.name, "recompute": level, "step": number}
                arguments = (format, level, number, hardware)
                rows.add(key, lambda a=arguments: _step(setup, config, *a))  # type: ignore[misc]
    errors = [abs(row["error"]) for row in rows.rows if row.get("error") is not None]
    return rows.result(median_error=float(np.median(errors)) if errors else None, worst_error=max(errors, default=None))


def _hardware(values: dict[str, Any]) -> HardwareConfig:
    from megadcp.config.schema import GemmFlops

    return HardwareConfig(**{**values, "gemm_flops": GemmFlops(**values["gemm_flops"])})


def _step(setup: Setup, config: ModelConfig, format: str, level: str, number: int, hardware: HardwareConfig) -> Row:
    case, sizes = best(setup, format), setup.sizes
    random = np.random.default_rng([7, number])
    lengths = mixed(sizes.step_tokens, sizes.step_tokens / 16, sizes.fit_tokens, random)
    asked = setup.config(config, format, sizes.fit_tokens, sizes.step_tokens, hardware)
    asked = replace(asked, plan=PlanConfig(recompute=level, pack_tokens=sizes.fit_tokens))
    plan = planner_for(asked)(number, list(lengths))
    documents = StepDocuments(number, np.arange(len(lengths)), np.array(lengths), 0.0)
    packs = lane_packs(RandomDocuments(lengths, config.vocab), documents, plan, 0)
    state = state_of(setup, case, config)
    run_step(state.engine, plan, packs, 0.0)  # kernels are chosen and compiled
    results = [run_step(state.engine, plan, packs, 0.0) for _ in range(1 if setup.quick else 3)]
    measured = float(np.median([result.measured_seconds for result in results]))
    row: Row = {
        "backend": case.backend,
        "microbatches": len(plan.microbatches),
        "predicted_s": plan.predicted.seconds,
        "measured_s": measured,
        "error": plan.predicted.seconds / measured - 1,
    }
    parts = results[-1].microbatches if setup.cuda else ()
    row["bytes_ratio"] = float(np.median([one.predicted_bytes / one.bytes for one in parts])) if parts else None
    return row
