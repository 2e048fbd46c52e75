"""SIGINT, SIGTERM and SIGUSR1: finish the step, save, leave with STOPPED. SIGUSR2 is for stacks (launch.py)."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from types import FrameType, TracebackType

STOPPED = 75  # exit code: stopped in order, the same command goes on
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # SIGUSR1: what batch systems are told to send before the time is up
PATIENCE_SECONDS = 1.0  # for a second signal to be heard by a main thread that may be inside a collective


class StopRequest:
    """A context in which the first signal sets `name`, and the second one of a kind ends the process as it would without this.

    A second signal is obeyed even while the main thread waits inside a collective, where Python runs no handlers: a thread hears of it. Two
    kinds are one wish: batch systems and closed terminals send several.
    """

    def __init__(self) -> None:
        self.name = ""
        self._before: dict[int, object] = {}
        self._at_once = False
        self._line: socket.socket | None = None
        self._wakeup = -1

    def __bool__(self) -> bool:
        return bool(self.name)

    @contextlib.contextmanager
    def at_once(self, active: bool = True) -> Iterator[None]:
        """Inside, nothing is worth finishing: a signal, also one that came before, raises SystemExit(STOPPED)."""
        before, self._at_once = self._at_once, active
        try:
            if active:
                self._leave_if_asked()
            yield
        finally:
            self._at_once = before

    def _leave_if_asked(self) -> None:
        if self.name:
            with contextlib.suppress(OSError):  # a handler must not print
                os.write(2, f"stopped by {self.name} before the first step; the same command starts again\n".encode())
            raise SystemExit(STOPPED)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name
        self._restore(number)
        if self._at_once:
            self._leave_if_asked()

    def _restore(self, number: int) -> None:
        if number in self._before:
            signal.signal(number, self._before.pop(number))  # type: ignore[arg-type]

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # handlers can be set nowhere else
            ours, theirs = socket.socketpair()
            theirs.setblocking(False)
            self._line = theirs
            self._wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=_listen, args=(ours,), name="signals", daemon=True).start()
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._ask)
            here = weakref.ref(self)
            os.register_at_fork(after_in_child=lambda: None if (one := here()) is None else one._forked())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number in SIGNALS:
            self._restore(number)
        if self._line is not None:
            signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
            self._line.shutdown(socket.SHUT_RDWR)  # a forked child may hold it, too
            self._line.close()
            self._line = None

    def _forked(self) -> None:
        """A child that was forked inside (a data worker) has no part in this: it ends by a signal as others do."""
        if self._line is not None:
            signal.set_wakeup_fd(-1)
            for number in SIGNALS:
                if self._before.pop(number, None) is not None:
                    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            self._line = None


def _listen(line: socket.socket) -> None:
    """Count signals as they arrive; the second of a kind that the main thread doesn't obey in time ends the process here."""
    heard: dict[int, int] = {}
    with line:
        while data := line.recv(64):
            for number in data:
                if number not in SIGNALS:
                    continue
                heard[number] = heard.get(number, 0) + 1
                if heard[number] >= 2:
                    time.sleep(PATIENCE_SECONDS)
                    if _still_there(line):
                        os._exit(128 + number)


def _still_there(line: socket.socket) -> bool:
    """Whether the context is still open: its end of the line is."""
    line.setblocking(False)
    try:
        return line.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    finally:
        line.setblocking(True)
