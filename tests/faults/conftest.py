"""The layer under the system calls, compiled once, and a quick place to work in."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.shim import Shim


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Shim:
    """What does work in a process that may end at any system call."""
    return Shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: hundreds of saves are synced, and what a disk holds is not asked of it."""
    if not Path("/dev/shm").is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="vitrail-test-") as folder:
        yield Path(folder)
