"""How work that takes long reports to its caller. The command line shows a bar and prints notes on stderr."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from vitrail.runtime.workers import ProgressCallback, ignore_progress

ShowProgress = Callable[[str], AbstractContextManager[ProgressCallback]]
"""Entered with a title for as long as a piece of work takes; what it yields is called as the work proceeds."""
Notify = Callable[[str], None]
"""Called with a sentence for the user."""


@contextlib.contextmanager
def hide_progress(title: str) -> Iterator[ProgressCallback]:  # noqa: ARG001, the signature of ShowProgress
    """Show nothing."""
    yield ignore_progress


def ignore_note(sentence: str) -> None:
    """Print nothing."""
