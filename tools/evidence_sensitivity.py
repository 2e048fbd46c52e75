"""What is left of the gain when the planner is told something wrong, or the machine is worse: one step planned, and scored with what is true.

Gain: static-best tuned with the true values (an oracle, so what the plan does not know counts against the plan alone) / the plan's makespan,
scored with the true values. Variants:

right           nothing is wrong
NAME x FACTOR   the planner's profile has this coefficient times 1.2 or 0.8, the truth is the profile's; `all` has every one of them wrong at
                once, each up or down by a seeded coin
network/2       bandwidths are half and latencies twice the profile's; unaware: planned as if not; aware: planned with it
slow lane       lane 0 runs at 0.9 of the speed of the others; unaware and aware. static-best knows it
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from evidence_ablation import config_of, scored
from evidence_cells import Job
from evidence_steps import Answer, Clock, digits, steps_of

from megadcp.config.check import UserError
from megadcp.config.schema import Config, GemmFlops, HardwareConfig
from megadcp.plan.baselines import static_best
from megadcp.plan.basis import basis_from
from megadcp.plan.planner import Planner

COEFFICIENTS = (
    "gemm_flops", "gemm_half_tokens", "attention_flops", "attention_half_length", "bandwidth", "latency", "layer_overhead_seconds",
)  # fmt: skip
FACTORS = (0.8, 1.2)
SLOW = 0.9
JOINT = {"bandwidth": ("node_bytes", "net_bytes"), "latency": ("node_latency", "ring_step_seconds")}
COINS = 2


class Variant(NamedTuple):
    """What the planner is told, and what is true."""

    name: str
    told: Config
    true: Config


def scaled(config: Config, factors: dict[str, float]) -> Config:
    """The run with coefficients of its hardware times these factors."""
    hardware: HardwareConfig = config.hardware
    for name, factor in factors.items():
        if name == "gemm_flops":
            rates = dataclasses.asdict(hardware.gemm_flops)
            hardware = dataclasses.replace(hardware, gemm_flops=GemmFlops(**{format: rate * factor for format, rate in rates.items()}))
            continue
        for each in JOINT.get(name, (name,)):
            hardware = dataclasses.replace(hardware, **{each: getattr(hardware, each) * factor})
    return dataclasses.replace(config, hardware=hardware)


def variants(job: Job) -> Iterator[Variant]:
    """All of them; `right` first."""
    base = config_of(job)
    yield Variant("right", base, base)
    for name in COEFFICIENTS:
        for factor in FACTORS:
            yield Variant(f"{name} x {factor:g}", scaled(base, {name: factor}), base)
    random = np.random.default_rng([job.seed, 7])
    for number in range(1, COINS + 1):
        coins = random.integers(0, len(FACTORS), len(COEFFICIENTS))
        yield Variant(f"all, coin {number}", scaled(base, {name: FACTORS[coin] for name, coin in zip(COEFFICIENTS, coins, strict=True)}), base)
    half = scaled(base, {"bandwidth": 0.5, "latency": 2.0})
    slow = config_of(job, lane_speed=(SLOW, *[1.0] * (job.lanes - 1)))
    for name, true in (("network/2", half), ("slow lane", slow)):
        yield Variant(f"{name}, unaware", base, true)
        yield Variant(f"{name}, aware", true, true)


def sensitivity(job: Job, clock: Clock) -> Answer:
    """Gain over static-best of every variant; None where a plan made with what is wrong does not fit, or nothing static does."""
    return clock.milliseconds(lambda: _gains(job))[0]  # type: ignore[no-any-return]


def _gains(job: Job) -> Answer:
    lengths = steps_of(job, 1)[0]
    gains: dict[str, float | None] = {}
    static: dict[int, float] = {}
    for name, told, true in variants(job):
        basis = basis_from(true)
        if id(true) not in static:
            found = static_best(basis, lengths, job.max_length)
            static[id(true)] = float("inf") if found is None else found.makespan
        try:
            makespan = scored(basis, Planner(told)(0, lengths).microbatches)
        except UserError:
            makespan = float("inf")
        gains[name] = digits(static[id(true)] / makespan) if makespan < float("inf") else None
    return {"documents": len(lengths), "gains": gains}
