"""Dense features as colors: their first three principal components over several images, as DINO's authors show them.

n images   C channels   S image side   R, K rows and columns of patches   D features
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.config import PreprocessConfig
from vitrail.errors import DataError, ModelError
from vitrail.model.features import compute_dense_features
from vitrail.model.vit import Model
from vitrail.runtime.workers import ProgressCallback, ignore_progress
from vitrail.visualization import Array, Pixels, image_grids
from vitrail.visualization.attention_images import FigureImage, iterate_inputs
from vitrail.visualization.embeddings import fix_signs
from vitrail.weights.trained import Trained, require_preprocess

_COMPONENTS = 3  # red, green and blue
_COLOR_STDS = 2.5  # standard deviations of a component, from gray to full color
_COLUMNS = 8  # pictures in a row of the sheet
_MIN_SIDE = 224  # pixels: smaller model inputs are enlarged


class FeatureColors(NamedTuple):
    """The features of patches as colors, which compare all images with each other."""

    colors: Array  # (n, R, K, 3) from 0 to 1
    explained_variance_ratio: Array  # (3,): each component's share of the features' variance


class ImageColors(NamedTuple):
    """The same of one model's inputs, by the names of the images."""

    pixels: dict[str, Pixels]  # uint8 (C, S, S): the model inputs
    colors: dict[str, Array]  # (R, K, 3)
    explained_variance_ratio: Array


def compute_image_colors(
    trained: Trained,
    images: Sequence[FigureImage],
    on_unreadable: Callable[[str, str], None],
    progress: ProgressCallback = ignore_progress,
) -> ImageColors:
    """Compute the colors of all images that can be read; `on_unreadable` gets the others and the reason."""
    model, preprocess = trained.model, require_preprocess(trained)
    pixels, features = dict[str, Pixels](), list[Array]()
    for batch in iterate_inputs(images, model.config.channels, preprocess, on_unreadable):
        pixels.update(zip(batch.names, make_input_pixels(batch.inputs, preprocess), strict=True))
        features.append(extract_dense_features(model, batch.inputs))
        progress(len(pixels), len(images))
    if not pixels:
        raise DataError("no image can be read")
    colors, explained = compute_feature_colors(np.concatenate(features))
    return ImageColors(pixels, dict(zip(pixels, colors, strict=True)), explained)


@torch.no_grad()
def extract_dense_features(model: Model, inputs: Tensor) -> Array:
    """(n, R, K, D) of normalized images (n, C, S, S). The model is left in eval mode."""
    features = compute_dense_features(model.eval(), inputs.to(next(model.parameters()).device)).float().cpu().numpy()
    if not np.isfinite(features).all():
        raise ModelError("features are not finite: the weights, or the mean and std of the images, are wrong")
    return features


def compute_feature_colors(features: Array) -> FeatureColors:
    """Project features (n, R, K, D) onto their first three principal components, over all patches of all images.

    Red is the first component, green the second, blue the third. A component's entry of greatest magnitude is positive,
    its mean is gray, and 2.5 standard deviations from it are full color. Computed in float64.
    """
    patches = torch.from_numpy(features).double().flatten(0, 2)  # (n R K, D)
    patches = patches - patches.mean(dim=0)
    values, vectors = torch.linalg.eigh(patches.mT @ patches / len(patches))  # ascending
    variances = values.flip(0).clamp(min=0)
    components = fix_signs(vectors.mT.flip(0)[:_COMPONENTS])
    scores = patches @ components.mT
    deviations = variances[:_COMPONENTS].sqrt().clamp(min=torch.finfo(scores.dtype).tiny)
    colors = (0.5 + scores / (2 * _COLOR_STDS * deviations)).clamp(0, 1)
    if colors.shape[1] < _COMPONENTS:  # fewer features have fewer components
        colors = torch.nn.functional.pad(colors, (0, _COMPONENTS - colors.shape[1]), value=0.5)
    explained = variances[:_COMPONENTS] / variances.sum().clamp(min=torch.finfo(variances.dtype).tiny)
    return FeatureColors(colors.float().numpy().reshape(*features.shape[:3], -1), explained.float().numpy())


def make_input_pixels(inputs: Tensor, preprocess: PreprocessConfig) -> Pixels:
    """uint8 (n, C, S, S): the pixels of normalized images."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (preprocess.mean, preprocess.std))
    return ((inputs.cpu() * std + mean) * 255).round().clamp(0, 255).to(torch.uint8).numpy()


def write_feature_colors(results: Mapping[str, ImageColors], path: Path) -> None:
    """Write a sheet with the input of each model, under it the image's name, and beside it the patches' colors."""
    first = next(iter(results.values()))
    names = [name for name in first.colors if all(name in result.colors for result in results.values())]
    height, width = first.pixels[names[0]].shape[1:]
    factor = -(-_MIN_SIDE // min(height, width))
    size = (width * factor, height * factor)
    panels, captions = list[Pixels](), list[str]()
    for name, (model, result) in itertools.product(names, results.items()):
        photo = Image.fromarray(image_grids.to_rgb_array(result.pixels[name]))
        cells = Image.fromarray((255 * result.colors[name]).round().astype(np.uint8))
        panels += [np.asarray(photo.resize(size)), np.asarray(cells.resize(size, Image.Resampling.NEAREST))]
        captions += [Path(name).name, model if len(results) > 1 else ""]
    columns = 2 * len(results)
    image_grids.write_panels(panels, captions, path, columns=max(1, _COLUMNS // columns) * columns)
