"""What fewer bits do to a model on this machine."""

import dataclasses
import itertools
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests import making
from vitrail import Classifier, load
from vitrail.errors import DataError
from vitrail.evaluate import precision_benchmark
from vitrail.evaluate.agreement import measure_agreement
from vitrail.inference import compute
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


def views(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_every_precision_that_is_possible_is_measured_against_float32() -> None:
    trained = making.trained(making.vit())
    images = views(40)
    found = precision_benchmark.measure_precisions(trained, images.split(25), seconds=60)
    assert found.model is trained.model
    expected = compute.build_inference_functions(trained).probabilities(images)
    possible = set(compute.list_available_precisions(found)) - {"float32"}
    assert {tried.precision for tried in found.precision_measurements} == possible
    for tried in found.precision_measurements:
        assert tried.cpu == describe_cpu()
        assert tried.threads == 1
        assert tried.speedup > 0
        assert tried.images in (4, 40)  # a hopeless one is asked of the first few alone
        said = compute.build_inference_functions(found, tried.precision).probabilities(images[: tried.images])
        same = measure_agreement(expected[: tried.images], said)
        assert (tried.top1_agreement, tried.confident_images) == (same.top1, same.sure_images)
        assert tried.mean_probability_change == pytest.approx(same.change, abs=1e-6)


def test_speed_is_float32s_time_over_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock by hand: float32 takes 6 s a batch, bfloat16 3, int8 60; int8 is hopeless and left after the first."""
    takes = {"float32": 6.0, "bfloat16": 3.0, "int8": 60.0}
    asked: dict[str, int] = dict.fromkeys(takes, 0)

    def functions(_: Trained, name: str) -> compute.InferenceFunctions:
        def answers(some: Tensor) -> Tensor:
            asked[name] += 1
            return torch.tensor([[0.9, 0.1]]).expand(len(some), 2)

        return compute.InferenceFunctions(answers, answers)

    def timed(way: Callable[[Tensor], Tensor], some: Tensor) -> tuple[float, Tensor]:
        before = dict(asked)
        found = way(some)
        [name] = [name for name in asked if asked[name] != before[name]]
        return takes[name], found

    monkeypatch.setattr(compute, "build_inference_functions", functions)
    monkeypatch.setattr(compute, "list_available_precisions", lambda _: tuple(takes))
    monkeypatch.setattr(precision_benchmark, "_time_batch", timed)
    found = precision_benchmark.measure_precisions(making.trained(making.vit()), [views(50)], seconds=1000)
    assert {tried.precision: tried.speedup for tried in found.precision_measurements} == {"bfloat16": 2.0, "int8": 0.1}
    assert {tried.precision: tried.images for tried in found.precision_measurements} == {"bfloat16": 50, "int8": 4}
    assert [tried.top1_agreement for tried in found.precision_measurements] == [1.0, 1.0]


def test_it_ends_when_its_time_is_over_and_takes_no_more_images() -> None:
    taken = 0

    def batches() -> Iterator[Tensor]:
        nonlocal taken
        for number in itertools.count():
            taken += 1
            yield views(4, number)

    found = precision_benchmark.measure_precisions(making.trained(making.vit()), batches(), seconds=0)
    assert taken == 1
    assert {tried.images for tried in found.precision_measurements} == {4}
    with pytest.raises(DataError, match="no image to measure on"):
        precision_benchmark.measure_precisions(making.trained(making.vit()), [], seconds=1)


def test_what_was_measured_on_other_cpus_is_kept() -> None:
    once = precision_benchmark.measure_precisions(making.trained(making.vit()), [views(4)], seconds=0)
    elsewhere = tuple(dataclasses.replace(tried, cpu="another") for tried in once.precision_measurements)
    twice = precision_benchmark.measure_precisions(
        dataclasses.replace(once, precision_measurements=(*elsewhere, *once.precision_measurements)),
        [views(4)],
        seconds=0,
    )
    assert [tried.cpu for tried in twice.precision_measurements].count("another") == len(elsewhere)
    assert len(twice.precision_measurements) == 2 * len(elsewhere)


def test_small_models_and_those_without_answers_are_not_measured(deit_tiny: Path) -> None:
    assert not precision_benchmark.is_worth_measuring(making.trained(making.vit()))
    assert not precision_benchmark.is_worth_measuring(making.trained(making.vit(classes=0)))
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
def test_bfloat16_answers_real_photos_as_float32_does(imagenet: tuple[Trained, Tensor], every: int) -> None:
    trained, photos = imagenet
    photos = photos[::every]
    said = [compute.build_inference_functions(trained, each).probabilities(photos) for each in ("float32", "bfloat16")]
    same = measure_agreement(*said)
    assert same.top1 >= MIN_BFLOAT16_AGREEMENT, f"{same.top1:.2%} of {same.images}"


@pytest.mark.skipif(not has_exact_int8_products(), reason="int8 needs a CPU with VNNI and a torch with oneDNN")
@few_or_all
def test_int8_answers_the_real_photos_that_float32_is_sure_of(imagenet: tuple[Trained, Tensor], every: int) -> None:
    trained, photos = imagenet
    photos = photos[::every]
    said = [compute.build_inference_functions(trained, each).probabilities(photos) for each in ("float32", "int8")]
    same = measure_agreement(*said)
    assert same.sure is not None
    assert same.sure >= MIN_INT8_AGREEMENT, f"{same.sure:.2%} of {same.sure_images}"
    assert same.change < 0.02


def test_of_a_real_model_only_what_its_measurements_allow_is_chosen(imagenet: tuple[Trained, Tensor]) -> None:
    trained, photos = imagenet
    found = precision_benchmark.measure_precisions(trained, photos[::5].split(64), seconds=3)
    possible = compute.list_available_precisions(found)
    best = choose_precision(found.precision_measurements, describe_cpu(), possible)
    assert Classifier(found, device="cpu").precision == best
    by_name = {tried.precision: tried for tried in found.precision_measurements}
    if best != "float32":
        assert by_name[best].speedup >= MIN_SPEEDUP
        assert by_name[best].images >= 100 or (by_name[best].confident_agreement or 0) >= MIN_INT8_AGREEMENT
    spoiled = tuple(
        dataclasses.replace(tried, confident_agreement=0.98, top1_agreement=0.98)
        for tried in found.precision_measurements
    )
    assert choose_precision(spoiled, describe_cpu(), possible) == "float32"
