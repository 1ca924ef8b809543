"""`vitrail merge OUT [PARTS...]`: the rows of a prediction in parts, as one file."""

from pathlib import Path

from vitrail.cli import output
from vitrail.cli.arguments.evaluation import MergeArguments
from vitrail.formatting import pluralize
from vitrail.inference.row_merge import find_parts, merge_parts


def run(arguments: MergeArguments) -> None:
    """Merge the parts and say how many images there are."""
    out = Path(arguments.out)
    paths = [Path(part) for part in arguments.parts] or find_parts(out)
    merged = merge_parts(out, paths, overwrite=arguments.overwrite)
    failed = f", {merged.failed:,} of which cannot be read" if merged.failed else ""
    parts, images = pluralize(merged.parts, "part"), pluralize(merged.images, "image")
    output.print_note(f"{parts}, {images}{failed}; {out}")
