"""`vitrail report RUN`: a run as one HTML file to read, print or send."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from vitrail.cli import show
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
    from vitrail.model.device import best
    from vitrail.report.write import PAGE, write

    if not run.is_dir():
        raise UsageError(f"{run} is no folder; give that of a run, such as runs/train")
    if out is not None and out.is_dir():
        raise UsageError(f"--out {out} is a folder; name a file for the page")
    path = out or run / PAGE
    facts = write(run, _opened(run, data), best(), path)
    size = path.stat().st_size
    if json:
        show.as_json({"report": str(path), "bytes": size, "missing": facts.missing})
        return
    for sentence in facts.missing:
        show.note(f"note: {sentence}")
    print(f"{path}, {show.size(size)}")


def _opened(run: Path, data: str | None) -> "Dataset | str":
    """The run's set, or where it is not to be found the sentence that says so."""
    from vitrail.data.sources import open_data
    from vitrail.report.gather import configuration

    if data is not None:
        return open_data(data)
    recorded = str(configuration(run)["data"])
    try:
        return open_data(recorded)
    except (DataError, UsageError) as error:
        show.note(f"note: the images are not shown, since the data is not found ({error}); --data says where it is")
        return "The images are not shown: the data was not found where it was when this page was written."
