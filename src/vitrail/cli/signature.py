"""The options of a command, read from its dataclass: to check what was typed, for `--help`, and to write a command."""

import dataclasses
import types
import typing
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from tyro.conf import Positional, UseAppendAction

from vitrail.cli.options import FileSuffixes, Group
from vitrail.config.field_docstrings import read_field_docstrings

COMMON_GROUP = "options"
_METAVARS = {int: "N", float: "N", Path: "PATH"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """An option or a positional argument of a command."""

    name: str
    """--image-size, or MODEL for a positional argument."""
    value_types: tuple[Any, ...]
    takes_several: bool
    is_positional: bool
    is_required: bool
    default: Any
    file_suffixes: tuple[str, ...]
    """Suffixes of the files that it takes beside its choices."""
    metavar: str
    help: str
    group: str

    @property
    def choices(self) -> list[str]:
        literals = [type_ for type_ in self.value_types if typing.get_origin(type_) is typing.Literal]
        return [str(choice) for literal in literals for choice in typing.get_args(literal)]


def list_options(signature: type, group: str = COMMON_GROUP, defaults: object = None) -> Iterator[Option]:
    """The options of a dataclass and of the groups in it, in their order.

    `defaults` is the value of a group in its command, which may differ from that of the class.
    """
    hints = typing.get_type_hints(signature, include_extras=True)
    docstrings = read_field_docstrings(signature)
    for field in dataclasses.fields(signature):
        hint = hints[field.name]
        type_, *marks = typing.get_args(hint) if typing.get_origin(hint) is typing.Annotated else (hint,)
        title = next((mark.title for mark in reversed(marks) if isinstance(mark, Group)), group)
        default = field.default if defaults is None else getattr(defaults, field.name)
        if dataclasses.is_dataclass(type_):
            yield from list_options(typing.cast(type, type_), title, default)
        else:
            yield _build_option(field.name, type_, marks, default, docstrings.get(field.name, ""), title)


def format_command(verb: str, arguments: Any, without: Collection[str] = ()) -> list[str]:
    """The command line that gives these arguments; defaults and the options in `without` are omitted."""
    positional, options = [verb], []
    for option, value in zip(list_options(type(arguments)), _list_values(arguments), strict=True):
        values = [str(each) for each in value] if isinstance(value, tuple) else [str(value)]
        if option.is_positional:
            positional += values
        elif option.name in without or value == option.default:
            continue
        elif value is True:
            options.append(option.name)
        elif option.takes_several:
            options += [option.name, *values]
        else:
            options += [word for each in values for word in (option.name, each)]
    return positional + options


def _list_values(arguments: Any) -> Iterator[Any]:
    """The values of a dataclass and of the groups in it, in the order of `list_options`."""
    for field in dataclasses.fields(arguments):
        value = getattr(arguments, field.name)
        if dataclasses.is_dataclass(value):
            yield from _list_values(value)
        else:
            yield value


def _build_option(name: str, type_: Any, marks: Sequence[Any], default: Any, docstring: str, group: str) -> Option:
    several = _takes_several(type_) and UseAppendAction not in marks  # which takes one value each time
    union = typing.get_origin(type_) in (typing.Union, types.UnionType)
    members = typing.get_args(type_) if union else (type_,)
    value_types = tuple(typing.get_args(member)[0] if _is_tuple(member) else member for member in members)
    metavar = _find_mark(marks, "metavar") or _name_value(value_types)
    is_positional = Positional in marks
    option_name = f"--{(_find_mark(marks, 'name') or name).replace('_', '-')}"
    return Option(
        name=metavar if is_positional else option_name,
        value_types=value_types,
        takes_several=several,
        is_positional=is_positional,
        is_required=default is dataclasses.MISSING,
        default=default,
        file_suffixes=next((mark.suffixes for mark in marks if isinstance(mark, FileSuffixes)), ()),
        metavar=metavar,
        help=docstring or _find_mark(marks, "help") or "",
        group=group,
    )


def _is_tuple(type_: Any) -> bool:
    return typing.get_origin(type_) is tuple


def _takes_several(type_: Any) -> bool:
    return _is_tuple(type_) or any(map(_is_tuple, typing.get_args(type_)))


def _find_mark(marks: Sequence[Any], attribute: str) -> str | None:
    """What tyro's `arg` says; the outermost wins."""
    return next((value for mark in reversed(marks) if isinstance(value := getattr(mark, attribute, None), str)), None)


def _name_value(value_types: Sequence[Any]) -> str:
    if value_types == (bool,):
        return ""
    literals = [str(name) for type_ in value_types for name in typing.get_args(type_)]
    names = [_METAVARS.get(type_, "NAME") for type_ in value_types if type_ in (int, float, str, Path)]
    return "|".join([*literals, *names])
