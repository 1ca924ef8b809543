"""How well linear classifiers segment objects by a model's dense features, and without a model.

    python bench/segmentation.py MODEL TINY_IMAGENET_VAL VAL_BOXES WORK [--classes 10] [--json FILE]

Masks are made of Tiny-ImageNet's boxes (lines of file name, class, first and last pixel x0 y0 x1 y1): the class of the
image inside of the box, background outside. The first classes by WordNet id are taken: of each, the first 30 images by
number train, the next 10 choose settings, the next 10 are measured. WORK gets images/ and masks/, for

    vitrail probe MODEL WORK/images --segmentation WORK/masks

Beside the model: the same network with random weights (seed 0), each patch's pixels with its row and column, and a
prediction of background everywhere. Pixels are 4 x 4 means of a patch: these images have 4.6 x 4.6 pixels in it.
"""

import argparse
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

import vitrail
from vitrail.config import ViTConfig
from vitrail.data.loader import iter_eval_batches
from vitrail.data.masks import IGNORED, read_mask
from vitrail.data.sources import open_dataset
from vitrail.data.transforms import normalize
from vitrail.evaluation.probe_run import ProbeSettings
from vitrail.evaluation.segmentation import (
    CLASSES_FILE,
    compute_iou,
    list_class_names,
    read_masked_splits,
    score_dense_features,
)
from vitrail.model.vit import patchify
from vitrail.visualization.crops import Box, read_boxes
from vitrail.visualization.embeddings import build_untrained
from vitrail.weights.trained import Trained, require_preprocess

SPLITS = {"train": 30, "val": 10, "test": 10}  # images of each class


def write_dataset(source: Path, boxes: dict[str, Box], work: Path, classes: int) -> None:
    """Copy the images and write their masks, sorted into splits."""
    names = sorted(path.name for path in source.iterdir() if path.is_dir())[:classes]
    for index, name in enumerate(names, 1):
        images = iter(sorted((source / name).rglob("*.JPEG"), key=lambda path: int(path.stem.rpartition("_")[2])))
        for split, count in SPLITS.items():
            for _ in range(count):
                write_image(next(images), boxes, work, Path(split, name), index)
    (work / "masks" / CLASSES_FILE).write_text("\n".join(["background", *names]) + "\n")


def write_image(path: Path, boxes: dict[str, Box], work: Path, folder: Path, class_index: int) -> None:
    with Image.open(path) as image:
        width, height = image.size
    mask, box = np.zeros((height, width), np.uint8), boxes[path.name]
    mask[int(box.top) : int(box.bottom), int(box.left) : int(box.right)] = class_index
    for kind in ("images", "masks"):
        (work / kind / folder).mkdir(parents=True, exist_ok=True)
    shutil.copy(path, work / "images" / folder)
    Image.fromarray(mask).save(work / "masks" / folder / f"{path.stem}.png")


def score_pixels(trained: Trained, images: Path, masks: Path, settings: ProbeSettings) -> list[dict[str, Any]]:
    """The scores of classifiers of the normalized pixels of each patch, its row and its column."""
    config, preprocess = trained.model.config, require_preprocess(trained)
    assert isinstance(config, ViTConfig), "a ResNet has no patches"
    squashed, grid = dataclasses.replace(preprocess, resize=preprocess.size), config.grid
    masked = read_masked_splits(open_dataset(str(images)), masks, grid, settings)
    position = torch.stack(torch.meshgrid(*(torch.linspace(-1, 1, side) for side in grid), indexing="ij"), dim=-1)
    values = dict[str, Tensor]()
    for name, split in masked.items():
        batches = iter_eval_batches(split.images, squashed, batch_size=64, num_classes=0)
        size = (4 * grid[0], 4 * grid[1])
        reduced = [F.adaptive_avg_pool2d(normalize(batch.pixels, squashed), size) for batch in batches]
        patches = torch.cat([patchify(each, 4) for each in reduced]).unflatten(1, grid)
        values[name] = torch.cat([patches, position.expand(len(patches), -1, -1, -1)], dim=-1)
    return score_dense_features(masked, values, list_class_names(masks, masked), settings)


def score_background(masks: Path) -> float:
    """The mean IoU of a prediction of background everywhere."""
    targets = np.zeros(256, np.int64)
    for path in sorted((masks / "test").rglob("*.png")):
        targets += np.bincount(read_mask(path).ravel(), minlength=256)
    targets[IGNORED] = 0
    counts = np.zeros((3, 256), np.int64)
    counts[0, 0], counts[1], counts[2, 0] = targets[0], targets, targets.sum()
    return float(np.nanmean(compute_iou(counts)))


def print_scores(name: str, scores: list[dict[str, Any]]) -> None:
    for score in scores:
        low, high = score["interval"]
        line = f"{name}, {score['method']}: mean IoU {score['miou']:.1%} ({low:.1%} to {high:.1%})"
        print(f"{line}, {score['pixel_accuracy']:.1%} of pixels", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("images", type=Path)
    parser.add_argument("boxes", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--device", default=None)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    images, masks = arguments.work / "images", arguments.work / "masks"
    if not masks.is_dir():
        write_dataset(arguments.images, read_boxes(arguments.boxes), arguments.work, arguments.classes)
    trained = vitrail.load(arguments.model)
    random = dataclasses.replace(trained, model=build_untrained(trained.model))
    print(f"background everywhere: mean IoU {score_background(masks):.1%}")
    rows = {}
    for name, model in (("the model", trained), ("random weights", random)):
        result = vitrail.probe(model, str(images), segmentation=masks, device=arguments.device)
        rows[name] = result.metrics["scores"]
        print_scores(name, rows[name])
    settings = ProbeSettings(methods=("linear", "logistic"), device=torch.device("cpu"))
    rows["pixels, row and column"] = score_pixels(trained, images, masks, settings)
    print_scores("pixels, row and column", rows["pixels, row and column"])
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
