"""`vitrail study table STUDY...`: the headline table of the paper, with columns of your own."""

import csv as csv_module
from pathlib import Path
from typing import Annotated

import tyro

from vitrail.cli import show


def main(
    studies: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="STUDY")] = (),
    csv: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    json: bool = False,
) -> None:
    """Put the results of finished studies beside the paper's headline table, as Markdown.

    Args:
        studies: Folders of `study sweep` and `study vtab`; without any, the paper's table alone.
        csv: A file to write the table to as well.
        json: Print the table as JSON.
    """
    from vitrail.files import replacing
    from vitrail.studies import table

    found = [table.measured(folder) for folder in studies]
    rows, notes = table.assembled(found)
    if csv is not None:
        with replacing(csv) as fresh, fresh.open("w", newline="", encoding="utf-8") as file:
            csv_module.writer(file).writerows(rows)
    if json:
        heads, *lines = rows
        cells = {line[0]: dict(zip(heads[1:], line[1:], strict=True)) for line in lines}
        show.as_json({"table": cells, "notes": notes, "studies": [one.facts for one in found]})
    else:
        print(table.markdown(rows, notes))
