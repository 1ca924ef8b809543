"""Arguments of the commands that run a model on images: predict, evaluate, probe, figures; and report."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from vitrail.cli.options import (
    Data,
    Device,
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

SplitName = Literal["test", "val", "train", "all"]
PrintedFormat = Literal["table", "csv", "jsonl"]
ProbeMethod = Literal["few-shot", "knn", "linear", "logistic"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictArguments:
    """Label images. An unreadable image is named in its row, the others continue, and the exit code is 3.

    With --out, an interrupted command continues where it stopped when it is repeated.
    """

    model: Annotated[str, Positional, arg(metavar="MODEL")]
    """A file or folder of any known format, hf:ORG/NAME, timm:NAME, a preset, or an exported .onnx or .xml."""
    paths: Annotated[tuple[str, ...], Positional, arg(metavar="PATHS")]
    """Images, folders of images or of shards, globs, tar shards (x-{000..127}.tar), lists (.csv, .jsonl), or - for a
    list of paths on standard input, one per line."""
    top: Number = 1
    """Labels per image."""
    embed: bool = False
    """Write features instead of labels."""
    attention: OptionalFolder = None
    """A folder for attention rollouts, one picture per image."""
    out: Annotated[str | None, arg(metavar="FILE")] = None
    """A file for the rows: .csv, .jsonl, or with --embed .npy. Omitted: standard output."""
    row_format: Annotated[PrintedFormat | None, arg(name="format")] = None
    """Format of the rows. Omitted: by the suffix of FILE; else a table on a terminal, and CSV elsewhere."""
    batch: Number = 64
    """Images per batch."""
    device: Device = None
    precision: Precision | None = None
    """Precision of the computation. Omitted: float32, or on a CPU what the model's file records as faster there with
    the same predictions. Features are float32 by default."""
    workers: OptionalNumber = None
    """Threads that read images. Omitted: one per core."""
    fetch_urls: bool = False
    """Fetch URLs listed on standard input too. Omitted: only those given as PATHS."""
    json: bool = False
    """Print one JSON object per image and line: --format jsonl."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateArguments:
    """Measure models on labeled images, and write their predictions by image and by class."""

    model: Annotated[str, Positional, arg(metavar="MODEL")]
    """A file or folder of any known format, hf:ORG/NAME, timm:NAME, a preset, or timm-model:NAME."""
    data: Data
    against: Annotated[tuple[str, ...], arg(metavar="MODEL...")] = ()
    """Other models, measured on the same images and each compared with the first."""
    split: SplitName | None = None
    """The split to measure on. Omitted: test, or val where there is no test. A dataset without splits: all images
    that the model was not trained on."""
    real: OptionalFile = None
    """A ReaL file: all correct labels of each image."""
    classes: OptionalFile = None
    """A file with the only classes the model may predict, one per line: for ImageNet-A, -R and the like."""
    tta: bool = False
    """Average the predictions of an image and of its mirror image (test-time augmentation)."""
    abstain: Annotated[float | None, arg(metavar="SHARE")] = None
    """Find the probability above which this share of predictions is correct, on val, and store it in MODEL."""
    strict: bool = False
    """Refuse unreadable images. Omitted: up to a tenth of the images are left out."""
    out: OptionalFolder = None
    """A folder for tables and figures; runs/evaluate, runs/evaluate-2, ... by default."""
    inference: InferenceOptions = InferenceOptions()
    output: Output = OutputOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeArguments:
    """Measure a model's features by simple classifiers trained on them: the paper's few-shot, kNN and others."""

    model: Model
    data: Data
    methods: tuple[ProbeMethod, ...] = ("few-shot", "knn", "linear", "logistic")
    """Ridge regression on a few images per class, nearest neighbors, ridge regression, logistic regression."""
    shots: Annotated[tuple[int, ...], arg(metavar="N...")] = ()
    """Images per class for few-shot. Omitted: 1, 5, 10 and 25, as far as every class has them."""
    seeds: Number = 3
    """Random draws of these images, for the mean and the standard deviation."""
    penalty: Annotated[float | Literal["auto"], arg(name="lambda", metavar="NUMBER|auto")] = 1024.0
    """Penalty of the ridge regressions; auto chooses it, on images that are not measured."""
    k: Number = 20
    """Neighbors that vote."""
    train_on_val: bool = False
    """Train on the validation images too, once settings are chosen."""
    save: Annotated[Path | None, arg(metavar="OUT.safetensors")] = None
    """Write the model with the better of linear and logistic as its head, and a fitted temperature."""
    overwrite: bool = False
    """Replace the file of that name."""
    preprocess: Preprocess = None
    inference: InferenceOptions = InferenceOptions()
    output: Output = OutputOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class FiguresArguments:
    """Draw the paper's figures of one model, or of two side by side; each is a PNG and an .npz with its numbers.

    From the weights: embedding filters, position similarity. With images: attention distance and entropy by head, CKA
    between layers, also of two models; and for each image the rollout, the relevance to the predicted class, the last
    attention by head, and its tokens as colors. A figure that a model cannot have is skipped with a reason. An
    unreadable image is named, the others continue, and the exit code is 3.
    """

    model: Model
    images: Annotated[tuple[str, ...], Positional, arg(metavar="[MODEL] [IMAGES...]")] = ()
    """Images, folders of images, globs, - for a list of paths on standard input, or a dataset such as digits, of which
    the test images are taken. The first may be a second model: a file of weights, a folder of weights without images,
    hf:ORG/NAME, timm:NAME or a preset; ./b16 is a folder of images."""
    out: OptionalFolder = None
    """A folder that is new, empty or written by this command; runs/figures, runs/figures-2, ... by default."""
    boxes: OptionalFile = None
    """Object boxes, to measure how much of the rollout falls inside: lines of file name, class, x0 y0 x1 y1, as in
    Tiny-ImageNet."""
    image_size: ImageSize = None
    """Resolution, one side or height and width; positions are resampled. Omitted: the model's."""
    pictures: Number = 64
    """How many images are read and drawn, evenly spread over those given; --boxes reads the others too."""
    faithfulness: bool = False
    """Delete and insert patches by relevance, by rollout and at random, and plot the probability of the class; this
    takes 66 forward passes per image."""
    device: Device = None
    output: Output = OutputOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportArguments:
    """Write a run's result, curves, mistakes, data and attention as one HTML file that needs no network.

    train, finetune and demo write it at their end. The report of an interrupted run shows what there is.
    """

    run: Annotated[Path, Positional, arg(metavar="RUN")]
    """A run folder."""
    out: OptionalFile = None
    """The file to write, replaced if it exists; RUN/report.html by default."""
    data: Annotated[str | None, arg(metavar="DATA")] = None
    """Where the run's images are now, if they have moved."""
    output: Output = OutputOptions()
