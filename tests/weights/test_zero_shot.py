"""A head made of texts: what it computes, what is recorded, and what it refuses."""

import dataclasses
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests import model_factory
from vitrail.errors import UsageError
from vitrail.weights.adapt import adapt
from vitrail.weights.text_vectors import TextVectors
from vitrail.weights.trained import Trained
from vitrail.weights.zero_shot import build_zero_shot_classifier

LABELS = ("cat", "dog", "tulip")


def make_texts(width: int = 32, rows: int = 3, **changes: Any) -> TextVectors:
    vectors = F.normalize(torch.randn(rows, width, generator=torch.Generator().manual_seed(0)), dim=1)
    return TextVectors(vectors, "a test", scale=50.0)._replace(**changes)


def make_tower(**changes: Any) -> Trained:
    return model_factory.build_trained(model_factory.build_vit(**({"classes": 0} | changes)))


@pytest.mark.parametrize("bias", [None, -7.5])
@pytest.mark.parametrize("changes", [{}, {"projection": 24}, {"classes": 7}, {"pool": "map", "class_token": False}])
def test_logits_are_scaled_cosines(changes: dict[str, Any], bias: float | None) -> None:
    tower = make_tower(**changes)
    texts = make_texts(changes.get("projection", 32), bias=bias)
    classifier = build_zero_shot_classifier(tower, texts, LABELS)
    images = model_factory.draw_images(tower.model.config)
    with torch.inference_mode():
        cosines = F.cosine_similarity(tower.model.compute_features(images)[:, None], texts.vectors, dim=2)
        logits = classifier.model(images)
    assert logits.abs().max() > 1
    assert (logits - (50 * cosines + (bias or 0))).abs().max() <= 2e-5
    assert (classifier.labels, classifier.multi_label) == (LABELS, bias is not None)


def test_what_was_made_of_what_is_recorded() -> None:
    classifier = build_zero_shot_classifier(make_tower(classes=7), make_texts(bias=-2.0), LABELS, ("a {}.", "the {}"))
    assert classifier.origin.changes == (
        "head.weight (7, 32): removed",
        "head.bias (7,): removed",
        "head.weight (3, 32): vectors of texts, a test, templates 'a {}.', 'the {}'",
        "head: scale 50, bias -2, sigmoids",
    )


def test_what_belonged_to_the_old_head_is_gone() -> None:
    old = dataclasses.replace(make_tower(classes=7), temperature=2.0, threshold=0.5, multi_label=True)
    new = build_zero_shot_classifier(old, make_texts(), LABELS)
    assert (new.temperature, new.threshold, new.multi_label) == (1.0, 0.0, False)
    distilled = make_tower(classes=7, distillation_token=True, distillation_head=True)
    assert not build_zero_shot_classifier(distilled, make_texts(), LABELS).model.config.distillation_head


def test_fine_tuning_starts_from_the_tower_alone() -> None:
    classifier = build_zero_shot_classifier(make_tower(projection=24), make_texts(24, bias=-2.0), LABELS)
    tuned = adapt(classifier, classes=5)
    config = tuned.model.config
    assert (config.projection, config.normalize_features, config.classes, tuned.multi_label) == (0, False, 5, False)
    assert tuned.model.head.weight.shape == (5, 32)
    assert not tuned.model.head.weight.any()


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (make_texts(rows=2), "a test has 2 vectors for 3 labels"),
        (make_texts(width=24), "vectors of 24 numbers, and the images features of 32"),
        (make_texts(scale=None), r"nothing states the factor .* give --scale, exp\(logit_scale\)"),
        (make_texts(scale=0.0), "scale is 0; it must be above 0"),
        (make_texts(scale=1e30), r"scale is 1e\+30; it must be above 0 and at most 10000"),
        (make_texts(bias=float("inf")), "bias is inf; it must be a finite number"),
    ],
)
def test_texts_that_do_not_fit_are_refused(texts: TextVectors, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_zero_shot_classifier(make_tower(), texts, LABELS)


def test_a_resnet_is_refused() -> None:
    with pytest.raises(UsageError, match="this model is a ResNet"):
        build_zero_shot_classifier(model_factory.build_trained(model_factory.build_bit()), make_texts(), LABELS)
