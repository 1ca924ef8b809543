"""What lower precision does to a model on this machine."""

import dataclasses
import itertools
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests import model_factory
from vitrail import Classifier, load
from vitrail.errors import DataError
from vitrail.evaluation import precision_benchmark
from vitrail.evaluation.statistics import measure_agreement
from vitrail.inference.precision import InferenceFunctions, build_inference_functions, list_available_precisions
from vitrail.model.quantized import describe_cpu, has_exact_int8_products
from vitrail.weights.precision_measurements import (
    MIN_BFLOAT16_AGREEMENT,
    MIN_INT8_AGREEMENT,
    MIN_SPEEDUP,
    choose_precision,
)
from vitrail.weights.trained import Trained


@pytest.fixture(autouse=True)
def _without_openvino(monkeypatch: pytest.MonkeyPatch) -> None:
    """To translate a model for it takes seconds, and tests/export/test_openvino_int8.py does."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)


def make_inputs(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_every_available_precision_is_measured_against_float32() -> None:
    trained = model_factory.build_trained(model_factory.build_vit())
    images = make_inputs(40)
    benchmarked = precision_benchmark.measure_precisions(trained, images.split(25), seconds=60)
    assert benchmarked.model is trained.model
    expected = build_inference_functions(trained).probabilities(images)
    available = set(list_available_precisions(benchmarked)) - {"float32"}
    assert {measurement.precision for measurement in benchmarked.precision_measurements} == available
    for measurement in benchmarked.precision_measurements:
        assert measurement.processor == describe_cpu()
        assert measurement.threads == 1
        assert measurement.speedup > 0
        assert measurement.images in (4, 40)  # a hopeless one is asked of the first few alone
        probabilities = build_inference_functions(benchmarked, measurement.precision).probabilities(
            images[: measurement.images]
        )
        agreement = measure_agreement(expected[: measurement.images], probabilities)
        assert (measurement.top1_agreement, measurement.confident_images) == (
            agreement.top1_agreement,
            agreement.confident_images,
        )
        assert measurement.mean_probability_change == pytest.approx(agreement.mean_probability_change, abs=1e-6)


def test_speed_is_float32s_time_over_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock by hand: float32 takes 6 s a batch, bfloat16 3, int8 60; int8 is hopeless and left after the first."""
    seconds = {"float32": 6.0, "bfloat16": 3.0, "int8": 60.0}
    calls: dict[str, int] = dict.fromkeys(seconds, 0)

    def build_functions(_: Trained, name: str) -> InferenceFunctions:
        def compute(batch: Tensor) -> Tensor:
            calls[name] += 1
            return torch.tensor([[0.9, 0.1]]).expand(len(batch), 2)

        return InferenceFunctions(compute, compute)

    def time_by_hand(function: Callable[[Tensor], Tensor], batch: Tensor) -> tuple[float, Tensor]:
        before = dict(calls)
        benchmarked = function(batch)
        [name] = [name for name in calls if calls[name] != before[name]]
        return seconds[name], benchmarked

    monkeypatch.setattr(precision_benchmark, "build_inference_functions", build_functions)
    monkeypatch.setattr(precision_benchmark, "list_available_precisions", lambda _: tuple(seconds))
    monkeypatch.setattr(precision_benchmark, "_time_batch", time_by_hand)
    benchmarked = precision_benchmark.measure_precisions(
        model_factory.build_trained(model_factory.build_vit()), [make_inputs(50)], seconds=1000
    )
    assert {measurement.precision: measurement.speedup for measurement in benchmarked.precision_measurements} == {
        "bfloat16": 2.0,
        "int8": 0.1,
    }
    assert {measurement.precision: measurement.images for measurement in benchmarked.precision_measurements} == {
        "bfloat16": 50,
        "int8": 4,
    }
    assert [measurement.top1_agreement for measurement in benchmarked.precision_measurements] == [1.0, 1.0]


def test_it_ends_when_its_time_is_over_and_takes_no_more_images() -> None:
    num_batches = 0

    def batches() -> Iterator[Tensor]:
        nonlocal num_batches
        for number in itertools.count():
            num_batches += 1
            yield make_inputs(4, number)

    benchmarked = precision_benchmark.measure_precisions(
        model_factory.build_trained(model_factory.build_vit()), batches(), seconds=0
    )
    assert num_batches == 1
    assert {measurement.images for measurement in benchmarked.precision_measurements} == {4}
    with pytest.raises(DataError, match="no image to measure on"):
        precision_benchmark.measure_precisions(model_factory.build_trained(model_factory.build_vit()), [], seconds=1)


def test_measurements_on_other_cpus_are_kept() -> None:
    once = precision_benchmark.measure_precisions(
        model_factory.build_trained(model_factory.build_vit()), [make_inputs(4)], seconds=0
    )
    on_another_cpu = tuple(
        dataclasses.replace(measurement, processor="another") for measurement in once.precision_measurements
    )
    twice = precision_benchmark.measure_precisions(
        dataclasses.replace(once, precision_measurements=(*on_another_cpu, *once.precision_measurements)),
        [make_inputs(4)],
        seconds=0,
    )
    assert [measurement.processor for measurement in twice.precision_measurements].count("another") == len(
        on_another_cpu
    )
    assert len(twice.precision_measurements) == 2 * len(on_another_cpu)


def test_small_models_and_those_without_a_head_are_not_measured(deit_tiny: Path) -> None:
    assert not precision_benchmark.is_worth_measuring(model_factory.build_trained(model_factory.build_vit()))
    assert not precision_benchmark.is_worth_measuring(model_factory.build_trained(model_factory.build_vit(classes=0)))
    assert precision_benchmark.is_worth_measuring(load(deit_tiny))


@pytest.fixture(scope="module")
def imagenet(data: Path, deit_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trained, Tensor]:
    """A real model and views of 500 real photos."""
    folder = tmp_path_factory.mktemp("imagenet")
    with tarfile.open(data / "imagenet_samples.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    trained = load(deit_tiny)
    classify = Classifier(trained, device="cpu")
    return trained, torch.stack([classify.make_input(path) for path in sorted(folder.rglob("*.jpg"))])


few_or_all = pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.soak)], ids=["50", "500"])


@few_or_all
def test_bfloat16_predicts_real_photos_as_float32_does(imagenet: tuple[Trained, Tensor], every: int) -> None:
    trained, photos = imagenet
    photos = photos[::every]
    probabilities = [
        build_inference_functions(trained, precision).probabilities(photos) for precision in ("float32", "bfloat16")
    ]
    agreement = measure_agreement(*probabilities)
    assert agreement.top1_agreement >= MIN_BFLOAT16_AGREEMENT, f"{agreement.top1_agreement:.2%} of {agreement.images}"


@pytest.mark.skipif(not has_exact_int8_products(), reason="int8 needs a CPU with VNNI and a torch with oneDNN")
@few_or_all
def test_int8_predicts_the_real_photos_on_which_float32_is_confident(
    imagenet: tuple[Trained, Tensor], every: int
) -> None:
    trained, photos = imagenet
    photos = photos[::every]
    probabilities = [
        build_inference_functions(trained, precision).probabilities(photos) for precision in ("float32", "int8")
    ]
    agreement = measure_agreement(*probabilities)
    assert agreement.confident_agreement is not None
    assert agreement.confident_agreement >= MIN_INT8_AGREEMENT, (
        f"{agreement.confident_agreement:.2%} of {agreement.confident_images}"
    )
    assert agreement.mean_probability_change < 0.02


def test_a_real_model_runs_only_in_a_precision_that_its_measurements_allow(imagenet: tuple[Trained, Tensor]) -> None:
    trained, photos = imagenet
    benchmarked = precision_benchmark.measure_precisions(trained, photos[::5].split(64), seconds=3)
    available = list_available_precisions(benchmarked)
    best = choose_precision(benchmarked.precision_measurements, describe_cpu(), available)
    assert Classifier(benchmarked, device="cpu").precision == best
    by_name = {measurement.precision: measurement for measurement in benchmarked.precision_measurements}
    if best != "float32":
        assert by_name[best].speedup >= MIN_SPEEDUP
        assert by_name[best].images >= 100 or (by_name[best].confident_agreement or 0) >= MIN_INT8_AGREEMENT
    spoiled = tuple(
        dataclasses.replace(measurement, confident_agreement=0.98, top1_agreement=0.98)
        for measurement in benchmarked.precision_measurements
    )
    assert choose_precision(spoiled, describe_cpu(), available) == "float32"
