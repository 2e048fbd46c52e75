"""Queue a run as a SLURM job: `python tools/submit.py experiment=gpt_8b cluster=h200_4x8 [setting=value ...]`.

    python tools/submit.py experiment=gpt_8b cluster=h200_4x8 --print      the batch script, and nothing else
    python tools/submit.py experiment=gpt_8b cluster=h200_4x8              queue it and follow its log
    python tools/submit.py ... --write                                     leave it in the run folder, to be edited: sbatch runs/NAME/slurm/job.sh
    python tools/submit.py ... --detach                                    queue it and come back
    python tools/submit.py ... cluster.slurm.partition=h200 cluster.slurm.account=lab cluster.slurm.time=12:00:00

Settings are those of pretrain_gpt.py, written the same way; those of the job itself are cluster.slurm.* (docs/config.md). They are checked
and frozen to the run folder's run.yaml now; the ranks start from that file. The same command goes on with a run that is not finished.
docs/slurm.md leads through it. Exit codes: the job's own; 0 queued (--detach); 2 the request can't be met, and nothing was queued.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys

from submit_script import folder_of, gres_of, log_of, render, script_of
from submit_slurm import EARLY, LONGEST_LEAD, Wanted, check_partition, follow, jobs_called, limit_seconds, queue, refuse_without_sbatch

from megadcp.config.check import UserError
from megadcp.config.load import compose, reported
from megadcp.config.schema import Config
from megadcp.data.indexed import idx_path
from megadcp.plan.planner import planner_for
from megadcp.train import entry


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="setting=value", help="as for pretrain_gpt.py")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--print", action="store_true", help="print the batch script; write and queue nothing")
    how.add_argument("--write", action="store_true", help="write run.yaml and the script into the run folder, queue nothing")
    how.add_argument("--detach", action="store_true", help="queue it, don't follow its log")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Render, check, and do what was asked; the exit code."""
    asked = arguments().parse_intermixed_args(argv)
    return reported(lambda: _submit(asked))


def _submit(asked: argparse.Namespace) -> int:
    config = compose(asked.overrides)
    check_job(config)
    script = render(config, shlex.join(["python", "tools/submit.py", *asked.overrides]))
    if asked.print:
        print(script, end="")
        return 0
    _check_data(config)
    if not asked.write:
        refuse_without_sbatch()
        _refuse_second_job(config)
    if not _register(config):
        return 0
    target = script_of(config)
    target.parent.mkdir(exist_ok=True)
    target.write_text(script, encoding="utf-8")
    _say(f"batch script: {target}")
    if asked.write:
        _say(f"nothing is queued; to queue it: sbatch {shlex.quote(str(target))}")
        return 0
    job = queue(target)
    log = log_of(config, job)
    _say(f"job {job} is queued; its log: {log}; to end it: scancel {job}")
    if asked.detach:
        return 0
    try:
        return follow(job, log, _say)
    except KeyboardInterrupt:
        _say(f"\njob {job} goes on; its log: tail -F {shlex.quote(str(log))}; to end it: scancel {job}")
        return 0


def check_job(config: Config) -> None:
    """Refuse a job that could not run: what pretrain_gpt.py would refuse, and what SLURM could never give.

    Raises:
        UserError: the first reason.
    """
    slurm = config.cluster.slurm
    limit = limit_seconds(slurm.time)
    if not 1 <= slurm.stop_before <= LONGEST_LEAD or slurm.stop_before + EARLY >= limit:
        most = int(min(LONGEST_LEAD, limit - EARLY - 1))
        legal = f"legal here: 1 to {most}" if most >= 1 else "give it more time"
        raise UserError(
            f"cluster.slurm.stop_before={slurm.stop_before} seconds does not fit into cluster.slurm.time={slurm.time} (SLURM may tell the ranks "
            f"{EARLY} s early); {legal}"
        )
    texts = {"partition": slurm.partition, "account": slurm.account, "gres": slurm.gres, "head": slurm.head}
    for name, value in texts.items():
        if any(letter.isspace() or letter in "\"'`$\\;&|" for letter in value):
            raise UserError(f"cluster.slurm.{name}={value!r} can't be written into a batch script; legal here: a plain name without spaces or quotes")
    lines = {"run.folder": config.run.folder, "cluster.slurm.container": slurm.container, "cluster.slurm.python": slurm.python}
    for name, value in lines.items():
        if not value.isprintable():  # another line of the script
            raise UserError(f"{name}={value!r} can't be written into a batch script; legal here: one line of text")
    for name, values in {"options": slurm.options, "setup": slurm.setup, "mounts": slurm.mounts}.items():
        for index, value in enumerate(values):
            if not value.replace("\t", " ").isprintable() or (name == "options" and not value.startswith("-")):
                what = "an option, as --qos=high" if name == "options" else "one line"
                raise UserError(f"cluster.slurm.{name}[{index}]={value!r} is not {what}")
    planner_for(config)
    check_partition(Wanted(slurm.partition, config.cluster.nodes, gres_of(config), slurm.time))


def _check_data(config: Config) -> None:
    if config.data.prepare.kind != "none":
        return
    for group, sources in (("train", config.data.train), ("validation", config.data.validation)):
        for index, source in enumerate(sources):
            if not idx_path(source.prefix).is_file():
                raise UserError(
                    f"data.{group}[{index}].prefix={source.prefix}: there is no {idx_path(source.prefix)}; make it with tools/preprocess_data.py or "
                    f"tools/preprocess_array.py, or name another: 'data.{group}=[{{prefix: PATH_WITHOUT_EXTENSION}}]'"
                )


def _refuse_second_job(config: Config) -> None:
    there = jobs_called(config.run.name)
    if there:
        listed = ", ".join(f"{number} ({state})" for number, state in there)
        raise UserError(
            f"run {config.run.name} has a job already: {listed}; end it with scancel {there[0][0]}, queue one more behind it with "
            f"sbatch {script_of(config)}, or choose another run.name"
        )


def _register(config: Config) -> bool:
    """Write run.yaml; False when the run is finished, and was shown. A job that is queued again finds its run: that is no reason to refuse it."""
    run_yaml = folder_of(config).parent / "run.yaml"
    if config.checkpoint.resume == "refuse":
        if run_yaml.is_file():
            raise UserError(f"{run_yaml.parent} holds a run already and checkpoint.resume=refuse; choose another run.name, or checkpoint.resume=auto")
        config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, resume="auto"))
    return entry.register(config)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
