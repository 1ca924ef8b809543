"""The options that several commands share, each written once: groups as dataclasses, single ones as types.

`vitrail VERB --help` reads these classes, so nothing here imports torch. A field's docstring is its help text; the name
of the group's field in a command is the title of its box.
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

PreprocessName = Literal["imagenet", "inception", "torchvision"]
Tracker = Literal["tensorboard"]

_MODEL_FORMS = "A file or folder of any known format, hf:ORG/NAME[@REVISION], timm:NAME"
_DATA_FORMS = "A folder, a .csv or .jsonl, shards, a downloaded dataset, digits, or hf:ORG/NAME"

Model = Annotated[str, Positional, arg(metavar="MODEL", help=f"{_MODEL_FORMS}, or a preset such as b16.")]
Data = Annotated[str, Positional, arg(metavar="DATA", help=f"{_DATA_FORMS}.")]
Recipe = Annotated[str, Positional, arg(metavar="RECIPE", help="A recipe that `vitrail list recipes` shows.")]
PretrainedModel = Annotated[str, Positional, arg(metavar="MODEL", help=f"{_MODEL_FORMS}.")]
DataOption = Annotated[str, arg(metavar="DATA", help=f"{_DATA_FORMS}.")]
ModelOption = Annotated[str, arg(metavar="MODEL", help=f"{_MODEL_FORMS}.")]

Number = Annotated[int, arg(metavar="N")]
OptionalNumber = Annotated[int | None, arg(metavar="N")]
OptionalDecimal = Annotated[float | None, arg(metavar="N")]
OptionalFile = Annotated[Path | None, arg(metavar="FILE")]
OptionalFolder = Annotated[str | None, arg(metavar="FOLDER")]
ImageSize = Annotated[tuple[int, ...] | None, arg(metavar="HEIGHT [WIDTH]")]
Device = Annotated[str | None, arg(help="cpu, cuda or mps. Omitted: the best device available.")]
Workers = Annotated[
    int | None,
    arg(metavar="N", help="Processes that decode and prepare images. Omitted: one per core, less one."),
]
Settings = Annotated[tuple[str, ...], arg(name="set", metavar="NAME=VALUE...")]
NumberOfRuns = Annotated[int, arg(name="runs", metavar="N")]
Preprocess = Annotated[
    PreprocessName | None, arg(help="Mean, std and interpolation, for weights that do not state them.")
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """How the result is printed."""

    json: bool = False
    """Print the result as JSON."""


Output = Annotated[OutputOptions, arg(name="")]
"""Without a box of its own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class InferenceOptions:
    """How images are loaded and computed."""

    batch: Number = 64
    """Images per batch."""
    device: Device = None
    workers: Workers = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingComputeOptions:
    """How and where the run is computed."""

    seed: int = 0
    """Seed of initial weights, order, augmentation and dropout."""
    device: Device = None
    workers: Workers = None
    micro_batches: Number = 1
    """Parts in which a step is computed, where all of it does not fit in memory."""
    recompute: bool = False
    """Recompute activations in the backward pass instead of keeping them: less memory, a third slower."""
    shard: bool = False
    """Shard the model over the processes that torchrun starts, instead of copying it to each (FSDP)."""
    deterministic: bool = False
    """Make a GPU compute the same bits in every run; somewhat slower."""
    verify_every: Annotated[int, arg(metavar="STEPS")] = 0
    """Compute one in so many steps twice, and stop if the two results differ; 0 for never."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """Values that replace the recipe's."""

    epochs: OptionalDecimal = None
    """Passes over the training images. Omitted: the recipe's."""
    batch: OptionalNumber = None
    """Images per step, over all GPUs. Omitted: the recipe's."""
    lr: Annotated[float | None, arg(metavar="RATE")] = None
    """Peak learning rate. Omitted: the recipe's."""
    warmup: Annotated[int | None, arg(metavar="STEPS")] = None
    """Warm-up steps. Omitted: the recipe's, or fewer for a shorter run or a smaller dataset."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What is learned from the data."""

    balanced: bool = False
    """Weight every class alike, however many images it has (logit adjustment)."""
    strict: bool = False
    """Refuse unreadable images and empty class folders. Omitted: up to a tenth of the images are left out."""
    train_on_val: bool = False
    """Train on the validation images too, once all choices are made; the last weights are kept then."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFolderOptions:
    """Where the run is written."""

    out: OptionalFolder = None
    """The run folder; runs/VERB, runs/VERB-2, ... by default. s3://bucket/NAME: runs/NAME, uploaded."""
    resume: bool = False
    """Resume an interrupted run from its newest complete checkpoint: the same command again."""
    overwrite: bool = False
    """Replace the run of that name."""
    save_every: Annotated[float, arg(metavar="MINUTES")] = 10
    """How often a checkpoint is written to the run folder, in the background."""
    track: Tracker | None = None
    """Log the numbers of every step to TensorBoard too (extra `track`), in the run folder."""
    dry_run: bool = False
    """Show the configuration, the estimated cost and the first batch; train nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransferOptions:
    """How each run of a study is fine-tuned."""

    steps: OptionalNumber = None
    """Steps of each run. Omitted: the paper's. A shorter run has a shorter warm-up."""
    batch: OptionalNumber = None
    """Images per step. Omitted: 512."""
    image_size: Annotated[int | None, arg(metavar="SIDE")] = None
    """Resolution. Omitted: 384."""
    settings: Settings = ()
    """Other settings that replace the recipe's: optimizer, weight_decay, decay, dropout, mixup and others."""
    preprocess: Preprocess = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """How the runs of a study are computed. An interrupted study continues when the command is repeated."""

    number_of_runs: NumberOfRuns = 3
    """Runs with different seeds, for the mean and the standard deviation."""
    out: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """The study folder; runs/VERB-..., named after the arguments, by default."""
    seed: int = 0
    """The first seed."""
    device: str | None = None
    """cpu, cuda:1 or the like. Omitted: all GPUs; each computes one run at a time."""
    workers: OptionalNumber = None
    """Processes of each run that prepare images. Omitted: the cores are shared out."""
    micro_batches: Number = 1
    """Parts in which a step is computed, where all of it does not fit in memory."""
