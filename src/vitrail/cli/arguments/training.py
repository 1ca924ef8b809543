"""Arguments of the commands that train, and of the plan of a run: train, finetune, demo, plan."""

import dataclasses
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from vitrail import recipes
from vitrail.cli.options import (
    Data,
    DataOption,
    DataOptions,
    Number,
    NumberOfRuns,
    OptionalDecimal,
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainArguments:
    """Train a model from random weights by a named recipe, and keep the best weights by validation accuracy.

    Recipes called mpp and mae learn without labels, from any folder of images. Their weights have no head; `finetune`
    and `probe` take them. Their best weights are those of the lowest validation loss.
    """

    recipe: Recipe
    data: DataOption
    overrides: RecipeOptions = RecipeOptions()
    settings: Settings = ()
    """Other settings that replace the recipe's: positions, pool, hidden_head, depth, width, optimizer, weight_decay,
    decay, dropout, mixup and all others; a wrong name lists them."""
    target: MaskedTarget | None = None
    """What is predicted of masked patches. Omitted: the recipe's target (mpp and mae)."""
    probe: Annotated[int, arg(metavar="SHOTS")] = 0
    """At each evaluation, also measure a linear classifier of the features, trained on so many images per class."""
    learning: DataOptions = DataOptions()
    run: RunFolderOptions = RunFolderOptions()
    compute: TrainingComputeOptions = TrainingComputeOptions()
    output: Output = OutputOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneArguments:
    """Fine-tune a trained model on new images and classes: a new head replaces its own, and all layers are trained."""

    data: Data
    model: Annotated[str | None, arg(metavar="MODEL")] = None
    """A file or folder of any known format, hf:ORG/NAME or timm:NAME."""
    recipe: recipes.FinetuneKind = "default"
    """default works best for most datasets; paper is the paper's, SGD at 384 pixels; bit is BiT-HyperRule."""
    image_size: Annotated[int | None, arg(metavar="SIDE")] = None
    """Resolution; positions are resampled. Omitted: the model's (paper: 384)."""
    minutes: OptionalDecimal = None
    """Time limit of each run, everything included; it trains for as long as fits, up to 100 epochs."""
    overrides: RecipeOptions = RecipeOptions()
    replan: Annotated[str | None, arg(metavar="STEP:STEPS,...")] = None
    """Repeat how a run with --minutes was replanned as it went; its report prints the command."""
    layers: OptionalNumber = None
    """How many layers below the head are trained; 0 for the head alone."""
    keep_head: bool = False
    """Keep training the model's own head, which must have the classes of the data, in any order."""
    from_scratch: bool = False
    """Start from the random weights of a preset (--model s16), which have learned nothing."""
    preprocess: Preprocess = None
    number_of_runs: NumberOfRuns = 1
    """Repeat with the next seeds, and print the mean and the standard deviation."""
    learning: DataOptions = DataOptions()
    run: RunFolderOptions = RunFolderOptions()
    compute: TrainingComputeOptions = TrainingComputeOptions()
    output: Output = OutputOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoArguments:
    """Train a small ViT on 1,439 real digits of 8 x 8 pixels, and test it on 179 others. Takes two minutes."""

    out: Path | None = None
    """The run folder; runs/demo, runs/demo-2, ... by default."""
    resume: bool = False
    """Resume an interrupted demo."""
    output: Output = OutputOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanArguments:
    """Estimate a run before it starts: FLOPs, memory by part, hours, GPU-days, disk and traffic. Nothing is trained."""

    name: Annotated[str, Positional, arg(metavar="RECIPE|MODEL")]
    """A recipe that `vitrail list recipes` shows, or a preset such as b16."""
    gpu: str = "h200"
    """a100, h100, h200, b200, l40s, rtx4090, or tpuv3 for the cores in which the paper counts its costs."""
    nodes: Number = 1
    """Machines."""
    gpus: Number = 1
    """GPUs per machine."""
    epochs: OptionalDecimal = None
    """Passes over the training images. Omitted: the recipe's; 300 for a preset."""
    steps: OptionalNumber = None
    """The same in steps."""
    batch: OptionalNumber = None
    """Images per step over all GPUs. Omitted: the recipe's; 4096 for a preset."""
    data_images: OptionalNumber = None
    """Training images of the dataset. Omitted: those of the recipe's; ImageNet's for a preset."""
    classes: Number = 1000
    """Outputs of the head."""
    micro_batches: Number = 1
    """Parts in which a GPU computes its share of a step."""
    recompute: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    shard: bool = False
    """Shard weights, gradients and averages over the GPUs (FSDP)."""
    efficiency: Annotated[float | None, arg(metavar="SHARE")] = None
    """Share of the GPU's peak that the run reaches. Omitted: 0.3, which is 300 TFLOP/s on an H200."""
    sbatch: bool = False
    """Print a SLURM script instead, which resumes the run after its time limit."""
    output: Output = OutputOptions()
