"""Photos of installed packages."""

import pytest

from vitrail.data.sample_photos import list_sample_photos


def test_every_photo_opens_in_color_and_names_whom_it_is_owed_to() -> None:
    pytest.importorskip("skimage")
    photos = list_sample_photos()
    assert len({photo.name for photo in photos}) == len(photos) == 6
    for photo in photos:
        image = photo.read()
        assert (image.mode, min(image.size) >= 300) == ("RGB", True)
        assert any(terms in photo.credit for terms in ("CC0", "CC BY 2.0", "public domain"))
