"""`vitrail convert SRC DST --to FORMAT`: formats in and out, and weights made to fit another task."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from vitrail import presets
from vitrail.cli import show
from vitrail.config import Resample, sides


def main(
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")],
    destination: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DST")],
    to: Literal["vitrail", "google", "timm", "transformers", "torchvision"] = "vitrail",
    classes: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    labels: Annotated[str | None, tyro.conf.arg(metavar="NAMES")] = None,
    image_size: Annotated[tuple[int, ...] | None, tyro.conf.arg(metavar="HEIGHT [WIDTH]")] = None,
    patch: Annotated[int | None, tyro.conf.arg(metavar="SIDE")] = None,
    channels: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    resample: Resample | None = None,
    preprocess: Literal["imagenet", "inception", "torchvision"] | None = None,
    overwrite: bool = False,
    json: bool = False,
) -> None:
    """Write a model in another format, or fitted to another task. What changes is listed.

    Args:
        source: A file or folder of any known format, hf:ORG/NAME[@REVISION], timm:NAME, or a preset such as b16.
        destination: The file or folder to write.
        to: The format. timm and transformers write folders, timm also a bare .safetensors, torchvision a .pth,
            google an .npz.
        classes: Replace the head by a zero one with so many classes.
        labels: Class names: imagenet1k, or a text file with one on each line.
        image_size: New resolution, one side or height and width; positions are resampled.
        patch: New patch side (a hybrid's counts places of its feature map); kernels are resized as FlexiViT does.
        channels: New number of input channels.
        resample: Resample positions this way rather than as the weights' origin does.
        preprocess: Mean, std and interpolation for weights that do not state them.
        overwrite: Replace the destination if it exists.
        json: Print JSON.
    """
    from vitrail.weights import hub
    from vitrail.weights import labels as known_labels
    from vitrail.weights.adapt import adapt
    from vitrail.weights.load import check_destination, load, locate, save

    check_destination(destination, to, overwrite=overwrite)  # before a large model is read or made
    trained = load(source)
    preset = locate(source) is None and not hub.is_remote(source)
    show.note(f"model: preset {source}, random weights" if preset else f"model: {source}")
    before = len(trained.origin.changes)
    if preprocess is not None:
        config = trained.model.config
        view = presets.preprocess(preprocess, config.image_size, config.channels)
        sentence = f"preprocess: {preprocess}, given by hand"
        origin = dataclasses.replace(trained.origin, changes=(*trained.origin.changes, sentence))
        trained = dataclasses.replace(trained, preprocess=view, origin=origin)
    trained = adapt(
        trained,
        classes=classes,
        labels=None if labels is None else known_labels.named(labels),
        image_size=None if image_size is None else sides(image_size),
        patch=patch,
        channels=channels,
        operator=resample,
    )
    notes = save(trained, destination, to, overwrite=overwrite)
    changes = trained.origin.changes[before:]
    if json:
        show.as_json({"written": str(destination), "format": to, "changes": list(changes), "notes": notes})
        return
    show.table(
        [
            *(("changed", change) for change in changes),
            *(("note", text) for text in notes),
            ("written", f"{destination} ({to})"),
        ]
    )
