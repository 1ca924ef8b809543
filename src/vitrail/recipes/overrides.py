"""A recipe with other settings: `--set SECTION.FIELD=VALUE`."""

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from vitrail import presets
from vitrail.config import Recipe, ViTConfig, to_json
from vitrail.config.model import expand_image_size
from vitrail.config.serialization import convert_field, parse_field, upgrade_field_name
from vitrail.errors import UsageError

_FROM_RANDOM_WEIGHTS = "it is for fine-tuning, and a model with random weights trains all of its layers"
_LENGTH = {"recipe.epochs": "give --epochs N", "recipe.batch": "give --batch N"}
_COMMON = _LENGTH | {"recipe.logit_adjustment": "give --balanced", "schedule.warmup": "give --warmup STEPS"}
_UNFROZEN = {"recipe.trainable_layers": _FROM_RANDOM_WEIGHTS}
TRAIN_RESERVED = _COMMON | _UNFROZEN | {"masked.target": "give --target NAME"}
"""Settings that `train` has options for, or does not take: SECTION.FIELD, and what to do instead."""
FINETUNE_RESERVED = _COMMON | {"recipe.trainable_layers": "give --layers N", "lora.rank": "give --lora RANK"}
"""The same for `finetune`."""
ABLATION_RESERVED = _LENGTH | _UNFROZEN
"""The same for `study ablate`."""
TRANSFER_RESERVED = {
    "recipe.epochs": "give --steps N",
    "recipe.batch": "give --batch N",
    "recipe.image_size": "give --image-size SIDE",
    "recipe.resize_whole_image": "the study decides how images are resized",
}
"""The same for `study sweep` and `study vtab`."""


def list_reserved_settings(recipe: Recipe) -> Mapping[str, str]:
    """The settings that the recipe's command does not take: `train`, or `finetune` for a recipe without a model."""
    return FINETUNE_RESERVED if recipe.model is None else TRAIN_RESERVED


_SECTIONS = ("optimizer", "schedule", "augment", "masked", "lora", "distillation")
"""Of a recipe, besides its model's settings."""
_DESCRIPTIVE_FIELDS = ("data", "source", "result")
_FIXED_MODEL_FIELDS = {  # and what decides them
    "kind": "the preset decides it",
    "stem": "the preset decides it",
    "conv": "the preset decides it",
    "image_size": "it is a field of the recipe itself",
    "classes": "the data decide it",
}


class _Field(NamedTuple):
    """A field that can be set, and where it is."""

    section: str
    kind: type
    name: str


def override_settings(
    recipe: Recipe, settings: Iterable[str] | Mapping[str, Any], reserved: Mapping[str, str] | None = None
) -> Recipe:
    """The recipe with other settings: NAME=VALUE texts, or values by name; such as augment.mixup, or mixup alone.

    Names and values of earlier versions are accepted. `reserved` are the settings that the command does not take, under
    any of their names; by default those of `train`, or of `finetune` where the recipe has no model.
    """
    if reserved is None:
        reserved = list_reserved_settings(recipe)
    changes: dict[str, dict[str, Any]] = {}
    for name, value in _split_assignments(settings):
        field = _find_field(recipe, name, reserved)
        if field.name in changes.setdefault(field.section, {}):
            raise UsageError(f"the setting {name} is given twice; give it once")
        parse = parse_field if isinstance(value, str) else convert_field
        parsed = parse(field.kind, field.name, value, name)
        if dataclasses.is_dataclass(parsed):  # as a recipe's file has it
            parsed = {part: choice for part, choice in to_json(parsed).items() if choice is not None}
        changes[field.section][field.name] = parsed
    if not changes:
        return recipe
    fields = {"settings": recipe.settings | changes.pop("model", {}), "result": None} | changes.pop("recipe", {})
    parts = {name: dataclasses.replace(getattr(recipe, name), **values) for name, values in changes.items()}
    return check_model_settings(dataclasses.replace(recipe, **fields, **parts))


def check_model_settings(recipe: Recipe) -> Recipe:
    """The recipe, refused if its settings are none of its model, or are decided elsewhere."""
    if recipe.model is None:
        if recipe.settings:
            raise UsageError("settings are for random weights, and a trained model keeps its own: remove them")
        return recipe
    for name in recipe.settings:
        if reason := _FIXED_MODEL_FIELDS.get(name):
            raise UsageError(f"{name} is none of the model's settings: {reason}")
    size = {} if recipe.image_size is None else {"image_size": expand_image_size(recipe.image_size)}
    presets.get_preset_config(recipe.model, **size, **recipe.settings)  # refuses what no model can be
    return recipe


def list_model_settings(model: str) -> list[str]:
    """The names of a preset's settings that a recipe may change."""
    return _list_fields(type(presets.get_preset_config(model)), *_FIXED_MODEL_FIELDS)


def _split_assignments(settings: Iterable[str] | Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if isinstance(settings, Mapping):
        yield from settings.items()
        return
    for assignment in settings:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise UsageError(f"the setting {assignment!r:.80} has no value; give NAME=VALUE, such as depth=8")
        yield name, value


def _find_field(recipe: Recipe, name: str, reserved: Mapping[str, str]) -> _Field:
    """The field that a setting names: SECTION.FIELD, or a field of any section; refused if it is reserved."""
    prefix, _, bare = name.rpartition(".")
    prefix = "model" if prefix == "settings" else prefix  # as a recipe file calls them
    known: dict[str, _Field] = {}
    for section, kind, fields in _list_sections(recipe):
        if prefix in ("", section):  # layers is an old name of a recipe's field, and lora has a field of that name
            bare = upgrade_field_name(kind, bare)
        known |= {f"{section}.{field}": _Field(section, kind, field) for field in fields}
    short = {field.name: field for field in reversed(known.values()) if field.name != "kind"}
    short |= {"optimizer": known["optimizer.kind"]}
    chosen = known.get(f"{prefix}.{bare}") if prefix else short.get(bare)
    if chosen is not None:
        if instead := reserved.get(f"{chosen.section}.{chosen.name}"):
            raise UsageError(f"{name} cannot be set here: {instead}")
        return chosen
    if prefix == "lora":
        raise UsageError(f"the setting {name} is for a recipe with LoRA: `vitrail finetune --lora RANK` adds it")
    if prefix == "distillation":
        raise UsageError(f"the setting {name} is for a recipe with a teacher: `vitrail distill TEACHER` adds it")
    if bare in _list_fields(ViTConfig, *_FIXED_MODEL_FIELDS) and prefix in ("", "model"):
        reason = "a trained model keeps its own" if recipe.model is None else f"{recipe.model} is a ResNet"
        raise UsageError(f"the setting {name} is for recipes of ViTs with random weights: {reason}")
    wrong = f"{prefix}.{bare}" if prefix else bare
    close = ["optimizer.kind"] if wrong == "kind" else difflib.get_close_matches(wrong, [*short, *known], n=1)
    names = ", ".join(sorted(name for name, field in short.items() if f"{field.section}.{field.name}" not in reserved))
    advice = f"did you mean {close[0]}?" if close else f"it has {names}"
    raise UsageError(f"a recipe has no setting {name!r:.80}: {advice}")


def _list_sections(recipe: Recipe) -> Iterator[tuple[str, type, Iterable[str]]]:
    """Name, class and settable fields of each section of a recipe."""
    own = _list_fields(Recipe, "settings", *_SECTIONS, *_DESCRIPTIVE_FIELDS)
    yield "recipe", Recipe, own if recipe.model is not None else [name for name in own if name != "model"]
    for section in _SECTIONS:
        if (config := getattr(recipe, section)) is not None:
            yield section, type(config), _list_fields(type(config))
    if recipe.model is not None:
        yield "model", type(presets.get_preset_config(recipe.model)), list_model_settings(recipe.model)


def _list_fields(kind: Any, *excluded: str) -> list[str]:
    return [field.name for field in dataclasses.fields(kind) if field.name not in excluded]
