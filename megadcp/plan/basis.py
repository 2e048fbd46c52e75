"""What every plan of one run has in common: layout, schedule, model, profile. Made from the config, or read off a plan.

Symbols of docs/plan.md: T = tp, p = pp, v = virtual stages, R = lanes.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from megadcp.config.check import UserError
from megadcp.config.schema import MISSING, ClusterConfig, Config, HardwareConfig, ModelConfig, ParallelConfig
from megadcp.plan.step_plan import PRECISIONS, Layout, ModelShape, Profile, StepPlan, round_profile

UNITS = {"fp32": 1, "bf16": 1, "fp8_current": 16, "fp8_block": 128}  # local tokens of a microbatch are a multiple of this
MOST_LANES = 2**20  # far above any cluster: a plan read from a file must not make the reader count for hours
MOST_LAYERS = 2**16
# Profile fields that may be 0; the others are rates and sizes that something is divided by.
MAY_BE_ZERO = (
    "gemm_half_tokens",
    "attention_half_length",
    "node_latency",
    "ring_step_seconds",
    "layer_overhead_seconds",
    "tp_exposed",
    "reduce_overlap",
)


@dataclass(frozen=True)
class Basis:
    """The fields of a StepPlan that stay the same from step to step; costs and bytes follow from them."""

    layout: Layout
    schedule: str
    stage_layers: tuple[int, ...]
    model: ModelShape
    precision: str
    unit: int
    profile: Profile
    lane_speed: tuple[float, ...] = ()

    @staticmethod
    def of(plan: StepPlan) -> Basis:
        """The basis that a plan carries."""
        return Basis(plan.layout, plan.schedule, plan.stage_layers, plan.model, plan.precision, plan.unit, plan.profile, plan.lane_speed)

    @property
    def align(self) -> int:
        """Local tokens of a microbatch are a multiple of this (invariant 4): unit, times tp with sequence parallelism."""
        return self.unit * (self.layout.tp if self.layout.sequence_parallel else 1)

    @property
    def recomputable(self) -> int:
        """Most layers per stage that one recompute value can name: those of the smallest stage."""
        return min(self.stage_layers)

    def speed(self, lane: int, cp: int) -> float:
        """Speed of the slowest of lanes lane .. lane + cp - 1; 1.0 is the profile's."""
        return min(self.lane_speed[lane : lane + cp]) if self.lane_speed else 1.0

    def problem(self) -> str:
        """Why this basis makes no sense, in one line; empty when it does."""
        return self._layout_problem() or self._model_problem() or self._profile_problem()

    def _layout_problem(self) -> str:
        layout = self.layout
        for name in ("lanes", "lanes_per_node", "tp", "pp", "virtual_stages"):
            if getattr(layout, name) < 1:
                return f"layout.{name}={getattr(layout, name)} must be at least 1"
        if layout.lanes > MOST_LANES:
            return f"layout.lanes={layout.lanes} is more than the {MOST_LANES} that this program plans for"
        if layout.pp == 1 and layout.virtual_stages > 1:
            return f"layout.virtual_stages={layout.virtual_stages} needs a pipeline, but layout.pp=1; legal here: 1"
        if self.schedule != schedule_of(layout.pp, layout.virtual_stages):
            expected = schedule_of(layout.pp, layout.virtual_stages)
            return f"schedule={self.schedule!r} with pp={layout.pp} and virtual_stages={layout.virtual_stages}; legal here: {expected!r}"
        if len(self.stage_layers) != layout.pp or sum(self.stage_layers) != self.model.layers:
            return f"stage_layers={list(self.stage_layers)} must be {layout.pp} numbers with sum {self.model.layers} (layers of the model)"
        if min(self.stage_layers) < layout.virtual_stages:
            return f"stage_layers={list(self.stage_layers)}: every stage needs at least one layer per chunk (virtual_stages={layout.virtual_stages})"
        if self.lane_speed and (len(self.lane_speed) != layout.lanes or not all(0 < speed < math.inf for speed in self.lane_speed)):
            return f"lane_speed must be empty or {layout.lanes} positive numbers, one a lane"
        return ""

    def _model_problem(self) -> str:
        model, tp = self.model, self.layout.tp
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab"):
            if getattr(model, name) < 1:
                return f"model.{name}={getattr(model, name)} must be at least 1"
        if model.layers > MOST_LAYERS:
            return f"model.layers={model.layers} is more than the {MOST_LAYERS} that this program plans for"
        if model.heads % model.kv_heads:
            return f"model.kv_heads={model.kv_heads} does not divide model.heads={model.heads}"
        if model.heads % tp:
            return f"tp={tp} does not divide model.heads={model.heads}; legal here: {_divisors(model.heads)}"
        if model.kv_heads % tp and tp % model.kv_heads:
            return f"tp={tp} and model.kv_heads={model.kv_heads}: one must divide the other"
        if self.precision not in PRECISIONS:
            return f"precision={self.precision!r} is not known; legal here: {', '.join(PRECISIONS)}"
        return ""

    def _profile_problem(self) -> str:
        for item in dataclasses.fields(Profile):
            value = getattr(self.profile, item.name)
            least_is_legal = item.name in MAY_BE_ZERO
            if not (math.isfinite(value) and (value > 0 or (least_is_legal and value == 0))):
                return f"profile.{item.name}={value} must be {'at least' if least_is_legal else 'above'} 0"
        if self.profile.usable_fraction > 1 or self.profile.reduce_overlap > 1:
            return "profile.usable_fraction and profile.reduce_overlap are shares: at most 1"
        return ""


def _divisors(number: int) -> str:
    return ", ".join(str(k) for k in range(1, number + 1) if number % k == 0)


def unit_of(precision: str) -> int:
    """Alignment unit of a precision in local tokens: 1, 16 (fp8_current) or 128 (fp8_block)."""
    if precision not in UNITS:
        raise UserError(f"precision.format={precision} is not known; legal here: {', '.join(UNITS)}")
    return UNITS[precision]


def schedule_of(pp: int, virtual_stages: int) -> str:
    """The schedule that belongs to a pipeline depth."""
    return "none" if pp == 1 else "1f1b" if virtual_stages == 1 else "interleaved"


def shape_from(model: ModelConfig) -> ModelShape:
    """What the cost model needs of a model's settings."""
    return ModelShape(model.layers, model.hidden, model.heads, model.kv_heads, model.head_dim, model.ffn, model.vocab, model.gated, model.tied)


def profile_from(hardware: HardwareConfig, precision: str) -> Profile:
    """The coefficients in force for one precision: of the three matrix-product rates, the one for its operands.

    fp8_current and fp8_block take gemm_flops.fp8. Floats are rounded to 9 significant digits, as the plan's hash has them.
    """
    unit_of(precision)  # refuses a precision that isn't known
    rate = {"fp32": "fp32", "bf16": "bf16"}.get(precision, "fp8")
    values: dict[str, float] = {}
    for item in dataclasses.fields(Profile):
        gemm = item.name == "gemm_flops"
        value = getattr(hardware.gemm_flops, rate) if gemm else getattr(hardware, item.name)
        if value == MISSING:
            raise UserError(f"hardware.{item.name}{'.' + rate if gemm else ''} is not set; choose a hardware profile (hardware=cpu, hardware=h200)")
        values[item.name] = value
    return round_profile(Profile(**values))  # type: ignore[arg-type]


def layout_from(parallel: ParallelConfig, cluster: ClusterConfig, gpus_per_node: int) -> Layout:
    """Lanes of a job: ranks / (tp * pp); a node holds max(1, gpus_per_node div tp) of them."""
    ranks = parallel.tp * parallel.pp
    if cluster.world % ranks or cluster.world < ranks:
        raise UserError(
            f"parallel.tp={parallel.tp} * parallel.pp={parallel.pp} = {ranks} does not divide the job's {cluster.world} ranks "
            f"(cluster.nodes={cluster.nodes} * cluster.processes={cluster.processes}); legal here: a product among {_divisors(cluster.world)}"
        )
    lanes_per_node = max(1, gpus_per_node // parallel.tp)
    return Layout(cluster.world // ranks, lanes_per_node, parallel.tp, parallel.pp, parallel.virtual_stages, parallel.sequence_parallel)


def stage_layers_from(parallel: ParallelConfig, layers: int) -> tuple[int, ...]:
    """Layers of each stage: as set, else even; what is left over goes one each to the first stages (the last has the LM head)."""
    if parallel.stage_layers:
        return tuple(parallel.stage_layers)
    even, left = divmod(layers, parallel.pp)
    return tuple(even + (stage < left) for stage in range(parallel.pp))


def basis_from(config: Config) -> Basis:
    """The basis of a run. Raises UserError with one clear line when the settings contradict each other."""
    precision, parallel = config.precision.format, config.parallel
    profile = profile_from(config.hardware, precision)
    basis = Basis(
        layout=layout_from(parallel, config.cluster, profile.gpus_per_node),
        schedule=schedule_of(parallel.pp, parallel.virtual_stages),
        stage_layers=stage_layers_from(parallel, config.model.layers),
        model=shape_from(config.model),
        precision=precision,
        unit=unit_of(precision),
        profile=profile,
        lane_speed=tuple(float(f"{speed:.9g}") for speed in config.plan.lane_speed),
    )
    if basis.problem():
        raise UserError(basis.problem())
    return basis
