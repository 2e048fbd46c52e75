"""Text from a model: greedy or sampled, one token at a time. Without a key-value cache, so the cost grows with the square of the length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megadcp.config.check import UserError
from megadcp.config.schema import ModelConfig
from megadcp.engine.placement import Placement
from megadcp.nn.backend import IGNORE, PackedTokens
from megadcp.nn.gpt import GPT


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. temperature 0 is greedy; top_k 0 and top_p 1 keep all tokens; equal seeds give equal text."""

    tokens: int = 64
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def check(self, prompt: int, model: ModelConfig) -> None:
        """UserError for what can't be done; `prompt` is its length in tokens."""
        if self.tokens < 1:
            raise UserError(f"tokens={self.tokens}: at least 1")
        if not self.temperature >= 0:
            raise UserError(f"temperature={self.temperature}: 0 (greedy) or above")
        if self.top_k < 0:
            raise UserError(f"top_k={self.top_k}: 0 (all tokens) or above")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p}: above 0 and at most 1")
        if prompt < 1:
            raise UserError("the prompt is empty; give at least one token")
        limit = model.max_position
        if model.position == "learned" and prompt + self.tokens - 1 > limit:  # the last token made is never read
            room = limit + 1 - prompt
            way = f"ask for at most {room} tokens" if room > 0 else f"shorten the prompt to at most {limit} tokens"
            raise UserError(f"a prompt of {prompt} tokens and {self.tokens} new ones need more than the model's {limit} learned positions; {way}")


@torch.no_grad()
def generate(model: GPT, prompt: list[int], sampling: Sampling, vocab: int, stop: int | None = None) -> Iterator[int]:
    """The new token ids, each as soon as it is known. Only ids below `vocab` (the tokenizer's size) are made; ends after `stop`."""
    sampling.check(len(prompt), model.config)
    wrong = [token for token in prompt if not 0 <= token < model.config.vocab]
    if wrong:
        raise UserError(f"the prompt has token {wrong[0]}, but the model knows {model.config.vocab}: is this the tokenizer it was trained with?")
    generator = torch.Generator().manual_seed(sampling.seed)
    device = model.head_weight.device
    ids = list(prompt)
    was_training = model.training
    model.eval()
    try:
        for _ in range(sampling.tokens):
            logits = model.logits(one_document(ids, device), Placement())[-1, :vocab].float().cpu()
            token = choose(logits, sampling, generator)
            ids.append(token)
            yield token
            if token == stop:
                return
    finally:
        model.train(was_training)


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token id from logits [V]: on the CPU, so that a seed means the same on every device."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], -torch.inf)
    shares = torch.softmax(logits, 0)
    if sampling.top_p < 1:  # the fewest tokens that reach top_p together
        ordered, places = shares.sort(descending=True)
        shares = shares.masked_fill(torch.zeros_like(shares, dtype=torch.bool).scatter(0, places, ordered.cumsum(0) - ordered >= sampling.top_p), 0.0)
    return int(torch.multinomial(shares, 1, generator=generator))


def one_document(ids: list[int], device: torch.device) -> PackedTokens:
    """A pack of one document without targets."""
    count = len(ids)
    return PackedTokens(
        tokens=torch.tensor(ids, device=device),
        labels=torch.full((count,), IGNORE, device=device),
        positions=torch.arange(count, device=device),
        cu_seqlens=torch.tensor([0, count], dtype=torch.int32, device=device),
        max_length=count,
        document_ids=torch.zeros(1, dtype=torch.int64, device=device),
        real_lengths=torch.tensor([count], device=device),
        cu_seqlens_list=(0, count),
        real_lengths_list=(count,),
    )
