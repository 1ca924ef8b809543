"""A recipe with other settings: `--set NAME=VALUE`."""

import dataclasses
import difflib
from collections.abc import Iterable
from typing import Any

from vitrail import presets
from vitrail.config import (
    AugmentConfig,
    BiTConfig,
    OptimizerConfig,
    Recipe,
    ScheduleConfig,
    ViTConfig,
    expand_image_size,
    parse_field,
)
from vitrail.config.serialization import upgrade_field_name
from vitrail.errors import UsageError

_RECIPE_FIELDS = (
    "image_size",
    "resize",
    "loss",
    "label_smoothing",
    "head_bias",
    "mimetic",
    "dropout",
    "stochastic_depth",
    "ema",
    "ema_warmup",
)
_OPTIONS = {  # settings that have an option of their own
    "warmup": "--warmup",
    "epochs": "--epochs",
    "batch": "--batch",
    "target": "--target",
    "logit_adjustment": "--balanced",
}
_FIXED_MODEL_FIELDS = ("kind", "stem", "conv", "image_size", "classes")  # decided by the preset, the recipe or the data


def override_settings(recipe: Recipe, assignments: Iterable[str]) -> Recipe:
    """The recipe with each NAME=VALUE in its model, optimizer, schedule, augmentation or own fields.

    Names and values of earlier versions are accepted.
    """
    changes: dict[str, dict[str, Any]] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise UsageError(f"--set {assignment!r:.80} has no value; give NAME=VALUE, such as depth=8")
        section, kind, field = _find_field(recipe, name)
        if field in changes.setdefault(section, {}):
            raise UsageError(f"--set gives {name} twice; give it once")
        changes[section][field] = parse_field(kind, field, value, name)
    if not changes:
        return recipe
    fields = {"settings": recipe.settings | changes.pop("model", {}), "result": None} | changes.pop("recipe", {})
    parts = {name: dataclasses.replace(getattr(recipe, name), **values) for name, values in changes.items()}
    changed = dataclasses.replace(recipe, **fields, **parts)
    if changed.model is not None:
        size = {} if changed.image_size is None else {"image_size": expand_image_size(changed.image_size)}
        presets.get_preset_config(changed.model, **size, **changed.settings)  # refuses what no model can be
    return changed


def _find_field(recipe: Recipe, name: str) -> tuple[str, type, str]:
    """The section of a recipe that holds the setting `name`, the section's class, and the field's name there."""
    sections = _list_sections(recipe)
    for kind, _ in sections.values():
        name = upgrade_field_name(kind, name)
    if name in _OPTIONS:
        raise UsageError(f"{name} has an option of its own: {_OPTIONS[name]} instead of --set {name}=...")
    if name == "optimizer":
        return "optimizer", OptimizerConfig, "kind"
    known = {field: (section, kind) for section, (kind, fields) in sections.items() for field in fields}
    if name in known:
        return *known[name], name
    if name in _list_fields(ViTConfig, *_FIXED_MODEL_FIELDS):
        reason = "a trained model keeps its own" if recipe.model is None else f"{recipe.model} is a ResNet"
        raise UsageError(f"--set {name} is for recipes of ViTs with random weights: {reason}")
    close = difflib.get_close_matches(name, ["optimizer", *known], n=1)
    suggestion = f"did you mean {close[0]}? " if close else ""
    names = ", ".join(sorted({"optimizer", *known} - _OPTIONS.keys()))
    raise UsageError(f"a recipe has no setting {name!r:.80}: {suggestion}--set takes {names}")


def _list_sections(recipe: Recipe) -> dict[str, tuple[type, Iterable[str]]]:
    """The class and the settable fields of each section of a recipe."""
    sections: dict[str, tuple[type, Iterable[str]]] = {
        "recipe": (Recipe, _RECIPE_FIELDS),
        "optimizer": (OptimizerConfig, _list_fields(OptimizerConfig, "kind")),
        "schedule": (ScheduleConfig, _list_fields(ScheduleConfig)),
        "augment": (AugmentConfig, _list_fields(AugmentConfig)),
    }
    if recipe.model is not None:
        kind = BiTConfig if isinstance(presets.get_preset_config(recipe.model), BiTConfig) else ViTConfig
        sections["model"] = kind, _list_fields(kind, *_FIXED_MODEL_FIELDS)
    return sections


def _list_fields(kind: Any, *excluded: str) -> list[str]:
    return [field.name for field in dataclasses.fields(kind) if field.name not in excluded]
