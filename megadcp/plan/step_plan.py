"""StepPlan: the immutable, serialisable description of ONE optimizer step (docs/plan.md section 1), its JSON and its hash."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_FLOOR, Context
from functools import cache
from typing import Any

from megadcp.config.check import UserError

LEVELS = ("none", "selective", "mlp", "full")
CP_COMMS = ("none", "ring", "all_gather", "ulysses", "2d")
PRECISIONS = ("fp32", "bf16", "fp8_current", "fp8_block")
SCHEDULES = ("none", "1f1b", "interleaved")
VERSION = 1
MOST_INTEGER = 2**63 - 1  # of what a plan in a file may hold


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
    """Hardware coefficients in force for this plan's precision (docs/plan.md section 3).

    gemm_flops is one number: the rate for the operands of the plan's precision.
    """

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
    """What the planner expects of the step. Seconds are makespans: gradient reduction and optimizer come on top (simulate.step_seconds).

    peak_bytes: of one device of each stage, weights and optimizer included. static_seconds: static-best's makespan, 0 when no static layout
    fits the memory.
    """

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
    version: int = VERSION


class PlanFormatError(UserError):
    """A document that is no plan: the message names the field."""


# ------------------------------------------------------------------------------------------------------------- rounding
def round_seconds(seconds: float) -> float:
    """6 significant digits, as plans store seconds."""
    return float(f"{seconds:.6g}")


def round_bytes(count: float) -> int:
    """6 significant digits, as plans store bytes."""
    return int(float(f"{count:.6g}"))


def round_down(seconds: float) -> float:
    """6 significant digits, never above the argument: what is rounded like this stays a lower bound."""
    nearest = round_seconds(seconds)
    return nearest if nearest <= seconds else float(Context(prec=6, rounding=ROUND_FLOOR).create_decimal_from_float(seconds))


def _round_coefficient(value: Any) -> Any:
    return float(f"{value:.9g}") if isinstance(value, float) else value


def round_profile(profile: Profile) -> Profile:
    """Floats as floats with 9 significant digits, integers as integers: what a plan carries and what its hash sees."""
    kinds = _kinds(Profile)
    return Profile(**{name: _round_coefficient(kinds[name](getattr(profile, name))) for name in kinds})


# ----------------------------------------------------------------------------------------------------------------- JSON
def to_json(plan: StepPlan) -> dict[str, Any]:
    """The plan as a JSON object, hash included; `from_json` of it gives the plan back."""
    document = _to_fields(plan)
    document["hash"] = document_hash(document)
    return document


def from_json(document: Mapping[str, Any] | str | bytes, check_hash: bool = True) -> StepPlan:
    """The plan in a JSON object or its text. Raises PlanFormatError naming the field that is missing, unknown or of the wrong type.

    check_hash=False reads a plan that was edited by hand. The values themselves are proved by verify.verify.
    """
    if isinstance(document, (str, bytes)):
        try:
            document = json.loads(document)
        except (ValueError, RecursionError) as error:
            raise PlanFormatError(f"not a plan: invalid JSON ({error})") from None
    if not isinstance(document, Mapping):
        raise PlanFormatError(f"plan: expected an object, found {_found(document)}")
    version = document.get("version")
    if type(version) is not int or version != VERSION:
        raise PlanFormatError(f"version: this program reads plans of version {VERSION}, found {_found(version)}")
    fields = {key: value for key, value in document.items() if key != "hash"}
    plan: StepPlan
    try:
        plan = _take(StepPlan, fields)
    except _Unusual:
        plan = _read(StepPlan, fields, "")  # says what is wrong, and where
    if "hash" not in document:
        raise PlanFormatError("hash: missing")
    # A document may write a float field as 512, which hashes differently from 512.0: both are right.
    if check_hash and document["hash"] != document_hash(document) and document["hash"] != plan_hash(plan):
        raise PlanFormatError(f"hash: the plan was changed after it was made (recorded {document['hash']}, contents {document_hash(document)})")
    return plan


def plan_hash(plan: StepPlan) -> str:
    """sha256 hex over everything but predictions: equal on all ranks or the step must not run."""
    return sha256_of({**_run_fields(plan), "microbatches": [_arranged(one) for one in plan.microbatches]})


def document_hash(document: Mapping[str, Any]) -> str:
    """The hash of a plan that is a JSON object (without references), by docs/plan.md section 1."""
    kept = {key: value for key, value in document.items() if key not in ("hash", "predicted")}
    kept["profile"] = {key: _round_coefficient(value) for key, value in document["profile"].items()}
    kept["lane_speed"] = [_round_coefficient(value) for value in document["lane_speed"]]
    kept["microbatches"] = [{key: value for key, value in one.items() if key not in ("seconds", "bytes")} for one in document["microbatches"]]
    return sha256_of(kept)


def sha256_of(value: Any) -> str:
    """sha256 hex of the canonical JSON text of a value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")).hexdigest()


def _to_fields(plan: StepPlan) -> dict[str, Any]:
    fields = _run_fields(plan)
    fields["microbatches"] = [{**_arranged(one), "seconds": round_seconds(one.seconds), "bytes": round_bytes(one.bytes)} for one in plan.microbatches]
    fields["predicted"] = {
        "seconds": round_seconds(plan.predicted.seconds),
        "peak_bytes": [round_bytes(count) for count in plan.predicted.peak_bytes],
        "lower_bound_seconds": round_down(plan.predicted.lower_bound_seconds),
        "static_seconds": round_seconds(plan.predicted.static_seconds),
        "policy": plan.predicted.policy,
    }
    return fields


def _run_fields(plan: StepPlan) -> dict[str, Any]:
    """All fields but microbatches and predictions."""
    return {
        "version": plan.version,
        "step": plan.step,
        "layout": dict(vars(plan.layout)),
        "schedule": plan.schedule,
        "stage_layers": list(plan.stage_layers),
        "model": dict(vars(plan.model)),
        "precision": plan.precision,
        "unit": plan.unit,
        "profile": dict(vars(round_profile(plan.profile))),
        "lane_speed": [_round_coefficient(float(speed)) for speed in plan.lane_speed],
        "lengths": list(plan.lengths),
    }


def _arranged(one: Microbatch) -> dict[str, Any]:
    """All fields of a microbatch but its predictions."""
    return {
        "slot": one.slot,
        "lane": one.lane,
        "cp": one.cp,
        "documents": list(one.documents),
        "padded": list(one.padded),
        "recompute": {"level": one.recompute.level, "layers": one.recompute.layers},
        "cp_comm": one.cp_comm,
    }


CHOICES = {"schedule": SCHEDULES, "precision": PRECISIONS, "level": LEVELS, "cp_comm": CP_COMMS}


@cache
def _kinds(node: type) -> dict[str, Any]:
    """Field name -> type of one of the dataclasses above."""
    return typing.get_type_hints(node)


class _Unusual(Exception):
    """Something that isn't plainly as expected."""


def _take(kind: Any, value: Any, legal: Sequence[str] = ()) -> Any:
    """What `_read` gives, for a value that is plainly as expected: several times as fast, and _Unusual for all others."""
    if type(value) is kind:  # int, str, bool, float
        if kind is int and not -MOST_INTEGER <= value <= MOST_INTEGER:
            raise _Unusual
        if (kind is float and not -sys.float_info.max <= value <= sys.float_info.max) or (legal and value not in legal):
            raise _Unusual
        return value
    if type(value) is list and typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        if item is not int:
            return tuple([_take(item, one) for one in value])
        if value and (set(map(type, value)) != {int} or max(value) > MOST_INTEGER or min(value) < -MOST_INTEGER):
            raise _Unusual
        return tuple(value)
    if type(value) is not dict or not dataclasses.is_dataclass(kind):
        raise _Unusual
    kinds = _kinds(typing.cast(type, kind))
    if value.keys() != kinds.keys():
        raise _Unusual
    return typing.cast(Any, kind)(**{name: _take(item, value[name], CHOICES.get(name, ())) for name, item in kinds.items()})


def _read(kind: Any, value: Any, path: str) -> Any:
    """`value` as `kind`, or PlanFormatError with the path of what is wrong."""
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise PlanFormatError(f"{path or 'plan'}: expected an object, found {_found(value)}")
        kinds, prefix = _kinds(typing.cast(type, kind)), path + "." if path else ""
        for name in sorted(set(kinds) - set(value)):
            raise PlanFormatError(f"{prefix}{name}: missing")
        for name in sorted(set(value) - set(kinds), key=str):
            raise PlanFormatError(f"{prefix}{name}: unknown field; known here: {', '.join(kinds)}")
        return typing.cast(Any, kind)(**{name: _read(kinds[name], value[name], prefix + name) for name in kinds})
    if typing.get_origin(kind) is tuple:
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
            raise PlanFormatError(f"{path}: expected a list, found {_found(value)}")
        item = typing.get_args(kind)[0]
        return tuple([_read(item, one, f"{path}[{index}]") for index, one in enumerate(value)])
    wrong = type(value) is not kind and not (kind is float and type(value) is int)
    if wrong or (kind is float and not abs(value) <= sys.float_info.max):
        names = {int: "an integer", float: "a finite number", bool: "true or false", str: "a string"}
        raise PlanFormatError(f"{path}: expected {names[kind]}, found {_found(value)}")
    if kind is int and not -MOST_INTEGER <= value <= MOST_INTEGER:
        raise PlanFormatError(f"{path}: expected an integer of at most 64 bits, found {_found(value)}")
    choices = CHOICES.get(path.rpartition(".")[2], ())
    if choices and value not in choices:
        raise PlanFormatError(f"{path}: {value!r} is not known; legal here: {', '.join(choices)}")
    return kind(value)


def _found(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
