"""Checks of arguments by their type hints: a wrong name, type or choice is refused before anything is computed."""

import difflib
import numbers
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from vitrail.config import Recipe
from vitrail.errors import UsageError

_TYPE_NAMES = {
    float: "a number", int: "an integer", bool: "True or False", str: "a string", Path: "a path", type(None): "None",
    Sequence: "a list", tuple: "a tuple", Mapping: "a dictionary", Callable: "a function", Recipe: "a vitrail.Recipe",
}  # fmt: skip


def check_option_names(names: Collection[str], known: Collection[str]) -> None:
    """Refuse a name that is not known, and suggest the nearest."""
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            suggestion = f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(known))}"
            raise UsageError(f"there is no option {name!r:.80}: {suggestion}")


def check_argument(name: str, value: Any, hint: Any) -> Any:
    """The value, refused unless it is what the hint allows.

    Numbers of NumPy become Python's, a string becomes a path where only a path is taken, and a list a tuple. A hint
    with another type, such as a model or data, is left to the code that handles it.
    """
    kinds = list_kinds(hint)
    if not all(map(_is_checked, kinds)):
        return value
    for kind in kinds:
        if _has_type(value, kind):
            return _convert_value(name, value, kind)
    if Path in kinds and isinstance(value, str):
        return Path(value)
    if name == "device" and f"{type(value).__module__}.{type(value).__name__}" == "torch.device":
        return str(value)  # named, since the help of commands is not to import torch
    raise UsageError(_describe_wrong_value(name, value, kinds))


def list_kinds(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def list_choices(hint: Any) -> list[str]:
    """The values of the Literals in a hint, also of those in a list."""
    choices = list[str]()
    for kind in list_kinds(hint):
        if typing.get_origin(kind) is Literal:
            choices += typing.get_args(kind)
        elif typing.get_origin(kind) is Sequence:
            choices += list_choices(typing.get_args(kind)[0])
    return list(dict.fromkeys(choices))


def _is_checked(kind: Any) -> bool:
    return kind is Any or (typing.get_origin(kind) or kind) in (*_TYPE_NAMES, Literal)


def _has_type(value: Any, kind: Any) -> bool:
    """Whether a value has a type as a type checker would say; integers are numbers, and true is no integer."""
    origin = typing.get_origin(kind) or kind
    if kind is Any:
        return True
    if origin is Literal:
        return isinstance(value, str) and value in typing.get_args(kind)
    if kind in (int, float):
        number = numbers.Integral if kind is int else numbers.Real
        return isinstance(value, number) and not isinstance(value, bool)
    if origin is Callable:
        return callable(value)
    if origin in (Sequence, tuple):
        return isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return isinstance(value, origin)


def _convert_value(name: str, value: Any, kind: Any) -> Any:
    """A value of the right type as Python's own; items of a list and keys of a dictionary are checked too."""
    origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin in (int, float) and not isinstance(value, int | float):
        return origin(value)
    if origin in (Sequence, tuple) and arguments:
        return tuple(check_argument(f"{name}[{index}]", item, arguments[0]) for index, item in enumerate(value))
    if origin is Mapping and arguments:
        for key in value:
            check_argument(f"a key of {name}", key, arguments[0])
    return value


def _describe_wrong_value(name: str, value: Any, kinds: Sequence[Any]) -> str:
    choices = list(dict.fromkeys(choice for kind in kinds for choice in list_choices(kind)))
    takes = [repr(choice) for choice in choices if str not in kinds]
    for kind in kinds:
        if (origin := typing.get_origin(kind) or kind) in _TYPE_NAMES:
            takes.append("a list of these" if origin is Sequence and choices else _TYPE_NAMES[origin])
    is_choice = isinstance(value, str) and bool(choices)
    close = difflib.get_close_matches(value, choices, n=1) if is_choice else []
    wrong = f"{value!r:.80}" if is_choice else f"{value!r:.80}, of type {type(value).__name__}"
    taken = " or ".join([", ".join(takes[:-1]), takes[-1]] if len(takes) > 1 else takes)
    advice = f"; did you mean {close[0]!r}?" if close else ""
    if type(value).__name__ == "Run":  # which imports this module
        advice = "; run.trained is its model, run.weights the file"
    return f"{name} is {wrong}; it takes {taken}{advice}"
