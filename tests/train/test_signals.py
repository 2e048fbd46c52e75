import os
import signal
import threading

import pytest

from megadcp.train.signals import StopRequest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_acts(number):
    heard = []
    before = signal.signal(number, lambda *_: heard.append("outer"))
    try:
        with StopRequest() as stop:
            assert not stop
            os.kill(os.getpid(), number)
            assert stop.name == number.name
            assert heard == []
            os.kill(os.getpid(), number)
            assert heard == ["outer"]
        os.kill(os.getpid(), number)
        assert heard == ["outer", "outer"]
    finally:
        signal.signal(number, before)


def test_other_threads_can_train_too():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def work():
        with StopRequest() as stop:
            seen.append(bool(stop))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]
    assert signal.getsignal(signal.SIGTERM) is before
