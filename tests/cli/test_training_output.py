"""What training commands share: their options as options of a run, and the description of a dry run."""

import dataclasses
import sys

import pytest

from vitrail import recipes
from vitrail.cli import training_output
from vitrail.cli.arguments.training import FinetuneArguments, TrainArguments
from vitrail.cli.options import DataOptions, RecipeOptions, RunFolderOptions, Tracker, TrainingComputeOptions
from vitrail.training.finetune import FinetuneOptions
from vitrail.training.pretrain import PretrainingOptions
from vitrail.training.recipe_overrides import RecipeOverrides


def test_every_option_of_a_command_reaches_the_run() -> None:
    track: tuple[Tracker, ...] = ("tensorboard", "mlflow")
    folder = RunFolderOptions(out="mine", resume=True, overwrite=True, save_every=3, track=track, dry_run=True)
    compute = TrainingComputeOptions(
        seed=4, device="cpu", workers=2, micro_batches=5, recompute=True, shard=True, deterministic=True, verify_every=6
    )
    learning = DataOptions(balanced=True, strict=True, train_on_val=True)
    overrides = RecipeOptions(epochs=2, batch=3, lr=0.1, warmup=4)
    arguments = FinetuneArguments(
        data="photos", run=folder, compute=compute, learning=learning, overrides=overrides, trainable_layers=7
    )
    options = training_output.build_command_options(FinetuneOptions, arguments)
    groups = dataclasses.asdict(folder) | dataclasses.asdict(compute) | dataclasses.asdict(learning)
    del groups["dry_run"]
    others = {"loss_function": None, "must_resume": False, "teacher": None}  # of Python, and of `distill`
    assert dataclasses.asdict(options.run) == groups | others
    assert options.overrides == RecipeOverrides(epochs=2, batch=3, lr=0.1, warmup=4)
    assert options.trainable_layers == 7


def test_the_defaults_of_the_commands_are_those_of_python() -> None:
    finetune = training_output.build_command_options(FinetuneOptions, FinetuneArguments(data="photos"))
    train = training_output.build_command_options(PretrainingOptions, TrainArguments(recipe="digits", data="digits"))
    assert finetune == FinetuneOptions()
    assert train == PretrainingOptions()


@pytest.mark.parametrize(
    ("argv", "command"),
    [(["vitrail", "train", "digits"], ["train", "digits"]), (["pytest", "tests"], ()), (["python"], ())],
)
def test_a_run_remembers_its_command_where_it_is_one(
    argv: list[str], command: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    assert training_output.make_callbacks().command == command


def test_the_augmentation_is_its_crop_and_what_differs_from_the_defaults() -> None:
    recipe = recipes.get_recipe("digits")
    defaults = type(recipe.augment)()
    plain = dataclasses.replace(recipe, augment=dataclasses.replace(defaults, crop="squash"))
    assert training_output._describe_augmentation(plain) == "squash crop"
    mixed = dataclasses.replace(plain, augment=dataclasses.replace(plain.augment, mixup=0.5))
    assert training_output._describe_augmentation(mixed) == "squash crop, mixup 0.5"
