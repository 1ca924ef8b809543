"""Signals that ask a run to stop: it stops between two steps, after saving a checkpoint."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name))


class StopRequest:
    """The first signal that asked the run to stop, if any."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def receive(self, number: int, _: FrameType | None) -> None:
        """Remember the signal; a second Ctrl-C interrupts at once.

        Under torchrun one Ctrl-C comes twice: from the terminal, and passed on by torchrun.
        """
        if self.signal is not None and number == signal.SIGINT and "TORCHELASTIC_RUN_ID" not in os.environ:
            raise KeyboardInterrupt
        self.signal = self.signal or signal.Signals(number)


@contextlib.contextmanager
def catch_stop_signals() -> Iterator[StopRequest]:
    """Catch stop signals within the block; only the main thread can catch them."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request.receive) for number in STOP_SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
