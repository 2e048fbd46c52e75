"""What a person sees while raw text is turned into tokens: rates and the time that is left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

Say = Callable[[str], None]


def duration(seconds: float) -> str:
    """h:mm:ss."""
    whole = int(seconds + 0.5)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


class Progress:
    """A live line on a terminal, otherwise a plain line every `every` seconds. A context manager.

    Rates are those of this session's own work; the share and the time left are by bytes of input files, reused parts included.
    """

    def __init__(self, total: int, say: Say, console: str = "auto", every: float = 10.0) -> None:
        """total: bytes of input files. console: auto (rich when stderr is a terminal), rich or plain."""
        self.total, self.say, self.every = max(total, 1), say, every
        self.documents = self.bytes = self.tokens = self.weight = self.reused = 0
        self.begin = self.told = time.monotonic()
        self._live: Any = None
        self._rich = console == "rich" or (console == "auto" and sys.stderr.isatty())

    def __enter__(self) -> Progress:
        """Starts the clock."""
        self.begin = self.told = time.monotonic()
        if self._rich:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            self._live = Progress(BarColumn(bar_width=20), TextColumn("{task.description}"), console=Console(stderr=True), transient=True)
            self._live.start()
            self._task = self._live.add_task("", total=self.total)
        return self

    def __exit__(self, *_: object) -> None:
        """Takes the live line away."""
        if self._live is not None:
            self._live.stop()

    def reuse(self, weight: int) -> None:
        """A part that an earlier session finished."""
        self.reused += weight

    def add(self, documents: int, text_bytes: int, tokens: int, weight: int) -> None:
        """A part that was finished now."""
        self.documents += documents
        self.bytes += text_bytes
        self.tokens += tokens
        self.weight += weight
        now = time.monotonic()
        if self._live is not None:
            self._live.update(self._task, completed=self.reused + self.weight, description=self.line())
        elif now - self.told >= self.every:
            self.told = now
            self.say(self.line())

    @property
    def seconds(self) -> float:
        """Since the begin."""
        return time.monotonic() - self.begin

    def rates(self) -> str:
        """documents/s, MB/s of uncompressed input, tokens/s."""
        seconds = max(self.seconds, 1e-9)
        return f"{self.documents / seconds:,.0f} documents/s, {self.bytes / seconds / 1e6:,.1f} MB/s, {self.tokens / seconds:,.0f} tokens/s"

    def line(self) -> str:
        """Everything on one line."""
        left = max(0, self.total - self.reused - self.weight)
        eta = duration(left * self.seconds / self.weight) if self.weight else "?"
        share = min(1.0, (self.reused + self.weight) / self.total)
        return f"{share:.0%}, {self.documents:,} documents, {self.tokens:,} tokens; {self.rates()}; ETA {eta}"
