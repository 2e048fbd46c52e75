"""What tools/calibrate.py measures on one rank: matrix products, attention, whole microbatches, steps, the optimizer.

Legend: t tokens of a microbatch, l length of one document, h hidden, H query heads, G kv heads, d head dim, f inner width.
Every sample is measured once per round, the rounds one after another, and its median counts: drift of the machine hits all samples alike.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megadcp.config.schema import Config
from megadcp.data.batch import Pack, build_pack, lane_packs
from megadcp.data.step_documents import IGNORE, StepDocuments
from megadcp.engine.lane import run_lane
from megadcp.engine.measure import Stopwatch
from megadcp.engine.placement import Placement
from megadcp.engine.step import prepare, run_step, to_device
from megadcp.mesh.groups import GroupPool
from megadcp.nn.backend import PackedTokens
from megadcp.plan.planner import planner_for
from megadcp.plan.step_plan import Microbatch, Recompute, StepPlan

if TYPE_CHECKING:  # gpu_check measures with a state of its own where training's needs are not installed
    from megadcp.train.state import TrainState

SHORTEST_SECONDS = 2e-3  # shorter work is repeated within one measurement
LEAST_ROUNDS = 2
LEVELS = ("selective", "mlp", "full")


class Span(NamedTuple):
    """What a piece of work took: seconds of the chosen clock, and of the wall's."""

    seconds: float
    wall: float


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    rounds: int = 9
    sizes: int = 7  # of packs and documents, between the smallest and the largest
    steps: int = 12  # held out
    seconds: float = 30.0  # after which a set of samples gets no more rounds than LEAST_ROUNDS


QUICK = Effort(rounds=3, sizes=4, steps=3, seconds=5.0)


@dataclass(frozen=True)
class Sample:
    """One microbatch: the lengths of its documents, how it was recomputed, and what forward and backward took."""

    lengths: tuple[int, ...]
    recompute: Recompute
    seconds: float
    wall: float


@dataclass
class Compute:
    """Everything that is measured without other ranks. Pairs are (forward, backward) seconds by t, or by the lengths of a pack."""

    linear: dict[int, tuple[float, float]] = field(default_factory=dict)
    attention: dict[tuple[int, ...], tuple[float, float]] = field(default_factory=dict)
    fitted: list[Sample] = field(default_factory=list)
    held_out: list[Sample] = field(default_factory=list)
    recomputed: list[Sample] = field(default_factory=list)
    optimizer_seconds: float = 0.0


# ----------------------------------------------------------------------------------------------------------------------- clocks
class Clock:
    """Seconds of work on a device.

    On a CPU with one thread they are CPU seconds of this process: other programs on a shared machine don't count. With several threads they
    are the wall's; on a GPU its own, from before the work is issued to its end.
    """

    def __init__(self, device: torch.device, threads: int) -> None:
        self.device = device
        self.cpu = device.type == "cpu" and threads == 1

    @property
    def name(self) -> str:
        """What its seconds are."""
        return "CPU seconds of the process" if self.cpu else "seconds of the GPU" if self.device.type == "cuda" else "wall clock"

    def span(self, work: Callable[[], object]) -> Span:
        """What one call takes."""
        self.wait()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self.device.type == "cuda" else []
        wall, cpu = time.perf_counter(), time.process_time()
        for event in events[:1]:
            event.record()
        work()
        for event in events[1:]:
            event.record()
        self.wait()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if events:
            return Span(events[0].elapsed_time(events[1]) / 1000, wall)
        return Span(cpu if self.cpu else wall, wall)

    def wait(self) -> None:
        """Until the device has done all."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def medians(jobs: dict[Hashable, Callable[[], Sequence[float]]], effort: Effort) -> dict[Hashable, tuple[float, ...]]:
    """The median of each number that each job gives, over the rounds; one more round comes first and doesn't count."""
    found: dict[Hashable, list[Sequence[float]]] = {key: [] for key in jobs}
    begin = time.perf_counter()
    for each in range(effort.rounds + 1):
        if each > LEAST_ROUNDS and time.perf_counter() - begin > effort.seconds:
            break
        for key, job in jobs.items():
            numbers = job()
            if each:
                found[key].append(numbers)
    return {key: tuple(statistics.median(column) for column in zip(*rows, strict=True)) for key, rows in found.items()}


# ------------------------------------------------------------------------------------------------------------------------ sizes
def geometric(least: int, most: int, count: int) -> list[int]:
    """About `count` whole numbers from least to most, each the same factor above the one before."""
    least = min(least, most)
    return sorted({round(least * (most / least) ** (step / max(1, count - 1))) for step in range(count)})


def mixed(total: int, scale: float, longest: int, random: np.random.Generator) -> tuple[int, ...]:
    """Lengths of documents around `scale` tokens (exponential), at most `longest`, that sum to `total`."""
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(left, max(1, min(longest, round(random.exponential(scale))))))
    return tuple(lengths)


def packs_to_fit(tokens: int, longest: int, effort: Effort, seed: int) -> list[tuple[int, ...]]:
    """Packs from small to `tokens`, of short, middling and long documents."""
    random = np.random.default_rng(seed)
    scales = [longest / 32, longest / 6, longest * 2]
    return [mixed(total, max(2.0, scale), longest, random) for total in geometric(max(8, tokens // 64), tokens, effort.sizes) for scale in scales]


def packs_to_test(tokens: int, longest: int, effort: Effort, seed: int) -> list[tuple[int, ...]]:
    """Other packs, whose sizes and kinds of documents are drawn."""
    random = np.random.default_rng([seed, 1])
    drawn = []
    for _ in range(3 * effort.sizes):
        total = int(math.exp(random.uniform(math.log(max(8, tokens // 32)), math.log(tokens))))
        drawn.append(mixed(total, longest * random.uniform(0.02, 1.0), longest, random))
    return drawn


# ----------------------------------------------------------------------------------------------------------------- microbatches
class RandomDocuments:
    """Random tokens by document id."""

    def __init__(self, lengths: Sequence[int], vocab: int) -> None:
        self.lengths, self.vocab = lengths, vocab

    def read(self, document: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and next tokens of one document."""
        tokens = np.random.default_rng(document).integers(0, self.vocab, self.lengths[document])
        return tokens, np.append(tokens[1:], IGNORE)

    def fill(self, ids: np.ndarray, starts: np.ndarray, tokens: np.ndarray, labels: np.ndarray) -> None:
        """Write documents `ids` into the arrays of a pack, each from its place on."""
        for document, start in zip(ids.tolist(), starts.tolist(), strict=True):
            place = slice(start, start + self.lengths[document])
            tokens[place], labels[place] = self.read(document)


def microbatch_of(lengths: Sequence[int], recompute: Recompute | None = None) -> Microbatch:
    """All documents on one lane."""
    return Microbatch(0, 0, 1, tuple(range(len(lengths))), tuple(lengths), recompute or Recompute())


def pack_of(lengths: Sequence[int], one: Microbatch, vocab: int) -> Pack:
    """The tokens of one microbatch of a step with these lengths."""
    documents = StepDocuments(0, np.arange(len(lengths)), np.array(lengths), 0.0)
    return build_pack(RandomDocuments(lengths, vocab), documents, one)


class Bench:
    """The real model with its gradients and optimizer on one device."""

    def __init__(self, config: Config, device: torch.device, clock: Clock, pool: GroupPool | None = None, state: TrainState | None = None) -> None:
        """state: made from the config where it isn't given; anything with a model, its gradients, an optimizer and an engine will do."""
        self.config, self.device, self.clock = config, device, clock
        if state is None:
            from megadcp.train.state import new_state

            state = new_state(config, device, pool=pool)
        self.state: TrainState = state

    def microbatch(self, pack: Pack, placement: Placement) -> Span:
        """Forward and backward of one microbatch, as the engine runs it."""

        def run() -> None:
            batch = to_device(pack, self.device)
            self.state.model(batch, placement).backward()

        return self.clock.span(run)

    def samples(self, packs: Sequence[tuple[int, ...]], recompute: Sequence[Recompute], effort: Effort) -> list[Sample]:
        """Every pack at its recompute value."""
        jobs: dict[Hashable, Callable[[], Sequence[float]]] = {}
        for number, (lengths, value) in enumerate(zip(packs, recompute, strict=True)):
            one = microbatch_of(lengths, value)
            pack, placement = pack_of(lengths, one, self.config.model.vocab), Placement.of(0, one)
            jobs[number] = lambda pack=pack, placement=placement: self._zeroed(pack, placement)  # type: ignore[misc]
        found = medians(jobs, effort)
        return [Sample(tuple(packs[number]), recompute[number], *found[number]) for number in range(len(packs))]

    def _zeroed(self, pack: Pack, placement: Placement) -> Span:
        self.state.gradients.zero()
        return self.microbatch(pack, placement)

    def optimizer_seconds(self, effort: Effort) -> float:
        """Seconds of one AdamW step over all parameters."""
        for gradient in self.state.gradients.sums():
            gradient.fill_(1e-3)
        return medians({0: lambda: self.clock.span(lambda: self.state.optimizer.step(1e-6))}, effort)[0][0]

    def steps(self, plans: Sequence[StepPlan], effort: Effort) -> list[Span]:
        """Forward and backward of all microbatches that this rank has of each plan, as the engine runs and measures them.

        seconds: their sum by the clock (waiting for other ranks is no CPU time); wall: `measured_seconds` of run_step.
        """
        jobs: dict[Hashable, Callable[[], Sequence[float]]] = {}
        for number, plan in enumerate(plans):
            documents = StepDocuments(plan.step, np.arange(len(plan.lengths)), np.array(plan.lengths), 0.0)
            packs = lane_packs(RandomDocuments(plan.lengths, self.config.model.vocab), documents, plan, self.state.engine.coords.lane)
            jobs[number] = lambda plan=plan, packs=packs: self._step(plan, packs)  # type: ignore[misc]
        found = medians(jobs, effort)
        return [Span(*found[number]) for number in range(len(plans))]

    def _step(self, plan: StepPlan, packs: list[Pack]) -> Span:
        engine = self.state.engine
        wall = run_step(engine, plan, packs, 0.0).measured_seconds
        if not self.clock.cpu:
            return Span(wall, wall)
        shares, targets = prepare(engine, plan, packs)
        engine.gradients.zero()
        watch = CpuStopwatch(self.device)
        engine.gradients.finish(run_lane(engine, plan, shares, watch), max(1, targets), 0.0)
        return Span(sum(seconds for seconds, _ in watch.read().values()), wall)


class CpuStopwatch(Stopwatch):
    """The engine's stopwatch with CPU seconds."""

    def _mark(self) -> object:
        return time.process_time()


# ------------------------------------------------------------------------------------------------------------------- one kernel
def both_ways(clock: Clock, forward: Callable[[], Tensor]) -> tuple[float, float]:
    """Seconds of forward and backward of a function of tensors that need gradients, repeated until there is something to measure."""
    spent = [0.0, 0.0]
    times = 0
    while times == 0 or (sum(spent) < SHORTEST_SECONDS and times < 1000):
        made: list[Tensor] = []
        spent[0] += clock.span(lambda made=made: made.append(forward())).seconds  # type: ignore[misc]
        out = made[0]
        slope = torch.ones_like(out)
        spent[1] += clock.span(lambda out=out, slope=slope: out.backward(slope)).seconds  # type: ignore[misc]
        times += 1
    return spent[0] / times, spent[1] / times


def linear_jobs(config: Config, device: torch.device, clock: Clock, sizes: Sequence[int]) -> dict[Hashable, Callable[[], Sequence[float]]]:
    """The four matrix products of a layer one after the other, for t tokens each."""
    from megadcp.train.state import model_dtype

    model, dtype = config.model, model_dtype(config)
    h, wide = model.hidden, (2 if model.gated else 1) * model.ffn
    query, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    shapes = [(query + 2 * keys, h), (h, query), (wide, h), (h, model.ffn)]
    weights = [torch.randn(shape, dtype=dtype, device=device).mul_(0.02).requires_grad_() for shape in shapes]

    def job(tokens: int) -> Callable[[], Sequence[float]]:
        inputs = [torch.randn(tokens, width, dtype=dtype, device=device, requires_grad=True) for _, width in shapes]

        def measure() -> Sequence[float]:
            for one in [*weights, *inputs]:
                one.grad = None
            pairs = [
                both_ways(clock, lambda x=x, w=w: torch.nn.functional.linear(x, w))  # type: ignore[misc]
                for x, w in zip(inputs, weights, strict=True)
            ]
            return [sum(pair[way] for pair in pairs) for way in (0, 1)]

        return measure

    return {tokens: job(tokens) for tokens in sizes}


def attention_jobs(bench: Bench, packs: Sequence[tuple[int, ...]]) -> dict[Hashable, Callable[[], Sequence[float]]]:
    """Core attention of one layer, as the backend does it, over documents of these lengths."""
    model, device, dtype = bench.config.model, bench.device, next(bench.state.model.parameters()).dtype
    core = bench.state.model.layers["0"].attention.core  # type: ignore[union-attr]

    def job(lengths: tuple[int, ...]) -> Callable[[], Sequence[float]]:
        one = microbatch_of(lengths)
        batch: PackedTokens = to_device(pack_of(lengths, one, model.vocab), device)
        tensors = [
            torch.randn(sum(lengths), heads, model.head_dim, dtype=dtype, device=device, requires_grad=True)
            for heads in (model.heads, model.kv_heads, model.kv_heads)
        ]

        def measure() -> Sequence[float]:
            for tensor in tensors:
                tensor.grad = None
            return both_ways(bench.clock, lambda: core(*tensors, batch, Placement.of(0, one)))  # type: ignore[operator]

        return measure

    return {lengths: job(lengths) for lengths in packs}


def near(length: int, tokens: int) -> tuple[int, ...]:
    """Documents of about `length` tokens, no two neighbours alike (equal ones would be one kernel call), about `tokens` in all."""
    count = max(1, min(64, tokens // length))
    return tuple(max(1, length + (number % 2) * (1 if length < 8 else -1)) for number in range(count))


def measure_compute(config: Config, device: torch.device, tokens: int, effort: Effort, seed: int) -> Compute:
    """All of it on this rank, microbatches of up to `tokens`."""
    clock, longest = Clock(device, torch.get_num_threads()), min(config.data.max_length, tokens)
    bench, found = Bench(config, device, clock), Compute()
    linear = medians(linear_jobs(config, device, clock, geometric(4, tokens, effort.sizes + 2)), effort)
    found.linear = {int(key): (pair[0], pair[1]) for key, pair in linear.items()}  # type: ignore[call-overload]
    packs = [near(length, min(tokens, 4 * longest)) for length in geometric(8, longest, effort.sizes + 1)]
    attention = medians(attention_jobs(bench, packs), effort)
    found.attention = {key: (pair[0], pair[1]) for key, pair in attention.items()}  # type: ignore[misc]
    plain = Recompute()
    fitting, testing = packs_to_fit(tokens, longest, effort, seed), packs_to_test(tokens, longest, effort, seed)
    samples = bench.samples([*fitting, *testing], [plain] * (len(fitting) + len(testing)), effort)
    found.fitted, found.held_out = samples[: len(fitting)], samples[len(fitting) :]
    again = [(pack, Recompute(level, config.model.layers)) for level in LEVELS for pack in testing[: effort.sizes]]
    found.recomputed = bench.samples([pack for pack, _ in again], [value for _, value in again], effort)
    found.optimizer_seconds = bench.optimizer_seconds(effort)
    return found


def measure_steps(
    config: Config, device: torch.device, tokens: int, effort: Effort, seed: int, pool: GroupPool | None = None
) -> list[tuple[float, Span]]:
    """(predicted seconds, what it took here) of whole steps: planned by the real planner with the config's profile, run by the real engine."""
    random = np.random.default_rng([seed, 2])
    longest = min(config.data.max_length, tokens)
    planner = planner_for(replace(config, plan=replace(config.plan, pack_tokens=tokens)))
    plans = []
    for step in range(effort.steps):
        total = int(tokens * config.cluster.processes * random.uniform(0.5, 2.5))
        plans.append(planner(step, list(mixed(total, longest * random.uniform(0.05, 1.0), longest, random))))
    bench = Bench(config, device, Clock(device, torch.get_num_threads()), pool)
    rounds = replace(effort, rounds=3, seconds=math.inf) if pool is not None else effort  # all ranks make the same ones
    return [(plan.predicted.seconds, span) for plan, span in zip(plans, bench.steps(plans, rounds), strict=True)]


# ---------------------------------------------------------------------------------------------------------------------- device
def device_bytes(device: torch.device, ranks: int) -> float:
    """Memory of a GPU; on a CPU this rank's share of what the machine, or the container, has."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path, encoding="ascii") as file:
                total = min(total, int(file.read()))
        except (OSError, ValueError):  # no such limit
            continue
    return total / ranks
