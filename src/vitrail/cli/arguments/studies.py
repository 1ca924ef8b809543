"""Arguments of the studies: study ablate, sweep, table, vtab."""

import dataclasses
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from vitrail.cli.options import (
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
    """Train a recipe and its variants from random weights with several seeds, and compare them on val.

    An interrupted study continues when the command is repeated. Every GPU computes one run at a time.
    """

    recipe: Recipe
    data: DataOption
    variants: Annotated[tuple[str, ...], arg(metavar="NAME=VALUE...")]
    """One setting per variant, such as positions=none positions=learned-2d depth=6; + joins several."""
    settings: Settings = ()
    """Settings of all variants that replace the recipe's, as in `train`."""
    epochs: OptionalDecimal = None
    """Passes over the training images. Omitted: the recipe's."""
    batch: OptionalNumber = None
    """Images per step. Omitted: the recipe's."""
    study: StudyOptions = StudyOptions()
    output: Output = OutputOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepArguments:
    """Choose the learning rate on val, train on all of train with several seeds, and measure on test.

    An interrupted study continues when the command is repeated. Every GPU computes one run at a time.
    """

    data: Data
    model: ModelOption
    rates: Annotated[tuple[float, ...], arg(metavar="RATE...")] = ()
    """Learning rates to try. Omitted: the paper's four for a dataset of this size."""
    transfer: TransferOptions = TransferOptions()
    study: StudyOptions = StudyOptions()
    output: Output = OutputOptions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableArguments:
    """Print the results of finished studies beside the paper's headline table, as Markdown."""

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
    """Fine-tune a model on 1,000 images of each VTAB task, and print the mean accuracy by task, by group and overall.

    An interrupted study continues when the command is repeated. Every GPU computes one run at a time.
    """

    model: PretrainedModel
    data_root: Annotated[Path, arg(metavar="DIR")]
    """DIR/TASK/train800.txt, val200.txt and test.txt, as the benchmark is distributed; or datasets as published, of
    which --seed draws the 1,000 images."""
    tasks: Annotated[tuple[str, ...], arg(metavar="TASK...")] = ()
    """Some tasks, by the names of their folders. Omitted: all that are there."""
    transfer: TransferOptions = TransferOptions()
    study: StudyOptions = StudyOptions(number_of_runs=1)
    output: Output = OutputOptions()
