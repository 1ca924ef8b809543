"""`vitrail report RUN`: a run as one HTML file to read, print or send."""

from pathlib import Path

from vitrail.cli import output
from vitrail.cli.arguments.evaluation import ReportArguments
from vitrail.data.dataset import Dataset
from vitrail.data.sources import open_dataset
from vitrail.errors import DataError, UsageError
from vitrail.report import write_report
from vitrail.report.run_facts import read_config
from vitrail.runtime.devices import find_best_device


def run(arguments: ReportArguments) -> None:
    """Write the report and print where it is."""
    run_folder, out = arguments.run, arguments.out
    if not run_folder.is_dir():
        raise UsageError(f"{run_folder} is no folder; give a run folder, such as runs/train")
    if out is not None and out.is_dir():
        raise UsageError(f"--out {out} is a folder; name a file for the report")
    path = out or run_folder / write_report.REPORT_FILE
    dataset = _open_run_dataset(run_folder, arguments.data)
    facts = write_report.write_report(run_folder, dataset, find_best_device(), path)
    size = path.stat().st_size
    if arguments.output.json:
        output.print_json({"report": str(path), "bytes": size, "missing": facts.missing})
        return
    for sentence in facts.missing:
        output.print_note(f"note: {sentence}")
    print(f"{path}, {output.format_bytes(size)}")


def _open_run_dataset(run_folder: Path, data: str | None) -> Dataset | str:
    """The run's dataset, or the sentence that says it was not found."""
    if data is not None:
        return open_dataset(data)
    recorded = str(read_config(run_folder)["data"])
    try:
        return open_dataset(recorded)
    except (DataError, UsageError) as error:
        output.print_note(
            f"note: the report shows no images, since the data was not found ({error}); --data says where it is"
        )
        return "The images are not shown: the data was not found where it was when this page was written."
