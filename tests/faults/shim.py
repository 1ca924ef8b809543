"""Work in a forked process with a layer under its system calls (shim.c), which may end it at any of them."""

import ctypes
import enum
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from vitrail.errors import VitrailError

NOT_ALLOWED = 96


class How(enum.IntEnum):
    """What happens at the call that is to be the last."""

    LET = 0
    KILL = 1
    HALF = 2
    """As KILL, but half of a write is made."""
    FULL = 3
    """The disk is full from there on."""


class Ended(NamedTuple):
    """How the work ended."""

    code: int
    said: str
    calls: int
    """That changed anything below the folder; 0 where the process was killed."""


class Shim:
    """The layer, compiled."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None or not sys.platform.startswith("linux"):
            pytest.skip("a layer under the system calls needs Linux and a C compiler (cc, gcc or clang)")
        source, built, self.said = Path(__file__).with_name("shim.c"), folder / "shim.so", folder / "said.txt"
        subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", built, source], check=True)
        self.library = ctypes.CDLL(str(built))
        self.library.shim_disarm.restype = ctypes.c_long

    def __call__(
        self,
        work: Callable[[], int | None],
        folder: Path,
        *,
        stop: int = 0,
        how: How = How.LET,
        log: Path | None = None,
    ) -> Ended:
        """Do some work in a fork, with something happening at call `stop` of those that concern the folder."""
        child = os.fork()
        if not child:
            code = 1
            try:
                code = self._work(work, folder, stop, how, log)
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == NOT_ALLOWED:
            pytest.skip("this system does not let a process trap its own system calls (seccomp)")
        said, _, calls = self.said.read_text().rpartition("\n")
        return Ended(code, said, int(calls or 0))

    def _work(self, work: Callable[[], int | None], folder: Path, stop: int, how: How, log: Path | None) -> int:
        """The exit code; what was said goes to a file, and the number of calls behind it."""
        said = os.open(self.said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        sys.stdout = sys.stderr = os.fdopen(said, "w")
        path = os.fsencode(folder.resolve())
        if self.library.shim_arm(path, ctypes.c_long(stop), int(how), log and os.fsencode(log)):
            return NOT_ALLOWED
        try:
            code = work() or 0
        except VitrailError as error:
            print(error)
            code = error.exit_code
        except BaseException:  # noqa: BLE001  # the test that forked shows it
            traceback.print_exc()
            code = 1
        print(f"\n{self.library.shim_disarm()}", end="", flush=True)
        return code

    def note(self, line: str) -> None:
        """Put a line of one's own into the log."""
        self.library.shim_note(line.encode())
