"""Arguments of the commands that train, and of the plan of a run: train, finetune, demo, plan."""

import dataclasses
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from vitrail.cli.options import (
    COMMON,
    COMPUTE,
    DATA,
    JOB,
    MODEL,
    RECIPE,
    RUN_FOLDER,
    Data,
    DataOption,
    DataOptions,
    FileSuffixes,
    Group,
    JobOptions,
    Number,
    NumberOfRuns,
    OptionalDecimal,
    OptionalFolder,
    OptionalNumber,
    Output,
    OutputOptions,
    Preprocess,
    Recipe,
    RecipeOptions,
    RunFolderOptions,
    Settings,
    TrainingComputeOptions,
)
from vitrail.config import MaskedTarget

FinetuneRecipe = Literal["default", "paper", "bit"]
_TRAINING, _COST, _PREDICTION = Group("training"), Group("memory and speed"), Group("prediction")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainArguments:
    """Train a model from random weights with a recipe.

    The weights with the best validation accuracy are kept. Recipes named mpp and mae learn without labels, from any
    folder of images, and keep the weights with the lowest validation loss. These have no head; use them with `finetune`
    or `probe`.
    """

    recipe: Recipe
    data: DataOption
    overrides: Annotated[RecipeOptions, RECIPE] = RecipeOptions()
    settings: Annotated[Settings, RECIPE] = ()
    """Change any other setting of the recipe, such as optimizer.weight_decay=0.1 augment.mixup=0 depth=6. May be
    repeated."""
    target: Annotated[MaskedTarget | None, RECIPE] = None
    """What to predict of masked patches, for mpp and mae. Default: the recipe's target."""
    probe_shots: Annotated[int, RECIPE, arg(name="probe", metavar="SHOTS")] = 0
    """At each evaluation, also train a linear classifier on the features of SHOTS images per class, and measure it; 0
    for never."""
    learning: Annotated[DataOptions, DATA] = DataOptions()
    run: Annotated[RunFolderOptions, RUN_FOLDER] = RunFolderOptions()
    job: Annotated[JobOptions, JOB] = JobOptions()
    compute: Annotated[TrainingComputeOptions, COMPUTE] = TrainingComputeOptions()
    output: Output = OutputOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneArguments:
    """Fine-tune a pretrained model on your own images.

    A new head for the classes of your data replaces the model's own, and all layers are trained.
    """

    data: Data
    model: Annotated[str | None, arg(metavar="MODEL")] = None
    """The model to start from: a file or folder of any known format, hf:ORG/NAME[@REVISION] or timm:NAME; with
    --from-scratch a preset. Default: builtin, the small pre-trained ViT inside the package."""
    recipe: Annotated[
        FinetuneRecipe | str, RECIPE, FileSuffixes((".toml", ".json")), arg(metavar="default|paper|bit|FILE")
    ] = "default"
    """default works best for most datasets; paper is the paper's, SGD at 384 pixels; bit is BiT-HyperRule. Or a .toml
    or .json file of your own: start with `vitrail recipe show default > my.toml`."""
    image_size: Annotated[int | None, MODEL, arg(metavar="SIDE")] = None
    """Resolution; positions are resampled. Default: the model's (paper: 384)."""
    minutes: OptionalDecimal = None
    """Time limit of each run, everything included; it trains as many epochs as fit, up to 100."""
    overrides: Annotated[RecipeOptions, RECIPE] = RecipeOptions()
    settings: Annotated[Settings, RECIPE] = ()
    """Change any other setting of the recipe, such as optimizer.weight_decay=0.1 augment.mixup=0. May be repeated."""
    replan: Annotated[str | None, RECIPE, arg(metavar="STEP:STEPS,...")] = None
    """Reproduce a run with --minutes, whose length was adjusted as it went; its report prints the command."""
    trainable_layers: Annotated[int | None, MODEL, arg(name="layers", metavar="N")] = None
    """Train only the head and the last N layers below it; 0 for the head alone. Default: all layers."""
    lora: Annotated[int | None, MODEL, arg(metavar="RANK")] = None
    """Train low-rank updates of queries, keys and values (LoRA) and the head, with the layers frozen: less memory,
    and an adapter of a few megabytes beside the merged weights. --set lora.layers=all lora.alpha=32 lora.dora=true
    lora.rank_stabilized=true change it."""
    keep_head: Annotated[bool, MODEL] = False
    """Keep the model's own head and train it further; it must have the classes of the data, in any order."""
    from_scratch: Annotated[bool, MODEL] = False
    """Start from the random weights of a preset, such as --model s16."""
    preprocess: Annotated[Preprocess, MODEL] = None
    number_of_runs: NumberOfRuns = 1
    """Repeat with N consecutive seeds, and print the mean and standard deviation."""
    learning: Annotated[DataOptions, DATA] = DataOptions()
    run: Annotated[RunFolderOptions, RUN_FOLDER] = RunFolderOptions()
    compute: Annotated[TrainingComputeOptions, COMPUTE] = TrainingComputeOptions()
    output: Output = OutputOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillArguments:
    """Train a student that learns the labels of the data and the predictions of a teacher.

    The teacher sees the same augmented images in its own resolution. It must know the classes of the data by their
    names, unless --set distillation.kind=features makes its features the target.
    """

    teacher_name: Annotated[str, Positional, arg(metavar="TEACHER")]
    """The model to learn from: a file or folder of any known format, a run, builtin, hf:ORG/NAME[@REVISION] or
    timm:NAME."""
    data: DataOption
    model: Annotated[str | None, arg(metavar="STUDENT")] = None
    """The student: a trained model to start from, or a preset, whose weights are random. Not with a recipe that names a
    preset."""
    recipe: Annotated[str, RECIPE, arg(metavar="RECIPE")] = "default"
    """A recipe of `finetune` for the student, or one that `vitrail list recipes` shows, which names its own preset."""
    overrides: Annotated[RecipeOptions, RECIPE] = RecipeOptions()
    settings: Annotated[Settings, RECIPE] = ()
    """Change any other setting of the recipe, such as distillation.kind=hard distillation.temperature=2. May be
    repeated."""
    image_size: Annotated[int | None, MODEL, arg(metavar="SIDE")] = None
    """Resolution of a student that is fine-tuned; positions are resampled. Default: the model's."""
    learning: Annotated[DataOptions, DATA] = DataOptions()
    run: Annotated[RunFolderOptions, RUN_FOLDER] = RunFolderOptions()
    compute: Annotated[TrainingComputeOptions, COMPUTE] = TrainingComputeOptions()
    output: Output = OutputOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoArguments:
    """Show what the built-in model can do, on photos that installed packages bring.

    It compares the model's features with the same network from random weights and with the nearest neighbor by pixels,
    at 1 to 30 training images of each class. Then it fine-tunes the model and classifies photos. It takes about two
    minutes on two cores and needs no network.
    """

    out: OptionalFolder = None
    """The folder for the report and its figures. Default: runs/demo, runs/demo-2, ..."""
    output: Output = OutputOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanArguments:
    """Estimate the time, memory and cost of a training run.

    It prints FLOPs, memory by part, hours, GPU-days, disk and network traffic. Nothing is trained. With --predict it
    estimates the prediction of many images instead.
    """

    name: Annotated[str, Positional, arg(metavar="RECIPE|MODEL")]
    """A recipe that `vitrail list recipes` shows, a .toml or .json file, or a preset such as b16 as MODEL."""
    gpu: Annotated[str, arg(metavar="GPU")] = "h200"
    """a100, h100, h200, b200, l40s, rtx4090, or tpuv3 for the cores in which the paper counts its costs."""
    job: Annotated[JobOptions, COMMON] = JobOptions()
    epochs: Annotated[OptionalDecimal, _TRAINING] = None
    """Passes over the training images. Default: the recipe's; 300 for a preset."""
    steps: Annotated[OptionalNumber, _TRAINING] = None
    """The length in steps instead of epochs."""
    batch: Annotated[OptionalNumber, _TRAINING] = None
    """Images per step over all GPUs. Default: the recipe's; 4096 for a preset."""
    data_images: Annotated[OptionalNumber, _TRAINING] = None
    """Number of training images. Default: that of the recipe's dataset; ImageNet's for a preset."""
    classes: Annotated[Number, _TRAINING] = 1000
    """Classes of the head."""
    micro_batches: Annotated[Number, _COST] = 1
    """Micro-batches per step and GPU (gradient accumulation)."""
    recompute: Annotated[bool, _COST] = False
    """Recompute activations in the backward pass instead of keeping them."""
    shard: Annotated[bool, _COST] = False
    """Shard weights, gradients and averages over the GPUs (FSDP)."""
    efficiency: Annotated[float | None, _COST, arg(metavar="FRACTION")] = None
    """Fraction of the GPU's peak FLOP/s that the run reaches (MFU). Default: 0.3, which is 300 TFLOP/s on an H200."""
    predict: Annotated[OptionalNumber, _PREDICTION] = None
    """Estimate the prediction of so many images with MODEL, a preset or a file, instead of training."""
    embed: Annotated[bool, _PREDICTION] = False
    """Rows of features instead of a label."""
    float16: Annotated[bool, _PREDICTION] = False
    """Features stored as float16."""
    output: Output = OutputOptions()
