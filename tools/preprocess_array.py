"""Raw text to a dataset on many nodes: the work of preprocess_data.py as an array of SLURM jobs, and one more that merges their pieces.

    python tools/preprocess_array.py --shards 64 --workers 16 --input corpus/ --tokenizer tokenizer.model --append-eod --output-prefix data/corpus

Options are those of preprocess_data.py, and those of the jobs. The result is, byte for byte, what preprocess_data.py makes alone. Pieces and
the jobs' own logs lie in PREFIX.shards/ until the merge is done. When a job fails the same command goes on: finished parts are not made twice;
a job that runs into its time limit is queued again by itself. --local runs all of it on this machine, one piece after another.
Exit codes: 0 done, or queued (--detach); 1 a job failed; 2 the request can't be met, and nothing was queued.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import preprocess_data
from submit_slurm import ENDED, Wanted, check_partition, limit_seconds, refuse_without_sbatch, state_of

from megadcp.config.check import UserError
from megadcp.data.merge import rejects_path
from megadcp.data.preprocess import Preprocess, check_request
from megadcp.data.raw_files import InputError

TOOLS = Path(__file__).resolve().parent
POLL_SECONDS = 2.0
RESTARTS = 20  # after as many time limits a job is given up
MOST_SHOWN, LINES = 3, 15  # jobs that failed, lines of each
LEAD_SECONDS = 60  # before its time limit a job is told to be queued again


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = preprocess_data.arguments()
    parser.description, parser.prog = __doc__, "preprocess_array.py"
    jobs = parser.add_argument_group("jobs")
    jobs.add_argument("--shards", type=int, required=True, metavar="N", help="jobs, each with an equal share of the corpus")
    jobs.add_argument("--partition", default="", help="partition of SLURM; not given: the cluster's default")
    jobs.add_argument("--account", default="", help="account that is charged")
    jobs.add_argument("--time", default="4:00:00", metavar="H:MM:SS", help="time limit of a job (default 4:00:00); --workers are its CPU cores")
    jobs.add_argument("--memory", type=int, default=0, metavar="GB", help="memory of a job; not given: what the cluster gives")
    jobs.add_argument("--at-once", type=int, default=256, metavar="N", help="most jobs that run at one time (default 256)")
    jobs.add_argument("--keep-shards", action="store_true", help="don't remove the pieces after the merge")
    jobs.add_argument("--local", action="store_true", help="no SLURM: run everything here")
    jobs.add_argument("--detach", action="store_true", help="queue the jobs and come back")
    return parser


@dataclass(frozen=True)
class Work:
    """What one job does: programs one after another, then files that are no longer needed."""

    programs: tuple[tuple[str, ...], ...]
    remove: tuple[str, ...] = ()


def main(argv: list[str] | None = None) -> int:
    """0: done or queued; 1: bad input or a failed job; 2: a request that can't be met."""
    asked = arguments().parse_args(argv)
    try:
        return _run(asked, lambda line: print(line, flush=True))
    except UserError as fault:
        code, text = 2, fault
    except (InputError, OSError) as fault:
        code, text = 1, fault
    print(f"error: {text}", file=sys.stderr)
    return code


def _run(asked: argparse.Namespace, say: Callable[[str], None]) -> int:
    whole = _job_of(asked)
    if asked.shard != "0/1":
        raise UserError(f"--shard {asked.shard} is for preprocess_data.py; here --shards N makes all of them")
    if asked.shards < 1 or asked.at_once < 1:
        raise UserError(f"--shards {asked.shards} --at-once {asked.at_once}: at least 1 each")
    if check_request(whole):
        say(f"{asked.output_prefix}: already made from the same inputs by the same tokenizer; nothing to do (--overwrite makes it again)")
        return 0
    pieces = [_piece(whole, index, asked.shards) for index in range(asked.shards)]
    for piece in pieces:
        check_request(piece)
    work = [Work((_preprocess(piece),)) for piece in pieces]
    merge = _merge(whole, pieces, asked)
    folder = Path(pieces[0].output_prefix).parent
    if asked.local:
        folder.mkdir(parents=True, exist_ok=True)
        return _here([*work, merge], say)
    if not 60 + LEAD_SECONDS <= limit_seconds(asked.time, "--time ") < float("inf"):
        raise UserError(f"--time {asked.time}: at least 0:02:00, and not unlimited")
    refuse_without_sbatch()
    check_partition(Wanted(asked.partition, 1, "", asked.time, flags=True))
    jobs = _queue(asked, folder, work, merge)
    say(f"{asked.shards} jobs queued as {jobs[0].job_id.split('_')[0]}_*, and {jobs[-1].job_id} that merges; their logs: {folder / 'jobs'}")
    if asked.detach:
        return 0
    try:
        return _wait(jobs, say)
    except KeyboardInterrupt:
        say(f"the jobs go on; to end them: scancel {jobs[0].job_id.split('_')[0]} {jobs[-1].job_id}")
        return 0


# ------------------------------------------------------------------------------------------------------------ what is done
def _job_of(asked: argparse.Namespace) -> Preprocess:
    """The whole work as one job, for its checks."""
    return Preprocess(
        inputs=tuple(asked.inputs), output_prefix=asked.output_prefix, tokenizer_kind=asked.tokenizer_kind, tokenizer_path=asked.tokenizer,
        eod_token=asked.eod_token, keys=tuple(asked.json_keys), append_eod=asked.append_eod, workers=asked.workers,
        bad_records=asked.bad_records, overwrite=asked.overwrite, console="plain",
    )  # fmt: skip


def _piece(whole: Preprocess, index: int, count: int) -> Preprocess:
    prefix = Path(f"{whole.output_prefix}.shards") / f"{index:05d}-of-{count:05d}"
    return replace(whole, output_prefix=str(prefix), shard=(index, count), overwrite=False)


def _preprocess(piece: Preprocess) -> tuple[str, ...]:
    """The command that makes a piece."""
    given = ["--tokenizer-kind", piece.tokenizer_kind, "--workers", str(piece.workers), "--bad-records", piece.bad_records, "--console", "plain"]
    given += ["--tokenizer", piece.tokenizer_path] if piece.tokenizer_path else []
    given += ["--eod-token", piece.eod_token] if piece.eod_token else []
    given += ["--append-eod"] if piece.append_eod else []
    given += ["--output-prefix", piece.output_prefix, "--shard", f"{piece.shard[0]}/{piece.shard[1]}"]
    return (sys.executable, str(TOOLS / "preprocess_data.py"), *given, "--json-keys", *piece.keys, "--input", *piece.inputs)


def _merge(whole: Preprocess, pieces: Sequence[Preprocess], asked: argparse.Namespace) -> Work:
    """The command that makes one dataset of all pieces, for each key."""
    programs, made = [], []
    for key, prefix in enumerate(whole.prefixes()):
        inputs = [piece.prefixes()[key] for piece in pieces]
        overwrite = ["--overwrite"] if whole.overwrite else []
        programs.append((sys.executable, str(TOOLS / "merge_data.py"), "--output-prefix", prefix, *overwrite, "--input", *inputs))
        made += [f"{each}{ending}" for each in inputs for ending in (".bin", ".idx", ".json")] + [str(rejects_path(each)) for each in inputs]
    return Work(tuple(programs), () if asked.keep_shards else tuple(made))


# -------------------------------------------------------------------------------------------------------------- who does it
def _here(work: Sequence[Work], say: Callable[[str], None]) -> int:
    for number, each in enumerate(work, 1):
        say(f"[{number}/{len(work)}]")
        try:
            _performer()(each.programs, each.remove)
        except subprocess.CalledProcessError as error:
            say("stopped; finished parts are kept, the same command goes on from there")
            return int(error.returncode)
    return 0


def _performer() -> Any:
    """What a job runs. The class is made here so that it travels in the job's pickle: on the nodes this file is no module."""

    class Performer:
        def __call__(self, programs: Sequence[Sequence[str]], remove: Sequence[str]) -> None:
            import subprocess
            from pathlib import Path

            for program in programs:
                subprocess.run(program, check=True)
            for name in remove:
                Path(name).unlink(missing_ok=True)

        def checkpoint(self, programs: Sequence[Sequence[str]], remove: Sequence[str]) -> Any:
            """For submitit, at the time limit: the same again, which goes on where this one stopped."""
            import submitit

            return submitit.helpers.DelayedSubmission(self, programs, remove)

    return Performer()


def _queue(asked: argparse.Namespace, folder: Path, work: Sequence[Work], merge: Work) -> list[Any]:
    """Queue an array with one job for each piece, and the merge behind it; submitit's jobs."""
    try:
        import submitit
    except ImportError:
        raise UserError('this needs submitit: pip install "megadcp[cluster]"') from None
    executor = submitit.AutoExecutor(folder=folder / "jobs" / "%j", cluster="slurm", slurm_max_num_timeout=RESTARTS)
    name = Path(asked.output_prefix).name
    common = {
        "timeout_min": int(limit_seconds(asked.time) // 60), "nodes": 1, "tasks_per_node": 1, "cpus_per_task": asked.workers,
        "slurm_signal_delay_s": LEAD_SECONDS, "slurm_array_parallelism": asked.at_once, "name": f"preprocess-{name}",
    }  # fmt: skip
    common |= {"slurm_partition": asked.partition} if asked.partition else {}
    common |= {"slurm_account": asked.account} if asked.account else {}
    common |= {"mem_gb": asked.memory} if asked.memory else {}
    executor.update_parameters(**common)
    try:
        jobs = list(executor.map_array(_performer(), [each.programs for each in work], [each.remove for each in work]))
        behind = {"dependency": f"afterok:{_array(jobs)}", "kill-on-invalid-dep": "yes"}
        executor.update_parameters(**{**common, "cpus_per_task": 1, "name": f"merge-{name}"}, slurm_additional_parameters=behind)
        return [*jobs, executor.submit(_performer(), merge.programs, merge.remove)]
    except (submitit.core.utils.FailedSubmissionError, submitit.core.utils.FailedJobError) as error:
        raise UserError(f"SLURM does not take the jobs: {' '.join(str(error).split())}") from None


def _array(jobs: Sequence[Any]) -> str:
    return str(jobs[0].job_id).split("_")[0]


def _wait(jobs: Sequence[Any], say: Callable[[str], None]) -> int:
    """Tell how many pieces are made until the merge is done, or can't be done any more."""
    merge, told = jobs[-1], -1
    while True:
        made = sum(job.paths.result_pickle.exists() for job in jobs[:-1])
        if made != told:
            say(f"{made} of {len(jobs) - 1} pieces")
            told = made
        now = state_of(merge.job_id)
        if now is not None and (not now.state or now.state in ENDED):
            break
        time.sleep(POLL_SECONDS)
    failed = [job for job in jobs[:-1] if not _succeeded(job)] or [job for job in jobs[-1:] if not _succeeded(job)]
    if not failed:
        say("\n".join(line for line in (merge.stdout() or "").splitlines() if not line.startswith("submitit ")))
        return 0
    for job in failed[:MOST_SHOWN]:
        lines = (job.stderr() or "it has written nothing").splitlines()
        told = [line for line in lines if line.startswith("error: ")] or lines[-LINES:]
        say("\n".join([f"job {job.job_id} failed; the end of {job.paths.stderr}:", *told]))
    say(f"{len(failed)} of {len(jobs)} jobs failed; the same command goes on: finished parts are not made twice")
    return 1


def _succeeded(job: Any) -> bool:
    return bool(job.paths.result_pickle.exists() and job.exception() is None)


if __name__ == "__main__":
    sys.exit(main())
