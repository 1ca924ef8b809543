"""The memory of training against what autograd saves, and against numbers by hand."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import making
from vitrail import presets
from vitrail.errors import UsageError
from vitrail.model import memory
from vitrail.model.build import Model
from vitrail.model.memory import ElementSizes

# On the CPU group norm and softmax take bf16 as it comes, and dropout's mask is a number of its input's kind.
ON_CPU = {"bf16": ElementSizes(matmul=2, norm=2, mask=2), "float32": ElementSizes(matmul=4, norm=4, mask=4)}
LARGER: dict[str, Any] = {"width": 96, "mlp": 160, "heads": 4, "image_size": (64, 64), "depth": 3}


def count_saved_bytes(model: Model, images: Tensor, *, bf16: bool) -> int:
    """Bytes of the storages that autograd saves, without weights, with pixels."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}  # alive, so that no address is given twice

    def keep(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage

    def refuse(_: object) -> Tensor:
        raise AssertionError("there is no backward pass")

    model.train()
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=bf16)
    with torch.autograd.graph.saved_tensors_hooks(keep, refuse), autocast:
        model(images)
    return sum(storage.nbytes() for storage in storages.values()) + images.nbytes


@pytest.mark.parametrize("precision", ON_CPU)
@pytest.mark.parametrize("change", making.VARIANTS.values(), ids=making.VARIANTS)
def test_a_vit_keeps_what_autograd_saves(change: dict[str, Any], precision: str) -> None:
    model = making.vit(**(LARGER | change))
    images = making.images(model.config, 8)
    activations = memory.count_activation_bytes(model.config, sizes=ON_CPU[precision])
    counted = memory.count_weight_copy_bytes(model.config, ON_CPU[precision]) + 8 * activations
    assert counted == pytest.approx(count_saved_bytes(model, images, bf16=precision == "bf16"), rel=0.03)


@pytest.mark.parametrize("precision", ON_CPU)
def test_a_resnet_keeps_what_autograd_saves(precision: str) -> None:
    model = making.bit(image_size=(64, 64))
    images = making.images(model.config, 8)
    activations = memory.count_activation_bytes(model.config, sizes=ON_CPU[precision])
    counted = memory.count_weight_copy_bytes(model.config, ON_CPU[precision]) + 8 * activations
    assert counted == pytest.approx(count_saved_bytes(model, images, bf16=precision == "bf16"), rel=0.03)


@pytest.mark.parametrize("precision", ON_CPU)
def test_a_hybrid_of_several_stages_keeps_what_autograd_saves(precision: str) -> None:
    stem = dataclasses.replace(making.STEM, units=(1, 2))
    model = making.vit(stem=stem, patch=1, image_size=(64, 64))
    images = making.images(model.config, 8)
    activations = memory.count_activation_bytes(model.config, sizes=ON_CPU[precision])
    counted = memory.count_weight_copy_bytes(model.config, ON_CPU[precision]) + 8 * activations
    assert counted == pytest.approx(count_saved_bytes(model, images, bf16=precision == "bf16"), rel=0.03)


@pytest.mark.parametrize("precision", ON_CPU)
def test_dropout_keeps_its_masks(precision: str) -> None:
    model = making.vit(**LARGER | {"depth": 6}).set_regularization(dropout=0.1)
    images = making.images(model.config, 8)
    counted = 8 * memory.count_activation_bytes(model.config, dropout=0.1, sizes=ON_CPU[precision])
    counted += memory.count_weight_copy_bytes(model.config, ON_CPU[precision])
    assert counted == pytest.approx(count_saved_bytes(model, images, bf16=precision == "bf16"), rel=0.03)


def test_branches_that_are_dropped_keep_nothing() -> None:
    """At 8 images the rates 0, 1/4 and 1/2 leave whole numbers of them, so nothing is left to chance."""
    model = making.vit(**LARGER | {"pool": "norm-mean"}).set_regularization(stochastic_depth=0.5)
    counted = 8 * memory.count_activation_bytes(model.config, stochastic_depth=0.5, sizes=ON_CPU["float32"])
    assert counted == pytest.approx(count_saved_bytes(model, making.images(model.config, 8), bf16=False), rel=0.03)


def test_b16_keeps_what_the_derivation_says() -> None:
    """By hand, in bf16 on a GPU: 20 D + 4 M + 4 H + 16 bytes a token and block, the last of which has one query."""
    n, d, m, h = 197, 768, 3072, 12
    block = n * (20 * d + 4 * m + 4 * h + 16)
    one = n * (4 * d + 8 + 2 * d + 4 * d) + 2 * d + 6 * h * n + 2 * d  # norm, input, k, v; q; softmax; output
    one += 4 * d + 8 + 2 * d + 4 * m  # norm and MLP of the class token
    embedding = 3 * 224 * 224 * 4 + 196 * 768 * 2
    head = 4 * d + 8 + 2 * d
    assert (
        memory.count_activation_bytes(presets.get_preset_config("b16"))
        == embedding + 11 * block + one + head
        == 62_508_384
    )


def test_recomputing_keeps_each_blocks_input_and_one_block() -> None:
    config = presets.get_preset_config("b16", pool="norm-mean", class_token=False)
    tokens, d, depth = 196, 768, 12
    block = tokens * (20 * d + 4 * 3072 + 4 * 12 + 16)
    saved_bytes = memory.count_activation_bytes(config) - memory.count_activation_bytes(config, recompute=True)
    assert saved_bytes == (depth - 1) * block - depth * tokens * d * 4


def test_the_parts_of_b16_by_hand() -> None:
    parameters = 86_567_656
    parts = memory.estimate_training_memory(presets.get_preset_config("b16"), optimizer="adam", ema=True, images=64)
    assert (parts.weights, parts.gradients, parts.optimizer, parts.ema) == (
        4 * parameters,
        4 * parameters,
        8 * parameters,
        4 * parameters,
    )
    assert parts.weight_copies == 2 * (12 * (4 * 768**2 + 2 * 768 * 3072) + 768 * 1000)
    assert parts.activations == 64 * 62_508_384
    assert parts.total == 20 * parameters + parts.weight_copies + parts.activations
    plain = memory.estimate_training_memory(presets.get_preset_config("b16"), optimizer="sgd", ema=False, images=64)
    assert (plain.optimizer, plain.ema) == (4 * parameters, 0)


def test_sharding_divides_the_state_and_puts_two_blocks_together() -> None:
    settings: dict[str, Any] = {"optimizer": "adam", "ema": True, "images": 64}
    whole = memory.estimate_training_memory(presets.get_preset_config("b16"), **settings)
    shard = memory.estimate_training_memory(presets.get_preset_config("b16"), **settings, shards=8)
    block = 4 * (768**2 + 768) + 2 * 768 * 3072 + 3072 + 768 + 4 * 768
    assert shard.weights == whole.weights // 8
    assert shard.optimizer == whole.optimizer // 8
    assert shard.weight_copies - whole.weight_copies == 2 * 4 * block
    assert shard.activations == whole.activations


def test_a_resnet_has_nothing_to_recompute() -> None:
    with pytest.raises(UsageError, match="keeps its activations"):
        memory.count_activation_bytes(presets.get_preset_config("bit-r50x1"), recompute=True)
