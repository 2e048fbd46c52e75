"""A whole training step against transformers' LlamaForCausalLM of the same shape in a plain PyTorch loop, in one run.

`python tools/benchmark.py step [--dtype fp32|bf16] [--size tiny|small] [--tokens N] [--max-length N] [options]`

Both sides start from the same weights and see the same packed documents (lognormal lengths), format and number of threads, and run forward,
backward, clipping to norm 1 and fused AdamW. Making plans and batches is outside the clock on both sides; proving the plan is inside on ours.
transformers is given three set-ups, and the fastest of them is what counts:
- packed: one forward over all documents with position_ids and a ready-made block-diagonal mask (sdpa);
- padded: a batch of the documents, padded at the end to the longest; causality hides the padding, so no mask and sdpa's causal kernel;
- loop: one forward and backward per document, no mask, so sdpa takes its causal kernel.
In bf16 this trainer keeps fp32 master weights and fp32 gradient sums; the plain loop updates bf16 weights and has less to do.
The losses of the first step must agree, and so must the gradient norms; contestants take turns, so that the machine's drift hits all alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from benchmark import interleaved, machine, ratio_line
from torch import Tensor, nn

from megadcp.config.load import compose
from megadcp.config.schema import Config, ModelConfig
from megadcp.data.batch import Pack, build_pack
from megadcp.data.step_documents import IGNORE, StepDocuments
from megadcp.engine.step import run_step
from megadcp.nn.flops import flops
from megadcp.nn.gpt import decay_groups
from megadcp.plan.planner import planner_for
from megadcp.plan.step_plan import StepPlan
from megadcp.train.state import TrainState, new_state, weights

SIZES = {
    "tiny": ModelConfig(layers=4, hidden=128, heads=4, kv_heads=4, head_dim=32, ffn=320, vocab=4096, tied=True),  # quickstart's
    "small": ModelConfig(layers=6, hidden=384, heads=6, kv_heads=2, head_dim=64, ffn=1024, vocab=8192, tied=True),
}
LR = 1e-3
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}  # relative; of the gradient norm too


@dataclass(frozen=True)
class Batch:
    """One step's documents as both sides get them."""

    plan: StepPlan
    packs: list[Pack]
    lengths: list[int]
    tokens: list[Tensor]  # one int64 [l] per document
    labels: list[Tensor]


class RandomDocuments:
    """Random tokens by document id."""

    def __init__(self, lengths: np.ndarray, vocab: int, seed: int) -> None:
        self.lengths, self.vocab, self.seed = lengths, vocab, seed

    def read(self, document: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and next tokens of one document."""
        tokens = np.random.default_rng([self.seed, document]).integers(0, self.vocab, self.lengths[document])
        return tokens, np.append(tokens[1:], IGNORE)


def make_batch(config: Config, step: int) -> Batch:
    """Documents up to the token budget, lognormal around a third of the longest."""
    rng, budget, longest = np.random.default_rng(step), config.data.tokens_per_step, config.data.max_length
    lengths: list[int] = []
    while sum(lengths) < budget:
        length = int(np.clip(rng.lognormal(math.log(longest / 3), 0.8), 2, longest))
        lengths.append(max(2, min(length, budget - sum(lengths))))
    source = RandomDocuments(np.array(lengths), config.model.vocab, step)
    documents = StepDocuments(step, np.arange(len(lengths)), np.array(lengths), 0.0)
    plan = planner_for(config)(step, lengths)
    packs = [build_pack(source, documents, one) for one in sorted(plan.microbatches, key=lambda one: one.slot)]
    read = [source.read(document) for document in range(len(lengths))]
    return Batch(plan, packs, lengths, [torch.from_numpy(tokens) for tokens, _ in read], [torch.from_numpy(labels) for _, labels in read])


# ------------------------------------------------------------------------------------------------------------ transformers
class Plain:
    """transformers' model, AdamW and one of the three set-ups."""

    def __init__(self, config: Config, state: TrainState, dtype: torch.dtype, setup: str) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        model = config.model
        shape = LlamaConfig(
            vocab_size=model.vocab, hidden_size=model.hidden, intermediate_size=model.ffn, num_hidden_layers=model.layers,
            num_attention_heads=model.heads, num_key_value_heads=model.kv_heads, head_dim=model.head_dim, rms_norm_eps=model.norm_eps,
            tie_word_embeddings=model.tied, max_position_embeddings=config.data.max_length,
            rope_parameters={"rope_theta": model.rope.theta, "rope_type": "default"}, attn_implementation="sdpa", use_cache=False,
        )  # fmt: skip
        self.model = LlamaForCausalLM(shape).to(dtype)
        self.model.load_state_dict(renamed(weights(state.model), model), strict=not model.tied)
        self.model.train()
        optim = config.optim
        self.optimizer = torch.optim.AdamW(
            decay_groups(self.model, optim.weight_decay), lr=LR, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True
        )
        self.setup, self.inputs = setup, {}
        self.norm = self.loss = 0.0

    def prepare(self, batch: Batch) -> list[dict[str, Tensor]]:
        """Arguments of each forward, made outside the clock. Labels are shifted by the model, so each stands one place later."""
        dtype, lengths = self.model.dtype, batch.lengths
        if self.setup == "loop":
            pairs = zip(batch.tokens, batch.labels, strict=True)
            return [{"input_ids": one[None], "labels": labels_at_inputs([one], [target])} for one, target in pairs]
        if self.setup == "packed":
            document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
            allowed = torch.tril(document[:, None] == document[None, :])
            positions = torch.cat([torch.arange(length) for length in lengths])
            inputs = {"input_ids": torch.cat(batch.tokens)[None], "position_ids": positions[None]}
            return [{**inputs, "attention_mask": additive(allowed, dtype), "labels": labels_at_inputs(batch.tokens, batch.labels)}]
        longest = max(lengths)
        tokens, labels = torch.zeros(len(lengths), longest, dtype=torch.int64), torch.full((len(lengths), longest), IGNORE)
        for row, (one, target) in enumerate(zip(batch.tokens, batch.labels, strict=True)):
            tokens[row, : len(one)], labels[row, : len(one)] = one, labels_at_inputs([one], [target])[0]
        return [{"input_ids": tokens, "labels": labels}]

    def step(self, batch: Batch) -> float:
        """Seconds of one step."""
        key = id(batch)
        if key not in self.inputs:
            self.inputs[key] = self.prepare(batch)
        targets = sum(batch.lengths) - len(batch.lengths)
        begin = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        losses = []
        for arguments in self.inputs[key]:
            loss = self.model(**arguments, num_items_in_batch=targets).loss
            loss.backward()
            losses.append(loss.detach())
        self.norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True))
        self.optimizer.step()
        self.loss = float(torch.stack(losses).sum())
        return time.perf_counter() - begin


def labels_at_inputs(tokens: list[Tensor], labels: list[Tensor]) -> Tensor:
    """[1, t]: transformers shifts labels itself, so document borders must be masked where the next document begins."""
    shifted = [torch.cat([torch.full((1,), IGNORE), target[:-1]]) for target in labels]
    assert all(len(one) == len(other) for one, other in zip(tokens, shifted, strict=True))
    return torch.cat(shifted)[None]


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """[1, 1, t, t] to be added to the scores; faster than a boolean mask on a CPU."""
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)[None, None]


def renamed(tensors: dict[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """The weights under transformers' names."""
    found = {"model.embed_tokens.weight": tensors["embedding.weight"], "model.norm.weight": tensors["norm.weight"]}
    if not model.tied:
        found["lm_head.weight"] = tensors["head.weight"]
    rows = [model.heads * model.head_dim, model.kv_heads * model.head_dim, model.kv_heads * model.head_dim]
    for index in range(model.layers):
        ours, theirs = f"layers.{index}.", f"model.layers.{index}."
        for name, part in zip("qkv", tensors[ours + "attention.qkv.weight"].split(rows), strict=True):
            found[f"{theirs}self_attn.{name}_proj.weight"] = part
        gate, up = tensors[ours + "mlp.up.weight"].chunk(2)
        found |= {
            theirs + "self_attn.o_proj.weight": tensors[ours + "attention.out.weight"],
            theirs + "mlp.gate_proj.weight": gate,
            theirs + "mlp.up_proj.weight": up,
            theirs + "mlp.down_proj.weight": tensors[ours + "mlp.down.weight"],
            theirs + "input_layernorm.weight": tensors[ours + "attention_norm.weight"],
            theirs + "post_attention_layernorm.weight": tensors[ours + "mlp_norm.weight"],
        }
    return {name: tensor.clone() for name, tensor in found.items()}


# --------------------------------------------------------------------------------------------------------------------- run
class Ours:
    """The trainer's own step."""

    def __init__(self, config: Config) -> None:
        self.state = new_state(config, torch.device("cpu"))
        self.engine = self.state.engine
        self.norm = self.loss = 0.0

    def step(self, batch: Batch) -> float:
        """Seconds of one step."""
        begin = time.perf_counter()
        result = run_step(self.engine, batch.plan, batch.packs, LR)
        self.norm, self.loss = result.grad_norm, result.loss
        return time.perf_counter() - begin


def several(step: Callable[[Batch], float], batches: list[Batch]) -> float:
    """Mean seconds over the batches."""
    return sum(step(batch) for batch in batches) / len(batches)


def agree(ours: Ours, others: dict[str, Any], first: Batch, precision: str) -> None:
    """One step of everybody from equal weights: losses and gradient norms must be equal."""
    ours.step(first)
    for name, other in others.items():
        other.step(first)
        print(f"  first step, {name}: loss {other.loss:.6f} (this trainer {ours.loss:.6f}), gradient norm {other.norm:.6f} ({ours.norm:.6f})")
        for mine, theirs, what in ((ours.loss, other.loss, "losses"), (ours.norm, other.norm, "gradient norms")):
            if abs(mine - theirs) > LOSS_TOLERANCE[precision] * abs(theirs) * (1 if what == "losses" else 5):
                raise SystemExit(f"the {what} of the first step differ: this trainer {mine}, transformers ({name}) {theirs}")


def measure(options: argparse.Namespace, precision: str) -> None:
    """One table."""
    base = compose(["experiment=quickstart"])
    data = dataclasses.replace(base.data, tokens_per_step=options.tokens, max_length=options.max_length)
    config = dataclasses.replace(
        base,
        model=SIZES[options.size],
        data=data,
        plan=dataclasses.replace(base.plan, pack_tokens=options.pack_tokens),
        precision=dataclasses.replace(base.precision, format=precision),
        optim=dataclasses.replace(base.optim, clip_norm=1.0),
    )
    batches = [make_batch(config, step) for step in range(options.steps)]
    lengths = [length for batch in batches for length in batch.lengths]
    documents = f"{len(lengths) / len(batches):.1f} documents of {min(lengths)} to {max(lengths)}"
    print(f"{options.size} model, {precision}, {options.tokens} tokens a step in {documents}")
    ours = Ours(config)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    others = {name: Plain(config, ours.state, dtype, name) for name in ("packed", "padded", "loop")}
    agree(ours, others, batches[0], precision)
    contestants = {name: partial(several, one.step, batches) for name, one in {"this": ours, **others}.items()}
    interleaved(contestants, 1)  # warm up
    seconds = interleaved(contestants, options.repeats)
    per_step = flops(config.model, [length for batch in batches for length in batch.lengths]) / len(batches)
    for name, times in seconds.items():
        middle = statistics.median(times)
        print(f"  {name:<7} {1000 * middle:8.2f} ms a step, {options.tokens / middle:9,.0f} tokens/s, {per_step / middle / 1e9:6.1f} GFLOP/s")
    fastest = min(others, key=lambda name: statistics.median(seconds[name]))
    for name in others:
        print(ratio_line(f"  this / transformers {name}{' (its fastest)' if name == fastest else ''}", seconds["this"], seconds[name]))


def main(argv: list[str]) -> int:
    """Exit code of one call."""
    parser = argparse.ArgumentParser(prog="tools/benchmark.py step", description="A training step against transformers.")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "both"), default="both")
    parser.add_argument("--size", choices=tuple(SIZES), default="tiny")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens a step")
    parser.add_argument("--max-length", type=int, default=512, help="longest document")
    parser.add_argument("--pack-tokens", type=int, default=0, help="this trainer's plan.pack_tokens (default 0: memory decides)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4, help="different batches in a turn")
    parser.add_argument("--repeats", type=int, default=7, help="turns")
    options = parser.parse_args(argv)
    try:
        import transformers
    except ImportError:
        print('transformers is not installed: pip install -e ".[hf]"', file=sys.stderr)
        return 2
    torch.set_num_threads(options.threads)
    print(f"{machine()}, torch {torch.__version__}, transformers {transformers.__version__}, {options.threads} threads")
    for precision in ("fp32", "bf16") if options.dtype == "both" else (options.dtype,):
        measure(options, precision)
    return 0
