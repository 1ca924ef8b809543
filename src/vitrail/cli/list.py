"""`vitrail list`: what there is to name."""

from typing import Annotated, Any, Literal, get_args

import tyro

from vitrail import presets, recipes
from vitrail.cli import output
from vitrail.config import BiTConfig, Recipe, ViTConfig, to_json
from vitrail.formatting import format_duration

H200_FLOPS = 3e14  # FLOP/s of training a ViT in bf16, about two fifths of what its matrix products reach


def main(
    kind: Annotated[Literal["models", "recipes"], tyro.conf.Positional] = "models",
    json: bool = False,
) -> None:
    """Show the presets with their sizes and cost, and the formats that are read and written; or the recipes.

    Args:
        what: models or recipes.
        json: Print JSON.
    """
    if kind == "recipes":
        _print_recipes(json)
        return
    from vitrail.weights.load import WeightsFormat

    models = [_describe_preset(name) for name in presets.list_presets()]
    if json:
        output.print_json({"models": models, "formats": list(get_args(WeightsFormat))})
        return
    print("Presets, at 224 x 224 with 1000 classes (any patch side may be written: b20 takes images of 220 x 220):\n")
    header = ("name", "parameters", "multiply-adds", "what it is")
    rows = [
        (m["name"], output.format_count(m["parameters"]), output.format_giga(m["multiply_adds"]), m["what"])
        for m in models
    ]
    output.print_table([header, *rows], right=(1, 2))
    print(f"\nFormats, read and written: {', '.join(get_args(WeightsFormat))}")


def _print_recipes(json: bool) -> None:
    """The training runs by name."""
    if json:
        found = recipes.RECIPES.items()
        output.print_json({name: to_json(recipe) | {"cost_flops": _compute_flops(recipe)} for name, recipe in found})
        return
    rows = [
        (
            f"vitrail train {name} --data {_get_data_name(recipe)}",
            recipe.model or "",
            f"{recipe.epochs:g}",
            output.format_count(recipe.batch),
            f"{recipe.optimizer.kind} {recipe.optimizer.lr:g}",
            format_duration(_compute_flops(recipe) / H200_FLOPS)
            if _compute_flops(recipe) > 60 * H200_FLOPS
            else "under 1 min",
            recipe.source,
            recipe.result or "",
        )
        for name, recipe in recipes.RECIPES.items()
    ]
    header = ("command", "model", "epochs", "batch", "optimizer", "cost", "from", "result")
    output.print_table([header, *rows], right=(2, 3, 5))
    print(
        f"\ncost: of its own set, on one H200 at {H200_FLOPS / 1e12:.0f} TFLOP/s, an estimate; --dry-run times a run here."
        "\n--epochs, --batch and --lr change a recipe. DATA: a set that is not public is yours to bring."
    )


def _get_data_name(recipe: Recipe) -> str:
    """The name of the recipe's set where `vitrail data get` or the package has it."""
    from vitrail.data import public_datasets

    return recipe.data if recipe.data in (*public_datasets.PUBLIC_DATASETS, "digits") else "DATA"


def _compute_flops(recipe: Recipe) -> float:
    """FLOPs of the whole run on its own set."""
    from vitrail.model import cost as count
    from vitrail.model import masked

    assert recipe.model is not None
    assert recipe.data is not None
    size = {} if recipe.image_size is None else {"image_size": (recipe.image_size, recipe.image_size)}
    config = presets.get_preset_config(recipe.model, **size, **recipe.settings)
    images = round(recipe.epochs * recipes.TRAIN_IMAGE_COUNTS[recipe.data])
    if recipe.masked is None:
        return count.count_training_flops(config, images)
    assert isinstance(config, ViTConfig)
    return masked.count_masked_training_flops(config, recipe.masked, images)


def _describe_preset(name: str) -> dict[str, Any]:
    from vitrail.model import cost as count

    config = presets.get_preset_config(name)
    if isinstance(config, BiTConfig):
        what = f"BiT ResNet, {'+'.join(map(str, config.conv.units))} units, width x{config.conv.width_factor:g}"
    else:
        stem = "" if config.stem is None else f" behind {'+'.join(map(str, config.stem.units)) or 'no'} ResNet units"
        what = f"ViT, width {config.width}, depth {config.depth}, MLP {config.mlp}, heads {config.heads}{stem}"
    cost = {"parameters": count.count_parameters(config), "multiply_adds": count.count_multiply_adds(config)}
    return {"name": name, "what": what, "architecture": to_json(config)} | cost
