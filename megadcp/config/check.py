"""Checks of a whole config: what one field's type can't say. Standard library only.

Every message names the keys, their values and what would be legal.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable

from megadcp.config.schema import MISSING, Config, settings


class UserError(ValueError):
    """What was asked can't be done; the message is one line that says what is wrong and what would work. code: of a process that ends with it."""

    code = 2


def check(config: Config) -> None:
    """Refuse a config that contradicts itself.

    Raises:
        UserError: the first contradiction found.
    """
    parts = (
        _choices, _ranges, _run, _model, _rope, _layout, _stages, _graphs, _data, _sources, _split, _plan, _optim, _precision, _checkpoint, _health,
        _log, _allowed, _environment,
    )  # fmt: skip
    for part in parts:
        part(config)


def nearest(name: str, legal: Iterable[str]) -> str:
    """The end of a message about a wrong name: the likeliest right one, and all of them when they are few."""
    names = list(legal)
    close = difflib.get_close_matches(name, names, 1, 0.5)
    listed = f"legal here: {', '.join(names)}"
    if not close:
        return listed
    return f"nearest: {close[0]} ({listed})" if len(names) <= 12 else f"nearest: {close[0]}"


# ------------------------------------------------------------------------------------------------------- one setting each
AT_LEAST_ONE = {
    "model.layers", "model.hidden", "model.heads", "model.kv_heads", "model.head_dim", "model.ffn", "model.vocab",
    "model.rope.original_max_position", "data.max_length", "data.tokens_per_step", "data.prepare.corpus_bytes", "data.prepare.tokenizer_lines",
    "data.prepare.workers", "parallel.tp", "parallel.pp", "parallel.virtual_stages", "run.steps", "run.validate_tokens", "checkpoint.keep_last",
    "log.every", "cluster.nodes", "cluster.processes", "optim.max_skipped", "hardware.loss_chunk", "hardware.gpus_per_node",
    "health.spike_window", "health.rollback_steps",
}  # fmt: skip
ABOVE_ZERO = {
    "model.norm_eps", "model.rope.theta", "model.rope.low_freq_factor", "model.rope.high_freq_factor", "model.rope.beta_fast", "model.rope.beta_slow",
    "model.init_std", "optim.lr", "optim.eps", "hardware.gemm_flops.fp32", "hardware.gemm_flops.bf16", "hardware.gemm_flops.fp8",
    "hardware.attention_flops", "hardware.node_bytes", "hardware.net_bytes", "hardware.memory_bytes", "hardware.usable_fraction",
    "hardware.reduce_bytes", "hardware.memory_bandwidth", "hardware.peak_flops", "health.other_timeout_s", "health.oom_factor",
    "log.tracker_timeout_s",
}  # fmt: skip
BELOW_ONE = {"health.oom_factor", "optim.beta1", "optim.beta2", "model.embedding_dropout", "model.residual_dropout"}
UP_TO_ONE = {"optim.min_lr_share", "optim.decay_share", "hardware.tp_exposed", "hardware.usable_fraction", "hardware.reduce_overlap"}


def _get(config: Config, key: str) -> object:
    value: object = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


NOT_HAD = {  # what others have and somebody may ask for
    "precision.format=fp8_delayed": "delayed scaling exchanges its history after every microbatch, of which ranks run different numbers, and its "
    "results depend on what is recomputed",
    "precision.format=mxfp8": "no GPU before Blackwell multiplies it",
}


def _choices(config: Config) -> None:
    for key, field in settings():
        legal, value = field.metadata.get("choices"), _get(config, key)
        if legal and value not in legal:
            because = NOT_HAD.get(f"{key}={value}")
            raise UserError(f"{key}={value} {f'is not had: {because}' if because else 'does not exist'}; {nearest(str(value), legal)}")


def _ranges(config: Config) -> None:
    for key, _ in settings():
        value = _get(config, key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if not math.isfinite(value):
            raise UserError(f"{key}={value} is not a finite number")
        if key in AT_LEAST_ONE and value < 1:
            raise UserError(f"{key}={value} is too small; legal here: 1 and above")
        if key in ABOVE_ZERO and value <= 0:
            raise UserError(f"{key}={value} is too small; legal here: above 0")
        if value < 0:
            raise UserError(f"{key}={value} is negative; legal here: 0 and above")
        if key in BELOW_ONE and value >= 1:
            raise UserError(f"{key}={value} is too large; legal here: from 0 to below 1")
        if key in UP_TO_ONE and value > 1:
            raise UserError(f"{key}={value} is too large; legal here: up to 1")


def _run(config: Config) -> None:
    name = config.run.name
    if name == MISSING:
        raise UserError("run.name must be given: run.name=NAME names the run folder")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._=,+-]*", name) or len(name) > 200:
        raise UserError(f"run.name={name!r} can't name a folder; legal here: up to 200 letters, digits and . _ = , + - with a letter or digit first")
    if not config.run.folder:
        raise UserError("run.folder is empty; legal here: a path, for example run.folder=runs")
    if config.run.sample_prompt and config.data.tokenizer.kind != "bytes" and not config.data.tokenizer.path:
        raise UserError("run.sample_prompt is set but data.tokenizer.path is empty; give data.tokenizer.path=FILE or run.sample_prompt=''")


# ------------------------------------------------------------------------------------------------------------------ model
def _divisors(number: int, fits: Callable[[int], bool] = lambda _: True) -> str:
    return ", ".join(str(each) for each in range(1, number + 1) if number % each == 0 and fits(each))


def _model(config: Config) -> None:
    model = config.model
    if model.attention_dropout != 0.0:
        raise UserError(
            f"model.attention_dropout={model.attention_dropout} can't be had: fused attention kernels on packed documents draw their own random "
            "numbers, so the result would depend on the packing; set 0 and use model.residual_dropout or model.embedding_dropout"
        )
    if model.heads % model.kv_heads:
        raise UserError(f"model.kv_heads={model.kv_heads} does not divide model.heads={model.heads}; legal here: {_divisors(model.heads)}")
    if model.position == "learned" and model.max_position < config.data.max_length:
        raise UserError(
            f"model.max_position={model.max_position} is less than data.max_length={config.data.max_length}, so late tokens would have no learned "
            f"position; set data.max_length to at most {model.max_position} or model.max_position to at least {config.data.max_length}"
            if model.max_position
            else f"model.position=learned needs model.max_position of at least data.max_length={config.data.max_length}; it is 0"
        )
    if model.position == "rope" and model.max_position:
        raise UserError(f"model.max_position={model.max_position} has no effect with model.position=rope; set 0, or model.position=learned")


def _rope(config: Config) -> None:
    model, rope = config.model, config.model.rope
    if model.position != "rope":
        return
    if model.head_dim % 2:
        raise UserError(f"model.head_dim={model.head_dim} is odd, but model.position=rope turns pairs; legal here: even numbers")
    if rope.scaling != "none" and rope.factor < 1:
        raise UserError(f"model.rope.factor={rope.factor} would shrink the context; legal with model.rope.scaling={rope.scaling}: 1 and above")
    if rope.scaling == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        raise UserError(
            f"model.rope.low_freq_factor={rope.low_freq_factor} must be below model.rope.high_freq_factor={rope.high_freq_factor}; usual: 1 and 4"
        )
    if rope.scaling == "yarn" and rope.beta_slow >= rope.beta_fast:
        raise UserError(f"model.rope.beta_slow={rope.beta_slow} must be below model.rope.beta_fast={rope.beta_fast}; usual: 1 and 32")


# ----------------------------------------------------------------------------------------------------------------- layout
def _layout(config: Config) -> None:
    parallel, model, cluster = config.parallel, config.model, config.cluster
    for name, size in (("heads", model.heads), ("ffn", model.ffn)):
        if size % parallel.tp:
            legal = _divisors(math.gcd(model.heads, model.ffn), lambda each: not (model.kv_heads % each and each % model.kv_heads))
            raise UserError(f"parallel.tp={parallel.tp} does not divide model.{name}={size}; legal here: {legal}")
    if model.kv_heads % parallel.tp and parallel.tp % model.kv_heads:
        legal = _divisors(math.gcd(model.heads, model.ffn), lambda each: not (model.kv_heads % each and each % model.kv_heads))
        raise UserError(f"parallel.tp={parallel.tp} neither divides model.kv_heads={model.kv_heads} nor is a multiple of it; legal here: {legal}")
    ranks = parallel.tp * parallel.pp
    if cluster.world % ranks:
        raise UserError(
            f"parallel.tp={parallel.tp} x parallel.pp={parallel.pp} = {ranks} does not divide cluster.nodes={cluster.nodes} x "
            f"cluster.processes={cluster.processes} = {cluster.world} ranks; legal products here: {_divisors(cluster.world)}"
        )
    if cluster.nodes > 1 and cluster.processes % parallel.tp:
        raise UserError(
            f"parallel.tp={parallel.tp} would reach across nodes of cluster.processes={cluster.processes}; legal here: {_divisors(cluster.processes)}"
        )
    lanes = cluster.world // ranks
    sizes = [0] + [1 << power for power in range(lanes.bit_length())]
    if parallel.max_cp not in sizes:
        raise UserError(
            f"parallel.max_cp={parallel.max_cp} must be a power of two up to the {lanes} lanes, or 0 for all; "
            f"legal here: {', '.join(map(str, sizes))}"
        )


def _stages(config: Config) -> None:
    parallel, layers = config.parallel, config.model.layers
    chunks = parallel.pp * parallel.virtual_stages
    if parallel.virtual_stages > 1 and parallel.pp == 1:
        raise UserError(f"parallel.virtual_stages={parallel.virtual_stages} needs a pipeline, but parallel.pp=1; set 1, or parallel.pp above 1")
    given = parallel.stage_layers
    if given:
        if len(given) != parallel.pp or sum(given) != layers:
            raise UserError(
                f"parallel.stage_layers={list(given)} has {len(given)} stages and {sum(given)} layers; "
                f"it must have parallel.pp={parallel.pp} stages and model.layers={layers} layers, or be [] for an even division"
            )
        if min(given) < parallel.virtual_stages:
            raise UserError(
                f"parallel.stage_layers={list(given)} has a stage with fewer layers than "
                f"parallel.virtual_stages={parallel.virtual_stages}; every stage needs at least one layer per chunk"
            )
    elif layers % chunks:
        shown = f"parallel.pp={parallel.pp}" + (f" x parallel.virtual_stages={parallel.virtual_stages}" if parallel.virtual_stages > 1 else "")
        raise UserError(f"{shown} does not divide model.layers={layers}; legal here: {_divisors(layers)}, or give parallel.stage_layers")


# ------------------------------------------------------------------------------------------------------------------- data
def _graphs(config: Config) -> None:
    parallel, precision = config.parallel, config.precision
    if not parallel.cuda_graphs:
        return
    asked = f"parallel.cuda_graphs={parallel.cuda_graphs}"
    if parallel.pp > 1 or parallel.tp > 1:
        raise UserError(
            f"{asked} needs one microbatch under way at a time and layers without messages, but parallel.pp={parallel.pp} and "
            f"parallel.tp={parallel.tp}; set 0, or both to 1"
        )
    if precision.format != "bf16" or precision.backend == "te":
        raise UserError(
            f"{asked} is for precision.format=bf16 and precision.backend=torch, not for {precision.format} and {precision.backend}; set 0, or those"
        )


def _data(config: Config) -> None:
    data = config.data
    if data.mode == "documents" and data.max_length < 2:
        raise UserError(f"data.max_length={data.max_length} leaves no token with a next token to predict; legal here: 2 or more")
    if data.tokens_per_step < data.max_length:
        raise UserError(
            f"data.tokens_per_step={data.tokens_per_step} can't hold a document of data.max_length={data.max_length}; "
            f"set data.tokens_per_step to at least {data.max_length} or data.max_length to at most {data.tokens_per_step}"
        )
    if data.mode == "stream" and data.tokens_per_step % data.max_length:
        below = data.tokens_per_step // data.max_length * data.max_length
        raise UserError(
            f"data.mode=stream cuts samples of data.max_length={data.max_length} tokens, which do not fill data.tokens_per_step="
            f"{data.tokens_per_step}; nearest: {below} or {below + data.max_length}"
        )
    if data.mask_eod_loss and data.mode != "stream":
        raise UserError(f"data.mask_eod_loss=true has no effect with data.mode={data.mode}; set false, or data.mode=stream")
    if data.prepare.kind != "none" and data.tokenizer.kind != "sentencepiece":
        raise UserError(
            f"data.prepare.kind={data.prepare.kind} trains a sentencepiece tokenizer, but data.tokenizer.kind={data.tokenizer.kind}; "
            "set data.tokenizer.kind=sentencepiece, or data.prepare.kind=none"
        )


def _sources(config: Config) -> None:
    if not config.data.train:
        raise UserError("data.train is empty; name a corpus: 'data.train=[{prefix: PATH_WITHOUT_EXTENSION}]', or data=python_library")
    for group, sources in (("train", config.data.train), ("validation", config.data.validation)):
        names: dict[str, int] = {}
        for index, source in enumerate(sources):
            key = f"data.{group}[{index}]"
            if source.prefix in (MISSING, ""):
                raise UserError(f"{key}.prefix must be given: 'data.{group}=[{{prefix: PATH_WITHOUT_EXTENSION}}]'")
            if not (math.isfinite(source.weight) and source.weight > 0):
                raise UserError(f"{key}.weight={source.weight} takes no share of the blend; legal here: above 0, or leave {source.prefix} out")
            name = source.name or source.prefix.rstrip("/").rsplit("/", 1)[-1]
            if name in names:
                raise UserError(f"data.{group}[{names[name]}] and {key} are both called {name}; give one of them another name: {key}.name=NAME")
            names[name] = index


def _split(config: Config) -> None:
    split = config.data.split
    shown = f"data.split={list(split)}"
    if len(split) != 3:
        raise UserError(f"{shown} has {len(split)} shares; legal here: three (train, validation, test), for example [0.98,0.02,0]")
    if any(not math.isfinite(share) or share < 0 for share in split):
        raise UserError(f"{shown} holds a share below 0; legal here: three shares from 0 to 1, for example [0.98,0.02,0]")
    if abs(sum(split) - 1) > 1e-6:
        total = sum(split)
        scaled = f"; in the same proportions: [{','.join(f'{share / total:.6g}' for share in split)}]" if total else ""
        raise UserError(f"{shown} sums to {total:g}; the shares must sum to 1{scaled}")
    if split[0] == 0:
        raise UserError(f"{shown} leaves nothing to train on; the first share must be above 0")


# --------------------------------------------------------------------------------------------------- plan, optim, precision
def _plan(config: Config) -> None:
    plan, longest = config.plan, config.data.max_length
    if plan.pack_tokens and plan.pack_tokens < longest:
        raise UserError(
            f"plan.pack_tokens={plan.pack_tokens} can't hold a document of data.max_length={longest}; "
            f"set at least {longest}, or 0 to let memory decide"
        )
    if plan.recompute in ("auto", "none") and plan.recompute_layers:
        raise UserError(
            f"plan.recompute_layers={plan.recompute_layers} has no effect with plan.recompute={plan.recompute}; "
            "set 0, or plan.recompute to selective, mlp or full"
        )
    least = min(config.parallel.stage_layers or (config.model.layers // config.parallel.pp,))
    if plan.recompute_layers > least:
        raise UserError(f"plan.recompute_layers={plan.recompute_layers} is more than the {least} layers of a stage; legal here: 0 to {least}")


def _optim(config: Config) -> None:
    optim, steps = config.optim, config.run.steps
    tokens = steps * config.data.tokens_per_step
    if optim.warmup_steps and optim.warmup_tokens:
        raise UserError(f"optim.warmup_steps={optim.warmup_steps} and optim.warmup_tokens={optim.warmup_tokens} are both set; set one of them to 0")
    if optim.warmup_steps > steps:
        raise UserError(f"optim.warmup_steps={optim.warmup_steps} is longer than run.steps={steps}; legal here: 0 to {steps}")
    if optim.warmup_tokens > tokens:
        raise UserError(
            f"optim.warmup_tokens={optim.warmup_tokens} is more than run.steps={steps} x data.tokens_per_step={config.data.tokens_per_step}; "
            f"legal here: 0 to {tokens}"
        )


def _health(config: Config) -> None:
    health = config.health
    if health.spike != "none" and health.spike_factor <= 1:
        raise UserError(f"health.spike_factor={health.spike_factor} would call every ordinary step a spike; legal with health.spike: above 1")
    if 0 < health.straggler_factor <= 1:
        raise UserError(f"health.straggler_factor={health.straggler_factor} would call every lane slow; legal here: above 1, or 0 for never")
    if "rollback" in (health.nan, health.spike) and health.rollback_documents == "skip" and config.data.mode == "stream":
        raise UserError(
            "health.rollback_documents=skip needs documents beyond those of run.steps, but the order of data.mode=stream ends with them; "
            "set health.rollback_documents=repeat, or data.mode=documents"
        )
    for name in [name for name in ("nan", "spike") if getattr(health, name) == "rollback"]:
        _rollback(config, f"health.{name}=rollback")


def _rollback(config: Config, asked: str) -> None:
    """Whenever a step is bad a checkpoint must be kept that is old enough to go back to."""
    checkpoint, back = config.checkpoint, config.health.rollback_steps
    if not checkpoint.every:
        raise UserError(f"{asked} needs checkpoints to go back to, but checkpoint.every=0 saves at the end only; set checkpoint.every to 1 or more")
    reach = (checkpoint.keep_last - 1) * checkpoint.every + 1  # of a step right after a save
    if back > reach and not checkpoint.keep_every:
        raise UserError(
            f"health.rollback_steps={back} may be more than checkpoint.keep_last={checkpoint.keep_last} x {checkpoint.every} steps reach back; "
            f"legal here: 1 to {reach}, or a larger keep_last"
        )


def _checkpoint(config: Config) -> None:
    every, keep = config.checkpoint.every, config.checkpoint.keep_every
    if keep and (not every or keep % every):
        legal = f"a multiple of {every}" if every else "a multiple of checkpoint.every, which is 0 (saves at the end only)"
        raise UserError(f"checkpoint.keep_every={keep} names steps that are not saved; legal here: {legal}, or 0 for none")


def _log(config: Config) -> None:
    log, world = config.log, config.cluster.world
    if log.profile_steps and (len(log.profile_steps) != 2 or min(log.profile_steps) < 1):
        raise UserError(f"log.profile_steps={list(log.profile_steps)} is no window; legal here: [FIRST,COUNT], both 1 or more, or [] for none")
    wrong = [rank for rank in log.profile_ranks if not 0 <= rank < world]
    if wrong:
        raise UserError(f"log.profile_ranks names rank {wrong[0]}, but there are {world}; legal here: 0 to {world - 1}")


def _allowed(config: Config) -> None:
    """checkpoint.allow_change names settings, items of lists (data.train[0].weight) or groups (data.train, optim)."""
    names = [name for name, _ in settings()]
    for asked in config.checkpoint.allow_change:
        plain = re.sub(r"\[[0-9]+\].*", "", asked)
        if not any(name == plain or name.startswith(f"{plain}.") for name in names):
            raise UserError(f"checkpoint.allow_change names {asked}, which is no setting; {nearest(asked, names)}")


def _precision(config: Config) -> None:
    precision, layers = config.precision, config.model.layers
    if precision.backend == "te":
        if precision.format == "fp32":
            raise UserError(
                "precision.backend=te has no precision.format=fp32; legal with it: bf16, fp8_current, fp8_block, or precision.backend=torch"
            )
        if config.cluster.device == "cpu":
            raise UserError("precision.backend=te needs a GPU, but cluster.device=cpu; set cluster.device=cuda, or precision.backend=torch")
        if config.model.head_dim % 8:
            raise UserError(f"model.head_dim={config.model.head_dim} has no attention kernel with precision.backend=te; legal here: multiples of 8")
    if not precision.format.startswith("fp8"):
        if precision.bf16_ends:
            raise UserError(f"precision.bf16_ends={precision.bf16_ends} has no effect with precision.format={precision.format}; set 0")
        return
    if 2 * precision.bf16_ends >= layers:
        raise UserError(
            f"precision.bf16_ends={precision.bf16_ends} at either end leaves none of model.layers={layers} in fp8; "
            f"legal here: 0 to {(layers - 1) // 2}"
        )
    unit = 128 if config.precision.format == "fp8_block" else 16
    model, tp = config.model, config.parallel.tp
    kv_heads = max(1, model.kv_heads // tp)
    sizes = {
        "model.hidden": model.hidden,
        "model.ffn / parallel.tp": model.ffn // tp,
        "model.heads * model.head_dim / parallel.tp": model.heads * model.head_dim // tp,
        "(model.heads + 2 * model.kv_heads) * model.head_dim / parallel.tp": (model.heads // tp + 2 * kv_heads) * model.head_dim,
    }
    for name, size in sizes.items():
        if size % unit:
            below, above = size // unit * unit, -(-size // unit) * unit
            raise UserError(
                f"precision.format={config.precision.format} needs matrix sides divisible by {unit}, but {name} = {size}; "
                f"nearest: {f'{below} or ' if below else ''}{above}, or precision=bf16"
            )


# ---------------------------------------------------------------------------------------------------------------- cluster
OF_THE_LAUNCHER = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"}


def _environment(config: Config) -> None:
    for name, value in config.cluster.environment.items():
        key = f"cluster.environment.{name}"
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UserError(f"cluster.environment: {name!r} can't name a variable; legal here: letters, digits and _, no digit first")
        if name in OF_THE_LAUNCHER or name.startswith("SLURM_"):
            raise UserError(f"{key} is for whoever starts the ranks to set, not for a config; leave it out")
        if not value.isprintable():
            raise UserError(f"{key}={value!r} holds characters that don't print; legal here: one line of text")
