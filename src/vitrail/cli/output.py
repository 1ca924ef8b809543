"""Print results: aligned text for people, JSON for programs; and show the progress of a long command.

Nothing here imports torch: commands that print tables need none.
"""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from vitrail.api.progress import show_terminal_bar
from vitrail.formatting import strip_control_characters

_SECONDS_BETWEEN_LINES = 15.0


def print_json(value: Any) -> None:
    """Print one JSON document on stdout."""
    print(json.dumps(value, indent=2))  # in ASCII: a file's name may be no valid text


def print_table(
    rows: Iterable[Sequence[str]], *, right: Sequence[int] = (), below: Sequence[str] | None = None
) -> None:
    """Print rows in columns on stdout; the columns listed in `right` are aligned to the right.

    `below` has a line for each row, printed under it, indented; the empty ones are omitted.
    """
    rows = [[strip_control_characters(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row, line in zip(rows, below or [""] * len(rows), strict=True):
        cells = [
            cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
        if line:
            print(f"    {strip_control_characters(line)}")


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
    with show_terminal_bar(title, of_bytes=of_bytes) as update:
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
