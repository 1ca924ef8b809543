"""How torch's threads wait for each other on a CPU. Its OpenMP library reads that once, when torch is imported."""

import os
import sys

_BUSY_LOAD = 0.4  # running processes per core


def let_threads_sleep(*, always: bool = False) -> None:
    """Before torch is imported, let its threads sleep while they wait if other processes use the cores, or always.

    What the environment says stays.
    """
    if "torch" not in sys.modules and (always or _is_machine_busy()):
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _is_machine_busy() -> bool:
    """Whether other processes use the cores. Threads that spin while they wait for each other then take 3 to 15 times
    as long as threads that sleep; on idle cores they take 0.5 to 0.9 times as long, and small models gain most."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return load >= _BUSY_LOAD * (os.cpu_count() or 1)
