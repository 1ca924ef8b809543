"""`vitrail list`: what there is to name."""

from typing import Annotated, Any, Literal, get_args

import tyro

from vitrail import presets, recipes
from vitrail.cli import show
from vitrail.config import BiTConfig, to_json


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
        show.as_json({name: to_json(recipe) for name, recipe in recipes.RECIPES.items()})
        return
    rows = [
        (
            name,
            recipe.model or "",
            f"{recipe.epochs:g}",
            show.count(recipe.batch),
            f"{recipe.optimiser.kind} {recipe.optimiser.lr:g}",
            recipe.source,
            recipe.result or "",
        )
        for name, recipe in recipes.RECIPES.items()
    ]
    header = ("name", "model", "epochs", "batch", "optimiser", "from", "result")
    show.table([header, *rows], right=(2, 3))
    print("\nvitrail train NAME --data DATA trains one; --epochs, --batch and --lr change it.")


def _described(name: str) -> dict[str, Any]:
    from vitrail.model import count

    config = presets.config(name)
    if isinstance(config, BiTConfig):
        what = f"BiT ResNet, {'+'.join(map(str, config.conv.units))} units, width x{config.conv.width_factor}"
    else:
        stem = "" if config.stem is None else f" behind {'+'.join(map(str, config.stem.units)) or 'no'} ResNet units"
        what = f"ViT, width {config.width}, depth {config.depth}, MLP {config.mlp}, heads {config.heads}{stem}"
    cost = {"parameters": count.parameters(config), "multiply_adds": count.multiply_adds(config)}
    return {"name": name, "what": what, "architecture": to_json(config)} | cost
