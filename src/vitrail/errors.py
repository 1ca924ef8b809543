"""What can go wrong for a user, each with the exit code the command line ends with.

A message names the value, the rule it breaks and what to do next. Anything else that is raised is a bug (exit code 1).
"""


class VitrailError(Exception):
    """A problem the user can act on; its text is the whole message."""

    exit_code = 1


class UsageError(VitrailError, ValueError):
    """A name, size or option that cannot be meant."""

    exit_code = 2


class DataError(VitrailError):
    """An image or data set that cannot be used."""

    exit_code = 3


class ModelError(VitrailError):
    """A model file that is damaged, not trusted, or cannot be expressed in the format asked for."""

    exit_code = 4
