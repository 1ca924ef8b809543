"""Train a student with a teacher: what `vitrail distill` and `vitrail.distill` call.

A student that has weights, or is a preset, is fine-tuned; a recipe that names a preset trains one by `pretrain`.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from vitrail import recipes
from vitrail.config import Recipe
from vitrail.data.sources import DataSource
from vitrail.errors import UsageError
from vitrail.training.finetune import FinetuneOptions, check_initial_model, finetune, plan_finetuning
from vitrail.training.pretrain import PretrainingOptions, build_pretraining_run, choose_recipe, pretrain
from vitrail.training.recipe_overrides import RecipeOverrides
from vitrail.training.run_execution import SILENT, RunCallbacks, RunOptions, join_run_processes
from vitrail.training.training_run import TrainingRun
from vitrail.weights.load import is_preset
from vitrail.weights.trained import Trained


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillOptions:
    """How a student is trained."""

    recipe: str | Path | Recipe = "default"
    """A recipe of fine-tuning, or one that names the student's preset: a name, a file or a value."""
    settings: Sequence[str] | Mapping[str, Any] = ()
    """Other settings of the recipe: NAME=VALUE, or values by name."""
    overrides: RecipeOverrides = dataclasses.field(default_factory=RecipeOverrides)
    image_size: int | None = None
    """Resolution of a student that is fine-tuned, instead of the model's; positions are resampled."""
    run: RunOptions = dataclasses.field(default_factory=RunOptions)


DEFAULT_OPTIONS = DistillOptions()


def distill(
    teacher: Trained,
    data: DataSource,
    model: str | Path | Trained | None,
    options: DistillOptions = DEFAULT_OPTIONS,
    callbacks: RunCallbacks = SILENT,
    *,
    start_time: float | None = None,
) -> dict[str, Any]:
    """Train a student in a run folder; return the facts of the result.

    The model is the student to fine-tune, and None for a recipe that names a preset.
    """
    if not _is_for_finetuning(options.recipe):
        return pretrain(options.recipe, data, _make_pretraining_options(teacher, model, options), callbacks)
    student, finetuning = _make_finetune_options(teacher, model, options)
    (facts,) = finetune(data, student, finetuning, callbacks, start_time=start_time)
    return facts


@contextlib.contextmanager
def plan_distillation(
    teacher: Trained, data: DataSource, model: str | Path | None, options: DistillOptions, callbacks: RunCallbacks
) -> Iterator[TrainingRun]:
    """The student's run, within the processes that would compute it; nothing is written and no image is read."""
    if not _is_for_finetuning(options.recipe):
        pretraining = _make_pretraining_options(teacher, model, options)
        recipe = choose_recipe(options.recipe, pretraining)
        with join_run_processes(options.run, callbacks) as (group, device, callbacks):
            yield build_pretraining_run(recipe, data, pretraining, group, device, callbacks)
        return
    student, finetuning = _make_finetune_options(teacher, model, options)
    student = check_initial_model(student, finetuning, callbacks.notify)
    with join_run_processes(options.run, callbacks) as (group, device, callbacks):
        start_time = time.monotonic()
        plan = plan_finetuning(data, student, finetuning, group, device, callbacks, start_time=start_time, dry_run=True)
        yield plan.run


def _is_for_finetuning(recipe: str | Path | Recipe) -> bool:
    if isinstance(recipe, Recipe):
        return recipe.model is None
    return recipe in get_args(recipes.FinetuneKind) or recipes.load_recipe(recipe).model is None


def _make_finetune_options(
    teacher: Trained, model: str | Path | Trained | None, options: DistillOptions
) -> tuple[str | Path | Trained, FinetuneOptions]:
    """The student and how it is fine-tuned; a preset starts with random weights."""
    if model is None:
        raise UsageError("name the student with --model: a trained model, or a preset such as ti16; or give a --recipe")
    return model, FinetuneOptions(
        recipe=options.recipe,
        settings=options.settings,
        overrides=options.overrides,
        image_size=options.image_size,
        from_scratch=isinstance(model, str) and is_preset(model),
        run=dataclasses.replace(options.run, teacher=teacher),
    )


def _make_pretraining_options(
    teacher: Trained, model: str | Path | Trained | None, options: DistillOptions
) -> PretrainingOptions:
    """How the preset of a recipe is trained from random weights."""
    if model is not None or options.image_size is not None:
        name = "the recipe" if isinstance(options.recipe, Recipe) else f"the recipe {options.recipe}"
        raise UsageError(f"{name} names its own preset and resolution: omit --model, --image-size")
    return PretrainingOptions(
        settings=options.settings,
        overrides=options.overrides,
        run=dataclasses.replace(options.run, teacher=teacher),
    )
