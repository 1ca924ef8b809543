"""What every Python process of the test runs first: to vitrail's modules, the system looks like Windows.

Their imports of Unix modules fail, and the `os`, `signal` and `sys` they get lack what Windows lacks; other packages
keep their own. multiprocessing can only spawn. The one function of Windows that is called has a stand-in, and its locks
are the system's locks of bytes, which end with their process too.
"""

import builtins
import ctypes
import fcntl
import multiprocessing
import os
import signal
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path

UNIX_MODULES = {"fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "posix", "syslog"}
WINDOWS_SIGNALS = {"SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM", "SIG_DFL", "SIG_IGN"}
OTHER_SIGNAL_NAMES = {"Signals", "Handlers", "signal", "getsignal", "raise_signal", "strsignal", "default_int_handler"}
UNIX_FUNCTIONS = {
    "fork", "forkpty", "register_at_fork", "pread", "preadv", "pwrite", "pwritev", "killpg", "getpgid", "setsid",
    "getuid", "geteuid", "getgid", "nice", "getpriority", "setpriority", "sched_getaffinity", "sched_setaffinity",
    "sysconf", "getloadavg", "statvfs", "uname", "mkfifo", "wait", "waitid", "chown", "fchmod", "posix_fadvise",
    "posix_spawn", "sendfile", "WNOHANG", "O_CLOEXEC", "O_NOCTTY", "O_NONBLOCK", "O_DIRECTORY", "O_NOFOLLOW", "O_SYNC",
    "O_DSYNC",
}  # fmt: skip


class WindowsModule(types.ModuleType):
    """A module without some of its names, and with other values of some."""

    def __init__(self, module: types.ModuleType, **values: object) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(original=module, values=values)

    def __getattr__(self, name: str) -> object:
        if name in self.values:
            return self.values[name]
        module: str = self.__dict__["original"].__name__
        is_signal = module == "signal" and (name in WINDOWS_SIGNALS or name in OTHER_SIGNAL_NAMES)
        if (module == "os" and name in UNIX_FUNCTIONS) or (module == "signal" and not is_signal):
            raise AttributeError(f"module {module!r} has no attribute {name!r} on Windows")
        return getattr(self.original, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.original, name, value)


def open_as_windows(path: str | os.PathLike[str], flags: int, mode: int = 0o777) -> int:
    if Path(path).is_dir():
        raise PermissionError(13, "Permission denied: Windows opens no folder", str(path))
    return os.open(path, flags, mode)


def fsync_as_windows(descriptor: int) -> None:
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(9, "Bad file descriptor: Windows flushes only what can be written")
    os.fsync(descriptor)


def lock_byte(descriptor: int, kind: int, count: int) -> None:
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, count, 0, os.SEEK_CUR)


def import_as_windows(
    name: str,
    globals: Mapping[str, object] | None = None,  # noqa: A002, as `__import__` has it
    locals: Mapping[str, object] | None = None,  # noqa: A002
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> types.ModuleType:
    if str((globals or {}).get("__name__")).partition(".")[0] == "vitrail":
        if name.partition(".")[0] in UNIX_MODULES:
            raise ModuleNotFoundError(f"No module named {name!r} on Windows", name=name)
        if name in WINDOWS_MODULES:
            return WINDOWS_MODULES[name]
    return original_import(name, globals, locals, fromlist, level)


kernel32 = types.SimpleNamespace(
    GetPhysicallyInstalledSystemMemory=lambda kilobytes: setattr(kilobytes._obj, "value", 8 * 2**20)
)
WINDOWS_MODULES = {
    "os": WindowsModule(os, name="nt", open=open_as_windows, fsync=fsync_as_windows),
    "signal": WindowsModule(signal),
    "sys": WindowsModule(sys, platform="win32"),
    "ctypes": WindowsModule(ctypes, windll=types.SimpleNamespace(kernel32=kernel32)),
    "msvcrt": WindowsModule(types.ModuleType("msvcrt"), LK_NBLCK=2, locking=lock_byte),
}
for method in ("fork", "forkserver"):
    del multiprocessing.context._concrete_contexts[method]  # type: ignore[attr-defined]
multiprocessing.get_all_start_methods = lambda: ["spawn"]
multiprocessing.set_start_method("spawn")
original_import = builtins.__import__
builtins.__import__ = import_as_windows
