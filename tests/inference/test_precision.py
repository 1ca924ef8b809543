"""A model as functions of its inputs, in each precision."""

import dataclasses
import sys

import pytest
import torch
from torch import Tensor

from tests import model_factory
from vitrail import presets
from vitrail.data.transforms import normalize
from vitrail.errors import UsageError
from vitrail.inference.precision import _choose_chunk_size, build_inference_functions, list_available_precisions
from vitrail.model.quantized import has_exact_int8_products


def make_inputs(count: int) -> Tensor:
    return torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_small_models_compute_more_images_at_a_time() -> None:
    for name in ("l16", "b16", "s16", "ti16"):
        assert _choose_chunk_size(presets.get_preset_config(name)) == 8
    assert _choose_chunk_size(model_factory.build_bit().config) == 8
    assert _choose_chunk_size(model_factory.build_vit().config) > 100


def test_float32_is_the_model_itself() -> None:
    trained = model_factory.build_trained(model_factory.build_vit(), temperature=2.0)
    assert trained.preprocess is not None
    with torch.inference_mode():
        images = normalize(make_inputs(5), trained.preprocess)
        logits, features = trained.model(images), trained.model.compute_features(images)
    functions = build_inference_functions(trained)
    torch.testing.assert_close(
        functions.probabilities(make_inputs(5)), (logits / 2).softmax(dim=1), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(functions.features(make_inputs(5)), features, rtol=1e-5, atol=1e-5)
    multi_label = build_inference_functions(dataclasses.replace(trained, multi_label=True))
    torch.testing.assert_close(multi_label.probabilities(make_inputs(5)), (logits / 2).sigmoid(), rtol=1e-5, atol=1e-6)


def test_available_precisions_depend_on_the_model_and_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    vit, resnet = (
        model_factory.build_trained(model_factory.build_vit()),
        model_factory.build_trained(model_factory.build_bit()),
    )
    assert list_available_precisions(resnet) == ("float32",)
    assert "openvino-int8" not in list_available_precisions(vit), "it has no activation ranges"
    assert list_available_precisions(vit) == (
        ("float32", "bfloat16", "int8") if has_exact_int8_products() else ("float32", "bfloat16")
    )
    with pytest.raises(UsageError, match="a ResNet has convolutions"):
        build_inference_functions(resnet, "int8")
    monkeypatch.setattr("vitrail.model.quantized.has_exact_int8_products", lambda: False)
    assert list_available_precisions(vit) == ("float32", "bfloat16")


def test_openvino_is_named_with_its_extra_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = model_factory.build_trained(model_factory.build_vit(), activation_ranges=(0.0, 1.0) * 18)
    monkeypatch.setitem(sys.modules, "openvino", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"pip install 'vitrail\[openvino\]'"):
        build_inference_functions(trained, "openvino-int8")
