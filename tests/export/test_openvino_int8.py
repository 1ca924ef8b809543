"""OpenVINO in int8."""

import dataclasses
import os
from pathlib import Path

import pytest
import torch

from tests import model_factory
from tests.conftest import peer
from vitrail.config import RotaryConfig
from vitrail.data.transforms import normalize
from vitrail.inference.precision import build_inference_functions
from vitrail.model.quantized import measure_activation_ranges
from vitrail.model.vit import ViT
from vitrail.weights.trained import Trained

openvino = peer("openvino")

INPUTS = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def add_ranges(model: ViT) -> Trained:
    trained = model_factory.build_trained(model)
    assert trained.preprocess is not None
    return dataclasses.replace(
        trained, activation_ranges=measure_activation_ranges(model, normalize(INPUTS, trained.preprocess))
    )


@pytest.mark.parametrize("rotary", [None, RotaryConfig(places="normalized")])
def test_ranges_hold_all_that_the_blocks_multiply(rotary: RotaryConfig | None) -> None:
    """The first is what the first norm leaves, then come queries and keys, turned; and of each there are two ends."""
    model = model_factory.build_vit(rotary=rotary)
    trained = add_ranges(model)
    assert trained.preprocess is not None
    with torch.inference_mode():
        tokens, _, grid = model.embed(normalize(INPUTS, trained.preprocess))
        first = model.blocks[0].norm1(tokens)
        queries, keys, _ = model.blocks[0].attn.project_qkv(first, rotary=model.compute_rotary(grid, tokens.device))
    assert len(trained.activation_ranges) == 2 * 6 * 3
    expected = [float(end) for values in (first, queries, keys) for end in values.aminmax()]
    assert trained.activation_ranges[:6] == pytest.approx(expected)
    assert not any(part._forward_pre_hooks for part in model.modules()), "nothing is left behind"


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trained:
    """A model whose graph, which takes seconds, is made once, and a cache of its own."""
    from vitrail.export import openvino_int8

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    trained = add_ranges(model_factory.build_vit(depth=1))
    built = openvino_int8.build_quantized_graph(trained)
    monkeypatch.setattr(openvino_int8, "build_quantized_graph", lambda _: built.clone())
    return trained


@pytest.mark.parametrize("damage", ["truncated", "missing", "unwritable"])
def test_a_cache_that_is_damaged_or_cannot_be_written_costs_time_alone(
    damage: str, cached: Trained, tmp_path: Path
) -> None:
    from vitrail.export import openvino_int8

    trained = cached
    if damage == "unwritable":
        (tmp_path / "vitrail").write_text("a file where a folder should be")
    expected = build_inference_functions(trained, "openvino-int8").probabilities(INPUTS)
    weights = openvino_int8._get_cache_folder(trained) / "model.bin"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:100])
    elif damage == "missing":
        weights.unlink()
    assert torch.equal(build_inference_functions(trained, "openvino-int8").probabilities(INPUTS), expected)
    assert weights.exists() == (damage != "unwritable")


def test_the_cache_keeps_the_newest(cached: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.export import openvino_int8

    monkeypatch.setattr(openvino_int8, "_MAX_CACHED_GRAPHS", 2)
    models = [dataclasses.replace(cached, temperature=1.0 + number) for number in range(3)]
    for number, trained in enumerate(models):
        build_inference_functions(trained, "openvino-int8")
        os.utime(openvino_int8._get_cache_folder(trained), (number, number))
    assert [openvino_int8._get_cache_folder(trained).exists() for trained in models] == [False, True, True]


@pytest.mark.parametrize("variant", ["plain", "relative", "hybrid", "rotary-index", "gated-normed", "bias-table"])
def test_it_answers_nearly_as_float32_does_with_int8_in_every_block(variant: str) -> None:
    """Queries, keys and values are products of their own, unless positions belong to the logits: six or four a block.

    Queries and keys are rounded then, and patches, but not those of a hybrid's features, whose range is not known. In
    the last block the class token's query is a product of its own.
    """
    from vitrail.export import openvino_int8

    trained = add_ranges(
        model_factory.build_vit(**model_factory.VARIANTS[variant] | {"depth": 2, "image_size": (32, 32)})
    )
    expected = build_inference_functions(trained).probabilities(INPUTS)
    functions = build_inference_functions(trained, "openvino-int8")
    probabilities = functions.probabilities(INPUTS)
    assert not torch.equal(probabilities, expected)
    assert (probabilities - expected).abs().max() < 0.05
    torch.testing.assert_close(functions.features(INPUTS), build_inference_functions(trained).features(INPUTS))
    again = build_inference_functions(trained, "openvino-int8").probabilities(INPUTS)  # from what was kept
    assert torch.equal(again, probabilities)
    graph = openvino.Core().read_model(openvino_int8._get_cache_folder(trained) / "model.xml")
    kinds = [node.get_type_name() for node in graph.get_ordered_ops()]
    assert kinds.count("FakeQuantize") == {"relative": 1 + 8, "bias-table": 1 + 9, "hybrid": 16}.get(variant, 1 + 16)
    assert "ScaledDotProductAttention" not in kinds


def test_normalising_moves_into_the_first_weights() -> None:
    """Of bytes from 0 to 1 the moved model says what the same rounded weights say of normalised pixels."""
    from vitrail.export import openvino_int8

    trained = add_ranges(model_factory.build_vit())
    model = trained.model
    assert isinstance(model, ViT)
    assert trained.preprocess is not None
    preprocess = dataclasses.replace(trained.preprocess, mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3))
    moved = openvino_int8.fold_normalization(dataclasses.replace(trained, preprocess=preprocess))
    weight, std = model.patch_embed.proj.weight, torch.tensor(preprocess.std).reshape(-1, 1, 1)
    with torch.inference_mode():
        exact = model(normalize(INPUTS, preprocess))
        step = (weight / std).abs().amax((1, 2, 3), keepdim=True) / 127
        weight.copy_((weight / std / step).round() * step * std)
        expected = model(normalize(INPUTS, preprocess))
        torch.testing.assert_close(moved.model(INPUTS / 255), expected, rtol=0, atol=1e-5)
    assert (expected - exact).abs().max() > 1e-4
