"""The options of a command, read from its dataclass."""

import dataclasses
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from vitrail.cli.arguments.evaluation import PredictArguments
from vitrail.cli.arguments.training import FinetuneArguments, TrainArguments
from vitrail.cli.options import COMMON, Group
from vitrail.cli.parsing import parse_arguments
from vitrail.cli.signature import format_command, list_options


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


def test_a_command_names_what_differs_from_the_defaults() -> None:
    arguments = PredictArguments(model="m", paths=("a", "b"), row_format="jsonl", top=3, sbatch=4)
    command = ["predict", "m", "a", "b", "--top", "3", "--format", "jsonl"]
    assert format_command("predict", arguments, without=["--sbatch"]) == command
    outer = Outer(source="s", inner=Inner(fast=True, many=(2, 3)))
    assert format_command("verb", outer) == ["verb", "s", "--many", "2", "3"]  # this group's fast is True by default


def test_a_command_is_parsed_to_the_same_arguments() -> None:
    words = [
        "digits", "--data", "my photos", "--set", "depth=3", "augment.mixup=0.2", "--probe", "5", "--lr", "1e-05",
        "--track", "wandb", "--track", "tensorboard", "--class-weights", "w.csv", "--seed", "1", "--shard",
        "--save-every", "2.5", "--target", "pixels", "--balanced", "--nodes", "2", "--sbatch",
    ]  # fmt: skip
    arguments = parse_arguments("train", TrainArguments, words)
    verb, *formatted = format_command("train", arguments)
    assert verb == "train"
    assert sorted(formatted) == sorted(words)
    assert parse_arguments("train", TrainArguments, formatted) == arguments
