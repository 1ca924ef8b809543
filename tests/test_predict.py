"""A model in use."""

import dataclasses
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests import making
from vitrail import Classifier, load, save
from vitrail.errors import DataError, UsageError
from vitrail.weights.adapt import adapt


def pictures(count: int) -> list[Image.Image]:
    generator = np.random.default_rng(0)
    return [Image.fromarray(generator.integers(0, 256, (40, 50, 3), dtype=np.uint8)) for _ in range(count)]


def test_answers_are_sorted_complete_and_do_not_depend_on_the_batch() -> None:
    trained, images = making.trained(making.vit()), pictures(5)
    answers = Classifier(trained, device="cpu", batch_size=2)(images, top=7)
    assert len(answers) == 5
    for answer in answers:
        probabilities = [p for _, p in answer]
        assert probabilities == sorted(probabilities, reverse=True)
        assert sum(probabilities) == pytest.approx(1, abs=1e-5)
        assert {label for label, _ in answer} == set(trained.labels or ())
    one_by_one = [Classifier(trained, device="cpu")([image], top=7)[0] for image in images]
    for together, alone in zip(answers, one_by_one, strict=True):
        assert [label for label, _ in together] == [label for label, _ in alone]
        assert [p for _, p in together] == pytest.approx([p for _, p in alone], abs=1e-6)


def test_logits_are_divided_by_the_temperature_by_hand() -> None:
    """A head that says log 1, 2, 4 ... 64 of any image; at a temperature of 2 those are the roots of these odds."""
    model = making.vit()
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.copy_(math.log(2) * torch.arange(7))
    for temperature in (1.0, 2.0, 0.5):
        [answer] = Classifier(making.trained(model, temperature=temperature), device="cpu")(pictures(1), top=7)
        odds = [2 ** (index / temperature) for index in range(7)]
        assert [label for label, _ in answer] == [f"kind {index}" for index in reversed(range(7))]
        assert [p for _, p in answer] == pytest.approx([each / sum(odds) for each in reversed(odds)], rel=1e-5)


def test_bytes_and_pillow_images_get_the_same_answer() -> None:
    [image], file = pictures(1), io.BytesIO()
    image.save(file, "PNG")
    classify = Classifier(making.trained(making.vit()), device="cpu")
    first, second = classify([image, file.getvalue()])
    assert first == second


def test_no_images_no_answers_and_a_bad_one_is_an_error() -> None:
    classify = Classifier(making.trained(making.vit()), device="cpu")
    assert classify([]) == []
    with pytest.raises(DataError):
        classify([b"text"])


def test_unnamed_classes_are_numbered() -> None:
    trained = dataclasses.replace(making.trained(making.vit()), labels=None)
    [answer] = Classifier(trained, device="cpu")(pictures(1), top=1)
    assert answer[0][0].startswith("class ")


def test_a_model_that_cannot_classify_says_why() -> None:
    trained = making.trained(making.vit())
    with pytest.raises(UsageError, match=r"vitrail convert MODEL OUT\.safetensors --preprocess imagenet"):
        Classifier(dataclasses.replace(trained, preprocess=None))
    with pytest.raises(UsageError, match="no head"):
        Classifier(adapt(trained, classes=0))


def test_arguments_that_cannot_be_meant_are_refused() -> None:
    trained = making.trained(making.vit())
    classify = Classifier(trained, device="cpu")
    with pytest.raises(UsageError, match="give a list of images"):
        classify("cat.jpg")
    with pytest.raises(UsageError, match="top is 0"):
        classify(pictures(1), top=0)
    with pytest.raises(UsageError, match="batch_size is -1"):
        Classifier(trained, batch_size=-1)
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="torch sees no cuda device here"):
            Classifier(trained, device="cuda")
    with pytest.raises(UsageError, match="no device 'banana'"):
        Classifier(trained, device="banana")
    wrong: tuple[Any, ...] = (None, 3, np.zeros((4, 4, 3)), torch.zeros(3, 4, 4), Image.new("RGB", (0, 5)))
    for item in wrong:
        with pytest.raises(DataError):
            classify([item])


def test_a_model_in_training_stays_in_training() -> None:
    trained = making.trained(making.vit())
    trained.model.train()
    Classifier(trained, device="cpu")(pictures(1))
    assert trained.model.training


def test_the_device_is_chosen_by_itself() -> None:
    best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    assert Classifier(making.trained(making.vit())).device.type == best


def test_where_several_labels_are_right_each_class_has_a_probability_of_its_own(tmp_path: Path) -> None:
    trained, images = making.trained(making.vit()), pictures(2)
    save(dataclasses.replace(trained, several=True, temperature=2.0), tmp_path / "model.safetensors")
    odds = Classifier(trained, device="cpu").probabilities(images).log()  # logits, but for a constant of each image
    found = Classifier(load(tmp_path / "model.safetensors"), device="cpu").probabilities(images)
    logits = found.logit() * 2
    torch.testing.assert_close(logits - logits[:, :1], odds - odds[:, :1], atol=1e-4, rtol=0)
    assert float(found[0].sum()) != pytest.approx(1.0, abs=1e-3)
