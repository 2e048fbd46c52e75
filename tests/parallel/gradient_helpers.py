"""Gradients made up from whole ones: every rank of any layout gives its tensors the parts that a real backward would give them.

A step has CONTRIBUTIONS microbatches; a layout deals them to its lanes in any way. What several tensor-parallel ranks or both ends of a
pipeline hold together gets unequal shares, exact in binary, that add up to the whole.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from megadcp.backends.torch_backend import TorchBackend
from megadcp.backends.torch_sharded import torch_backend
from megadcp.config.schema import ModelConfig, OptimConfig
from megadcp.mesh.coords import Mesh
from megadcp.mesh.groups import Group, GroupPool
from megadcp.nn.gpt import GPT
from megadcp.nn.part import parts_of
from megadcp.nn.shard import is_partial, shard_of, take, whole_shape
from megadcp.parallel.assemble import whole_tensors
from megadcp.parallel.gradients import GradientBuffers, Verdict
from megadcp.train.optim import Optimizer

CPU = torch.device("cpu")
PLAIN = ModelConfig(layers=4, hidden=8, heads=4, kv_heads=2, head_dim=2, ffn=12, vocab=29)
RICH = replace(
    PLAIN, tied=True, kv_heads=1, qk_norm=True, mlp="gelu", norm="layernorm", position="learned", max_position=10, qkv_bias=True,
    out_bias=True, mlp_bias=True,
)  # fmt: skip
ADAMW = OptimConfig(lr=0.01, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8)
CONTRIBUTIONS, TARGETS, CLIP = 6, 11, 2.0
SHARES = {1: (1.0,), 2: (0.25, 0.75), 4: (0.125, 0.125, 0.25, 0.5)}
DEALS = {1: (0,) * 6, 2: (0, 0, 1, 0, 0, 1), 4: (3, 0, 0, 2, 0, 2)}  # contribution -> lane; of four lanes one runs nothing


@dataclass(frozen=True)
class Layout:
    """tp, pp, lanes, chunks of a stage; bucket: elements in a bucket; overlap: sums over lanes start in the last backward."""

    tp: int = 1
    pp: int = 1
    lanes: int = 1
    chunks: int = 1
    bucket: int = 300
    overlap: bool = True

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.lanes, self.tp, self.pp)


@dataclass
class Run:
    """One rank's model with all that belongs to it."""

    config: ModelConfig
    pool: GroupPool | None
    layout: Layout
    model: GPT
    gradients: GradientBuffers
    optimizer: Optimizer
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def lane(self) -> int:
        return self.pool.coords.lane if self.pool else 0

    @property
    def tp(self) -> Group:
        return self.pool.tp if self.pool else Group.single()


def build(config: ModelConfig, pool: GroupPool | None = None, layout: Layout | None = None, dtype=torch.float64, frozen: tuple[str, ...] = ()) -> Run:
    layout = layout or Layout()
    tp = pool.tp if pool else None
    part = parts_of([config.layers // layout.pp] * layout.pp, layout.chunks)[pool.coords.pp if pool else 0]

    def model(dtype: torch.dtype) -> GPT:
        return GPT(config, torch_backend(dtype, CPU, tp), 3, 7, part)

    one, exact = model(dtype), {name: parameter.detach() for name, parameter in model(torch.float32).named_parameters()}
    for name, parameter in one.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen) if frozen else True)
    gradients = GradientBuffers(one.named_parameters(), pool, config.tied, layout.bucket)
    return Run(config, pool, layout, one, gradients, Optimizer(one, gradients, TorchBackend(dtype), ADAMW, exact))


def whole_gradient(name: str, shape: tuple[int, ...], step: int, contribution: int) -> Tensor:
    """Small multiples of 1/64: sums of them are exact even in bf16's fp32 buffers, whatever their order."""
    seed = int.from_bytes(hashlib.sha256(f"{name}/{step}/{contribution}".encode()).digest()[:7], "little")
    return torch.randint(-32, 33, shape, generator=torch.Generator().manual_seed(seed)).double() / 64


def local_gradient(run: Run, name: str, parameter: nn.Parameter, step: int, contribution: int) -> Tensor:
    """This rank's part of a contribution."""
    tied = run.config.tied and run.layout.pp > 1
    source = "embedding.weight" if tied and name == "head.weight" else name
    shard, tp = shard_of(parameter), run.tp
    gradient = take(whole_gradient(source, whole_shape(parameter), step, contribution), shard).clone()
    if tied and source == "embedding.weight":
        gradient *= 0.25 if name == source else 0.75
    if is_partial(parameter):
        gradient *= SHARES[tp.size][tp.index]
    for low, high in shard.shared if shard else ():
        holders = tp.size // run.config.kv_heads
        gradient[low:high] *= SHARES[holders][tp.index % holders]
    return gradient


def backward(run: Run, step: int, contribution: int, spoil: tuple[str, float] | None = None) -> Tensor:
    """One microbatch: its loss, after the backward."""
    total = torch.zeros((), dtype=torch.float64)
    for name, parameter in run.model.named_parameters():
        if parameter.requires_grad:
            gradient = local_gradient(run, name, parameter, step, contribution)
            if spoil is not None and spoil[0] == name:
                gradient.view(-1)[-1] = spoil[1]
            total = total + (parameter * gradient.to(parameter.dtype)).sum()
    if total.requires_grad:
        total.backward()
    return torch.tensor(1.5 * contribution - step, dtype=torch.float64)


def step(run: Run, number: int, spoil: tuple[str, float] | None = None, lr: float = 0.01) -> Verdict:
    """One step; `spoil` puts a number into the last contribution's gradient of a parameter on this rank."""
    mine = [each for each, lane in enumerate(DEALS[run.layout.lanes]) if lane == run.lane]
    last_stage = run.pool is None or run.pool.pipeline.index == run.pool.pipeline.size - 1
    losses = []
    run.gradients.zero()
    for each in mine:
        if run.layout.overlap and each == mine[-1]:
            run.gradients.last_microbatch()
        loss = backward(run, number, each, spoil if each == mine[-1] else None)
        losses += [loss] if last_stage else []
    verdict = run.gradients.finish(losses, TARGETS, CLIP)
    if verdict.finite:
        run.optimizer.step(lr)
    run.verdicts.append(verdict)
    return verdict


def optimizer_state(run: Run) -> dict[str, Tensor]:
    """Whole tensors of masters and moments, KIND.NAME, on rank 0. All ranks call it."""
    found: dict[str, Tensor] = {}
    for kind, pieces in run.optimizer.state().items():
        found |= whole_tensors(pieces, run.pool, run.config.tied, f"{kind}.")
    return found


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference of a tensor relative to its largest value."""
    assert found.keys() == expected.keys()
    assert all(found[name].shape == expected[name].shape and found[name].dtype == expected[name].dtype for name in expected)
    return max(float((found[name].double() - expected[name].double()).abs().max() / max(1e-30, expected[name].abs().max())) for name in expected)
