"""The options of a prediction, and the file of rows that they and the model make."""

import dataclasses
from pathlib import Path
from typing import Any

from vitrail import __version__, remote
from vitrail.api.models import AnyModel, locate_model
from vitrail.config import Precision
from vitrail.config.features import AnyFeatureKind, count_features, describe_features
from vitrail.data.image_parts import Part, name_part
from vitrail.errors import UsageError
from vitrail.inference.bulk_prediction import AnyClassifier, choose_top, identify_model
from vitrail.inference.classifier import Classifier
from vitrail.inference.row_files import MODEL_NAME, FileFormat, RowFile, find_file_format
from vitrail.inference.row_merge import LISTING, PART

UPLOAD_FOLDER = Path("runs")
"""Where a file is written that is uploaded afterwards, as runs are."""
_FEATURE_FORMATS = ("npy", "partitions")
_FLOAT16_FORMATS = ("npy", "partitions", "parquet")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """What is computed for each image, and how."""

    top: int | None = None
    """Labels per image; None for 1, or for all above the thresholds of a multi-label model that has them."""
    embed: bool = False
    """Features instead of labels."""
    features: AnyFeatureKind = "default"
    normalize: bool = False
    """Scale each image's features to length 1."""
    float16: bool = False
    """Store features so."""
    attention: str | Path | None = None
    """A folder for attention rollouts, one picture per image."""
    out: str | Path | None = None
    """A file for the rows: .csv, .jsonl, .parquet, or for features .npy or a folder of partitions."""
    row_format: FileFormat | None = None
    """None for the one that the file's suffix names."""
    part: Part | None = None
    """The part of the images that is predicted, and which the file is named after."""
    batch: int | None = None
    """None for 64, or 256 on a GPU."""
    device: str | None = None
    precision: Precision | None = None
    """None for float32, or what the model's file records as faster on this processor with the same predictions."""
    workers: int | None = None
    """Threads that read images, and for a GPU processes; one per core by default."""
    fetch_urls: bool = False
    """Fetch URLs listed on standard input too."""

    def __post_init__(self) -> None:
        for name in ("top", "batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name} is {value}; it must be at least 1")
        if not self.embed and (self.normalize or self.features != "default"):
            raise UsageError("--features and --normalize choose what --embed writes: add --embed")
        if self.attention is not None and remote.is_remote(str(self.attention)):
            raise UsageError(f"--attention {self.attention} must be a local path")
        if self.attention is not None and self.part is not None:
            raise UsageError("--attention names its pictures over all images, so there is none for a --part")
        row_format = None if self.out is None else self.file_format
        if self.float16 and not (self.embed and row_format in _FLOAT16_FORMATS):
            raise UsageError("--float16 is for the features that --embed writes to .npy, .parquet or a folder/")
        if not self.embed and row_format in _FEATURE_FORMATS:
            raise UsageError(f"--out {self.out} holds features alone: it takes --embed")
        if self.embed and row_format == "csv":
            raise UsageError(f"--out {self.out}: --embed gives hundreds of numbers per image, too many for csv")

    @property
    def file_format(self) -> FileFormat:
        """The format of the file of rows."""
        row_format = self.row_format or find_file_format(str(self.out))
        if row_format is None:
            known = ".csv, .jsonl, .parquet, or with --embed .npy or a folder/"
            raise UsageError(f"--out {self.out} has no known suffix: {known}; or give --format")
        return row_format


def make_row_file(classifier: AnyClassifier, options: PredictOptions, model: AnyModel, listing: str = "") -> RowFile:
    """The file of the rows, which a later command with the same options continues.

    `listing` is the digest of the images' list, of which a part takes its share.
    """
    assert options.out is not None
    top = choose_top(classifier, options.top)
    command: dict[str, Any] = {
        "vitrail": __version__,
        MODEL_NAME: locate_model(model),
        **identify_model(classifier),
        "format": options.file_format,
        "--top": top,
        "--embed": options.embed,
        "--float16": options.float16,
        "--batch": classifier.batch_size,
        "--attention": None if options.attention is None else str(Path(options.attention)),
    }
    config = classifier.model.config if isinstance(classifier, Classifier) and options.embed else None
    if config is not None:
        command |= {"--features": describe_features(config, options.features), "--normalize": options.normalize}
    out = str(options.out)
    if options.part is not None:
        command |= {PART: str(options.part), LISTING: listing}
        out = name_part(out, options.part)
    path, url = locate_output(out)
    return RowFile(
        path=path,
        row_format=options.file_format,
        command=command,
        batch=classifier.batch_size,
        ranks=None if top is None else min(top, len(classifier.labels)),
        features=0 if config is None else count_features(config, options.features),
        float16=options.float16,
        attention=options.attention is not None,
        url=url,
    )


def locate_output(out: str) -> tuple[Path, str | None]:
    """Where rows are written, and the URL to which they are uploaded, if any."""
    if not remote.is_remote(out):
        return Path(out), None
    url = out.rstrip("/")
    return UPLOAD_FOLDER / url.rpartition("/")[2], url
