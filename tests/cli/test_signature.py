"""The options of a command, read from its dataclass."""

import dataclasses
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from vitrail.cli.arguments.training import FinetuneArguments
from vitrail.cli.options import COMMON, Group
from vitrail.cli.signature import list_options


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    fast: bool = False
    """Be quick."""
    many: Annotated[tuple[int, ...] | None, COMMON, arg(metavar="N [N]")] = None
    """Numbers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    source: Annotated[str, Positional, arg(metavar="SRC", help="From here.")]
    kind_of: Annotated[Literal["a", "b"] | None, arg(name="kind")] = None
    """Which
    one."""
    inner: Annotated[Inner, Group("speed")] = Inner(fast=True)


def test_options_have_names_groups_values_and_defaults() -> None:
    source, kind, fast, many = list_options(Outer)
    assert (source.name, source.help, source.is_positional, source.is_required) == ("SRC", "From here.", True, True)
    assert (kind.name, kind.metavar, kind.choices, kind.help) == ("--kind", "a|b", ["a", "b"], "Which one.")
    assert (fast.name, fast.metavar, fast.group, fast.default) == ("--fast", "", "speed", True)
    assert (many.group, many.takes_several, many.value_types) == ("options", True, (int, type(None)))


def test_an_option_of_choices_may_take_files() -> None:
    (recipe,) = (option for option in list_options(FinetuneArguments) if option.name == "--recipe")
    assert (recipe.choices, recipe.file_suffixes) == (["default", "paper", "bit"], (".toml", ".json"))
