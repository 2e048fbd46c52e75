"""Proof that the plan and the layout change nothing: loss, gradient norm, gradients and weights are those of one process.

`python tools/prove.py --processes 4 --cases 50 --seed 7 [--dtype fp64,fp32,bf16] [--case N] [--out DIR] [--limit SECONDS]`
`python tools/prove.py --replay FILE [--dtype ..]`

Each case is a small model, a layout of at most so many ranks (tensor, pipeline with virtual and uneven stages, lanes) and the documents of three
steps, drawn at random: documents of one token, masked ones, ones with a single target. They run on local ranks (gloo) under three kinds of plans:
random legal ones that mix groups, packs, recompute and communication within one step and leave slots empty, and the planner's own, joint and
static. One process that runs each document alone, without padding or recompute, is the truth.

Error of a tensor: max|a-b| / max(max|b|, 1e-3 * largest max|b| of all tensors); of loss and norm: relative.
  fp64   at most 1e-10 for all four, three steps of AdamW (eps 1e-6)
  fp32   at most 1e-5 for all four, three steps of plain SGD; AdamW, which turns rounding of near-zero gradients into whole steps, is shown only;
         so are cases in which one process in fp32 is itself more than 4e-6 from one in fp64 (a single target, say)
  bf16   shown beside the spread of two static layouts (AdamW), not judged
All ranks must also agree on loss and norm, and copies of a weight be equal, to the last bit. A rank that raises, dies or hangs is a failure.

The largest error of each quantity, and every failure, is saved under --out as a file that --replay runs again; plans in it may be edited.
Exit codes: 0 all equal, 1 a failure, 2 a request that makes no sense.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from prove_cases import Case, Plans, alone_plans, case_from_json, case_to_json, draw_case, make_plans
from prove_compare import QUANTITIES, Error, Whole, errors_of, largest, together
from prove_ranks import Ranks, RanksFailed
from prove_run import DTYPES, Format, Job, run_job, run_steps

from megadcp.config.check import UserError
from megadcp.config.load import INTERRUPTED, reported
from megadcp.plan.step_plan import CP_COMMS, LEVELS

BOUNDS = {Format("fp64", "AdamW"): 1e-10, Format("fp32", "SGD"): 1e-5}
FORMATS = {"fp64": ("AdamW",), "fp32": ("SGD", "AdamW"), "bf16": ("AdamW",)}
UNSTEADY = 4e-6  # of the model itself in fp32: gradients that are differences of nearly equal numbers
MOST_PROCESSES = 16
LAYOUT_WIDTH, PLANS_WIDTH = 43, 72


@dataclass(frozen=True)
class Worst:
    """The largest error of one quantity in one format so far, and what it came from."""

    error: Error
    case: Case
    plans: Plans

    @property
    def name(self) -> str:
        """Who made the plans."""
        return next(iter(self.plans))


@dataclass
class Findings:
    """What the cases have shown. replayed: the file that is being run again, which stays as it is."""

    out: Path
    replayed: Path | None = None
    cases: int = 0
    failures: list[str] = field(default_factory=list)
    worst: dict[tuple[Format, str], Worst] = field(default_factory=dict)
    spread: dict[str, Error] = field(default_factory=dict)
    unsteady: list[int] = field(default_factory=list)

    def count(self, which: Format, case: Case, plans: Plans, errors: dict[str, dict[str, Error]], unsteady: str) -> None:
        """Take in the errors of a case in one format, by plans and quantity. Unsteady ones count for nothing."""
        if unsteady:
            self.unsteady.append(case.number)
            return
        for name, own in errors.items():
            for quantity, error in own.items():
                before = self.worst.get((which, quantity))
                if before is None or largest([before.error, error]) is not before.error:
                    self.worst[which, quantity] = Worst(error, case, {name: plans[name]})
        if which.dtype == "bf16" and "static" in errors:
            for quantity, error in errors["static"].items():
                self.spread[quantity] = largest([error, self.spread.get(quantity, Error(0.0, ""))])

    def fail(self, text: str, details: str = "") -> None:
        """Say at once what went wrong, and remember it for the end."""
        print(f"FAILED {details or text}", flush=True)
        self.failures.append(text)

    def save(self, case: Case, plans: Plans, dtypes: Sequence[str]) -> Path:
        """Write the replay file of these plans of a case; its path."""
        if self.replayed is not None:
            return self.replayed
        self.out.mkdir(parents=True, exist_ok=True)
        path = self.out / f"case-{case.number}-{'-'.join(plans)}.json"
        path.write_text(json.dumps(case_to_json(case, plans, dtypes), indent=1), encoding="utf-8")
        return path


# ---------------------------------------------------------------------------------------------------------------- one case
def prove_case(case: Case, plans: Plans, dtypes: Sequence[str], ranks: Ranks, findings: Findings) -> None:
    """Run a case on its ranks and in this process, print its rows, and remember what was found."""
    begin = time.perf_counter()
    formats = [Format(dtype, optimizer) for dtype in dtypes for optimizer in FORMATS[dtype]]
    runs = tuple((which, name) for which in formats for name in _judged_plans(which, plans))
    ranks.send(Job(case, plans, runs))
    truth_plans, alone = alone_plans(case), case.alone()
    truths = {which: together([run_steps(alone, which, truth_plans, None)]) for which in formats}
    try:
        found = list(zip(*ranks.receive(), strict=True))
    except RanksFailed as failure:
        path = findings.save(case, plans, dtypes)
        _row(case, plans, "", "")
        again = f"  run it again: python tools/prove.py --replay {path}"
        findings.fail(f"case {case.number}, {failure.brief}\n{again}", f"case {case.number}, {str(failure).rstrip()}\n{again}")
        return
    for place, which in enumerate(formats):
        results = {name: together(of_ranks) for (one, name), of_ranks in zip(runs, found, strict=True) if one == which}
        unsteady = _unsteady(case, which, truths[which])
        bound = BOUNDS.get(which, math.inf) if not unsteady else math.inf
        errors = {name: errors_of(result, truths[which]) for name, result in results.items()}
        problems = {name: said for name, result in results.items() if (said := _problems(result, truths[which], errors[name], bound))}
        findings.count(which, case, plans, errors, unsteady)
        columns = "".join(f"{largest([each[quantity] for each in errors.values()]).size:>10.1e}" for quantity in QUANTITIES)
        verdict = "FAILED" if problems else unsteady or ("" if which in BOUNDS else "(shown only)")
        seconds = f"{time.perf_counter() - begin:7.1f} s" if place == 0 else " " * 9
        _row(case if place == 0 else None, plans, str(which), f"{columns}{seconds}  {verdict}")
        for name, said in problems.items():
            path = findings.save(case, {name: plans[name]}, [which.dtype])
            text = "\n  ".join([f"case {case.number}, {name} plans, {which}:", *said, f"run it again: python tools/prove.py --replay {path}"])
            findings.fail(text)


def _judged_plans(which: Format, plans: Plans) -> list[str]:
    """The plans that a format runs; fp32 leaves out static ones, and AdamW in fp32 the planner's."""
    if which.dtype != "fp32":
        return list(plans)
    return list(plans)[: 2 if which in BOUNDS else 1]


def _problems(found: Whole, truth: Whole, errors: dict[str, Error], bound: float) -> list[str]:
    """What is wrong with one run."""
    problems = [
        f"{quantity} {error.size:.1e} is above {bound:g}, worst at {error.where}" for quantity, error in errors.items() if not error.size <= bound
    ]
    if (found.targets, found.problems) != (truth.targets, truth.problems):
        problems.append(f"targets {found.targets} and problems {found.problems}, one process has {truth.targets} and {truth.problems}")
    return [*problems, found.different] if found.different else problems


def _unsteady(case: Case, which: Format, truth: Whole) -> str:
    """Why a case can't be judged in fp32: one process in fp32 is itself too far from one in fp64. Empty where it can be."""
    if which != Format("fp32", "SGD"):
        return ""
    exact = together([run_steps(case.alone(), Format("fp64", "SGD"), alone_plans(case), None)])
    own = largest(list(errors_of(truth, exact).values()))
    return "" if own.size <= UNSTEADY else f"(shown only: one process in fp32 is itself {own.size:.1e} from fp64)"


# ------------------------------------------------------------------------------------------------------------------ printing
def _row(case: Case | None, plans: Plans, which: str, rest: str) -> None:
    number, layout, chosen = ("", "", "") if case is None else (str(case.number), layout_text(case), plans_text(plans))
    print(f"{number:>4}  {layout:<{LAYOUT_WIDTH}}{chosen:<{PLANS_WIDTH}}{which:<11}{rest}", flush=True)


def header() -> None:
    """Of the table."""
    columns = "".join(f"{quantity:>10}" for quantity in QUANTITIES)
    print(f"{'case':>4}  {'layout':<{LAYOUT_WIDTH}}{'plans of all kinds':<{PLANS_WIDTH}}{'format':<11}{columns}{'time':>9}")


def layout_text(case: Case) -> str:
    """As in: tp 2 sp, pp 2 (3+2 in 2 chunks), 1 lane."""
    parallel, world = case.config.parallel, case.world
    lanes = world // (parallel.tp * parallel.pp)
    chunks = f" in {parallel.virtual_stages} chunks" if parallel.virtual_stages > 1 else ""
    parts = [f"tp {parallel.tp}{' sp' if parallel.sequence_parallel and parallel.tp > 1 else ''}"] if parallel.tp > 1 else []
    parts += [f"pp {parallel.pp} ({'+'.join(map(str, parallel.stage_layers))}{chunks})"] if parallel.pp > 1 else []
    parts += [f"{lanes} lane{'s' if lanes > 1 else ''}"]
    return ", ".join(parts)


def plans_text(plans: Plans) -> str:
    """How many microbatches, with which groups, communication and recompute."""
    used = [one for each in plans.values() for plan in each for one in plan.microbatches]
    sizes, kinds = sorted({one.cp for one in used}), {one.cp_comm for one in used}
    levels = {one.recompute.level for one in used}
    shown = [f"{len(used)} microbatches", f"cp {' '.join(map(str, sizes))}"]
    shown += [" ".join(kind for kind in CP_COMMS if kind in kinds - {"none"})] if kinds - {"none"} else []
    return f"{', '.join(shown)}, {' '.join(level for level in LEVELS if level in levels)}".replace("all_gather", "gather")


def model_text(case: Case) -> str:
    """The model and the documents in one line."""
    model, lengths = case.config.model, [length for each in case.lengths for length in each]
    extras = [f"{name} bias" for name in ("qkv", "out", "mlp") if getattr(model, f"{name}_bias")]
    extras += ["qk_norm"] if model.qk_norm else []
    extras += ["tied"] if model.tied else []
    extras += ["dropout"] if model.residual_dropout else []
    return (
        f"{model.layers} layers, hidden {model.hidden}, {model.heads} heads over {model.kv_heads} kv heads of {model.head_dim}, ffn {model.ffn}, "
        f"vocab {model.vocab}, {model.mlp}, {model.norm}, {model.position}{''.join(f', {each}' for each in extras)}; "
        f"{len(lengths)} documents of {min(lengths)} to {max(lengths)} tokens in {len(case.lengths)} steps"
    )


def summary(findings: Findings) -> None:
    """The largest errors, and where they came from."""
    print("\nlargest error of each quantity, and the case and plans behind it")
    print(f"{'format':<11}{'quantity':<10}{'error':>9}{'at most':>9}  case  {'plans':<7} {'worst at':<46} replay file")
    for which in dict.fromkeys(key[0] for key in findings.worst):
        for quantity in QUANTITIES:
            one = findings.worst[which, quantity]
            bound = (
                f"{BOUNDS[which]:.0e}"
                if which in BOUNDS
                else f"({findings.spread[quantity].size:.0e})"
                if which.dtype == "bf16" and findings.spread
                else "-"
            )
            path = findings.save(one.case, one.plans, [which.dtype])
            print(f"{which!s:<11}{quantity:<10}{one.error.size:>9.1e}{bound:>9}  {one.case.number:>4}  {one.name:<7} {one.error.where:<46} {path}")
    if findings.unsteady:
        numbers = ", ".join(map(str, findings.unsteady))
        print(f"not judged in fp32, where one process itself is more than {UNSTEADY:g} from fp64: case {numbers}")
    if findings.spread:
        print("bf16, in brackets: the largest difference of two static layouts, one process and static-best")


# --------------------------------------------------------------------------------------------------------------------- entry
def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of one call."""
    return reported(lambda: _main(_parse(argv)))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4, help="most ranks of a case (4)")
    parser.add_argument("--cases", type=int, default=50, help="cases 0 to N - 1 of the seed (50)")
    parser.add_argument("--seed", type=int, default=7, help="another seed draws other cases (7)")
    parser.add_argument("--case", type=int, help="this case of the seed alone")
    parser.add_argument("--dtype", default="", help="formats, comma between them: fp64, fp32, bf16 (fp64,fp32)")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run a saved case and its plans again")
    parser.add_argument("--out", type=Path, default=Path("runs/prove"), metavar="DIR", help="where replay files go (runs/prove)")
    parser.add_argument("--limit", type=float, default=120.0, metavar="SECONDS", help="a case that takes longer hangs (120)")
    return parser.parse_args(argv)


def _main(asked: argparse.Namespace) -> int:
    if not 1 <= asked.processes <= MOST_PROCESSES:
        raise UserError(f"--processes {asked.processes}: legal here: 1 to {MOST_PROCESSES}")
    if asked.cases < 1 or (asked.case is not None and asked.case < 0):
        raise UserError("--cases has to be 1 or more, --case 0 or more")
    if not 0 < asked.limit < math.inf:
        raise UserError(f"--limit {asked.limit:g}: legal here: seconds, above 0")
    chosen = tuple(dict.fromkeys(each for each in asked.dtype.split(",") if each))
    if set(chosen) - set(DTYPES):
        raise UserError(f"--dtype {asked.dtype}: legal here: {', '.join(DTYPES)}, with commas between several")
    dtypes = chosen or ("fp64", "fp32")
    work = _replayed(asked.replay, chosen) if asked.replay else _drawn(asked, dtypes)
    findings, begin = Findings(asked.out, asked.replay), time.perf_counter()
    threads, interrupted = torch.get_num_threads(), False
    torch.set_num_threads(1)
    try:
        _prove_all(work, asked, findings)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        torch.set_num_threads(threads)
    if findings.worst:
        summary(findings)
    took = f"{findings.cases} case{'' if findings.cases == 1 else 's'}, {time.perf_counter() - begin:.0f} s"
    if findings.failures:
        print(f"\n{len(findings.failures)} failure{'' if len(findings.failures) == 1 else 's'} in {took}:")
        print("\n".join(findings.failures))
    elif not interrupted:
        judged = any(which in BOUNDS for which, _ in findings.worst)
        print(f"\n{'all equal to one process' if judged else 'shown, nothing was judged'}: {took}")
    if interrupted:
        print(f"\ninterrupted in {took}")
        return INTERRUPTED
    return 1 if findings.failures else 0


Work = Iterator[tuple[Case, Plans, Sequence[str]]]


def _drawn(asked: argparse.Namespace, dtypes: Sequence[str]) -> Work:
    """Cases whose plans are still to be made."""
    for number in range(asked.cases) if asked.case is None else [asked.case]:
        yield draw_case(asked.seed, number, asked.processes), {}, dtypes


def _replayed(path: Path, dtypes: Sequence[str]) -> Work:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--replay {path}: {error}") from None
    case, plans, recorded = case_from_json(document, str(path))
    if case.world > MOST_PROCESSES or not set(dtypes or recorded) <= set(FORMATS):
        raise UserError(f"{path}: {case.world} ranks in {', '.join(recorded)}; legal here: up to {MOST_PROCESSES}, in {', '.join(FORMATS)}")
    return iter([(case, plans, dtypes or recorded)])


def _prove_all(work: Work, asked: argparse.Namespace, findings: Findings) -> None:
    """All cases. Ranks stay warm from one case to the next: those of the usual number, and of one other."""
    warm: dict[int, Ranks] = {}
    header()
    try:
        for case, given, dtypes in work:
            findings.cases += 1
            if asked.replay or asked.case is not None:
                print(f"      {model_text(case)}")
            try:
                plans = given or make_plans(case)
            except Exception as error:
                findings.fail(
                    f"case {case.number}, planning: {type(error).__name__}: {error}\n  run it again: python tools/prove.py --seed {asked.seed} "
                    f"--processes {asked.processes} --case {case.number}",
                    f"case {case.number}, planning:\n{traceback.format_exc()}",
                )
                continue
            for world in set(warm) - {asked.processes, case.world}:
                warm.pop(world).close()
            ranks = warm.setdefault(case.world, Ranks(case.world, run_job, asked.limit))
            prove_case(case, plans, dtypes, ranks, findings)
    finally:
        for ranks in warm.values():
            ranks.close()


if __name__ == "__main__":
    sys.exit(main())
