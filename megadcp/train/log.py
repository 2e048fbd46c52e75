"""What a person sees of a run, and the row that metrics.jsonl keeps of each step."""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megadcp.config.check import UserError
from megadcp.config.schema import Config, LogConfig
from megadcp.data.batch import LoadedStep
from megadcp.engine.step import StepResult
from megadcp.train.across import Across
from megadcp.train.state import Progress

WINDOW = 50  # steps that speed and eta are averaged over


class Console(Protocol):
    """Where lines go."""

    def say(self, text: str) -> None:
        """Show one line."""

    def progress(self, step: int, text: str) -> None:
        """Show how far the run is, where that can be shown in place."""

    def close(self) -> None:
        """Leave the screen as a plain one."""


class PlainConsole:
    """Lines on stdout, for files and schedulers."""

    def say(self, text: str) -> None:
        """Show one line."""
        print(text, flush=True)

    def progress(self, step: int, text: str) -> None:
        """Nothing: lines can't be taken back."""

    def close(self) -> None:
        """Nothing to do."""


class SilentConsole:
    """Nothing: of several ranks only the first one speaks."""

    def say(self, text: str) -> None:
        """Nothing."""

    def progress(self, step: int, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing to do."""


class RichConsole:
    """Lines with a progress bar below them, for terminals."""

    def __init__(self, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._bar = Progress(*columns, refresh_per_second=4, transient=True)
        self._task = self._bar.add_task("", total=total, visible=False)
        self._bar.start()

    def say(self, text: str) -> None:
        """Show one line above the bar."""
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def progress(self, step: int, text: str) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=step, description=text, visible=True)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.stop()


def open_console(log: LogConfig, total: int) -> Console:
    """The console that log.console asks for."""
    if log.console not in ("auto", "rich", "plain"):
        raise UserError(f"log.console={log.console} is not known; legal here: auto, rich, plain")
    rich = log.console == "rich" or (log.console == "auto" and sys.stdout.isatty())
    return RichConsole(total) if rich else PlainConsole()


@dataclass(frozen=True)
class Timing:
    """Of one step: the seconds of the whole of it, and what all ranks measured."""

    seconds: float
    everywhere: Across


class StepLog:
    """Makes rows and lines of steps. `flops` gives the model FLOPs of real lengths, forward and backward."""

    def __init__(self, config: Config, flops: Callable[[Sequence[int]], int], peak_flops: float | None) -> None:
        self.config, self.flops, self.peak_flops = config, flops, peak_flops
        self._recent: deque[tuple[int, float, float, float, float, float, float]] = deque(maxlen=WINDOW)

    def row(self, progress: Progress, loaded: LoadedStep, result: StepResult, lr: float, timing: Timing) -> dict[str, Any]:
        """The row of one step (metrics.py explains its keys)."""
        lengths = loaded.documents.lengths.tolist()
        plan = loaded.plan
        real, run = sum(lengths), sum(one.tokens for one in plan.microbatches)
        tflops = self.flops(lengths) / timing.seconds / 1e12 / self.config.cluster.world
        levels = Counter(one.recompute.level for one in plan.microbatches)
        sizes = Counter(one.cp for one in plan.microbatches)
        found, predicted = timing.everywhere, plan.predicted
        measured, bound, static = found.seconds, predicted.lower_bound_seconds, predicted.static_seconds
        self._recent.append((real, timing.seconds, found.data_seconds, loaded.wait_seconds, predicted.seconds, measured, found.bubble * measured))
        return {
            "step": progress.step,
            "tokens": progress.tokens,
            "documents": progress.documents,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            "tokens_per_second": real / timing.seconds,
            "padded_share": 1 - real / run,
            "tflops": tflops,
            "mfu": tflops * 1e12 / self.peak_flops if self.peak_flops else None,
            "memory_bytes": found.memory_bytes,
            "data_seconds": found.data_seconds,
            "plan_seconds": loaded.plan_seconds,
            "wait_seconds": loaded.wait_seconds,
            "predicted_seconds": predicted.seconds,
            "measured_seconds": measured,
            "bubble": round(found.bubble, 6),
            "bound_ratio": predicted.seconds / bound if bound and predicted.seconds else None,
            "static_gain": static / predicted.seconds if static and predicted.seconds else None,
            "slowest_lane": found.slowest_lane,
            "slowest_seconds": found.slowest_seconds,
            "update_seconds": result.update_seconds,
            "seconds": timing.seconds,
            "targets": result.targets,
            "microbatches": len(plan.microbatches),
            "cp": {str(size): sizes[size] for size in sorted(sizes)},
            "recompute": dict(levels),
            "measured": [[one.slot, round(one.seconds, 6), one.bytes] for one in result.microbatches],
            "skipped": not result.updated,
            **({} if result.updated else {"problem": result.problem}),
        }

    def line(self, row: dict[str, Any]) -> str:
        """The console's line: fixed fields in fixed order. Speed, shares, wait and eta are means over the last steps."""
        total = self.config.run.steps
        tokens, seconds, data, wait, predicted, measured, idle = (sum(column) for column in zip(*self._recent, strict=True))
        limit = f"/{self.config.hardware.memory_bytes / 2**30:.1f}" if self.peak_flops else ""
        levels = {level: count / row["microbatches"] for level, count in row["recompute"].items()}
        fields = [
            f"step {row['step']}/{total}",
            f"loss {row['loss']:.3f}",
            f"gnorm {row['grad_norm']:.2f}",
            f"lr {row['lr']:.1e}",
            f"{short(tokens / seconds)} tok/s",
            *([f"{100 * row['mfu']:.1f}% mfu"] if row["mfu"] is not None else []),
            flops_text(row["tflops"] * 1e12) + ("/rank" if self.config.cluster.world > 1 else ""),
            f"mem {row['memory_bytes'] / 2**30:.1f}{limit} GiB",
            f"data {100 * data / seconds:.1f}%",
            f"plan {1000 * row['plan_seconds']:.1f} ms",
            f"wait {1000 * wait / len(self._recent):.1f} ms",
            f"pred/meas {predicted / measured:.2f}" if measured else "pred/meas -",
            f"bubble {100 * idle / measured:.1f}%" if measured else "bubble -",
            f"pad {100 * row['padded_share']:.1f}%",
            *(["cp " + " ".join(f"{size}:{count}" for size, count in row["cp"].items())] if self.config.cluster.world > 1 else []),
            "rc " + " ".join(f"{level}:{100 * share:.0f}%" for level, share in levels.items()),
            f"eta {duration(seconds / len(self._recent) * (total - row['step']))}",
        ]
        return " | ".join(fields) + (f" | SKIPPED: {row['problem']}" if row["skipped"] else "")


def short(value: float) -> str:
    """412345 -> 412k."""
    for least, scale, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if value >= least:
            return f"{value / scale:.3g}{unit}"
    return f"{value:.0f}"


def flops_text(value: float) -> str:
    """FLOP/s of one device, in the unit that fits; one decimal below ten of it."""
    unit, name = (1e12, "TFLOP/s") if value >= 1e12 else (1e9, "GFLOP/s")
    return f"{value / unit:.{0 if value >= 9.95 * unit else 1}f} {name}"


def duration(seconds: float) -> str:
    """11h02m, 3m07s, 12s or 1.4s."""
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"
