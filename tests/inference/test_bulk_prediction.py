"""Bulk prediction from Python: rows in a file, continued where it stopped (the command: tests/cli/test_predict.py)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import model_factory
from tests.data.image_files import write_image_folder
from vitrail import Classifier
from vitrail.data.image_paths import iter_image_refs
from vitrail.errors import UsageError
from vitrail.inference.bulk_prediction import BulkSettings, check_supported, predict_images
from vitrail.inference.prediction_rows import PredictionItem
from vitrail.inference.row_files import RowFile


def iterate_items(root: Path) -> Iterator[PredictionItem]:
    return (PredictionItem(image) for image in iter_image_refs([str(root)]))


def make_row_file(path: Path, **command: object) -> RowFile:
    return RowFile(path=path, row_format="csv", command={"vitrail": "test", **command}, batch=2, ranks=1)


def test_rows_are_written_in_order_and_a_complete_file_is_left_alone(tmp_path: Path) -> None:
    root = write_image_folder(tmp_path / "images", each=3)
    classifier = Classifier(model_factory.build_trained(model_factory.build_vit()), device="cpu", batch_size=2)
    target = make_row_file(tmp_path / "rows.csv")
    result = predict_images(classifier, iterate_items(root), target, BulkSettings())
    assert (result.written.images, result.written.failed, result.new_images) == (6, 0, 6)
    assert sum(result.labels.values()) == 6
    rows = target.path.read_bytes()
    notes: list[str] = []
    again = predict_images(classifier, iterate_items(root), target, BulkSettings(notify=notes.append))
    assert (again.written.images, again.new_images) == (6, 0)
    assert notes == [f"{target.path} has 6 images; continuing after them"]
    assert target.path.read_bytes() == rows


def test_a_model_without_a_head_gives_features_alone() -> None:
    classifier = Classifier(model_factory.build_trained(model_factory.build_vit(classes=0), labels=None), device="cpu")
    check_supported(classifier, embed=True, attention=True)
    with pytest.raises(UsageError, match="no head"):
        check_supported(classifier, embed=False, attention=False)
