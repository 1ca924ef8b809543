"""The arguments of a command, checked and parsed: a mistake is one line with the nearest name, and exit code 2.

tyro parses; what it says of mistakes is a box of several lines, so the usual ones are found here first.
"""

import contextlib
import difflib
import functools
import io
import re
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tyro

from vitrail.errors import UsageError


class ArgumentError(UsageError):
    """A mistyped option or value; `verb` is the command."""

    def __init__(self, command: str, message: str) -> None:
        super().__init__(message)
        self.command = command


class ParsedArguments(NamedTuple):
    """What a function is to be called with."""

    positional: tuple[Any, ...]
    named: dict[str, Any]


class _Option(NamedTuple):
    """An option and the values it takes."""

    name: str
    value_types: tuple[Any, ...]
    """The types of a value."""
    takes_several: bool
    """Whether it takes several values."""


def parse_arguments(command: str, function: Callable[..., None], arguments: Sequence[str]) -> ParsedArguments:
    """The arguments as the function takes them; mistakes are refused in one line."""
    if not {"-h", "--help"} & set(arguments):
        _check_options(command, {option.name: option for option in _list_options(function)}, arguments)

    @functools.wraps(function)
    def collect(*positional: Any, **named: Any) -> ParsedArguments:
        return ParsedArguments(positional, named)

    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(collect, prog=f"vitrail {command}", args=arguments, config=(tyro.conf.FlagCreatePairsOff,))
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ArgumentError(command, _condense_tyro_error(command, box.getvalue())) from None


def _list_options(function: Callable[..., None]) -> Iterator[_Option]:
    for name, hint in typing.get_type_hints(function, include_extras=True).items():
        kind, *marks = typing.get_args(hint) if typing.get_origin(hint) is typing.Annotated else (hint,)
        if name == "return" or tyro.conf.Positional in marks:
            continue
        named = next((mark.name for mark in marks if getattr(mark, "name", None)), name)
        many = typing.get_origin(kind) is tuple
        kind = typing.get_args(kind)[0] if many else kind
        union = typing.get_origin(kind) in (typing.Union, types.UnionType)
        yield _Option(f"--{named.replace('_', '-')}", typing.get_args(kind) if union else (kind,), many)


def _check_options(command: str, options: dict[str, _Option], arguments: Sequence[str]) -> None:
    """Refuse an option that there is not, and a value that its option does not take."""
    place = 0
    while place < len(arguments):
        text, equals, value = arguments[place].partition("=")
        place += 1
        if arguments[place - 1] == "--":  # what follows it are no options
            return
        if not text.startswith("--"):
            continue
        option = options.get(text.replace("_", "-"))
        if option is None:
            raise ArgumentError(
                command, f"no option {text}{_suggest(text, options, f'; vitrail {command} --help lists them')}"
            )
        if option.value_types == (bool,):
            continue
        values = [value] if equals else []
        more = option.takes_several and not equals  # behind an equals sign stands the only value
        while place < len(arguments) and not arguments[place].startswith("--") and (more or not values):
            values.append(arguments[place])
            place += 1
        if not values and not option.takes_several:
            raise ArgumentError(command, f"{text} needs a value")
        for each in values:
            _check_value(command, text, option, each)


def _check_value(command: str, text: str, option: _Option, value: str) -> None:
    if any(_is_accepted(kind, value) for kind in option.value_types):
        return
    literals = [kind for kind in option.value_types if typing.get_origin(kind) is typing.Literal]
    choices = [str(choice) for kind in literals for choice in typing.get_args(kind)]
    numbers = {int: "a whole number", float: "a number"}
    takes = _join_choices([*choices, *(numbers[kind] for kind in option.value_types if kind in numbers)])
    raise ArgumentError(command, f"{text} takes {takes}, not {value!r:.80}{_suggest(value, choices, '')}")


def _is_accepted(type_: Any, value: str) -> bool:
    if typing.get_origin(type_) is typing.Literal:
        return value in map(str, typing.get_args(type_))
    if type_ is types.NoneType:
        return value == "None"
    if type_ in (int, float):
        with contextlib.suppress(ValueError):
            type_(value)
            return True
        return False
    return True


def _suggest(wrong: str, known: typing.Iterable[str], otherwise: str) -> str:
    close = difflib.get_close_matches(wrong, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else otherwise


def _join_choices(names: Sequence[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _condense_tyro_error(command: str, box: str) -> str:
    """What tyro says of another mistake, in a line: the part of its box below the title, drawn with lines or dashes."""
    lines = [line.strip("│ ") for line in re.sub(r"\x1b\[[\d;]*m", "", box).splitlines()]
    parts = re.split(r"\n(?:[╭╰]|[─-]{3}).*", "\n" + "\n".join(lines))
    title = 0 if "╭" in box else 1
    text = next((" ".join(part.split()) for part in parts[title:] if part.strip()), "")
    if missing := re.match(rf"Missing from vitrail {command}: (\S+) (.*)", text):
        return f"it needs {missing[1]}: {missing[2].replace(' (required)', '')}"
    if wrong := re.match(r"invalid choice '(.*)' for argument '(.*)'. Expected one of \((.*)\)", text):
        choices = re.findall(r"'([^']*)'", wrong[3])
        return f"it takes {_join_choices(choices)}, not {wrong[1]!r}{_suggest(wrong[1], choices, '')}"
    if unknown := re.match(r"Unrecognized options: (.*)", text):
        return f"no place for {unknown[1]}; vitrail {command} --help lists what it takes"
    return text or f"vitrail {command} --help lists what it takes"
