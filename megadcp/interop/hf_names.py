"""Which of our parameters is which tensor of a Hugging Face model, and in what shape.

Ours keep queries, keys and values in one matrix, one kind after the other, and gate and up in another; llama and its kin have a matrix for
each. gpt2 has them as we do, but stores [in, out]. Nothing changes places inside a head: both sides turn rotary features in halves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megadcp.config.schema import ModelConfig
from megadcp.interop.tensors import LazyTensors


@dataclass(frozen=True)
class Entry:
    """One parameter of ours: its shape, and the tensors (name, rows) that stand in it one after the other. turned: stored [in, out] there."""

    ours: str
    shape: tuple[int, ...]
    theirs: tuple[tuple[str, int], ...]
    turned: bool = False

    def their_shape(self, rows: int) -> tuple[int, ...]:
        """Of one of their tensors that makes `rows` of our rows."""
        shape = (rows, *self.shape[1:])
        return shape[::-1] if self.turned else shape


def entries(model: ModelConfig, family: str) -> list[Entry]:
    """All parameters, in the order of the model."""
    return _gpt2(model) if family == "gpt2" else _llama(model)


def _llama(model: ModelConfig) -> list[Entry]:
    h, f = model.hidden, model.ffn
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    found = [_one("embedding.weight", (model.vocab, h), "model.embed_tokens.weight")]
    for index in range(model.layers):
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        kinds = {
            "attention.qkv": (h, model.qkv_bias, [(f"self_attn.{x}_proj", rows) for x, rows in zip("qkv", (queries, keys, keys), strict=True)]),
            "attention.out": (queries, model.out_bias, [("self_attn.o_proj", h)]),
            "mlp.up": (h, model.mlp_bias, [("mlp.gate_proj", f), ("mlp.up_proj", f)]),
            "mlp.down": (f, model.mlp_bias, [("mlp.down_proj", h)]),
        }
        found += [
            _one(f"{ours}.attention_norm.weight", (h,), f"{theirs}.input_layernorm.weight"),
            _one(f"{ours}.mlp_norm.weight", (h,), f"{theirs}.post_attention_layernorm.weight"),
        ]
        if model.qk_norm:
            found += [_one(f"{ours}.attention.{x}_norm.weight", (model.head_dim,), f"{theirs}.self_attn.{x}_norm.weight") for x in "qk"]
        for name, (features, biased, parts) in kinds.items():
            rows = sum(count for _, count in parts)
            for kind, shape in (("weight", (rows, features)), *((("bias", (rows,)),) if biased else ())):
                found.append(Entry(f"{ours}.{name}.{kind}", shape, tuple((f"{theirs}.{part}.{kind}", count) for part, count in parts)))
    found.append(_one("norm.weight", (h,), "model.norm.weight"))
    return found if model.tied else [*found, _one("head.weight", (model.vocab, h), "lm_head.weight")]


def _gpt2(model: ModelConfig) -> list[Entry]:
    h, f = model.hidden, model.ffn
    found = [
        _one("embedding.weight", (model.vocab, h), "transformer.wte.weight"),
        _one("positions.weight", (model.max_position, h), "transformer.wpe.weight"),
    ]
    for index in range(model.layers):
        ours, theirs = f"layers.{index}", f"transformer.h.{index}"
        for name, other in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2")):
            found += [_one(f"{ours}.{name}.{kind}", (h,), f"{theirs}.{other}.{kind}") for kind in ("weight", "bias")]
        linears = {"attention.qkv": ("attn.c_attn", 3 * h, h), "attention.out": ("attn.c_proj", h, h)}
        linears |= {"mlp.up": ("mlp.c_fc", f, h), "mlp.down": ("mlp.c_proj", h, f)}
        for name, (other, rows, features) in linears.items():
            found.append(Entry(f"{ours}.{name}.weight", (rows, features), ((f"{theirs}.{other}.weight", rows),), turned=True))
            found.append(_one(f"{ours}.{name}.bias", (rows,), f"{theirs}.{other}.bias"))
    found += [_one(f"norm.{kind}", (h,), f"transformer.ln_f.{kind}") for kind in ("weight", "bias")]
    return found if model.tied else [*found, _one("head.weight", (model.vocab, h), "lm_head.weight")]


def _one(ours: str, shape: tuple[int, ...], theirs: str) -> Entry:
    return Entry(ours, shape, ((theirs, shape[0]),))


def our_shapes(table: list[Entry]) -> dict[str, tuple[int, ...]]:
    """Name of ours -> shape."""
    return {entry.ours: entry.shape for entry in table}


def their_shapes(table: list[Entry]) -> dict[str, tuple[int, ...]]:
    """Name of theirs -> shape."""
    return {name: entry.their_shape(rows) for entry in table for name, rows in entry.theirs}


def as_ours(table: list[Entry], theirs: LazyTensors) -> LazyTensors:
    """Our parameters out of their tensors, which were checked to match."""
    by_name = {entry.ours: entry for entry in table}

    def read(name: str) -> Tensor:
        entry = by_name[name]
        parts = [theirs[other].T if entry.turned else theirs[other] for other, _ in entry.theirs]
        return torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()

    metas = {
        entry.ours: torch.empty(entry.shape, dtype=_wider([theirs.metas[name].dtype for name, _ in entry.theirs]), device="meta") for entry in table
    }
    return LazyTensors(metas, read)


def as_theirs(table: list[Entry], ours: LazyTensors) -> LazyTensors:
    """Their tensors out of our parameters, which were checked to match. Those of one parameter, asked for in a row, read it once."""
    place = {name: (entry, index) for entry in table for index, (name, _) in enumerate(entry.theirs)}
    last: list[tuple[str, Tensor]] = []

    def read(name: str) -> Tensor:
        entry, index = place[name]
        if not last or last[0][0] != entry.ours:
            last[:] = [(entry.ours, ours[entry.ours])]
        if len(entry.theirs) > 1:  # a copy: safetensors takes no two tensors of one memory
            first = sum(rows for _, rows in entry.theirs[:index])
            return last[0][1].narrow(0, first, entry.theirs[index][1]).clone()
        return (last[0][1].T if entry.turned else last[0][1]).contiguous()

    metas = {
        name: torch.empty(entry.their_shape(rows), dtype=ours.metas[entry.ours].dtype, device="meta")
        for entry in table
        for name, rows in entry.theirs
    }
    return LazyTensors(metas, read)


def cut_rows(tensors: LazyTensors, names: tuple[str, ...], rows: int) -> LazyTensors:
    """The same with only the first rows of some tensors."""
    change: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor[:rows] if name in names else tensor  # noqa: E731
    return LazyTensors({name: change(name, meta) for name, meta in tensors.metas.items()}, lambda name: change(name, tensors[name]))


def _wider(dtypes: list[torch.dtype]) -> torch.dtype:
    found = dtypes[0]
    for dtype in dtypes[1:]:
        found = torch.promote_types(found, dtype)
    return found
