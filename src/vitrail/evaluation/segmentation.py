"""Segment images by a linear classifier of frozen dense features: which class each patch, and then each pixel, shows.

    n images   R, K rows and columns of patches   D features   L classes   H, W height and width of a mask

The classifier is a probe's (`probe.fit_linear`, `fit_logistic`), trained on patches: a patch has the class of most of
its pixels. Its logits are resampled to the mask's size, bilinearly, and each pixel gets the greatest one.

An image is resized to the model's input as a whole, whatever its shape, and never cropped. So it and its mask, which
keeps its own size, cover the same area, and both are cut into the same patches.
"""

import dataclasses
import itertools
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitrail.config.features import count_features
from vitrail.data.dataset import Dataset, Split
from vitrail.data.decode import open_image
from vitrail.data.masks import IGNORED, Mask, compute_patch_classes, find_masks, read_mask
from vitrail.data.randomness import sample_indices
from vitrail.errors import DataError
from vitrail.evaluation import probe
from vitrail.evaluation.linear_classifiers import Features
from vitrail.evaluation.probe import FittedProbe, ProbeSplits
from vitrail.evaluation.probe_run import ProbeSettings, extract_split
from vitrail.evaluation.statistics import bootstrap_interval
from vitrail.formatting import format_bytes, pluralize
from vitrail.model.features import compute_dense_features
from vitrail.runtime.devices import get_device_memory
from vitrail.weights.trained import Trained, require_preprocess, resolve_labels

CLASSES_FILE = "classes.txt"
_GRADIENT_TOLERANCE = 1e-3  # of L-BFGS: 1e-5 takes four times as long, and its mean IoU differs by 0.2 points at most
_HOLDOUT_SHARE = 0.2  # of the training images, to choose settings by where val is the test split

PixelCounts = NDArray[np.int64]
"""(..., 3, L): pixels of each class that are predicted correctly, that the mask has, and that are predicted."""


class MaskedSplit(NamedTuple):
    """The images of a split that have a mask."""

    images: Split
    masks: list[Path]
    patch_classes: Tensor  # uint8 (n, R, K)
    greatest_class: int  # of all pixels, or -1 where all are ignored


# --- the measure -----------------------------------------------------------------------------------------------------


def count_pixels(logits: Tensor, mask: Mask, num_classes: int) -> PixelCounts:
    """(3, L): the counts of one image, from the logits of its patches (R, K, L), resampled to the mask (H, W)."""
    resampled = F.interpolate(logits.permute(2, 0, 1)[None], size=mask.shape, mode="bilinear", align_corners=False)
    predicted = resampled[0].argmax(dim=0).cpu().numpy()
    counted = mask != IGNORED
    predicted, target = predicted[counted], mask[counted]
    correct = target[predicted == target]
    return np.stack([np.bincount(each, minlength=num_classes) for each in (correct, target, predicted)])


def compute_iou(counts: PixelCounts) -> NDArray[np.float64]:
    """(L,): intersection over union of each class; NaN for a class neither in the masks nor predicted."""
    intersection, target, predicted = counts
    union = target + predicted - intersection
    return np.where(union > 0, intersection / np.maximum(union, 1), np.nan)


def compute_mean_iou(counts: PixelCounts) -> float:
    """The mean IoU of the classes that have one."""
    return float(np.nanmean(compute_iou(counts)))


# --- the probe -------------------------------------------------------------------------------------------------------


def run_segmentation_probe(
    trained: Trained, dataset: Dataset, data: str, settings: ProbeSettings
) -> dict[str, Any] | None:
    """Probe the model's dense features; return the facts for JSON on rank 0, and None on the others.

    `data` is the name by which the dataset was opened, for advice in errors.
    """
    assert settings.segmentation is not None
    start, folder = time.monotonic(), settings.segmentation
    preprocess = require_preprocess(trained)
    trained.model.to(settings.device).eval()
    grid = compute_input_grid(trained)
    trained = dataclasses.replace(trained, preprocess=dataclasses.replace(preprocess, resize=preprocess.size))
    masked = read_masked_splits(dataset, folder, grid, settings)
    names = list_class_names(folder, masked)
    _check_memory(masked, grid, count_features(trained.model.config, "dense"))
    values = {
        name: extract_split(trained, split.images, name, data, settings, dense_grid=grid)
        for name, split in masked.items()
    }
    if not settings.group.is_rank0:
        return None
    scores = score_dense_features(masked, values, names, settings)
    measured = choose_measured_split(masked)
    return {
        "seconds": time.monotonic() - start,
        "data": dataset.name,
        "masks": str(folder),
        "classes": len(names),
        "features": values[measured].shape[-1],
        "patches": list(grid),
        "split": measured,
        "images": len(masked[measured].masks),
        "chosen_on": "val" if measured == "test" and "val" in masked else "a fifth of train",
        "train_on_val": settings.train_on_val,
        "scores": scores,
        "saved": None,
    }


def choose_measured_split(masked: Collection[str]) -> str:
    """Test, or val where there is no test."""
    return "test" if "test" in masked else "val"


def score_dense_features(
    masked: Mapping[str, MaskedSplit], values: Mapping[str, Tensor], names: Sequence[str], settings: ProbeSettings
) -> list[dict[str, Any]]:
    """Fit the classifiers to the features (n, R, K, D) of each split, and score them on the pixels of test or val."""
    measured = choose_measured_split(masked)
    splits, train_images = split_patches(masked, values, measured, settings)
    scores = []
    for fitted in _fit_heads(splits, len(names), settings):
        with settings.show_progress(f"pixels, {fitted.score.method}") as progress:
            counts = []
            for done, (features, path) in enumerate(zip(values[measured], masked[measured].masks, strict=True)):
                logits = fitted.head.compute_logits(features.to(fitted.head.weight.device))
                counts.append(count_pixels(logits, read_mask(path), len(names)))
                progress(done + 1, len(values[measured]))
        scores.append(_describe_score(fitted, np.stack(counts), names, train_images))
    return scores


@torch.inference_mode()
def compute_input_grid(trained: Trained) -> tuple[int, int]:
    """Rows and columns of the dense features of the model's inputs."""
    blank = torch.zeros(1, trained.model.config.channels, *require_preprocess(trained).size)
    _, rows, columns, _ = compute_dense_features(trained.model, blank.to(next(trained.model.parameters()))).shape
    return rows, columns


def read_masked_splits(
    dataset: Dataset, folder: Path, grid: tuple[int, int], settings: ProbeSettings
) -> dict[str, MaskedSplit]:
    """The images of each split that have a mask, and the classes of their patches; every mask is read and checked."""
    names = [split.get_image_name(index) for split in dataset.splits.values() for index in range(len(split))]
    found = find_masks(folder, names)
    if missing := [name for name, mask in zip(names, found, strict=True) if mask is None]:
        total = pluralize(len(names), "image")
        settings.notify(f"note: {len(missing):,} of {total} have no mask, such as {missing[0]}, and are left out")
    masked, remaining = dict[str, MaskedSplit](), iter(found)
    with settings.show_progress("masks") as progress:
        done, total_masks = 0, len(names) - len(missing)
        for name, split in dataset.splits.items():
            masks = list(itertools.islice(remaining, len(split)))
            images = split.drop_images([index for index, mask in enumerate(masks) if mask is None])
            paths, classes, greatest = [mask for mask in masks if mask is not None], list[Tensor](), -1
            for index, path in enumerate(paths):
                mask = _read_checked_mask(images, index, path)
                classes.append(torch.from_numpy(compute_patch_classes(mask, grid)))
                greatest = max(greatest, *np.unique(mask[mask != IGNORED]).tolist(), -1)
                progress(done := done + 1, total_masks)
            if paths:
                masked[name] = MaskedSplit(images, paths, torch.stack(classes), int(greatest))
    if "train" not in masked or len(masked) < 2:
        raise DataError(
            f"a segmentation probe needs masks of train, and of test or val to measure on; {folder} has them for"
            f" {', '.join(masked) or 'no split'} of {dataset.name}: a mask has its image's name and the suffix .png"
        )
    for name in ("train", choose_measured_split(masked)):
        if masked[name].greatest_class < 0:
            raise DataError(f"every pixel of the masks of {name} in {folder} is {IGNORED}, which is ignored")
    return masked


def _read_checked_mask(images: Split, index: int, path: Path) -> Mask:
    """A mask, refused unless it has the size of its image."""
    mask, name = read_mask(path), images.get_image_name(index)
    image = open_image(images.read_image(index), name=name)
    if mask.shape != (image.height, image.width):
        size = f"{mask.shape[0]} x {mask.shape[1]}"
        raise DataError(f"{path} is {size} pixels and its image {name} {image.height} x {image.width}: they must agree")
    return mask


def _check_memory(masked: Mapping[str, MaskedSplit], grid: tuple[int, int], features: int) -> None:
    """Refuse features of patches that do not fit in memory, before hours are spent on them."""
    images = sum(len(split.masks) for split in masked.values())
    needed = 2 * 4 * images * grid[0] * grid[1] * features  # float32, and the copy that the classifiers train on
    available = get_device_memory(torch.device("cpu"))
    if needed > available:
        raise DataError(
            f"the features of {pluralize(images, 'image')}, {grid[0]} x {grid[1]} patches each, take"
            f" {format_bytes(needed)}, and this machine has {format_bytes(available)}: give fewer images, or a"
            " model for smaller ones (`vitrail convert MODEL OUT.safetensors --image-size SIDE`)"
        )


def list_class_names(folder: Path, masked: Mapping[str, MaskedSplit]) -> tuple[str, ...]:
    """The names in classes.txt, or the indices up to the greatest of any pixel."""
    count = max(split.greatest_class for split in masked.values()) + 1
    if count < 2:
        raise DataError(f"the masks in {folder} have one class or none; a classifier needs two or more")
    if not (folder / CLASSES_FILE).is_file():
        return tuple(f"class {index}" for index in range(count))
    names = resolve_labels(str(folder / CLASSES_FILE))
    if len(names) < count:
        raise DataError(
            f"{folder / CLASSES_FILE} names {pluralize(len(names), 'class')}, and the masks have class {count - 1}"
        )
    return names


def split_patches(
    masked: Mapping[str, MaskedSplit], values: Mapping[str, Tensor], measured: str, settings: ProbeSettings
) -> tuple[ProbeSplits, int]:
    """The labeled patches by their use, as `probe.split_features` assigns images, and the number of training images."""
    device = settings.device if settings.device.type == "cuda" else torch.device("cpu")  # mps has no float64

    def collect_patches(name: str, rows: Tensor | None = None) -> Features:
        features, classes = values[name], masked[name].patch_classes
        if rows is not None:
            features, classes = features[rows], classes[rows]
        labeled = classes != IGNORED
        return Features(features[labeled].to(device), classes[labeled].long().to(device))

    train, count = collect_patches("train"), len(masked["train"].masks)
    if len(masked) == 3:
        val = collect_patches("val")
        joined = train.concatenate(val) if settings.train_on_val else train
        count += len(masked["val"].masks) if settings.train_on_val else 0
        return ProbeSplits(train, val, joined, collect_patches(measured)), count
    held_out = torch.zeros(count, dtype=torch.bool)
    num_held_out = min(max(1, round(_HOLDOUT_SHARE * count)), count - 1)
    held_out[sample_indices(num_held_out, count, "held out images")] = True
    tuning = collect_patches("train", ~held_out), collect_patches("train", held_out)
    return ProbeSplits(*tuning, train, collect_patches(measured)), count


def _fit_heads(splits: ProbeSplits, num_classes: int, settings: ProbeSettings) -> Sequence[FittedProbe]:
    fitted = []
    with settings.show_progress("classifiers") as progress:
        methods = [method for method in settings.methods if method in ("linear", "logistic")]
        for done, method in enumerate(methods):
            progress(done, len(methods))
            if method == "linear":
                fitted.append(probe.fit_linear(splits, num_classes, settings.penalty))
            else:
                tolerances = {"draft_tolerance": _GRADIENT_TOLERANCE, "tolerance": _GRADIENT_TOLERANCE}
                fitted.append(probe.fit_logistic(splits, num_classes, **tolerances))
    return fitted


def _describe_score(
    fitted: FittedProbe, counts: PixelCounts, names: Sequence[str], train_images: int
) -> dict[str, Any]:
    """The facts of one classifier, from the counts of each image (n, 3, L)."""
    total = counts.sum(axis=0)
    interval = bootstrap_interval(lambda rows: compute_mean_iou(counts[rows].sum(axis=0)), len(counts))
    by_class = zip(names, compute_iou(total).tolist(), strict=True)
    setting, value = fitted.score.setting
    return {
        "method": fitted.score.method,
        "shots": None,
        "learned": fitted.score.train_images,
        "train_images": train_images,
        setting: value,
        "miou": compute_mean_iou(total),
        "interval": interval,
        "pixel_accuracy": float(total[0].sum() / total[1].sum()),
        "iou": {name: None if np.isnan(iou) else iou for name, iou in by_class},
    }
