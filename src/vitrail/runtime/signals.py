"""Signals that ask a run to stop: it stops between two steps, after saving a checkpoint."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_STOP_NAMES = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGBREAK")  # the last is Ctrl-Break on Windows
STOP_SIGNALS = tuple(getattr(signal, name) for name in _STOP_NAMES if hasattr(signal, name))


class StopRequest:
    """The first signal that asked the run to stop, if any."""

    def __init__(self, announce: Callable[[signal.Signals], None] = lambda _: None) -> None:
        self.signal: signal.Signals | None = None
        self._announce = announce

    def restore_handlers(self) -> None:
        """Install again the handlers that a library replaced behind Python's back, as triton's LLVM does.

        The default handler would end the run without a checkpoint. Handlers that Python code replaced stay.
        """
        for number in STOP_SIGNALS:
            if signal.getsignal(number) == self.receive:
                signal.signal(number, self.receive)

    def receive(self, number: int, _: FrameType | None) -> None:
        """Remember the signal; a second Ctrl-C interrupts at once.

        Under torchrun one Ctrl-C comes twice: from the terminal, and passed on by torchrun.
        """
        if self.signal is not None and number == signal.SIGINT and "TORCHELASTIC_RUN_ID" not in os.environ:
            raise KeyboardInterrupt
        if self.signal is None:
            self.signal = signal.Signals(number)
            # In a thread: a handler may interrupt a line that is being printed, and must not print into it.
            threading.Thread(target=self._announce, args=(self.signal,), daemon=True).start()


@contextlib.contextmanager
def catch_stop_signals(announce: Callable[[signal.Signals], None] = lambda _: None) -> Iterator[StopRequest]:
    """Catch stop signals within the block; only the main thread can catch them. `announce` is told at once."""
    request = StopRequest(announce)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request.receive) for number in STOP_SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
