"""Keyword arguments of the Python interface, and the option objects they become."""

import dataclasses
import inspect
import sys
import textwrap
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypedDict, TypeVar

from vitrail.api.argument_checks import check_argument, check_option_names
from vitrail.config import MaskedTarget
from vitrail.config.field_docstrings import read_field_docstrings
from vitrail.training.finetune import PreprocessName
from vitrail.training.trackers import Track

__all__ = ["FinetuneKeywords", "RunKeywords", "TrainKeywords"]

P = ParamSpec("P")
T = TypeVar("T")
_DOCSTRING_WIDTH = 110


class RunKeywords(TypedDict, total=False):
    """What `train`, `finetune` and `distill` take by keyword: the options of the commands."""

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
    track: Track
    """Also log to an experiment tracker: "tensorboard", "wandb" or "mlflow", of which the last two send numbers to a
    server; or to a `Logger` of your own; or to several."""
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
    class_weights: Mapping[str, float] | str | Path | None
    """What multiplies the loss of each class's labels, 1 if it is not named: {"rose": 3}, or a CSV or JSON file."""
    train_on_val: bool
    """Train on the validation images too, once all choices are made."""
    relabel: str | Path | None
    """The suspects.csv that `suspects` wrote, with your decisions: labels are changed and images dropped before
    anything else."""


class FinetuneKeywords(RunKeywords, total=False):
    """What `finetune` takes besides.

    A dictionary of this type has its keys checked by type checkers:

        from vitrail.api.options import FinetuneKeywords

        options: FinetuneKeywords = {"batch": 8, "seed": 1}
        vitrail.finetune("photos", "model.safetensors", minutes=10, **options)
    """

    image_size: int | None
    """Resolution; positions are resampled."""
    replan: str | None
    """Repeat how a run with a time limit was replanned, as its report says: "STEP:STEPS,..."."""
    trainable_layers: int | None
    """Layers below the head that are trained; 0 for the head alone."""
    lora: int | None
    """Rank of LoRA: train low-rank updates of frozen layers, and the head; settings such as {"lora.layers": "all"}
    change it."""
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


# --- help of functions that take options -----------------------------------------------------------------------------


def document_options(kind: type) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function whose typed **options become a `kind`: its signature and its docstring list each of them."""

    def document(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)
        options = next(each for each in signature.parameters.values() if each.kind is each.VAR_KEYWORD)
        (keywords,) = typing.get_args(typing.get_type_hints(function)[options.name])
        hints, defaults = typing.get_type_hints(keywords), _list_defaults(kind)
        listed = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=hint)
            for name, hint in hints.items()
        ]
        named = [each for each in signature.parameters.values() if each is not options]
        texts = read_keyword_docstrings(keywords)
        lines = [
            textwrap.fill(f"- `{name}`: {texts[name]}", _DOCSTRING_WIDTH, subsequent_indent="  ") for name in hints
        ]
        function.__dict__["__signature__"] = signature.replace(parameters=[*named, *listed])
        function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), *lines])
        return function

    return document


def read_keyword_docstrings(keywords: Any) -> dict[str, str]:
    """What each key of a TypedDict means, those of the one that it extends included.

    Before Python 3.12 a TypedDict does not know what it extends: it is the one of its module with fewer of its keys.
    """
    texts: dict[str, str] = {}
    for each in vars(sys.modules[keywords.__module__]).values():
        if typing.is_typeddict(each) and each.__annotations__.keys() <= keywords.__annotations__.keys():
            texts |= read_field_docstrings(each)
    return texts


def _list_defaults(kind: Any) -> dict[str, Any]:
    """The default of each option, those of nested dataclasses included."""
    defaults: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if field.default_factory is not dataclasses.MISSING and dataclasses.is_dataclass(field.default_factory):
            defaults |= _list_defaults(field.default_factory)
        else:
            defaults[field.name] = field.default
    return defaults
