"""A tiny model, documents of random tokens, and plans put together by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from megadcp.backends.torch_backend import TorchBackend
from megadcp.config.schema import Config, DataConfig, GemmFlops, HardwareConfig, ModelConfig, OptimConfig, PlanConfig, PrecisionConfig, RunConfig
from megadcp.data.batch import Pack, build_pack
from megadcp.data.step_documents import IGNORE, StepDocuments
from megadcp.engine.step import Engine
from megadcp.nn.gpt import GPT
from megadcp.parallel.gradients import GradientBuffers
from megadcp.plan.basis import Basis
from megadcp.plan.cost import CostModel
from megadcp.plan.memory import MemoryModel
from megadcp.plan.planner import planner_for
from megadcp.plan.step_plan import Microbatch, Recompute, StepPlan, round_bytes, round_seconds

MODEL = ModelConfig(layers=3, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=61, tied=True, init_std=0.2)
HARDWARE = HardwareConfig(
    name="test", gemm_flops=GemmFlops(60e9, 120e9, 60e9), gemm_half_tokens=16, attention_flops=40e9, attention_half_length=300,
    node_bytes=4e9, net_bytes=1e9, node_latency=1e-3, ring_step_seconds=1e-3, layer_overhead_seconds=2e-3, tp_exposed=1.0, memory_bytes=8e9,
    usable_fraction=0.8, loss_chunk=64, gpus_per_node=8, reduce_bytes=2e9, reduce_overlap=0.0, memory_bandwidth=20e9,
)  # fmt: skip
LENGTHS = (7, 1, 30, 12, 22, 3)
CPU = torch.device("cpu")


def config(model: ModelConfig = MODEL, optim: OptimConfig | None = None, precision: str = "fp32") -> Config:
    return Config(
        run=RunConfig(name="test"), model=model, data=DataConfig(max_length=64, tokens_per_step=128), plan=PlanConfig(),
        precision=PrecisionConfig(precision), optim=optim or OptimConfig(), hardware=HARDWARE,
    )  # fmt: skip


class RandomDocuments:
    """Documents by id; one document in the middle has no target at all where `masked` says so."""

    def __init__(self, lengths: Sequence[int] = LENGTHS, vocab: int = MODEL.vocab, masked: Sequence[int] = ()) -> None:
        self.lengths, self.vocab, self.masked = lengths, vocab, set(masked)

    def read(self, document: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.random.default_rng(document).integers(0, self.vocab, self.lengths[document])
        labels = np.append(tokens[1:], IGNORE)
        return tokens, np.full_like(labels, IGNORE) if document in self.masked else labels

    def step(self, index: int = 0) -> StepDocuments:
        return StepDocuments(index, np.arange(len(self.lengths)), np.array(self.lengths), 0.0)


def plan_of(
    groups: Sequence[Sequence[int]], recompute: Sequence[Recompute] = (), lengths: Sequence[int] = LENGTHS, setup: Config | None = None, step: int = 0
) -> StepPlan:
    """A legal plan with the given documents in each microbatch; `recompute` repeats over them."""
    base = planner_for(setup or config())(step, lengths)
    basis, levels = Basis.of(base), list(recompute) or [Recompute()]
    cost, memory, made = CostModel(basis), MemoryModel(basis), []
    for slot, documents in enumerate(groups):
        padded = tuple(lengths[document] for document in documents)
        one = Microbatch(slot, 0, 1, tuple(documents), padded, levels[slot % len(levels)])
        made.append(dataclasses.replace(one, seconds=round_seconds(cost.seconds(one)), bytes=round_bytes(memory.bytes(one))))
    return dataclasses.replace(base, microbatches=tuple(made))


def packs_of(plan: StepPlan, documents: RandomDocuments) -> list[Pack]:
    return [build_pack(documents, documents.step(plan.step), one) for one in plan.microbatches]


class NoUpdate:
    """An optimizer that only counts."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def step(self, lr: float) -> None:
        self.rates.append(lr)


def engine(dtype: torch.dtype = torch.float64, model: ModelConfig = MODEL, clip_norm: float = 0.0) -> Engine:
    gpt = GPT(model, TorchBackend(dtype), seed=3, loss_chunk=16)
    return Engine(gpt, GradientBuffers(gpt.named_parameters()), NoUpdate(), CPU, clip_norm)


def gradients(one: Engine) -> dict[str, torch.Tensor]:
    return dict(zip(one.gradients.names, [gradient.clone() for gradient in one.gradients.sums()], strict=True))


def reference(documents: RandomDocuments, model: ModelConfig = MODEL, step: int = 0) -> tuple[float, int, dict[str, torch.Tensor]]:
    """Loss sum, targets and mean gradient of all documents, each run alone, in fp64 by plain autograd, without any of the engine's code."""
    from megadcp.engine.placement import Placement
    from megadcp.nn.backend import PackedTokens

    gpt = GPT(model, TorchBackend(torch.float64), seed=3, loss_chunk=1000)
    total, targets = torch.zeros((), dtype=torch.float64), 0
    for document in range(len(documents.lengths)):
        tokens, labels = (torch.from_numpy(array) for array in documents.read(document))
        size = len(tokens)
        borders, ids, sizes = torch.tensor([0, size], dtype=torch.int32), torch.tensor([document]), torch.tensor([size])
        batch = PackedTokens(tokens, labels, torch.arange(size), borders, size, ids, sizes, (0, size), (size,))
        total = total + gpt(batch, Placement(step=step))
        targets += int((labels != IGNORE).sum())
    (total / targets).backward()
    return float(total.detach()), targets, {name: parameter.grad for name, parameter in gpt.named_parameters()}
