"""`vitrail study table STUDY...`: the headline table of the paper, with columns of your own."""

import csv as csv_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from vitrail.cli import output, plan
from vitrail.errors import UsageError

if TYPE_CHECKING:
    from vitrail.studies.headline_table import TableEntry


def main(
    studies: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="STUDY")] = (),
    real: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    cost: Annotated[tuple[str, ...], tyro.conf.arg(metavar="MODEL=RECIPE...")] = (),
    csv: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    json: bool = False,
) -> None:
    """Put the results of finished studies beside the paper's headline table, as Markdown.

    Args:
        studies: Folders of `study sweep` and `study vtab`; without any, the paper's table alone.
        real: A ReaL file, by which what sweeps of ImageNet said of its validation images is counted too.
        cost: What a column's model took: TPUv3-core-days, or the recipe it was trained by, for `plan` to count them.
        csv: A file to write the table to as well.
        json: Print the table as JSON.
    """
    from vitrail.files import write_atomically
    from vitrail.studies import headline_table

    found = [headline_table.read_entry(folder) for folder in studies]
    if real is not None:
        found += headline_table.read_real_entries(studies, real)
    found += [_make_cost_cell(text, [one.model for one in found]) for text in cost]
    rows, notes = headline_table.build_table(found)
    if csv is not None:
        with write_atomically(csv) as fresh, fresh.open("w", newline="", encoding="utf-8") as file:
            csv_module.writer(file).writerows(rows)
    if json:
        heads, *lines = rows
        cells = {line[0]: dict(zip(heads[1:], line[1:], strict=True)) for line in lines}
        output.print_json({"table": cells, "notes": notes, "studies": [one.facts for one in found]})
    else:
        print(headline_table.render_markdown(rows, notes))


def _make_cost_cell(text: str, models: list[str]) -> "TableEntry":
    """The cell of a model's cost, given as a number of core-days or as a recipe."""
    from vitrail.studies import headline_table

    model, equals, value = text.rpartition("=")
    if not equals or model not in models:
        known = ", ".join(dict.fromkeys(models)) or "none: give studies"
        raise UsageError(f"--cost is {text!r:.80}; give MODEL=RECIPE or MODEL=CORE-DAYS, of the columns {known}")
    try:
        days, note = float(value), ""
    except ValueError:
        days = plan.count_core_days(value)
        note = f"planned for {value}, at {plan.DEFAULT_EFFICIENCY:.0%} of {plan.GPUS[plan.TPU_NAME].peak_flops / 1e12:g} TFLOP/s a core"
    if not 0 < days < float("inf"):
        raise UsageError(f"--cost {text}: core-days must be above 0")
    return headline_table.TableEntry(
        headline_table.COST_ROW, model, headline_table.format_core_days(days), note, {"model": model, "core_days": days}
    )
