"""Measure the cost model's coefficients on this machine and write them as a hardware profile.

    python tools/calibrate.py model=gpt_tiny precision=fp32 out=configs/hardware/mine.yaml
    python tools/calibrate.py model=gpt_1b precision=bf16 hardware=h200 out=configs/hardware/mine.yaml processes=2

Then hardware=mine takes it. Settings are those of pretrain_gpt.py, written the same way (docs/config.md): the model, precision and
data.max_length decide what is measured, cluster.threads the threads of a rank, hardware=NAME the profile from which comes what can't be
measured here. The tool's own keys:
KEYS
Formulas are those of docs/plan.md section 3. Matrix products and attention by themselves give the shape of their rates (gemm_half_tokens,
attention_half_length); the three scales (gemm_flops, attention_flops, layer_overhead_seconds) are those that best predict forward + backward
of whole microbatches, so they also carry norms, rotary embedding and whatever else the model does per token. Packs and steps that took no
part in the fit tell the error. Exit codes: 0 done, 1 a rank failed, 2 the request can't be met.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from calibrate_file import check_output, profile_text, write_profile
from calibrate_fit import fit_profile
from calibrate_measure import QUICK, Clock, Compute, Effort, Sample, Span, device_bytes, measure_compute, measure_steps, microbatch_of
from calibrate_ranks import mean_communication, mean_compute, measure_rank, on_ranks, slowest, steps_rank

from megadcp.config.check import UserError, nearest
from megadcp.config.load import compose, reported
from megadcp.config.schema import Config
from megadcp.plan.basis import Basis, basis_from
from megadcp.plan.cost import CostModel
from megadcp.plan.fit import FitError
from megadcp.plan.memory import MemoryModel
from megadcp.train.state import choose_device, model_dtype

KEYS = {
    "out": "FILE.yaml to write, best in configs/hardware; replaced if this tool wrote it",
    "processes": "ranks that measure at the same time, and then their communication; 1 if not given",
    "quick": "true: fewer sizes and repeats, for a first look",
    "tokens": "of the largest microbatch; not given: the larger of data.max_length and data.tokens_per_step, if it fits",
    "seed": "another seed draws other packs; 1 if not given",
    "overwrite": "true: out may replace any file",
}
FAILED = 1
WEIGHTS_SHARE = 0.5  # of the device's memory: a model above it is measured with fewer layers
GROUPS = ("run", "model", "data", "parallel", "plan", "precision", "optim", "checkpoint", "log", "cluster", "hardware", "experiment")


@dataclass(frozen=True)
class Request:
    """A command line, taken apart."""

    out: str
    processes: int
    effort: Effort
    tokens: int
    seed: int
    overwrite: bool
    overrides: tuple[str, ...]


# ---------------------------------------------------------------------------------------------------------------------- request
def parse(argv: Sequence[str]) -> Request:
    """Take a command line apart. UserError for what no part of it can be."""
    own: dict[str, str] = {}
    overrides = []
    for word in argv:
        key, equals, value = word.partition("=")
        if not equals and not word.startswith("~"):
            raise UserError(f"{word!r} is no setting; write key=value (see --help)")
        if key in own:
            raise UserError(f"{key}= is given twice")
        if key in KEYS:
            own[key] = value
        elif re.match(r"[~+]|.*[./@\[]", key) or key in GROUPS:
            overrides.append(word)
        else:
            raise UserError(f"{key}= is neither a key of this tool nor a group of settings; {nearest(key, [*KEYS, *GROUPS])}")
    if not own.get("out"):
        raise UserError("out= must say where the profile goes: out=configs/hardware/mine.yaml")

    def number(key: str, default: int, least: int) -> int:
        text = own.get(key, str(default))
        if not re.fullmatch(r"\d(_?\d)*", text) or int(text) < least:
            raise UserError(f"{key}={text} is not a whole number of at least {least}")
        return int(text)

    def flag(key: str) -> bool:
        text = own.get(key, "false").lower()
        if text not in ("true", "false"):
            raise UserError(f"{key}={text} is neither true nor false")
        return text == "true"

    effort = QUICK if flag("quick") else Effort()
    tokens = number("tokens", 0, 1) if "tokens" in own else 0
    return Request(own["out"], number("processes", 1, 1), effort, tokens, number("seed", 1, 0), flag("overwrite"), tuple(overrides))


def settings(request: Request, say: Callable[[str], None]) -> Config:
    """The config to measure with: one rank without pipeline, as many layers as fit."""
    named = {word.lstrip("+").partition("=")[0] for word in request.overrides}
    single = [word for word in ("parallel=single", "cluster=local", "run.sample_prompt=''") if word.partition("=")[0] not in named]
    if "hardware" not in named and torch.cuda.is_available() and "cluster.device=cpu" not in request.overrides:
        say("hardware=h200 is the base, because there is a GPU (hardware=NAME chooses another)")
        single.append("hardware=h200")
    config = compose([*single, *request.overrides])
    if config.cluster.world > 1 or config.parallel.tp * config.parallel.pp > 1:
        raise UserError("a calibration measures one rank without tensor or pipeline parallelism; processes=N runs several of them at the same time")
    model_dtype(config)  # refuses a precision without kernels
    device = choose_device(config)
    if device.type == "cuda" and request.processes > torch.cuda.device_count():
        raise UserError(f"processes={request.processes}, but torch sees {torch.cuda.device_count()} GPUs; give at most as many")
    memory = device_bytes(device, request.processes)
    config = replace(config, hardware=replace(config.hardware, memory_bytes=memory), run=replace(config.run, sample_prompt=""))
    layers = config.model.layers
    while layers > 1 and MemoryModel(basis_from(_with_layers(config, layers))).static(0, 0) > WEIGHTS_SHARE * memory:
        layers -= 1
    if layers < config.model.layers:
        say(f"measured with {layers} of the model's {config.model.layers} layers: more would take over half of the device's memory")
    return _with_layers(config, layers)


def _with_layers(config: Config, layers: int) -> Config:
    return replace(config, model=replace(config.model, layers=layers))


def largest(config: Config, asked: int) -> int:
    """Tokens of the largest microbatch."""
    memory = MemoryModel(basis_from(config))
    fits = int(memory.most_tokens("none", 0, [memory.budget(0, 0)]))
    wanted = asked or max(config.data.max_length, config.data.tokens_per_step)
    if fits < 8 or asked > fits:
        raise UserError(f"tokens={wanted} do not fit this device's memory; legal here: up to {fits}" if fits >= 8 else "the model does not fit here")
    return max(8, min(wanted, fits))


# ---------------------------------------------------------------------------------------------------------------------- errors
def errors_of(basis: Basis, samples: Sequence[Sample]) -> FitError:
    """Predictions against the measured seconds of microbatches."""
    cost = CostModel(basis)
    predicted = np.array([cost.seconds(microbatch_of(one.lengths, one.recompute)) for one in samples])
    return FitError.of(predicted, np.array([one.seconds for one in samples]))


def test_lines(config: Config, compute: Compute) -> list[str]:
    """How well the profile predicts packs that took no part in the fit; recomputed ones by level."""
    basis = basis_from(config)
    lines = [f"held-out packs   {errors_of(basis, compute.held_out)}"]
    for level in dict.fromkeys(one.recompute.level for one in compute.recomputed):
        error = errors_of(basis, [one for one in compute.recomputed if one.recompute.level == level])
        lines.append(f"  recompute {level:<10} {error}; predicted {1 + error.bias:.2f} of measured")
    return lines


def step_lines(steps: Sequence[tuple[float, Span]], clock: str) -> list[str]:
    """The same for whole steps of the real planner and engine."""
    predicted = np.array([seconds for seconds, _ in steps])
    own, wall = (np.array([getattr(span, name) for _, span in steps]) for name in ("seconds", "wall"))
    lines = [f"held-out steps   {FitError.of(predicted, own)} ({clock})"]
    if clock != "wall clock":
        lines.append(f"                 {FitError.of(predicted, wall)} (wall clock; other programs count)")
    return lines


# ------------------------------------------------------------------------------------------------------------------------- main
def calibrate(request: Request, say: Callable[[str], None]) -> int:
    """Measure, fit, test, write."""
    out = check_output(request.out, request.overwrite)
    config = settings(request, say)
    device, tokens = choose_device(config), largest(config, request.tokens)
    threads = config.cluster.threads or (torch.get_num_threads() if device.type == "cpu" else 0)
    clock = Clock(device, threads).name
    ranks = f"{request.processes} rank{'s at the same time' if request.processes > 1 else ''}"
    where = f"{config.precision.format} on {device.type}, {ranks}" + (
        f", {threads} CPU thread{'s' * (threads > 1)} each" if device.type == "cpu" else ""
    )
    shape = f"{config.model.layers} layers, hidden {config.model.hidden}"
    say(f"measuring        a model of {shape}, {where}; microbatches of up to {tokens} tokens; {clock}")
    begin = time.perf_counter()
    arguments = (config, tokens, request.effort, request.seed)
    communication = None
    if request.processes > 1:
        both = on_ranks(request.processes, device.type, threads, measure_rank, *arguments)
        compute, communication = mean_compute([one for one, _ in both]), mean_communication([other for _, other in both])
    else:
        torch.set_num_threads(threads or torch.get_num_threads())
        compute = measure_compute(config, device, *arguments[1:])
    profile = fit_profile(config, compute, communication)
    fitted = replace(config, hardware=replace(profile.hardware, name=out.stem))
    arguments = (fitted, *arguments[1:])
    if request.processes > 1:
        lanes = replace(fitted, cluster=replace(fitted.cluster, processes=request.processes))
        steps = slowest(on_ranks(request.processes, device.type, threads, steps_rank, lanes, *arguments[1:]))
    else:
        steps = measure_steps(fitted, device, *arguments[1:])
    lines = [*profile.lines, *test_lines(fitted, compute), *step_lines(steps, clock)]
    head = [f"a model of {shape}, {where}, torch {torch.__version__}; {clock}.", *lines]
    write_profile(out, profile_text(fitted.hardware, head, profile.comments), fitted)
    print("\n".join(lines))
    print(f"wrote            {out} ({time.perf_counter() - begin:.0f} s); hardware={out.stem} takes it from configs/hardware")
    return 0


def main(argv: Sequence[str]) -> int:
    """Exit code of one call."""
    if not argv or argv[0] in ("-h", "--help"):
        keys = "\n".join(f"    {key:<12} {text}" for key, text in KEYS.items())
        print((__doc__ or "").replace("KEYS", keys).rstrip())
        return 0

    def run() -> int:
        return calibrate(parse(argv), lambda line: print(line, flush=True))

    try:
        return reported(run)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
