"""One rank of a run that `supervise` started on this machine: python -m megadcp.train.rank RUN_FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

from megadcp.config.run_file import load_run
from megadcp.train import launch
from megadcp.train.signals import StopRequest


def main(folder: Path) -> int:
    """Train as one of the ranks; the settings are the folder's run.yaml."""
    config = load_run(folder)
    with StopRequest() as stop, launch.join(config) as world:
        from megadcp.train.loop import train

        return train(config, folder, world, stop)


if __name__ == "__main__":
    sys.exit(launch.exit_code(lambda: main(Path(sys.argv[1]))))
