"""The batch script of a run, as text: `render(config, made_by)`. What tools/submit.py prints and queues."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

from megadcp.config.schema import Config
from megadcp.train.signals import STOPPED

ROOT = Path(__file__).resolve().parents[1]  # of this repository
SIGNAL = "USR1"
WIDTH = 46  # column of the remarks
FIRST_PORT, PORTS = 20000, 10000  # below the range that systems hand out

HEAD = """\
#!/bin/bash
# {what}
# Made by: {made_by}
# Edit what you like; then: sbatch {script}
# What is trained stands in {run}/run.yaml."""

BODY = """\
set -uo pipefail

run={run}
python={python}

# The ranks meet on the first node, at a port of this job's own. MEGADCP_HEAD=ADDRESS in front of sbatch names another address of that node.
head=${{MEGADCP_HEAD:-{head}}}
port=$(({first_port} + SLURM_JOB_ID % {ports}))
{environment}{setup}
echo "$(date '+%F %T') job $SLURM_JOB_ID, start $((${{SLURM_RESTART_COUNT:-0}} + 1)), on $SLURM_JOB_NODELIST; the ranks meet at $head:$port"

# A rank that runs out of memory leaves a note; the next start reads it, and its plans take less memory (health.oom_restarts).
for _ in {{1..{starts}}}; do
    srun {srun} \\
        "$python" -m megadcp.train.torchrun \\
        --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node={processes} --master-addr="$head" --master-port="$port" \\
        -m megadcp.train.job "$run"
    code=$?
    compgen -G "$run/ranks/oom-*.json" > /dev/null || break
done

# 0: the run is finished. {stopped}: it saved and stopped, and goes on in the next job. Anything else: it failed, and the log says why.
echo "$(date '+%F %T') job $SLURM_JOB_ID: the ranks ended with exit code $code"
{after}exit "$code"
"""

REQUEUE = """\
if [ "$code" -eq {stopped} ]; then
    scontrol requeue "$SLURM_JOB_ID" || echo "not queued again; to go on: sbatch {script}"
fi
"""
NO_REQUEUE = """\
if [ "$code" -eq {stopped} ]; then echo "to go on: sbatch {script}"; fi
"""


def folder_of(config: Config) -> Path:
    """Where script and logs of the run's jobs are."""
    return Path(config.run.folder) / config.run.name / "slurm"


def script_of(config: Config) -> Path:
    """The script's own place."""
    return folder_of(config) / "job.sh"


def log_of(config: Config, job: str) -> Path:
    """The log of one job."""
    return folder_of(config) / f"{config.run.name}-{job}.log"


def gres_of(config: Config) -> str:
    """The devices that each node must have, as SLURM writes them; empty for none."""
    cluster = config.cluster
    return cluster.slurm.gres or (f"gpu:{cluster.processes}" if cluster.device == "cuda" else "")


def render(config: Config, made_by: str) -> str:
    """The script. `made_by` is the command that asked for it."""
    cluster, slurm = config.cluster, config.cluster.slurm
    run, script = shlex.quote(str(folder_of(config).parent)), shlex.quote(str(script_of(config)))
    head = slurm.head or '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    after = (REQUEUE if slurm.requeue else NO_REQUEUE).format(stopped=STOPPED, script=script)
    python = slurm.python or ("python3" if slurm.container else sys.executable)
    what = f"Run {config.run.name}: {cluster.nodes} {_s(cluster.nodes, 'node')} x {cluster.processes} {_s(cluster.processes, 'rank')}"
    body = BODY.format(
        run=run, python=shlex.quote(python), head=head, first_port=FIRST_PORT, ports=PORTS, environment=_environment(config), setup=_setup(config),
        srun=_srun(config), processes=cluster.processes, starts=config.health.oom_restarts + 1, stopped=STOPPED, after=after,
    )  # fmt: skip
    one_line = "".join(letter if letter.isprintable() else " " for letter in made_by)  # it stands in a comment
    return "\n".join([HEAD.format(what=what, made_by=one_line, script=script, run=run), *_options(config), "", body])


def _s(count: int, word: str) -> str:
    return word if count == 1 else f"{word}s"


def _options(config: Config) -> list[str]:
    """The #SBATCH lines."""
    cluster, slurm = config.cluster, config.cluster.slurm
    lines = [
        ("job-name", config.run.name, ""),
        ("partition", slurm.partition, ""),
        ("account", slurm.account, ""),
        ("nodes", str(cluster.nodes), ""),
        ("ntasks-per-node", "1", "one torchrun; it starts the ranks of its node"),
        ("gres", gres_of(config), "of each node"),
        ("cpus-per-task", str(slurm.cores or ""), ""),
        *([("exclusive", None, "whole nodes"), ("mem", "0", "all of it")] if slurm.exclusive else []),
        ("time", slurm.time, ""),
        ("signal", f"{SIGNAL}@{slurm.stop_before}", "seconds before the limit: the ranks save and stop"),
        ("requeue" if slurm.requeue else "no-requeue", None, "after a node failed or the job was preempted" if slurm.requeue else ""),
        ("dependency", "singleton", "jobs of this name run one after another"),
        ("wait-all-nodes", "1", ""),
        ("chdir", str(Path.cwd()), ""),
        ("output", f"{folder_of(config)}/%x-%j.log", ""),
        ("open-mode", "append", "a job that is queued again goes on in the same log"),
    ]
    made = [_option(name, value, remark) for name, value, remark in lines if value != ""]
    return made + [f"#SBATCH {each}" for each in slurm.options]


def _option(name: str, value: str | None, remark: str) -> str:
    quoted = value if value is None or re.fullmatch(r"[^\s\"'#\\]+", value) else '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
    text = f"#SBATCH --{name}" + ("" if quoted is None else f"={quoted}")
    return f"{text:<{WIDTH}} # {remark}" if remark else text


def _environment(config: Config) -> str:
    """Lines that export cluster.environment, unless the one who submits has said otherwise."""
    lines = [f'export {name}="${{{name}:-{_in_quotes(value)}}}"' for name, value in config.cluster.environment.items()]
    if config.cluster.slurm.container:
        lines.append(f'export PYTHONPATH="{_in_quotes(str(ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}"')
    if not lines:
        return ""
    return "\n".join(["", "# Environment of the ranks; a variable that is set where you call sbatch stays as it is.", *lines, ""])


def _in_quotes(text: str) -> str:
    """Text inside double quotes and ${...:-...}."""
    return re.sub(r'([\\"$`}])', r"\\\1", text)


def _setup(config: Config) -> str:
    return "".join(f"\n{line}" for line in config.cluster.slurm.setup) + ("\n" if config.cluster.slurm.setup else "")


def _srun(config: Config) -> str:
    """What srun is told: a rank that fails ends the others; torchrun's ranks share all cores of the job."""
    slurm = config.cluster.slurm
    options = ["--kill-on-bad-exit=1", "--cpu-bind=none"]
    if slurm.cores:
        options.append(f"--cpus-per-task={slurm.cores}")
    if slurm.container:
        here = os.fspath(Path.cwd())
        mounts = ",".join(dict.fromkeys([f"{ROOT}:{ROOT}", f"{here}:{here}", *slurm.mounts]))
        options += [f"--container-image={shlex.quote(slurm.container)}", f"--container-mounts={shlex.quote(mounts)}", '--container-workdir="$PWD"']
    return " \\\n        ".join(options) if slurm.container else " ".join(options)
