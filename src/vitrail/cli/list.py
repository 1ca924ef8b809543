"""`vitrail list`: what there is to name."""

from typing import Any, get_args

from vitrail import presets
from vitrail.cli import show
from vitrail.config import BiTConfig, to_json


def main(json: bool = False) -> None:
    """Show the presets with their sizes and cost, and the formats that are read and written.

    Args:
        json: Print JSON.
    """
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
