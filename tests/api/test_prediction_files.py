"""Options of a prediction that contradict each other, and where its file is."""

from pathlib import Path

import pytest

from tests import model_factory
from vitrail import Classifier
from vitrail.api.prediction_files import PredictOptions, locate_output, make_row_file
from vitrail.data.image_parts import Part
from vitrail.errors import UsageError


def test_a_url_has_a_local_file_below_runs() -> None:
    assert locate_output("a/rows.csv") == (Path("a/rows.csv"), None)
    assert locate_output("s3://b/c/rows.csv") == (Path("runs/rows.csv"), "s3://b/c/rows.csv")
    assert locate_output("s3://b/features/") == (Path("runs/features"), "s3://b/features")


def test_a_part_has_a_file_and_a_record_of_its_own() -> None:
    trained = model_factory.build_trained(model_factory.build_vit())
    classifier = Classifier(trained, device="cpu", batch_size=5)
    whole = make_row_file(classifier, PredictOptions(out="rows.parquet", top=9), trained)
    part = make_row_file(classifier, PredictOptions(out="rows.parquet", top=9, part=Part(2, 3)), trained, "digest")
    assert (str(part.path), part.ranks, part.features) == ("rows-00002-of-00003.parquet", 7, 0)
    assert part.command == {**whole.command, "--part": "2/3", "listing": "digest"}
    options = PredictOptions(out="s3://b/features/", embed=True, features="class-mean", part=Part(1, 3))
    features = make_row_file(classifier, options, trained, "digest")
    assert (features.row_format, features.features) == ("partitions", 64)
    assert (str(features.path), features.url) == ("runs/features-00001-of-00003", "s3://b/features-00001-of-00003")


def test_options_that_contradict_each_other_are_refused() -> None:
    for options, reason in (
        (PredictOptions, "top is 0"),
        (lambda **_: PredictOptions(out="rows.npy"), "holds features alone"),
        (lambda **_: PredictOptions(out="rows.csv", embed=True), "too many for csv"),
        (lambda **_: PredictOptions(out="rows.csv", float16=True), "--float16 is for"),
        (lambda **_: PredictOptions(attention="pictures", part=Part(1, 2)), "none for a --part"),
    ):
        with pytest.raises(UsageError, match=reason):
            options(top=0)
