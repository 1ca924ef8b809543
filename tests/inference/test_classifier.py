"""Classifier: predictions, probabilities, features, precisions and errors."""

import dataclasses
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests import model_factory
from vitrail import Classifier, load, save
from vitrail.config import Precision
from vitrail.data.transforms import normalize
from vitrail.errors import DataError, UsageError
from vitrail.model.quantized import describe_cpu, has_exact_int8_products
from vitrail.weights.adapt import adapt
from vitrail.weights.precision_measurements import PrecisionMeasurement

needs_int8 = pytest.mark.skipif(
    not has_exact_int8_products(), reason="int8 needs a CPU with VNNI and a torch with oneDNN"
)


def make_images(count: int) -> list[Image.Image]:
    generator = np.random.default_rng(0)
    return [Image.fromarray(generator.integers(0, 256, (40, 50, 3), dtype=np.uint8)) for _ in range(count)]


def test_predictions_are_sorted_complete_and_do_not_depend_on_the_batch() -> None:
    trained, images = model_factory.build_trained(model_factory.build_vit()), make_images(5)
    predictions = Classifier(trained, device="cpu", batch_size=2)(images, top=7)
    assert len(predictions) == 5
    for prediction in predictions:
        probabilities = [p for _, p in prediction]
        assert probabilities == sorted(probabilities, reverse=True)
        assert sum(probabilities) == pytest.approx(1, abs=1e-5)
        assert {label for label, _ in prediction} == set(trained.labels or ())
    one_by_one = [Classifier(trained, device="cpu")([image], top=7)[0] for image in images]
    for together, alone in zip(predictions, one_by_one, strict=True):
        assert [label for label, _ in together] == [label for label, _ in alone]
        assert [p for _, p in together] == pytest.approx([p for _, p in alone], abs=1e-6)


def test_logits_are_divided_by_the_temperature_by_hand() -> None:
    """A head that says log 1, 2, 4 ... 64 of any image; at a temperature of 2 those are the roots of these odds."""
    model = model_factory.build_vit()
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.copy_(math.log(2) * torch.arange(7))
    for temperature in (1.0, 2.0, 0.5):
        [prediction] = Classifier(model_factory.build_trained(model, temperature=temperature), device="cpu")(
            make_images(1), top=7
        )
        odds = [2 ** (index / temperature) for index in range(7)]
        assert [label for label, _ in prediction] == [f"kind {index}" for index in reversed(range(7))]
        assert [p for _, p in prediction] == pytest.approx([value / sum(odds) for value in reversed(odds)], rel=1e-5)


def test_paths_bytes_pillow_images_and_arrays_get_the_same_prediction(tmp_path: Path) -> None:
    [image] = make_images(1)
    path = tmp_path / "image.png"
    image.save(path)
    classify = Classifier(model_factory.build_trained(model_factory.build_vit()), device="cpu")
    image_input = classify.make_input(image)
    (first, *others) = classify([image, path, str(path), path.read_bytes(), np.asarray(image), image_input])
    assert others == [first] * 5


def test_arrays_may_be_gray_or_transparent() -> None:
    """Gray is three equal colors, and transparent pixels are white, as in files."""
    classify = Classifier(model_factory.build_trained(model_factory.build_vit()), device="cpu")
    gray = np.asarray(make_images(1)[0])[..., 0]
    colors = classify.make_input(np.stack([gray] * 3, axis=2))
    assert torch.equal(classify.make_input(gray), colors)
    assert torch.equal(classify.make_input(gray[..., None]), colors)
    clear = np.zeros((40, 50, 4), dtype=np.uint8)
    assert classify.make_input(clear).eq(255).all()
    turned = np.asarray(make_images(1)[0])[::-1, ::2]  # neither contiguous nor in order
    assert torch.equal(classify.make_input(turned), classify.make_input(turned.copy()))


def test_threads_share_a_classifier_and_get_the_same_predictions() -> None:
    classify, images = (
        Classifier(model_factory.build_trained(model_factory.build_vit()), device="cpu", batch_size=3),
        make_images(12),
    )
    expected = [(classify(images[part::4], top=3), classify.extract_features(images[part::4])) for part in range(4)]

    def compare_call(call: int) -> bool:
        predictions, features = expected[call % 4]
        same = torch.equal(classify.extract_features(images[call % 4 :: 4]), features)
        return same and classify(images[call % 4 :: 4], top=3) == predictions

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(compare_call, range(64)))


def test_inputs_may_be_made_one_by_one_and_computed_as_a_batch() -> None:
    """What a server does: threads prepare, one batch is computed."""
    trained, images = model_factory.build_trained(model_factory.build_vit()), make_images(5)
    classify = Classifier(trained, device="cpu")
    inputs = [classify.make_input(image) for image in images]
    assert {(image_input.dtype, tuple(image_input.shape)) for image_input in inputs} == {(torch.uint8, (3, 32, 32))}
    assert classify.predict(inputs, 2) == classify(images, top=2)
    assert torch.equal(classify.predict_proba(inputs), classify.predict_proba(images))
    with torch.no_grad():
        expected = trained.model.compute_features(normalize(torch.stack(inputs), classify.preprocess))
    assert torch.equal(classify.extract_features(inputs), expected)
    for wrong in (inputs[0].float(), inputs[0][:1], inputs[0][:, :31], torch.stack(inputs)):
        with pytest.raises(DataError, match=r"a tensor must be a model input, uint8 \(3, 32, 32\)"):
            classify.extract_features([wrong])


def test_no_images_give_no_predictions_and_a_bad_one_is_an_error() -> None:
    classify = Classifier(model_factory.build_trained(model_factory.build_vit()), device="cpu")
    assert classify([]) == classify.predict([]) == []
    assert classify.extract_features([]).shape == (0, 32)
    with pytest.raises(DataError):
        classify([b"text"])


def test_unnamed_classes_are_numbered() -> None:
    trained = dataclasses.replace(model_factory.build_trained(model_factory.build_vit()), labels=None)
    [prediction] = Classifier(trained, device="cpu")(make_images(1), top=1)
    assert prediction[0][0].startswith("class ")


def test_a_model_that_cannot_classify_says_why() -> None:
    trained = model_factory.build_trained(model_factory.build_vit())
    with pytest.raises(UsageError, match=r"vitrail convert MODEL OUT\.safetensors --preprocess imagenet"):
        Classifier(dataclasses.replace(trained, preprocess=None))
    headless = Classifier(adapt(trained, classes=0), device="cpu")
    assert torch.equal(
        headless.extract_features(make_images(2)), Classifier(trained, device="cpu").extract_features(make_images(2))
    )
    for ask in (headless, headless.predict, headless.predict_proba):
        with pytest.raises(UsageError, match="the model has no head, so it computes features but no labels"):
            ask(make_images(1))


def test_arguments_that_cannot_be_meant_are_refused() -> None:
    trained = model_factory.build_trained(model_factory.build_vit())
    classify = Classifier(trained, device="cpu")
    with pytest.raises(UsageError, match="give a list of images"):
        classify("cat.jpg")
    with pytest.raises(UsageError, match="top is 0"):
        classify(make_images(1), top=0)
    with pytest.raises(UsageError, match="batch_size is -1"):
        Classifier(trained, batch_size=-1)
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="torch sees no cuda device here"):
            Classifier(trained, device="cuda")
    with pytest.raises(UsageError, match="no device 'banana'"):
        Classifier(trained, device="banana")
    with pytest.raises(UsageError, match="give a list of images"):
        classify(np.zeros((4, 4, 3), dtype=np.uint8))
    arrays = (np.zeros((4, 4, 3)), np.zeros((4, 4, 2), np.uint8), np.zeros(4, np.uint8), np.zeros((0, 4), np.uint8))
    wrong: tuple[Any, ...] = (None, 3, torch.zeros(3, 4, 4), Image.new("RGB", (0, 5)), *arrays)
    for item in wrong:
        with pytest.raises(DataError):
            classify([item])


def test_a_model_in_training_stays_in_training() -> None:
    trained = model_factory.build_trained(model_factory.build_vit())
    trained.model.train()
    Classifier(trained, device="cpu")(make_images(1))
    assert trained.model.training


def test_the_device_is_chosen_by_itself_cuda_first() -> None:
    best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    assert Classifier(model_factory.build_trained(model_factory.build_vit())).device.type == best


def test_a_multi_label_model_gives_each_class_a_probability_of_its_own(tmp_path: Path) -> None:
    trained, images = model_factory.build_trained(model_factory.build_vit()), make_images(2)
    save(dataclasses.replace(trained, multi_label=True, temperature=2.0), tmp_path / "model.safetensors")
    odds = Classifier(trained, device="cpu").predict_proba(images).log()  # logits, but for a constant of each image
    probabilities = Classifier(load(tmp_path / "model.safetensors"), device="cpu").predict_proba(images)
    logits = probabilities.logit() * 2
    torch.testing.assert_close(logits - logits[:, :1], odds - odds[:, :1], atol=1e-4, rtol=0)
    assert float(probabilities[0].sum()) != pytest.approx(1.0, abs=1e-3)


def test_every_label_above_its_threshold_is_predicted() -> None:
    trained, images = model_factory.build_trained(model_factory.build_vit(), multi_label=True), make_images(3)
    probabilities = Classifier(trained, device="cpu").predict_proba(images)
    middle = probabilities.median(dim=0).values  # of three images one has more
    thresholds = (*middle.tolist()[:-1], 1.0)
    classifier = Classifier(dataclasses.replace(trained, label_thresholds=thresholds), device="cpu")
    predictions = classifier(images, top=None)
    for row, labels in zip(probabilities, predictions, strict=True):
        expected = {classifier.labels[index] for index in range(6) if row[index] > middle[index]}
        assert {label for label, _ in labels} == expected
        assert [value for _, value in labels] == sorted((value for _, value in labels), reverse=True)
    assert sum(map(len, predictions)) == 6
    assert [len(labels) for labels in classifier(images, top=4)] == [4, 4, 4]
    assert [len(labels) for labels in Classifier(trained, device="cpu")(images, top=None)] == [1, 1, 1]


def make_measurement(**changes: Any) -> PrecisionMeasurement:
    facts: dict[str, Any] = {
        "processor": describe_cpu(), "precision": "bfloat16", "threads": 1, "speedup": 2.0, "images": 500,
        "top1_agreement": 1.0, "confident_agreement": 1.0,
        "confident_images": 400, "mean_probability_change": 0.0,
    }  # fmt: skip
    return PrecisionMeasurement(**(facts | changes))


def test_on_the_cpu_the_files_measurements_choose_the_precision_and_an_argument_forces_it() -> None:
    trained, images = model_factory.build_trained(model_factory.build_vit()), make_images(4)
    with_measurements = dataclasses.replace(trained, precision_measurements=(make_measurement(),))
    exact, automatic = Classifier(trained, device="cpu"), Classifier(with_measurements, device="cpu")
    forced = Classifier(with_measurements, device="cpu", precision="float32")
    lower = Classifier(trained, device="cpu", precision="bfloat16")
    assert [classifier.precision for classifier in (exact, automatic, forced, lower)] == ["float32", "bfloat16"] * 2
    assert torch.equal(forced.predict_proba(images), exact.predict_proba(images))
    assert torch.equal(lower.predict_proba(images), automatic.predict_proba(images))
    assert not torch.equal(lower.predict_proba(images), exact.predict_proba(images))
    assert automatic.model is with_measurements.model, "attention and digests are of the weights themselves"


def test_features_are_float32_unless_another_precision_is_forced() -> None:
    trained, images = model_factory.build_trained(model_factory.build_vit()), make_images(3)
    exact = Classifier(trained, device="cpu").extract_features(images)
    automatic = Classifier(dataclasses.replace(trained, precision_measurements=(make_measurement(),)), device="cpu")
    assert torch.equal(automatic.extract_features(images), exact)
    assert not torch.equal(Classifier(trained, device="cpu", precision="bfloat16").extract_features(images), exact)


def test_measurements_on_another_cpu_do_not_count() -> None:
    trained = model_factory.build_trained(
        model_factory.build_vit(), precision_measurements=(make_measurement(processor="another"),)
    )
    assert Classifier(trained, device="cpu").precision == "float32"


@pytest.mark.parametrize("precision", ["bfloat16", pytest.param("int8", marks=needs_int8)])
def test_threads_share_a_quantized_classifier_and_get_the_same_predictions(precision: Precision) -> None:
    classify, images = (
        Classifier(model_factory.build_trained(model_factory.build_vit()), device="cpu", precision=precision),
        make_images(8),
    )
    expected = [classify.predict_proba(images[part::4]) for part in range(4)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda part: classify.predict_proba(images[part % 4 :: 4]), range(16)))
    assert all(torch.equal(result, expected[part % 4]) for part, result in enumerate(results))


def test_a_precision_that_a_model_cannot_have_is_refused() -> None:
    with pytest.raises(UsageError, match=r"int8 is not available: .* a ResNet has convolutions"):
        Classifier(model_factory.build_trained(model_factory.build_bit()), device="cpu", precision="int8")
    with pytest.raises(UsageError, match=r"its scales were never measured: vitrail convert MODEL OUT.safetensors"):
        Classifier(model_factory.build_trained(model_factory.build_vit()), device="cpu", precision="openvino-int8")
