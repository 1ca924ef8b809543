"""Printing results: aligned text for people, JSON for programs; and how far a long command is."""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from vitrail.formatting import format_bytes as format_bytes
from vitrail.formatting import format_count as format_count
from vitrail.formatting import format_giga as format_giga
from vitrail.formatting import pluralize as pluralize
from vitrail.formatting import strip_control_characters as strip_control_characters

_LINE_EVERY_SECONDS = 15.0  # seconds


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=2))  # in ASCII: a file's name may be no valid text


def print_table(rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> None:
    """Rows in columns on stdout, those listed in `right` aligned to the right."""
    rows = [[strip_control_characters(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def print_note(sentence: str) -> None:
    """A line on stderr, beside the results."""
    print(sentence, file=sys.stderr)


@contextlib.contextmanager
def show_progress(what: str, *, of_bytes: bool = False) -> Iterator[Callable[..., None]]:
    """A function to call with how much is done, of how much, and what else there is to say (optional).

    It shows a bar on a terminal, and elsewhere now and then a line.
    """
    if not sys.stderr.isatty():
        yield _make_line_reporter(what)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    amount = DownloadColumn() if of_bytes else MofNCompleteColumn()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        amount,
        TimeRemainingColumn(),
        TextColumn("{task.fields[words]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None, words="")

        def update(done: int, total: int, words: str = "") -> None:
            bar.update(task, completed=done, total=total or None, words=words)

        yield update


def _make_line_reporter(what: str) -> Callable[..., None]:
    last = time.monotonic()

    def update(done: int, total: int, words: str = "") -> None:
        nonlocal last
        if time.monotonic() - last > _LINE_EVERY_SECONDS:
            last = time.monotonic()
            so_far = f"{what}: {done:,} of {total:,}" if total else f"{what}: {done:,}"
            print_note(f"{so_far}, {words}" if words else so_far)

    return update
