"""OpenVINO in int8."""

import dataclasses
import os
from pathlib import Path

import pytest
import torch

from tests import making
from tests.conftest import peer
from vitrail import compute
from vitrail.data.transforms import normalise
from vitrail.model.lowered import ranges
from vitrail.model.vit import ViT
from vitrail.weights.trained import Trained

openvino = peer("openvino")

VIEWS = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def ranged(model: ViT) -> Trained:
    trained = making.trained(model)
    assert trained.preprocess is not None
    return dataclasses.replace(trained, ranges=ranges(model, normalise(VIEWS, trained.preprocess)))


def test_ranges_hold_every_input_of_the_blocks_products() -> None:
    """The first is what the first norm leaves, and of each product there are two ends."""
    model = making.vit()
    trained = ranged(model)
    assert trained.preprocess is not None
    with torch.inference_mode():
        tokens, _, _ = model.embed(normalise(VIEWS, trained.preprocess))
        first = model.blocks[0].norm1(tokens)
    assert len(trained.ranges) == 2 * 4 * 3
    assert trained.ranges[:2] == pytest.approx((float(first.min()), float(first.max())))
    assert not any(part._forward_pre_hooks for part in model.modules()), "nothing is left behind"


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trained:
    """A model whose graph, which takes seconds, is made once, and a cache of its own."""
    from vitrail.export import openvino_int8

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    trained = ranged(making.vit(depth=1))
    made = openvino_int8.rounded(trained)
    monkeypatch.setattr(openvino_int8, "rounded", lambda _: made.clone())
    return trained


@pytest.mark.parametrize("damage", ["truncated", "missing", "unwritable"])
def test_a_cache_that_is_damaged_or_cannot_be_written_costs_time_alone(
    damage: str, cached: Trained, tmp_path: Path
) -> None:
    from vitrail.export import openvino_int8

    trained = cached
    if damage == "unwritable":
        (tmp_path / "vitrail").write_text("a file where a folder should be")
    expected = compute.functions(trained, "openvino-int8").probabilities(VIEWS)
    weights = openvino_int8._place(trained) / "model.bin"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:100])
    elif damage == "missing":
        weights.unlink()
    assert torch.equal(compute.functions(trained, "openvino-int8").probabilities(VIEWS), expected)
    assert weights.exists() == (damage != "unwritable")


def test_the_cache_keeps_the_newest(cached: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.export import openvino_int8

    monkeypatch.setattr(openvino_int8, "_GRAPHS", 2)
    models = [dataclasses.replace(cached, temperature=1.0 + number) for number in range(3)]
    for number, trained in enumerate(models):
        compute.functions(trained, "openvino-int8")
        os.utime(openvino_int8._place(trained), (number, number))
    assert [openvino_int8._place(trained).exists() for trained in models] == [False, True, True]


@pytest.mark.parametrize("variant", ["plain", "relative"])
def test_it_answers_nearly_as_float32_does_with_int8_in_every_block(variant: str) -> None:
    """Queries, keys and values are products of their own, unless positions belong to attention: six or four a block."""
    from vitrail.export import openvino_int8

    trained = ranged(making.vit(**making.VARIANTS[variant], depth=2))
    expected = compute.functions(trained).probabilities(VIEWS)
    found = compute.functions(trained, "openvino-int8")
    said = found.probabilities(VIEWS)
    assert not torch.equal(said, expected)
    assert (said - expected).abs().max() < 0.05
    torch.testing.assert_close(found.features(VIEWS), compute.functions(trained).features(VIEWS))
    again = compute.functions(trained, "openvino-int8").probabilities(VIEWS)  # from what was kept
    assert torch.equal(again, said)
    graph = openvino.Core().read_model(openvino_int8._place(trained) / "model.xml")
    kinds = [node.get_type_name() for node in graph.get_ordered_ops()]
    assert kinds.count("FakeQuantize") == (12 if variant == "plain" else 8)
