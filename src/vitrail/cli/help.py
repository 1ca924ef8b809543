"""`vitrail COMMAND --help`, as plain text that fits the terminal.

tyro prints a help page too, but in boxes, by dataclass instead of by topic, without an example, and in twice the time.
"""

import inspect
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from vitrail.cli import Command
from vitrail.cli.signature import Option, list_options

_MIN_WIDTH, _MAX_WIDTH = 60, 100
_HELP_COLUMN = 24


def format_command_help(verb: str, command: Command, signature: type[Any]) -> str:
    """What a command does, an example, its arguments, and its options by group."""
    width = max(_MIN_WIDTH, min(shutil.get_terminal_size().columns, _MAX_WIDTH))
    options = list(list_options(signature))
    positional = [option for option in options if option.is_positional]
    groups: dict[str, list[Option]] = {}
    for option in options:
        if not option.is_positional:
            groups.setdefault(option.group, []).append(option)
    lines = [*_wrap(_format_usage(verb, options), width, indent="    "), ""]
    sentence, *details = inspect.cleandoc(signature.__doc__ or "").split("\n\n")
    lines += [*_wrap(sentence, width), "", "example:", f"  {command.example}"]
    for paragraph in details:
        lines += ["", *_wrap(paragraph, width)]
    if positional:
        lines += ["", "arguments:", *_format_options(positional, width)]
    for title, members in groups.items():
        lines += ["", f"{title}:", *_format_options(members, width)]
    return "\n".join(lines)


def _format_usage(verb: str, options: Sequence[Option]) -> str:
    required = [
        f"{option.name} {option.metavar}" for option in options if option.is_required and not option.is_positional
    ]
    positional = [_format_positional(option) for option in options if option.is_positional]
    return " ".join(["usage: vitrail", verb, *positional, *required, "[options]"])


def _format_positional(option: Option) -> str:
    if option.name.startswith("["):  # says itself what may be omitted
        return option.name
    name = f"{option.name}..." if option.takes_several else option.name
    return name if option.is_required else f"[{name}]"


def _format_options(options: Iterable[Option], width: int) -> Iterator[str]:
    for option in options:
        left = f"  {option.name}" if option.is_positional or not option.metavar else f"  {option.name} {option.metavar}"
        body = textwrap.wrap(_describe_option(option), width - _HELP_COLUMN, break_on_hyphens=False)
        if len(left) < _HELP_COLUMN - 1:
            yield f"{left:{_HELP_COLUMN}}{body.pop(0)}"
        else:
            yield left
        yield from (" " * _HELP_COLUMN + line for line in body)


def _describe_option(option: Option) -> str:
    """The help text, with the choices and the default unless the line says them already."""
    sentences = [option.help]
    if option.choices and not set(option.choices) & set(re.findall(r"[\w-]+", f"{option.metavar} {option.help}")):
        sentences.append(f"One of {', '.join(option.choices)}.")
    default = option.default
    if option.is_required:
        sentences += [] if option.is_positional else ["(required)"]
    elif not (default is None or default is False or default == () or "default" in option.help.lower()):
        sentences.append(f"(default: {default:g})" if isinstance(default, float) else f"(default: {default})")
    return " ".join(sentences)


def _wrap(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(" ".join(text.split()), width, subsequent_indent=indent, break_on_hyphens=False)
