"""`vitrail list`: the presets and formats, or the recipes."""

from typing import Any, get_args

from vitrail import presets, recipes
from vitrail.cli import output
from vitrail.cli.arguments.models import ListArguments
from vitrail.config import BiTConfig, Recipe, to_json
from vitrail.data import public_datasets
from vitrail.formatting import format_count, format_duration, format_giga
from vitrail.model import cost
from vitrail.training.plan import H200_FLOPS, count_recipe_flops
from vitrail.weights.formats import WeightsFormat


def run(arguments: ListArguments) -> None:
    """Print what can be named."""
    if arguments.kind == "recipes":
        _print_recipes(as_json=arguments.output.json)
    else:
        _print_models(as_json=arguments.output.json)


def _print_models(*, as_json: bool) -> None:
    models = [_describe_preset(name) for name in presets.list_presets()]
    if as_json:
        output.print_json({"models": models, "formats": list(get_args(WeightsFormat))})
        return
    print("Presets, at 224 x 224 with 1000 classes (any patch size works: b20 takes images of 220 x 220):\n")
    header = ("name", "parameters", "multiply-adds", "description")
    rows = [
        (
            m["name"],
            format_count(m["parameters"]),
            format_giga(m["multiply_adds"]),
            m["description"],
        )
        for m in models
    ]
    output.print_table([header, *rows], right=(1, 2))
    print(f"\nFormats, read and written: {', '.join(get_args(WeightsFormat))}")


def _print_recipes(*, as_json: bool) -> None:
    if as_json:
        output.print_json(
            {
                name: to_json(recipe) | {"cost_flops": count_recipe_flops(recipe)}
                for name, recipe in recipes.RECIPES.items()
            }
        )
        return
    rows = [
        (
            f"vitrail train {name} --data {_get_data_name(recipe)}",
            recipe.model or "",
            f"{recipe.epochs:g}",
            format_count(recipe.batch),
            f"{recipe.optimizer.kind} {recipe.optimizer.lr:g}",
            _format_cost(recipe),
            recipe.source,
            recipe.result or "",
        )
        for name, recipe in recipes.RECIPES.items()
    ]
    header = ("command", "model", "epochs", "batch", "optimizer", "cost", "from", "result")
    output.print_table([header, *rows], right=(2, 3, 5))
    speed = f"{H200_FLOPS / 1e12:.0f} TFLOP/s"
    print(
        f"\ncost: estimated for the recipe's own dataset, on one H200 at {speed}; --dry-run times a run here."
        "\n--epochs, --batch and --lr change a recipe. DATA: a dataset that is not public; bring your own."
    )


def _format_cost(recipe: Recipe) -> str:
    seconds = count_recipe_flops(recipe) / H200_FLOPS
    return format_duration(seconds) if seconds > 60 else "under 1 min"


def _get_data_name(recipe: Recipe) -> str:
    """The name of the recipe's dataset, if `vitrail data get` or the package has it."""
    return recipe.data if recipe.data in (*public_datasets.PUBLIC_DATASETS, "digits") else "DATA"


def _describe_preset(name: str) -> dict[str, Any]:
    config = presets.get_preset_config(name)
    if isinstance(config, BiTConfig):
        description = f"BiT ResNet, {'+'.join(map(str, config.conv.units))} units, width x{config.conv.width_factor:g}"
    else:
        stem = "" if config.stem is None else f" behind {'+'.join(map(str, config.stem.units)) or 'no'} ResNet units"
        mlp = f"{'gated ' if config.gated_mlp else ''}MLP {config.mlp}"
        size = f"width {config.width}, depth {config.depth}, {mlp}, heads {config.heads}"
        description = f"ViT, {size}{stem}"
    return {
        "name": name,
        "description": description,
        "architecture": to_json(config),
        "parameters": cost.count_parameters(config),
        "multiply_adds": cost.count_multiply_adds(config),
    }
