"""How predictions show themselves, as text and in a notebook."""

from pathlib import Path

import numpy as np

import vitrail
from tests.api.conftest import make_trained


def test_predictions_show_their_numbers_with_escaped_names() -> None:
    trained = make_trained(labels=("<b>", "<i>"))
    predictions = vitrail.predict(trained, [np.full((8, 8), shade, np.uint8) for shade in range(60)])
    first = predictions[0]
    assert predictions[:2] == (first, predictions[1])
    assert "60 images: " in repr(predictions)
    assert str(first.label) in repr(predictions)
    html = predictions._repr_html_()
    assert html.count("<img") == 8
    assert f"{first.probability:.1%}" in html
    assert "&lt;b&gt;" in html or "&lt;i&gt;" in html
    assert "<b>" not in html
    assert "and 10 more" in html


def test_an_image_is_shown_as_long_as_it_can_be_read() -> None:
    Path("broken.jpg").write_bytes(b"no image")
    predictions = vitrail.predict("model.safetensors", ["broken.jpg", "photos/test/rose/0.png"])
    assert predictions._repr_html_().count("<img") == 1
    Path("photos/test/rose/0.png").unlink()
    assert predictions._repr_html_().count("<img") == 0


def test_no_predictions_are_no_images() -> None:
    assert repr(vitrail.predict("model.safetensors", [])) == "PredictionList(0 images)"


def test_images_of_an_iterator_are_shown_too() -> None:
    predictions = vitrail.predict("model.safetensors", (path for path in ["photos/test/rose/0.png"]))
    assert predictions._repr_html_().count("<img") == 1
