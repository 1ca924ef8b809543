"""Arguments of the commands on datasets: data check, get, list, pack, remove."""

import dataclasses
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from vitrail.cli.options import Data, Output, OutputOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckArguments:
    """Decode every image once; list the bad ones, count classes, find duplicates within and across splits.

    Up to 200,000 images are decoded. Of a larger dataset a random sample of so many is decoded, and only the headers of
    the others are read, unless --all decodes them too. The output states what was compared. The full report is a JSON
    file, from which `data pack --leave-out` reads what to leave out.
    """

    data: Data
    against: Annotated[str | None, arg(metavar="OTHER")] = None
    """A dataset whose validation and test images should not occur in this one; all of its images if it has neither."""
    decode_all: Annotated[bool, arg(name="all")] = False
    """Decode all images of a dataset of more than 200,000, and compare all of them with OTHER's."""
    skip_bad: bool = False
    """Exit with code 0 even if some images are bad."""
    out: Annotated[Path, arg(metavar="FILE")] = Path("data_report.json")
    """The report file, replaced if it exists."""
    output: Output = OutputOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class GetArguments:
    """Download a public dataset, verify it and store it as tar shards; from then on its name is a DATA."""

    name: Annotated[str, Positional, arg(metavar="NAME")]
    """A dataset that `vitrail data list` shows."""
    files: Annotated[tuple[Path, ...], arg(name="from", metavar="FILE ...")] = ()
    """The dataset's own archives, if they are on this machine already."""
    output: Output = OutputOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListDatasetsArguments:
    """Show the public datasets that can be downloaded, and those that are on this machine."""

    output: Output = OutputOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackArguments:
    """Write a dataset as tar shards of about 256 MB in WebDataset's naming, shuffled, with an index.

    Image files keep their bytes. An interrupted command continues where it stopped when it is repeated.
    """

    data: Annotated[str, Positional, arg(metavar="DATA")]
    """A folder, a .csv or .jsonl, shards, a downloaded dataset, hf:ORG/NAME, or ImageNet's tars of class tars."""
    out: Annotated[Path, Positional, arg(metavar="OUT")]
    """The folder to write, which is then a DATA too."""
    leave_out: Annotated[Path | None, arg(metavar="REPORT")] = None
    """A data_report.json: bad images and duplicates of another split or dataset are left out."""
    output: Output = OutputOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoveArguments:
    """Delete a dataset that `vitrail data get` stored."""

    name: Annotated[str, Positional, arg(metavar="NAME")]
    """A dataset that `vitrail data list` shows as downloaded."""
    output: Output = OutputOptions()
