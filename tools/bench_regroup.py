"""Planned steps against static ones on the same documents, on several ranks of this machine.

`python tools/benchmark.py regroup [--quick] [--only timed|computed] [--preset wikipedia web] [options]`

Contestants: this trainer's plans (planned) and docs/plan.md's static-best, static-fixed and bucket, all run by this trainer. They take
turns within one run, and each is first in its turn. Two kinds of measurement:

timed, not computed: the plans of an 8b model on H200s at full length, on 4 and 8 ranks, with real groups, messages and schedule; where the
model would compute, a rank sleeps the predicted seconds, scaled so that a planned step takes 0.8 s, times seeded noise. It shows that
regrouping itself gains what is predicted of it; that the predicted seconds are a GPU's, it can't show. What this machine's messages take is
told by the same steps without sleeping: where that is much, large groups look slower than they are.

computed: the quickstart's model trains on this machine's CPU, lengths of the preset divided by --shrink. Wall clock where there is a core
for each rank; CPU seconds per token of all ranks together everywhere. Predictions are those of the plans, with the hardware profile cpu.

Measured: seconds from the first microbatch's begin to the last one's end on the slowest rank, summed over the steps. Predicted: the same
plans' makespans. A ratio is planned / other, turn by turn; below 1 planned is faster. Nothing is compared between two runs. Where the model
computes, one more step of each plan, untimed, tells the most bytes that a rank has alive in tensors made during the step; predicted are the
plans' activations.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_memory import LiveBytes
from bench_ranks import CPU, load_average, on_ranks, quartiles, ratios, rotated, spread, table
from bench_regroup_plans import POLICIES, contestants, predicted_bytes, predicted_seconds, shrunk
from bench_regroup_timed import SHRINK, Tempo, TimedLane
from benchmark import commit, machine

from megadcp.config.load import compose
from megadcp.config.schema import Config
from megadcp.data.batch import lane_packs
from megadcp.data.step_documents import IGNORE, StepDocuments
from megadcp.engine.agree import agree
from megadcp.engine.step import run_step
from megadcp.mesh.coords import Mesh
from megadcp.mesh.groups import GroupPool
from megadcp.parallel.collectives import all_reduce
from megadcp.plan.step_plan import StepPlan
from megadcp.train.state import new_state

ROOT = Path(__file__).resolve().parents[1]
TIMED, COMPUTED = "timed, not computed", "computed"
MAX_LENGTH = 131072  # tokens of the longest document, before shrinking
STEP_SECONDS = 0.8  # mean planned step when timed: most microbatches then sleep 10 to 300 ms, which is long against a message of this machine
LR = 1e-4

Line = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """One table row per contestant. tokens: per lane and stage, before shrinking."""

    kind: str
    preset: str
    lanes: int
    pp: int
    tokens: int
    shrink: int = 1

    @property
    def ranks(self) -> int:
        """Processes."""
        return self.lanes * self.pp

    @property
    def label(self) -> str:
        """For a reader."""
        return f"{self.preset}, {self.ranks} ranks" + (f" (pp={self.pp})" if self.pp > 1 else "")

    def config(self) -> Config:
        """The run that this stands for."""
        if self.kind == TIMED:
            base = compose(["model=gpt_8b", "hardware=h200", "precision=bf16", "run.name=bench_regroup"])
        else:
            base = compose(["experiment=quickstart"])
        return dataclasses.replace(
            base,
            data=dataclasses.replace(base.data, max_length=-(-MAX_LENGTH // self.shrink)),
            parallel=dataclasses.replace(base.parallel, pp=self.pp),
            cluster=dataclasses.replace(base.cluster, nodes=1, processes=self.ranks),
        )

    def steps(self, seed: int) -> list[list[int]]:
        """Lengths of a run's first steps."""
        return shrunk(self.preset, self.tokens * self.ranks, MAX_LENGTH, seed, self.shrink)


@dataclass(frozen=True)
class Job:
    """What the ranks run: every contestant's plans, `turns` times after one that does not count."""

    config: Config
    plans: dict[str, list[StepPlan]]
    turns: int
    tempo: Tempo

    def schedule(self) -> list[tuple[int, str]]:
        """(turn, contestant) in the order of running; turn -1 warms up."""
        names = list(self.plans)
        return [(turn, name) for turn in range(-1, self.turns) for name in rotated(names, turn + 1)]


class RandomDocuments:
    """Random tokens by document id, which is step * 2^20 + index."""

    def __init__(self, lengths: dict[int, Sequence[int]], vocab: int) -> None:
        self.lengths, self.vocab = lengths, vocab

    def read(self, document: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and next tokens of one document."""
        length = self.lengths[document >> 20][document & (1 << 20) - 1]
        tokens = np.random.default_rng(document).integers(0, self.vocab, length)
        return tokens, np.append(tokens[1:], IGNORE)

    def fill(self, ids: np.ndarray, starts: np.ndarray, tokens: np.ndarray, labels: np.ndarray) -> None:
        """Write each document to its place."""
        for document, start in zip(ids.tolist(), starts.tolist(), strict=True):
            text, targets = self.read(document)
            tokens[start : start + len(text)], labels[start : start + len(text)] = text, targets

    def step(self, index: int) -> StepDocuments:
        """The documents of a step."""
        lengths = np.array(self.lengths[index])
        return StepDocuments(index, (index << 20) + np.arange(len(lengths)), lengths, 0.0)


# --------------------------------------------------------------------------------------------------------------------- ranks
Entries = list[tuple[float, float, float]]


def timed_rank(rank: int, job: Job) -> tuple[Entries, dict[str, int]]:
    """(seconds, seconds without sleeping, 0) of each entry of the schedule, summed over the steps; no bytes."""
    found = []
    some = next(iter(job.plans.values()))[0].layout
    with GroupPool(Mesh(some.lanes, some.tp, some.pp), rank, CPU) as pool:
        for turn, name in job.schedule():
            tempo = dataclasses.replace(job.tempo, seed=job.tempo.seed + 1000 * (turn + 1))
            seconds: dict[float, list[float]] = {tempo.dilation: [], 0.0: []}
            for plan in job.plans[name]:
                for dilation, own in seconds.items():
                    lane = TimedLane(plan, pool, dataclasses.replace(tempo, dilation=dilation))
                    agree(plan, 0, None, pool)
                    own.append(lane.run())
            found.append((_slowest(seconds[tempo.dilation], pool), _slowest(seconds[0.0], pool), 0.0))
    return found, {}


def computed_rank(rank: int, job: Job) -> tuple[Entries, dict[str, int]]:
    """(seconds from first to last microbatch, of whole steps, CPU seconds of this rank) of each entry of the schedule, summed over the steps.

    And for each contestant the most bytes alive on this rank in a step.
    """
    found, memory = [], {}
    some = next(iter(job.plans.values()))
    layout = some[0].layout
    source = RandomDocuments({plan.step: plan.lengths for plan in some}, job.config.model.vocab)
    with GroupPool(Mesh(layout.lanes, layout.tp, layout.pp), rank, CPU, overlap=True) as pool:
        engine = new_state(job.config, CPU, pool=pool).engine
        lane = pool.coords.lane
        packs = {name: [lane_packs(source, source.step(plan.step), plan, lane) for plan in plans] for name, plans in job.plans.items()}
        for _, name in job.schedule():
            seconds, whole, cpu = [], [], 0.0
            for plan, own in zip(job.plans[name], packs[name], strict=True):
                all_reduce(torch.zeros(1), pool.world)
                begin, cpu_begin = time.perf_counter(), time.process_time()
                result = run_step(engine, plan, own, LR)
                cpu += time.process_time() - cpu_begin
                whole.append(time.perf_counter() - begin)
                seconds.append(result.measured_seconds)
                if not result.updated:
                    raise RuntimeError(f"{name}, step {plan.step}: {result.problem}")
            found.append((_slowest(seconds, pool), _slowest(whole, pool), cpu))
        for name, plans in job.plans.items():
            for plan, own in zip(plans, packs[name], strict=True):
                with LiveBytes() as live:
                    run_step(engine, plan, own, LR)
                memory[name] = max(memory.get(name, 0), live.peak)
    return found, memory


def _slowest(seconds: Sequence[float], pool: GroupPool) -> float:
    """Sum over the steps of what the slowest rank took."""
    return float(all_reduce(torch.tensor(seconds, dtype=torch.float64), pool.world, "max").sum())


# ------------------------------------------------------------------------------------------------------------------- one setup
def dilation_of(plans: Sequence[StepPlan]) -> float:
    """What makes a planned step STEP_SECONDS long, in the mean."""
    return STEP_SECONDS * len(plans) / predicted_seconds(plans)


def measure(setup: Setup, options: argparse.Namespace) -> list[Line]:
    """One line for every contestant and turn."""
    config, steps = setup.config(), setup.steps(options.seed)
    plans = contestants(config, steps, options.steps)
    timed = setup.kind == TIMED
    dilation = dilation_of(plans["planned"]) if timed else 1.0
    job = Job(config, plans, options.turns, Tempo(dilation, options.noise, options.seed))
    ranks = on_ranks(setup.ranks, timed_rank if timed else computed_rank, job, limit_s=options.limit)
    tokens = sum(sum(lengths) for lengths in steps[: options.steps])
    lines = []
    for (turn, name), *each in zip(job.schedule(), *(entries for entries, _ in ranks), strict=True):
        if turn < 0:
            continue
        line = {**dataclasses.asdict(setup), "policy": name, "turn": turn, "steps": options.steps, "step_tokens": tokens, "seed": options.seed}
        line |= {"seconds": each[0][0], "predicted": predicted_seconds(plans[name]) * dilation, "groups": groups_text(plans[name])}
        if timed:
            line |= {"dilation": dilation, "noise": options.noise, "without_sleep": each[0][1]}
        else:
            line |= {"whole_seconds": each[0][1], "cpu_seconds": sum(one[2] for one in each)}
            line |= {"memory": max(bytes_[name] for _, bytes_ in ranks), "memory_predicted": predicted_bytes(config, plans[name])}
        lines.append(line)
    return lines


def groups_text(plans: Sequence[StepPlan]) -> str:
    """How many microbatches have which cp: "1 x 12, 4 x 2"."""
    sizes = [one.cp for plan in plans for one in plan.microbatches]
    return ", ".join(f"{cp} x {sizes.count(cp)}" for cp in sorted(set(sizes)))


# ---------------------------------------------------------------------------------------------------------------------- report
def rows_of(lines: Sequence[Line], setup: Setup) -> list[list[str]]:
    """Table rows of one setup, planned first."""
    own = [line for line in lines if all(line[name] == value for name, value in dataclasses.asdict(setup).items())]
    by = {name: sorted((line for line in own if line["policy"] == name), key=lambda line: int(line["turn"])) for name in POLICIES}
    planned, rows = by["planned"], []
    on_wall = setup.kind == TIMED or (os.cpu_count() or 1) >= setup.ranks
    for name, turns in by.items():
        if not turns:
            rows.append([setup.label, name, "fits nowhere", *["-"] * (5 if setup.kind == TIMED else 6)])
            continue
        row = [setup.label, name, turns[0]["groups"]]
        seconds = [line["seconds"] for line in turns]
        milliseconds = [1e3 * value / turns[0]["steps"] for value in seconds]
        wall = [spread(milliseconds, 0), f"{1e3 * turns[0]['predicted'] / turns[0]['steps']:.0f}"]
        wall.append("-" if name == "planned" else f"**{spread(ratios([line['seconds'] for line in planned], seconds))}**")
        row += [*(wall if on_wall else ["-"] * 3)]
        row.append("-" if name == "planned" else f"{planned[0]['predicted'] / turns[0]['predicted']:.3f}")
        if setup.kind == COMPUTED:
            row.append(spread([1e6 * line["cpu_seconds"] / line["step_tokens"] for line in turns], 0))
            row.append(f"{turns[0]['memory'] / 1e6:.1f} ({turns[0]['memory_predicted'] / 1e6:.1f})")
        else:
            row.append(spread([1e3 * line["without_sleep"] / line["steps"] for line in turns], 0))
        rows.append(row)
    return rows


HEAD = ["setup", "contestant", "cp x microbatches", "ms a step: median (quartiles)", "predicted ms", "planned / it: measured", "predicted"]


def report(lines: Sequence[Line], setups: Sequence[Setup], notes: Sequence[str]) -> str:
    """The tables, as markdown."""
    text = "# Regrouping\n\n" + "".join(f"{note}  \n" for note in notes)
    for kind in (TIMED, COMPUTED):
        chosen = [setup for setup in setups if setup.kind == kind]
        if chosen:
            head = [*HEAD, *(["ms without sleeping"] if kind == TIMED else ["CPU us a token, all ranks", "MB of a rank (predicted)"])]
            text += f"\n## {kind.capitalize()}\n\n" + table(head, [row for setup in chosen for row in rows_of(lines, setup)])
    return text


def agreement(lines: Sequence[Line], setups: Sequence[Setup]) -> str:
    """The largest difference between measured (median) and predicted ratio among the timed ones, in a line."""
    worst, where = 0.0, "nothing was timed"
    for setup in setups:
        own = [line for line in lines if setup.kind == TIMED and all(line[name] == value for name, value in dataclasses.asdict(setup).items())]
        planned = [line for line in own if line["policy"] == "planned"]
        for name in POLICIES[1:]:
            other = [line for line in own if line["policy"] == name]
            if other:
                measured = quartiles(ratios([line["seconds"] for line in planned], [line["seconds"] for line in other]))[1]
                difference = abs(measured / (planned[0]["predicted"] / other[0]["predicted"]) - 1)
                if difference >= worst:
                    worst, where = difference, f"{difference:.1%} ({setup.label}, {name})"
    return f"largest difference of a timed ratio from its prediction: {where}"


def setups_of(options: argparse.Namespace) -> list[Setup]:
    """What is run."""
    found = []
    for preset in options.preset:
        if options.only != "computed":
            timed = ((4, 1), (8, 1), (4, 2)) if not options.quick else ((4, 1), (8, 1))
            found += [Setup(TIMED, preset, lanes, pp, options.tokens) for lanes, pp in timed]
        if options.only != "timed":
            ranks = (2,) if options.quick else (2, 4)
            found += [Setup(COMPUTED, preset, lanes, 1, options.tokens, options.shrink) for lanes in ranks]
    return found


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmark.py regroup", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer setups, steps and turns, in under two minutes; into quick.jsonl and quick.md")
    parser.add_argument("--only", choices=("timed", "computed"), help="one kind of measurement")
    parser.add_argument("--preset", nargs="+", default=[], help="length distributions (wikipedia web; quick: wikipedia)")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens per lane and stage of a step, before shrinking")
    parser.add_argument("--shrink", type=int, default=32, help="what lengths are divided by where the model computes")
    parser.add_argument("--steps", type=int, default=0, help="steps in a turn, of the first eight (3; quick: 2)")
    parser.add_argument("--turns", type=int, default=0, help="turns that count (5; quick: 2)")
    parser.add_argument("--noise", type=float, default=0.03, help="of a timed action: standard deviation of its logarithm")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="of one setup; then the stacks of all ranks are shown")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "regroup", help="folder of results and report")
    options = parser.parse_args(argv)
    options.preset = options.preset or (["wikipedia"] if options.quick else ["wikipedia", "web"])
    options.steps = options.steps or (2 if options.quick else 3)
    options.turns = options.turns or (2 if options.quick else 5)
    return options


def main(argv: list[str]) -> int:
    """Run all setups, write lines and report after each, print the report."""
    options = _arguments(argv)
    setups, begin = setups_of(options), load_average()
    lines: list[Line] = []
    text = ""
    for number, setup in enumerate(setups, start=1):
        started = time.monotonic()
        lines += measure(setup, options)
        print(f"{setup.label}, {setup.kind}: {time.monotonic() - started:.0f} s", flush=True)
        text = report(lines, setups[:number], _notes(lines, setups[:number], options, begin))
        _write(options, lines, text)
    print("\n" + text.rstrip())
    return 0


def _notes(lines: Sequence[Line], setups: Sequence[Setup], options: argparse.Namespace, begin: str) -> list[str]:
    return [
        f"{machine()}, torch {torch.__version__}; {begin} before, {load_average()} after; {options.turns} turns of {options.steps} steps, "
        f"seed {options.seed}, {options.tokens:,} tokens per lane and stage, longest document {MAX_LENGTH:,}",
        f"timed: 8b model, H200 profile, noise {options.noise:.0%}, messages with 1/{SHRINK} of their rows; "
        f"computed: quickstart's model, fp32, one thread a rank, tokens and lengths divided by {options.shrink}",
        agreement(lines, setups),
        f"commit {commit()}, {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}",
    ]


def _write(options: argparse.Namespace, lines: Sequence[Line], text: str) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    names = ("quick.jsonl", "quick.md") if options.quick else ("results.jsonl", "report.md")
    (options.out / names[0]).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (options.out / names[1]).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
