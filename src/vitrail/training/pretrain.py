"""Train a model from random weights by a recipe: what `vitrail train` calls."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vitrail import recipes
from vitrail.config import MaskedTarget, Recipe
from vitrail.data.sources import DataSource, get_data_name
from vitrail.errors import UsageError
from vitrail.runtime import distributed
from vitrail.runtime.distributed import ProcessGroup
from vitrail.training import recipe_overrides
from vitrail.training.dataset_checks import check_classes, check_images, list_dataset_notes
from vitrail.training.recipe_overrides import RecipeOverrides
from vitrail.training.run_execution import SILENT, RunCallbacks, RunOptions, execute_run, join_run_processes
from vitrail.training.run_results import collect_result_facts
from vitrail.training.training_run import TrainingRun


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainingOptions:
    """What to change of a recipe, and how to run it."""

    overrides: RecipeOverrides = dataclasses.field(default_factory=RecipeOverrides)
    settings: Sequence[str] | Mapping[str, Any] = ()
    """Other settings of the recipe: NAME=VALUE, or values by name."""
    target: MaskedTarget | None = None
    """The prediction target of masked patches, instead of the recipe's."""
    probe_shots: int = 0
    """Images of each class for the few-shot probe at each evaluation; 0 for none."""
    run: RunOptions = dataclasses.field(default_factory=RunOptions)

    def __post_init__(self) -> None:
        if self.probe_shots < 0:
            raise UsageError(f"--probe is {self.probe_shots}; give images per class, 0 for never")


DEFAULT_OPTIONS = PretrainingOptions()


def pretrain(
    recipe: str | Path | Recipe,
    data: DataSource,
    options: PretrainingOptions = DEFAULT_OPTIONS,
    callbacks: RunCallbacks = SILENT,
) -> dict[str, Any]:
    """Train a model by a recipe in a run folder; return the facts of the result."""
    chosen = choose_recipe(recipe, options)
    run_options = options.run
    with join_run_processes(run_options, callbacks) as (group, device, callbacks):
        recipe_overrides.warn_about_own_loss(recipe, run_options.loss_function, callbacks.notify)
        run = build_pretraining_run(chosen, data, options, group, device, callbacks)
        folder, resume = run_options.choose_folder(
            "train" if run_options.teacher is None else "distill", group, callbacks.notify
        )
        notify, show_progress = callbacks.notify, callbacks.show_progress
        dataset, audit = check_images(
            run.dataset, get_data_name(data), strict=run_options.strict, notify=notify, show_progress=show_progress
        )
        if run.recipe.masked is None:
            check_classes(dataset, train_on_val=run_options.train_on_val)
        run = dataclasses.replace(run, dataset=dataset)
        name = get_data_name(data)
        result = execute_run(run, folder, name, run_options, callbacks, resume=resume, audit=audit)
        facts = {} if result is None else collect_result_facts(run, result, folder)
        return distributed.run_on_rank0(lambda: facts)


def choose_recipe(recipe: str | Path | Recipe, options: PretrainingOptions) -> Recipe:
    """The recipe with the options' changes, before the dataset is known."""
    if isinstance(recipe, Recipe):
        name, call = "the recipe", "vitrail.finetune(data, model, recipe=recipe)"
        recipe = recipes.check_recipe(recipe)
    else:
        name, call = str(recipe), f"vitrail finetune DATA --recipe {recipe}"
        recipe = recipes.load_recipe(recipe)
    if recipe.model is None:
        raise UsageError(f"{name} is for fine-tuning, since it names no preset: {call}")
    recipe = recipe_overrides.set_distillation(recipe, options.run.teacher)
    recipe = recipe_overrides.override_settings(recipe, options.settings, options.overrides)
    recipe = recipe_overrides.set_masked_target(recipe, options.target)
    if recipe.masked is not None and options.run.loss_function is not None:
        raise UsageError(
            f"a loss is computed from the logits of classes, and {name} predicts masked patches"
            f" ({recipe.masked.target}): omit `loss`, or choose another target"
        )
    return recipe_overrides.override_recipe(recipe, options.overrides)


def build_pretraining_run(
    recipe: Recipe,
    data: DataSource,
    options: PretrainingOptions,
    group: ProcessGroup,
    device: torch.device,
    callbacks: RunCallbacks,
) -> TrainingRun:
    """The run of a recipe on a dataset; its images are not read yet."""
    dataset = options.run.open_dataset(data)
    for note in list_dataset_notes(dataset):
        callbacks.notify(note)
    if recipe.masked is None:
        check_classes(dataset, strict=options.run.strict, train_on_val=options.run.train_on_val)
    if options.overrides.warmup is None and "train" in dataset.splits:
        recipe = recipe_overrides.shorten_warmup(recipe, len(dataset.splits["train"]), callbacks.notify)
    if "train" in dataset.splits:
        recipe_overrides.warn_about_large_batch(recipe, len(dataset.splits["train"]), callbacks.notify)
    recipe = dataclasses.replace(recipe, logit_adjustment=recipe.logit_adjustment or options.run.balanced)
    return options.run.build_run(
        recipe_overrides.choose_loss(recipe, dataset), dataset, group, device, probe_shots=options.probe_shots
    )
