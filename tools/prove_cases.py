"""What tools/prove.py runs: cases drawn at random (model, layout, documents), the plans of their steps, and both as JSON."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megadcp.config.check import UserError
from megadcp.config.run_file import from_dict, to_dict
from megadcp.config.schema import (
    ClusterConfig,
    Config,
    DataConfig,
    GemmFlops,
    HardwareConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PlanConfig,
    PrecisionConfig,
    RopeConfig,
    RunConfig,
)
from megadcp.data.step_documents import IGNORE, StepDocuments
from megadcp.plan.basis import Basis, basis_from
from megadcp.plan.cost import CostModel
from megadcp.plan.memory import MemoryModel
from megadcp.plan.planner import planner_for
from megadcp.plan.step_plan import LEVELS, Microbatch, Predicted, Recompute, StepPlan, from_json, round_bytes, round_seconds, to_json
from megadcp.plan.verify import verify

STEPS = 3
ID_STRIDE = 1 << 20  # document ids of a step begin at its number times this
AMPLE_BYTES = 64e9
ADAM_EPS = 1e-6  # far above rounding: a gradient that is 0 but for rounding (of key biases, without rope) is no step
MOST_LAYERS = 5  # of all stages together where the layout allows it
Plans = dict[str, tuple[StepPlan, ...]]  # by who made them: random, joint, static, or what a file says


@dataclass(frozen=True)
class Case:
    """A model on a layout, and the lengths of the documents of STEPS steps. `bucket`: elements in a bucket of gradients."""

    number: int
    config: Config
    seed: int
    lengths: tuple[tuple[int, ...], ...]
    bucket: int

    @property
    def world(self) -> int:
        """Ranks."""
        return self.config.cluster.world

    @property
    def documents(self) -> RandomDocuments:
        """Where the tokens come from."""
        return RandomDocuments(self.seed, self.config.model.vocab, self.lengths)

    def alone(self) -> Case:
        """The same on one process, with memory for everything."""
        parallel, cluster = ParallelConfig(), replace(self.config.cluster, processes=1)
        return replace(self, config=replace(self.config, parallel=parallel, cluster=cluster, hardware=ample(self.config.hardware), plan=PlanConfig()))


@dataclass
class RandomDocuments:
    """Random tokens and targets by document id. Some documents are masked altogether, some but for one target; each step has a target."""

    seed: int
    vocab: int
    lengths: tuple[tuple[int, ...], ...]
    kept: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def read(self, document: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and labels of one document, int64 [n] each."""
        if document not in self.kept:
            step, index = divmod(document, ID_STRIDE)
            rng = np.random.default_rng([self.seed, document])
            tokens = rng.integers(0, self.vocab, self.lengths[step][index])
            labels = np.append(tokens[1:], IGNORE)
            longest = index == int(np.argmax(self.lengths[step]))
            labels[_hidden(rng, len(labels), longest)] = IGNORE
            self.kept[document] = tokens, labels
        return self.kept[document]

    def fill(self, ids: np.ndarray, starts: np.ndarray, tokens: np.ndarray, labels: np.ndarray) -> None:
        """Write documents to where a pack has them."""
        for document, start in zip(ids.tolist(), starts.tolist(), strict=True):
            text, targets = self.read(document)
            tokens[start : start + len(text)], labels[start : start + len(text)] = text, targets

    def step(self, index: int) -> StepDocuments:
        """The documents of one step."""
        lengths = np.array(self.lengths[index], dtype=np.int64)
        return StepDocuments(index, ID_STRIDE * index + np.arange(len(lengths)), lengths, 0.0)


def _hidden(rng: np.random.Generator, length: int, keep: bool) -> np.ndarray:
    """Which targets of a document are masked: none, some, all but one, all. keep: at least one has to stay."""
    kind, last = rng.random(), max(0, length - 2)  # the last token has no target anyway
    one = int(rng.integers(0, last + 1))
    if kind < 0.15 and not keep:
        return np.ones(length, bool)
    hidden = rng.random(length) < (1.0 if kind < 0.3 else 0.0 if kind < 0.6 else 0.5 if kind < 0.8 else 0.9)
    if kind < 0.3 or keep:
        hidden[one] = False
    return hidden


# ------------------------------------------------------------------------------------------------------------------ drawing
def draw_case(seed: int, number: int, processes: int) -> Case:
    """Case `number` of a seed: the same whatever other cases are drawn."""
    rng = random.Random(f"{seed} {number} {processes}")
    tp, pp, lanes = _draw_mesh(rng, processes)
    chunks = rng.choice((1, 2)) if pp > 1 else 1
    stages = [chunks + (rng.random() < 0.4) for _ in range(pp)]
    while sum(stages) < 2 or (sum(stages) < MOST_LAYERS and rng.random() < 0.3):
        stages[rng.randrange(pp)] += 1
    lengths = _draw_lengths(rng)
    longest = max(max(each) for each in lengths)
    model = _draw_model(rng, tp, sum(stages), longest)
    config = Config(
        run=RunConfig(name=f"case-{number}", seed=rng.randrange(1 << 30)),
        model=model,
        data=DataConfig(max_length=longest),
        parallel=ParallelConfig(tp, pp, chunks, tuple(stages), tp == 1 or rng.random() < 0.6),
        plan=_draw_plan(rng, min(stages), longest),
        precision=PrecisionConfig("fp32", "torch"),
        optim=OptimConfig(eps=ADAM_EPS, clip_norm=rng.choice((0.0, 1.0, 0.05))),
        cluster=ClusterConfig(processes=tp * pp * lanes, device="cpu", threads=1),
        hardware=_draw_hardware(rng),
    )
    if rng.random() < 0.3:
        config = _scarce(config, longest, rng.choice((0.6, 1.1, 2.0)))
    return Case(number, config, rng.randrange(1 << 30), lengths, rng.choice((500, 3000, 1 << 22)))


def _draw_mesh(rng: random.Random, processes: int) -> tuple[int, int, int]:
    """(tp, pp, lanes): all processes, or sometimes fewer."""
    sizes = [(tp, pp, lanes) for tp in (1, 2, 4) for pp in range(1, 5) for lanes in range(1, processes + 1)]
    full = [mesh for mesh in sizes if math.prod(mesh) == processes]
    fewer = [mesh for mesh in sizes if math.prod(mesh) < processes]
    return rng.choice(fewer if fewer and (rng.random() < 0.15 or not full) else full)


def _draw_lengths(rng: random.Random) -> tuple[tuple[int, ...], ...]:
    """Of each step: a few or many documents, from 1 token to long; one has at least 2, and so a target."""
    longest = rng.choice((12, 40, 120, 250))
    steps = []
    for _ in range(STEPS):
        count = rng.choice((1, 2, 4, 6, 9))
        lengths = [1 if rng.random() < 0.1 else round(math.exp(rng.uniform(0, math.log(longest)))) for _ in range(count)]
        lengths[rng.randrange(count)] = rng.choice((2, longest, longest - 1))
        steps.append(tuple(lengths))
    return tuple(steps)


def _draw_model(rng: random.Random, tp: int, layers: int, longest: int) -> ModelConfig:
    heads = rng.choice([heads for heads in (2, 4, 6, 8) if heads % tp == 0])
    kv_heads = rng.choice([kv for kv in range(1, heads + 1) if heads % kv == 0 and (kv % tp == 0 or tp % kv == 0)])
    learned, drops, qk_norm = rng.random() < 0.35, rng.random() < 0.4, rng.random() < 0.3
    scaling = rng.choice(("none", "none", "linear", "llama3", "yarn"))
    return ModelConfig(
        layers=layers,
        hidden=rng.choice((8, 12, 20, 32)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=8 if qk_norm else rng.choice((3, 4, 8) if learned else (4, 8)),  # a norm over fewer is ill-conditioned in fp32
        ffn=tp * rng.choice((3, 8, 16)),
        vocab=rng.randrange(11, 70),
        norm=rng.choice(("rmsnorm", "layernorm")),
        position="learned" if learned else "rope",
        max_position=longest + rng.choice((0, 5)) if learned else 0,
        rope=RopeConfig() if learned or scaling == "none" else RopeConfig(100.0, scaling, 4.0, 32),
        mlp=rng.choice(("swiglu", "swiglu", "gelu", "gelu_tanh", "squared_relu")),
        qkv_bias=rng.random() < 0.4,
        out_bias=rng.random() < 0.4,
        mlp_bias=rng.random() < 0.4,
        qk_norm=qk_norm,
        tied=rng.random() < 0.5,
        init_std=rng.choice((0.05, 0.15)),
        embedding_dropout=0.1 if drops else 0.0,
        residual_dropout=0.2 if drops else 0.0,
    )


def _draw_plan(rng: random.Random, layers: int, longest: int) -> PlanConfig:
    recompute = rng.choice(("auto", "auto", "auto", *LEVELS))
    some = rng.randint(1, layers) if recompute in LEVELS[1:] else 0
    return PlanConfig(pack_tokens=rng.choice((0, longest, 2 * longest)), recompute=recompute, recompute_layers=some)


def _draw_hardware(rng: random.Random) -> HardwareConfig:
    """A machine on which sharing documents pays (slow, quick to talk), or one on which it does not."""
    rate, latency = rng.choice(((1e7, 1e-7), (1e8, 1e-6), (6e10, 1e-3)))
    return HardwareConfig(
        name="drawn", gemm_flops=GemmFlops(rate, rate, rate), gemm_half_tokens=rng.choice((0.0, 16.0)), attention_flops=rate / 2,
        attention_half_length=rng.choice((0.0, 100.0)), node_bytes=4e9, net_bytes=1e9, node_latency=latency, ring_step_seconds=latency,
        layer_overhead_seconds=latency, tp_exposed=1.0, memory_bytes=AMPLE_BYTES, usable_fraction=0.9, loss_chunk=rng.choice((4, 16, 64)),
        gpus_per_node=8, reduce_bytes=2e9, reduce_overlap=0.0, memory_bandwidth=2e10,
    )  # fmt: skip


def ample(hardware: HardwareConfig) -> HardwareConfig:
    """The same with memory for everything."""
    return replace(hardware, memory_bytes=AMPLE_BYTES)


def _scarce(config: Config, longest: int, share: float) -> Config:
    """Memory for the longest document alone, `share` times, so that a planner has to recompute, pack less or cut it."""
    basis = basis_from(config)
    memory = MemoryModel(basis)
    one = Microbatch(0, 0, 1, (0,), padded_to([longest], 1, basis.align), Recompute())
    need = max(memory.static(stage, 0) + share * each for stage, each in enumerate(memory.peaks([one])))
    return replace(config, hardware=replace(config.hardware, memory_bytes=need / config.hardware.usable_fraction))


# -------------------------------------------------------------------------------------------------------------------- plans
def make_plans(case: Case) -> Plans:
    """Random plans, and the planner's own of both policies. Where they don't fit the drawn memory, there is enough of it."""
    plans: Plans = {"random": tuple(random_plan(case, step) for step in range(STEPS))}
    for policy in ("joint", "static"):
        config = replace(case.config, plan=replace(case.config.plan, policy=policy))
        try:
            plans[policy] = _planned(config, case)
        except UserError:
            plans[policy] = _planned(replace(config, hardware=ample(config.hardware), plan=PlanConfig(policy=policy)), case)
    return plans


def _planned(config: Config, case: Case) -> tuple[StepPlan, ...]:
    planner = planner_for(config)
    return tuple(planner(step, lengths) for step, lengths in enumerate(case.lengths))


def alone_plans(case: Case) -> tuple[StepPlan, ...]:
    """One process, every document alone in its microbatch, nothing padded, nothing recomputed."""
    basis = basis_from(case.alone().config)
    return tuple(
        assemble(basis, lengths, [Microbatch(slot, 0, 1, (slot,), (length,), Recompute()) for slot, length in enumerate(lengths)], step)
        for step, lengths in enumerate(case.lengths)
    )


def random_plan(case: Case, step: int) -> StepPlan:
    """A legal plan at random: packs, groups, slots with holes, padding, recompute and communication."""
    rng, basis = random.Random(f"{case.seed} {step}"), basis_from(replace(case.config, hardware=ample(case.config.hardware)))
    lengths, lanes, cost = case.lengths[step], basis.layout.lanes, CostModel(basis)
    ids = rng.sample(range(len(lengths)), len(lengths))
    most, sizes, slots = rng.choice((1, 2, 3, 6)), [cp for cp in (1, 2, 4, 8, 16) if cp <= lanes], rng.randint(1, 5)
    taken: set[tuple[int, int]] = set()
    made = []
    while ids:
        count = rng.randint(1, most)
        own, ids = ids[:count], ids[count:]
        cp, level = rng.choice(sizes), rng.choice(LEVELS)
        slot, lane = rng.randrange(slots), rng.randrange(lanes // cp) * cp
        while {(slot, lane + k) for k in range(cp)} & taken:
            slot += 1
        taken |= {(slot, lane + k) for k in range(cp)}
        recompute = Recompute(level, 0 if level == "none" else rng.randint(1, min(basis.stage_layers)))
        kinds = cost.legal_kinds(cp)
        padded = padded_to([lengths[one] for one in own], cp, basis.align, rng if rng.random() < 0.3 else None)
        made.append(Microbatch(slot, lane, cp, tuple(own), padded, recompute, rng.choice(kinds)))
    return assemble(basis, lengths, made, step)


def padded_to(lengths: Sequence[int], cp: int, align: int, extra: random.Random | None = None) -> tuple[int, ...]:
    """Each document to a multiple of 2 cp, then the last one until the sum is a multiple of cp * align. extra: some get more than needed."""
    unit = 2 * cp if cp > 1 else 1
    padded = [-(-length // unit) * unit + (unit * extra.randint(0, 2) if extra else 0) for length in lengths]
    while sum(padded) % (cp * align):
        padded[-1] += unit
    return tuple(padded)


def assemble(basis: Basis, lengths: Sequence[int], microbatches: Sequence[Microbatch], step: int) -> StepPlan:
    """The plan of these microbatches, verified."""
    cost, memory = CostModel(basis), MemoryModel(basis)
    scored = tuple(replace(one, seconds=round_seconds(cost.seconds(one)), bytes=round_bytes(memory.bytes(one))) for one in microbatches)
    plan = StepPlan(
        step, basis.layout, basis.schedule, basis.stage_layers, basis.model, basis.precision, basis.unit, basis.profile, tuple(lengths), scored,
        basis.lane_speed, Predicted(),
    )  # fmt: skip
    verify(plan)
    return plan


# --------------------------------------------------------------------------------------------------------------------- JSON
def case_to_json(case: Case, plans: Plans, dtypes: Sequence[str]) -> dict[str, Any]:
    """Everything that a proof needs: settings, where the documents come from, and the plans."""
    return {
        "case": case.number,
        "dtypes": list(dtypes),
        "documents": {"seed": case.seed, "lengths": [list(each) for each in case.lengths]},
        "bucket": case.bucket,
        "config": to_dict(case.config),
        "plans": {name: [to_json(plan) for plan in each] for name, each in plans.items()},
    }


def case_from_json(document: Any, source: str) -> tuple[Case, Plans, tuple[str, ...]]:
    """The case, its plans and the formats in which it was run. Plans may have been edited. UserError names what is wrong with the file."""
    try:
        documents = document["documents"]
        lengths = tuple(tuple(int(length) for length in each) for each in documents["lengths"])
        case = Case(int(document["case"]), from_dict(document["config"]), int(documents["seed"]), lengths, int(document["bucket"]))
        plans = {str(name): tuple(from_json(plan, check_hash=False) for plan in each) for name, each in document["plans"].items()}
        dtypes = tuple(str(each) for each in document["dtypes"])
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{source} is no replay file of tools/prove.py: {type(error).__name__} {error}") from None
    for name, made in plans.items():
        if [(plan.step, plan.lengths) for plan in made] != list(enumerate(lengths)):
            raise UserError(f"{source}: {name} plans are not those of steps 0 to {len(lengths) - 1} with the lengths of `documents`")
        for plan in made:
            verify(plan)
    if not plans or not lengths:
        raise UserError(f"{source} holds no plan")
    return case, plans, dtypes
