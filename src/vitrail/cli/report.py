"""`vitrail report RUN`: a run as one HTML file to read, print or send."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from vitrail.cli import output
from vitrail.errors import DataError, UsageError

if TYPE_CHECKING:
    from vitrail.data.dataset import Dataset


def main(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
    data: Annotated[str | None, tyro.conf.arg(metavar="DATA")] = None,
    json: bool = False,
) -> None:
    """Write a run's result, curves, mistakes, data and what its model looks at as one file that needs no network.

    train, finetune and demo write it at their end. Of a run that was interrupted it shows what there is.

    Args:
        run: The folder of a run.
        out: Where the page goes; RUN/report.html unless told otherwise. An earlier one is replaced.
        data: Where the run's images are now, if not where they were.
        json: Print JSON.
    """
    from vitrail.report.write_report import REPORT_FILE, write_report
    from vitrail.runtime.devices import find_best_device

    if not run.is_dir():
        raise UsageError(f"{run} is no folder; give that of a run, such as runs/train")
    if out is not None and out.is_dir():
        raise UsageError(f"--out {out} is a folder; name a file for the page")
    path = out or run / REPORT_FILE
    facts = write_report(run, _open_run_dataset(run, data), find_best_device(), path)
    size = path.stat().st_size
    if json:
        output.print_json({"report": str(path), "bytes": size, "missing": facts.missing})
        return
    for sentence in facts.missing:
        output.print_note(f"note: {sentence}")
    print(f"{path}, {output.format_bytes(size)}")


def _open_run_dataset(run: Path, data: str | None) -> "Dataset | str":
    """The run's set, or where it is not to be found the sentence that says so."""
    from vitrail.data.sources import open_dataset
    from vitrail.report.run_facts import read_config

    if data is not None:
        return open_dataset(data)
    recorded = str(read_config(run)["data"])
    try:
        return open_dataset(recorded)
    except (DataError, UsageError) as error:
        output.print_note(
            f"note: the images are not shown, since the data is not found ({error}); --data says where it is"
        )
        return "The images are not shown: the data was not found where it was when this page was written."
