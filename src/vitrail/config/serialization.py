"""Configurations to and from JSON, and the names that earlier versions used in their files.

An unknown, missing or mistyped field is an error. Files that exist keep being read: `_RENAMES` is the one table of old
field names and old values. Whoever renames a stored field or value adds a row.
"""

import contextlib
import dataclasses
import difflib
import numbers
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeVar, cast

from vitrail.config.training import Recipe
from vitrail.errors import UsageError

T = TypeVar("T")
_TYPE_NAMES = {float: "a number", int: "an integer", bool: "true or false", str: "a string"}
_TUPLE_DESCRIPTIONS = {int: "integers, such as [2,10]", float: "numbers, such as [0.5,0.75]"}
_LITERAL_WORDS = {"true": True, "false": False, "none": None}


class Renames(NamedTuple):
    """What one class's fields, and the values of those fields, were called in earlier versions."""

    fields: dict[str, str]
    """Old field name to the field's name now."""
    values: Mapping[str, dict[str, str]] = types.MappingProxyType({})
    """By the field's name now: old value to the value now."""


_DIGITS_RESULT = "174 of 179 test digits (97.2 %) on an EPYC, 175 on a Xeon; nearest neighbor 175; n = 1, seed 0"
_RENAMES = {  # by the class's name now
    "Cell": Renames(
        {
            "about": "result_fields",
            "whole": "resize_whole_image",
            "sparse": "allow_empty_classes",
            "everything": "train_on_val",
            "measured": "eval_split",
            "keeps": "keep_weights",
        }
    ),
    "ConvConfig": Renames({"standardise": "standardization", "standardise_eps": "standardization_eps"}),
    "MaskedConfig": Renames(
        {"share": "mask_ratio"},
        {
            "target": {
                "mean-colour": "mean-color",
                "4x4-colours": "4x4-colors",
                "normalised-pixels": "normalized-pixels",
            }
        },
    ),
    "NativeHeader": Renames(
        {"several": "multi_label", "tried": "precision_measurements", "ranges": "activation_ranges"}
    ),
    "Origin": Renames({"licence": "license"}),
    "PrecisionMeasurement": Renames(
        {
            "cpu": "processor",
            "speed": "speedup",
            "top1": "top1_agreement",
            "sure": "confident_agreement",
            "sure_images": "confident_images",
            "change": "mean_probability_change",
        }
    ),
    "Recipe": Renames(
        {
            "optimiser": "optimizer",
            "balanced": "logit_adjustment",
            "layers": "trainable_layers",
            "head": "head_init",
        },
        {
            "result": {  # of recipes by name: a run of theirs can still be resumed
                "96.50 ± 0.09 % of 10,000 test images at the last epoch, n = 3, with --everything": (
                    "96.50 ± 0.09 % of 10,000 test images at the last epoch, n = 3, with --train-on-val"
                ),
                "97.8 % of 179 test digits, seed 0, as many as the nearest neighbour": _DIGITS_RESULT,
                "97.8 % of 179 test digits, seed 0, as many as the nearest neighbor": _DIGITS_RESULT,
            }
        },
    ),
    "ScheduleConfig": Renames(
        {"final": "final_lr_scale", "stairs": "milestones"},
        {"decay": {"stairs": "step"}},
    ),
}
_RUN_RENAMES = {  # the keys of a run's config.json beside its recipe
    "several": "multi_label",
    "everything": "train_on_val",
    "measured": "eval_split",
    "view": "train_preprocess",
    "world": "world_size",
}
_RESULT_RENAMES = {"right": "correct"}  # in events.jsonl, results.jsonl, predictions.csv and per_class.csv
_NO_RENAMES = Renames({})


def to_json(value: Any) -> dict[str, Any]:
    """The fields of a configuration as JSON values."""
    return {name: list(v) if isinstance(v, tuple) else v for name, v in dataclasses.asdict(value).items()}


def from_json(kind: type[T], value: object) -> T:
    """The dataclass that `to_json` wrote, now or in an earlier version; any other field is an error."""
    if not isinstance(value, dict):
        raise UsageError(f"{kind.__name__} must be an object of fields, not {value!r:.80}")
    fields = _upgrade_fields(kind, value)
    hints = typing.get_type_hints(kind)
    required = {
        field.name
        for field in dataclasses.fields(cast(Any, kind))
        if field.default is field.default_factory is dataclasses.MISSING
    }
    if unknown := sorted(fields.keys() - hints.keys()):
        close = difflib.get_close_matches(unknown[0], hints, n=1)
        suggestion = f": did you mean {close[0]}?" if close else ""
        raise UsageError(f"{kind.__name__} has no field {unknown[0]!r:.80}{suggestion}")
    if missing := sorted(required - fields.keys()):
        raise UsageError(f"{kind.__name__} lacks the field {missing[0]!r}")
    return kind(**{name: _convert_value(name, hints[name], field) for name, field in fields.items()})


# --- names of earlier versions ---------------------------------------------------------------------------------------


def upgrade_keys(kind: Any, value: Any) -> Any:
    """JSON of the type `kind` under today's names, at any depth; what is no dataclass of ours stays as it is."""
    if _is_union(kind):
        kind = _choose_class_by_kind(typing.get_args(kind), value)
    if typing.get_origin(kind) is tuple and isinstance(value, list):
        return [upgrade_keys(typing.get_args(kind)[0], item) for item in value]
    if not dataclasses.is_dataclass(kind) or not isinstance(value, dict):
        return value
    hints = typing.get_type_hints(kind)
    fields = _upgrade_fields(cast(type, kind), value)
    return {name: upgrade_keys(hints.get(name), field) for name, field in fields.items()}


def upgrade_run_config(config: dict[str, Any]) -> dict[str, Any]:
    """A run's config.json under today's names."""
    renamed = {_RUN_RENAMES.get(name, name): value for name, value in config.items()}
    if isinstance(model := renamed.get("model"), dict):  # an Origin, of weights/, which config does not know
        renamed["model"] = {_RENAMES["Origin"].fields.get(name, name): value for name, value in model.items()}
    recipe = upgrade_keys(Recipe, renamed.get("recipe"))
    if renamed.get("train_preprocess") and isinstance(recipe, dict) and recipe.get("resize"):
        recipe["resize_whole_image"] = True  # which the preprocessing alone recorded
    return renamed | {"recipe": recipe}


def upgrade_result_keys(result: Mapping[str, T]) -> dict[str, T]:
    """An event, a cell's result or a table's row under today's names."""
    return {_RESULT_RENAMES.get(name, name): value for name, value in result.items()}


def upgrade_field_name(kind: type, name: str) -> str:
    """Today's name of a field of `kind`."""
    return _RENAMES.get(kind.__name__, _NO_RENAMES).fields.get(name, name)


def _upgrade_fields(kind: type, fields: dict[Any, Any]) -> dict[str, Any]:
    """One object's fields, with today's names and values; nested objects stay as they are."""
    values = _RENAMES.get(kind.__name__, _NO_RENAMES).values
    upgraded = {upgrade_field_name(kind, str(name)): field for name, field in fields.items()}
    return {
        name: values[name].get(field, field) if name in values and isinstance(field, str) else field
        for name, field in upgraded.items()
    }


# --- one field from a command line -----------------------------------------------------------------------------------


def parse_field(kind: type, field: str, text: str, name: str) -> Any:
    """The value of a field that a command line calls `name`: true, 8, 0.1, none, cosine, or 2,10.

    A word for a field that is a configuration of its own, such as `rotary=index`, is the value of its first field.
    """
    hint = typing.get_type_hints(kind)[field]
    if typing.get_origin(hint) is Literal:  # where none may be a choice
        return _convert_value(name, hint, _upgrade_fields(kind, {field: text.strip()})[field])
    in_brackets = re.fullmatch(r"\s*\[(.*)\]\s*", text)  # as in a file
    words = [_parse_word(word) for word in (in_brackets[1] if in_brackets else text).split(",")]
    value = words if in_brackets or "," in text else words[0]
    config = next(filter(dataclasses.is_dataclass, typing.get_args(hint)), None)
    if config is not None and isinstance(value, str):  # by its first field; the others have their defaults
        value = {dataclasses.fields(config)[0].name: value}
    return _convert_value(name, hint, value)


def convert_field(kind: type, field: str, value: object, name: str) -> Any:
    """The value of a field that the caller calls `name`, checked and converted to the field's type."""
    return _convert_value(name, typing.get_type_hints(kind)[field], value)


def _parse_word(word: str) -> object:
    word = word.strip()
    if word.lower() in _LITERAL_WORDS:
        return _LITERAL_WORDS[word.lower()]
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(word)
    return word


# --- types -----------------------------------------------------------------------------------------------------------


def _convert_value(name: str, hint: Any, value: object) -> Any:
    """`value` as the type `hint`: lists become tuples, objects dataclasses, and integers floats where one is wanted."""
    arguments = typing.get_args(hint)
    if isinstance(value, numbers.Real) and not isinstance(value, bool):  # of NumPy too
        value = int(value) if isinstance(value, numbers.Integral) else float(value)
    if _is_union(hint):
        if value is None and type(None) in arguments:
            return None
        return _convert_value(name, _choose_class_by_kind(arguments, value), value)
    match typing.get_origin(hint):
        case origin if origin is dict and isinstance(value, dict):
            return value
        case origin if origin is tuple and isinstance(value, list | tuple):
            kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
            if len(kinds) == len(value):
                return tuple(_convert_value(name, kind, item) for kind, item in zip(kinds, value, strict=True))
        case origin if origin is Literal:
            if isinstance(value, str) and value in arguments:
                return value
        case None if dataclasses.is_dataclass(hint):
            return value if isinstance(value, cast(type, hint)) else from_json(cast(type, hint), value)
        case None if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
            if abs(value) < 2**53 or value != value:
                return float(value)
        case None if type(value) is hint:
            return value
    raise UsageError(f"{name} is {value!r:.80}; it must be {_describe_type(hint)}")


def _describe_type(hint: Any) -> str:
    """The values that a type allows, for an error message."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if _is_union(hint):
        return " or ".join("none" if part is type(None) else _describe_type(part) for part in arguments)
    if typing.get_origin(hint) is tuple and arguments[0] in _TUPLE_DESCRIPTIONS:
        described = _TUPLE_DESCRIPTIONS[arguments[0]]
        return f"a list of {described}" if Ellipsis in arguments else f"{len(arguments)} {described}"
    return _TYPE_NAMES.get(hint) or str(getattr(hint, "__name__", hint))


def _is_union(hint: Any) -> bool:
    """Whether a type is `A | B`; with a Literal among them it is typing's own union."""
    return typing.get_origin(hint) in (types.UnionType, typing.Union)


def _choose_class_by_kind(options: tuple[Any, ...], value: object) -> Any:
    """The class of a union that a JSON object states by its `kind`; the first where none states one."""
    kind = value.get("kind") if isinstance(value, dict) else None
    classes = [option for option in options if option is not type(None)]
    return next((option for option in classes if getattr(option, "kind", None) == kind is not None), classes[0])
