"""Plan steps, look at recorded plans, and ask what if: no GPU, no torch.

    python tools/plan.py model=gpt_8b cluster=h200_4x8 precision=bf16 lengths=FILE.json out=PLAN.json
    python tools/plan.py model=gpt_8b cluster=h200_4x8 precision=bf16 preset=wikipedia tokens_per_lane=16384 seed=1 steps=10
    python tools/plan.py experiment=gpt_8b step=0 steps=4                          the steps of a run over its corpus
    python tools/plan.py replay runs/NAME                                          prove, score and draw recorded plans again
    python tools/plan.py what-if runs/NAME model=gpt_8b cluster=h200_4x8           the same documents on something else

Settings are those of pretrain_gpt.py, written the same way (docs/config.md). The tool's own keys:
KEYS
With lengths= or preset= data.max_length is 131072 unless it or experiment= is given. A preset's step has tokens_per_lane x lanes x pp
tokens. Exit codes: 0 done, 1 a recorded plan is broken (or the disk is), 2 the request can't be met.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from plan_files import check_outputs, find_plans, read_lengths, recorded, write_file, write_plans
from plan_settings import KEYS, Request, compose, compose_what_if, parse, peak_flops

from megadcp.config.check import UserError
from megadcp.plan.basis import Basis, basis_from
from megadcp.plan.figures import Figures, figures
from megadcp.plan.lower_bound import lower_bound
from megadcp.plan.report import Beside, Side, comparison_lines, layout_line, summary_lines, table_lines
from megadcp.plan.simulate import simulate
from megadcp.plan.step_plan import PlanFormatError, StepPlan
from megadcp.plan.verify import PlanError, verify

if TYPE_CHECKING:
    from megadcp.config.schema import Config

TOKENS_PER_LANE = 32768
WHAT_IF_STEPS = 10  # of a longer record, unless steps= says more
SCORE_TOLERANCE = 1e-5  # a recorded figure has 6 digits
PEER = "megatron-balanced"
BROKEN, WRONG, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141
PICTURES = ("svg", "trace", "histogram")


class Notes:
    """What was decided in the person's place, and what deserves attention. Shown above the result; an error stands alone."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, line: str) -> None:
        """Keep one."""
        self.lines.append(line)

    def show(self) -> None:
        """Print what has come so far."""
        for line in self.lines:
            print(f"note         {line}")
        self.lines.clear()


# ----------------------------------------------------------------------------------------------------------------- planning
def plan_steps(request: Request, say: Notes) -> int:
    """Plan what lengths=, preset= or the corpus gives, and say all about it."""
    lengths = read_lengths(request.own["lengths"]) if "lengths" in request.own else None
    config = compose(request, say)
    steps = dict(_documents(request, config, lengths, say))
    check_outputs(_outputs(request), len(steps), request.flag("overwrite", False))
    basis, plans, planning = _planned(config, steps)
    shown = [figures(plan) for plan in plans]
    beside = Beside(config.hardware.peak_flops, config.hardware.name, _baselines(request, config, basis, plans), _bound_1f1b(basis, plans), planning)
    say.show()
    print(f"model        {_chosen(request, 'model', config)}, precision {config.precision.format}, {config.plan.policy} policy")
    print(f"hardware     {config.hardware.name} in cluster {config.cluster.name}")
    print(f"layout       {layout_line(basis)}")
    _print_steps(basis, shown, beside)
    _write(request, plans)
    return 0


def _documents(request: Request, config: Config, given: list[list[int]] | None, say: Notes) -> Iterator[tuple[int, Sequence[int]]]:
    """(step, lengths) of every step that was asked for."""
    first = request.number("step", 0)
    if given is not None:
        count = request.number("steps", len(given) - first)
        if first + count > len(given) or count < 1:
            raise UserError(
                f"lengths={request.own['lengths']} holds {len(given)} step{'s' if len(given) > 1 else ''}, step 0 to {len(given) - 1}; "
                f"asked for: step={first}" + (f" steps={count}" if "steps" in request.own else "")
            )
        longest = max(max(step) for step in given[first : first + count])
        if longest > config.data.max_length:
            say(
                f"the longest document has {longest} tokens, more than data.max_length={config.data.max_length}: "
                "a run would cut it; planned whole here"
            )
        yield from ((step, given[step]) for step in range(first, first + count))
        return
    count = request.number("steps", 1, least=1)
    if "preset" in request.own:
        from megadcp.plan.presets import draw

        layout, per_lane = basis_from(config).layout, request.number("tokens_per_lane", TOKENS_PER_LANE, least=1)
        tokens = per_lane * layout.lanes * layout.pp
        times = f" x pp {layout.pp}" if layout.pp > 1 else ""
        how = f"{per_lane} x {layout.lanes} lane{'s' if layout.lanes > 1 else ''}{times}"
        say(f"preset {request.own['preset']}: {tokens} tokens a step ({how}), documents up to {config.data.max_length}")
        for step in range(first, first + count):
            yield step, draw(request.own["preset"], tokens, config.data.max_length, request.number("seed", 1), step)
        return
    from megadcp.data.order import open_training

    for source in config.data.train:
        if not Path(f"{source.prefix}.idx").is_file():
            how = "python pretrain_gpt.py makes it at its start"
            if config.data.prepare.kind == "none":
                how = f"make it with python tools/preprocess_data.py --input TEXTS --tokenizer FILE --append-eod --output-prefix {source.prefix}"
            raise UserError(f"the corpus {source.prefix}.bin and .idx does not exist; {how}; or give lengths=FILE.json or preset=NAME")
    training = open_training(config.data, config.run.steps, say)
    for step in range(first, first + count):
        yield step, training.step(step).lengths.tolist()


def _planned(config: Config, steps: dict[int, Sequence[int]]) -> tuple[Basis, list[StepPlan], list[float]]:
    """(basis, plans, seconds that planning took)."""
    from megadcp.plan.planner import planner_for

    planner = planner_for(config)
    plans, seconds = [], []
    for step, lengths in steps.items():
        begin = time.perf_counter()
        plans.append(planner(step, lengths))
        seconds.append(time.perf_counter() - begin)
        verify(plans[-1])
    return Basis.of(plans[0]), plans, seconds


def _chosen(request: Request, group: str, config: Config) -> str:
    """What a group was chosen to be on the command line; else its size says what it is."""
    for override in request.overrides:
        if override.startswith(f"{group}="):
            return override.partition("=")[2]
    model = config.model
    return f"of {model.layers} layers, hidden {model.hidden}"


def _baselines(request: Request, config: Config, basis: Basis, plans: Sequence[StepPlan]) -> dict[str, Sequence[float] | str]:
    """Makespans of the systems a plan must beat; static-best alone, from the plans themselves, with baselines=false."""
    static = [plan.predicted.static_seconds or float("inf") for plan in plans]
    if not request.flag("baselines", True):
        return {"static-best": static}
    from megadcp.plan.baselines import compare

    peers, found = request.flag("peers", False), dict[str, Sequence[float] | str]()
    if config.plan.recompute != "auto" or config.plan.pack_tokens:
        found["static-best within plan.recompute and plan.pack_tokens"] = static
    found |= compare(basis, [plan.lengths for plan in plans], config.data.max_length, config.parallel.max_cp, peers)
    if basis.layout.pp == 1 and PEER not in found:
        found[PEER] = "needs megatron-core, which is not installed" if peers else "left out; peers=true adds it, which takes seconds"
    return found


def _bound_1f1b(basis: Basis, plans: Sequence[StepPlan]) -> list[float] | str:
    """The tighter bound of 1F1B, or why there is none."""
    if basis.schedule != "1f1b":
        return "" if basis.schedule == "none" else f"there is none for the {basis.schedule} schedule"
    from megadcp.plan.bound_1f1b import lower_bound_1f1b

    try:
        return [lower_bound_1f1b(basis, plan.lengths) for plan in plans]
    except UserError as error:
        return f"not computed: {error}"


def _print_steps(basis: Basis, shown: Sequence[Figures], beside: Beside) -> None:
    if len(shown) > 1:
        print("\n" + "\n".join(table_lines(basis, shown, beside)) + "\n")
    print("\n".join(summary_lines(basis, shown, beside)))


# ------------------------------------------------------------------------------------------------------------------- output
def _outputs(request: Request) -> dict[str, str]:
    return {key: request.own[key] for key in ("out", *PICTURES) if key in request.own}


def _write(request: Request, plans: Sequence[StepPlan]) -> None:
    """Write what was asked for; a picture of one step shows the first."""
    first = plans[0]
    if request.flag("chart", False):
        from megadcp.plan import render

        print("\n" + render.text(first).rstrip() + "\n")
    more = "; step=N draws another" if len(plans) > 1 else ""
    told = {
        "out": f"{len(plans)} plan{'s' if len(plans) > 1 else ''}",
        "svg": f"Gantt chart of step {first.step}{more}",
        "trace": f"step {first.step} for ui.perfetto.dev{more}",
        "histogram": "documents by length and cp",
    }
    for key, name in _outputs(request).items():
        if key == "out":
            write_plans(name, plans)
        else:
            write_file(name, _picture(key, plans, request.text("theme", "auto")))
        print(f"wrote        {name} ({told[key]})")


def _picture(kind: str, plans: Sequence[StepPlan], theme: str) -> str:
    from megadcp.plan import render

    if kind == "svg":
        return render.gantt_svg(plans[0], theme=theme)
    if kind == "trace":
        return json.dumps(render.perfetto(plans[0]))
    return render.lengths_svg(plans, theme=theme)


# ----------------------------------------------------------------------------------------------------------- recorded plans
@dataclass
class Proof:
    """What replaying found: plans that hold, and what is wrong with the others."""

    plans: list[StepPlan]
    shown: list[Figures]
    broken: list[str]


def replay(request: Request, say: Notes) -> int:
    """Prove, score and draw recorded plans again. 1 if one of them is broken."""
    check_outputs(_outputs(request), 1, request.flag("overwrite", False))
    path = find_plans(request.path)
    proof = _prove(request, path, say)
    for line in proof.broken:
        print(f"error: {line}", file=sys.stderr, flush=True)
    if not proof.plans:
        return BROKEN
    count, first = len(proof.plans), proof.plans[0]
    basis = Basis.of(first)
    others = sum(Basis.of(plan) != basis for plan in proof.plans)
    print(f"plans        {path}: {count} hold{'s' if count == 1 else ''} all invariants and {'its' if count == 1 else 'their'} recorded figures")
    print(f"layout       {layout_line(basis)}, precision {first.precision}, {first.predicted.policy} policy")
    if others:
        say(f"{others} of the plans have another layout, model or profile than the first; figures that need one take the first's")
    say.show()
    peak, hardware = peak_flops(request, first)
    static = [plan.predicted.static_seconds or float("inf") for plan in proof.plans]
    _print_steps(basis, proof.shown, Beside(peak, hardware, {"static-best": static}))
    _write(request, proof.plans)
    return BROKEN if proof.broken else 0


def _prove(request: Request, path: Path, say: Notes) -> Proof:
    proof = Proof([], [], [])
    first, count = request.number("step", 0), request.number("steps", 1 if "step" in request.own else 10**9, least=1)
    try:
        for plan in recorded(path, first, count, say):
            problem = _problem(plan)
            if problem:
                proof.broken.append(problem)
            else:
                proof.plans.append(plan)
                proof.shown.append(figures(plan))
    except PlanFormatError as error:
        proof.broken.append(f"{error}{_besides(path, first, count, len(proof.plans) + len(proof.broken), str(error))}")
    if not proof.plans and not proof.broken:
        raise _no_such_step(request, path)
    return proof


def _problem(plan: StepPlan) -> str:
    """Why a recorded plan does not hold; empty if it does."""
    try:
        verify(plan)
    except PlanError as error:
        return str(error)
    told = plan.predicted
    for name, stated, again in (
        ("seconds", told.seconds, simulate(plan).makespan),
        ("lower_bound_seconds", told.lower_bound_seconds, lower_bound(Basis.of(plan), plan.lengths)),
    ):
        if abs(stated - again) > SCORE_TOLERANCE * again:
            return f"plan of step {plan.step}: predicted.{name} is recorded as {stated}, scored again it is {again:.6g}"
    return ""


def _besides(path: Path, first: int, count: int, read: int, error: str) -> str:
    """Of a plan that was changed: which invariant the change breaks."""
    if "hash: the plan was changed" not in error:
        return ""
    for number, plan in enumerate(recorded(path, first, count, lambda line: None, check_hash=False)):
        if number == read:
            problem = _problem(plan)
            return f"; as it stands {problem}" if problem else "; as it stands it breaks no invariant"
    return ""


def _no_such_step(request: Request, path: Path) -> UserError:
    steps = [plan.step for plan in recorded(path, 0, None, lambda line: None, check_hash=False)]
    if not steps:
        return UserError(f"{path} holds no plan yet")
    span = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    return UserError(f"{path} holds no plan of step {request.number('step', 0)}; it holds {span}")


# ------------------------------------------------------------------------------------------------------------------ what if
def what_if(request: Request, say: Notes) -> int:
    """Plan recorded documents for another cluster, model or profile, and print the difference."""
    path = find_plans(request.path)
    first = request.number("step", 0)
    count = request.number("steps", 1 if "step" in request.own else WHAT_IF_STEPS, least=1)
    before = list(recorded(path, first, count, say))
    if not before:
        raise _no_such_step(request, path)
    for plan in before:
        verify(plan)
    if not {"step", "steps"} & set(request.own) and len(before) == WHAT_IF_STEPS:
        say(f"the first {WHAT_IF_STEPS} steps; steps=N takes more, step=N another")
    check_outputs(_outputs(request), len(before), request.flag("overwrite", False))
    config = compose_what_if(request, before[0], say)
    basis, after, planning = _planned(config, {plan.step: plan.lengths for plan in before})
    old = Basis.of(before[0])
    shown = [figures(plan) for plan in before], [figures(plan) for plan in after]
    peak, hardware = peak_flops(request, before[0])
    say.show()
    print(f"recorded     {layout_line(old)}, precision {old.precision}{f', hardware {hardware}' if hardware else ''}")
    print(f"what if      {layout_line(basis)}, precision {basis.precision}, hardware {config.hardware.name}")
    print(f"documents    {_counted(shown[0])}\n")
    print("\n".join(comparison_lines(Side(old, shown[0], peak), Side(basis, shown[1], config.hardware.peak_flops))))
    static = [plan.predicted.static_seconds or float("inf") for plan in after]
    print("\nwhat if, in full")
    _print_steps(basis, shown[1], Beside(config.hardware.peak_flops, config.hardware.name, {"static-best": static}, planning=planning))
    _write(request, after)
    return 0


def _counted(shown: Sequence[Figures]) -> str:
    return f"the same {sum(one.documents for one in shown):,} of {len(shown)} step{'s' if len(shown) > 1 else ''}"


# --------------------------------------------------------------------------------------------------------------------- entry
COMMAND = {"plan": plan_steps, "replay": replay, "what-if": what_if}


def main(argv: list[str]) -> int:
    """Exit code of one call."""
    if argv and argv[0] in ("-h", "--help", "help"):
        width = max(map(len, KEYS))
        print((__doc__ or "").replace("KEYS", "\n".join(f"    {key:<{width}}  {text}" for key, text in KEYS.items())))
        return 0
    try:
        request = parse(argv)
        return COMMAND[request.command](request, Notes())
    except (PlanError, PlanFormatError) as error:
        code, line = BROKEN, f"error: {error}"
    except UserError as error:
        code, line = WRONG, f"error: {error}"
    except KeyboardInterrupt:
        code, line = INTERRUPTED, "interrupted"
    except BrokenPipeError:  # whoever read the output (head, less) has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        code, line = BROKEN, f"error: {error}"
    sys.stdout.flush()
    print(line, file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
