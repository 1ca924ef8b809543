"""What a decoder makes of a file."""

import pytest
import torch

from tests.serving import serving
from tests.serving.serving import make_image_file
from vitrail.serving import upload_decoding
from vitrail.serving.limits import RefusedError, RequestLimits
from vitrail.serving.upload_decoding import InputSpec, decode_input

CLASSIFIER = serving.build_classifier()
RECIPE = InputSpec(CLASSIFIER.preprocess, 3)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"])
def test_a_model_input_is_the_classifiers_own(format: str) -> None:  # noqa: A002
    for seed, size in enumerate([(1, 1), (33, 200), (224, 31), (500, 375)]):
        file = make_image_file(seed, size, format)
        assert torch.equal(decode_input(file, RECIPE, RequestLimits()).pixels, CLASSIFIER.make_input(file))


def test_too_many_pixels_are_refused_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_decoding, "decode", None)  # not reached
    with pytest.raises(RefusedError, match="101 x 100 pixels") as refused:
        decode_input(make_image_file(size=(101, 100)), RECIPE, RequestLimits(max_megapixels=0.01))
    assert refused.value.status == 413


def test_an_image_that_finds_no_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(upload_decoding, "decode", fail)
    with pytest.raises(RefusedError, match="the image takes too much memory to decode") as refused:
        decode_input(make_image_file(), RECIPE, RequestLimits())
    assert refused.value.status == 413
