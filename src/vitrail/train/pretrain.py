"""Train a model from random weights by a recipe: what `vitrail train` calls."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from vitrail import recipes
from vitrail.config import MaskedTarget, Recipe
from vitrail.data.sources import open_dataset
from vitrail.runtime.distributed import ProcessGroup
from vitrail.train import recipe_overrides
from vitrail.train.dataset_checks import check_classes, check_images, list_dataset_notes
from vitrail.train.recipe_overrides import RecipeOverrides
from vitrail.train.run_execution import SILENT, RunCallbacks, RunOptions, execute_run, join_run_processes
from vitrail.train.run_folder import choose_run_folder
from vitrail.train.run_results import collect_result_facts
from vitrail.train.training_run import TrainingRun


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainingOptions:
    """What to change of a recipe, and how to run it."""

    overrides: RecipeOverrides = dataclasses.field(default_factory=RecipeOverrides)
    settings: Sequence[str] = ()
    """Other settings of the recipe, as NAME=VALUE."""
    target: MaskedTarget | None = None
    """The prediction target of masked patches, instead of the recipe's."""
    probe_shots: int = 0
    """Images of each class for the few-shot probe at each evaluation; 0 for none."""
    run: RunOptions = dataclasses.field(default_factory=RunOptions)


DEFAULT_OPTIONS = PretrainingOptions()


def pretrain(
    recipe: str,
    data: str,
    options: PretrainingOptions = DEFAULT_OPTIONS,
    callbacks: RunCallbacks = SILENT,
) -> dict[str, Any] | None:
    """Train a model by a named recipe in a run folder; return the facts of the result, on rank 0.

    `data` is a folder, a .csv or .jsonl, shards, a downloaded dataset, digits, or hf:ORG/NAME.
    """
    chosen = choose_recipe(recipe, options)
    run_options = options.run
    with join_run_processes(run_options, callbacks) as (group, device, callbacks):
        run = build_pretraining_run(chosen, data, options, group, device, callbacks)
        folder, resume = choose_run_folder(
            "train",
            run_options.out,
            group,
            resume=run_options.resume,
            overwrite=run_options.overwrite,
            notify=callbacks.notify,
        )
        dataset, audit = check_images(
            run.dataset,
            data,
            strict=run_options.strict,
            notify=callbacks.notify,
            show_progress=callbacks.show_progress,
        )
        if run.recipe.masked is None:
            check_classes(dataset, train_on_val=run_options.train_on_val)
        run = dataclasses.replace(run, dataset=dataset)
        result = execute_run(run, folder, data, run_options, callbacks, resume=resume, audit=audit)
        return None if result is None else collect_result_facts(run, result, folder)


def choose_recipe(name: str, options: PretrainingOptions) -> Recipe:
    """The named recipe with the options' changes, before the dataset is known."""
    recipe = recipes.override_settings(recipes.get_recipe(name), options.settings)
    recipe = recipe_overrides.set_masked_target(recipe, options.target)
    return recipe_overrides.override_recipe(recipe, options.overrides)


def build_pretraining_run(
    recipe: Recipe,
    data: str,
    options: PretrainingOptions,
    group: ProcessGroup,
    device: torch.device,
    callbacks: RunCallbacks,
) -> TrainingRun:
    """The run of a recipe on a dataset; its images are not read yet."""
    dataset = open_dataset(data)
    for note in list_dataset_notes(dataset):
        callbacks.notify(note)
    if recipe.masked is None:
        check_classes(dataset, strict=options.run.strict, train_on_val=options.run.train_on_val)
    if options.overrides.warmup is None and "train" in dataset.splits:
        recipe = recipe_overrides.shorten_warmup(recipe, len(dataset.splits["train"]), callbacks.notify)
    recipe = dataclasses.replace(recipe, logit_adjustment=options.run.balanced)
    return options.run.build_run(
        recipe_overrides.choose_loss(recipe, dataset), dataset, group, device, probe_shots=options.probe_shots
    )
