"""Weights of classes: what may be given, and what it means in a run."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import vitrail
from tests.data.image_files import write_image_folder
from vitrail.data.sources import open_dataset
from vitrail.errors import DataError, UsageError
from vitrail.recipes import load_recipe
from vitrail.runtime.distributed import SINGLE_PROCESS
from vitrail.training.class_weights import resolve_class_weights
from vitrail.training.losses import softmax_cross_entropy
from vitrail.training.run_execution import RunOptions

CLASSES = ("daisy", "rose", "tulip")


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("weights.csv", "class,weight\nrose,3\ntulip,0.5\n"),
        ("weights.csv", "images,class,weight\r\n7,tulip,.5\r\n9,rose,3e0\r\n"),
        ("weights.json", '{"tulip": 0.5, "rose": 3}'),
    ],
)
def test_a_file_names_some_of_the_classes(name: str, text: str, tmp_path: Path) -> None:
    assert resolve_class_weights(write(tmp_path / name, text), CLASSES) == (1, 3, 0.5)
    assert resolve_class_weights({"rose": 3, "tulip": 0.5}, CLASSES) == (1, 3, 0.5)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"rosé": 2}, "names the class 'rosé', which the data does not have: did you mean 'rose'"),
        ({"xyz": 2}, "its classes are such as 'daisy'"),
        ({"rose": 0}, "gives 'rose' the weight 0; it must be a finite number above 0"),
        ({"rose": float("nan")}, "finite number above 0"),
        ({"rose": True}, "finite number above 0"),
        ({}, "names no class"),
    ],
)
def test_what_is_no_weight_of_a_class_is_refused(weights: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve_class_weights(weights, CLASSES)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("w.csv", "name,weight\nrose,1\n", "must have the columns class and weight in its first line, which has name"),
        ("w.csv", "class,weight\nrose,1\nrose,2\n", "gives 'rose' two weights"),
        ("w.json", '{"rose": 1, "rose": 2}', "gives 'rose' two weights"),
        ("w.json", "[1]", "must hold an object"),
        ("w.json", "{", "is no JSON"),
        ("w.csv", "class,weight\nrose,heavy\n", "gives 'rose' the weight 'heavy'"),
        ("w.csv", "class,weight\nrose\n", "gives 'rose' the weight None"),
    ],
)
def test_a_damaged_file_is_named(name: str, text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises((DataError, UsageError), match=message):
        resolve_class_weights(write(tmp_path / name, text), CLASSES)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        resolve_class_weights(tmp_path / "absent.csv", CLASSES)


def build(data: str, options: RunOptions, name: str = "digits", **changes: Any) -> Any:
    recipe = load_recipe(name)
    recipe = dataclasses.replace(recipe, schedule=dataclasses.replace(recipe.schedule, warmup=0), **changes)
    return options.build_run(recipe, open_dataset(data), SINGLE_PROCESS, torch.device("cpu"))


def test_weights_contradict_what_replaces_the_loss_or_balances_it(tmp_path: Path) -> None:
    data = str(write_image_folder(tmp_path / "images", "train", "val", each=4))
    name = open_dataset(data).classes[0]
    run = build(data, RunOptions(class_weights={name: 2}))
    assert run.class_weights[0] == 2
    with pytest.raises(UsageError, match="--balanced and --class-weights"):
        build(data, RunOptions(class_weights={name: 2}), logit_adjustment=True)
    with pytest.raises(UsageError, match="which `loss` replaces"):
        build(data, RunOptions(class_weights={name: 2}, loss_function=softmax_cross_entropy))
    with pytest.raises(UsageError, match="learns without"):
        build(data, RunOptions(class_weights={name: 2}), "mae-b16-imagenet")


def test_a_run_records_its_weights_and_resumes_with_the_same_alone(tmp_path: Path) -> None:
    data = str(write_image_folder(tmp_path / "images", "train", "val", each=4))
    name = open_dataset(data).classes[0]
    options: Any = {"epochs": 1, "batch": 4, "workers": 0, "device": "cpu", "progress": False}
    run = vitrail.train("digits", data=data, out=tmp_path / "run", class_weights={name: 2.5}, **options)
    config = json.loads((run.folder / "config.json").read_text())
    assert config["class_weights"] == dict.fromkeys(open_dataset(data).classes, 1.0) | {name: 2.5}
    with pytest.raises(UsageError, match="class_weights"):
        vitrail.train("digits", data=data, out=run.folder, resume=True, class_weights={name: 2}, **options)
    vitrail.train("digits", data=data, out=run.folder, resume=True, class_weights={name: 2.5}, **options)
