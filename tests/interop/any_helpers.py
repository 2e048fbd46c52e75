"""Tiny models that are not ours, their truth by a plain loop in one process, and random plans for them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from layouts import HARDWARE, Case, random_plan
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megadcp.config.schema import ModelConfig, PlanConfig
from megadcp.data.step_documents import StepDocuments
from megadcp.interop.any_model import Options
from megadcp.interop.any_shape import shape_of
from megadcp.plan.step_plan import StepPlan

VOCAB = 37
LENGTHS = ((7, 1, 22, 12), (30, 3, 16, 2), (40, 1, 5, 9))  # of three batches
OPTIONS = Options(hardware=HARDWARE, plan=PlanConfig(ahead=0))
PLAIN_SHAPE = ModelConfig(layers=3, hidden=16, heads=4, kv_heads=2, head_dim=4, ffn=32, vocab=VOCAB, mlp="gelu")
FAMILIES = ("llama", "gpt2", "qwen2", "qwen3", "plain")


def transformers_model(family: str) -> nn.Module:
    """A causal language model with random weights."""
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config, Qwen3Config

    wide = dict(vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
    wide |= dict(max_position_embeddings=64, initializer_range=0.3)
    zero = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    configs = {
        "llama": partial(LlamaConfig, **wide),
        "gpt2": partial(GPT2Config, vocab_size=VOCAB, n_embd=16, n_layer=3, n_head=4, n_positions=40, initializer_range=0.3, **zero),
        "qwen2": partial(Qwen2Config, tie_word_embeddings=True, **wide),
        "qwen3": partial(Qwen3Config, head_dim=8, **wide),
    }
    return AutoModelForCausalLM.from_config(configs[family](bos_token_id=None, eos_token_id=None, pad_token_id=None))


class Block(nn.Module):
    """A layer of a plain model."""

    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = shape.heads, shape.kv_heads, shape.head_dim
        self.norm, self.qkv = nn.LayerNorm(shape.hidden), nn.Linear(shape.hidden, (shape.heads + 2 * shape.kv_heads) * shape.head_dim)
        self.out = nn.Linear(shape.heads * shape.head_dim, shape.hidden)
        self.mlp = nn.Sequential(nn.LayerNorm(shape.hidden), nn.Linear(shape.hidden, shape.ffn), nn.GELU(), nn.Linear(shape.ffn, shape.hidden))

    def forward(self, x: Tensor, attention: Any) -> Tensor:
        parts = self.qkv(self.norm(x)).view(len(x), -1, self.dim).split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        x = x + self.out(attention(*parts).flatten(1))
        return x + self.mlp(x)


class PlainModel(nn.Module):
    """As docs/any_model.md asks of a plain model."""

    def __init__(self, shape: ModelConfig = PLAIN_SHAPE) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(shape.vocab, shape.hidden), nn.Embedding(64, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor, attention: Any) -> Tensor:
        x = self.words(input_ids) + self.places(position_ids)
        for block in self.blocks:
            x = block(x, attention)
        return self.head(x)


def whole_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of one document, by torch alone."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1)


def wide_norms(model: nn.Module) -> nn.Module:
    """RMSNorms of transformers work in fp32 whatever the model's format; torch's own are exact in fp64, too."""
    for module in model.modules():
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                own = nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon, dtype=child.weight.dtype)
                own.weight = child.weight
                setattr(module, name, own)
    return model


def make_model(family: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(5)
    model = PlainModel() if family == "plain" else transformers_model(family)
    return (wide_norms(model) if dtype == torch.float64 else model).to(dtype)


def options_of(model: nn.Module) -> Options:
    if isinstance(model, PlainModel):
        return Options(shape=PLAIN_SHAPE, layers=list(model.blocks), hardware=HARDWARE, plan=PlanConfig(ahead=0))
    return OPTIONS


def documents() -> list[dict[str, Tensor]]:
    """All batches' documents, one after the other, some targets hidden."""
    rng = np.random.default_rng(0)
    made = []
    for length in (length for batch in LENGTHS for length in batch):
        tokens = rng.integers(0, VOCAB, length)
        labels = np.where(rng.random(length) < 0.2, -100, tokens)
        made.append({"input_ids": torch.tensor(tokens), "labels": torch.tensor(labels)})
    return made


def loader_of(data: Sequence[Any] | None = None) -> DataLoader:
    return DataLoader(documents() if data is None else data, batch_size=len(LENGTHS[0]), shuffle=False, collate_fn=list)


def truth(model: nn.Module, batch: int) -> tuple[float, dict[str, np.ndarray]]:
    """Mean loss and gradients of one batch by a plain loop, document by document, with attention that is not ours."""
    count = len(LENGTHS[0])
    chosen = documents()[batch * count : (batch + 1) * count]
    targets = sum(int((one["labels"][1:] != -100).sum()) for one in chosen)
    model.zero_grad()
    sum_of_losses = 0.0
    for one in chosen:
        if isinstance(model, PlainModel):
            logits = model(one["input_ids"], torch.arange(len(one["input_ids"])), whole_attention)
        else:
            logits = model(input_ids=one["input_ids"][None], use_cache=False).logits[0]
        if len(logits) > 1:
            loss = F.cross_entropy(logits[:-1], one["labels"][1:], reduction="sum", ignore_index=-100) / targets
            loss.backward()
            sum_of_losses += float(loss.detach())
    return sum_of_losses, gradients(model)


def gradients(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: each.grad.numpy().copy() for name, each in model.named_parameters() if each.grad is not None}


def error(found: dict[str, np.ndarray], true: dict[str, np.ndarray]) -> float:
    """Largest relative to each parameter's largest gradient (not below a thousandth of the model's largest)."""
    assert found.keys() == true.keys()
    largest = max(float(np.abs(each).max()) for each in true.values())
    return max(float(np.abs(found[name] - each).max() / max(np.abs(each).max(), 1e-3 * largest)) for name, each in true.items())


def random_plans(model: nn.Module, lanes: int, seed: int) -> Any:
    """A legal plan at random for each step: packs, groups, kinds of communication, slots with holes, recompute."""
    shape = PLAIN_SHAPE if isinstance(model, PlainModel) else shape_of(model)

    def plan(step: StepDocuments) -> StepPlan:
        case = Case(lanes=lanes, stage_layers=(shape.layers,), model=shape, lengths=tuple(step.lengths.tolist()))
        return random_plan(case, random.Random(1000 * seed + step.step).randrange(10**6), step.step)

    return plan
