"""Packs, small models and a naive reference for the tests of the model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megadcp.backends.torch_backend import TorchBackend
from megadcp.config.schema import ModelConfig, RopeConfig
from megadcp.engine.placement import Placement
from megadcp.nn.backend import IGNORE, PackedTokens
from megadcp.nn.gpt import GPT
from megadcp.plan.step_plan import Recompute

SMALL = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48, "vocab": 61, "init_std": 0.1}
FAMILIES = {
    "llama": ModelConfig(**SMALL),
    "llama_tied_mha": ModelConfig(**{**SMALL, "kv_heads": 4, "tied": True}),
    "qk_norm_free_head": ModelConfig(**{**SMALL, "head_dim": 12, "qk_norm": True}),
    "qk_norm_learned": ModelConfig(**SMALL, qk_norm=True, position="learned", max_position=40),
    "gpt2": ModelConfig(
        **{**SMALL, "kv_heads": 4}, norm="layernorm", position="learned", max_position=40, mlp="gelu_tanh",
        qkv_bias=True, out_bias=True, mlp_bias=True, tied=True,
    ),
    "gelu_mqa": ModelConfig(**{**SMALL, "kv_heads": 1}, mlp="gelu", norm="layernorm", qkv_bias=True),
    "squared_relu_yarn": ModelConfig(**SMALL, mlp="squared_relu", rope=RopeConfig(scaling="yarn", factor=4.0, original_max_position=16)),
}  # fmt: skip


def documents(lengths: Sequence[int], vocab: int, seed: int = 0) -> list[Tensor]:
    """Random tokens of each document."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (length,), generator=generator) for length in lengths]


def pack(tokens: Sequence[Tensor], padded: Sequence[int] | None = None, ids: Sequence[int] | None = None) -> PackedTokens:
    """Documents back to back, each followed by its own padding."""
    padded = [len(document) for document in tokens] if padded is None else padded
    flat, labels, positions, borders = [], [], [], [0]
    for document, size in zip(tokens, padded, strict=True):
        flat.append(torch.cat((document, torch.zeros(size - len(document), dtype=torch.int64))))
        target = torch.full((size,), IGNORE)
        target[: max(len(document) - 1, 0)] = document[1:]
        labels.append(target)
        positions.append(torch.arange(size))
        borders.append(borders[-1] + size)
    return PackedTokens(
        tokens=torch.cat(flat),
        labels=torch.cat(labels),
        positions=torch.cat(positions),
        cu_seqlens=torch.tensor(borders, dtype=torch.int32),
        max_length=max(padded),
        document_ids=torch.tensor(list(range(len(tokens)) if ids is None else ids), dtype=torch.int64),
        real_lengths=torch.tensor([len(document) for document in tokens], dtype=torch.int64),
        cu_seqlens_list=tuple(borders),
        real_lengths_list=tuple(len(document) for document in tokens),
    )


def real(batch: PackedTokens) -> Tensor:
    """Mask [t] of real tokens, by plain loops."""
    mask = torch.zeros(batch.tokens.shape[0], dtype=torch.bool)
    for start, length in zip(batch.cu_seqlens_list, batch.real_lengths.tolist(), strict=False):
        mask[start : start + length] = True
    return mask


def model(config: ModelConfig, dtype: torch.dtype = torch.float32, seed: int = 3, loss_chunk: int = 16) -> GPT:
    """A model whose norms and biases are not at their start values."""
    made = GPT(config, TorchBackend(dtype), seed, loss_chunk)
    generator = torch.Generator().manual_seed(99)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return made


def place(level: str = "none", layers: int = 0, step: int = 0) -> Placement:
    return Placement(step, Recompute(level, layers))


def gradients(made: GPT, batch: PackedTokens, placement: Placement | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and the gradient of every trained parameter."""
    made.zero_grad(set_to_none=True)
    loss = made(batch, placement or place())
    loss.backward()
    found = {name: p.grad for name, p in made.named_parameters() if p.requires_grad}
    assert all(grad is not None for grad in found.values()), [name for name, grad in found.items() if grad is None]
    return loss.detach(), found


def distance(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the largest value of b."""
    return ((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item()


# ------------------------------------------------------------------------------------ a naive model, one document at a time
def _norm(config: ModelConfig, values: dict[str, Tensor], name: str, x: Tensor, kind: str) -> Tensor:
    if kind == "rmsnorm":
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.norm_eps) * values[f"{name}.weight"]
    centred = x - x.mean(-1, keepdim=True)
    scale = torch.sqrt((centred * centred).mean(-1, keepdim=True) + config.norm_eps)
    return centred / scale * values[f"{name}.weight"] + values[f"{name}.bias"]


def _linear(values: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    out = x @ values[f"{name}.weight"].T
    return out + values[f"{name}.bias"] if f"{name}.bias" in values else out


def _angles(config: ModelConfig) -> tuple[list[float], float]:
    rope, d = config.rope, config.head_dim
    plain = [rope.theta ** (-2 * i / d) for i in range(d // 2)]
    if rope.scaling == "none":
        return plain, 1.0
    assert rope.scaling == "yarn"
    bounds = [
        d * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta)) for turns in (rope.beta_fast, rope.beta_slow)
    ]
    low, high = max(math.floor(bounds[0]), 0), min(math.ceil(bounds[1]), d - 1)
    shares = [min(max((i - low) / max(high - low, 0.001), 0.0), 1.0) for i in range(d // 2)]
    return [f * (1 - s) + f / rope.factor * s for f, s in zip(plain, shares, strict=True)], 0.1 * math.log(rope.factor) + 1


def _turn(config: ModelConfig, x: Tensor) -> Tensor:
    frequencies, scale = _angles(config)
    half = config.head_dim // 2
    rows = []
    for position in range(x.shape[0]):
        parts = []
        for i in range(half):
            c, s = math.cos(position * frequencies[i]) * scale, math.sin(position * frequencies[i]) * scale
            parts.append((x[position, :, i] * c - x[position, :, i + half] * s, x[position, :, i + half] * c + x[position, :, i] * s))
        rows.append(torch.stack([p[0] for p in parts] + [p[1] for p in parts], dim=-1))
    return torch.stack(rows)


def _attention(config: ModelConfig, values: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    length, d, group = x.shape[0], config.head_dim, config.heads // config.kv_heads
    qkv = _linear(values, f"{name}.qkv", x).view(length, -1, d)
    q, k, v = qkv[:, : config.heads], qkv[:, config.heads : config.heads + config.kv_heads], qkv[:, config.heads + config.kv_heads :]
    if config.qk_norm:
        q, k = _norm(config, values, f"{name}.q_norm", q, "rmsnorm"), _norm(config, values, f"{name}.k_norm", k, "rmsnorm")
    if config.position == "rope":
        q, k = _turn(config, q), _turn(config, k)
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    heads = []
    for head in range(config.heads):
        scores = q[:, head] @ k[:, head // group].T / math.sqrt(d)
        heads.append(torch.softmax(scores.masked_fill(hidden, -math.inf), -1) @ v[:, head // group])
    return _linear(values, f"{name}.out", torch.cat(heads, -1))


def _mlp(config: ModelConfig, values: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    inner = _linear(values, f"{name}.up", x)
    if config.mlp == "swiglu":
        gate, up = inner[:, : config.ffn], inner[:, config.ffn :]
        inner = gate / (1 + torch.exp(-gate)) * up
    elif config.mlp == "squared_relu":
        inner = torch.clamp(inner, min=0) ** 2
    elif config.mlp == "gelu":
        inner = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
    else:
        inner = 0.5 * inner * (1 + torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
    return _linear(values, f"{name}.down", inner)


def reference_logits(config: ModelConfig, values: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits [l, V] of one document, by the textbook."""
    x = values["embedding.weight"][tokens]
    if config.position == "learned":
        x = x + values["positions.weight"][: len(tokens)]
    for index in range(config.layers):
        name = f"layers.{index}"
        x = x + _attention(config, values, f"{name}.attention", _norm(config, values, f"{name}.attention_norm", x, config.norm))
        x = x + _mlp(config, values, f"{name}.mlp", _norm(config, values, f"{name}.mlp_norm", x, config.norm))
    x = _norm(config, values, "norm", x, config.norm)
    return x @ values["embedding.weight" if config.tied else "head.weight"].T


def reference(config: ModelConfig, made: GPT, tokens: Sequence[Tensor]) -> tuple[list[Tensor], Tensor, dict[str, Tensor]]:
    """Logits of each document, summed loss and gradients of the naive model in fp64 with the values of `made`."""
    values = {name: p.detach().double().requires_grad_() for name, p in made.named_parameters()}
    logits = [reference_logits(config, values, document) for document in tokens]
    total = sum(-torch.log_softmax(out[:-1], -1).gather(1, document[1:, None]).sum() for out, document in zip(logits, tokens, strict=True))
    total.backward()
    return [out.detach() for out in logits], total.detach(), {name: value.grad for name, value in values.items()}
