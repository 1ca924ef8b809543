"""`vitrail study table STUDY...`: the headline table of the paper, with columns of your own."""

import csv as csv_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from vitrail.cli import plan, show
from vitrail.errors import UsageError

if TYPE_CHECKING:
    from vitrail.studies.table import Measured


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
    from vitrail.files import replacing
    from vitrail.studies import table

    found = [table.measured(folder) for folder in studies]
    if real is not None:
        found += table.measure_real(studies, real)
    found += [_cost(text, [one.model for one in found]) for text in cost]
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


def _cost(text: str, models: list[str]) -> "Measured":
    """The cell of a model's cost, given as a number of core-days or as a recipe."""
    from vitrail.studies import table

    model, equals, value = text.rpartition("=")
    if not equals or model not in models:
        known = ", ".join(dict.fromkeys(models)) or "none: give studies"
        raise UsageError(f"--cost is {text!r:.80}; give MODEL=RECIPE or MODEL=CORE-DAYS, of the columns {known}")
    try:
        days, note = float(value), ""
    except ValueError:
        days = plan.count_core_days(value)
        note = f"planned for {value}, at {plan.EFFICIENCY:.0%} of {plan.GPUS[plan.TPU].peak / 1e12:g} TFLOP/s a core"
    if not 0 < days < float("inf"):
        raise UsageError(f"--cost {text}: core-days must be above 0")
    return table.Measured(table.COST, model, table.core_days(days), note, {"model": model, "core_days": days})
