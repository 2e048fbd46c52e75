"""Every setting of a run, as frozen dataclasses: one per config group. Standard library only.

Each field states its unit and the reason it exists in its metadata (`settings()` lists them; docs and error messages use it).
Choices are plain strings with the legal values in the metadata, because the same classes serve as Hydra's structured schema.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Optional

MISSING = "???"  # Hydra's mark for a value that must be given
BAD_STEP = ("skip", "stop", "rollback")


def setting(default: Any, unit: str, why: str, choices: tuple[str, ...] = ()) -> Any:
    """A dataclass field with its unit, its reason and, for strings, its legal values."""
    metadata = {"unit": unit, "why": why, "choices": choices}
    if isinstance(default, (list, tuple)):
        return field(default_factory=lambda: tuple(default), metadata=metadata)
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), hash=False, metadata=metadata)
    if dataclasses.is_dataclass(default) and isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


# ---------------------------------------------------------------------------------------------------------------- model
@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding; the scaling kinds are those of published model families."""

    theta: float = setting(10000.0, "1", "base of the rotary frequencies")
    scaling: str = setting("none", "name", "how frequencies are changed for longer contexts", ("none", "linear", "llama3", "yarn"))
    factor: float = setting(1.0, "1", "ratio of the longer to the original context")
    original_max_position: int = setting(8192, "tokens", "context of the unscaled model (llama3, yarn)")
    low_freq_factor: float = setting(1.0, "1", "llama3: wavelengths above original/low are divided by factor")
    high_freq_factor: float = setting(4.0, "1", "llama3: wavelengths below original/high stay as they are")
    beta_fast: float = setting(32.0, "rotations", "yarn: dimensions that turn more often than this are kept")
    beta_slow: float = setting(1.0, "rotations", "yarn: dimensions that turn less often than this are interpolated")
    attention_factor: float = setting(0.0, "1", "yarn: scale of cos and sin; 0 takes 0.1 ln(factor) + 1")


@dataclass(frozen=True)
class ModelConfig:
    """One GPT. Symbols of the plan contract: layers N, hidden h, heads H, kv_heads G, head_dim d, ffn f, vocab V."""

    layers: int = setting(4, "layers", "depth")
    hidden: int = setting(128, "features", "width of the residual stream")
    heads: int = setting(4, "heads", "query heads")
    kv_heads: int = setting(4, "heads", "key and value heads; fewer than heads is grouped-query attention")
    head_dim: int = setting(32, "features", "width of one head; heads * head_dim need not equal hidden")
    ffn: int = setting(320, "features", "inner width of the MLP")
    vocab: int = setting(4096, "tokens", "rows of the embedding; at least the tokenizer's size")
    norm: str = setting("rmsnorm", "name", "kind of normalisation", ("rmsnorm", "layernorm"))
    norm_eps: float = setting(1e-5, "1", "added to the variance")
    position: str = setting("rope", "name", "how a token knows its place in its document", ("rope", "learned"))
    max_position: int = setting(0, "tokens", "rows of the learned position table; 0 with rope")
    rope: RopeConfig = setting(RopeConfig, "group", "rotary settings, used with position=rope")
    mlp: str = setting("swiglu", "name", "activation of the MLP; swiglu is gated", ("swiglu", "gelu", "gelu_tanh", "squared_relu"))
    qkv_bias: bool = setting(False, "flag", "bias on the query, key and value projections")
    out_bias: bool = setting(False, "flag", "bias on the attention output projection")
    mlp_bias: bool = setting(False, "flag", "bias on both MLP projections")
    qk_norm: bool = setting(False, "flag", "rmsnorm of each query and key head before rope")
    tied: bool = setting(False, "flag", "the LM head shares the embedding table")
    init_std: float = setting(0.02, "1", "standard deviation of the initial weights")
    depth_scaled_init: bool = setting(True, "flag", "residual output projections start with init_std / sqrt(2 layers)")
    embedding_dropout: float = setting(0.0, "probability", "dropout on the embeddings")
    residual_dropout: float = setting(0.0, "probability", "dropout on each residual branch")
    attention_dropout: float = setting(0.0, "probability", "must stay 0: fused kernels on packed documents can't key it by position")

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate projection (three matrices instead of two)."""
        return self.mlp == "swiglu"


# ----------------------------------------------------------------------------------------------------------------- data
@dataclass(frozen=True)
class SourceConfig:
    """One .bin/.idx pair and its share of the blend."""

    prefix: str = setting(MISSING, "path", "path without .bin/.idx")
    weight: float = setting(1.0, "share", "share of the training TOKENS that come from this source, relative to the others")
    name: str = setting("", "name", "name in logs; empty takes the last part of prefix")


@dataclass(frozen=True)
class TokenizerConfig:
    """Which tokenizer made the data."""

    kind: str = setting("sentencepiece", "name", "tokenizer family", ("sentencepiece", "huggingface", "bytes"))
    path: str = setting("", "path", "model file (.model or tokenizer.json); empty for bytes")


@dataclass(frozen=True)
class PrepareConfig:
    """How a run without data makes its own (quickstart)."""

    kind: str = setting("none", "name", "none: the data must exist; python_library: made from this Python's own files", ("none", "python_library"))
    folder: str = setting("datasets/python_library", "path", "where corpus, tokenizer and dataset are kept; shared by runs")
    corpus_bytes: int = setting(12_000_000, "bytes", "size at which collecting files stops")
    tokenizer_model: str = setting("bpe", "name", "sentencepiece model type", ("bpe", "unigram"))
    tokenizer_lines: int = setting(40_000, "lines", "size of the sample the tokenizer is trained on")
    workers: int = setting(1, "processes", "preprocessing workers")


@dataclass(frozen=True)
class DataConfig:
    """Which documents, in which order, how many per step."""

    train: tuple[SourceConfig, ...] = setting((), "sources", "training sources and their blend")
    validation: tuple[SourceConfig, ...] = setting((), "sources", "separate validation sets; each is reported by name")
    split: tuple[float, ...] = setting((0.98, 0.02, 0.0), "shares", "train, validation, test share of each source, by documents in file order")
    mode: str = setting("documents", "name", "documents: whole documents; stream: Megatron's fixed-length samples", ("documents", "stream"))
    max_length: int = setting(131072, "tokens", "longest document handed to the model (stream: sample length)")
    long_documents: str = setting("split", "name", "documents above max_length: cut into pieces, or dropped and counted", ("split", "drop"))
    tokens_per_step: int = setting(131072, "tokens", "token budget of one optimizer step over all ranks")
    seed: int = setting(1234, "1", "seed of the global order; another seed is another order")
    cache: str = setting("", "path", "folder of the order cache; empty puts it beside each dataset")
    mask_eod_loss: bool = setting(False, "flag", "stream mode: no loss where the input is the end-of-document token")
    tokenizer: TokenizerConfig = setting(TokenizerConfig, "group", "tokenizer of the data")
    prepare: PrepareConfig = setting(PrepareConfig, "group", "building the data when it does not exist")


# ------------------------------------------------------------------------------------------------- parallel and planning
@dataclass(frozen=True)
class ParallelConfig:
    """Fixed part of the layout; context-parallel sizes are the plan's choice."""

    tp: int = setting(1, "ranks", "tensor-parallel size")
    pp: int = setting(1, "stages", "pipeline-parallel size")
    virtual_stages: int = setting(1, "chunks", "model chunks per stage; above 1 the schedule is interleaved")
    stage_layers: tuple[int, ...] = setting((), "layers", "layers of each stage; empty divides them evenly")
    sequence_parallel: bool = setting(True, "flag", "norms and residuals sharded over tp along the tokens")
    max_cp: int = setting(0, "lanes", "largest context-parallel group the plan may use; 0 is all lanes")
    cuda_graphs: int = setting(0, "sizes", "token counts of microbatches whose layers run as CUDA graphs, memory beside the plan's; 0: none")


@dataclass(frozen=True)
class PlanConfig:
    """How the planner works."""

    policy: str = setting("joint", "name", "joint: chosen per microbatch; static: all documents alike, for comparison", ("joint", "static"))
    pack_tokens: int = setting(0, "tokens", "most tokens of one microbatch; 0 lets memory decide")
    recompute: str = setting("auto", "name", "auto: the cheapest level that fits", ("auto", "none", "selective", "mlp", "full"))
    recompute_layers: int = setting(0, "layers", "layers per stage at a named level; 0 is all")
    lane_speed: tuple[float, ...] = setting((), "1", "relative speed of each lane, 1 is the profile's; empty: all alike")
    ahead: int = setting(2, "steps", "plans and batches kept ready before they are needed")
    worker: str = setting("process", "name", "who plans ahead: a process of its own, or a thread of the trainer", ("process", "thread"))
    worker_death: str = setting("stop", "name", "when the planning process dies: stop the run, or plan on in the trainer", ("stop", "replace"))
    refit: bool = setting(False, "flag", "correct the hardware profile by what steps take; plans carry the profile in force")
    refit_lane_speed: bool = setting(False, "flag", "correct lane_speed by what steps take, so that slow lanes get less work")
    compress: bool = setting(False, "flag", "write plans.jsonl.zst instead of plans.jsonl; needs zstandard")


@dataclass(frozen=True)
class PrecisionConfig:
    """Number formats and the backend that runs them."""

    format: str = setting("fp32", "name", "format of the linear layers' operands", ("fp32", "bf16", "fp8_current", "fp8_block"))
    backend: str = setting("auto", "name", "kernels: auto takes Transformer Engine (te) on Hopper where it works", ("auto", "torch", "te"))
    bf16_ends: int = setting(0, "layers", "fp8: so many first and so many last layers of the model stay in bf16")


# ---------------------------------------------------------------------------------------------------------- optimisation
@dataclass(frozen=True)
class OptimConfig:
    """AdamW, its learning-rate schedule and the guard against bad steps."""

    lr: float = setting(3e-4, "1", "peak learning rate")
    min_lr_share: float = setting(0.1, "share", "final learning rate as a share of lr")
    schedule: str = setting("cosine", "name", "shape after the warmup", ("cosine", "linear", "wsd", "constant"))
    warmup_steps: int = setting(0, "steps", "linear warmup by steps; give this or warmup_tokens")
    warmup_tokens: int = setting(0, "tokens", "linear warmup by real tokens; give this or warmup_steps")
    decay_share: float = setting(0.2, "share", "wsd: last share of the run in which the rate falls")
    weight_decay: float = setting(0.1, "1", "decoupled decay, on matrices only")
    beta1: float = setting(0.9, "1", "decay of the first moment")
    beta2: float = setting(0.95, "1", "decay of the second moment")
    eps: float = setting(1e-8, "1", "added to the root of the second moment")
    clip_norm: float = setting(1.0, "1", "largest global gradient norm; 0 does not clip")
    max_skipped: int = setting(10, "steps", "consecutive steps with NaN or Inf after which the run ends")


# ------------------------------------------------------------------------------------------------- run, checkpoint, log
@dataclass(frozen=True)
class RunConfig:
    """What one run is."""

    name: str = setting(MISSING, "name", "names the run folder; the same name resumes")
    folder: str = setting("runs", "path", "parent of the run folders")
    steps: int = setting(1000, "steps", "optimizer steps of the whole run")
    seed: int = setting(1234, "1", "seed of initial weights and dropout")
    validate_every: int = setting(0, "steps", "steps between validations; 0 validates at the end only")
    validate_tokens: int = setting(65536, "tokens", "most tokens of each validation set per validation")
    init_from: str = setting("", "path", "weights to start from: a run, a checkpoint, a Hugging Face folder, an import; empty: random ones")
    sample_prompt: str = setting("", "text", "prompt of the sample printed at the end; empty prints none")
    sample_tokens: int = setting(64, "tokens", "length of the sample")


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save and what to keep."""

    every: int = setting(0, "steps", "steps between saves; 0 saves at the end only")
    keep_last: int = setting(2, "checkpoints", "older ones are removed after a newer one is complete")
    keep_every: int = setting(0, "steps", "checkpoints of steps divisible by it stay for ever; 0: none")
    async_save: bool = setting(True, "flag", "train on while a copy of the state in host memory is written; false waits and needs no copy")
    export_every: int = setting(0, "steps", "checkpoints of steps divisible by it, and the last, also become Hugging Face folders in hf/; 0: none")
    export_format: str = setting("", "name", "format of the exported weights; empty: as they are trained", ("", "fp32", "bf16", "fp16"))
    resume: str = setting("auto", "name", "auto: go on where the run folder stops; refuse: an existing run is an error", ("auto", "refuse"))
    allow_change: tuple[str, ...] = setting((), "names", "settings of an existing run that may differ now, [data.train,optim.lr]; others are refused")


@dataclass(frozen=True)
class LogConfig:
    """What a person sees."""

    every: int = setting(10, "steps", "steps between console lines; metrics.jsonl has every step")
    console: str = setting("auto", "name", "rich on a terminal, plain lines otherwise", ("auto", "rich", "plain"))
    tensorboard: bool = setting(False, "flag", "metrics also for TensorBoard, in the run folder's tensorboard/")
    wandb: bool = setting(False, "flag", "metrics also for Weights & Biases; a run that goes on stays the same run there")
    wandb_mode: str = setting("auto", "name", "auto: online with a key, else offline files in the run folder", ("auto", "online", "offline"))
    wandb_project: str = setting("megadcp", "name", "project there")
    wandb_entity: str = setting("", "name", "team or user there; empty takes the key's default")
    wandb_tags: tuple[str, ...] = setting((), "names", "tags of the run there")
    tracker_timeout_s: float = setting(60.0, "s", "a tracker that has not finished so long after the run is stopped; metrics.jsonl has all rows")
    timeline_every: int = setting(100, "steps", "steps whose begin and end of every action is kept for tools/timeline.py, and the last; 0: none")
    profile_steps: tuple[int, ...] = setting((), "steps", "[first, count]: these steps are traced by torch.profiler into profile/; empty: none")
    profile_ranks: tuple[int, ...] = setting((0,), "ranks", "ranks whose trace is written")


@dataclass(frozen=True)
class HealthConfig:
    """What is watched while a run goes on, and what is done about it."""

    nan: str = setting("skip", "name", "a step with NaN or Inf: skip it (up to optim.max_skipped in a row), stop, or roll back", BAD_STEP)
    spike: str = setting("none", "name", "a step with a loss spike: nothing, skip it, stop, or roll back", ("none", *BAD_STEP))
    spike_factor: float = setting(2.0, "1", "a loss above this times the median of the last spike_window steps is a spike")
    spike_window: int = setting(50, "steps", "steps whose losses that median is taken of; nothing is a spike before they are there")
    rollback_steps: int = setting(1, "steps", "least steps to roll back, to the newest checkpoint that is so old")
    rollback_documents: str = setting("skip", "name", "documents of the steps rolled back: left out, or trained on again", ("skip", "repeat"))
    max_rollbacks: int = setting(3, "times", "rollbacks of one run after which it ends")
    step_timeout_s: float = setting(
        0.0, "s", "a step without end for so long ends the run, with all stacks; 0: 10 x the longest so far, at least 120 s"
    )
    other_timeout_s: float = setting(3600.0, "s", "the same for starting, the first step, validating, saving and finishing")
    oom_restarts: int = setting(5, "times", "restarts after a rank ran out of memory, each with less memory for the plans; then the run ends")
    oom_factor: float = setting(0.9, "1", "what hardware.usable_fraction is multiplied by at each such restart")
    straggler_factor: float = setting(1.2, "1", "a lane slower than the fastest by this factor is told of; 0: never")


# ---------------------------------------------------------------------------------------------------- cluster, hardware
@dataclass(frozen=True)
class SlurmConfig:
    """The job that tools/submit.py queues."""

    partition: str = setting("", "name", "partition; empty takes the cluster's default")
    account: str = setting("", "name", "account that is charged; empty takes your default")
    time: str = setting("1-00:00:00", "[days-]hours:minutes:seconds", "time limit of one job; a run that is longer goes on in the next")
    stop_before: int = setting(600, "s", "how long before the limit the ranks are told to save and stop: at least one step and one save")
    requeue: bool = setting(True, "flag", "a job that was stopped before its run was finished is queued again, and goes on")
    exclusive: bool = setting(True, "flag", "whole nodes: all their cores and all their memory")
    gres: str = setting("", "name", "devices of each node; empty asks for gpu:PROCESSES with cluster.device=cuda, for none otherwise")
    cores: int = setting(0, "cores", "CPU cores of each node's task; 0 takes all that the job has")
    options: tuple[str, ...] = setting((), "texts", "more lines for #SBATCH: ['--qos=high', '--exclude=node7']")
    head: str = setting("", "address", "where the ranks find the first node; empty takes its name")
    setup: tuple[str, ...] = setting((), "texts", "shell lines before the ranks start: ['module load cuda']")
    python: str = setting("", "path", "interpreter on the nodes; empty takes the one that submits, in a container python3")
    container: str = setting("", "image", "image for pyxis (srun --container-image): a registry's, or a .sqsh file; empty runs without")
    mounts: tuple[str, ...] = setting((), "paths", "more folders in it, as HOST:CONTAINER; this repository and the current folder are there")


@dataclass(frozen=True)
class ClusterConfig:
    """Where it runs."""

    name: str = setting("local", "name", "name in logs")
    nodes: int = setting(1, "nodes", "machines")
    processes: int = setting(1, "ranks", "ranks per node")
    device: str = setting("auto", "name", "auto takes a GPU when there is one", ("auto", "cpu", "cuda"))
    threads: int = setting(0, "threads", "CPU threads per rank; 0 leaves torch's default")
    environment: dict[str, str] = setting({}, "name: value", "environment variables of the ranks; one that is already set in the shell stays")
    slurm: SlurmConfig = setting(SlurmConfig, "group", "the job that tools/submit.py queues")

    @property
    def world(self) -> int:
        """Ranks of the whole job."""
        return self.nodes * self.processes


@dataclass(frozen=True)
class GemmFlops:
    """Achieved rate of large matrix products, by operand format."""

    fp32: float = setting(MISSING, "FLOP/s", "rate in fp32")
    bf16: float = setting(MISSING, "FLOP/s", "rate in bf16")
    fp8: float = setting(MISSING, "FLOP/s", "rate in fp8")


@dataclass(frozen=True)
class HardwareConfig:
    """Coefficients of the cost model (docs/plan.md section 3) and the peak that MFU is stated against."""

    name: str = setting(MISSING, "name", "name in logs")
    gemm_flops: GemmFlops = setting(GemmFlops, "group", "achieved matrix-product rate")
    gemm_half_tokens: float = setting(MISSING, "tokens", "tokens at which matrix products reach half of it")
    attention_flops: float = setting(MISSING, "FLOP/s", "achieved causal attention rate")
    attention_half_length: float = setting(MISSING, "tokens", "document length at which attention reaches half of it")
    node_bytes: float = setting(MISSING, "bytes/s", "bandwidth inside a node")
    net_bytes: float = setting(MISSING, "bytes/s", "bandwidth between nodes, per device")
    node_latency: float = setting(MISSING, "s", "latency of one collective")
    ring_step_seconds: float = setting(MISSING, "s", "launch cost of one ring step")
    layer_overhead_seconds: float = setting(MISSING, "s", "fixed cost of a layer, forward and backward")
    tp_exposed: float = setting(MISSING, "share", "part of tensor-parallel communication that is not hidden")
    memory_bytes: float = setting(MISSING, "bytes", "memory of one device")
    usable_fraction: float = setting(MISSING, "share", "part of it that the plan may fill")
    loss_chunk: int = setting(MISSING, "tokens", "tokens whose logits exist at one time")
    gpus_per_node: int = setting(MISSING, "devices", "devices per node")
    reduce_bytes: float = setting(MISSING, "bytes/s", "bandwidth of the gradient reduction")
    reduce_overlap: float = setting(MISSING, "share", "part of the gradient reduction that is hidden")
    memory_bandwidth: float = setting(MISSING, "bytes/s", "device memory bandwidth (optimizer step)")
    peak_flops: Optional[float] = setting(None, "FLOP/s", "dense bf16 peak that MFU is stated against; null when unknown")


@dataclass(frozen=True)
class Config:
    """A whole run. Frozen to run.yaml in the run folder; ranks start from that file."""

    run: RunConfig = setting(RunConfig, "group", "what one run is")
    model: ModelConfig = setting(ModelConfig, "group", "the GPT")
    data: DataConfig = setting(DataConfig, "group", "documents and their order")
    parallel: ParallelConfig = setting(ParallelConfig, "group", "layout")
    plan: PlanConfig = setting(PlanConfig, "group", "planner")
    precision: PrecisionConfig = setting(PrecisionConfig, "group", "number formats")
    optim: OptimConfig = setting(OptimConfig, "group", "optimizer and schedule")
    checkpoint: CheckpointConfig = setting(CheckpointConfig, "group", "saving")
    log: LogConfig = setting(LogConfig, "group", "logging")
    health: HealthConfig = setting(HealthConfig, "group", "what is watched")
    cluster: ClusterConfig = setting(ClusterConfig, "group", "where it runs")
    hardware: HardwareConfig = setting(HardwareConfig, "group", "cost-model coefficients")


def settings(node: type = Config, prefix: str = "") -> list[tuple[str, dataclasses.Field[Any]]]:
    """(dotted name, field) of every leaf setting below `node`, in order."""
    found: list[tuple[str, dataclasses.Field[Any]]] = []
    for item in dataclasses.fields(node):
        made = item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default
        if dataclasses.is_dataclass(made) and not isinstance(made, type):
            found += settings(type(made), f"{prefix}{item.name}.")
        else:
            found.append((prefix + item.name, item))
    return found
