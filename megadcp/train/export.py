"""Hugging Face folders of a run while it trains: hf/step-00001000/, written from saved checkpoints by a process of its own.

The process sees files only, needs no GPU, and runs at low priority; what goes wrong in it is told, and training goes on. It reads from a folder
of hard links, so the checkpoint may be removed meanwhile. A folder appears under its name when it is complete. What a stopped run has not
exported of its last checkpoint is made up for when it goes on.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megadcp.config.schema import Config
from megadcp.train.checkpoint import PREFIX, folder_name, saved
from megadcp.train.run_folder import RunFolder

Say = Callable[[str], None]


class Exporter:
    """One export at a time, in the order in which their checkpoints appear. Does nothing but on rank 0 with checkpoint.export_every."""

    def __init__(self, run: RunFolder, config: Config, say: Say, leads: bool = True) -> None:
        self.folder = run.path / "hf"
        self._run, self._config, self._say = run, config, say
        self._every = config.checkpoint.export_every if leads else 0
        self._waiting: list[int] = []
        self._linked: list[int] = []
        self._running: tuple[int, subprocess.Popen[str]] | None = None
        if not self._every:
            return
        for left in (*self.folder.glob(".*"), *self.folder.glob("*.draft")):  # of a process that died
            shutil.rmtree(left, ignore_errors=True)
        for step in [int(path.name.removeprefix(PREFIX)) for path in saved(run)][-1:]:
            if not (self.folder / folder_name(step)).exists():
                self.saving(step)

    def saving(self, step: int) -> None:
        """The checkpoint of `step` is there, or will be soon. A folder of that step is replaced (the run went back and came here again)."""
        if self._every and (step % self._every == 0 or step == self._config.run.steps) and step not in self._waiting:
            self._waiting.append(step)

    def poll(self) -> None:
        """Take what has been saved meanwhile, tell of an export that has ended, start the next one. Waits for nothing."""
        for step in [step for step in self._waiting if (self._run.checkpoints / folder_name(step)).is_dir()]:
            self._waiting.remove(step)
            self._link(step)
        if self._running is not None and self._running[1].poll() is not None:
            self._ended()
        if self._running is None and self._linked:
            self._start(self._linked.pop(0))

    def finish(self, alive: Callable[[], None] = lambda: None) -> None:
        """Wait for all exports of checkpoints that are there; `alive` is called every second."""
        self.poll()
        while self._running is not None:
            with suppress(subprocess.TimeoutExpired):
                self._running[1].wait(1.0)
            alive()
            self.poll()

    def close(self) -> None:
        """Give up what is not done. Ranks that don't export leave the folder alone: the first one may still be at work in it."""
        if not self._every:
            return
        if self._running is not None:
            self._running[1].kill()
            self._running[1].communicate()
            self._running = None
        for left in self.folder.glob(".*"):
            shutil.rmtree(left, ignore_errors=True)

    def _source(self, step: int) -> Path:
        return self.folder / ".source" / folder_name(step)

    def _link(self, step: int) -> None:
        """Hold on to the checkpoint's files under other names."""
        try:
            self._source(step).mkdir(parents=True, exist_ok=True)
            for file in (self._run.checkpoints / folder_name(step)).iterdir():
                os.link(file, self._source(step) / file.name)
        except OSError as error:
            self._say(f"WARNING: step {step:,} is not exported: its files can't be held on to ({error}); tools/convert_checkpoint.py does it later")
            shutil.rmtree(self._source(step), ignore_errors=True)
            return
        self._linked.append(step)

    def _start(self, step: int) -> None:
        shutil.rmtree(self.folder / folder_name(step), ignore_errors=True)
        command = [sys.executable, "-m", "megadcp.train.export", str(self._source(step)), str(self.folder / folder_name(step))]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self._running = step, subprocess.Popen(
            [*command, self._config.checkpoint.export_format],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True,
        )  # fmt: skip

    def _ended(self) -> None:
        assert self._running is not None
        step, process = self._running
        lines = process.communicate()[0].strip().splitlines()
        self._running = None
        shutil.rmtree(self._source(step), ignore_errors=True)
        if process.returncode:
            why = lines[-1] if lines else f"exit code {process.returncode}"
            self._say(f"WARNING: step {step:,} was not exported: {why}")
        else:
            self._say(f"exported {self.folder / folder_name(step)}")


def export(source: Path, folder: Path, dtype: str) -> list[str]:
    """Write one checkpoint's Hugging Face folder; lines for people. UserError, OSError as in interop.hf."""
    from megadcp.interop.hf import Options, write_folder
    from megadcp.train.weights import export_of, open_weights

    return write_folder(export_of(open_weights(source)), folder, Options(dtype))


def main(argv: list[str]) -> int:
    """Exit code of the process that writes: SOURCE FOLDER DTYPE."""
    from megadcp.config.check import UserError

    os.nice(10)
    try:
        for line in export(Path(argv[0]), Path(argv[1]), argv[2]):
            print(line)
    except (UserError, OSError) as error:
        print(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
