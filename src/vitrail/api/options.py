"""Keyword arguments of the Python interface, and the option objects they become."""

import dataclasses
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from vitrail.api.argument_checks import check_argument, check_option_names
from vitrail.config import MaskedTarget
from vitrail.training.finetune import PreprocessName
from vitrail.training.trackers import Tracker

T = TypeVar("T")


class RunKeywords(TypedDict, total=False):
    """What `train` and `finetune` take by keyword: the options of the commands."""

    epochs: float | None
    """Passes over the training images."""
    batch: int | None
    """Images per step, over all GPUs."""
    lr: float | None
    """Peak learning rate."""
    warmup: int | None
    """Warm-up steps."""
    settings: Mapping[str, Any]
    """Other settings of the recipe, such as {"augment.mixup": 0.2}."""
    out: str | Path | None
    """The run folder; runs/finetune, runs/finetune-2, ... by default."""
    resume: bool
    """Resume an interrupted run."""
    overwrite: bool
    """Replace the run in that folder."""
    save_every: float
    """Minutes from one checkpoint to the next."""
    verify_every: int
    """Steps from one that is computed twice to the next; 0 for none."""
    track: Tracker | None
    """Also log to an experiment tracker: "tensorboard", "wandb" or "mlflow"; the last two send numbers to a server."""
    seed: int
    """Of initial weights, order, augmentation and dropout."""
    device: str | None
    """cpu, cuda or mps; the best device available by default."""
    workers: int | None
    """Processes that decode images; one per core, less one, by default."""
    micro_batches: int
    """Parts in which a step is computed, where all of it does not fit in memory."""
    recompute: bool
    """Recompute activations in the backward pass: less memory, a third slower."""
    shard: bool
    """Shard the model over torchrun's processes (FSDP)."""
    deterministic: bool
    """Make a GPU compute the same bits in every run."""
    strict: bool
    """Refuse unreadable images and empty class folders."""
    balanced: bool
    """Give every class the same weight."""
    train_on_val: bool
    """Train on the validation images too, once all choices are made."""


class FinetuneKeywords(RunKeywords, total=False):
    """What `finetune` takes besides."""

    image_size: int | None
    """Resolution; positions are resampled."""
    replan: str | None
    """Repeat how a run with a time limit was replanned, as its report says: "STEP:STEPS,..."."""
    trainable_layers: int | None
    """Layers below the head that are trained; 0 for the head alone."""
    keep_head: bool
    """Keep training the model's own head, which must have the classes of the data."""
    from_scratch: bool
    """Start from the random weights of a preset."""
    preprocess: PreprocessName | None
    """Mean, std and interpolation for weights that do not state them."""


class TrainKeywords(RunKeywords, total=False):
    """What `train` takes besides."""

    target: MaskedTarget | None
    """What is predicted of masked patches."""
    probe_shots: int
    """At each evaluation, also measure a linear classifier of the features, trained on so many images per class."""


def build_options(kind: type[T], values: Mapping[str, Any]) -> T:
    """An options dataclass from flat values; nested dataclasses take theirs. An unknown name is refused."""
    check_option_names(values, list_option_names(kind))
    return _build(kind, values)


def _build(kind: type[T], values: Mapping[str, Any]) -> T:
    hints = typing.get_type_hints(kind)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(typing.cast(Any, kind)):
        if dataclasses.is_dataclass(hints[field.name]):
            fields[field.name] = _build(typing.cast(type[Any], hints[field.name]), values)
        elif field.name in values:
            fields[field.name] = check_argument(field.name, values[field.name], hints[field.name])
    return kind(**fields)


def list_option_names(kind: Any) -> list[str]:
    """The names of all options, those of nested dataclasses included."""
    hints = typing.get_type_hints(kind)
    names = []
    for field in dataclasses.fields(kind):
        nested = hints[field.name]
        names += list_option_names(nested) if dataclasses.is_dataclass(nested) else [field.name]
    return names
