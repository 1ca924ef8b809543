"""What a file tells of fewer bits, and what follows from it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests import model_factory
from vitrail import load, save
from vitrail.errors import ModelError, UsageError
from vitrail.weights import native, tensor_files
from vitrail.weights.adapt import adapt, reorder_head
from vitrail.weights.precision_measurements import PrecisionMeasurement, choose_precision

CPU = "x86_64-avx512-vnni"
ALL = ("float32", "bfloat16", "int8", "openvino-int8")


def make_measurement(precision: str, speedup: float = 2.0, **changes: Any) -> PrecisionMeasurement:
    facts: dict[str, Any] = {
        "processor": CPU, "threads": 2, "images": 500, "top1_agreement": 0.996, "confident_agreement": 0.995,
        "confident_images": 400, "mean_probability_change": 0.01,
    }  # fmt: skip
    return PrecisionMeasurement(precision=precision, speedup=speedup, **(facts | changes))


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ([], "float32"),
        ([make_measurement("int8")], "int8"),
        ([make_measurement("int8", 1.09)], "float32"),
        ([make_measurement("int8", 1.1)], "int8"),
        ([make_measurement("int8", confident_agreement=0.9899)], "float32"),
        (
            [make_measurement("int8", confident_agreement=0.99, top1_agreement=0.5)],
            "int8",
        ),  # images it is unsure of do not count
        ([make_measurement("int8", confident_agreement=None, confident_images=0)], "float32"),
        ([make_measurement("int8", confident_images=99)], "float32"),
        ([make_measurement("int8", processor="aarch64-neon")], "float32"),
        ([make_measurement("bfloat16", top1_agreement=0.9949)], "float32"),
        ([make_measurement("bfloat16", top1_agreement=0.995, confident_agreement=0.5)], "bfloat16"),
        ([make_measurement("bfloat16", images=99, confident_images=99)], "float32"),
        ([make_measurement("bfloat16", 1.8), make_measurement("int8", 2.4)], "int8"),
        ([make_measurement("bfloat16", 1.8), make_measurement("int8", 2.4, confident_agreement=0.98)], "bfloat16"),
        ([make_measurement("int8", 2.4), make_measurement("openvino-int8", 2.9)], "openvino-int8"),
        ([make_measurement("int8", 2.4), make_measurement("openvino-int8", 2.9, confident_agreement=0.9)], "int8"),
    ],
)
def test_the_fastest_that_answers_alike_is_chosen(measured: list[PrecisionMeasurement], expected: str) -> None:
    assert choose_precision(measured, CPU, ALL) == expected


def test_what_this_machine_cannot_compute_is_not_chosen() -> None:
    measured = [make_measurement("int8", 2.4), make_measurement("openvino-int8", 2.9)]
    assert choose_precision(measured, CPU, ("float32", "bfloat16", "int8")) == "int8"
    assert choose_precision(measured, CPU, ("float32", "bfloat16")) == "float32"


def test_measurements_travel_in_the_file(tmp_path: Path) -> None:
    measured = (
        make_measurement("int8"),
        make_measurement("bfloat16", 0.4, confident_agreement=None, confident_images=0),
    )
    trained = model_factory.build_trained(
        model_factory.build_vit(), precision_measurements=measured, activation_ranges=(-1.5, 2.0) * 18
    )
    save(trained, tmp_path / "a.safetensors")
    loaded = load(tmp_path / "a.safetensors")
    assert loaded.precision_measurements == measured
    assert loaded.activation_ranges == (-1.5, 2.0) * 18


def test_ranges_of_a_file_that_has_none_of_queries_and_keys_are_left_out(tmp_path: Path) -> None:
    save(
        model_factory.build_trained(
            model_factory.build_vit(),
            precision_measurements=(make_measurement("openvino-int8"),),
            activation_ranges=(-1.5, 2.0) * 18,
        ),
        tmp_path / "new.safetensors",
    )
    stored = tensor_files.read_tensors(tmp_path / "new.safetensors")
    header = json.loads(stored.metadata[native.METADATA_KEY])
    for name, count in (("old", 24), ("damaged", 22)):
        fewer = header | {"activation_ranges": header["activation_ranges"][:count]}
        tensor_files.write_tensors(
            tmp_path / f"{name}.safetensors", stored.tensors, {native.METADATA_KEY: json.dumps(fewer)}
        )
    assert load(tmp_path / "old.safetensors").activation_ranges == ()
    with pytest.raises(ModelError, match="22 ends of ranges"):
        load(tmp_path / "damaged.safetensors")


def test_a_file_without_them_has_no_word_of_them(tmp_path: Path) -> None:
    """So that it has the bytes it had before there were such fields, and older versions read it."""
    save(model_factory.build_trained(model_factory.build_vit()), tmp_path / "a.safetensors")
    content = (tmp_path / "a.safetensors").read_bytes()
    assert b"threshold" in content
    assert b"precision_measurements" not in content
    assert b"ranges" not in content
    assert load(tmp_path / "a.safetensors").precision_measurements == ()


def test_other_weights_have_other_measurements() -> None:
    trained = model_factory.build_trained(
        model_factory.build_vit(),
        precision_measurements=(make_measurement("int8"),),
        activation_ranges=(-1.0, 1.0) * 18,
    )
    assert trained.labels is not None
    for changed in (
        adapt(trained, classes=3),
        adapt(trained, image_size=64),
        reorder_head(trained, trained.labels[::-1]),
    ):
        assert (changed.precision_measurements, changed.activation_ranges) == ((), ())
    kept = adapt(trained)
    assert (kept.precision_measurements, kept.activation_ranges) == (
        trained.precision_measurements,
        trained.activation_ranges,
    )
    assert dataclasses.replace(trained, threshold=0.5).precision_measurements == trained.precision_measurements


def test_a_measurement_that_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match=r"top1_agreement is 1.5; it must be from 0 to 1"):
        make_measurement("int8", top1_agreement=1.5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"speedup": float("nan")},
        {"speedup": 0.0},
        {"images": -5},
        {"confident_images": 501},
        {"mean_probability_change": float("nan")},
    ],
)
def test_measurements_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        make_measurement("int8", **wrong)
