"""`vitrail list`: what there is to name."""

from typing import Annotated, Any, Literal, get_args

import tyro

from vitrail import presets, recipes
from vitrail.cli import runs, show
from vitrail.config import BiTConfig, Recipe, ViTConfig, to_json

H200 = 3e14  # FLOP/s of training a ViT in bf16, about two fifths of what its matrix products reach


def main(
    what: Annotated[Literal["models", "recipes"], tyro.conf.Positional] = "models",
    json: bool = False,
) -> None:
    """Show the presets with their sizes and cost, and the formats that are read and written; or the recipes.

    Args:
        what: models or recipes.
        json: Print JSON.
    """
    if what == "recipes":
        _recipes(json)
        return
    from vitrail.weights.load import Format

    models = [_described(name) for name in presets.names()]
    if json:
        show.as_json({"models": models, "formats": list(get_args(Format))})
        return
    print("Presets, at 224 x 224 with 1000 classes (any patch side may be written: b20 takes images of 220 x 220):\n")
    header = ("name", "parameters", "multiply-adds", "what it is")
    rows = [(m["name"], show.count(m["parameters"]), show.giga(m["multiply_adds"]), m["what"]) for m in models]
    show.table([header, *rows], right=(1, 2))
    print(f"\nFormats, read and written: {', '.join(get_args(Format))}")


def _recipes(json: bool) -> None:
    """The training runs by name."""
    if json:
        found = recipes.RECIPES.items()
        show.as_json({name: to_json(recipe) | {"cost_flops": _flops(recipe)} for name, recipe in found})
        return
    rows = [
        (
            f"vitrail train {name} --data {_data(recipe)}",
            recipe.model or "",
            f"{recipe.epochs:g}",
            show.count(recipe.batch),
            f"{recipe.optimiser.kind} {recipe.optimiser.lr:g}",
            runs.duration(_flops(recipe) / H200) if _flops(recipe) > 60 * H200 else "under 1 min",
            recipe.source,
            recipe.result or "",
        )
        for name, recipe in recipes.RECIPES.items()
    ]
    header = ("command", "model", "epochs", "batch", "optimiser", "cost", "from", "result")
    show.table([header, *rows], right=(2, 3, 5))
    print(
        f"\ncost: of its own set, on one H200 at {H200 / 1e12:.0f} TFLOP/s, an estimate; --dry-run times a run here."
        "\n--epochs, --batch and --lr change a recipe. DATA: a set that is not public is yours to bring."
    )


def _data(recipe: Recipe) -> str:
    """The name of the recipe's set where `vitrail data get` or the package has it."""
    from vitrail.data import public

    return recipe.data if recipe.data in (*public.SETS, "digits") else "DATA"


def _flops(recipe: Recipe) -> float:
    """FLOPs of the whole run on its own set."""
    from vitrail.model import count, masked

    assert recipe.model is not None
    assert recipe.data is not None
    size = {} if recipe.image_size is None else {"image_size": (recipe.image_size, recipe.image_size)}
    config = presets.config(recipe.model, **size, **recipe.settings)
    images = round(recipe.epochs * recipes.IMAGES[recipe.data])
    if recipe.masked is None:
        return count.training_flops(config, images)
    assert isinstance(config, ViTConfig)
    return masked.training_flops(config, recipe.masked, images)


def _described(name: str) -> dict[str, Any]:
    from vitrail.model import count

    config = presets.config(name)
    if isinstance(config, BiTConfig):
        what = f"BiT ResNet, {'+'.join(map(str, config.conv.units))} units, width x{config.conv.width_factor:g}"
    else:
        stem = "" if config.stem is None else f" behind {'+'.join(map(str, config.stem.units)) or 'no'} ResNet units"
        what = f"ViT, width {config.width}, depth {config.depth}, MLP {config.mlp}, heads {config.heads}{stem}"
    cost = {"parameters": count.parameters(config), "multiply_adds": count.multiply_adds(config)}
    return {"name": name, "what": what, "architecture": to_json(config)} | cost
