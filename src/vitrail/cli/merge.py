"""`vitrail merge OUT [PARTS...]`: the rows of a prediction in parts, as one file."""

from pathlib import Path

from vitrail.api.prediction_files import locate_output
from vitrail.cli import output
from vitrail.cli.arguments.evaluation import MergeArguments
from vitrail.formatting import pluralize
from vitrail.inference.row_merge import download_parts, find_parts, merge_parts


def run(arguments: MergeArguments) -> None:
    """Merge the parts, and print how many images there are."""
    path, url = locate_output(arguments.out)
    if url is not None:
        download_parts(url, path.parent)
    paths = [Path(part) for part in arguments.parts] or find_parts(path)
    merged = merge_parts(path, paths, url=url, overwrite=arguments.overwrite)
    if arguments.output.json:
        output.print_json({"written": str(url or path), **merged._asdict()})
        return
    failed = f", {merged.failed:,} of which cannot be read" if merged.failed else ""
    parts, images = pluralize(merged.parts, "part"), pluralize(merged.images, "image")
    output.print_note(f"{parts}, {images}{failed}; {url or path}")
