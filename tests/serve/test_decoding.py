"""What a decoder makes of a file."""

import pytest
import torch

from tests.serve import serving
from tests.serve.serving import picture
from vitrail.serve import decoding
from vitrail.serve.decoding import Recipe, make_input
from vitrail.serve.limits import Limits, RefusedError

CLASSIFIER = serving.classifier()
RECIPE = Recipe(CLASSIFIER.preprocess, 3)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"])
def test_a_model_input_is_the_classifiers_own(format: str) -> None:  # noqa: A002
    for seed, size in enumerate([(1, 1), (33, 200), (224, 31), (500, 375)]):
        file = picture(seed, size, format)
        assert torch.equal(make_input(file, RECIPE, Limits()).pixels, CLASSIFIER.view(file))


def test_too_many_pixels_are_refused_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "decode", None)  # not reached
    with pytest.raises(RefusedError, match="101 x 100 pixels") as refused:
        make_input(picture(size=(101, 100)), RECIPE, Limits(megapixels=0.01))
    assert refused.value.status == 413


def test_an_image_that_finds_no_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(decoding, "decode", fail)
    with pytest.raises(RefusedError, match="the image takes too much memory to decode") as refused:
        make_input(picture(), RECIPE, Limits())
    assert refused.value.status == 413
