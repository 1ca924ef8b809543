"""Errors of `import vitrail` in the words of Python: they name keywords where the command line has options."""

import contextlib
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

from vitrail.api.argument_checks import check_argument, check_option_names, list_choices, list_kinds
from vitrail.errors import UsageError, VitrailError

P = ParamSpec("P")
R = TypeVar("R")
OTHER_NAMES = {
    "embed": "vitrail.embed",
    "lambda": "penalty",
    "layers": "trainable_layers",
    "probe": "probe_shots",
    "resample": "operator",
    "set": "settings",
    "to": "format",
}
"""Options whose keyword has another name, where the function has no keyword of the option's own name."""
_COMMAND_OR_OPTION = re.compile(
    r"(?P<command>`[^`]*`|(?:vitrail (?!or\b)[a-z]+|hf download) [^;:,()]*)"
    r"|(?<![\w-])--(?P<option>[a-z][a-z0-9-]*)(?: (?!--|vitrail (?!or\b))(?P<word>[^\s`,;()]+))?"
)
"""A whole command or what is quoted, which stays as it is; or an option and the word behind it."""
_called_keywords: ContextVar[Mapping[str, Any]] = ContextVar("called_keywords", default=types.MappingProxyType({}))

_is_command: ContextVar[bool] = ContextVar("is_command", default=False)


def name_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function of `import vitrail`: its arguments are checked by their hints, and errors name keywords.

    Commands that call the same function do so in `keep_option_names`.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        keywords = {} if _is_command.get() else list_keywords(function)
        token = _called_keywords.set(keywords)
        try:
            bound = _check_arguments(function, args, kwargs)
            return function(*bound.args, **bound.kwargs)
        except VitrailError as error:
            if keywords:
                error.args = (rename_options(str(error), keywords), *error.args[1:])
            raise
        finally:
            _called_keywords.reset(token)

    return call


@contextlib.contextmanager
def keep_option_names() -> Iterator[None]:
    """Within the block errors and notes name options: a command runs."""
    token = _is_command.set(True)
    try:
        yield
    finally:
        _is_command.reset(token)


def get_called_keywords() -> Mapping[str, Any]:
    """The keywords of the function of `import vitrail` that is running, with their hints; empty outside of one."""
    return _called_keywords.get()


def _check_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    """The arguments by the function's parameters, refused if a name or a value is wrong."""
    hints, signature = list_keywords(function), inspect.signature(function)
    if _find_options_type(function) is not Any:
        check_option_names(kwargs, hints)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:  # too many arguments, or too few
        raise UsageError(f"vitrail.{function.__name__}: {error}") from None
    for name, value in bound.arguments.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            checked = {key: check_argument(key, option, hints.get(key, Any)) for key, option in value.items()}
        else:
            checked = check_argument(name, value, hints.get(name, Any))
        bound.arguments[name] = checked
    return bound


@functools.cache
def list_keywords(function: Callable[..., Any]) -> dict[str, Any]:
    """The names and hints of a function's parameters, those of its typed **options included."""
    hints = typing.get_type_hints(function)
    hints.pop("return", None)
    options = hints.pop(_find_options_name(function), None)
    if typing.get_origin(options) is typing.Unpack:
        hints |= typing.get_type_hints(typing.get_args(options)[0])
    return hints


def _find_options_name(function: Callable[..., Any]) -> str:
    """The name of a function's **options; empty where it has none."""
    parameters = inspect.signature(function).parameters.values()
    return next((each.name for each in parameters if each.kind is each.VAR_KEYWORD), "")


def _find_options_type(function: Callable[..., Any]) -> Any:
    """The hint of a function's **options, which is Any where they may have any name."""
    return typing.get_type_hints(function).get(_find_options_name(function))


def rename_options(message: str, keywords: Mapping[str, Any]) -> str:
    """The message with `--save-every` as `save_every`, `--resume` as `resume=True` and `--to onnx` as `to="onnx"`.

    `keywords` are those of the function, with their hints. "The same command" becomes a call; commands that are
    written out stay as they are.
    """

    def rename(match: re.Match[str]) -> str:
        if match["command"]:
            return match["command"]
        name = rename_option(match["option"], keywords)
        hint, word = keywords.get(name), match["word"] or ""
        if hint is bool:
            name = f"{name}=True"
        elif value := _format_value(word.rstrip(".:?!"), hint):
            return f"{name}={value}{word[len(word.rstrip('.:?!')) :]}"
        return f"{name} {word}" if word else name

    return _COMMAND_OR_OPTION.sub(rename, message).replace("he same command", "he same call")


def rename_option(option: str, keywords: Mapping[str, Any]) -> str:
    """The keyword of an option, such as save_every of save-every."""
    name = option.replace("-", "_")
    return name if name in keywords else OTHER_NAMES.get(option, name)


def _format_value(word: str, hint: Any) -> str:
    """The word behind an option as a value in Python; empty where it is a word of the sentence."""
    kinds = list_kinds(hint)
    if word in list_choices(hint):
        return f'"{word}"'
    if hint is not None and word.isupper():  # DATA or N, which stand for a value
        return word
    if {int, float} & set(kinds) and re.fullmatch(r"-?[\d.]+", word):
        return word
    return f'"{word}"' if str in kinds and re.search(r"[\d./:]", word) else ""
