"""Keyword arguments of the Python interface, and the option objects they become."""

import dataclasses
import difflib
import numbers
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar

from vitrail.config import MaskedTarget
from vitrail.errors import UsageError
from vitrail.training.finetune import PreprocessName
from vitrail.training.trackers import Tracker

T = TypeVar("T")
_TYPE_NAMES = {
    float: "a number", int: "an integer", bool: "True or False", str: "a string", Path: "a path", type(None): "None",
    Sequence: "a list", Mapping: "a dictionary", Callable: "a function", tuple: "a tuple", Literal: "a string",
}  # fmt: skip


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


def check_option_names(names: Collection[str], known: Collection[str]) -> None:
    """Refuse a name that is not known, and suggest the nearest."""
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            suggestion = f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(known))}"
            raise UsageError(f"there is no option {name!r:.80}: {suggestion}")


def _build(kind: type[T], values: Mapping[str, Any]) -> T:
    hints = typing.get_type_hints(kind)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(typing.cast(Any, kind)):
        if dataclasses.is_dataclass(hints[field.name]):
            fields[field.name] = _build(typing.cast(type[Any], hints[field.name]), values)
        elif field.name in values:
            fields[field.name] = _check_type(field.name, values[field.name], hints[field.name])
    return kind(**fields)


def _check_type(name: str, value: Any, hint: Any) -> Any:
    """The value, refused unless its type is the option's; a path may be given as a string."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    if any(_has_type(value, kind) for kind in kinds):
        return value
    if Path in kinds and isinstance(value, str):
        return Path(value)
    taken = dict.fromkeys(_TYPE_NAMES.get(typing.get_origin(kind) or kind) or str(kind) for kind in kinds)
    raise UsageError(f"{name} is {value!r:.80}, of type {type(value).__name__}; it takes {' or '.join(taken)}")


def _has_type(value: Any, kind: Any) -> bool:
    """Whether a value has a type as a type checker would say; integers are numbers, and true is no integer."""
    origin = typing.get_origin(kind) or kind
    if origin is Literal:  # which value, the options themselves check
        return isinstance(value, str)
    if getattr(origin, "_is_protocol", False):
        return True
    if kind is float:
        return isinstance(value, numbers.Real) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if origin is Callable:
        return callable(value)
    if origin is Sequence:
        return isinstance(value, Sequence) and not isinstance(value, str)
    return isinstance(value, origin)


def list_option_names(kind: Any) -> list[str]:
    """The names of all options, those of nested dataclasses included."""
    hints = typing.get_type_hints(kind)
    names = []
    for field in dataclasses.fields(kind):
        nested = hints[field.name]
        names += list_option_names(nested) if dataclasses.is_dataclass(nested) else [field.name]
    return names
