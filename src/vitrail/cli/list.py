"""`vitrail list`: what there is to name."""

from typing import get_args

from vitrail import presets
from vitrail.cli import show


def main(json: bool = False) -> None:
    """Show the presets with their sizes and cost, and the formats that are read and written.

    Args:
        json: Print JSON.
    """
    from vitrail.model import count
    from vitrail.weights.load import Format

    models = []
    for name in presets.names():
        config = presets.vit(name)
        cost = {"parameters": count.parameters(config), "multiply_adds": count.multiply_adds(config)}
        models.append(
            {"name": name, **{key: getattr(config, key) for key in ("width", "depth", "mlp", "heads", "patch")}} | cost
        )
    if json:
        show.as_json({"models": models, "formats": list(get_args(Format))})
        return
    print("Presets, at 224 x 224 with 1000 classes (any patch side may be written: b20 takes images of 220 x 220):\n")
    header = ("name", "width", "depth", "MLP", "heads", "patch", "parameters", "multiply-adds")
    rows = [
        (
            str(m["name"]),
            *(str(m[key]) for key in ("width", "depth", "mlp", "heads", "patch")),
            show.count(m["parameters"]),
            show.giga(m["multiply_adds"]),
        )
        for m in models
    ]
    show.table([header, *rows], right=range(1, len(header)))
    print(f"\nFormats, read and written: {', '.join(get_args(Format))}")
