"""A model with its preprocessing, labels and origin: parts that do not fit are refused."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import model_factory
from vitrail.config import ViTConfig
from vitrail.errors import ModelError, UsageError
from vitrail.weights.load import load, save
from vitrail.weights.trained import (
    create_random,
    list_imagenet1k_labels,
    load_imagenet1k_classes,
    logits_to_probabilities,
    require_preprocess,
    resolve_labels,
)


def test_preprocessing_that_is_not_stated_is_asked_for_by_the_models_name() -> None:
    trained = model_factory.build_trained(model_factory.build_vit())
    assert require_preprocess(trained) == trained.preprocess
    bare = dataclasses.replace(trained, preprocess=None)
    with pytest.raises(UsageError, match=r"^cats does not say how images must be prepared.* --preprocess imagenet"):
        require_preprocess(bare, name="cats")
    with pytest.raises(UsageError, match=r"give a vitrail\.Trained, not ViT"):
        require_preprocess(trained.model)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_probabilities_are_a_softmax_or_one_sigmoid_a_class(temperature: float) -> None:
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    assert torch.equal(logits_to_probabilities(logits, temperature), (logits / temperature).softmax(dim=-1))
    multi_label = logits_to_probabilities(logits, temperature, multi_label=True)
    assert torch.equal(multi_label, (logits / temperature).sigmoid())


def test_nan_and_infinity_are_named(tmp_path: Path) -> None:
    for value in (float("nan"), float("inf")):
        model = model_factory.build_vit()
        with torch.no_grad():
            model.blocks[1].mlp.fc1.weight[3, 4] = value
        save(model_factory.build_trained(model), tmp_path / "model.safetensors", overwrite=True)
        with pytest.raises(ModelError, match=r"NaN or infinity in the weights of 'blocks\.1\.mlp\.fc1\.weight'"):
            load(tmp_path / "model.safetensors")


def test_a_trained_model_whose_parts_do_not_fit_is_refused() -> None:
    whole = model_factory.build_trained(model_factory.build_vit())
    with pytest.raises(UsageError, match="2 labels given for a head of 7"):
        dataclasses.replace(whole, labels=("a", "b"))


def test_a_temperature_that_is_none_is_refused() -> None:
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(UsageError, match=r"temperature is .* it must be from 0.001 to 1000"):
            model_factory.build_trained(model_factory.build_vit(), temperature=wrong)


@pytest.mark.parametrize(
    "ranges", [(-1.0, 1.0), (-1.0,) * 35, (1.0, -1.0) * 18, (float("nan"), 1.0) * 18, (0.0, float("inf")) * 18]
)
def test_ranges_that_cannot_be_are_refused(ranges: tuple[float, ...]) -> None:
    with pytest.raises(UsageError, match="range"):
        model_factory.build_trained(model_factory.build_vit(), activation_ranges=ranges)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label_thresholds": (0.5,) * 7}, "of a multi-label model"),
        ({"label_thresholds": (0.5,) * 6, "multi_label": True}, "6 label thresholds given for a head of 7 classes"),
        ({"label_thresholds": (0.5,) * 6 + (1.5,), "multi_label": True}, "a label threshold is 1.5"),
    ],
)
def test_label_thresholds_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        model_factory.build_trained(model_factory.build_vit(), **changes)


def test_imagenets_labels_are_those_of_its_classes_in_order() -> None:
    labels = list_imagenet1k_labels()
    assert labels == resolve_labels("imagenet1k") == tuple(entry.name for entry in load_imagenet1k_classes())
    assert (len(labels), labels[0]) == (1000, "tench, Tinca tinca")
    assert load_imagenet1k_classes()[0].wordnet_id == "n01440764"


def test_a_text_file_has_a_label_on_each_line(tmp_path: Path) -> None:
    path = tmp_path / "labels.txt"
    path.write_text("K\u00e4fer\nbee\n", encoding="utf-8")
    assert resolve_labels(str(path)) == ("K\u00e4fer", "bee")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="is not UTF-8 text"):
        resolve_labels(str(path))
    with pytest.raises(UsageError, match="neither 'imagenet1k' nor a text file"):
        resolve_labels(str(tmp_path / "missing.txt"))


def test_a_trained_model_is_shown_on_one_line() -> None:
    vit = model_factory.build_trained(model_factory.build_vit(classes=2), labels=("rose", "tulip"))
    config = vit.model.config
    assert isinstance(config, ViTConfig)
    shape = f"ViT of width {config.width} and depth {config.depth}, 32 x 32 pixels"
    assert repr(vit) == f"Trained({vit.origin.name!r}, {shape}, 2 classes: rose, tulip)"
    many = dataclasses.replace(create_random("bit-r50x1", image_size=32, num_classes=5), labels=tuple("abcde"))
    assert repr(many) == "Trained('bit-r50x1, seed 0', BiT, 32 x 32 pixels, 5 classes: a, b, c, ...)"
    assert repr(create_random("ti16", num_classes=0)).endswith("224 x 224 pixels, no head)")
