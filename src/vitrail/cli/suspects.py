"""`vitrail data suspects DATA --model M`: the images of a dataset whose labels are probably wrong."""

from vitrail.api.suspects import Suspects, suspects
from vitrail.cli import output
from vitrail.cli.arguments.data import SuspectsArguments
from vitrail.report.suspects_page import CSV_FILE, PAGE_FILE, describe_result
from vitrail.training.run_folder import choose_next_folder

_MAX_LISTED = 10


def run(arguments: SuspectsArguments) -> None:
    """Find label errors, write the page and the table, and print the first."""
    result = suspects(
        arguments.data,
        arguments.model,
        split=arguments.split,
        folds=arguments.folds,
        action=arguments.action,
        out=choose_next_folder("suspects") if arguments.out is None else arguments.out,
        preprocess=arguments.preprocess,
        **vars(arguments.inference),
        progress=output.show_progress,
        notify=output.print_note,
    )
    assert result.folder is not None, "it was given"
    if arguments.output.json:
        output.print_json(result.metrics | {"folder": str(result.folder)})
        return
    _print_suspects(result)
    output.print_table([("page", str(result.folder / PAGE_FILE)), ("table", str(result.folder / CSV_FILE))])
    if result.rows:
        output.print_note("decide on the page, save the table, and train with --relabel suspects.csv")


def _print_suspects(result: Suspects) -> None:
    """The number of suspects, and the first of them."""
    print(describe_result(result.errors))
    if not result.rows:
        return
    rows = [("image", "label", "likely label")]
    for suspect in result.rows[:_MAX_LISTED]:
        label = f"{suspect.label} {suspect.label_probability:.1%}"
        likely = f"{suspect.likely_label} {suspect.likely_probability:.1%}"
        rows.append((f"{suspect.split}: {suspect.image}", label, likely))
    output.print_table(rows)
    if len(result.rows) > _MAX_LISTED:
        print(f"... and {len(result.rows) - _MAX_LISTED:,} more in the table")
