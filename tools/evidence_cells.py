"""What tools/evidence.py computes: the grid, in the order in which it is worth having, and the lengths of each step's documents."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from bench_planner import planner

from megadcp.plan import presets
from megadcp.plan.planner import Planner

Line = dict[str, Any]

K = 1024
LAYOUTS = (("1b", 1, 1), ("8b", 1, 1), ("8b", 1, 4), ("70b", 8, 4))  # model, tp, pp
MAIN_GPUS, OTHER_GPUS = 32, (8, 128, 1024)
TOKENS, MAX_LENGTHS = (16 * K, 32 * K, 128 * K), (32 * K, 128 * K, 512 * K)  # per lane (times pp); of a document
OTHER_TOKENS, OTHER_MAX = (16 * K, 128 * K), 128 * K
SEEDS, OTHER_SEEDS, STUDY_SEEDS = 20, 3, 5
STUDY_TOKENS, STUDY_MAX = 32 * K, 128 * K
# Percent of documents in 256-2k, 2k-16k, 16k-128k, log-uniform inside each: this project's own mixes.
MIXES = {"short-dominated": (90, 9, 1), "balanced": (60, 30, 10), "long-dominated": (30, 40, 30)}
MIX_EDGES = (256, 2 * K, 16 * K, 128 * K)
MIX_LAYOUTS = LAYOUTS[:2]
SMOKE = ("wikipedia", "constant")


@dataclass(frozen=True)
class Job:
    """One result: a step (seed) of a cell. kind: step, ablation or sensitivity. tokens: per lane, before pp."""

    kind: str
    model: str
    tp: int
    pp: int
    gpus: int
    tokens: int
    max_length: int
    preset: str
    seed: int

    @property
    def lanes(self) -> int:
        """GPUs / (tp * pp); 0 where one copy of the model needs more GPUs."""
        return self.gpus // (self.tp * self.pp)

    @property
    def step_tokens(self) -> int:
        """Tokens of the whole step."""
        return self.lanes * self.tokens * self.pp

    def planner(self) -> Planner:
        """The planner of such a run on H200s in bf16."""
        return planner(self.model, self.tp, self.pp, self.lanes, self.max_length)

    def steps(self, count: int) -> list[list[int]]:
        """Lengths of the documents of a run's first `count` steps; the first one is the step of this job."""
        if self.preset not in MIXES:
            return presets.steps(self.preset, self.step_tokens, self.max_length, self.seed, count)
        return [mix(self.preset, self.step_tokens, self.seed, step) for step in range(count)]


class Cell(NamedTuple):
    """What the seeds of one cell have in common."""

    model: str
    tp: int
    pp: int
    gpus: int
    tokens: int
    max_length: int
    preset: str


def cell_of(line: Line) -> Cell:
    """The cell of a result."""
    return Cell(*(line[name] for name in Cell._fields))


def key_of(line: Line) -> tuple[Any, ...]:
    """What identifies a result."""
    return (line["kind"], *cell_of(line), line["seed"])


def mix(name: str, tokens: int, seed: int, step: int) -> list[int]:
    """Lengths of one step of a mix: documents until their sum is at least `tokens`."""
    random = np.random.default_rng([seed, step, *map(ord, name)])
    shares = np.array(MIXES[name]) / sum(MIXES[name])
    edges = np.log(np.array(MIX_EDGES, dtype=np.float64))
    lengths: list[int] = []
    total = 0
    while total < tokens:
        part = int(random.choice(len(shares), p=shares))
        lengths.append(int(np.exp(random.uniform(edges[part], edges[part + 1]))))
        total += lengths[-1]
    return lengths


# -------------------------------------------------------------------------------------------------------------------- the grid
def main_cells() -> list[Cell]:
    """On 32 GPUs, 20 seeds each; the mixes among them."""
    cells = [
        Cell(*layout, MAIN_GPUS, tokens, most, name) for layout in LAYOUTS for tokens in TOKENS for most in MAX_LENGTHS for name in presets.PRESETS
    ]
    return cells + [Cell(*layout, MAIN_GPUS, tokens, STUDY_MAX, name) for layout in MIX_LAYOUTS for tokens in TOKENS for name in MIXES]


def other_cells() -> list[Cell]:
    """On other numbers of GPUs, 3 seeds each."""
    return [
        Cell(*one, gpus, tokens, OTHER_MAX, name) for one in LAYOUTS for gpus in OTHER_GPUS for tokens in OTHER_TOKENS for name in presets.PRESETS
    ]


def ablation_cells() -> list[Cell]:
    """32 GPUs, but 128 for 70b, which has a single lane on 32; the mixes, too."""
    cells = [Cell(*one, 128 if one[0] == "70b" else MAIN_GPUS, STUDY_TOKENS, STUDY_MAX, name) for one in LAYOUTS for name in presets.PRESETS]
    return cells + [Cell(*one, MAIN_GPUS, STUDY_TOKENS, STUDY_MAX, name) for one in MIX_LAYOUTS for name in MIXES]


def sensitivity_cells() -> list[Cell]:
    """8b on 32 GPUs, without and with pipelines."""
    return [Cell(*one, MAIN_GPUS, STUDY_TOKENS, STUDY_MAX, name) for one in LAYOUTS[1:3] for name in presets.PRESETS]


def jobs(scope: str = "full") -> list[Job]:
    """All results in order: one seed after the other through everything, so that whatever is there covers all cells.

    scope: full; quick (32 GPUs, 32k tokens a lane, documents of at most 128k, 2 seeds; studies 1 seed); smoke (a handful).
    """
    if scope == "full":
        return list(_ordered(main_cells(), other_cells(), ablation_cells(), sensitivity_cells()))
    if scope == "quick":
        cells = [cell for cell in main_cells() if (cell.tokens, cell.max_length) == (STUDY_TOKENS, STUDY_MAX)]
        short = [cell for cell in ablation_cells() if cell.gpus == MAIN_GPUS]
        return [job for job in _ordered(cells, [], short, sensitivity_cells()) if job.seed <= (2 if job.kind == "step" else 1)]
    cells = [Cell(*layout, gpus, 4 * K, 32 * K, name) for layout, gpus in ((LAYOUTS[0], 8), (LAYOUTS[2], 8)) for name in SMOKE]
    cells += [Cell(*LAYOUTS[3], 8, 4 * K, 32 * K, SMOKE[0]), Cell(*LAYOUTS[0], 8, 4 * K, STUDY_MAX, "balanced")]
    return [job for job in _ordered(cells, [], cells[:1] + cells[2:3], cells[:1]) if job.seed <= (2 if job.kind == "step" else 1)]


def _ordered(cells: Sequence[Cell], others: Sequence[Cell], ablated: Sequence[Cell], varied: Sequence[Cell]) -> Iterator[Job]:
    for seed in range(1, SEEDS + 1):
        wanted = [("step", cell) for cell in cells]
        wanted += [("step", cell) for cell in others if seed <= OTHER_SEEDS]
        for kind, study in (("ablation", ablated), ("sensitivity", varied)):
            wanted += [(kind, cell) for cell in study if seed <= STUDY_SEEDS]
        found = [Job(kind, *cell, seed) for kind, cell in wanted]
        yield from sorted(found, key=_urgency)


def _urgency(job: Job) -> tuple[Any, ...]:
    """Within a seed: 32 GPUs first, of those the cells that the studies have, too; then small steps."""
    central = (job.tokens, job.max_length) == (STUDY_TOKENS, STUDY_MAX)
    return job.gpus != MAIN_GPUS, not central, job.step_tokens, job.kind, dataclasses.astuple(job)
