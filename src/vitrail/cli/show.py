"""Printing results: aligned text for people, JSON for programs."""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any


def as_json(value: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def table(rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> None:
    """Rows in columns on stdout, those listed in `right` aligned to the right."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def printable(text: str) -> str:
    """The text without control characters: names in model files are anyone's."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def note(sentence: str) -> None:
    """A line on stderr, beside the results."""
    print(sentence, file=sys.stderr)


def count(number: int) -> str:
    """1234567 -> 1,234,567."""
    return f"{number:,}"


def giga(number: int) -> str:
    """17563828224 -> 17.56 G."""
    return f"{number / 1e9:.2f} G"
