"""Parse the arguments of a command. A mistake is one line with the nearest name, and exit code 2.

tyro parses, but reports a mistake as a box of several lines; the usual mistakes are therefore found here first.
"""

import contextlib
import difflib
import io
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import tyro

from vitrail.cli.signature import Option, list_options
from vitrail.errors import ArgumentError

OLD_SPELLINGS = {  # accepted for one release and shown nowhere: an option, or an option and its value
    "--everything": "--train-on-val",
    "--target mean-colour": "--target mean-color",
    "--target 4x4-colours": "--target 4x4-colors",
    "--target normalised-pixels": "--target normalized-pixels",
}

Arguments = TypeVar("Arguments")


def parse_arguments(command: str, signature: type[Arguments], arguments: Sequence[str]) -> Arguments:
    """Parse the arguments into the command's dataclass; refuse mistakes in one line."""
    all_options = list(list_options(signature))
    options = {option.name: option for option in all_options if not option.is_positional}
    arguments = replace_old_spellings(options, arguments)
    _check_options(command, all_options, arguments)
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(
                signature,
                prog=f"vitrail {command}",
                args=_join_repeated_options(options, arguments),
                config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes),
            )
    except SystemExit:
        required = [option for option in all_options if option.is_required]
        raise ArgumentError(command, _condense_tyro_error(command, required, box.getvalue())) from None


def replace_old_spellings(options: Mapping[str, Option], arguments: Sequence[str]) -> list[str]:
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


def _replace_value(options: Mapping[str, Option], option: str, value: str) -> str:
    new = OLD_SPELLINGS.get(f"{option} {value}", "").partition(" ")[2]
    return new if option in options and new in options[option].choices else value


def _check_options(command: str, all_options: Sequence[Option], arguments: Sequence[str]) -> None:
    """Refuse an unknown option, and a value that its option does not take."""
    options = {option.name: option for option in all_options if not option.is_positional}
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
            usage = _describe_positional(
                command, all_options, text, value or "".join(arguments[position : position + 1])
            )
            suggestion = usage or _suggest(text, options, f"; vitrail {command} --help lists them")
            raise ArgumentError(command, f"no option {text}{suggestion}")
        if option.value_types == (bool,):
            continue
        values = [value] if equals else []
        more = option.takes_several and not equals  # an equals sign is followed by one value only
        while position < len(arguments) and not arguments[position].startswith("--") and (more or not values):
            values.append(arguments[position])
            position += 1
        if not values:
            raise ArgumentError(command, f"{text} needs a value")
        for value in values:
            _check_value(command, text, option, value)


def _join_repeated_options(options: Mapping[str, Option], arguments: Sequence[str]) -> list[str]:
    """The arguments with all values of a repeated option behind one: --set a=1 --set b=2 -> --set a=1 b=2.

    tyro would keep those of the last alone.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    others: list[str] = []
    joined: dict[str, list[str]] = {}
    values = others
    for argument in arguments[:end]:
        name, equals, value = argument.partition("=")
        option = options.get(name.replace("_", "-")) if name.startswith("--") else None
        if option is not None and option.takes_several:
            values = joined.setdefault(option.name, [])
            values += [value] if equals else []
            values = others if equals else values
        elif name.startswith("--"):
            values = others
            others.append(argument)
        else:
            values.append(argument)
    behind = [text for name, texts in joined.items() for text in (name, *texts)]
    return [*others, *behind, *arguments[end:]]


def _check_value(command: str, text: str, option: Option, value: str) -> None:
    if any(_is_accepted(type_, value) for type_ in option.value_types if not (type_ is str and option.file_suffixes)):
        return
    if option.file_suffixes and value.lower().endswith(option.file_suffixes):
        return
    names = {int: "a whole number", float: "a number"}
    files = [f"a {' or '.join(option.file_suffixes)} file"] if option.file_suffixes else []
    takes = _join_choices([*option.choices, *(names[type_] for type_ in option.value_types if type_ in names), *files])
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


def _describe_positional(command: str, all_options: Sequence[Option], text: str, value: str) -> str:
    """How to give a positional argument that was given as an option, such as --recipe of `train`."""
    name = text.removeprefix("--").upper()
    positional = [option.name for option in all_options if option.is_positional]
    index = next((index for index, names in enumerate(positional) if name in names.split("|")), None)
    if index is None:
        return ""
    ordinal = ("first", "second")[index]
    positional[index] = value if value and not value.startswith("--") else name
    required = [_name_option(option) for option in all_options if option.is_required and not option.is_positional]
    return f"; {name} is the {ordinal} argument: vitrail {' '.join([command, *positional, *required])}"


def _name_option(option: Option) -> str:
    return option.name if option.is_positional else f"{option.name} {option.metavar}"


def _suggest(wrong: str, known: Iterable[str], otherwise: str) -> str:
    close = difflib.get_close_matches(wrong, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else otherwise


def _join_choices(names: Sequence[str]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _condense_tyro_error(command: str, required: Sequence[Option], box: str) -> str:
    """Condense tyro's box of another mistake to one line: the part below the title, drawn with lines or dashes."""
    lines = [line.strip("│ ") for line in re.sub(r"\x1b\[[\d;]*m", "", box).splitlines()]
    parts = re.split(r"\n(?:[╭╰]|[─-]{3}).*", "\n" + "\n".join(lines))
    title = 0 if "╭" in box else 1
    text = next((" ".join(part.split()) for part in parts[title:] if part.strip()), "")
    if text.startswith(f"Missing from vitrail {command}"):
        words = "".join(text.split())  # a line may be broken anywhere, even at a hyphen
        missing = [option for option in required if "".join(option.help.split()) in words]
        if missing:
            return "it needs " + " And ".join(f"{_name_option(option)}: {option.help}" for option in missing)
    if wrong := re.match(r"invalid choice '(.*)' for argument '(.*)'. Expected one of \((.*)\)", text):
        choices = re.findall(r"'([^']*)'", wrong[3])
        return f"it takes {_join_choices(choices)}, not {wrong[1]!r}{_suggest(wrong[1], choices, '')}"
    if unknown := re.match(r"Unrecognized options: (.*)", text):
        return f"unexpected argument {unknown[1]}; vitrail {command} --help lists what it takes"
    return text or f"vitrail {command} --help lists what it takes"
