"""Lock files that one process holds at a time and that name their holder.

Where the system locks files (record locks of POSIX, byte ranges of Windows), that holds the file: the lock ends with
its process, however that ends, and forked processes do not inherit it. On file systems without locks the process named
in the file holds it while it runs. In all cases a stale lock file is taken over.
"""

import contextlib
import errno
import json
import os
import shlex
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]
try:
    import msvcrt as _msvcrt
except ImportError:  # all other systems
    _msvcrt = None  # type: ignore[assignment]

from vitrail.errors import LockedError

_RETRY_SECONDS = 0.1
msvcrt: Any = _msvcrt
_LOCKED_BYTE = 2**30  # on Windows, where no other process could read a locked byte of the text
_held_locks: dict[str, int] = {}
"""This process's locks by path, and the thread that took each: record locks do not distinguish threads."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_held_locks.clear)


@contextlib.contextmanager
def hold_lock(path: Path, resource: str) -> Iterator[None]:
    """Hold the lock file for the duration of the block, or raise a `LockedError` that names the user of `resource`.

    The thread that holds the lock may enter again.
    """
    key = _get_lock_key(path)
    if _held_locks.get(key) == threading.get_ident():
        yield
        return
    descriptor = _acquire_lock(path, resource)
    _held_locks[key] = threading.get_ident()
    try:
        yield
    finally:
        del _held_locks[key]
        if msvcrt is not None:
            os.close(descriptor)  # Windows removes no open file, and then none that another process has locked since
        with contextlib.suppress(OSError):  # the folder may be gone
            path.unlink(missing_ok=True)
        if msvcrt is None:
            os.close(descriptor)


@contextlib.contextmanager
def hold_inheritable_lock(path: Path, resource: str) -> Iterator[tuple[int, ...]]:
    """Hold the lock file for the duration of the block, or raise a `LockedError`; yield its file descriptors.

    The lock remains while a child process lives to which they were passed. Windows has no such locks, so there is no
    descriptor there, and the lock ends with this process.
    """
    if fcntl is None:
        with hold_lock(path, resource):
            yield ()
        return
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockedError(f"{resource} is in use by another process; wait for it, or end it") from None
        yield (file.fileno(),)


@contextlib.contextmanager
def open_locked(path: Path) -> Iterator[IO[bytes]]:
    """Open a file to read and write for this process alone; create it if it is missing."""
    with hold_lock(path.with_name(f".{path.name}.lock"), str(path)):
        path.touch()
        with path.open("r+b") as file:
            yield file


@contextlib.contextmanager
def wait_for_lock(path: Path, resource: str) -> Iterator[None]:
    """Hold the lock file for the duration of the block, after waiting for others to release it."""
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(hold_lock(path, resource))
                break
            except LockedError:
                time.sleep(_RETRY_SECONDS)
        yield


def check_lock(path: Path, resource: str) -> None:
    """Raise a `LockedError` if another process or thread holds the lock file."""
    if _held_locks.get(_get_lock_key(path)) == threading.get_ident():
        return
    with contextlib.suppress(FileNotFoundError):
        os.close(_acquire_lock(path, resource, create=False))


def _acquire_lock(path: Path, resource: str, *, create: bool = True) -> int:
    """Lock the file, write this process into it, and return its descriptor."""
    if _get_lock_key(path) in _held_locks:  # opening and closing the file again would release the lock
        raise _make_error(resource, _describe_process(), path)
    while True:
        descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o644)
        try:
            holder = _read_holder(descriptor)
            if not _try_lock(descriptor, holder):
                raise _make_error(resource, holder, path)
            if not _is_same_file(descriptor, path):  # its holder has removed it in the meantime
                os.close(descriptor)
                continue
            if create:
                _write_holder(descriptor)
            if create and fcntl is None and msvcrt is None and _read_holder(descriptor).get("pid") != os.getpid():
                raise _make_error(resource, _read_holder(descriptor), path)  # another process was faster
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


def _get_lock_key(path: Path) -> str:
    """One key per lock file, whatever links lead to its folder."""
    return str(path.parent.resolve() / path.name)


def _write_holder(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # on a full disk the lock holds without naming its holder
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.write(descriptor, json.dumps(_describe_process()).encode())
    if fcntl is None and msvcrt is None:
        time.sleep(_RETRY_SECONDS)  # concurrent takers have written by now; the last one holds the lock


def _try_lock(descriptor: int, holder: dict[str, Any]) -> bool:
    """Take the lock without waiting, and return whether this process now holds it."""
    if fcntl is not None:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL):
                raise
        else:
            return True
    if msvcrt is not None:
        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
    return not _is_running(holder)


def _is_running(holder: dict[str, Any]) -> bool:
    """Whether the process named in a lock file is running; one on another machine is assumed to be."""
    pid = holder.get("pid")
    if not isinstance(pid, int) or pid <= 0:
        return False
    if holder.get("host") != socket.gethostname() or os.name == "nt":  # on Windows signal 0 would kill it
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return pid != os.getpid()


def _read_holder(descriptor: int) -> dict[str, Any]:
    """The process recorded in the lock file; empty if the file is empty or damaged."""
    try:
        os.lseek(descriptor, 0, os.SEEK_SET)
        holder = json.loads(os.read(descriptor, 2**16))
    except (ValueError, RecursionError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _describe_process() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": shlex.join(sys.argv)[:1000],
    }


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _make_error(resource: str, holder: dict[str, Any], path: Path) -> LockedError:
    who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')} since {holder.get('since', '?')}"
    return LockedError(
        f"{resource} is in use by {who!s:.200} ({holder.get('command', '?')!s:.200}): wait for it, stop it, or choose"
        f" another --out. If that process no longer exists, remove {path}"
    )
