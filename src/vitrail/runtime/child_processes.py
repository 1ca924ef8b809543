"""Programs in process groups of their own: started, asked to stop, and killed with their children.

Ctrl-C reaches this program alone, which decides what it means for the others.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import IO, Any

KILLED_CODE = -9
"""The exit code after SIGKILL, which Windows lacks."""
_CTRL_BREAK_CODE = 0xC000013A  # of a program on Windows that ended by Ctrl-Break, before it handled that


def start_process_group(
    command: Sequence[str], *, stdout: IO[Any], stderr: IO[Any], descriptors: Sequence[int] = ()
) -> "subprocess.Popen[bytes]":
    """Start a program as the first of a new process group; on POSIX it inherits the descriptors."""
    if os.name == "nt":
        flags = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
        return subprocess.Popen(command, stdout=stdout, stderr=stderr, creationflags=flags)  # noqa: S603
    return subprocess.Popen(  # noqa: S603, our own modules
        command, stdout=stdout, stderr=stderr, pass_fds=descriptors, start_new_session=True
    )


def request_stop(process: "subprocess.Popen[bytes]") -> None:
    """Ask the program to stop, by a signal that it can handle: Windows has one for groups, and its terminate kills."""
    if os.name == "nt":
        process.send_signal(getattr(signal, "CTRL_BREAK_EVENT", signal.SIGTERM))
    else:
        process.terminate()


def was_stopped_by_request(code: int) -> bool:
    """Whether an exit code is that of a program which `request_stop` ended before it could handle the signal."""
    return code in (-signal.SIGTERM, _CTRL_BREAK_CODE)


def kill_process_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill the program and its children, which may outlive it."""
    if os.name == "nt":
        command = ["taskkill", "/F", "/T", "/PID", str(process.pid)]
        subprocess.run(command, capture_output=True, check=False)  # noqa: S603
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
