"""Text for the cells of a CSV file that a spreadsheet shows and does not run.

A spreadsheet takes a cell that begins with = + - @ (or a tab or carriage return before them) for a formula, and names
of files and classes may come from anybody. Such text gets an apostrophe before it, as spreadsheets write it themselves.
So does text that begins with apostrophes before one of these, so that what was quoted can be told from what was not.
"""

import re

_FORMULA_START = re.compile(r"'*[=+\-@\t\r]")
_QUOTED_CELL = re.compile(r"'+[=+\-@\t\r]")


def quote_cell(text: str) -> str:
    """The text as a cell."""
    return f"'{text}" if _FORMULA_START.match(text) else text


def unquote_cell(cell: str) -> str:
    """The text of a cell that `quote_cell` made."""
    return cell[1:] if _QUOTED_CELL.match(cell) else cell
