"""Arguments of the studies: study ablate, sweep, table, vtab."""

import dataclasses
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from vitrail.cli.options import (
    COMPUTE,
    RECIPE,
    Data,
    DataOption,
    ModelOption,
    OptionalDecimal,
    OptionalFile,
    OptionalNumber,
    Output,
    OutputOptions,
    PretrainedModel,
    Recipe,
    Settings,
    StudyOptions,
    TransferOptions,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AblateArguments:
    """Train variants of a recipe, and compare them on val.

    The recipe and each variant are trained from random weights with several seeds. Repeat an interrupted command to
    continue.
    """

    recipe: Recipe
    data: DataOption
    variants: Annotated[tuple[str, ...], arg(metavar="NAME=VALUE...")]
    """One change per variant, such as positions=none positions=learned-2d depth=6; join several with +."""
    settings: Annotated[Settings, RECIPE] = ()
    """Change other settings of the recipe for all variants, as in `train`."""
    epochs: Annotated[OptionalDecimal, RECIPE] = None
    """Passes over the training images. Default: the recipe's."""
    batch: Annotated[OptionalNumber, RECIPE] = None
    """Images per step. Default: the recipe's."""
    study: Annotated[StudyOptions, COMPUTE] = StudyOptions()
    output: Output = OutputOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepArguments:
    """Fine-tune a model as the paper does: choose the learning rate on val, then measure on test.

    The final runs train on all of train, with several seeds. Repeat an interrupted command to continue.
    """

    data: Data
    model: ModelOption
    rates: Annotated[tuple[float, ...], arg(metavar="RATE...")] = ()
    """Learning rates to try. Default: the paper's four for a dataset of this size."""
    transfer: Annotated[TransferOptions, RECIPE] = TransferOptions()
    study: Annotated[StudyOptions, COMPUTE] = StudyOptions()
    output: Output = OutputOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableArguments:
    """Print the results of finished studies beside the paper's main table, as Markdown."""

    studies: Annotated[tuple[Path, ...], Positional, arg(metavar="STUDY")] = ()
    """Folders of `study sweep` and `study vtab`; without any, the paper's table alone."""
    real: OptionalFile = None
    """A ReaL file: sweeps of ImageNet are then also scored by its labels."""
    cost: Annotated[tuple[str, ...], arg(metavar="MODEL=RECIPE...")] = ()
    """The cost of a column's model: TPUv3-core-days, or the recipe it was trained by, whose cost `plan` estimates."""
    csv: OptionalFile = None
    """A file to write the table to as well."""
    output: Output = OutputOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class VtabArguments:
    """Fine-tune a model on the 19 tasks of VTAB-1k.

    It trains on 1,000 images of each task, and prints the mean accuracy by task, by group and overall. Repeat an
    interrupted command to continue.
    """

    model: PretrainedModel
    data_root: Annotated[Path, arg(metavar="DIR")]
    """DIR/TASK/train800.txt, val200.txt and test.txt, as the benchmark is distributed; or datasets as published, of
    which --seed draws the 1,000 images."""
    tasks: Annotated[tuple[str, ...], arg(metavar="TASK...")] = ()
    """The tasks to run, by the names of their folders. Default: all that DIR has."""
    transfer: Annotated[TransferOptions, RECIPE] = TransferOptions()
    study: Annotated[StudyOptions, COMPUTE] = StudyOptions(number_of_runs=1)
    output: Output = OutputOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperStudyArguments:
    """Repeat an experiment of the paper on your data: pre-train every variant, transfer it, and compare.

    Prints a table with the paper's finding beside it, and draws a plot. Repeat an interrupted command to continue.
    With --plan, or for a dataset that is only known by its size (imagenet, imagenet21k, jft), it prints what the runs
    would take.
    """

    data: DataOption
    transfer_data: Annotated[str | None, arg(metavar="DATA")] = None
    """The dataset to transfer to, by fine-tuning or 5-shot ridge regression. Default: DATA."""
    models: Annotated[tuple[str, ...], arg(metavar="PRESET...")] = ()
    """The models to train, such as b16 l16 h14. Default: the study's own small ones."""
    recipe: Annotated[str | None, RECIPE, arg(metavar="RECIPE")] = None
    """The recipe that is varied. Default: tiny-imagenet-study, or the paper's recipe for ImageNet, ImageNet-21k or
    JFT."""
    settings: Annotated[Settings, RECIPE] = ()
    """Change settings of the recipe for all variants, as in `train`."""
    epochs: Annotated[OptionalDecimal, RECIPE] = None
    """Passes over all training images. Default: the recipe's."""
    batch: Annotated[OptionalNumber, RECIPE] = None
    """Images per step. Default: the recipe's."""
    transfer_epochs: Annotated[float, RECIPE, arg(metavar="N")] = 10
    """Passes of fine-tuning over the transfer dataset."""
    plan: bool = False
    """Print what the runs would take, and train nothing."""
    gpu: Annotated[str, COMPUTE] = "h200"
    """The GPU of --plan."""
    study: Annotated[StudyOptions, COMPUTE] = StudyOptions()
    output: Output = OutputOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class FindingsArguments:
    """Print the findings of the paper as a Markdown table: its number, what was measured here, and whether they agree.

    A finding without a result names the command that would give one.
    """

    output: Output = OutputOptions()
