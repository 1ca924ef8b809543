"""Arguments of the commands on datasets: data check, suspects, get, list, pack, remove."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from vitrail.cli.options import (
    COMPUTE,
    MODEL,
    Data,
    InferenceOptions,
    ModelOption,
    Number,
    OptionalDecimal,
    OptionalFolder,
    Output,
    OutputOptions,
    Preprocess,
)

SuspectSplit = Literal["train", "val", "test", "all"]
SuspectAction = Literal["relabel", "drop"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckArguments:
    """Find bad files, duplicates and leaks between splits in a dataset.

    Every image is decoded once. Of a dataset of more than 200,000 images, a random sample of 200,000 is decoded and
    only the headers of the others are read, unless --all is given. The output states what was compared. The full report
    is a JSON file; `data pack --leave-out` reads from it which images to leave out.
    """

    data: Data
    against: Annotated[str | None, arg(metavar="OTHER")] = None
    """A dataset whose validation and test images should not occur in this one; all of its images if it has neither."""
    decode_all: Annotated[bool, arg(name="all")] = False
    """Decode all images of a dataset of more than 200,000, and compare all of them with OTHER's."""
    embedding: Annotated[str | None, arg(metavar="MODEL")] = None
    """Also look for near-duplicates by the features of a model, which finds others: rotated, framed or strongly cropped
    images. The pairs are listed to be looked at; none is left out."""
    threshold: OptionalDecimal = None
    """Score from which --embedding lists a pair; a lower one finds more duplicates and more false pairs. Default:
    0.5."""
    skip_bad: bool = False
    """Exit with code 0 even if there are bad images."""
    out: Annotated[Path, arg(metavar="FILE")] = Path("data_report.json")
    """The report file, replaced if it exists."""
    output: Output = OutputOptions()
    compute: Annotated[InferenceOptions, COMPUTE] = InferenceOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class GetArguments:
    """Download a public dataset.

    It is verified and stored as tar shards; after that, other commands take its name as DATA.
    """

    name: Annotated[str, Positional, arg(metavar="NAME")]
    """A dataset that `vitrail data list` shows."""
    files: Annotated[tuple[Path, ...], arg(name="from", metavar="FILE...")] = ()
    """The dataset's archives, if you have downloaded them already."""
    output: Output = OutputOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListDatasetsArguments:
    """List the public datasets that can be downloaded, and those on this machine."""

    output: Output = OutputOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackArguments:
    """Pack a dataset into tar shards (WebDataset).

    The images are shuffled into shards of about 256 MB, with an index; their files are copied unchanged. Repeat an
    interrupted command to continue where it stopped.
    """

    data: Annotated[str, Positional, arg(metavar="DATA")]
    """A folder, a .csv or .jsonl, shards, Parquet files, a downloaded dataset, hf:ORG/NAME, or ImageNet's tars of class
    tars."""
    out: Annotated[Path, Positional, arg(metavar="OUT")]
    """The folder to write; other commands take it as DATA."""
    leave_out: Annotated[Path | None, arg(metavar="REPORT")] = None
    """A report of `data check`: bad images, and duplicates of another split or dataset, are left out."""
    relabel: Annotated[Path | None, arg(metavar="SUSPECTS")] = None
    """The suspects.csv of `data suspects` with your decisions: labels are changed and images dropped."""
    output: Output = OutputOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuspectsArguments:
    """Rank the images whose labels are probably wrong, by a model's features.

    The label of each image is judged by a linear classifier of the features that was not trained on it
    (cross-validation and confident learning). The result is suspects.html, a page to decide about each image, and
    suspects.csv, which `finetune --relabel` and `data pack --relabel` take.
    """

    data: Data
    model: ModelOption
    split: SuspectSplit = "all"
    """The images to search, whose labels the classifiers learn too."""
    folds: Number = 5
    """Parts of the cross-validation."""
    action: SuspectAction | None = None
    """Decide about all training images in suspects.csv, instead of one by one; those of val and test stay undecided."""
    out: OptionalFolder = None
    """A folder for suspects.html and suspects.csv; runs/suspects, runs/suspects-2, ... by default."""
    preprocess: Annotated[Preprocess, MODEL] = None
    inference: Annotated[InferenceOptions, COMPUTE] = InferenceOptions()
    output: Output = OutputOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoveArguments:
    """Delete a dataset that `vitrail data get` stored."""

    name: Annotated[str, Positional, arg(metavar="NAME")]
    """A dataset that `vitrail data list` shows as downloaded."""
    output: Output = OutputOptions()
