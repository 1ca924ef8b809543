"""The options that several commands share, each written once: groups as dataclasses, single ones as types.

`vitrail VERB --help` reads these classes, so nothing here imports torch. A field's docstring is its help text, and
`Group` the heading under which it stands; the groups stand in the order in which a command first names them.
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from tyro.conf import Positional, UseAppendAction, arg

from vitrail.errors import UsageError


class Group(NamedTuple):
    """The heading of an option, or of a dataclass of options, in `--help`."""

    title: str


class FileSuffixes(NamedTuple):
    """The suffixes of the files that an option takes beside its choices."""

    suffixes: tuple[str, ...]


COMMON = Group("options")
RECIPE, MODEL, DATA, RUN_FOLDER, JOB, COMPUTE = map(
    Group, ("recipe", "model", "data", "run folder", "cluster job", "compute")
)

PreprocessName = Literal["imagenet", "inception", "torchvision"]
Tracker = Literal["tensorboard", "wandb", "mlflow"]

_PRETRAINED_FORMS = "A file or folder of any known format, builtin, hf:ORG/NAME[@REVISION] or timm:NAME"
_MODEL_FORMS = (
    "A file or folder of any known format, builtin, hf:ORG/NAME[@REVISION], timm:NAME, or a preset such as b16"
)
_DATA_FORMS = "A folder, a .csv or .jsonl, shards, Parquet files, a downloaded dataset, digits, faces, or hf:ORG/NAME"

Model = Annotated[str, Positional, arg(metavar="MODEL", help=f"{_MODEL_FORMS}.")]
Data = Annotated[str, Positional, arg(metavar="DATA", help=f"{_DATA_FORMS}.")]
_RECIPE_FORMS = "A recipe that `vitrail list recipes` shows, or a .toml or .json file"
Recipe = Annotated[str, Positional, arg(metavar="RECIPE", help=f"{_RECIPE_FORMS}.")]
PretrainedModel = Annotated[str, Positional, arg(metavar="MODEL", help=f"{_PRETRAINED_FORMS}.")]
DataOption = Annotated[str, arg(metavar="DATA", help=f"{_DATA_FORMS}.")]
ModelOption = Annotated[str, arg(metavar="MODEL", help=f"{_PRETRAINED_FORMS}.")]

Number = Annotated[int, arg(metavar="N")]
OptionalNumber = Annotated[int | None, arg(metavar="N")]
OptionalDecimal = Annotated[float | None, arg(metavar="N")]
OptionalFile = Annotated[Path | None, arg(metavar="FILE")]
OptionalFolder = Annotated[str | None, arg(metavar="FOLDER")]
ImageSize = Annotated[tuple[int, ...] | None, arg(metavar="HEIGHT [WIDTH]")]
Device = Annotated[str | None, arg(metavar="DEVICE", help="cpu, cuda or mps. Default: the best device available.")]
Workers = Annotated[
    int | None,
    arg(metavar="N", help="Processes that decode and augment images. Default: the number of cores minus one."),
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


Output = Annotated[OutputOptions, COMMON]


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

    seed: Number = 0
    """Random seed of the initial weights, the order of images, augmentation and dropout."""
    device: Device = None
    workers: Workers = None
    micro_batches: Number = 1
    """Micro-batches per step (gradient accumulation), if a batch does not fit in memory."""
    recompute: bool = False
    """Recompute activations in the backward pass instead of keeping them: less memory, a third slower."""
    shard: bool = False
    """Shard the model over the processes that torchrun starts, instead of copying it to each (FSDP)."""
    deterministic: bool = False
    """Use deterministic GPU kernels, so that a repeated run gives the same bits; somewhat slower."""
    verify_every: Annotated[int, arg(metavar="N")] = 0
    """Compute every Nth step twice, and stop if the results differ; 0 for never."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobOptions:
    """The job that runs the training command on a cluster."""

    nodes: Number = 1
    """Number of machines."""
    gpus: Number = 1
    """GPUs per machine."""
    sbatch: bool = False
    """Print a SLURM script instead, which resumes the run after its time limit."""
    kubernetes: bool = False
    """Print a Kubeflow TrainJob for Kubernetes instead, whose pods resume the run when they are started again."""

    def check_one_job(self) -> None:
        """Refuse both jobs at once; not in __post_init__, whose errors tyro rewrites."""
        if self.sbatch and self.kubernetes:
            raise UsageError("--sbatch and --kubernetes print two different jobs: give one of them")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """Values that replace the recipe's."""

    epochs: Annotated[OptionalDecimal, COMMON] = None
    """Passes over the training images. Default: the recipe's."""
    batch: OptionalNumber = None
    """Images per step, over all GPUs. Default: the recipe's."""
    lr: Annotated[float | None, arg(metavar="RATE")] = None
    """Peak learning rate. Default: the recipe's."""
    warmup: Annotated[int | None, arg(metavar="STEPS")] = None
    """Warm-up steps. Default: the recipe's, or fewer for a shorter run or a smaller dataset."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What is learned from the data."""

    balanced: bool = False
    """Give every class the same weight, however many images it has (logit adjustment)."""
    class_weights: OptionalFile = None
    """A CSV file with the columns class and weight, or a JSON object: what multiplies the loss of each class's labels.
    Classes that it does not name have 1."""
    strict: bool = False
    """Refuse unreadable images and empty class folders. By default, up to a tenth of the images may be unreadable and
    are left out."""
    train_on_val: bool = False
    """Train on the validation images too, once all choices are made; then the last weights are kept."""
    relabel: Annotated[OptionalFile, arg(metavar="SUSPECTS")] = None
    """The suspects.csv of `data suspects` with your decisions: labels are changed and images dropped before anything
    else."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFolderOptions:
    """Where the run is written."""

    out: Annotated[OptionalFolder, COMMON] = None
    """The run folder. Default: a new one named after the command, such as runs/train, then runs/train-2. With
    s3://BUCKET/NAME, runs/NAME is uploaded there."""
    resume: Annotated[bool, COMMON] = False
    """Resume an interrupted run from its newest complete checkpoint: repeat its command with this option."""
    overwrite: bool = False
    """Replace an existing run folder."""
    save_every: Annotated[float, arg(metavar="MINUTES")] = 10
    """How often to write a checkpoint to the run folder, in the background."""
    track: Annotated[tuple[Tracker, ...], UseAppendAction] = ()
    """Also log every step to TensorBoard in the run folder (extra `track`), or to W&B or MLflow (extras `wandb`,
    `mlflow`), which send the numbers and config.json to the server they are configured for. May be repeated."""
    dry_run: Annotated[bool, COMMON] = False
    """Show the configuration, estimated time and memory, and the first batch; train nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransferOptions:
    """How each run of a study is fine-tuned."""

    steps: OptionalNumber = None
    """Steps of each run. Default: the paper's. A shorter run has a shorter warm-up."""
    batch: OptionalNumber = None
    """Images per step. Default: 512."""
    image_size: Annotated[int | None, arg(metavar="SIDE")] = None
    """Resolution. Default: 384."""
    settings: Settings = ()
    """Change any other setting of the recipe, such as optimizer.weight_decay=0.1 augment.mixup=0. May be repeated."""
    preprocess: Preprocess = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """How the runs of a study are computed. An interrupted study continues when the command is repeated."""

    number_of_runs: Annotated[NumberOfRuns, COMMON] = 3
    """Runs with different seeds, for the mean and standard deviation."""
    out: Annotated[Path | None, COMMON, arg(metavar="FOLDER")] = None
    """The study folder. Default: one below runs/, named after the arguments."""
    seed: Number = 0
    """Random seed of the first run."""
    device: Annotated[str | None, arg(metavar="DEVICE")] = None
    """cpu, cuda:1 or the like. Default: all GPUs."""
    parallel: Number = 1
    """Runs at once on each device: several small models fill a large GPU better than one."""
    workers: OptionalNumber = None
    """Processes of each run that decode images. Default: the cores, divided among the runs."""
    micro_batches: Number = 1
    """Micro-batches per step (gradient accumulation), if a batch does not fit in memory."""
