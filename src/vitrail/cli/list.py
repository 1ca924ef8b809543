"""`vitrail list`: the presets and formats, or the recipes."""

from typing import Any

from vitrail import presets, recipes
from vitrail.cli import output
from vitrail.cli.arguments.models import ListArguments
from vitrail.config import BiTConfig, Recipe, to_json
from vitrail.data import public_datasets
from vitrail.formatting import format_count, format_duration, format_giga
from vitrail.model import cost
from vitrail.training.plan import H200_FLOPS, count_recipe_flops
from vitrail.weights import builtin, formats


def run(arguments: ListArguments) -> None:
    """Print what can be named."""
    if arguments.kind == "recipes":
        _print_recipes(as_json=arguments.output.json)
    else:
        _print_models(as_json=arguments.output.json)


def _print_models(*, as_json: bool) -> None:
    models = [_describe_preset(name) for name in presets.list_presets()]
    if as_json:
        trained = {"name": builtin.NAME, "description": builtin.SUMMARY, "license": builtin.LICENSE}
        output.print_json({"builtin": trained, "models": models, "formats": list(formats.FORMATS)})
        return
    print(f"{builtin.NAME}: a pre-trained {builtin.SUMMARY}, inside the package; `vitrail info {builtin.NAME}`\n")
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
    read_only = ", ".join(name for name, row in formats.FORMATS.items() if not row.is_written)
    print(f"\nFormats, read and written: {', '.join(formats.WRITTEN_FORMATS)}; read only: {read_only}")


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
            name,
            _get_data_name(recipe),
            recipe.model or "",
            f"{recipe.epochs:g}",
            format_count(recipe.batch),
            f"{recipe.optimizer.kind} {recipe.optimizer.lr:g}",
            _format_cost(recipe),
        )
        for name, recipe in recipes.RECIPES.items()
    ]
    header = ("recipe", "data", "model", "epochs", "batch", "optimizer", "cost")
    below = ["; ".join(filter(None, (recipe.source, recipe.result))) for recipe in recipes.RECIPES.values()]
    print("vitrail train RECIPE --data DATA, where `vitrail recipe show RECIPE` shows every setting:\n")
    output.print_table([header, *rows], right=(3, 4, 6), below=["", *below])
    speed = f"{H200_FLOPS / 1e12:.0f} TFLOP/s"
    print(
        f"\ncost: counted for the recipe's own dataset, on one H200 at {speed}, which small models do not reach;"
        " --dry-run times a run here."
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
