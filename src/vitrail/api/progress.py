"""Progress of long work: a bar in a notebook or on a terminal, and notes for the log.

The functions of `import vitrail` print nothing: notes go to Python's logger `vitrail`, and bars to stderr or the
notebook.
"""

import contextlib
import dataclasses
import html
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from vitrail.api.keyword_errors import get_called_keywords, rename_options
from vitrail.formatting import format_bytes, format_count, format_duration
from vitrail.runtime.workers import Notify, ShowProgress, hide_progress, ignore_progress

Progress = ShowProgress | bool
"""How progress is shown: True for a bar in a notebook or on a terminal, False for nothing, or a function."""
logger = logging.getLogger("vitrail")
logger.addHandler(logging.NullHandler())  # silent unless the caller configures logging
_SECONDS_BETWEEN_UPDATES = 0.2


class NoteCollector(list[str]):
    """Notes of a call, kept for its result and logged as they come, or passed to its `notify`.

    They name its keywords, as errors do.
    """

    def __init__(self, notify: Notify | None = None) -> None:
        super().__init__()
        self._notify = notify
        self._keywords = get_called_keywords()  # now: notes may come from another thread

    def __call__(self, sentence: str) -> None:
        """Log or pass on a sentence, and keep what is worth knowing after the call."""
        sentence = rename_options(sentence, self._keywords) if self._keywords else sentence
        if self._notify is not None:
            self._notify(sentence)
        else:
            logger.log(logging.WARNING if sentence.startswith("warning") else logging.INFO, sentence)
        if sentence.startswith(("note", "warning")):
            self.append(sentence)


def choose_progress(progress: Progress) -> ShowProgress:
    """How progress is shown: a bar for True, nothing for False."""
    if isinstance(progress, bool):
        return show_progress if progress else hide_progress
    return progress


@contextlib.contextmanager
def show_progress(title: str, *, of_bytes: bool = False) -> Iterator[Callable[..., None]]:
    """Show a bar in a notebook or on a terminal, and nothing elsewhere."""
    if display := find_notebook_display():
        with _show_notebook_bar(NotebookBar(title, of_bytes), display) as update:
            yield update
    elif sys.stderr.isatty():
        with show_terminal_bar(title, of_bytes=of_bytes) as update:
            yield update
    else:
        yield ignore_progress


def find_notebook_display() -> Callable[..., Any] | None:
    """IPython's `display` inside of a notebook, else None; IPython is never imported here."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or not hasattr(shell, "kernel"):
        return None
    from IPython.display import display  # imported already: this is a notebook

    return display


@dataclasses.dataclass
class NotebookBar:
    """A bar in a notebook: HTML, and text for consoles of the same kernel."""

    title: str
    of_bytes: bool = False
    done: int = 0
    total: int = 0
    """0 where it is unknown."""
    detail: str = ""
    seconds: float | None = None
    """How long it took, once it has ended."""
    is_stopped: bool = False
    """Whether it ended by an error or an interrupt."""

    def __repr__(self) -> str:
        return f"{self.title}: {self._describe()}"

    def _repr_html_(self) -> str:
        share = f' value="{self.done}" max="{self.total}"' if self.total else ""
        is_running = self.seconds is None
        bar = f'<progress{share} style="width: 16em; vertical-align: middle"></progress> ' if is_running else ""
        style = "font-variant-numeric: tabular-nums" + ("" if is_running else "; opacity: .75")
        title = self.title if is_running else f"{self.title}:"
        return f'<div style="{style}">{html.escape(title)} {bar}{html.escape(self._describe())}</div>'

    def _describe(self) -> str:
        format_number = format_bytes if self.of_bytes else format_count
        count = format_number(self.done)
        if self.total and (self.seconds is None or self.is_stopped):
            count = f"{count} of {format_number(self.total)}"
        if self.seconds is not None:
            duration = f"{self.seconds:.1f} s" if self.seconds < 10 else format_duration(self.seconds)
            count += f", {'stopped after' if self.is_stopped else 'done in'} {duration}"
        return f"{count}, {self.detail}" if self.detail else count


@contextlib.contextmanager
def _show_notebook_bar(bar: NotebookBar, display: Callable[..., Any]) -> Iterator[Callable[..., None]]:
    """Show a bar that becomes a line of text at the end, which a saved notebook keeps."""
    handle = display(bar, display_id=True)
    start = last = time.monotonic()

    def update(done: int, total: int, detail: str = "") -> None:
        nonlocal last
        bar.done, bar.total, bar.detail = done, total, detail
        if time.monotonic() - last > _SECONDS_BETWEEN_UPDATES:
            last = time.monotonic()
            handle.update(bar)

    try:
        yield update
    except BaseException:  # an interrupt too
        bar.is_stopped = True
        raise
    finally:
        bar.seconds = time.monotonic() - start
        handle.update(bar)


@contextlib.contextmanager
def show_terminal_bar(title: str, *, of_bytes: bool = False) -> Iterator[Callable[..., None]]:
    """Show a bar on stderr."""
    from rich.console import Console  # slow to import, and only for a terminal
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn() if of_bytes else MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[detail]}"),
    )
    # stdout stays itself: rows that a command prints meanwhile are for a file or a pipe, not for the bar's terminal
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as bar:
        task = bar.add_task(title, total=None, detail="")

        def update(done: int, total: int, detail: str = "") -> None:
            bar.update(task, completed=done, total=total or None, detail=detail)

        yield update
