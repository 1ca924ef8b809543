"""`vitrail data pack DATA OUT`: tar shards with an index."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from vitrail.cli import output

if TYPE_CHECKING:
    from vitrail.data.dataset import Dataset


def main(
    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")],
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")],
    leave_out: Annotated[Path | None, tyro.conf.arg(metavar="REPORT")] = None,
    json: bool = False,
) -> None:
    """Write a set as tar shards of about 256 MB in WebDataset's naming, shuffled, with an index.

    Image files keep their bytes. Interrupted, the same command goes on where it stopped.

    Args:
        data: A folder, a .csv or .jsonl, shards, a set that was got, hf:ORG/NAME, or ImageNet's tars of class tars.
        out: The folder to write, which is then a DATA too.
        leave_out: A data_report.json: bad images and those it found in another split or set are left out.
        json: Print JSON.
    """
    from vitrail.data.audit import read_excluded_images
    from vitrail.data.dataset import without_images
    from vitrail.data.imagenet import describe_release
    from vitrail.data.pack import pack
    from vitrail.data.sources import open_dataset

    dataset = open_dataset(data)
    output.print_note(f"data: {dataset.name}")
    for note in filter(None, (*dataset.notes, describe_release(dataset.classes))):
        output.print_note(f"note: {note}")
    if dataset.layout_warning:
        output.print_note(f"warning: {dataset.layout_warning}")
    before = sum(map(len, dataset.splits.values()))
    if leave_out is not None:
        dataset = without_images(dataset, read_excluded_images(leave_out, dataset))
        for sentence in _describe_empty_classes(dataset):
            output.print_note(f"warning: {sentence}")
    try:
        with output.show_progress("writing shards") as progress:
            pack(dataset, out, progress=progress)
    except KeyboardInterrupt:
        output.print_note("the same command goes on where this one stopped")
        raise
    images = {name: len(split) for name, split in dataset.splits.items()}
    written = sum(path.stat().st_size for path in out.glob("*.tar"))
    left = before - sum(images.values())
    if json:
        output.print_json({"written": str(out), "images": images, "left_out": left, "bytes": written})
        return
    rows = [("images", ", ".join(f"{split} {output.format_count(number)}" for split, number in images.items()))]
    if leave_out is not None:
        rows.append(("left out", output.format_count(left)))
    output.print_table(
        [
            *rows,
            (
                "written",
                f"{out} ({output.pluralize(len(list(out.glob('*.tar'))), 'shard')}, {output.format_bytes(written)})",
            ),
        ]
    )


def _describe_empty_classes(dataset: "Dataset") -> Iterator[str]:
    """The splits in which a class has no image any more."""
    for name, split in dataset.splits.items():
        counts = split.count_per_class(len(dataset.classes))
        empty = [label for label, count in zip(dataset.classes, counts, strict=True) if not count]
        if empty:
            yield f"{name} has no image of {', '.join(empty[:5])}{' ...' if len(empty) > 5 else ''}"
