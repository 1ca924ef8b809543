"""Checks that several configurations share; they refuse a value and never change one."""

import typing
from typing import Literal

from vitrail.errors import UsageError


def check_choices(config: object) -> None:
    """Refuse a value that is not among the choices of its field."""
    for name, hint in typing.get_type_hints(type(config)).items():
        choices = typing.get_args(hint)
        if typing.get_origin(hint) is Literal and getattr(config, name) not in choices:
            raise UsageError(f"{name} is {getattr(config, name)!r}; choose one of {', '.join(map(str, choices))}")


def check_fractions(config: object, *names: str) -> None:
    """Refuse a field among `names` that is below 0, or 1 and more."""
    for name in names:
        if not 0 <= getattr(config, name) < 1:
            raise UsageError(f"{name} is {getattr(config, name)}; it must be from 0 to below 1")
