"""torchrun for one node of a batch job: python -m megadcp.train.torchrun [torchrun's options] -m megadcp.train.job RUN_FOLDER.

All options are torchrun's, and so are the ranks that it starts. Three things differ from plain torchrun:

- A signal to stop is no end. SIGUSR1 and SIGTERM end plain torchrun, and 30 seconds later all that still saves. Here the ranks are told of
  them, once, and are waited for: batch systems signal the first process of a node, or all of them, by configuration.
- The exit code is that of the ranks: 75 when they stopped in order, which plain torchrun reports as 1. The first node says it, after the
  others have left with 0: srun --kill-on-bad-exit takes any other code for a reason to end them.
- The number of the node comes from SLURM_NODEID where --node-rank is not given.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from megadcp.train.job import NODE_FOLDER, ask_to_stop, was_stopped
from megadcp.train.signals import STOPPED

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

PASSED_ON = (signal.SIGUSR1, signal.SIGTERM)
LAST_SECONDS = 3.0  # in which the other nodes leave
FORWARDED_BY_TORCH = "SIGINT,SIGHUP,SIGQUIT"  # what torchrun's own handlers get


def main(arguments: list[str]) -> int:
    """Run the ranks of this node until they end; their exit code."""
    with tempfile.TemporaryDirectory(prefix="megadcp-node-") as name:
        folder = Path(name)

        def stop(number: int, frame: FrameType | None) -> None:
            ask_to_stop(folder, number)

        for number in PASSED_ON:  # before the seconds that torch takes
            signal.signal(number, stop)
        os.environ[NODE_FOLDER] = name
        os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / "error.json")  # torchrun complains without one
        os.environ["PET_SIGNALS_TO_HANDLE"] = FORWARDED_BY_TORCH  # its option --signals-to-handle
        from torch.distributed import run as torchrun
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        for logger in ("torch.distributed.elastic", "torch.distributed.run"):
            logging.getLogger(logger).setLevel(logging.CRITICAL)  # a page for each rank; what matters is told below
        try:
            torchrun.main([*_node_rank(arguments), *arguments])
        except ChildFailedError as error:
            return _failed(error.failures)
        if not was_stopped(folder):
            return 0
        node, nodes = os.environ.get("SLURM_NODEID", "0"), os.environ.get("SLURM_STEP_NUM_NODES", "1")
        if node == "0" and nodes != "1":
            time.sleep(LAST_SECONDS)
        return STOPPED if node == "0" else 0


def _node_rank(arguments: list[str]) -> list[str]:
    node = os.environ.get("SLURM_NODEID", "")
    given = any(each.split("=")[0].replace("_", "-") == "--node-rank" for each in arguments)
    return [] if given or not node else [f"--node-rank={node}"]


def _failed(failures: dict[int, ProcessFailure]) -> int:
    """The exit code of a node on which ranks failed, and a line that names the first one. Its traceback is in the log already."""
    codes = {failure.exitcode for failure in failures.values()}
    if STOPPED in codes and codes <= {STOPPED, -signal.SIGTERM}:
        return STOPPED  # others had saved, too, and were ended on their way out
    rank, first = min(failures.items(), key=lambda item: item[1].timestamp)
    how = f"failed with exit code {first.exitcode}" if first.exitcode > 0 else f"was ended by {_name(-first.exitcode)}"
    print(f"node {os.environ.get('SLURMD_NODENAME') or os.uname().nodename}: rank {rank} {how}", file=sys.stderr, flush=True)
    return first.exitcode if first.exitcode > 0 else 128 - first.exitcode


def _name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


if __name__ == "__main__":
    ended = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ended)  # no last moment in which Python has put the signal handlers away, and a signal could change the code
