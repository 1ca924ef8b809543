"""Text for people: counts, sizes and durations, lists of names, and cells of CSV files.

A spreadsheet reads a cell that begins with = + - @ (or a tab or carriage return) as a formula, and anybody may choose
the names of files and classes. Such text gets a leading apostrophe, which is how spreadsheets quote it themselves. Text
whose apostrophes already precede one of these characters gets one too, so quoted and plain text stay distinct.
"""

import re
from collections.abc import Sequence

_FORMULA_START = re.compile(r"'*[=+\-@\t\r]")
_QUOTED_CELL = re.compile(r"'+[=+\-@\t\r]")


def pluralize(number: float, noun: str) -> str:
    """1 image, 2 images, 3 classes, 1.5 epochs."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "tch")) else "s"
    count = f"{number:.4g}" if isinstance(number, float) else f"{number:,}"
    return f"{count} {noun}{ending}"


def format_count(number: int) -> str:
    """1234567 -> 1,234,567."""
    return f"{number:,}"


def format_bytes(number: float) -> str:
    """1234567 -> 1.2 MB."""
    if number < 1000:
        return f"{number:,.0f} bytes"
    for unit in ("kB", "MB", "GB"):
        number /= 1000
        if number < 1000 or unit == "GB":
            break
    return f"{number:,.1f} {unit}"


def format_giga(number: int) -> str:
    """17563828224 -> 17.56 G."""
    return f"{number / 1e9:.2f} G"


def format_rate(images_per_second: float) -> str:
    """1234.5 -> 1,234 images/s, and 0.36 -> 0.4 images/s."""
    return f"{images_per_second:,.{0 if images_per_second >= 10 else 1}f} images/s"


def format_duration(seconds: float) -> str:
    """93784 -> 26 h 3 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60:,} h {minutes % 60} min" if minutes < 48 * 60 else f"{minutes / 1440:,.1f} days"


def join_first_names(names: Sequence[str], limit: int = 5) -> str:
    """The first few names, and dots where there are more."""
    return ", ".join(names[:limit]) + (" ..." if len(names) > limit else "")


def strip_control_characters(text: str) -> str:
    """Replace control characters: anybody may choose the names in a model file."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def quote_cell(text: str) -> str:
    """Text as a CSV cell that no spreadsheet runs as a formula."""
    return f"'{text}" if _FORMULA_START.match(text) else text


def unquote_cell(cell: str) -> str:
    """The text of a cell that `quote_cell` wrote."""
    return cell[1:] if _QUOTED_CELL.match(cell) else cell
