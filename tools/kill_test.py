"""Proof that a kill loses nothing: a run of two ranks is killed again and again, and ends as if nobody had touched it.

`python tools/kill_test.py [--kills 100] [--seed 0] [--out DIR] [--every-cold N] [--steps N] [--keep DIR]`

SIGKILL goes to supervisor and ranks together, to the supervisor alone or to one rank; at a change in the run folder (a draft appears, a rank
writes its file, the manifest, the rename, the pointer, old checkpoints go, a restart cleans up, ..) and a random moment of up to 20 ms later, or
at any time. Then the same command is given again, and the next life is killed in turn, until the run is finished; then a new run begins.

After every kill: no process is left, and none of its temporary files; everything that has a checkpoint's name is complete, and what `latest`
names, too; the newest checkpoint is not older than before; metrics.jsonl has the first rows of the undisturbed run, bit for bit. After every
restart: all that the kill had left is gone. At the end of a run: rows, weights, moments and random states of the undisturbed run, bit for
bit, each step once in metrics.jsonl and plans.jsonl, the same files and no other, no lock, no shared memory.

Most lives are forked from this process, which has torch imported: the same supervisor, ranks, sessions, locks and sockets. Every N-th one
(--every-cold) is started by the command that a user types. Linux only. A killed process loses nothing that it has written; a machine that
loses its power would: that is what fsync is for, and not tested here.

Exit codes: 0 all held, 1 something did not (its run folder is kept), 2 a request that makes no sense.
"""

from __future__ import annotations

import argparse
import random
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from benchmark import machine
from kill_test_check import Unbroken, after_kill, as_json, at_end, forgotten_memory, newest_step, place_of_death, rows_of, shared_memory, unfinished
from kill_test_lives import VICTIMS, Request, become_subreaper, bury, live
from kill_test_watch import AT_RANDOM, Moment, draw_moment

from megadcp.config.check import UserError
from megadcp.config.load import compose, reported
from megadcp.data.indexed import IndexedWriter

STEPS = 40
LIFE_ROWS = (6, 14)  # a life whose moment doesn't come is killed after so many rows
LIMIT_SECONDS = 180.0  # of a life, and of an ending
EVERY_COLD = 10
SETTINGS = (
    "data=corpus", "model=gpt_tiny", "model.layers=2", "model.hidden=32", "model.heads=2", "model.kv_heads=2", "model.head_dim=16", "model.ffn=64",
    "model.vocab=64", "data.split=[0.9,0.1,0.0]", "data.max_length=64", "data.tokens_per_step=256", "run.sample_prompt=''",
    "run.validate_every=10", "run.validate_tokens=256", "optim.lr=1e-2", "optim.warmup_steps=3", "checkpoint.every=2", "checkpoint.keep_last=2",
    "checkpoint.keep_every=20", "cluster.processes=2", "cluster.device=cpu", "cluster.threads=1", "log.console=plain", "log.every=10",
)  # fmt: skip


@dataclass
class Kill:
    """One kill and what came of it."""

    number: int
    run: int
    moment: str
    victim: str
    change: str
    cold: bool
    rows: int  # of this life
    seconds: float  # of this life
    newest: int  # step of the newest checkpoint then; -1: none yet
    found: str  # what lay in the run folder


@dataclass
class Findings:
    """All that was seen."""

    kills: list[Kill] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    runs: int = 0
    finished: int = 0
    early: int = 0  # lives that came to the end of the run before their moment

    def fail(self, where: str, text: str) -> None:
        """Say at once what is wrong, and remember it."""
        print(f"FAILED {where}: {text}", flush=True)
        self.failures.append(f"{where}: {text}")


class Test:
    """Runs in `place`, killed until there were enough kills."""

    def __init__(self, place: Path, asked: argparse.Namespace) -> None:
        self.place, self.asked, self.rng = place, asked, random.Random(asked.seed)
        self.findings, self.life_seconds, self.lives = Findings(), 1.0, 0
        self.temporary = place / "tmp"
        self.temporary.mkdir()
        self.prefix = write_corpus(place)
        self.unbroken = self._undisturbed()

    def request(self, name: str) -> Request:
        """The command of a run."""
        source = f"data.train=[{{prefix: {self.prefix}, name: numbers}}]"
        arguments = (*SETTINGS, source, f"run.steps={self.asked.steps}", f"run.folder={self.place / 'runs'}", f"run.name={name}")
        return Request(arguments, compose(arguments), self.place / f"{name}.log", self.temporary)

    def _undisturbed(self) -> Unbroken:
        request = self.request("undisturbed")
        pid, life = live(request, True, None, "", sys.maxsize, LIMIT_SECONDS)
        code, left = bury(pid, LIMIT_SECONDS)
        if code or left:
            raise UserError(f"the undisturbed run ended with exit code {code}; what it said:\n{request.log.read_text(errors='replace')[-3000:]}")
        self.life_seconds = life.first_row + (life.seconds - life.first_row) * min(1.0, LIFE_ROWS[1] / max(1, life.rows))
        print(
            f"undisturbed: {self.asked.steps} steps in {life.seconds:.1f} s, the first after {life.first_row:.1f} s; shown below: each kill",
            flush=True,
        )
        return Unbroken.read(request.folder, self.asked.steps)

    def run(self) -> Findings:
        """Kill until it is enough or something is wrong, and let the last run finish."""
        print(f"{'kill':>4} {'run':>3}  {'moment':<29}{'killed':<12}{'rows':>7} {'newest':>6}  what lay there")
        while not self.findings.failures and len(self.findings.kills) < self.asked.kills:
            self.findings.runs += 1
            self._one_run(f"run-{self.findings.runs}")
        return self.findings

    def _one_run(self, name: str) -> None:
        request, newest = self.request(name), -1
        left: dict[str, str] = {}
        for _ in range(10 * self.asked.kills):
            enough = len(self.findings.kills) >= self.asked.kills
            moment = None if enough else draw_moment(self.rng, self.life_seconds)
            done, left, newest = self._one_life(request, moment, left, newest)
            if self.findings.failures:
                return
            if done:
                self.findings.finished += 1
                shutil.rmtree(request.folder)
                return
        self.findings.fail(name, f"not finished after {10 * self.asked.kills} lives")

    def _one_life(self, request: Request, moment: Moment | None, left: dict[str, str], newest: int) -> tuple[bool, dict[str, str], int]:
        """One start, and its end: whether the run is finished, what is left over, and the step of the newest checkpoint."""
        self.lives += 1
        cold = self.asked.every_cold > 0 and self.lives % self.asked.every_cold == 0
        where = f"kill {len(self.findings.kills) + 1} of {request.config.run.name}"
        fail: Callable[[str], None] = lambda text: self.findings.fail(where, text)  # noqa: E731
        victim = self.rng.choice(VICTIMS)
        before = len(rows_of(request.folder))
        try:
            pid, death = live(request, not cold, moment, victim, self.rng.randint(*LIFE_ROWS), LIMIT_SECONDS)
        except TimeoutError:
            fail(f"a life hangs: no end within {LIMIT_SECONDS:.0f} s")
            bury(-1, 10.0)
            return False, {}, newest
        code, alive = bury(pid, LIMIT_SECONDS if death.victim.startswith("rank") else 15.0)
        if alive:
            fail(f"{len(alive)} processes are left")
        for path in self.temporary.iterdir():
            fail(f"the temporary file {path.name} is left")
        if death.rows:  # it was past its start: whatever lay there has to be gone
            now = unfinished(request.folder)
            for name in left.keys() & now.keys():
                fail(f"{name} ({left[name]}) is still there after a restart")
        if not death.victim:
            self.findings.early += moment is not None
            if code:
                fail(f"exit code {code} at its end, {_last_line(request.log)}")
                return False, {}, newest
            for problem in at_end(request.folder, self.unbroken):
                fail(problem)
            return True, {}, -1
        if death.victim.startswith("rank") and code not in (0, 1):
            fail(f"exit code {code} after the death of {death.victim}, {_last_line(request.log)}")
        for problem in after_kill(request.folder, self.unbroken, newest):
            fail(problem)
        left, newest = unfinished(request.folder), newest_step(request.folder)
        found = place_of_death(request.folder, left)
        assert moment is not None
        came = moment.name if death.change == AT_RANDOM or moment.matches(death.change) else "a row of metrics"  # instead, after LIFE_ROWS
        number = len(self.findings.kills) + 1
        kill = Kill(number, self.findings.runs, came, death.victim, death.change, cold, death.rows, round(death.seconds, 3), newest, found)
        self.findings.kills.append(kill)
        progress = f"{before}->{len(rows_of(request.folder))}"
        print(f"{number:>4} {kill.run:>3}  {came:<29}{death.victim:<12}{progress:>7} {newest:>6}  {found}{' (cold)' if cold else ''}", flush=True)
        return False, left, newest


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f"its last line: {lines[-1]}" if lines else "without a word"


def write_corpus(folder: Path) -> str:
    """A hundred documents of 4 to 60 tokens; the prefix of the dataset."""
    rng, prefix = np.random.default_rng(0), folder / "numbers"
    with IndexedWriter(str(prefix), np.dtype(np.uint16)) as writer:
        for _ in range(100):
            writer.add(np.cumsum(rng.integers(0, 3, int(rng.integers(4, 60)))) % 64)
        writer.finish()
    return str(prefix)


# ---------------------------------------------------------------------------------------------------------------- results
def tables(findings: Findings, seconds: float) -> str:
    """What was killed when, and what lay in the run folder then."""
    kills, lines = findings.kills, []
    lines.append(f"{len(kills)} kills in {findings.finished} finished runs, {seconds:.0f} s; {len(findings.failures)} failures;")
    per_life = [kill.seconds for kill in kills if not kill.cold]
    if per_life:
        cold = sum(kill.cold for kill in kills)
        lines.append(f"{cold} in lives that the command itself had started; the others lived for {statistics.median(per_life):.2f} s (median)")
    for title, of in (("killed", "victim"), ("moment", "moment"), ("what lay in the run folder", "found")):
        counted = Counter(getattr(kill, of) for kill in kills)
        lines += ["", f"| {title} | kills |", "| --- | --- |", *(f"| {name} | {count} |" for name, count in counted.most_common())]
    return "\n".join(lines) + "\n"


def save(out: Path, findings: Findings, asked: argparse.Namespace, seconds: float) -> None:
    """kills.json and kills.md."""
    out.mkdir(parents=True, exist_ok=True)
    about = {
        "command": f"python tools/kill_test.py --kills {asked.kills} --seed {asked.seed}", "machine": machine(), "settings": list(SETTINGS),
        "steps": asked.steps, "seconds": round(seconds, 1), "runs": findings.runs, "finished": findings.finished, "failures": findings.failures,
        "kills_one_by_one": [asdict(kill) for kill in findings.kills],
    }  # fmt: skip
    title = f"# Kills\n\nMeasured by `{about['command']}` ({machine()}); every kill: [kills.json](kills.json).\n\n"
    (out / "kills.md").write_text(title + tables(findings, seconds), encoding="utf-8")
    (out / "kills.json").write_text(as_json(about), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="kill_test.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="how many (100)")
    parser.add_argument("--seed", type=int, default=0, help="of what is killed when (0)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of each run ({STEPS})")
    parser.add_argument("--every-cold", type=int, default=EVERY_COLD, help=f"every N-th life is started by the command; 0: none ({EVERY_COLD})")
    parser.add_argument("--out", type=Path, help="folder for kills.json and kills.md")
    parser.add_argument("--keep", type=Path, help="folder for the runs, which stays; otherwise it stays only if something is wrong")
    asked = parser.parse_args(arguments)
    return reported(lambda: _main(asked))


def _main(asked: argparse.Namespace) -> int:
    if sys.platform != "linux":
        raise UserError("killing and watching needs Linux (inotify, orphans that come back)")
    if asked.kills < 1 or asked.steps < 4:
        raise UserError(f"--kills={asked.kills} --steps={asked.steps}: at least 1 kill and 4 steps")
    if asked.keep is not None and asked.keep.exists():
        raise UserError(f"--keep {asked.keep} exists already")
    become_subreaper()
    memory, begin = shared_memory(), time.monotonic()
    place = asked.keep or Path(tempfile.mkdtemp(prefix="kill-test-"))
    place.mkdir(parents=True, exist_ok=True)
    test = Test(place.resolve(), asked)
    findings = test.run()
    for name in forgotten_memory(memory):
        findings.fail("shared memory", f"/dev/shm/{name} is left")
    seconds = time.monotonic() - begin
    print("\n" + tables(findings, seconds))
    if asked.out is not None:
        save(asked.out, findings, asked, seconds)
    if findings.failures:
        print(f"{len(findings.failures)} failures; the runs and their logs are in {place}. Go on with the last one: ")
        print(shlex.join(test.request(f"run-{findings.runs}").command))
        return 1
    if asked.keep is None:
        shutil.rmtree(place)
    return 0


if __name__ == "__main__":
    sys.exit(main())
