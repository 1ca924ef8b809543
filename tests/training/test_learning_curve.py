"""Accuracy by the number of training images: what each draw learns from and is tested on, and the three methods."""

import csv
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.model_factory import build_trained, build_vit
from vitrail.data.dataset import Dataset
from vitrail.data.memory import build_memory_dataset
from vitrail.errors import DataError
from vitrail.training import learning_curve
from vitrail.training.learning_curve import (
    FROM_SCRATCH,
    NEAREST_NEIGHBOR,
    PRETRAINED,
    CurveSettings,
    compute_mean_interval,
    count_test_correct,
    load_curve_images,
    measure_learning_curve,
    take_images_per_class,
)
from vitrail.weights.trained import Trained

SETTINGS = CurveSettings(shots=(1, 4), draws=5, scratch_draws=2, scratch_steps=3, scratch_batch=4)


@pytest.fixture(scope="module")
def trained() -> Trained:
    return build_trained(build_vit(classes=5, image_size=(16, 16), patch=8))


@pytest.fixture
def dataset() -> Dataset:
    """Dark and bright images of 8 x 8 pixels, 12 of each class in three splits; noise is small."""
    noise = np.random.default_rng(0).integers(0, 40, (24, 8, 8)).astype(np.uint8)
    labels = [index % 2 for index in range(24)]
    images = [pixels + 150 * label for pixels, label in zip(noise, labels, strict=True)]
    parts = {"train": slice(0, 10), "val": slice(10, 16), "test": slice(16, 24)}
    return build_memory_dataset({name: (images[part], labels[part]) for name, part in parts.items()})


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_classes_that_pixels_tell_apart_are_told_apart(trained: Trained, dataset: Dataset, tmp_path: Path) -> None:
    images = load_curve_images(trained, dataset)
    curve = measure_learning_curve(trained, dataset, images, SETTINGS)
    assert list(curve.scores) == [PRETRAINED, FROM_SCRATCH, NEAREST_NEIGHBOR]
    assert curve.test_images == 24 - 2 * 4
    assert [score.top1 for score in curve.scores[NEAREST_NEIGHBOR]] == [1.0, 1.0]
    assert [len(score.correct) for score in curve.scores[FROM_SCRATCH]] == [2, 2]
    assert [score.train_images for score in curve.scores[PRETRAINED]] == [2, 8]
    assert count_test_correct(dataset, images, SETTINGS)[NEAREST_NEIGHBOR] == 8
    curve.write_csv(tmp_path / "curve.csv")
    rows = list(csv.DictReader((tmp_path / "curve.csv").open()))
    assert [(row["method"], row["images_per_class"], row["mean"]) for row in rows[-2:]] == [
        (NEAREST_NEIGHBOR, "1", "1.0"),
        (NEAREST_NEIGHBOR, "4", "1.0"),
    ]
    curve.draw(tmp_path / "curve.png", title="dark or bright")
    assert (tmp_path / "curve.png").read_bytes()[1:4] == b"PNG"


def test_the_same_seeds_give_the_same_numbers(trained: Trained, dataset: Dataset) -> None:
    images = load_curve_images(trained, dataset)
    first, second = (measure_learning_curve(trained, dataset, images, SETTINGS) for _ in range(2))
    assert first == second


def test_no_draw_of_a_seed_is_tested_on_what_another_learns_from() -> None:
    targets = torch.arange(40) % 2
    for few, many in zip(
        learning_curve._iterate_draws(targets, "ab", 2, 10, 5),
        learning_curve._iterate_draws(targets, "ab", 5, 10, 5),
        strict=True,
    ):
        assert set(few.train.tolist()) < set(many.train.tolist())
        assert few.test.tolist() == many.test.tolist()
        assert not set(many.train.tolist()) & set(many.test.tolist())
        assert len(many.train) + len(many.test) == 40


def test_features_that_name_the_class_are_enough(trained: Trained, dataset: Dataset) -> None:
    images = load_curve_images(trained, dataset)
    told = dataclasses.replace(images, features=torch.eye(2)[images.targets])
    assert [score.top1 for score in learning_curve.score_features(told, "ab", SETTINGS)] == [1.0, 1.0]


def test_the_interval_is_students(trained: Trained, dataset: Dataset) -> None:
    score = measure_learning_curve(
        trained, dataset, load_curve_images(trained, dataset), dataclasses.replace(SETTINGS, scratch_draws=0)
    ).scores[PRETRAINED][0]
    score = dataclasses.replace(score, correct=(8, 10, 12), test_images=16)
    low, high = compute_mean_interval(score) or (0, 0)
    half = 4.302653 * 2 / 16 / 3**0.5  # t of two degrees of freedom
    assert (low, high) == pytest.approx((10 / 16 - half, min(1, 10 / 16 + half)), abs=1e-4)


def test_images_of_each_class_are_taken_and_too_few_are_refused(trained: Trained, dataset: Dataset) -> None:
    few = take_images_per_class(dataset, 5)
    ((_, split),) = few.splits.items()
    assert np.bincount([split.get_labels(row)[0] for row in range(len(split))]).tolist() == [5, 5]
    images = load_curve_images(trained, few)
    with pytest.raises(DataError, match="has 5: give fewer shots"):
        measure_learning_curve(trained, few, images, dataclasses.replace(SETTINGS, shots=(5,)))
