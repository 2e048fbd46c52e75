"""StepPlan: the immutable, serialisable description of ONE optimizer step (docs/plan.md section 1)."""

from __future__ import annotations

from dataclasses import dataclass, field

LEVELS = ("none", "selective", "mlp", "full")
CP_COMMS = ("none", "ring", "all_gather", "ulysses", "2d")
PRECISIONS = ("fp32", "bf16", "fp8_current", "fp8_block")


@dataclass(frozen=True)
class Layout:
    """The fixed part of the mesh: `lanes` slots of the data x context dimension, each of tp * pp ranks."""

    lanes: int
    lanes_per_node: int
    tp: int = 1
    pp: int = 1
    virtual_stages: int = 1
    sequence_parallel: bool = True


@dataclass(frozen=True)
class ModelShape:
    """What the cost model needs to know of a model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    gated: bool
    tied: bool


@dataclass(frozen=True)
class Profile:
    """Hardware coefficients in force for this plan's precision (docs/plan.md section 3)."""

    gemm_flops: float
    gemm_half_tokens: float
    attention_flops: float
    attention_half_length: float
    node_bytes: float
    net_bytes: float
    node_latency: float
    ring_step_seconds: float
    layer_overhead_seconds: float
    tp_exposed: float
    memory_bytes: float
    usable_fraction: float
    loss_chunk: int
    gpus_per_node: int
    reduce_bytes: float
    reduce_overlap: float
    memory_bandwidth: float


@dataclass(frozen=True)
class Recompute:
    """Level and number of layers per stage; the FIRST `layers` layers of every stage are recomputed."""

    level: str = "none"
    layers: int = 0


@dataclass(frozen=True)
class Microbatch:
    """A pack of whole documents run by one cp group (lanes lane .. lane + cp - 1) in one forward/backward."""

    slot: int
    lane: int
    cp: int
    documents: tuple[int, ...]
    padded: tuple[int, ...]
    recompute: Recompute = Recompute()
    cp_comm: str = "none"
    seconds: float = 0.0
    bytes: int = 0

    @property
    def tokens(self) -> int:
        """Padded tokens of the whole group."""
        return sum(self.padded)


@dataclass(frozen=True)
class Predicted:
    """What the planner expects of the step."""

    seconds: float = 0.0
    peak_bytes: tuple[int, ...] = ()
    lower_bound_seconds: float = 0.0
    static_seconds: float = 0.0
    policy: str = ""


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step. `lengths[i]` are the real tokens of the i-th document in the sampler's order."""

    step: int
    layout: Layout
    schedule: str
    stage_layers: tuple[int, ...]
    model: ModelShape
    precision: str
    unit: int
    profile: Profile
    lengths: tuple[int, ...]
    microbatches: tuple[Microbatch, ...]
    lane_speed: tuple[float, ...] = ()
    predicted: Predicted = field(default_factory=Predicted)
    version: int = 1
