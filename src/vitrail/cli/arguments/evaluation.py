"""Arguments of the commands that run a model on images: predict, evaluate, probe, figures; and report."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from vitrail.cli.options import (
    COMPUTE,
    MODEL,
    Data,
    Device,
    Group,
    ImageSize,
    InferenceOptions,
    Model,
    Number,
    OptionalFile,
    OptionalFolder,
    OptionalNumber,
    Output,
    OutputOptions,
    Preprocess,
)
from vitrail.config import Precision
from vitrail.config.features import FeatureKind

SplitName = Literal["test", "val", "train", "all"]
PrintedFormat = Literal["table", "csv", "jsonl"]
ProbeMethod = Literal["few-shot", "knn", "linear", "logistic"]
_MEASUREMENT, _CLASSIFIERS = Group("measurement"), Group("classifiers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictArguments:
    """Predict the classes of images, or write their features.

    An unreadable image gets a row with the error, the others continue, and the exit code is 3. With --out, repeat an
    interrupted command to continue where it stopped.
    """

    model: Annotated[str, Positional, arg(metavar="MODEL")]
    """A file or folder of any known format, builtin, hf:ORG/NAME, timm:NAME, a preset, or an exported .onnx or .xml."""
    paths: Annotated[tuple[str, ...], Positional, arg(metavar="PATHS")]
    """Images, folders of images or of shards, globs, tar shards (x-{000..127}.tar), Parquet files, lists (.csv,
    .jsonl), or - for a list of paths on standard input, one per line."""
    top: OptionalNumber = None
    """Labels per image. Default: 1; with a multi-label model that has thresholds, all labels above them."""
    embed: bool = False
    """Write features instead of labels."""
    features: FeatureKind = "default"
    """Which features --embed writes: the class token, the mean of the patch tokens, both, or attention pooling (map).
    Default: what the model's head reads."""
    normalize: bool = False
    """Scale each image's features to length 1."""
    attention: OptionalFolder = None
    """A folder for attention rollouts, one PNG per image."""
    float16: bool = False
    """Store features as float16, half the size."""
    out: Annotated[str | None, arg(metavar="FILE")] = None
    """The file to write: .csv, .jsonl, .parquet (extra `parquet`), or with --embed .npy or a folder/ of NumPy
    partitions. With s3://BUCKET/NAME, runs/NAME is uploaded there. Default: standard output."""
    part: Annotated[str | None, arg(metavar="K/N|auto")] = None
    """Predict one of N equal parts of the images, from 1/N to N/N, to a FILE of its own, which `vitrail merge` joins
    with the others. auto is the part of this process in a SLURM array job or under torchrun."""
    sbatch: OptionalNumber = None
    """Print a SLURM script that predicts in so many parts and merges them; predict nothing."""
    row_format: Annotated[PrintedFormat | None, arg(name="format")] = None
    """Output format. Default: by the suffix of FILE; without --out, a table on a terminal and CSV elsewhere."""
    batch: Annotated[OptionalNumber, COMPUTE] = None
    """Images per batch. Default: 64, or 256 on a GPU."""
    device: Annotated[Device, COMPUTE] = None
    precision: Annotated[Precision | None, COMPUTE] = None
    """Precision of the computation. Default: float32, or the faster precision that the model's file records as giving
    the same predictions on this CPU or GPU. Features are computed in float32 unless this is given."""
    workers: Annotated[OptionalNumber, COMPUTE] = None
    """Threads that read images, and for a GPU processes. Default: one per core."""
    fetch_urls: bool = False
    """Also fetch URLs listed on standard input, not only those given as PATHS."""
    json: bool = False
    """Print one JSON object per line and image; the same as --format jsonl."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MergeArguments:
    """Merge the parts that `vitrail predict --part` wrote to one file, in the order of the images.

    All parts must be there, finished, and of the same model, options and list of images. Their counts are checked. The
    parts are kept.
    """

    out: Annotated[str, Positional, arg(metavar="OUT")]
    """The file to write: what was the --out of the parts."""
    parts: Annotated[tuple[str, ...], Positional, arg(metavar="[PARTS...]")] = ()
    """The files of the parts, such as rows-00001-of-00128.parquet. Default: those beside OUT."""
    overwrite: bool = False
    """Replace OUT."""
    output: Output = OutputOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateArguments:
    """Measure models on labeled images: accuracy, calibration and mistakes.

    The predictions are also written to files, by image and by class.
    """

    model: Annotated[str, Positional, arg(metavar="MODEL")]
    """A file or folder of any known format, builtin, hf:ORG/NAME, timm:NAME, a preset, or timm-model:NAME."""
    data: Data
    against: Annotated[tuple[str, ...], arg(metavar="MODEL...")] = ()
    """Other models to measure on the same images; each is compared with the first."""
    split: SplitName | None = None
    """The split to measure on. Default: test, or val where there is no test. A dataset without splits: all images
    that the model was not trained on."""
    real: Annotated[OptionalFile, _MEASUREMENT] = None
    """A ReaL file: all correct labels of each image."""
    classes: Annotated[OptionalFile, _MEASUREMENT] = None
    """A file with the only classes the model may predict, one per line: for ImageNet-A, -R and the like."""
    tta: Annotated[bool, _MEASUREMENT] = False
    """Average the predictions of an image and of its mirror image (test-time augmentation)."""
    abstain: Annotated[float | None, _MEASUREMENT, arg(metavar="FRACTION")] = None
    """Find the probability threshold above which this fraction of predictions is correct, on val, and store it in
    MODEL, which then abstains below it."""
    strict: Annotated[bool, _MEASUREMENT] = False
    """Refuse unreadable images. By default, up to a tenth of the images may be unreadable and are left out."""
    precision: Annotated[Precision, COMPUTE] = "float32"
    """Precision of the computation: what is measured is the model in this precision, whatever `predict` chooses."""
    out: OptionalFolder = None
    """A folder for tables and figures; runs/evaluate, runs/evaluate-2, ... by default."""
    inference: Annotated[InferenceOptions, COMPUTE] = InferenceOptions()
    output: Output = OutputOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeArguments:
    """Measure a model's features, by simple classifiers trained on them."""

    model: Model
    data: Data
    methods: Annotated[tuple[ProbeMethod, ...], arg(metavar="METHOD...")] = ("few-shot", "knn", "linear", "logistic")
    """few-shot is the paper's: ridge regression on a few images per class; knn is nearest neighbors, linear is ridge
    regression, logistic is logistic regression. Default: all four."""
    shots: Annotated[tuple[int, ...], _CLASSIFIERS, arg(metavar="N...")] = ()
    """Images per class for few-shot. Default: 1, 5, 10 and 25, where every class has that many."""
    seeds: Annotated[Number, _CLASSIFIERS] = 3
    """Random draws of the few-shot images, for the mean and standard deviation."""
    penalty: Annotated[float | Literal["auto"], _CLASSIFIERS, arg(name="lambda", metavar="NUMBER|auto")] = 1024.0
    """L2 penalty of the ridge regressions; auto chooses it on held-out images."""
    k: Annotated[Number, _CLASSIFIERS] = 20
    """Number of neighbors of knn."""
    train_on_val: Annotated[bool, _CLASSIFIERS] = False
    """After the settings are chosen, train on the validation images too."""
    segmentation: Annotated[OptionalFolder, arg(metavar="MASKS")] = None
    """Classify patches by their dense features, with linear and logistic, and measure the mean IoU. MASKS is a folder
    of PNG masks with the images' names and sizes, palette or gray: values are class indices, 255 is ignored."""
    save: Annotated[Path | None, arg(metavar="OUT.safetensors")] = None
    """Write the model with the better of linear and logistic as its head, and a fitted temperature."""
    overwrite: bool = False
    """Replace the file of that name."""
    preprocess: Annotated[Preprocess, MODEL] = None
    inference: Annotated[InferenceOptions, COMPUTE] = InferenceOptions()
    output: Output = OutputOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class FiguresArguments:
    """Draw attention maps and the paper's figures of one model, or of two side by side.

    Each figure is a PNG and an .npz with its numbers. From the weights: embedding filters and position similarity. From
    images: attention distance and entropy by head, and CKA between layers, also of two models. For each image: the
    rollout, the relevance to the predicted class, the last layer's attention by head, and its tokens as colors. A
    figure that does not apply to a model is skipped, and the reason is printed. An unreadable image is named, the
    others continue, and the exit code is 3.
    """

    model: Model
    images: Annotated[tuple[str, ...], Positional, arg(metavar="[MODEL] [IMAGES...]")] = ()
    """Images, folders of images, globs, - for a list of paths on standard input, or a dataset such as digits, of which
    the test images are taken. The first may be a second model: a file of weights, a folder of weights without images,
    builtin, hf:ORG/NAME, timm:NAME or a preset; ./b16 is a folder of images."""
    out: OptionalFolder = None
    """A folder that is new, empty or written by this command; runs/figures, runs/figures-2, ... by default."""
    boxes: Annotated[OptionalFile, _MEASUREMENT] = None
    """Object boxes, to measure how much of the rollout falls inside: lines of file name, class, x0 y0 x1 y1, as in
    Tiny-ImageNet."""
    image_size: ImageSize = None
    """Resolution, one side or height and width; positions are resampled. Default: the model's."""
    num_images: Number = 64
    """Number of images to draw, evenly spread over those given. --boxes reads the others too."""
    faithfulness: Annotated[bool, _MEASUREMENT] = False
    """Delete and insert patches by relevance, by rollout and at random, and plot the probability of the class; this
    takes 66 forward passes per image."""
    device: Annotated[Device, COMPUTE] = None
    output: Output = OutputOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportArguments:
    """Write a run as one HTML page: its result, curves, mistakes, data and attention.

    The file needs no network. train, finetune and demo write it when they finish. The report of an interrupted run
    shows what there is so far.
    """

    run: Annotated[Path, Positional, arg(metavar="RUN")]
    """A run folder."""
    out: OptionalFile = None
    """The file to write, replaced if it exists; RUN/report.html by default."""
    data: Annotated[str | None, arg(metavar="DATA")] = None
    """Where the run's images are now, if they have moved."""
    output: Output = OutputOptions()
