"""Mistyped options and values, and old spellings."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.cli.test_cli import Capture, run
from vitrail.cli import parsing
from vitrail.cli.arguments.evaluation import ProbeArguments
from vitrail.cli.arguments.models import InfoArguments, ServeArguments
from vitrail.cli.arguments.training import FinetuneArguments, TrainArguments
from vitrail.cli.signature import list_options
from vitrail.config import MaskedTarget
from vitrail.errors import ArgumentError


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("finetune photos --modle x", "vitrail finetune: no option --modle; did you mean --model?"),
        (
            "train --recipe my.toml --data d",
            "vitrail train: no option --recipe; RECIPE is the first argument: vitrail train my.toml --data DATA",
        ),
        (
            "train digits --kubernetes",
            "vitrail train: no option --kubernetes; vitrail plan RECIPE --kubernetes prints the job that trains on a"
            " cluster",
        ),
        (
            "evaluate m --data=photos",
            "vitrail evaluate: no option --data; DATA is the second argument: vitrail evaluate MODEL photos",
        ),
        (
            "study vtab --data-root d --model",
            "vitrail study vtab: no option --model; MODEL is the first argument: vitrail study vtab MODEL"
            " --data-root DIR",
        ),
        ("plan --model b16", "vitrail plan: no option --model; MODEL is the first argument: vitrail plan b16"),
        ("finetune photos --zzzz=3", "vitrail finetune: no option --zzzz; vitrail finetune --help lists them"),
        (
            "finetune photos --recipe papr",
            "vitrail finetune: --recipe takes default, paper, bit or a .toml or .json file, not 'papr'; did you mean"
            " paper?",
        ),
        (
            "train r --data d --track=tensorbord",
            "vitrail train: --track takes tensorboard, wandb or mlflow, not 'tensorbord'; did you mean tensorboard?",
        ),
        (
            "probe m d --methods knn liner",
            "vitrail probe: --methods takes few-shot, knn, linear or logistic, not 'liner'; did you mean linear?",
        ),
        ("probe m d --lambda x", "vitrail probe: --lambda takes auto or a number, not 'x'"),
        ("finetune photos --epochs abc", "vitrail finetune: --epochs takes a number, not 'abc'"),
        ("finetune photos --batch 2.5", "vitrail finetune: --batch takes a whole number, not '2.5'"),
        ("finetune photos --model", "vitrail finetune: --model needs a value"),
        ("finetune photos --set", "vitrail finetune: --set needs a value"),
        ("finetune photos --set --epochs 3", "vitrail finetune: --set needs a value"),
        (
            "finetune photos more",
            "vitrail finetune: unexpected argument more; vitrail finetune --help lists what it takes",
        ),
        ("list recipe", "vitrail list: it takes models or recipes, not 'recipe'; did you mean recipes?"),
        ("info", "vitrail info: it needs MODEL: A file or folder"),
        (
            "train",
            "vitrail train: it needs RECIPE: A recipe that `vitrail list recipes` shows, or a .toml or .json file. And",
        ),
        ("train digits", "vitrail train: it needs --data DATA: A folder"),
        ("convert b16 x --image-size big", "vitrail convert: --image-size takes a whole number, not 'big'"),
    ],
)
def test_a_mistyped_option_or_value_gets_a_line_and_the_nearest_name(command: str, line: str, capsys: Capture) -> None:
    code, out, err = run(*command.split(), capsys=capsys)
    assert (code, out) == (2, "")
    assert err.startswith(line)
    assert err.count("\n") == 1


@pytest.mark.parametrize("utf8", ["0", "1"])
@pytest.mark.parametrize(
    ("command", "line"),
    [
        (
            "info",
            "vitrail info: it needs MODEL: A file or folder of any known format, builtin, hf:ORG/NAME[@REVISION]",
        ),
        ("info b16 more", "vitrail info: unexpected argument more; vitrail info --help lists what it takes"),
    ],
)
def test_the_line_of_a_mistake_has_nothing_of_its_box(command: str, line: str, utf8: str) -> None:
    """The box is drawn with lines where the terminal has UTF-8, and with dashes elsewhere."""
    environment = {**os.environ, "PYTHONUTF8": utf8, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    arguments = [sys.executable, "-m", "vitrail", *command.split()]
    completed = subprocess.run(arguments, capture_output=True, encoding="utf-8", env=environment)
    assert completed.returncode == 2
    assert completed.stderr.startswith(line)
    assert not set("╭╰│─") & set(completed.stderr)
    assert "helptext" not in completed.stderr


def test_behind_an_equals_sign_stands_the_only_value(capsys: Capture) -> None:
    code, _, err = run("probe", "--shots=5", "b16", "nowhere", capsys=capsys)
    assert (code, err.startswith("vitrail: nowhere does not exist")) == (3, True)


def test_what_follows_two_dashes_is_no_option(capsys: Capture) -> None:
    code, _, err = run("info", "--", "--b16", capsys=capsys)
    assert code != 0
    assert "no file or folder is called '--b16'" in err


def test_options_are_taken_with_dashes_underscores_and_equals(tmp_path: Path, capsys: Capture) -> None:
    for number, option in enumerate((("--image-size=32",), ("--image_size", "32"), ("--image-size", "32", "48"))):
        code, _, err = run("convert", "ti16", str(tmp_path / f"{number}.safetensors"), *option, capsys=capsys)
        assert code == 0, err


@pytest.mark.parametrize(
    ("signature", "arguments"),
    [(TrainArguments, ["digits", "--data", "digits"]), (FinetuneArguments, ["photos"]), (ProbeArguments, ["b16", "d"])],
)
def test_old_options_are_accepted_and_hidden(signature: Any, arguments: list[str]) -> None:
    """--everything is --train-on-val, wherever that is an option."""
    for option in ("--everything", "--train-on-val"):
        parsed = parsing.parse_arguments("verb", signature, [*arguments, option])
        assert (getattr(parsed, "learning", None) or parsed).train_on_val
    assert "--everything" not in {option.name for option in list_options(signature)}
    with pytest.raises(ArgumentError, match="no option --everything"):
        parsing.parse_arguments("info", InfoArguments, ["b16", "--everything"])


@pytest.mark.parametrize("spelling", [row for row in parsing.OLD_SPELLINGS if " " in row])
@pytest.mark.parametrize("separator", [" ", "="])
def test_old_values_are_accepted(spelling: str, separator: str) -> None:
    command = spelling.replace(" ", separator).split()
    parsed = parsing.parse_arguments("train", TrainArguments, ["digits", "--data", "digits", *command])
    assert parsed.target in get_args(MaskedTarget)


def test_an_old_value_after_two_dashes_is_no_option() -> None:
    options = {option.name: option for option in list_options(TrainArguments)}
    assert parsing.replace_old_spellings(options, ["--", "--everything"]) == ["--", "--everything"]


@pytest.mark.parametrize(
    "command",
    [
        "digits --data digits --set optimizer.lr=1e-3 --set augment.mixup=0.2 --epochs 3",
        "digits --set optimizer.lr=1e-3 augment.mixup=0.2 --data digits --epochs 3",
        "--set=optimizer.lr=1e-3 digits --data digits --epochs 3 --set=augment.mixup=0.2",
    ],
)
def test_a_repeated_option_keeps_all_of_its_values(command: str) -> None:
    parsed = parsing.parse_arguments("train", TrainArguments, command.split())
    assert parsed.settings == ("optimizer.lr=1e-3", "augment.mixup=0.2")
    assert (parsed.recipe, parsed.data, parsed.overrides.epochs) == ("digits", "digits", 3)


def test_a_repeated_name_of_a_server_takes_one_value_each() -> None:
    parsed = parsing.parse_arguments("serve", ServeArguments, ["--host-name", "a", "model", "--host-name", "b"])
    assert (parsed.host_name, parsed.models) == (("a", "b"), ("model",))


def test_a_repeated_tracker_takes_one_value_each() -> None:
    arguments = ["--track", "wandb", "digits", "--data", "digits", "--track=tensorboard"]
    parsed = parsing.parse_arguments("train", TrainArguments, arguments)
    assert (parsed.run.track, parsed.recipe) == (("wandb", "tensorboard"), "digits")
