"""Requests to stop, which a run answers between two steps instead of dying of them."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from vitrail.errors import VitrailError

STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name))


class StoppedError(VitrailError):
    """A run that was asked to stop, by a signal, and saved its state."""

    exit_code = 75

    def __init__(self, message: str, number: int = signal.SIGTERM) -> None:
        super().__init__(message)
        self.is_final = number != signal.SIGTERM
        """Whether it stays stopped where torchrun starts it again. SIGTERM is what torchrun itself sends to processes
        that it is about to start again, as when a node joins, so it never says that."""


class StopRequest:
    """The first signal that asked for an end, if one did."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def receive(self, number: int, _: FrameType | None) -> None:
        """Remember the signal; Ctrl-C for the second time does not wait any longer.

        Under torchrun one Ctrl-C comes twice: from the terminal, and passed on.
        """
        if self.signal is not None and number == signal.SIGINT and "TORCHELASTIC_RUN_ID" not in os.environ:
            raise KeyboardInterrupt
        self.signal = self.signal or signal.Signals(number)


@contextlib.contextmanager
def catch_stop_signals() -> Iterator[StopRequest]:
    """What asks the run to stop while the block lasts; only the main thread can be asked."""
    received = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.signal(number, received.receive) for number in STOP_SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
