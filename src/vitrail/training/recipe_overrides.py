"""Changes to a recipe for one run: its length, batch, learning rate and warm-up, and the loss that the data needs."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail import recipes
from vitrail.config import DistillationConfig, MaskedTarget, Recipe
from vitrail.errors import UsageError
from vitrail.formatting import pluralize
from vitrail.recipes.overrides import list_reserved_settings

if TYPE_CHECKING:
    from vitrail.data.dataset import Dataset

_MIN_STEPS_PER_WARMUP_STEP = 5  # a longer warm-up than a fifth of the run was meant for more images


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeOverrides:
    """Values that replace a recipe's; None keeps the recipe's."""

    epochs: float | None = None
    batch: int | None = None
    """Images in a step."""
    lr: float | None = None
    """The learning rate; other learning rates of the recipe are scaled with it."""
    warmup: int | None = None
    """Steps of warm-up; by default a shorter run has a shorter one."""


def override_settings(
    recipe: Recipe, settings: Iterable[str] | Mapping[str, Any], overrides: RecipeOverrides
) -> Recipe:
    """The recipe with other settings; the learning rate is refused among them where the overrides have one."""
    reserved = dict(list_reserved_settings(recipe))
    if overrides.lr is not None:
        reserved["optimizer.lr"] = "--lr sets it already; give one of them"
    return recipes.override_settings(recipe, settings, reserved)


def override_recipe(recipe: Recipe, overrides: RecipeOverrides) -> Recipe:
    """The recipe with the overrides; a shorter run has a shorter warm-up."""
    new = dataclasses.replace(
        recipe,
        epochs=recipe.epochs if overrides.epochs is None else overrides.epochs,
        batch=recipe.batch if overrides.batch is None else overrides.batch,
    )
    if overrides.lr is not None:
        scale = overrides.lr / recipe.optimizer.lr
        other_rates = {
            name: getattr(recipe.optimizer, name) * scale
            for name in ("head_lr", "adam_lr")
            if getattr(recipe.optimizer, name) is not None
        }
        new = dataclasses.replace(new, optimizer=dataclasses.replace(recipe.optimizer, lr=overrides.lr, **other_rates))
    if overrides.warmup is not None:
        return _set_warmup(new, overrides.warmup)
    return scale_warmup(new, new.epochs / new.batch * recipe.batch / recipe.epochs)


def scale_warmup(recipe: Recipe, length: float) -> Recipe:
    """The recipe with a warm-up for a run `length` times as long; it is never made longer."""
    return _set_warmup(recipe, round(recipe.schedule.warmup * min(1.0, length)))


def shorten_warmup(recipe: Recipe, images: int, notify: Callable[[str], None], *, option: str = "--warmup") -> Recipe:
    """The recipe with a tenth of the run as warm-up, where its own was meant for a far larger dataset.

    `option` is the command's option that changes it.
    """
    steps = math.ceil(recipe.epochs * images / recipe.batch)
    warmup = recipe.schedule.warmup
    if warmup <= steps / _MIN_STEPS_PER_WARMUP_STEP:
        return recipe
    shorter = steps // 10
    notify(
        f"note: the recipe's warm-up of {warmup:,} steps is for a larger dataset; this run of"
        f" {pluralize(steps, 'step')} takes {shorter:,} ({option} changes it)"
    )
    return _set_warmup(recipe, shorter)


def warn_about_large_batch(recipe: Recipe, images: int, notify: Callable[[str], None]) -> None:
    """Say where a batch holds more images than there are, as a recipe file without `batch` has it."""
    if recipe.batch > images:
        steps = math.ceil(recipe.epochs * images / recipe.batch)
        notify(
            f"note: the batch of {recipe.batch:,} is larger than the training set of {pluralize(images, 'image')}, so"
            f" the run has only {pluralize(steps, 'step')}; --batch N sets a smaller one"
        )


def warn_about_own_loss(name: str | Path | Recipe, loss: object | None, notify: Callable[[str], None]) -> None:
    """Say where a run's config.json is the recipe and its loss, which is code, is not given."""
    function = recipes.find_loss_function(name)
    if loss is None and function is not None:
        notify(
            f"warning: the run of {name} was trained with the loss {function}, which is code and not in the recipe;"
            " pass it from Python: loss=..."
        )


def _set_warmup(recipe: Recipe, warmup: int) -> Recipe:
    return dataclasses.replace(recipe, schedule=dataclasses.replace(recipe.schedule, warmup=warmup))


def choose_loss(recipe: Recipe, dataset: "Dataset") -> Recipe:
    """The recipe with the loss that the dataset needs: sigmoid for images with several labels."""
    return dataclasses.replace(recipe, loss="sigmoid") if dataset.multi_label else recipe


def set_distillation(recipe: Recipe, teacher: object | None) -> Recipe:
    """The recipe with the default distillation, where there is a teacher and the recipe has none of its own."""
    if teacher is None or recipe.distillation is not None:
        return recipe
    return dataclasses.replace(recipe, distillation=DistillationConfig())


def set_masked_target(recipe: Recipe, target: MaskedTarget | None) -> Recipe:
    """The recipe with another prediction target of its masked patches, unless it is None."""
    if target is None:
        return recipe
    if recipe.masked is None:
        raise UsageError(f"--target {target} is for recipes that mask patches, such as mpp-cifar10: omit it")
    return dataclasses.replace(recipe, masked=dataclasses.replace(recipe.masked, target=target))
