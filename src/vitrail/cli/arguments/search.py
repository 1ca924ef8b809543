"""Arguments of the commands on features: index, search."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from vitrail.cli.options import COMPUTE, Device, Number, OptionalNumber, Output, OutputOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexArguments:
    """Make the features of images searchable.

    FEATURES are read in one pass, however many there are, and scaled to length 1. Images that could not be read are
    left out and counted.
    """

    features: Annotated[tuple[Path, ...], Positional, arg(metavar="FEATURES")]
    """Files that `vitrail predict --embed --out` wrote, .npy or .parquet, or folders of them; all of one model."""
    out: Annotated[Path, arg(metavar="INDEX")]
    """The folder to write."""
    dtype: Literal["float16", "float32"] = "float16"
    """float16 takes half the space; similarities then differ by less than 0.001."""
    overwrite: bool = False
    """Replace the index of that name."""
    output: Output = OutputOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchArguments:
    """Find the images of an index that are most similar to each of yours, by the cosine of their features.

    The search is exact. An unreadable image gets a row with the error, the others continue, and the exit code is 3.
    """

    index: Annotated[Path, Positional, arg(metavar="INDEX")]
    """A folder that `vitrail index` wrote."""
    images: Annotated[tuple[str, ...], Positional, arg(metavar="IMAGES")]
    """Images, folders of images or of shards, globs, tar shards, or lists, as `vitrail predict` takes them."""
    top: Number = 20
    """Images found for each."""
    by_name: bool = False
    """Take IMAGES as names of images in the index, whose features it has; no model is needed."""
    model: Annotated[str | None, arg(metavar="MODEL")] = None
    """Where the model of the index is now; another model is refused. Default: where it was."""
    row_format: Annotated[Literal["table", "csv", "jsonl"] | None, arg(name="format")] = None
    """Output format. Default: a table on a terminal, and CSV elsewhere."""
    batch: Annotated[OptionalNumber, COMPUTE] = None
    """Images per batch. Default: 64, or 256 on a GPU."""
    device: Annotated[Device, COMPUTE] = None
    workers: Annotated[OptionalNumber, COMPUTE] = None
    """Threads that read images, and for a GPU processes. Default: one per core."""
    json: bool = False
    """Print one JSON object per line and image; the same as --format jsonl."""
