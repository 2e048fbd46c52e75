"""The rotary settings of a config.json, in the old and the new spelling. No torch."""

from __future__ import annotations

from typing import Any

from megadcp.config.schema import RopeConfig
from megadcp.interop.hf_fields import Fields

OLD_THETA = 10000.0  # of Llama files from before rope_theta was written
BOTH = "rope_parameters is the spelling of transformers 5, rope_theta and rope_scaling the older one"


def read_rope(fields: Fields, context: int, old_default: bool) -> RopeConfig:
    """Theta and scaling. context: max_position_embeddings. old_default: no theta at all means the one of the first Llama files."""
    new, old, theta = fields.get("rope_parameters", None), fields.get("rope_scaling", None), fields.number("rope_theta", None, 1.0)
    found = []
    if new is not None:
        found.append(_one(_table(fields, "rope_parameters", new), context, theta))
    if old is not None or (new is None and (theta is not None or old_default)):
        # A file may name theta only inside rope_parameters, and the rest twice.
        inherited = theta if theta is not None else (found[0].theta if found else OLD_THETA if old_default else None)
        found.append(_one(_table(fields, "rope_scaling", old or {}), context, inherited))
    elif new is not None and theta is not None and theta != found[0].theta:
        raise fields.fail(f"rope_theta={theta:g} and rope_parameters' {found[0].theta:g} contradict each other; {BOTH}")
    if not found:
        raise fields.fail("neither rope_parameters nor rope_theta is there; the rotary base has no default that could be relied on")
    if len(found) == 2 and found[0] != found[1]:
        raise fields.fail(f"rope_parameters and rope_scaling contradict each other; {BOTH}")
    return found[0]


def _table(fields: Fields, name: str, values: Any) -> Fields:
    if not isinstance(values, dict):
        raise fields.fail(f"{name}={values!r} is no table of settings")
    return Fields(values, f"{fields.where}: {name}")


def _one(fields: Fields, context: int, theta: float | None) -> RopeConfig:
    """One table; `theta` where it does not say it."""
    kind = fields.get("rope_type", fields.get("type", "default"))
    fields.only("type", kind, "rope_type says something else")
    fields.only("partial_rotary_factor", 1.0, "all features of a head turn")
    base = fields.number("rope_theta", theta, 1.0)
    if base is None:
        raise fields.fail("rope_theta is missing; it has no default that could be relied on")
    if kind == "default":
        rope = RopeConfig(theta=base)
    elif kind == "linear":
        rope = RopeConfig(theta=base, scaling="linear", factor=fields.number("factor", least=1.0))
    elif kind == "llama3":
        rope = RopeConfig(
            theta=base, scaling="llama3", factor=fields.number("factor", least=1.0), low_freq_factor=fields.number("low_freq_factor"),
            high_freq_factor=fields.number("high_freq_factor"), original_max_position=fields.whole("original_max_position_embeddings"),
        )  # fmt: skip
        if rope.low_freq_factor >= rope.high_freq_factor:
            raise fields.fail(f"low_freq_factor={rope.low_freq_factor:g} must be below high_freq_factor={rope.high_freq_factor:g}")
    elif kind == "yarn":
        fields.only("truncate", True, "the ramp begins and ends at whole dimensions")
        rope = RopeConfig(
            theta=base, scaling="yarn", factor=fields.number("factor", least=1.0), beta_fast=fields.number("beta_fast", 32.0),
            beta_slow=fields.number("beta_slow", 1.0), attention_factor=fields.number("attention_factor", 0.0),
            original_max_position=fields.whole("original_max_position_embeddings", context),
        )  # fmt: skip
    else:
        raise fields.fail(f"rope_type={kind!r} is not supported; legal here: default, linear, llama3, yarn")
    fields.done()
    return rope


def rope_fields(rope: RopeConfig) -> dict[str, Any]:
    """rope_parameters, and the same in the older spelling."""
    scaling: dict[str, Any] = {}
    if rope.scaling != "none":
        scaling = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = rope.original_max_position
    if rope.scaling == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.scaling == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        if rope.attention_factor:
            scaling["attention_factor"] = rope.attention_factor
    return {
        "rope_theta": rope.theta,
        "rope_scaling": scaling or None,
        "rope_parameters": {"rope_theta": rope.theta, "rope_type": "default", **scaling},
    }
