"""Signals that ask a run to stop: caught even where a library replaced their handlers."""

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.training.test_resume import build_run, run_training
from vitrail.errors import StoppedError
from vitrail.runtime.signals import catch_stop_signals

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGUSR1")
IGNORE = 1  # SIG_IGN of C


def replace_handler_in_c() -> None:
    """What a library in C does, of which Python knows nothing."""
    library = ctypes.CDLL(None)
    library.signal.restype = ctypes.c_void_p
    library.signal(ctypes.c_int(signal.SIGUSR1), ctypes.c_void_p(IGNORE))


def test_handlers_that_a_library_replaced_are_restored() -> None:
    with catch_stop_signals() as request:
        replace_handler_in_c()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert request.signal is None  # lost
        request.restore_handlers()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert request.signal == signal.SIGUSR1


def test_handlers_that_python_code_replaced_stay() -> None:
    received: list[int] = []
    before = signal.getsignal(signal.SIGUSR1)
    with catch_stop_signals() as request:
        signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
        request.restore_handlers()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (received, request.signal) == ([signal.SIGUSR1], None)
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_run_stops_with_a_checkpoint_although_a_library_replaced_the_handlers(tmp_path: Path) -> None:
    def act(step_end: Any) -> None:
        if step_end.step == 2:
            replace_handler_in_c()
        if step_end.step == 4:
            os.kill(os.getpid(), signal.SIGUSR1)

    with pytest.raises(StoppedError, match="stopped after step 4"):
        run_training(build_run(), tmp_path / "run", act)
