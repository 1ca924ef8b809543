"""Class names: ImageNet's, and those in a text file."""

from pathlib import Path

import pytest

from vitrail.errors import UsageError
from vitrail.weights.labels import list_imagenet1k_labels, load_imagenet1k_classes, resolve_labels


def test_imagenets_labels_are_those_of_its_classes_in_order() -> None:
    labels = list_imagenet1k_labels()
    assert labels == resolve_labels("imagenet1k") == tuple(entry.name for entry in load_imagenet1k_classes())
    assert (len(labels), labels[0], load_imagenet1k_classes()[0].wordnet_id) == (
        1000,
        "tench, Tinca tinca",
        "n01440764",
    )


def test_a_text_file_has_a_label_on_each_line(tmp_path: Path) -> None:
    path = tmp_path / "labels.txt"
    path.write_text("K\u00e4fer\nbee\n", encoding="utf-8")
    assert resolve_labels(str(path)) == ("K\u00e4fer", "bee")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="is not UTF-8 text"):
        resolve_labels(str(path))
    with pytest.raises(UsageError, match="neither 'imagenet1k' nor a text file"):
        resolve_labels(str(tmp_path / "missing.txt"))
