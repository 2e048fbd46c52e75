"""SIGINT and SIGTERM: finish the step, save, leave."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """A context in which the first signal sets `name` and the second one of a kind acts as it would without this."""

    def __init__(self) -> None:
        self.name = ""
        self._before: dict[signal.Signals, object] = {}

    def __bool__(self) -> bool:
        return bool(self.name)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name
        self._restore(signal.Signals(number))

    def _restore(self, number: signal.Signals) -> None:
        if number in self._before:
            signal.signal(number, self._before.pop(number))  # type: ignore[arg-type]

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # handlers can be set nowhere else
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number in SIGNALS:
            self._restore(number)
