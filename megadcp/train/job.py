"""One rank of a batch job: python -m megadcp.train.job RUN_FOLDER, as torchrun (or srun) starts it.

The settings are the folder's run.yaml, which tools/submit.py wrote: a job that waits for days trains what was checked when it was queued.

Under megadcp.train.torchrun rank and launcher share a folder on their node (NODE_FOLDER). `stop` in it asks the ranks to save and leave;
`stopped` tells the launcher that they did. A rank that leaves in order then ends with 0: torchrun takes anything else for a failure and
ends the ranks that are still on their way.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from megadcp.train.signals import SIGNALS, STOPPED

NODE_FOLDER = "MEGADCP_NODE_FOLDER"  # set by megadcp.train.torchrun
POLL_SECONDS = 0.5
HEARD_SECONDS = 3.0  # in which a signal that went to every process of the job has reached this one
BY_BATCH_SYSTEMS = (signal.SIGUSR1, signal.SIGTERM)


def main(run_folder: Path) -> int:
    """Train as one rank of the job; the exit code."""
    node = os.environ.get(NODE_FOLDER, "")
    if node:
        for number in BY_BATCH_SYSTEMS:
            signal.signal(number, signal.SIG_IGN)  # until the trainer listens: `stop` keeps the request
        threading.Thread(target=_listen, args=(Path(node),), name="stop requests", daemon=True).start()
    from megadcp.config.run_file import load_run
    from megadcp.train import entry, launch

    try:
        code = launch.exit_code(lambda: entry.start(load_run(run_folder)))
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if not (node and code == STOPPED):
            raise
        (Path(node) / "stopped").touch()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # past torch, which would wait for the ranks
    if node and code == STOPPED:
        (Path(node) / "stopped").touch()
        return 0
    return code


# ------------------------------------------------------------------------------------------------- for the launcher's side
def ask_to_stop(node: Path, number: int) -> None:
    """Ask all ranks of the node to save and leave; `number` is the signal that said so."""
    stop = node / "stop"
    if not stop.exists():
        draft = node / ".stop"
        draft.write_text(signal.Signals(number).name, encoding="ascii")
        draft.rename(stop)


def was_stopped(node: Path) -> bool:
    """Whether ranks of the node left in order before the run was finished."""
    return (node / "stopped").exists()


# ------------------------------------------------------------------------------------------------------ on the rank's side
def _listen(node: Path) -> None:
    """Wait until the ranks are asked to stop, and for a trainer that listens; then see to it that this rank has heard of it."""
    stop = node / "stop"
    while not stop.exists():
        time.sleep(POLL_SECONDS)
    asked = signal.Signals[stop.read_text(encoding="ascii")]
    other = next(each for each in BY_BATCH_SYSTEMS if each != asked and each in SIGNALS)
    while not _listens(other):
        time.sleep(POLL_SECONDS)
    time.sleep(HEARD_SECONDS)
    if _listens(asked):  # it has not come
        os.kill(os.getpid(), other)  # a second one of the same kind would end this process


def _listens(number: int) -> bool:
    """Whether the trainer waits for this signal; the first one takes its handler away."""
    return callable(signal.getsignal(number))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
