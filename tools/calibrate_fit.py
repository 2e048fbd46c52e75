"""A hardware profile from what tools/calibrate.py or tools/gpu_check.py measured on one rank, and between ranks.

Matrix products and attention by themselves give the shape of their rates (gemm_half_tokens, attention_half_length); the three scales are
those that best predict forward + backward of whole microbatches. Formulas: docs/plan.md section 3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from calibrate_measure import Compute, microbatch_of

from megadcp.config.schema import Config, GemmFlops, HardwareConfig
from megadcp.plan.basis import basis_from
from megadcp.plan.cost import BACKWARD_ATTENTION, BACKWARD_LINEAR, CostModel
from megadcp.plan.fit import fit_factors, fit_saturating, parts_of, scaled
from megadcp.plan.memory import MemoryModel

if TYPE_CHECKING:
    from calibrate_ranks import Communication

ANCHOR = (0.0, 0.01, 0.0)  # attention was measured as the model runs it; where packs tell little of it, that counts
UNIT_OVERHEAD = 1e-3  # what the factor of the overhead is stated against


@dataclass(frozen=True)
class Profile:
    """A fitted profile, what to say of each field, and lines for the person."""

    hardware: HardwareConfig
    comments: dict[str, str]
    lines: list[str]


def fit_profile(config: Config, compute: Compute, communication: Communication | None) -> Profile:
    """Coefficients that best predict what was measured. What wasn't measured stays as it is in the config's profile."""
    base, name = config.hardware, config.hardware.name
    rate = config.precision.format if config.precision.format in ("fp32", "bf16") else "fp8"
    kept = f"kept from {name}: not measured here"
    comments = {
        field: kept for field in ("net_bytes", "tp_exposed", "usable_fraction", "loss_chunk", "gpus_per_node", "reduce_overlap", "peak_flops")
    }
    comments |= {f"gemm_flops.{each}": f"kept from {name}: calibrate with precision={each}" for each in ("fp32", "bf16", "fp8") if each != rate}
    model, cost = config.model, CostModel(basis_from(config))

    tokens = np.array(sorted(compute.linear), dtype=np.float64)
    pairs = np.array([compute.linear[int(each)] for each in tokens])
    linear = fit_saturating((1 + BACKWARD_LINEAR) * cost.flops_per_token * tokens, tokens, pairs.sum(axis=1))
    packs = sorted(compute.attention)
    squares, sums = (np.array([sum(length**power for length in pack) for pack in packs], dtype=np.float64) for power in (2, 1))
    times = np.array([compute.attention[pack] for pack in packs])
    work = (1 + BACKWARD_ATTENTION) * 2 * model.head_dim * model.heads * squares
    beside = (1 + BACKWARD_LINEAR) * cost.flops_per_token * (sums + linear.half) / linear.rate  # the same layer's matrix products
    attention = fit_saturating(work, squares / sums, times.sum(axis=1), beside)

    start = replace(
        base,
        gemm_flops=GemmFlops(linear.rate, linear.rate, linear.rate),
        gemm_half_tokens=linear.half,
        attention_flops=attention.rate,
        attention_half_length=attention.half,
        layer_overhead_seconds=UNIT_OVERHEAD,
        memory_bandwidth=20 * cost_parameters(config) / compute.optimizer_seconds,
    )
    start_cost = CostModel(basis_from(replace(config, hardware=start)))
    parts = [parts_of(start_cost, microbatch_of(one.lengths, one.recompute)) for one in compute.fitted]
    factors, error = fit_factors(parts, [one.seconds for one in compute.fitted], anchor=ANCHOR)
    found = scaled(start, factors)
    found = replace(found, gemm_flops=replace(base.gemm_flops, **{rate: getattr(found.gemm_flops, rate)}))
    comments |= {
        f"gemm_flops.{rate}": f"fits whole microbatches: {error}; matrix products alone {linear.rate:.3g}",
        "gemm_half_tokens": f"fits matrix products: {linear.error}",
        "attention_flops": f"fits whole microbatches, as above; attention alone {attention.rate:.3g}",
        "attention_half_length": f"fits attention, as a part of a layer: {attention.among}",
        "layer_overhead_seconds": "fits whole microbatches, as above",
        "memory_bandwidth": "20 bytes a parameter in one AdamW step",
        "memory_bytes": "of the device" if on_gpu(config) else "the machine's, shared by the ranks",
    }
    lines = [
        f"matrix products  {linear.rate:.4g} FLOP/s, half of it at {linear.half:.3g} tokens: {linear.error}",
        f"                 backward / forward {np.median(pairs[:, 1] / pairs[:, 0]):.2f} (the model says {BACKWARD_LINEAR:g})",
        f"attention        {attention.rate:.4g} FLOP/s, half of it at length {attention.half:.3g}: {attention.error}",
        f"                 as a part of a layer: {attention.among}",
        f"                 backward / forward {np.median(times[:, 1] / times[:, 0]):.2f} (the model says {BACKWARD_ATTENTION:g})",
        f"microbatches     {error}",
    ]
    return _with_links(Profile(found, comments, lines), communication, kept)


def on_gpu(config: Config) -> bool:
    """Whether what the config asks for runs on a GPU here."""
    return config.cluster.device == "cuda" or (config.cluster.device == "auto" and torch.cuda.is_available())


def cost_parameters(config: Config) -> int:
    """Parameters of the model, as the memory model counts them."""
    return MemoryModel(basis_from(config)).parameters(0)


def _with_links(profile: Profile, communication: Communication | None, kept: str) -> Profile:
    fields = ("node_bytes", "node_latency", "ring_step_seconds", "reduce_bytes")
    if communication is None:
        return replace(profile, comments=profile.comments | dict.fromkeys(fields, f"{kept} (processes=2 does)"))
    from calibrate_ranks import fit_links

    links = fit_links(communication.messages)
    hardware = replace(
        profile.hardware,
        node_bytes=links.node_bytes,
        node_latency=links.node_latency,
        ring_step_seconds=links.ring_step_seconds,
        reduce_bytes=communication.reduce_bytes,
    )
    comments = {
        "node_bytes": f"of activations counted with 2 bytes: {links.error}",
        "node_latency": "fits all messages, as above",
        "ring_step_seconds": "fits all messages, as above",
        "reduce_bytes": "one reduce-scatter and one all-gather of the gradients",
    }
    line = f"messages         {links.node_bytes:.4g} bytes/s, {1e6 * links.node_latency:.3g} us a collective, "
    line += f"{1e6 * links.ring_step_seconds:.3g} us a ring step: {links.error}"
    return Profile(hardware, profile.comments | comments, [*profile.lines, line])
