"""Errors of `import vitrail` in the words of Python: they name keywords where the command line has options."""

import functools
import inspect
import re
import typing
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from vitrail.api.options import check_option_names
from vitrail.errors import VitrailError

P = ParamSpec("P")
R = TypeVar("R")
_COMMAND_OR_OPTION = re.compile(r"(`[^`]*`|(?:vitrail [a-z]+|hf download) [^;:,()]*)|(?<![\w-])--([a-z][a-z0-9-]*)")
"""A whole command or what is quoted, which stays as it is, or an option."""


def name_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function of `import vitrail`, so that its errors name keywords, and an unknown one the nearest.

    Commands that call the same function pass `notify`, and get errors that name their options.
    """

    parameters = inspect.signature(function).parameters
    takes_more = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not takes_more:
            check_option_names(kwargs, parameters)
        try:
            return function(*args, **kwargs)
        except VitrailError as error:
            if kwargs.get("notify") is None:
                error.args = (rename_options(str(error), _list_flags(function)), *error.args[1:])
            raise

    return call


def rename_options(message: str, flags: set[str]) -> str:
    """The message with `--save-every` as `save_every`, and a flag such as `--resume` as `resume=True`.

    "The same command" becomes a call; commands that are written out stay as they are.
    """

    def rename(match: re.Match[str]) -> str:
        if match[1]:
            return match[1]
        name = match[2].replace("-", "_")
        return f"{name}=True" if name in flags else name

    return _COMMAND_OR_OPTION.sub(rename, message).replace("he same command", "he same call")


def _list_flags(function: Callable[..., Any]) -> set[str]:
    """The keywords of a function that are true or false, those of its typed **options included."""
    hints = typing.get_type_hints(function)
    options = hints.pop("options", None)
    if typing.get_origin(options) is typing.Unpack:
        hints |= typing.get_type_hints(typing.get_args(options)[0])
    return {name for name, hint in hints.items() if hint is bool}
