"""What a run has decided, told before its first step."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from megadcp.backends.choose import choose
from megadcp.backends.torch_sharded import explain
from megadcp.config.schema import Config
from megadcp.data.step_documents import DocumentSource, ValidationSet
from megadcp.data.tokenizer import Tokenizer
from megadcp.nn.flops import flops, parameters
from megadcp.plan.basis import stage_layers_from
from megadcp.plan.step_plan import Layout
from megadcp.train.log import flops_text, short
from megadcp.train.schedule import describe_schedule


def describe(
    config: Config,
    device: torch.device,
    source: DocumentSource,
    held_out: Sequence[ValidationSet],
    tokenizer: Tokenizer | None,
    layout: Layout,
) -> list[str]:
    """One line per decision."""
    return [
        f"run: {config.run.name}, seed {config.run.seed}, {config.run.steps:,} steps of about {config.data.tokens_per_step:,} tokens",
        _model(config),
        _tokenizer(config, tokenizer),
        *(f"data: {line}" for line in source.describe()),
        _validation(config, held_out),
        *_layout(config, layout),
        _plan(config),
        describe_schedule(config.optim, config.run.steps, config.run.steps * config.data.tokens_per_step),
        _optimizer(config),
        _device(config, device),
        _backend(config, device),
        *_memory(config, device),
        _mfu(config, device),
        _watching(config),
        _checkpoints(config),
        _health(config),
    ]


def _model(config: Config) -> str:
    model, length = config.model, min(config.data.max_length, config.data.tokens_per_step)
    count, per_token = parameters(model), flops(model, [length]) / length
    return (
        f"model: {model.layers} layers, hidden {model.hidden}, {model.heads} heads ({model.kv_heads} kv), {model.mlp} {model.ffn}, vocabulary "
        f"{model.vocab:,}{', tied' if model.tied else ''}: {count:,} parameters, {short(per_token)} FLOPs per token in a document of {length:,}"
    )


def _tokenizer(config: Config, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return "tokenizer: none given (data.tokenizer.path); training reads token ids, the sample at the end is left out"
    name = f"{config.data.tokenizer.kind} {config.data.tokenizer.path}".strip()
    return f"tokenizer: {name}, {tokenizer.vocab_size:,} tokens, {tokenizer.fingerprint[:12]}"


def _validation(config: Config, held_out: Sequence[ValidationSet]) -> str:
    if not held_out:
        return "validation: none (data.split and data.validation name no held-out documents)"
    every = f"every {config.run.validate_every:,} steps and at the end" if config.run.validate_every else "at the end"
    return f"validation: {', '.join(one.name for one in held_out)}; up to {config.run.validate_tokens:,} tokens each, {every}"


def _layout(config: Config, layout: Layout) -> list[str]:
    """How the ranks of several stand."""
    if config.cluster.world == 1:
        return []
    pipeline = (
        f", {layout.pp} stages of {', '.join(map(str, stage_layers_from(config.parallel, config.model.layers)))} layers" if layout.pp > 1 else ""
    )
    chunks = f" in {layout.virtual_stages} chunks each" if layout.virtual_stages > 1 else ""
    tensor = f", tp {layout.tp}{' with sequence parallelism' if layout.sequence_parallel else ''}" if layout.tp > 1 else ""
    return [f"layout: {config.cluster.world} ranks: {layout.lanes} lanes{tensor}{pipeline}{chunks}"]


def _plan(config: Config) -> str:
    plan = config.plan
    cap = f"up to {plan.pack_tokens:,} tokens a microbatch" if plan.pack_tokens else "memory decides how much a microbatch holds"
    who = "when it is needed" if not plan.ahead else f"{plan.ahead} steps ahead in a {'process of its own' if plan.worker == 'process' else 'thread'}"
    return f"plan: policy {plan.policy}, {cap}, recompute {plan.recompute}, {who}, for hardware {config.hardware.name}"


def _optimizer(config: Config) -> str:
    optim = config.optim
    clip = f"clipped to norm {optim.clip_norm:g}" if optim.clip_norm else "not clipped"
    return (
        f"optimizer: AdamW (fused), betas {optim.beta1:g} {optim.beta2:g}, weight decay {optim.weight_decay:g} on matrices and embeddings, gradients "
        f"{clip}; the run ends after {optim.max_skipped} bad steps in a row"
    )


def _device(config: Config, device: torch.device) -> str:
    narrow = config.precision.format != "fp32"
    weights = "weights bf16 with fp32 masters, gradients summed in fp32" if narrow else "weights, gradients and optimizer fp32"
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return f"device: {where}; precision {config.precision.format} ({weights}); torch {torch.__version__}"


def _backend(config: Config, device: torch.device) -> str:
    choice, precision = choose(config.precision, device), config.precision
    ends = f"; the first and last {precision.bf16_ends} layers stay in bf16" if precision.bf16_ends else ""
    fp8 = precision.format if precision.format.startswith("fp8") else ""
    kernels = f"; {explain(device, fp8)}" if choice.te is None else ""
    return f"backend: {choice.name} ({choice.why}){kernels}{ends}"


def _memory(config: Config, device: torch.device) -> list[str]:
    """A warning where plans may fill more memory than there is."""
    if device.type == "cuda":
        there = torch.cuda.get_device_properties(device).total_memory
    else:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    planned = config.hardware.memory_bytes * config.hardware.usable_fraction
    if planned <= there:
        return []
    return [
        f"WARNING: plans may fill {planned / 1e9:.4g} GB (hardware.memory_bytes * usable_fraction of {config.hardware.name}), but this machine has "
        f"{there / 1e9:.4g} GB; set hardware.memory_bytes={there * 0.8:.3g} or take the hardware profile of this machine"
    ]


def _mfu(config: Config, device: torch.device) -> str:
    peak = config.hardware.peak_flops
    if device.type == "cpu":
        return "mfu: not stated, because no peak of this CPU is known; FLOP/s are model FLOPs of real lengths, without recompute"
    if not peak:
        return f"mfu: not stated, because hardware {config.hardware.name} has no peak_flops"
    return (
        f"mfu: against {flops_text(peak)} (dense bf16, hardware.peak_flops of {config.hardware.name}); model FLOPs of real lengths, without recompute"
    )


def _watching(config: Config) -> str:
    log = config.log
    parts = [f"metrics.jsonl has every step, the console every {log.every:,}"]
    parts += [f"timelines of every {log.timeline_every:,} steps and the last"] if log.timeline_every else []
    parts += [f"wandb, project {log.wandb_project}"] if log.wandb else []
    parts += ["TensorBoard"] if log.tensorboard else []
    if log.profile_steps:
        first, count = log.profile_steps
        ranks = ", ".join(map(str, log.profile_ranks))
        parts.append(f"profile of steps {first:,} to {first + count - 1:,} by rank{'s' if len(log.profile_ranks) != 1 else ''} {ranks}")
    return f"watching: {'; '.join(parts)}"


def _checkpoints(config: Config) -> str:
    every = "at the end or when asked to stop only (checkpoint.every)"
    if config.checkpoint.every:
        every = f"every {config.checkpoint.every:,} steps and at the end"
    kept = f"the last {config.checkpoint.keep_last} are kept"
    if config.checkpoint.keep_every:
        kept += f", those of every {config.checkpoint.keep_every:,}th step for ever"
    return f"checkpoints: {every}{', in the background' if config.checkpoint.async_save else ''}; {kept}"


def _health(config: Config) -> str:
    health = config.health
    spike = f"a loss of {health.spike_factor:g} times the median of {health.spike_window} steps: {health.spike}"
    limit = f"{health.step_timeout_s:g} s" if health.step_timeout_s else "10 times the longest so far, at least 120 s,"
    return (
        f"health: NaN or Inf: {health.nan}; {spike if health.spike != 'none' else 'loss spikes: none'}; a step without end for {limit} is a hang; "
        f"up to {health.oom_restarts} restarts with less memory for plans after running out of it"
    )
