"""Runs and legal plans at random, for the property tests: nothing of the planner is used, plans are made as JSON objects."""

import functools
import itertools
import math
import random
from dataclasses import dataclass, fields, replace

import naive_simulation as naive
from hypothesis import strategies as st

from megadcp.config.schema import (
    ClusterConfig,
    Config,
    DataConfig,
    GemmFlops,
    HardwareConfig,
    ModelConfig,
    ParallelConfig,
    PlanConfig,
    PrecisionConfig,
    RunConfig,
)
from megadcp.plan.basis import basis_from
from megadcp.plan.step_plan import Recompute

H200 = HardwareConfig(
    "h200", GemmFlops(50e12, 480e12, 720e12), 512, 384e12, 600, 370e9, 45e9, 10e-6, 15e-6, 200e-6, 0.5, 141e9, 0.90, 4096, 8, 300e9, 0.7, 4e12
)
MODELS = (
    ModelConfig(hidden=256, heads=8, kv_heads=4, head_dim=32, ffn=640, vocab=1000),
    ModelConfig(hidden=1024, heads=16, kv_heads=16, head_dim=64, ffn=2816, vocab=32000, mlp="gelu", tied=True),
    ModelConfig(hidden=2048, heads=32, kv_heads=8, head_dim=64, ffn=8192, vocab=128256, tied=True),
    ModelConfig(hidden=512, heads=8, kv_heads=1, head_dim=64, ffn=1024, vocab=5000),
)
POWERS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Run:
    """The settings of a run that these tests vary."""

    model: int = 0
    stage_layers: tuple[int, ...] = (6,)
    virtual_stages: int = 1
    lanes: int = 1
    tp: int = 1
    sequence_parallel: bool = True
    gpus_per_node: int = 8
    precision: str = "bf16"
    lane_speed: tuple[float, ...] = ()
    max_cp: int = 0
    overhead: float = 200e-6  # seconds of a layer
    even: bool = False  # leave stage_layers to the package: needs an even division
    memory: float = 141e9

    def config(self, max_length=131072, **plan) -> Config:
        pp = len(self.stage_layers)
        hardware = replace(H200, gpus_per_node=self.gpus_per_node, layer_overhead_seconds=self.overhead, memory_bytes=self.memory)
        stages = () if self.even else self.stage_layers
        return Config(
            run=RunConfig(name="test"),
            model=replace(MODELS[self.model], layers=sum(self.stage_layers)),
            data=DataConfig(max_length=max_length),
            parallel=ParallelConfig(self.tp, pp, self.virtual_stages, stages, self.sequence_parallel, self.max_cp),
            plan=PlanConfig(lane_speed=self.lane_speed, **plan),
            precision=PrecisionConfig(self.precision),
            cluster=ClusterConfig(processes=self.lanes * self.tp * pp),
            hardware=hardware,
        )

    def basis(self):
        return basis_from(self.config())

    def document(self) -> dict:
        """A plan's JSON object without documents and microbatches, from these settings alone."""
        model, pp, v = MODELS[self.model], len(self.stage_layers), self.virtual_stages
        rate = {"fp32": 50e12, "bf16": 480e12}.get(self.precision, 720e12)
        profile = {item.name: float(getattr(H200, item.name)) for item in fields(HardwareConfig) if type(getattr(H200, item.name)) in (int, float)}
        profile |= {"loss_chunk": H200.loss_chunk}
        profile |= {"gemm_flops": rate, "gpus_per_node": self.gpus_per_node}
        profile |= {"layer_overhead_seconds": self.overhead, "memory_bytes": float(self.memory)}
        return {
            "version": 1,
            "step": 3,
            "layout": {
                "lanes": self.lanes,
                "lanes_per_node": max(1, self.gpus_per_node // self.tp),
                "tp": self.tp,
                "pp": pp,
                "virtual_stages": v,
                "sequence_parallel": self.sequence_parallel,
            },
            "schedule": "none" if pp == 1 else "1f1b" if v == 1 else "interleaved",
            "stage_layers": list(self.stage_layers),
            "model": {name: getattr(model, name) for name in ("hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "gated", "tied")}
            | {"layers": sum(self.stage_layers)},
            "precision": self.precision,
            "unit": naive.UNITS[self.precision],
            "profile": profile,
            "lane_speed": [float(f"{speed:.9g}") for speed in self.lane_speed],
            "lengths": [],
            "microbatches": [],
            "predicted": {"seconds": 0.0, "peak_bytes": [], "lower_bound_seconds": 0.0, "static_seconds": 0.0, "policy": ""},
        }


@st.composite
def runs(draw, most_lanes=64, pipelines=True, one_lane=False):
    """Layouts of every kind; memory is left at the device's own."""
    pp = draw(st.integers(1, 4)) if pipelines and draw(st.booleans()) else 1
    v = draw(st.sampled_from((1, 1, 2, 3))) if pp > 1 else 1
    even = draw(st.booleans())
    least = draw(st.integers(1, 4))
    stages = (v * least,) * pp if even else tuple(v - 1 + draw(st.integers(1, 5)) for _ in range(pp))
    lanes = 1 if one_lane else draw(st.one_of(st.integers(1, most_lanes), st.sampled_from([k for k in POWERS if k <= most_lanes])))
    speeds = ()
    if draw(st.integers(0, 3)) == 0:
        rng = random.Random(draw(st.integers(0, 999)))
        speeds = tuple(rng.choice((1.0, 1.0, 0.9, 0.5, 1.25, 1 / 3)) for _ in range(lanes))
    return Run(
        model=draw(st.integers(0, len(MODELS) - 1)),
        stage_layers=stages,
        virtual_stages=v,
        lanes=lanes,
        tp=draw(st.sampled_from((1, 1, 2, 4))),
        sequence_parallel=draw(st.booleans()),
        gpus_per_node=draw(st.sampled_from((8, 8, 4, 1, 6))),
        precision=draw(st.sampled_from(("bf16", "fp8_current", "fp8_block", "fp32"))),
        lane_speed=speeds,
        max_cp=draw(st.sampled_from((0, 0, *[k for k in POWERS if k <= lanes]))),
        overhead=draw(st.sampled_from((200e-6, 20e-6, 0.0))),
        even=even,
    )


@st.composite
def lengths(draw, most=200, longest=200_000):
    """A step's documents: any, all alike, skewed, one giant among many, or a few."""
    kind = draw(st.sampled_from(("any", "alike", "skewed", "giant", "few")))
    if kind == "any":
        return draw(st.lists(st.one_of(st.integers(1, 300), st.integers(1, longest)), min_size=1, max_size=min(30, most)))
    if kind == "few":
        return draw(st.lists(st.integers(1, longest), min_size=1, max_size=3))
    count = draw(st.integers(1, most))
    if kind == "alike":
        return [draw(st.integers(1, longest))] * min(count, 60)
    rng = random.Random(draw(st.integers(0, 10**6)))
    own = [min(longest, int(1 + 3000 * rng.lognormvariate(-1, 1.3))) for _ in range(count)]
    return [*own, longest] if kind == "giant" else own


def padded_to(own, cp, multiple):
    """Invariant 4's recipe: each document to its multiple, then the last one grown, one multiple at a time, until the sum fits."""
    step = 2 * cp if cp > 1 else 1
    padded = [length + -length % step for length in own]
    while sum(padded) % cp or sum(padded) // cp % multiple:
        padded[-1] += step
    return padded


def scored(doc):
    """The same plan with the seconds and bytes that belong to it."""
    for m in doc["microbatches"]:
        m["seconds"] = float(f"{max(naive.stage_seconds(doc, m)):.6g}")
        m["bytes"] = int(float(f"{naive.microbatch_bytes(doc, m):.6g}"))
    return doc


def legal_document(run: Run, own, rng: random.Random, room: float = 10.0):
    """A legal plan at random: packs, groups, slots with holes, recompute, communication; memory is `room` times what it needs."""
    doc = run.document()
    doc["lengths"] = list(own)
    ids = list(range(len(own)))
    rng.shuffle(ids)
    most = rng.choice((1, 2, 4, 12, 40))
    packs = []
    while ids:
        count = rng.randint(1, most)
        packs.append(ids[:count])
        ids = ids[count:]
    multiple = doc["unit"] * (run.tp if run.sequence_parallel else 1)
    sizes = [cp for cp in POWERS if cp <= run.lanes]
    sizes = rng.sample(sizes, rng.randint(1, len(sizes)))
    taken, slots = set(), 1 + rng.randint(0, 2 * len(packs) // run.lanes + 2)
    for pack in packs:
        cp = rng.choice(sizes)
        slots, slot, lane = _cell(run, taken, slots, cp, rng)
        level = rng.choice(naive.LEVELS)
        doc["microbatches"].append(
            {
                "slot": slot,
                "lane": lane,
                "cp": cp,
                "documents": pack,
                "padded": padded_to([own[one] for one in pack], cp, multiple),
                "recompute": {"level": level, "layers": 0 if level == "none" else rng.randint(1, min(run.stage_layers))},
                "cp_comm": rng.choice([kind for kind in ("none", *naive.KINDS) if naive.kind_is_legal(doc, kind, cp)]),
            }
        )
    scored(doc)
    return with_room(doc, room)


def with_room(doc, room):
    """The memory of the device: what the plan needs on its tightest stage, with `room` times the activations."""
    sizes, usable = naive.group_sizes(doc), doc["profile"]["usable_fraction"]
    need = max(naive.static_bytes(doc, stage, sizes) + room * peak for stage, peak in enumerate(naive.peaks(doc)))
    memory = float(f"{need / usable:.9g}")  # a plan carries 9 digits: up to the next that holds them all
    while True:
        doc["profile"]["memory_bytes"] = memory
        if all(peak <= naive.budget(doc, stage, sizes) for stage, peak in enumerate(naive.peaks(doc))):
            return doc
        memory = float(f"{memory * (1 + 1e-8):.9g}")


def _cell(run, taken, slots, cp, rng):
    """(slots, slot, lane) of a free place at random; one more slot when none of a few tries is free."""
    for _ in range(6):
        slot, lane = rng.randrange(slots), rng.randrange(run.lanes // cp) * cp
        cells = {(slot, lane + k) for k in range(cp)}
        if not cells & taken:
            taken |= cells
            return slots, slot, lane
    lane = rng.randrange(run.lanes // cp) * cp
    taken |= {(slots, lane + k) for k in range(cp)}
    return slots + 1, slots, lane


# ------------------------------------------------------------------------------------------------------ steps to be planned
@dataclass(frozen=True)
class Step:
    """A run with its plan settings, and the lengths of one step."""

    run: Run
    lengths: tuple[int, ...]
    max_length: int = 131072
    pack_tokens: int = 0
    recompute: str = "auto"
    recompute_layers: int = 0

    def config(self, policy: str = "joint") -> Config:
        named = dict(recompute=self.recompute, recompute_layers=self.recompute_layers)
        return self.run.config(self.max_length, policy=policy, pack_tokens=self.pack_tokens, **named)

    @property
    def capacity(self) -> int:
        """What static-best may pack together."""
        return min(self.max_length, self.pack_tokens or self.max_length)

    @property
    def choices(self) -> tuple[Recompute, ...]:
        """The recompute value that the run names; empty for auto."""
        if self.recompute == "auto":
            return ()
        return (Recompute(self.recompute, 0 if self.recompute == "none" else self.recompute_layers or min(self.run.stage_layers)),)

    @property
    def largest(self) -> int:
        """The largest group that the run allows."""
        return max(cp for cp in POWERS if min(self.run.lanes, self.run.max_cp or self.run.lanes) >= cp)


@st.composite
def steps(draw, most_lanes=64, pipelines=True, most=200, longest=200_000):
    """Steps of runs whose memory is anything from too little for the longest document to plenty."""
    run = draw(runs(most_lanes, pipelines).filter(lambda run: (len(run.stage_layers) > 1) == pipelines))
    own = tuple(draw(lengths(most, longest)))
    recompute = draw(st.sampled_from(("auto", "auto", "auto", *naive.LEVELS)))
    layers = draw(st.integers(0, min(run.stage_layers))) if recompute in naive.LEVELS[1:] else 0
    pack_tokens = draw(st.sampled_from((0, 0, 0, 5000, 100_000)))
    max_length = draw(st.sampled_from((131072, max(own), 2 * max(own))))
    room = draw(st.sampled_from((0.0, 0.9, 1.0, 1.00001, 1.05, 1.5, 4.0, 20.0)))
    step = Step(run, own, max_length, pack_tokens, recompute, layers)
    return replace(step, run=replace(run, memory=memory_for(step, room, draw(st.integers(0, 3))))) if room else step


def alone(step: Step, doc, length: int, cp: int):
    """The document alone on a group of `cp` lanes, padded, with each recompute value that the run allows."""
    step_of_cp = 2 * cp if cp > 1 else 1
    grain = math.lcm(step_of_cp, cp * doc["unit"] * (step.run.tp if step.run.sequence_parallel else 1))
    tokens = length + -length % grain
    values = [{"level": one.level, "layers": one.layers} for one in step.choices]
    if not values:
        most = min(step.run.stage_layers)
        values = [{"level": "none", "layers": 0}] + [{"level": level, "layers": n} for level in naive.LEVELS[1:] for n in range(1, most + 1)]
    return [{"padded": [tokens], "cp": cp, "recompute": value} for value in values]


def memory_for(step: Step, room: float, groups: int) -> float:
    """Bytes of a device with `room` times what the longest document needs, recomputed in full on the largest group, and `groups` sizes."""
    doc = step.run.document()
    m = alone(replace(step, recompute="full", recompute_layers=0), doc, max(step.lengths), step.largest)[0]
    stages = range(len(step.run.stage_layers))
    needs = [naive.stored_bytes(doc, m, stage) + naive.passing_bytes(doc, m, stage) for stage in stages]
    need = max(naive.static_bytes(doc, stage, groups) + room * needs[stage] for stage in stages)
    return float(f"{need / doc['profile']['usable_fraction'] * (1 + 1e-8):.9g}")


def can_be_planned(step: Step) -> bool:
    """Whether there is a plan at all: group sizes such that each document, alone in the pipeline, fits one of them or a single lane.

    A microbatch is alone when enough slots around it are empty, so nothing but its own bytes and the communicators' counts.
    """
    doc = step.run.document()
    stages = range(len(step.run.stage_layers))

    @functools.cache
    def need(length: int, cp: int, groups: int) -> bool:
        return any(
            all(naive.stored_bytes(doc, m, s) + naive.passing_bytes(doc, m, s) <= naive.budget(doc, s, groups) for s in stages)
            for m in alone(step, doc, length, cp)
        )

    sizes = [cp for cp in POWERS if 1 < cp <= step.largest]
    distinct = sorted(set(step.lengths), reverse=True)
    return any(
        all(any(need(length, cp, count) for cp in (1, *chosen)) for length in distinct)
        for count in range(len(sizes) + 1)
        for chosen in itertools.combinations(sizes, count)
    )
