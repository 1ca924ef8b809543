"""Dense features as colors: components against scikit-learn's, and the sheet (command: tests/cli/test_figures.py)."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.decomposition import PCA

from tests import model_factory
from tests.data.image_files import encode_image, make_image
from vitrail.data.decode import decode
from vitrail.data.transforms import make_eval_input, normalize
from vitrail.errors import DataError, ModelError
from vitrail.model.features import compute_dense_features
from vitrail.visualization.attention_images import FigureImage
from vitrail.visualization.feature_pca import (
    compute_feature_colors,
    compute_image_colors,
    extract_dense_features,
    make_input_pixels,
    write_feature_colors,
)
from vitrail.weights.trained import require_preprocess

IMAGES = [FigureImage(f"{number}.png", partial(encode_image, make_image(number), "PNG")) for number in range(3)]
BROKEN = FigureImage("text.png", lambda: b"text")


def ignore(_name: str, _reason: str) -> None:
    pass


def test_colors_are_the_scores_of_the_first_three_components_of_all_images() -> None:
    features = np.random.default_rng(0).normal(size=(3, 4, 5, 7)).astype(np.float32) * np.arange(1, 8, dtype=np.float32)
    colors, explained = compute_feature_colors(features)
    patches = features.reshape(-1, 7).astype(np.float64)
    pca = PCA(3).fit(patches)
    components = (
        pca.components_ * np.sign(pca.components_[np.arange(3), np.abs(pca.components_).argmax(axis=1)])[:, None]
    )
    scores = (patches - patches.mean(axis=0)) @ components.T
    expected = (0.5 + scores / (5 * scores.std(axis=0))).clip(0, 1)
    np.testing.assert_allclose(colors.reshape(-1, 3), expected, atol=1e-5)
    np.testing.assert_allclose(explained, pca.explained_variance_ratio_, atol=1e-6)


def test_equal_features_have_equal_colors_and_no_variance_is_gray() -> None:
    features = np.random.default_rng(0).normal(size=(2, 2, 2, 5)).astype(np.float32)
    features[1] = features[0]
    colors, _ = compute_feature_colors(features)
    assert np.array_equal(colors[0], colors[1])
    colors, explained = compute_feature_colors(np.ones((1, 2, 2, 2), np.float32))
    assert np.array_equal(colors, np.full((1, 2, 2, 3), 0.5))  # two features have two components
    assert explained.tolist() == [0, 0]


def test_the_colors_of_images_are_of_the_models_inputs_and_the_unreadable_are_named() -> None:
    trained = model_factory.build_trained(model_factory.build_vit())
    preprocess = require_preprocess(trained)
    unreadable: list[str] = []
    result = compute_image_colors(trained, [*IMAGES, BROKEN], lambda name, _: unreadable.append(name))
    assert (list(result.colors), unreadable) == (["0.png", "1.png", "2.png"], ["text.png"])
    inputs = torch.stack([make_eval_input(decode(image.read()), preprocess) for image in IMAGES])
    assert np.array_equal(np.stack(list(result.pixels.values())), inputs)
    with torch.no_grad():
        features = compute_dense_features(trained.model, normalize(inputs, preprocess)).numpy()
    np.testing.assert_allclose(np.stack(list(result.colors.values())), compute_feature_colors(features)[0], atol=1e-3)
    with pytest.raises(DataError, match="no image can be read"):
        compute_image_colors(trained, [BROKEN], ignore)


def test_pixels_survive_normalization() -> None:
    preprocess = require_preprocess(model_factory.build_trained(model_factory.build_vit()))
    pixels = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(1, 3, 16, 16)
    assert np.array_equal(make_input_pixels(normalize(pixels, preprocess), preprocess), pixels)


def test_features_that_are_not_finite_are_refused() -> None:
    model = model_factory.build_vit()
    with pytest.raises(ModelError, match="features are not finite"):
        extract_dense_features(model, torch.full((1, 3, 32, 32), torch.nan))


@pytest.mark.parametrize("models", [["a"], ["a", "b"]])
def test_the_sheet_has_a_pair_for_each_model_and_image(tmp_path: Path, models: list[str]) -> None:
    result = compute_image_colors(model_factory.build_trained(model_factory.build_vit()), IMAGES, ignore)
    write_feature_colors(dict.fromkeys(models, result), tmp_path / "pca.png")
    write_feature_colors(dict.fromkeys(models, result), tmp_path / "again.png")
    assert (tmp_path / "pca.png").read_bytes() == (tmp_path / "again.png").read_bytes()
    with Image.open(tmp_path / "pca.png") as drawn:  # inputs of 32 pixels, enlarged seven times
        assert drawn.size == (6 * (224 + 12) + 12, 260 + 12) if len(models) == 1 else (8 * 236 + 12, 2 * 260 + 12)
        first = np.asarray(drawn)[12 : 12 + 224, 12 + 236 : 12 + 236 + 224]
    assert np.array_equal(first[28::56, 28::56], (255 * result.colors["0.png"]).round().astype(np.uint8))
