"""Print results: aligned text for people, JSON for programs; and show the progress of a long command."""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from vitrail.plurals import pluralize as pluralize

_SECONDS_BETWEEN_LINES = 15.0


def print_json(value: Any) -> None:
    """Print one JSON document on stdout."""
    print(json.dumps(value, indent=2))  # in ASCII: a file's name may be no valid text


def print_table(rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> None:
    """Print rows in columns on stdout; the columns listed in `right` are aligned to the right."""
    rows = [[strip_control_characters(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def strip_control_characters(text: str) -> str:
    """Replace control characters: names in model files may be anyone's."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def print_note(sentence: str) -> None:
    """Print a line on stderr, beside the results."""
    print(sentence, file=sys.stderr)


@contextlib.contextmanager
def show_progress(title: str, *, of_bytes: bool = False) -> Iterator[Callable[..., None]]:
    """Show a bar on a terminal, and elsewhere a line now and then.

    The function that it yields is called with how much is done, of how much, and optionally a detail to show.
    """
    if not sys.stderr.isatty():
        yield _make_line_reporter(title)
        return
    from rich.console import Console  # slow to import, and only for a terminal
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn() if of_bytes else MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[detail]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None, detail="")

        def update(done: int, total: int, detail: str = "") -> None:
            bar.update(task, completed=done, total=total or None, detail=detail)

        yield update


def _make_line_reporter(title: str) -> Callable[..., None]:
    last = time.monotonic()

    def update(done: int, total: int, detail: str = "") -> None:
        nonlocal last
        if time.monotonic() - last > _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            progress = f"{title}: {done:,} of {total:,}" if total else f"{title}: {done:,}"
            print_note(f"{progress}, {detail}" if detail else progress)

    return update


def format_count(number: int) -> str:
    """1234567 -> 1,234,567."""
    return f"{number:,}"


def format_bytes(number: int) -> str:
    """1234567 -> 1.2 MB."""
    if number < 1000:
        return f"{number:,.0f} bytes"
    scaled, unit = next(
        (number / size, unit) for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if number >= size
    )
    return f"{scaled:,.1f} {unit}"


def format_giga(number: int) -> str:
    """17563828224 -> 17.56 G."""
    return f"{number / 1e9:.2f} G"
