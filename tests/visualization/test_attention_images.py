"""Attention on named images: batches, measurements and pictures (the command: tests/cli/test_figures.py)."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests import model_factory
from tests.data.image_files import encode_image, make_image
from vitrail.data.decode import decode
from vitrail.data.transforms import make_eval_input, normalize
from vitrail.visualization import attention_images
from vitrail.visualization.attention import compute_class_attention, compute_rollout
from vitrail.visualization.attention_images import (
    FigureImage,
    TopPrediction,
    compute_attention_results,
    draw_attention_images,
    iterate_inputs,
    make_file_name,
)
from vitrail.visualization.crops import compute_crop_box
from vitrail.visualization.relevance import compute_relevance
from vitrail.weights.trained import Trained

SIZES = [(40, 60), (90, 30), (20, 20)]
IMAGES = [
    FigureImage(f"{number}.png", partial(encode_image, make_image(number, size), "PNG"))
    for number, size in enumerate(SIZES)
]


def make_trained() -> Trained:
    return model_factory.build_trained(model_factory.build_vit(), temperature=2.0)


def fail(name: str, reason: str) -> None:
    raise AssertionError(f"{name}: {reason}")


def test_images_come_in_batches_and_the_unreadable_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_images, "BATCH_IMAGES", 2)
    preprocess = make_trained().preprocess
    assert preprocess is not None
    images = [IMAGES[0], FigureImage("text.png", lambda: b"text"), IMAGES[1], IMAGES[2]]
    unreadable: list[tuple[str, str]] = []
    batches = list(iterate_inputs(images, 3, preprocess, lambda *reason: unreadable.append(reason)))
    assert [batch.names for batch in batches] == [("0.png",), ("1.png", "2.png")]
    [(name, reason)] = unreadable
    assert name == "text.png"
    assert "text.png" in reason
    for batch in batches:
        for name, crop, model_input in zip(*batch, strict=True):
            size = SIZES[int(name[0])]
            pixels = decode(IMAGES[int(name[0])].read())
            assert torch.equal(model_input, normalize(make_eval_input(pixels, preprocess), preprocess))
            assert crop == compute_crop_box(*size, preprocess)


def test_a_batch_of_unreadable_images_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_images, "BATCH_IMAGES", 1)
    preprocess = make_trained().preprocess
    assert preprocess is not None
    images = [FigureImage("text.png", lambda: b"text"), IMAGES[0]]
    assert [batch.names for batch in iterate_inputs(images, 3, preprocess, lambda *_: None)] == [("0.png",)]


def test_results_are_those_of_the_functions_and_details_only_of_those_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_images, "BATCH_IMAGES", 2)
    trained = make_trained()
    assert trained.preprocess is not None
    batches = list(iterate_inputs(IMAGES, 3, trained.preprocess, fail))
    progress: list[int] = []
    results = compute_attention_results(trained, iter(batches), {"1.png", "2.png"}, progress.append, faithfulness=True)
    inputs = torch.cat([batch.inputs for batch in batches])
    assert progress == [2, 3]
    assert results.distance.images == 3
    assert torch.equal(results.first_inputs, batches[0].inputs)
    np.testing.assert_allclose(list(results.rollouts.values()), compute_rollout(trained.model, inputs), rtol=1e-5)
    details, named = results.details, inputs[1:]
    for stored in (details.heads, details.tokens, details.relevance, details.predictions):
        assert list(stored) == ["1.png", "2.png"]
    np.testing.assert_allclose(
        list(details.heads.values()), compute_class_attention(trained.model, named), rtol=1e-5, atol=1e-7
    )
    assert [colors.shape for colors in details.tokens.values()] == [(4, 4, 3)] * 2
    relevance = compute_relevance(trained.model, named)
    np.testing.assert_allclose(list(details.relevance.values()), relevance.maps, rtol=1e-4, atol=1e-7)
    with torch.no_grad():
        probabilities, indices = (trained.model(named) / 2.0).softmax(dim=1).max(dim=1)
    assert list(details.predictions.values()) == [
        TopPrediction(index, f"kind {index}", pytest.approx(probability, rel=1e-5))
        for probability, index in zip(probabilities.tolist(), indices.tolist(), strict=True)
    ]
    assert set(details.faithfulness) == {"relevance", "rollout", "random"}
    assert list(details.gram_matrices) == [("1.png",), ("2.png",)]


def test_a_model_without_a_head_predicts_nothing() -> None:
    trained = model_factory.build_trained(model_factory.build_vit(classes=0))
    assert trained.preprocess is not None
    batches = iterate_inputs(IMAGES, 3, trained.preprocess, fail)
    details = compute_attention_results(trained, batches, {"0.png"}, faithfulness=True).details
    assert (details.relevance, details.predictions, details.faithfulness) == ({}, {}, {})
    assert list(details.heads) == list(details.tokens) == ["0.png"]


@pytest.mark.parametrize("models", [["a"], ["a", "b"]])
def test_models_are_drawn_side_by_side_over_the_whole_image(tmp_path: Path, models: list[str]) -> None:
    trained = make_trained()
    assert trained.preprocess is not None
    batches = iterate_inputs(IMAGES[:1], 3, trained.preprocess, fail)
    results = dict.fromkeys(models, compute_attention_results(trained, batches, {"0.png"}))
    paths = {kind: tmp_path / f"{kind}.png" for kind in ("rollout", "relevance", "tokens", "heads")}
    draw_attention_images(IMAGES[0], results, paths)
    for kind in ("rollout", "relevance", "tokens"):
        with Image.open(paths[kind]) as drawn:
            assert drawn.size == ((1 + len(models)) * (360 + 12) + 12, 240 + 36 + 12)  # 40 x 60, enlarged six times
    with Image.open(paths["heads"]) as drawn:
        assert drawn.size == (4 * (256 + 12) + 12, len(models) * (171 + 36) + 12)


def test_file_names_suit_any_disk_and_are_never_the_same() -> None:
    assert make_file_name("folder/a photo: 1.jpg", ()) == "a_photo__1"
    assert make_file_name("a.png", {"a"}) == "a-2"
    assert make_file_name("a.png", {"a", "a-2"}) == "a-3"
    assert make_file_name("猫.png", ()) == "_"
    assert len(make_file_name("n" * 300 + ".png", ())) == 80
