"""Parse the arguments of a command. A mistake is one line with the nearest name, and exit code 2.

tyro parses, but reports a mistake as a box of several lines; the usual mistakes are therefore found here first.
"""

import contextlib
import dataclasses
import difflib
import io
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import tyro

from vitrail.errors import ArgumentError

OLD_SPELLINGS = {  # accepted for one release and shown nowhere: an option, or an option and its value
    "--everything": "--train-on-val",
    "--target mean-colour": "--target mean-color",
    "--target 4x4-colours": "--target 4x4-colors",
    "--target normalised-pixels": "--target normalized-pixels",
}

Arguments = TypeVar("Arguments")


class _Option(NamedTuple):
    """An option and the values it takes."""

    name: str
    value_types: tuple[Any, ...]
    takes_several: bool

    @property
    def choices(self) -> list[str]:
        literals = [type_ for type_ in self.value_types if typing.get_origin(type_) is typing.Literal]
        return [str(choice) for literal in literals for choice in typing.get_args(literal)]


def parse_arguments(command: str, signature: type[Arguments], arguments: Sequence[str]) -> Arguments:
    """Parse the arguments into the command's dataclass; refuse mistakes in one line."""
    if not {"-h", "--help"} & set(arguments):
        options = {option.name: option for option in _list_options(signature)}
        arguments = replace_old_spellings(options, arguments)
        _check_options(command, options, arguments)
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(
                signature,
                prog=f"vitrail {command}",
                args=arguments,
                config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes),
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ArgumentError(command, _condense_tyro_error(command, box.getvalue())) from None


def replace_old_spellings(options: Mapping[str, Any], arguments: Sequence[str]) -> list[str]:
    """Replace the old names of options, and old values that their option does not take any more."""
    replaced: list[str] = []
    option = ""
    for position, argument in enumerate(arguments):
        if argument == "--":
            return [*replaced, *arguments[position:]]
        name, equals, value = argument.partition("=")
        if name.startswith("--"):
            option = name.replace("_", "-")
            if option not in options and OLD_SPELLINGS.get(option) in options:
                name = option = OLD_SPELLINGS[option]
            replaced.append(f"{name}={_replace_value(options, option, value)}" if equals else name)
        else:
            replaced.append(_replace_value(options, option, argument))
    return replaced


def _replace_value(options: Mapping[str, Any], option: str, value: str) -> str:
    new = OLD_SPELLINGS.get(f"{option} {value}", "").partition(" ")[2]
    return new if option in options and new in options[option].choices else value


def _list_options(signature: Callable[..., object]) -> Iterator[_Option]:
    """The options of a dataclass and of the groups in it, or of a function."""
    for name, hint in typing.get_type_hints(signature, include_extras=True).items():
        type_, *marks = typing.get_args(hint) if typing.get_origin(hint) is typing.Annotated else (hint,)
        if dataclasses.is_dataclass(type_):
            yield from _list_options(typing.cast(type, type_))
            continue
        if name == "return" or tyro.conf.Positional in marks:
            continue
        option_name = next((mark.name for mark in marks if getattr(mark, "name", None)), name)
        several = typing.get_origin(type_) is tuple
        type_ = typing.get_args(type_)[0] if several else type_
        union = typing.get_origin(type_) in (typing.Union, types.UnionType)
        yield _Option(f"--{option_name.replace('_', '-')}", typing.get_args(type_) if union else (type_,), several)


def _check_options(command: str, options: dict[str, _Option], arguments: Sequence[str]) -> None:
    """Refuse an unknown option, and a value that its option does not take."""
    position = 0
    while position < len(arguments):
        text, equals, value = arguments[position].partition("=")
        position += 1
        if arguments[position - 1] == "--":  # only positional arguments follow it
            return
        if not text.startswith("--"):
            continue
        option = options.get(text.replace("_", "-"))
        if option is None:
            suggestion = _suggest(text, options, f"; vitrail {command} --help lists them")
            raise ArgumentError(command, f"no option {text}{suggestion}")
        if option.value_types == (bool,):
            continue
        values = [value] if equals else []
        more = option.takes_several and not equals  # an equals sign is followed by one value only
        while position < len(arguments) and not arguments[position].startswith("--") and (more or not values):
            values.append(arguments[position])
            position += 1
        if not values and not option.takes_several:
            raise ArgumentError(command, f"{text} needs a value")
        for value in values:
            _check_value(command, text, option, value)


def _check_value(command: str, text: str, option: _Option, value: str) -> None:
    if any(_is_accepted(type_, value) for type_ in option.value_types):
        return
    numbers = {int: "a whole number", float: "a number"}
    takes = _join_choices([*option.choices, *(numbers[type_] for type_ in option.value_types if type_ in numbers)])
    raise ArgumentError(command, f"{text} takes {takes}, not {value!r:.80}{_suggest(value, option.choices, '')}")


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


def _suggest(wrong: str, known: Iterable[str], otherwise: str) -> str:
    close = difflib.get_close_matches(wrong, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else otherwise


def _join_choices(names: Sequence[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _condense_tyro_error(command: str, box: str) -> str:
    """Condense tyro's box of another mistake to one line: the part below the title, drawn with lines or dashes."""
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
        return f"unexpected argument {unknown[1]}; vitrail {command} --help lists what it takes"
    return text or f"vitrail {command} --help lists what it takes"
