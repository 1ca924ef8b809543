"""`vitrail recipe show`: recipes as files that train again."""

import json
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from tests.cli.test_cli import Capture, run
from vitrail import recipes


def show(name: str, folder: Path, capsys: Capture, *options: str) -> Path:
    """The file that `vitrail recipe show NAME > FILE` writes."""
    code, out, err = run("recipe", "show", name, *options, capsys=capsys)
    assert (code, err) == (0, "")
    path = folder / ("my.json" if "--json" in options else "my.toml")
    path.write_text(out, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", recipes.RECIPES)
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_every_recipe_is_read_back(name: str, options: tuple[str, ...], tmp_path: Path, capsys: Capture) -> None:
    assert recipes.load_recipe(show(name, tmp_path, capsys, *options)) == recipes.RECIPES[name]


@pytest.mark.parametrize("kind", get_args(recipes.FinetuneKind))
@pytest.mark.parametrize("images", [100, 1_000_000])
def test_recipes_of_finetuning_are_read_back(
    kind: recipes.FinetuneKind, images: int, tmp_path: Path, capsys: Capture
) -> None:
    path = show(kind, tmp_path, capsys, "--images", str(images))
    assert recipes.load_finetune_recipe(path) == recipes.build_finetune_recipe(kind, images, patch=16)
    assert "# Use it: vitrail finetune DATA --model MODEL --recipe my.toml\n" in path.read_text()


@pytest.mark.parametrize("name", [*recipes.RECIPES, "default"])
def test_the_file_fits_a_screen_and_says_what_fields_mean(name: str, tmp_path: Path, capsys: Capture) -> None:
    text = show(name, tmp_path, capsys).read_text()
    assert "# The peak learning rate.\n" in text
    assert '"#' not in text
    values = tomllib.loads(text)
    long = [line for line in text.splitlines() if len(line) > 120 and not line.startswith(("#", "source", "result"))]
    assert (long, "optimizer" in values) == ([], True)


def test_a_shown_recipe_trains(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = show("digits", tmp_path, capsys)
    path.write_text(path.read_text().replace("batch = 64", "batch = 32"))
    code, out, err = run("train", str(path), "--data", "digits", "--dry-run", capsys=capsys)
    assert (code, "with a batch of 32, 60 epochs" in out) == (0, True), err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("recipe show cifar", "there is no recipe 'cifar': did you mean cifar10? `vitrail list recipes` shows them"),
        ("recipe show papr", "there is no recipe 'papr': did you mean paper, which fine-tunes?"),
        ("recipe show nothing.toml", "nothing.toml does not exist; `vitrail recipe show NAME > nothing.toml`"),
        ("recipe shwo digits", "no command recipe shwo; did you mean recipe show?"),
        ("recipe", "name a command: recipe show"),
        ("finetune d --model m --recipe {tmp}/my.toml", "my.toml trains ti2 from random weights: vitrail train"),
        ("finetune d --model m --recipe nothing.toml", "nothing.toml does not exist"),
        ("finetune d --model m --set augment.mixpu=0", "no setting 'augment.mixpu': did you mean augment.mixup?"),
    ],
)
def test_wrong_names_are_answered_before_data_or_model_are_read(
    command: str, message: str, tmp_path: Path, capsys: Capture
) -> None:
    show("digits", tmp_path, capsys)
    code, out, err = run(*command.format(tmp=tmp_path).split(), capsys=capsys)
    assert (code, out) == (2, "")
    assert message in err


def test_json_is_the_recipe(capsys: Capture) -> None:
    code, out, _ = run("recipe", "show", "cifar10", "--json", capsys=capsys)
    assert (code, json.loads(out)["optimizer"]["kind"]) == (0, "muon")
