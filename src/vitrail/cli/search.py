"""`vitrail search INDEX IMAGES...`: the images of an index that are most similar to each of yours."""

import csv
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from vitrail.api import search
from vitrail.api.search import SearchResult
from vitrail.cli import output
from vitrail.cli.arguments.search import SearchArguments
from vitrail.errors import DataError, UsageError
from vitrail.formatting import pluralize, quote_cell

_COLUMNS = ("image", "rank", "neighbor", "similarity", "error")


def run(arguments: SearchArguments) -> None:
    """Search for the images, and print their neighbors."""
    if not arguments.images:
        raise UsageError("name the images to search for: files, folders or globs; or with --by-name their names")
    if arguments.json and arguments.row_format not in (None, "jsonl"):
        raise UsageError(f"--json is --format jsonl, and --format {arguments.row_format} was given too: omit one")
    row_format = "jsonl" if arguments.json else arguments.row_format or ("table" if sys.stdout.isatty() else "csv")
    results = search.search(
        arguments.index,
        list(arguments.images),
        top=arguments.top,
        by_name=arguments.by_name,
        model=arguments.model,
        batch=arguments.batch,
        device=arguments.device,
        workers=arguments.workers,
        progress=output.show_progress,
        notify=output.print_note,
    )
    _print_results(results, row_format)
    failed = sum(bool(result.error) for result in results)
    if failed:
        images = pluralize(len(results), "image")
        raise DataError(f"{failed:,} of {images} cannot be read; the error column says why")


def _print_results(results: Sequence[SearchResult], row_format: str) -> None:
    if row_format == "jsonl":
        for result in results:
            print(json.dumps(_make_json_object(result)))
    elif row_format == "csv":
        sys.stdout.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]  # a file's name may be no valid text
        writer = csv.writer(sys.stdout)
        writer.writerow(_COLUMNS)
        for cells in _iterate_cells(results):
            writer.writerow(quote_cell(cell) if isinstance(cell, str) else cell for cell in cells)
    elif results:
        rows = _iterate_cells(results)
        output.print_table([(similarity, name or error, image) for image, _, name, similarity, error in rows])


def _make_json_object(result: SearchResult) -> dict[str, Any]:
    if result.error:
        return {"image": result.image, "error": result.error}
    return {"image": result.image, "neighbors": [neighbor._asdict() for neighbor in result.neighbors]}


def _iterate_cells(results: Sequence[SearchResult]) -> Iterator[tuple[str, str, str, str, str]]:
    """A row of text for each neighbor, and one for each unreadable image."""
    for result in results:
        if result.error:
            yield result.image, "", "", "", result.error
        for rank, neighbor in enumerate(result.neighbors, 1):
            yield result.image, str(rank), neighbor.image, f"{neighbor.similarity:.6f}", ""
