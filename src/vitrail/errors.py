"""Errors that a user can act on, and every exit code of the command line.

A message names the value, the rule it breaks and what to do next. Any other exception is a bug (exit code 1).

    try:
        vitrail.evaluate("model.safetensors", "phtos")
    except vitrail.errors.VitrailError as error:  # or one of its kinds, here a DataError
        print(error, error.exit_code)

Exit codes: 0 ok, 1 a bug, 2 usage, 3 unusable data, 4 invalid or untrusted model file, 5 out of disk or memory,
6 training diverged, 7 a step computed twice gave two results, 75 stopped, checkpoint saved, 130 interrupted.
"""

import signal

__all__ = [
    "INTERRUPTED_EXIT_CODE",
    "OUT_OF_SPACE_EXIT_CODE",
    "ArgumentError",
    "CellsError",
    "ChangedDataError",
    "DataError",
    "DiskFullError",
    "DivergedError",
    "FetchError",
    "LockedError",
    "MismatchError",
    "ModelError",
    "NoImageError",
    "RemoteError",
    "StoppedError",
    "UsageError",
    "VitrailError",
    "WorkerKilledError",
]

OUT_OF_SPACE_EXIT_CODE = 5
INTERRUPTED_EXIT_CODE = 130


class VitrailError(Exception):
    """A problem that the user can act on; its text is the whole message."""

    exit_code = 1


class UsageError(VitrailError, ValueError):
    """An invalid name, size or option."""

    exit_code = 2


class ArgumentError(UsageError):
    """A mistyped option or value of a command."""

    def __init__(self, command: str, message: str) -> None:
        super().__init__(message)
        self.command = command


class LockedError(UsageError):
    """Another process holds the lock."""


class DataError(VitrailError):
    """An image or dataset that cannot be used."""

    exit_code = 3


class ChangedDataError(DataError):
    """A dataset that is not the one a run started with."""


class FetchError(DataError):
    """A mirror that fails to provide a file; another one may succeed."""


class NoImageError(DataError):
    """A folder without a single image file."""


class RemoteError(DataError):
    """A store that cannot be reached or refuses a request."""


class ModelError(VitrailError):
    """A model file that is damaged, untrusted, or impossible to write in the requested format."""

    exit_code = 4


class DiskFullError(VitrailError):
    """The disk has no room for a checkpoint; what was saved before is unchanged."""

    exit_code = OUT_OF_SPACE_EXIT_CODE


class WorkerKilledError(VitrailError):
    """A worker was killed, most likely for lack of memory."""

    exit_code = OUT_OF_SPACE_EXIT_CODE


class DivergedError(VitrailError):
    """A loss or gradient that is not finite; nothing was updated."""

    exit_code = 6


class MismatchError(VitrailError):
    """A step gave two different results; nothing was updated."""

    exit_code = 7


class StoppedError(VitrailError):
    """A signal stopped the run, which saved a checkpoint."""

    exit_code = 75

    def __init__(self, message: str, number: int = signal.SIGTERM) -> None:
        super().__init__(message)
        self.is_final = number != signal.SIGTERM
        """Whether it stays stopped where torchrun restarts it. SIGTERM is what torchrun itself sends to processes that
        it is about to restart, as when a node joins, so SIGTERM is never final."""


class CellsError(VitrailError):
    """Failed cells of a study whose other cells are done."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
